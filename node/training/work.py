"""What a member does in an epoch, told in order: begin, run, average, adopt, settle. The journey of a micro-batch
and of its gradient ends here; every engine is called from this file and none of them knows another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from node.averaging.request import RoundRequest
from node.averaging.service import CellRound
from node.checkpoint.fetch import fetch
from node.checkpoint.state import NoDonor, StateKind
from node.checkpoint.store import CheckpointStore
from node.core.errors import LocalFault, OutOfResources, PeerFault
from node.core.ids import ENDS, PeerId, RoundId, short
from node.core.journey import Hop, Path, Plan
from node.core.tasks import Tasks
from node.optim.owner import Owner, state_shapes
from node.optim.ownership import ownership_hash
from node.optim.settings import OptimSettings
from node.pipeline.service import MicroBatchDone, Pipeline
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.training import events as ev
from node.training.meter import Meter
from node.training.settings import TrainingSettings
from node.training.stage import StageState
from node.training.text import Text
from node.transport.port import TransportPort

TAKE_OVER_TRIES, TAKE_OVER_PAUSE_S = 5, 0.2


@dataclass(frozen=True)
class Engines:
    """Everything a member works with; ``text`` only at the ends. ``heavy`` runs what must not hold up the loop."""

    transport: TransportPort
    pipeline: Pipeline
    cell: CellRound
    owner: Owner
    store: CheckpointStore
    heavy: Executor
    journal: Journal
    metrics: Metrics
    meter: Meter
    text: Text | None = None


@dataclass
class _Epoch:
    """What is kept of one epoch until it is settled."""

    plan: Plan
    gradients: dict[str, Tensor] | None = None
    tokens: int = 0
    fresh: dict[str, Tensor] | None = None
    arriving: asyncio.Task[None] | None = None
    compute_s: float = 0.0


class Work:
    """One stage's labour. Not reentrant: the service calls one member action after another."""

    def __init__(
        self, stage: StageState, engines: Engines, settings: TrainingSettings, optimizer: OptimSettings, sequence: int, me: PeerId,
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:  # fmt: skip
        self.stage, self.engines, self.settings, self.me = stage, engines, settings, me
        self._optimizer, self._sequence, self._every = optimizer, sequence, engines.store.settings.every
        self._tasks = Tasks("work", on_error)
        self._epoch: _Epoch | None = None
        self._plan: Plan | None = None
        self._settled = stage.epoch
        self._owned: frozenset[str] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._shapes = {name: tuple(t.shape) for name, t in stage.parameters().items()}
        self.rounds_done = self.rounds_failed = 0
        self.round_s = 0.0
        self.round_bytes = self.round_members = self.round_contributors = 0
        self.fetching = 1.0
        self.momentum_lost = 0

    # ------------------------------------------------------------ what is here

    def checkpoints(self) -> tuple[int, ...]:
        """Epochs this peer could go back to from its disk."""
        return tuple(self.engines.store.epochs(self.stage.stage))

    def speed(self) -> float:
        """Micro-batches per second this stage's device does, forward and backward; 0 before it was measured."""
        return self.engines.meter.speed

    def describe(self, stage: int, kind: StateKind, epoch: int | None) -> tuple[int, Mapping[str, Tensor]] | None:
        """The state this peer can give others (the donor's side of a fetch)."""
        if stage != self.stage.stage:
            return None
        if kind is StateKind.PARAMETERS:
            return (self.stage.epoch, self.stage.parameters()) if epoch in (None, self.stage.epoch) else None
        # Before the plan of this epoch has settled the last update here, the state is one epoch old: not held yet.
        if epoch not in (None, self._settled):
            return None
        flat = {f"{name}/{key}": t for name in self._shapes for key, t in self.engines.owner.state(name).items()}
        return self._settled, flat

    def objection(self, plan: Plan) -> str:
        """Why nobody could work by this plan, whoever signed it; empty for one that holds together here."""
        stages, size = self.engines.pipeline.settings.stages, self.engines.pipeline.settings.micro_batch
        current = {(m.stage, m.peer) for m in plan.members if m.current}
        if any((self.stage.stage, plan.owners.get(name)) not in current for name in self._shapes):
            return "a parameter of this stage has no owner among its members"
        for path in plan.paths:
            if len(path.samples) != size or (ENDS, path.origin) not in current:
                return "a micro-batch of the wrong size, or without an ends peer"
            if [h.stage for h in path.hops] != list(range(1, stages + 1)):
                return "a path that does not visit every stage in order"
            if any((h.stage, h.peer) not in current for h in path.hops):
                return "a path over somebody who is no current member"
        return ""

    # ------------------------------------------------------------ the epoch

    async def begin(self, plan: Plan, listener: bool) -> None:
        """Take part: the pipeline accepts the plan's frames, and state of parts gained is fetched meanwhile."""
        if self._epoch is not None and self._epoch.plan.epoch >= plan.epoch:
            self._void(plan.epoch)
        self._epoch = epoch = _Epoch(plan, compute_s=self.engines.meter.compute_s)
        self._plan = plan
        if listener:
            # What it holds is not the swarm's, and may be of a later epoch than the swarm has gone back to.
            self.engines.cell.void(plan.epoch)
            for name in self.engines.owner.names():
                self.engines.owner.drop(name)
        self.engines.pipeline.reset(plan.epoch)
        self.engines.pipeline.set_plan(plan)
        gained = [p for p, o in plan.owners.items() if o == self.me and p in self._shapes and plan.moved.get(p, o) != o]
        if gained and not listener:
            epoch.arriving = self._tasks.spawn(self._take_over(plan, gained), "take-over")

    async def run(self, plan: Plan, done: Callable[[ev.Result], None]) -> None:
        """Start this ends peer's micro-batches and report each as it finishes."""
        text = self.engines.text
        if text is None:
            return
        mine = [p for p in plan.paths if p.origin == self.me]

        def finished(result: MicroBatchDone) -> None:
            done(ev.Result(result.index, result.counted, result.loss_sum, result.tokens))

        def batch_of(path: Path) -> tuple[Tensor, Tensor]:
            return text.at(path.samples)

        await self.engines.pipeline.run(mine, batch_of, finished)

    async def average(self, plan: Plan, r: ev.RoundArrived, listener: bool) -> ev.RoundEnded:
        """One attempt of the cell's round: gradients to their owners, the owners' steps, fresh parameters to all."""
        epoch = self._of(plan)
        if epoch.gradients is None and not listener:
            await self.engines.pipeline.receipts(plan.epoch, r.dropped)
            epoch.gradients, epoch.tokens = self.engines.pipeline.take_gradients(plan.epoch)
            self._measure(epoch)
        if epoch.arriving is not None:
            await epoch.arriving
        owners = self._owners(plan, r)
        self._owned = frozenset(name for name, owner in owners.items() if owner == self.me)
        cell = [m for m in plan.cell(self.stage.stage) if m.peer not in r.dead]
        self._say_what_is_lost(plan, owners)
        request = RoundRequest(
            round=RoundId(plan.epoch, plan.term, r.attempt),
            plan_hash=plan.hash,
            members=tuple(m.peer for m in cell),
            listeners=frozenset(m.peer for m in cell if not m.current),
            owners=owners,
            ownership_hash=ownership_hash(owners),
            shapes=self._shapes,
            gradients=None if listener else epoch.gradients,
            tokens=0 if listener else epoch.tokens,
            deadline_s=r.deadline_s,
        )
        try:
            outcome = await self.engines.cell.run(request, lambda mean: self._step(plan.epoch, mean))
        except ValueError as e:
            # The leader's note contradicts its plan: this attempt cannot be run by anybody.
            self.engines.journal.emit("averaging", "round-absurd", str(e), "error", epoch=plan.epoch)
            return ev.RoundEnded(plan.epoch, plan.term, r.attempt, (), tuple(sorted(self._shapes)), (), 0)
        epoch.fresh = dict(outcome.fresh)
        self._count(outcome.seconds, outcome.nbytes, len(cell), len(outcome.contributors), outcome.complete)
        for peer, why in {**outcome.failed, **outcome.refused}.items():
            self.engines.journal.emit(
                "averaging", "member-failed", f"peer {short(peer)}: {why}", "warning", peer=peer, epoch=plan.epoch
            )
        return ev.RoundEnded(
            plan.epoch, plan.term, r.attempt, tuple(sorted(outcome.fresh)), outcome.missing,
            tuple(sorted(p for p in outcome.failed if p != self.me)), len(outcome.contributors),
        )  # fmt: skip

    async def copy(self, plan: Plan, r: ev.RoundArrived) -> ev.RoundEnded:
        """Fetch the fresh parameters whole from members that have committed them."""
        epoch = self._of(plan)
        try:
            epoch.fresh = await self._fetch_parameters(r.sources, plan.epoch + 1)
            missing: tuple[str, ...] = ()
        except PeerFault as e:
            self.engines.journal.emit("training", "copy-failed", str(e), "warning", epoch=plan.epoch)
            missing = tuple(sorted(self._shapes))
        return ev.RoundEnded(plan.epoch, plan.term, r.attempt, (), missing, (), 0)

    async def adopt(self, plan: Plan) -> str:
        """Put the fresh parameters in place as the next version; the digest of it."""
        fresh = self._of(plan).fresh or {}
        return await self._heavy(self.stage.adopt, fresh, plan.epoch + 1)

    async def settle(self, epoch: int, plan: Plan | None) -> None:
        """The version in place is the swarm's: optimizer state counts from here, and now and then it is written down."""
        e = self.engines
        e.owner.commit(epoch - 1, self._owned)
        if self._owned is not None:
            # Their new owners have stepped them: what is left here would only grow stale.
            for name in set(e.owner.names()) - self._owned:
                e.owner.drop(name)
        e.cell.forget(epoch - 1)
        self.stage.settle()
        self._settled = epoch
        if self._every and epoch % self._every == 0:
            await self._save(epoch, plan)

    async def go_to(self, epoch: int, how: str) -> None:
        """Put an older version in place: the one before, or one from the disk. Raises Refused when it is unreadable."""
        e = self.engines
        e.cell.void(epoch)
        if how == "roll-back":
            e.owner.abort(epoch)
            await self._heavy(self.stage.roll_back, epoch)
            self._settled = epoch
        else:
            await self.restore(epoch)
        e.journal.emit("training", "went-back", f"epoch {epoch} is in place again ({how})", "warning", epoch=epoch)

    async def finish(self, plan: Plan) -> None:
        """The run is complete: keep serving forward passes, write the last checkpoint."""
        self._plan = plan
        self.engines.pipeline.reset(plan.epoch)
        self.engines.pipeline.set_plan(plan)
        if self._every:
            await self.saved()  # the last checkpoint is the one that must not be skipped
            await self._save(plan.epoch, plan)

    # ------------------------------------------------------------ state

    async def restore(self, epoch: int) -> None:
        """Load a checkpoint of this stage: parameters and the optimizer state of the parts this peer owned."""
        e = self.engines
        found = await self._heavy(e.store.load, self.stage.stage, epoch)
        await self._heavy(self.stage.adopt, found.parameters, epoch)
        self.stage.settle()
        self._settled, self._owned = epoch, None
        for name in e.owner.names():
            e.owner.drop(name)
        for name, state in found.optimizer.items():
            e.owner.load_state(name, self._shapes[name], state, epoch - 1)

    async def join(self, donors: Sequence[PeerId], epoch: int | None) -> None:
        """Fetch the stage's parameters from members at their committed epoch. Raises NoDonor."""
        self.fetching = 0.0
        tensors, found = await self._fetch(donors, epoch)
        await self._heavy(self.stage.adopt, tensors, found)
        self.stage.settle()
        self._settled = found
        self.fetching = 1.0

    async def _fetch_parameters(self, donors: Sequence[PeerId], epoch: int) -> dict[str, Tensor]:
        return (await self._fetch(donors, epoch))[0]

    async def _fetch(self, donors: Sequence[PeerId], epoch: int | None) -> tuple[dict[str, Tensor], int]:
        e = self.engines

        def progress(done: int, total: int, rate: float, donor: PeerId) -> None:
            self.fetching = done / total if total else 1.0

        snapshot = await fetch(
            e.transport, list(donors), self.stage.stage, StateKind.PARAMETERS, epoch, self._shapes, progress,
            settings=e.store.settings,
        )  # fmt: skip
        size = sum(snapshot.sources.values())
        e.journal.emit(
            "checkpoint", "state-fetched",
            f"fetched {size / 1e6:.1f} MB of epoch {snapshot.epoch} from {len(snapshot.sources)} peers", epoch=snapshot.epoch, bytes=size,
        )  # fmt: skip
        return snapshot.tensors, snapshot.epoch

    async def _take_over(self, plan: Plan, parts: Sequence[str]) -> None:
        """Fetch the optimizer state of parts gained from the peer that stepped them before."""
        e = self.engines
        by_donor: dict[PeerId, list[str]] = {}
        for part in parts:
            by_donor.setdefault(plan.moved[part], []).append(part)
        for donor, names in by_donor.items():
            shapes = {f"{n}/{k}": s for n in names for k, s in state_shapes(n, self._shapes[n], self._optimizer).items()}
            try:
                got = await self._fetch_optimizer(donor, plan.epoch, shapes)
            except PeerFault as error:
                text = f"optimizer state of {len(names)} parts did not come: {error}"
                e.journal.emit("optim", "state-not-moved", text, "warning", parts=len(names))
                continue
            try:
                for name in names:
                    state = {k.rpartition("/")[2]: t for k, t in got.items() if k.rpartition("/")[0] == name}
                    e.owner.load_state(name, self._shapes[name], state, plan.epoch - 1)
            except ValueError as error:
                e.transport.fault(donor, f"optimizer state that cannot be: {error}", 1.0)
                continue
            text = f"took over the optimizer state of {len(names)} parts from {short(donor)}"
            e.journal.emit("optim", "state-moved", text, parts=len(names))

    async def _fetch_optimizer(self, donor: PeerId, epoch: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        e = self.engines
        for attempt in range(TAKE_OVER_TRIES):
            try:
                snapshot = await fetch(
                    e.transport, [donor], self.stage.stage, StateKind.OPTIMIZER, epoch, shapes, settings=e.store.settings
                )
                return snapshot.tensors
            except NoDonor:
                # The plan reaches peers at slightly different moments; the donor may not have settled yet.
                if attempt == TAKE_OVER_TRIES - 1:
                    raise
                await asyncio.sleep(TAKE_OVER_PAUSE_S)
        raise NoDonor("optimizer state", {})

    async def _save(self, epoch: int, plan: Plan | None) -> None:
        """Write a checkpoint in the background; one at a time, and a full disk stops nobody."""
        e = self.engines
        if self._saving is not None and not self._saving.done():
            e.journal.emit(
                "checkpoint", "checkpoint-skipped", f"epoch {epoch}: the one before is still being written", "warning"
            )
            return
        parameters = self.stage.parameters()
        optimizer = {name: e.owner.state(name) for name in self._shapes if e.owner.state(name)}
        meta: dict[str, Any] = {"epoch": epoch}
        if plan is not None and plan.epoch == epoch:
            meta |= {"cursor": [plan.cursor[0], list(plan.cursor[1])], "owners": plan.owners}

        async def write() -> None:
            try:
                path = await asyncio.to_thread(e.store.save, self.stage.stage, epoch, parameters, optimizer, meta)
                e.journal.emit(
                    "checkpoint", "checkpoint-written", f"epoch {epoch} is on disk", "debug", epoch=epoch, path=str(path)
                )
            except (OutOfResources, LocalFault) as error:
                e.journal.emit("checkpoint", "checkpoint-failed", f"{error} {error.next_step}", "error", epoch=epoch)

        self._saving = self._tasks.spawn(write(), "checkpoint")

    async def close(self) -> None:
        """Let a checkpoint that is being written finish, end the rest."""
        await self.saved()
        await self._tasks.close()

    async def saved(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._saving is not None:
            await self._saving

    def recall(self, epoch: int) -> tuple[tuple[int, tuple[int, ...]], dict[str, PeerId]] | None:
        """Cursor of the sampler and owners as a checkpoint of ``epoch`` on this disk has them; None without one."""
        try:
            meta = self.engines.store.meta_of(self.stage.stage, epoch)
            cursor, owners = meta["cursor"], meta["owners"]
            return (int(cursor[0]), tuple(int(p) for p in cursor[1])), {str(k): PeerId(v) for k, v in owners.items()}
        except (LocalFault, KeyError, TypeError, ValueError, IndexError):
            return None

    # ------------------------------------------------------------ forward only

    async def evaluate(self, plan: Plan) -> float:
        """Mean loss, nats per token, on the held-out text through the live swarm. Raises PeerFault."""
        text = self.engines.text
        if text is None:
            return 0.0
        pairs = [text.held_out(i) for i in range(min(self.settings.eval_batches, text.held_out_count()))]
        hops = [self.route(plan, i) for i in range(len(pairs))]
        sums = await asyncio.gather(*(self.engines.pipeline.evaluate(h, x, y) for h, (x, y) in zip(hops, pairs, strict=True)))
        tokens = sum(n for _, n in sums)
        return sum(loss for loss, _ in sums) / tokens if tokens else 0.0

    def route(self, plan: Plan, turn: int) -> tuple[Hop, ...]:
        """Block hops for forward-only work: one current replica of every stage, in turn."""
        stages = sorted({m.stage for m in plan.members} - {ENDS})
        cells = {s: [m.peer for m in plan.cell(s) if m.current] for s in stages}
        return tuple(Hop(s, cells[s][turn % len(cells[s])]) for s in stages if cells[s])

    @property
    def plan(self) -> Plan | None:
        """The newest plan this peer takes part in."""
        return self._plan

    # ------------------------------------------------------------ parts of the above

    def _void(self, epoch: int) -> None:
        """The swarm begins ``epoch`` anew: no step of the earlier attempt may count."""
        self.engines.owner.abort(epoch)
        self.engines.cell.void(epoch)

    def _of(self, plan: Plan) -> _Epoch:
        if self._epoch is None or self._epoch.plan.hash != plan.hash:
            self._epoch = _Epoch(plan)
        return self._epoch

    def _owners(self, plan: Plan, r: ev.RoundArrived) -> dict[str, PeerId]:
        owners = {name: plan.owners[name] for name in self._shapes}
        owners.update({name: peer for name, peer in r.owners.items() if name in owners})
        return owners

    def _step(self, epoch: int, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        fresh = self.engines.owner.step_parts(self.stage.parameters(), mean, epoch)
        return {name: t.cpu() for name, t in fresh.items()}

    def _say_what_is_lost(self, plan: Plan, owners: Mapping[str, PeerId]) -> None:
        if plan.epoch == 0:
            return
        bare = [n for n, o in owners.items() if o == self.me and not self.engines.owner.state(n)]
        if bare:
            self.momentum_lost += len(bare)
            self.engines.journal.emit(
                "optim", "state-lost", f"{len(bare)} parts go on without optimizer state: their owner died with it", "warning",
                epoch=plan.epoch, parts=len(bare),
            )  # fmt: skip

    def _measure(self, epoch: _Epoch) -> None:
        meter, paths = self.engines.meter, epoch.plan.paths
        if paths and epoch.tokens:
            each = len(paths[0].samples) * self._sequence
            meter.epoch_done(round(epoch.tokens / each), epoch.tokens, meter.compute_s - epoch.compute_s)

    def _count(self, seconds: float, nbytes: int, members: int, contributors: int, complete: bool) -> None:
        self.rounds_done += complete
        self.rounds_failed += not complete
        self.round_s, self.round_bytes, self.round_members, self.round_contributors = seconds, nbytes, members, contributors
        self.engines.metrics.time_spent("round", seconds)

    async def _heavy(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.engines.heavy, fn, *args)
