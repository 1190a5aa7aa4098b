"""The search of a new owner for the optimizer state of its parts: with the last owner, among its
own copies, in the cell. Parts travel whole or not at all.

State is loaded by worker threads while the round runs; the step of a part waits for it, for a
moment. A copy may be some epochs old, which is reported. It is never of a later version than the
plan starts from, nor of another history, so no update is applied twice.
"""

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from node.checkpoint.errors import NoDonor
from node.checkpoint.state import StateKind, StateSnapshot, by_part
from node.core.errors import PeerFault, StepFault, WireError
from node.core.ids import PeerId, short
from node.core.journey import Plan, Version, lineage
from node.core.numbers import several
from node.core.tasks import Tasks
from node.optim.parts import state_shapes
from node.optim.settings import OptimSettings
from node.optim.state_replica import Spares, StateReplica, VersionTrail
from node.optim.steps import HeldState
from node.stage.engines import Engines
from node.stage.state import StageState
from node.transport.port import answers
from protos import state_pb2, state_pb2_grpc

TRIES = 2
"""Requests to the last owner of a part."""
WAIT_SHARE = 0.15
"""Share of the round's deadline for which steps wait for state that is being fetched, all steps of
a round together."""
STUCK_SHARE = WAIT_SHARE / 2
"""Share of the plan's deadline in which an owner that lives, but does not step, must give its
state: afterwards a copy can still come before the step."""
PAUSE_S = 0.2
"""Seconds before a donor is asked again: it may not have adopted the plan's version yet."""
SEARCH_S = 2.0
"""Seconds in which a member of the cell has to list the state it keeps."""
BATCH = 32 << 20
"""Bytes of parts fetched together: if a donor dies, only the batch under way is lost."""


class Parts:
    """The parts of one stage, as other peers hold state of them."""

    def __init__(self, stage: StageState, engines: Engines, optimizer: OptimSettings) -> None:
        self._stage = stage.stage
        self._engines = engines
        self._optimizer = optimizer
        self.shapes = stage.shapes

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        """The names in order, cut into batches of about ``BATCH`` bytes of state, at least one part
        each."""
        batches: list[list[str]] = []
        room = 0
        for name in names:
            size = sum(4 * math.prod(shape) for shape in self._shapes([name]).values())
            if size > room:
                batches.append([])
                room = BATCH
            batches[-1].append(name)
            room -= size
        return batches

    async def fetch(
        self,
        donor: PeerId,
        kind: StateKind,
        version: Version | None,
        names: Sequence[str],
        tries: int = 1,
        gate: asyncio.Event | None = None,
    ) -> StateSnapshot:
        """State of these parts at exactly ``version``; None: at the newest version that is final.
        With a ``gate``, requests are made one at a time, while it is set. Raises PeerFault."""
        while True:
            try:
                return await self._engines.fetch(
                    [donor], self._stage, kind, version, self._shapes(names), gate
                )
            except NoDonor as error:
                tries -= 1
                if not tries:
                    raise PeerFault(donor, error.reasons.get(donor, error.reason)) from error
                await asyncio.sleep(PAUSE_S)

    async def listing(self, peer: PeerId, kind: StateKind) -> dict[str, Version]:
        """Versions of the state that a member says it keeps, by part; empty if it does not answer
        in time."""
        transport = self._engines.transport
        request = state_pb2.ListRequest(stage=self._stage, kind=kind.code)
        try:
            async with answers(peer, SEARCH_S):
                answer = await state_pb2_grpc.StateStub(await transport.channel(peer)).List(
                    request, timeout=SEARCH_S
                )
            return listed(answer, self.shapes)
        except WireError as error:
            transport.fault(peer, str(error), 1.0)
        except PeerFault:
            pass  # a peer that does not answer has nothing to give now
        return {}

    def _shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {
            f"{n}/{k}": s
            for n in names
            for k, s in state_shapes(n, self.shapes[n], self._optimizer).items()
        }


class Arrival:
    """State on its way to its new owner. ``pending``: parts still without state, less those that
    went on without it; ``why``: for each part, the reason for which its last owner's state is
    missing; ``news``: set at each arrival of state, and when no more is to come."""

    def __init__(self, plan: Plan, parts: Iterable[str]) -> None:
        self.plan = plan
        self.parts = frozenset(parts)
        self.pending = set(self.parts)
        self.why: dict[str, str] = {}
        self.lock = threading.Lock()
        self.task: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        self._closed: set[str] = set()
        self._waited_s = 0.0

    @property
    def wanted(self) -> set[str]:
        """Parts open for their state."""
        return self.pending - self._closed

    def close(self, names: Collection[str] | None = None) -> set[str]:
        """Accept no more state of these parts, or of any part. Returns the parts closed by this
        call."""
        with self.lock:
            closed = self.wanted
            if names is not None:
                closed.intersection_update(names)
            self._closed |= closed
        return closed

    async def wait(self, names: Collection[str], most_s: float) -> None:
        """Wait until the state of these parts is here, or will not come; at most ``most_s`` seconds
        in all calls together."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, most_s - self._waited_s)):
                while not self.pending.isdisjoint(names) and self.task and not self.task.done():
                    self.news.clear()
                    await self.news.wait()
        self._waited_s += loop.time() - began


class StateImport:
    """The import of one stage's state at one peer. ``lost``: parts that went on without state;
    ``age``: most epochs that a copy was behind with which a part went on."""

    def __init__(
        self,
        parts: Parts,
        engines: Engines,
        spares: Spares,
        trail: VersionTrail,
        stage: int,
        me: PeerId,
        tasks: Tasks,
    ) -> None:
        self._parts = parts
        self._engines = engines
        self._spares = spares
        self._trail = trail
        self._stage = stage
        self._me = me
        self._tasks = tasks
        self.lost = self.age = 0
        self._arrivals: list[Arrival] = []
        self._told: set[str] = set()

    def forget(self) -> None:
        """The epoch is over, or begins anew: state still on its way comes too late."""
        for arrival in self._arrivals:
            arrival.close()
            if arrival.task is not None:
                arrival.task.cancel()
        self._arrivals = []

    def settled(self) -> None:
        """The update is final, so lost state cannot come any more. From now on losses are reported
        anew."""
        self.forget()
        self._told.clear()

    def has(self, name: str, epoch: int) -> bool:
        """Return True if a part's state is of the version that ``epoch`` starts from."""
        return epoch > 0 and self._engines.owner.through(name) == epoch - 1

    def expect(self, plan: Plan, parts: Sequence[str], dead: Collection[PeerId]) -> None:
        """Look for the missing state of our ``parts``: of each part that has none of the plan's
        version."""
        known = {n for a in self._arrivals for n in a.parts} | self._engines.owner.staged(
            plan.epoch
        )
        missing = [n for n in parts if n not in known and not self.has(n, plan.epoch)]
        if not plan.epoch or not missing:
            return
        arrival = Arrival(plan, missing)
        donors = self._donors(plan, missing, dead)
        gone = "its last owner is gone"
        owners = plan.owners
        arrival.why = {
            n: gone if owners[n] == self._me else f"its owner {short(owners[n])} died"
            for n in missing
        }
        arrival.why |= {
            n: f"{short(d)}, which owned it, did not give it in time" for n, d in donors.items()
        }
        self._arrivals.append(arrival)
        arrival.task = self._tasks.spawn(self._bring(arrival, donors, dead), "take-over")
        arrival.task.add_done_callback(lambda _: arrival.news.set())

    async def ready(self, names: Collection[str], deadline_s: float) -> None:
        """Wait shortly for the state of ``names`` before they are stepped, then go on with the
        state that is here."""
        for arrival in [a for a in self._arrivals if not a.pending.isdisjoint(names)]:
            await arrival.wait(names, WAIT_SHARE * deadline_s)
            # State of parts that are stepped later in the round may still come.
            if late := arrival.close(names):
                await asyncio.to_thread(self._do_without, arrival, late)

    def _donors(
        self, plan: Plan, parts: Sequence[str], dead: Collection[PeerId]
    ) -> dict[str, PeerId]:
        """The peer with each part's state of the plan's version: the owner before the plan, or the
        plan's own where the part has left it during the epoch, though it lives. Parts without a
        living one are left out."""
        useless = {self._me, *dead}
        found: dict[str, PeerId] = {}
        for name in parts:
            owner = plan.owners[name]
            able = [p for p in (plan.moved.get(name, owner), owner) if p not in useless]
            if able:
                found[name] = able[0]
        return found

    # ----------------------------------------------------------- where it comes from

    async def _bring(
        self, arrival: Arrival, donors: Mapping[str, PeerId], dead: Collection[PeerId]
    ) -> None:
        by_donor: dict[PeerId, list[str]] = defaultdict(list)
        by_stuck: dict[PeerId, list[str]] = defaultdict(list)
        for name, donor in donors.items():
            gives = by_donor
            if donor == arrival.plan.owners[name]:
                gives = by_stuck
            gives[donor].append(name)
        await asyncio.gather(
            *(self._from_owner(arrival, donor, names) for donor, names in by_donor.items()),
            *(self._from_stuck(arrival, donor, names) for donor, names in by_stuck.items()),
        )
        if arrival.wanted:
            await self._from_copies(arrival, dead)
        # Nothing more will come: say so now rather than when the step finds out.
        if left := arrival.close():
            await asyncio.to_thread(self._do_without, arrival, left)

    async def _from_owner(self, arrival: Arrival, donor: PeerId, names: Sequence[str]) -> None:
        base = arrival.plan.base
        missing = f"{short(donor)}, which owned it, did not give it"
        came, error = await self._fetch(
            arrival, donor, StateKind.OPTIMIZER, base, names, missing, TRIES
        )
        if error is not None:
            self._engines.journal.emit(
                "optim",
                "state-not-moved",
                str(error),
                "warning",
                parts=len(names) - came,
                peer=donor,
            )
        if came:
            self._engines.journal.emit(
                "optim",
                "state-moved",
                f"took over the optimizer state of {several(came, 'part')} from {short(donor)}",
                parts=came,
                epoch=base.epoch,
                peer=donor,
            )

    async def _from_stuck(self, arrival: Arrival, donor: PeerId, names: Sequence[str]) -> None:
        """As :meth:`_from_owner`, from an owner that lives and does not step: it may not answer
        either."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK_SHARE * arrival.plan.deadline_s):
                await self._from_owner(arrival, donor, names)

    async def _from_copies(self, arrival: Arrival, dead: Collection[PeerId]) -> None:
        """Load the newest copy of each part that is left, from anywhere in the cell."""
        plan = arrival.plan
        others = [
            m.peer
            for m in plan.stage(self._stage)
            if m.current and m.peer != self._me and m.peer not in dead
        ]
        said = await asyncio.gather(*(self._parts.listing(p, StateKind.SPARE) for p in others))
        offers = dict(zip(others, said, strict=True)) | {self._me: self._spares.versions()}
        while offers:
            chosen: dict[tuple[PeerId, Version], list[str]] = defaultdict(list)
            for name in sorted(arrival.wanted):
                able = [
                    (v.epoch, p == self._me, p, v)
                    for p, held in offers.items()
                    if (v := held.get(name)) and self._fits(v, plan)
                ]
                if able:
                    *_, holder, version = max(able)
                    chosen[holder, version].append(name)
            if not chosen:
                return
            for (holder, version), names in chosen.items():
                if holder == self._me:
                    copies = {
                        n: s
                        for n in names
                        if (s := self._spares.get(n)) is not None and s.version == version
                    }
                    loaded = await self._load(arrival, holder, copies)
                else:
                    missing = f"the copy at {short(holder)} did not come"
                    loaded, _ = await self._fetch(
                        arrival, holder, StateKind.SPARE, version, names, missing
                    )
                # State that a step did not wait for is not missed.
                if not arrival.wanted.isdisjoint(names):
                    offers.pop(holder, None)
                self._say_old(plan, loaded, version)

    async def _fetch(
        self,
        arrival: Arrival,
        peer: PeerId,
        kind: StateKind,
        version: Version,
        names: Sequence[str],
        missing: str,
        tries: int = 1,
    ) -> tuple[int, PeerFault | None]:
        """Fetch state of these parts from one peer, until a batch does not come; ``missing`` begins
        the reason that is kept then. Returns the number of parts in place, and the error that
        stopped it."""
        loaded = 0
        left = set(names)
        for batch in self._parts.batches(names):
            try:
                got = await self._parts.fetch(peer, kind, version, batch, tries)
            except PeerFault as error:
                arrival.why.update(dict.fromkeys(left, f"{missing} ({error.reason})"))
                return loaded, error
            left.difference_update(batch)
            states = by_part(got.tensors)
            copies = {n: StateReplica(version, s) for n, s in states.items()}
            loaded += await self._load(arrival, peer, copies)
        return loaded, None

    # ----------------------------------------------------------- putting it in place

    async def _load(
        self, arrival: Arrival, donor: PeerId, copies: Mapping[str, StateReplica]
    ) -> int:
        """Put state in place unless its step has begun. Returns the number of parts."""
        done, wrong = await asyncio.to_thread(self._put, arrival, copies)
        arrival.news.set()
        if wrong:
            arrival.why.update(dict.fromkeys(wrong, f"what {short(donor)} gave cannot be"))
            if donor != self._me:
                self._engines.transport.fault(
                    donor, f"optimizer state that cannot be: {next(iter(wrong.values()))}", 1.0
                )
        return done

    def _put(
        self, arrival: Arrival, copies: Mapping[str, StateReplica]
    ) -> tuple[int, dict[str, str]]:
        done = 0
        wrong = {}
        for name, copy in copies.items():
            if name not in arrival.wanted:
                continue
            try:
                # Without the lock, for which the event loop waits when it closes the arrival.
                ready = self._readied(name, copy)
            except StepFault as error:
                wrong[name] = str(error)
                continue
            with arrival.lock:
                if name in arrival.wanted:
                    self._place(name, copy.version, ready)
                    arrival.pending.discard(name)
                    done += 1
        return done, wrong

    def _readied(self, name: str, copy: StateReplica) -> HeldState:
        """The state of a copy, checked, where its steps will find it. Raises StepFault."""
        return self._engines.owner.readied(name, self._parts.shapes[name], copy.state)

    def _place(self, name: str, version: Version, state: HeldState) -> None:
        self._engines.owner.put(name, state, version.epoch - 1)

    def _do_without(self, arrival: Arrival, names: Collection[str]) -> None:
        """Nothing more comes for these parts: use the own copy of each part; a part without one has
        lost its state. On any thread."""
        plan = arrival.plan
        lost = dict[str, str]()
        for name in sorted(names):
            copy = self._spares.get(name)
            lost[name] = arrival.why[name]
            if copy is None or not self._fits(copy.version, plan):
                continue
            with suppress(StepFault):
                self._place(name, copy.version, self._readied(name, copy))
                self._say_old(plan, 1, copy.version)
                del lost[name]
        with arrival.lock:
            arrival.pending.difference_update(names)
        new = {n: why for n, why in lost.items() if n not in self._told}
        self._told |= new.keys()
        self.lost += len(new)
        for why in sorted(set(new.values())):
            count = sum(w == why for w in new.values())
            self._engines.journal.emit(
                "optim",
                "state-lost",
                f"no optimizer state for {several(count, 'part')}: {why}, and no copy came",
                "warning",
                epoch=plan.epoch,
                parts=count,
                reason=why,
            )

    def _say_old(self, plan: Plan, parts: int, version: Version) -> None:
        age = plan.epoch - version.epoch
        say = self._engines.journal.emit
        if parts and not age:
            say(
                "optim",
                "state-moved",
                f"took over the optimizer state of {several(parts, 'part')} from a copy",
                parts=parts,
                epoch=plan.epoch,
            )
        elif parts:
            self.age = max(self.age, age)
            say(
                "optim",
                "momentum-old",
                f"goes on with a copy of the optimizer state of {several(parts, 'part')} that is "
                f"{several(age, 'epoch')} old",
                "warning",
                epoch=plan.epoch,
                parts=parts,
                age=age,
            )

    def _fits(self, version: Version, plan: Plan) -> bool:
        return version.epoch <= plan.epoch and self._trail.leads_from(version)


def listed(answer: state_pb2.StateList, names: Collection[str]) -> dict[str, Version]:
    """Versions of the listed parts that are among ``names``. Raises WireError for a list that no
    honest peer makes."""
    if len(answer.parts) > len(names):
        raise WireError("a list of more parts than the stage has")
    return {p.name: Version(p.epoch, lineage(p.lineage)) for p in answer.parts if p.name in names}
