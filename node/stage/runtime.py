"""A member's work in an epoch, in order: begin, run, average, adopt, settle. The journey of a
micro-batch and of its gradient ends here: this file calls every engine, and no engine knows
another."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256

from torch import Tensor

from node.checkpoint.fetch import Partial, fetch
from node.checkpoint.state import StateKind, StateSnapshot
from node.consensus.election import Colleagues
from node.consensus.rules import Read
from node.core.errors import (
    LocalFault,
    NetworkFault,
    OutOfResources,
    PeerFault,
    Refused,
    StepFault,
)
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Plan, Version
from node.core.memory import let_go
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.epoch.bounds import Bounds
from node.epoch.plan_context import PlanContext, makes
from node.epoch.plan_validation import objection
from node.epoch.settings import TrainingSettings
from node.optim.parts import ParameterPart
from node.optim.settings import OptimSettings
from node.optim.step_limit import StepLimits
from node.pipeline.events import Direction, MicroBatchDone
from node.scheduler.costs import STEADY, LinkCost, Measured, capped, least
from node.scheduler.settings import SchedulerSettings
from node.stage.engines import Engines
from node.stage.inner_round import InnerRound, Rounds
from node.stage.local_checkpoints import (
    LocalCheckpoints,
    StageSnapshot,
    colleagues_of,
    copies_of,
    outer_step_of,
)
from node.stage.outer_port import SAVED, Outer, StageParts
from node.stage.state import StageState
from node.stage.state_export import StateExport
from node.stage.state_import import WAIT_SHARE
from node.wire.remote import HeldTensor

BASE_DONORS = 8
"""Peers that are asked for the parameters from which an epoch begins."""


class StageRuntime:
    """The work of one stage at one peer. Not reentrant: the service calls one member action after
    another."""

    def __init__(
        self,
        stage: StageState,
        engines: Engines,
        settings: TrainingSettings,
        optimizer: OptimSettings,
        sequence: int,
        me: PeerId,
        on_error: Callable[[str, BaseException], None] | None,
        outer: Outer,
        read: Read,
        parts: Sequence[ParameterPart] | None = None,
        colleagues: Colleagues | None = None,
        scheduler: SchedulerSettings | None = None,
    ) -> None:
        self.stage = stage
        self.engines = engines
        self.settings = settings
        self.sequence = sequence
        self.me = me
        self._scheduler = scheduler or SchedulerSettings()
        self._tasks = Tasks("work", on_error)
        self.state_export = StateExport(
            stage, engines, optimizer, settings.buddy_every, me, self._tasks
        )
        self.colleagues = Colleagues(me) if colleagues is None else colleagues
        """Peers that this one has worked with, also before a restart if its disk has them."""
        self.rounds = Rounds(stage, engines, optimizer, me, parts)
        size = sum(t.nbytes for t in stage.parameters().values())
        bounds = Bounds(settings.epochs, settings.target_batch * sequence)
        self.local_checkpoints = LocalCheckpoints(engines, stage.stage, self._tasks, bounds, size)
        limits = StepLimits(optimizer, settings.epochs)
        self._inner = InnerRound(stage, engines, self.state_export, self.rounds, sequence, limits)
        self.anchor, self.windows = outer(
            StageParts(stage, engines, self.state_export, self.rounds, self._tasks, me)
        )
        self.read = read
        """Reads the text of a change in a plan: the settings for how cells average."""
        self._fresh: dict[str, Tensor] = {}
        """Parts of the version under construction that have arrived."""
        self._made = self.stage.version
        """That version, by the leader's last message."""
        self._counted = 0
        """Tokens that count in it."""
        self._copied = False
        """True if it was copied whole from other peers."""
        self._round: ev.RoundArrived | None = None
        """The leader's last message about that version."""
        self.plan: Plan | None = None
        """The newest plan this peer takes part in."""
        self._lost: tuple[str, frozenset[PeerId]] = ("", frozenset())
        """Hash of a plan, and the members that its leader has found dead."""
        self.fetching = 1.0
        """Share of the state that has arrived; 1 while none is fetched."""
        self.fetched_at = 0.0
        """Time of the last bytes that arrived, in seconds of a steady clock."""
        self.tokens = 0
        """Tokens counted in the history of the version in place; 0 if this peer does not know."""
        self.room = 0
        """Bytes of optimizer state this peer can keep as an owner; 0 if unknown."""

    # ----------------------------------------------------------- state and costs

    def speed(self) -> float:
        """Micro-batches per second that this stage's device computes, forward and backward, limited
        by the caps on the traffic of this peer; 0 before it was measured."""
        p = self.engines.pipeline
        size = p.settings.micro_batch
        tensor = min(p.shape.nbytes(size, self.sequence, wire) for wire in p.settings.wires)
        return capped(self.engines.meter.speed, least(*self.engines.transport.caps()), tensor)

    def costs(self) -> Measured:
        """Costs of this peer's work and connections, as it measures them."""
        p = self.engines.pipeline
        work = p.timing.work
        loss = p.timing.loss
        now = p.clock.now()
        up, down = self.engines.transport.caps()
        return Measured(
            *(a.steady(STEADY) for a in (work[Direction.FORWARD], work[Direction.BACKWARD], loss)),
            slots=p.slots(),
            ways=tuple(
                (peer, LinkCost(tensor, trip, self.engines.transport.rate_left(peer)))
                for peer, (tensor, trip) in sorted(p.timing.ways(now).items())
            ),
            up=up,
            down=down,
            tera_s=self.engines.meter.steps.tera_s,
            product_s=self.engines.meter.steps.product_s,
        )

    def describe(
        self, stage: int, kind: StateKind, epoch: int | None, lineage: str
    ) -> tuple[Version, Mapping[str, HeldTensor]] | None:
        """The state this peer can give others (the donor's side of a fetch)."""
        if stage != self.stage.stage:
            return None
        if kind is StateKind.OUTER:
            return self.anchor.describe(epoch, lineage)
        if kind in (StateKind.SNAPSHOT, StateKind.MEAN):
            return self.windows.describe(kind, epoch)
        if kind is StateKind.BASE:
            base = self.stage.base()
            if base is None:
                return None
            return Version(0), base
        if kind is not StateKind.PARAMETERS:
            return self.state_export.describe(kind, epoch, lineage)
        if self.stage.empty:
            return None
        held = self.stage.held(epoch, lineage)
        if held is None:
            return None
        return held.version, held.parameters

    def listing(self, stage: int, kind: StateKind) -> Mapping[str, Version]:
        """Parts with optimizer state here, each with its version."""
        if stage != self.stage.stage:
            return {}
        return self.state_export.listing(kind)

    def objection(self, plan: Plan) -> str:
        """The reason why no peer could work by this plan, whoever signed it; empty if this peer
        finds the plan consistent."""
        settings = self.engines.pipeline.settings
        return objection(
            plan,
            self.me,
            self.stage.shapes,
            settings,
            self.read,
            scheduler=self._scheduler,
            micro_batches=self.settings.target_batch // settings.micro_batch,
        )

    # ----------------------------------------------------------- the epoch

    async def begin(self, plan: Plan, listener: bool) -> None:
        """Take part: the pipeline accepts the plan's frames, and state of gained parts is fetched
        meanwhile."""
        if self.plan is not None and self.plan.epoch >= plan.epoch:
            # The swarm begins the epoch anew: no step of the earlier attempt may count.
            self.engines.owner.abort(plan.epoch)
            self.engines.cell.void(plan.epoch)
        nbytes = sum(tensor.nbytes for tensor in self._fresh.values())
        held = [self._fresh]
        self._fresh = {}
        let_go(held, nbytes)
        self._copied = False
        self.plan = plan
        self._round = None
        self._inner.begin()
        if listener:
            # A listener's state is not the swarm's, and it settles nothing: the rounds before and
            # after this one do not concern it.
            self.engines.cell.void(plan.epoch)
            self.engines.cell.forget(plan.epoch - 1)
        else:
            if self.stage.version == plan.base:
                # This plan makes the version final. A newcomer has made no update that a leader
                # could undo, so it has settled nothing before.
                self._stands()
            self.tokens = plan.tokens
        self.windows.begin(plan, self.read(plan.change).outer, listener)
        self.engines.pipeline.reset(plan.epoch)
        self.engines.pipeline.set_plan(plan)
        cell = [m.peer for m in plan.stage(self.stage.stage)]
        self.engines.cell.planned(plan.epoch, plan.hash, cell)
        self.state_export.begin(plan, listener)
        self._leave_out()

    def enter(self, plan: Plan) -> None:
        """The plan founds the cell to which this peer belongs from now on, and which plans for
        itself."""
        self.plan = plan
        self.engines.pipeline.reset(plan.epoch)

    def lost(self, plan_hash: str, dead: Collection[PeerId]) -> None:
        """The leader has found these members of a plan dead: nothing here waits for them any
        longer, from the beginning if the plan is still to begin."""
        about, before = self._lost
        if about == plan_hash:
            dead = {*before, *dead}
        self._lost = plan_hash, frozenset(dead)
        self._leave_out()

    def _leave_out(self) -> None:
        """Wait for no member of the plan in force that was found dead."""
        plan = self.plan
        if plan is None:
            return
        for peer in self.lost_in(plan):
            self.engines.transport.doubt(peer)
            self.engines.pipeline.gone(peer)
            self.engines.cell.lost(plan.epoch, peer)

    def lost_in(self, plan: Plan) -> tuple[PeerId, ...]:
        """The members of ``plan`` that its leader has found dead."""
        about, dead = self._lost
        if about != plan.hash:
            return ()
        return tuple(sorted(dead & {m.peer for m in plan.members}))

    async def run(self, plan: Plan, done: Callable[[MicroBatchDone], None]) -> None:
        """Start this ends peer's micro-batches and report each as it finishes."""
        text = self.engines.text
        if text is None:
            return
        mine = [p for p in plan.paths if p.origin == self.me]
        text.expect(position for path in mine for position in path.samples)
        await self.engines.pipeline.origin.run(mine, lambda path: text.fetch(path.samples), done)

    async def average(self, plan: Plan, r: ev.RoundArrived, listener: bool) -> ev.RoundEnded:
        """Make one attempt of the round that ends the epoch: the inner round of the cell, or an
        outer round with the means of a window."""
        self._made = makes(plan, r.dropped)
        self._counted = r.tally.tokens
        self._copied = False
        self._round = r
        rounds = self.windows if plan.outer else self._inner
        ended, self._fresh = await rounds.attempt(plan, r, listener)
        return ended

    async def copy(self, plan: Plan, r: ev.RoundArrived) -> ev.RoundEnded:
        """Fetch the fresh parameters whole from members that have committed them."""
        self._made = makes(plan, r.dropped)
        self._counted = r.tally.tokens
        self._round = r
        impossible: tuple[PeerId, ...] = ()
        try:
            found = await self._fetch(r.sources, self._made, r.digest or None)
            if why := await self._objection(plan, found.tensors):
                impossible = tuple(sorted(found.sources))
                raise PeerFault(impossible[0], why)
            if plan.outer:
                await self.windows.copied(plan, r.sources, self._made, sum(found.sources.values()))
            self._fresh = found.tensors
            self._copied = True
            missing: tuple[str, ...] = ()
        except PeerFault as e:
            self.engines.journal.emit(
                "training", "copy-failed", str(e), "warning", epoch=plan.epoch
            )
            missing = tuple(sorted(self.stage.shapes))
        failed = impossible
        return ev.RoundEnded(plan.epoch, plan.term, r.attempt, (), missing, failed, impossible)

    async def _objection(self, plan: Plan, copied: Mapping[str, Tensor]) -> str:
        """The reason why no step of this plan can have made the copied parameters; empty if there
        is none, or if this peer cannot tell."""
        me = plan.member(self.me)
        if plan.outer or me is None or not me.current or self.stage.version != plan.base:
            return ""
        return await asyncio.to_thread(self._inner.objection, plan, copied)

    async def adopt(self, plan: Plan) -> str:
        """Put the fresh parameters in place as the next version. Returns its digest."""
        if plan.outer and not self._copied:
            await self.windows.takes()
        digest = await self.engines.aside(self.stage.adopt, self._fresh, self._made)
        self.tokens = plan.tokens + self._counted
        self.state_export.adopted()
        return digest

    async def settle(self, epoch: int, plan: Plan | None) -> None:
        """The version in place is final: its optimizer state counts from here, and a checkpoint is
        written when one is due."""
        self.engines.cell.forget(epoch - 1)
        self._stands()
        self.state_export.settled(epoch, plan)
        due = self.local_checkpoints.settled(epoch)
        # If the stage was left out, a version older than the plan's becomes final, and its context
        # is not known here.
        if plan is None or plan.base != self.stage.settled:
            return
        # Where a cell divides, an older checkpoint has the samples of both cells.
        divides = bool(plan.parent or plan.founds) and self.local_checkpoints.writes
        if due or divides:
            self.local_checkpoints.save(self._snapshot(plan.base, PlanContext.before(plan)))

    def _stands(self) -> None:
        """The version in place is final, and the anchor is the one that belongs to it."""
        if self.stage.version == self.stage.settled:
            # An anchor that came with a copy is of a version that was not put in place.
            self.anchor.rolled_back()
        self.stage.settle()
        self.anchor.settled()

    def mind_the_disk(self) -> None:
        """Write the newest final version in the middle of an epoch, or of a complete run, if it
        would come too late afterwards, or if it found no room before."""
        plan = self.plan
        if (
            plan is not None
            and plan.base == self.stage.settled
            and self.local_checkpoints.overdue()
        ):
            self.local_checkpoints.save(self._snapshot(plan.base, PlanContext.before(plan)))

    async def go_to(self, version: Version, how: str) -> None:
        """Go to another version. ``how`` is "roll-back" to undo the last one, "checkpoint" to load
        one from the disk, or "left out" to keep the parameters in place as ``version`` too, because
        the stage was left out meanwhile. Raises Refused if a checkpoint is missing or
        unreadable."""
        e = self.engines
        epoch = version.epoch
        self.engines.cell.void(epoch)
        if how == "roll-back":
            e.owner.abort(epoch)
            await self.engines.aside(self.stage.roll_back)
            self.anchor.rolled_back()
            self.state_export.went_to(version)
        elif how == "left out":
            self._stands()
            self.stage.stand(version)
            self.state_export.stood(version)
            e.journal.emit(
                "training",
                "stage-back",
                f"this stage was left out until epoch {epoch} and goes on",
                epoch=epoch,
            )
            return
        else:
            await self.restore(version)
        e.journal.emit(
            "training",
            "went-back",
            f"epoch {epoch} is in place again ({how})",
            "warning",
            epoch=epoch,
        )

    async def finish(self, plan: Plan) -> None:
        """The run is complete: keep serving forward passes, write the last checkpoint."""
        self.plan = plan
        self.engines.pipeline.reset(plan.epoch)
        self.engines.pipeline.set_plan(plan)
        self.state_export.finished(plan)
        # A peer that was still catching up holds another version, and must not save it under this
        # name.
        if self.stage.version != plan.base:
            return
        # Nobody undoes the last version. A newcomer has settled nothing before, as in an epoch.
        self._stands()
        if self.local_checkpoints.writes:
            # The last checkpoint is the one that must not be skipped.
            await self.local_checkpoints.saved()
            self.local_checkpoints.save(self._snapshot(plan.base, PlanContext.before(plan)))

    async def keep(self, limit_s: float, *, always: bool = False) -> bool:
        """Write the committed state before the process ends: the version that is final, and the one
        in place if it can still be undone, because others may know it to be committed. Return False
        if that failed or took longer than ``limit_s`` seconds. ``always``: also where the settings
        want no checkpoints.

        Nothing may change the state meanwhile.
        """
        if not (always or self.local_checkpoints.writes):
            return True
        # An adoption goes on there even if its caller was cancelled.
        await self.engines.aside(lambda: None)
        plan = self.plan
        r = self._round
        stage = self.stage
        if plan is None:
            return True  # everything here came from the disk or from others
        kept: list[StageSnapshot] = []
        if plan.base == stage.settled:
            kept.append(self._snapshot(plan.base, PlanContext.before(plan)))
        if r is not None and stage.version != stage.settled and stage.version == self._made:
            owners = plan.owners
            if not plan.outer:
                owners = plan.owners | r.owners
            tokens = plan.tokens + self._counted
            context = PlanContext.after(plan, r.dropped, owners, tokens)
            kept.append(self._snapshot(stage.version, context))
        return await self.local_checkpoints.keep(kept, limit_s)

    def _snapshot(self, version: Version, context: PlanContext) -> StageSnapshot:
        """The content of a checkpoint of the version in place or the one before."""
        own = self.state_export.held_at(version)
        copies = dict(self.state_export.spares)
        return StageSnapshot(
            version,
            context,
            self.stage.at(version),
            own | self.anchor.saved(version),
            {n: copy for n, copy in copies.items() if n not in own},
            self.colleagues.all,
            self.anchor.step_at(version),
        )

    # ----------------------------------------------------------- state

    async def restore(self, version: Version) -> None:
        """Load a checkpoint of this stage: parameters, the optimizer state of the parts this peer
        owned, and copies of other owners' state.

        Raises Refused if there is no checkpoint of that version, or it cannot be read; then nothing
        has changed.
        """
        e = self.engines
        epoch = version.epoch
        found = await self.local_checkpoints.load(version, self.stage.shapes)
        await self.engines.aside(self.stage.adopt, found.parameters, version)
        self.stage.settle()
        self._holds_nothing(version)
        self.windows.forget()
        self.anchor.restored(found.optimizer, outer_step_of(found.meta))
        self.colleagues.recall(colleagues_of(found.meta))
        copies = copies_of(found.meta)
        for name, state in found.optimizer.items():
            if name in copies:
                self.state_export.spares.put(name, copies[name], state)
            elif not name.endswith(SAVED):
                try:
                    await e.aside(
                        e.owner.load_state, name, self.stage.shapes[name], state, epoch - 1
                    )
                except StepFault as why:
                    e.journal.emit(
                        "checkpoint",
                        "state-unusable",
                        f"optimizer state of {name} is not used: {why}",
                        "warning",
                    )
        self.tokens = self.local_checkpoints.tokens(epoch, found.meta)

    async def join(
        self,
        donors: Sequence[PeerId],
        epoch: int | None,
        digest: str | None = None,
        partial: Partial | None = None,
    ) -> bool:
        """Fetch the stage's parameters from members at a version most of them agree on, or at
        ``epoch``. Return False if that version is older than the one in place, which stays.

        With ``digest`` only the state with that digest is taken. When this raises NoDonor,
        ``partial`` keeps the parts that have arrived.
        """
        version = None if epoch is None else Version(epoch)
        found = await self._fetch(donors, version, digest, partial)
        if found.version.epoch < self.stage.version.epoch:
            return False
        await self._take(found)
        return True

    async def fetch_base(
        self, version: Version, donors: Sequence[PeerId], digest: str, within_s: float
    ) -> None:
        """Fetch the parameters of ``version``, from which an epoch begins in which this peer works,
        and put them in place. Raises Refused if no donor gives them within ``within_s`` seconds, or
        if others are in place afterwards: a bit may flip on the way."""
        draw = sorted(donors, key=lambda p: sha256(f"{self.me}/{p}".encode()).digest())
        try:
            # Donors that give a piece now and then would hold up the plans that follow.
            async with asyncio.timeout(within_s):
                found = await self._fetch(draw[:BASE_DONORS], version, digest)
        except TimeoutError as e:
            raise Refused(f"its parameters did not come within {within_s:.0f} s") from e
        except (PeerFault, OutOfResources) as e:
            raise Refused(f"its parameters could not be fetched: {e}") from e
        self.engines.cell.void(version.epoch)
        await self._take(found)
        if self.stage.digest != digest:
            raise Refused("the parameters in place are not those that were fetched")

    async def _take(self, found: StateSnapshot) -> None:
        """Put fetched parameters in place."""
        await self.engines.aside(self.stage.adopt, found.tensors, found.version)
        self.stage.settle()
        self._holds_nothing(found.version)
        self.windows.forget()
        self.tokens = 0

    async def take_base(self, donors: Sequence[PeerId], digest: str, partial: Partial) -> None:
        """Fetch the base that the run begins from and put it in place. Raises NoDonor,
        OutOfResources."""
        found = await self._fetch(donors, Version(0), digest, partial, StateKind.BASE)
        await self.engines.aside(self.stage.begin, found.tensors)
        self.anchor.begin()

    def _holds_nothing(self, version: Version) -> None:
        """Parameters came from elsewhere: no optimizer state here belongs to them."""
        self.state_export.hold_nothing()
        self.state_export.went_to(version)

    async def _fetch(
        self,
        donors: Sequence[PeerId],
        version: Version | None,
        digest: str | None,
        partial: Partial | None = None,
        kind: StateKind = StateKind.PARAMETERS,
    ) -> StateSnapshot:
        e = self.engines
        frozen = self.stage.frozen
        shapes = self.stage.shapes
        if kind is StateKind.BASE and frozen is not None:
            shapes = {name: tuple(t.shape) for name, t in frozen.items()}

        def progress(done: int, total: int) -> None:
            self.fetching = done / total if total else 1.0
            self.fetched_at = time.monotonic()

        self.fetching = 0.0
        self.fetched_at = time.monotonic()
        try:
            snapshot = await fetch(
                e.transport,
                list(donors),
                self.stage.stage,
                kind,
                version,
                shapes,
                progress=progress,
                expected_digest=digest,
                settings=e.store.settings,
                partial=partial,
                most_epoch=self.settings.epochs,
            )
        finally:
            self.fetching = 1.0
        size = sum(snapshot.sources.values())
        epoch = snapshot.version.epoch
        e.journal.emit(
            "checkpoint",
            "state-fetched",
            f"fetched {size / 1e6:.1f} MB of {kind} of epoch {epoch} from "
            f"{len(snapshot.sources)} peers",
            epoch=epoch,
            bytes=size,
        )
        return snapshot

    async def handed_over(self, timeout_s: float = 10.0) -> bool:
        """Wait until other peers have fetched the optimizer state of every part held here.

        Return False if no peer is there to take it, or nothing more was fetched for ``timeout_s``,
        or for the longest time that a step would have waited for it.
        """
        return await self.state_export.handed_over(
            max(timeout_s, WAIT_SHARE * self.rounds.figures.deadline_s)
        )

    async def close(self) -> None:
        """Let a checkpoint that is being written finish, end everything else."""
        await self.local_checkpoints.saved()
        await self._tasks.close()
        self.local_checkpoints.close()

    # ----------------------------------------------------------- forward only

    async def evaluate(self, plan: Plan) -> float:
        """Mean loss, nats per token, on the held-out text through the live swarm. Raises PeerFault,
        and NetworkFault when the text cannot be read in the time of an epoch."""
        text = self.engines.text
        if text is None:
            return 0.0
        count = min(self.settings.eval_batches, text.held_out_count())
        try:
            async with asyncio.timeout(plan.deadline_s):
                pairs = [await text.fetch_held_out(i) for i in range(count)]
        except (OSError, LocalFault) as e:  # a time-out is an OSError
            raise NetworkFault(
                f"the held-out text did not come: {e or 'not in the time of an epoch'}",
                "it is read the next time",
            ) from e
        stages = sorted({m.stage for m in plan.members if m.current} - {ENDS})
        cells = {s: [m.peer for m in plan.stage(s) if m.current] for s in stages}
        # Before the first plan nobody is a member, and a stage has room for one batch of a guest.
        turn = asyncio.Semaphore(len(pairs) if self.plan is not None else 1)

        async def measured(i: int, x: Tensor, y: Tensor) -> tuple[float, int]:
            # One replica of each stage, in turn.
            hops = tuple(Hop(s, peers[i % len(peers)]) for s, peers in cells.items())
            async with turn:
                return await self.engines.pipeline.evaluate(hops, x, y)

        sums = await asyncio.gather(*(measured(i, x, y) for i, (x, y) in enumerate(pairs)))
        tokens = sum(n for _, n in sums)
        if not tokens:
            return 0.0
        return sum(loss for loss, _ in sums) / tokens
