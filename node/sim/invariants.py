"""What must always hold, each as a checker of its own that looks only at what has just changed.

I1 equal digests in a cell, I2 one owner for every part, I3 a micro-batch counts once, I4 no sample
is lost, I5 the mean is the weighted mean, I6 checkpoints are whole, I7 epochs and terms only grow,
I8 a step is applied once, I9 plans are pure and nobody objects, I10 one fault costs no epoch. A
checker raises :class:`InvariantViolation`; what a liar says of itself is not checked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from node.core.errors import TuttiError
from node.core.ids import PeerId
from node.core.journey import Plan, Version, lineage_after
from node.sim.disk import Checkpoint
from node.sim.values import GENESIS, Moment, Share, Value
from node.training.leader.leader import Leader, Phase
from node.training.protocol import events as ev
from node.training.protocol.meetings import pieces
from node.training.protocol.memory import makes
from node.training.protocol.rules import between

if TYPE_CHECKING:
    from node.sim.peer import SimPeer
    from node.sim.rounds import Request
    from node.sim.swarm import Swarm

KEPT = 512
"""Plans, and versions, about which is remembered what was seen of them."""


class InvariantViolation(TuttiError):
    """``id`` is I1 to I10 or "liveness", ``time`` virtual seconds; ``recent`` what happened
    last."""

    def __init__(self, id: str, time: float, what: str, seed: int, recent: Sequence[str]) -> None:
        super().__init__(f"{id} at {time:.3f} s: {what}")
        self.id, self.time, self.what, self.seed, self.recent = id, time, what, seed, tuple(recent)


@dataclass(slots=True)
class Ledger:
    """A version's books: where it came from, where the sampler is after it, how many samples count
    in it, and how many were knowingly given up on the way."""

    parent: Version | None
    next: int
    returned: frozenset[int]
    counted: int
    lost: int
    tokens: int
    depth: int


class Checker:
    """Base of all: knows the swarm and how to raise."""

    id = ""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm

    def broken(self, what: str) -> InvariantViolation:
        watch = self.swarm.watch
        return InvariantViolation(
            self.id, self.swarm.world.now, what, self.swarm.seed, list(watch.recent)
        )


class EqualDigests(Checker):
    """I1: whoever begins an epoch as a current member holds what the rest of its cell holds, and
    after an outer round over all cells what the rest of its stage holds."""

    id = "I1"

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self._seen: dict[tuple[str, int, int], tuple[str, PeerId]] = {}
        self._met: dict[tuple[Version, int], None] = {}

    def plan(self, plan: Plan) -> None:
        if not plan.outer or plan.fragment or plan.senders or between(plan, self.swarm.read).pushes:
            return
        for stage in {stage for stage, _ in plan.units}:
            if len({m.group for m in plan.stage(stage)}) == 1:
                self._met[makes(plan, ()), stage] = None
        _shorten(self._met)

    def began(self, peer: SimPeer, plan: Plan) -> None:
        me = plan.member(peer.name)
        digest = peer.labour.digest
        cell = me.cell if me and (plan.base, peer.stage) not in self._met else 0
        first = self._seen.setdefault((plan.hash, peer.stage, cell), (digest, peer.name))
        if first[0] != digest:
            raise self.broken(
                f"{peer.name} and {first[1]} begin epoch {plan.epoch} with different parameters"
            )
        if me and plan.digests.get((me.stage, me.cell), digest) != digest:
            raise self.broken(
                f"{peer.name} begins epoch {plan.epoch} with parameters the plan does not name"
            )
        _shorten(self._seen)


class OneOwner(Checker):
    """I2: every part has exactly one owner, a current member of its stage that is not counted as
    dead."""

    id = "I2"

    def plan(self, plan: Plan) -> None:
        names = self.swarm.setup.names
        if len(plan.owners) != sum(
            len(parts) * len(plan.cells(stage)) for stage, parts in names.items()
        ):
            raise self.broken(f"the plan of epoch {plan.epoch} names {len(plan.owners)} parts")
        one = not self.swarm.setup.cell and not plan.change
        for stage, parts in names.items():
            if one and len(plan.cells(stage)) > 1:
                raise self.broken(
                    f"the plan of epoch {plan.epoch} cuts stage {stage} into cells, and the run "
                    "has none"
                )
            for cell in plan.cells(stage):
                able = {m.peer for m in plan.cell(stage, cell) if m.current}
                for part in parts:
                    if plan.owner(part, cell) not in able:
                        raise self.broken(
                            f"part {part} of epoch {plan.epoch} is owned by "
                            f"{plan.owner(part, cell)}"
                        )
        for unit in plan.units if plan.outer else ():
            able = {m.peer for m in plan.unit(unit) if m.current}
            averagers = plan.averagers(unit)
            if any(averagers.get(part) not in able for part in self._carried(plan, unit[0])):
                raise self.broken(
                    f"outer round {plan.outer} leaves a part of {unit} to nobody who could average "
                    "it"
                )

    def _carried(self, plan: Plan, stage: int) -> Iterable[str]:
        sizes = {part.name: part.bytes for part in self.swarm.setup.parts[stage]}
        return (
            pieces(sizes, between(plan, self.swarm.read).fragments)[plan.fragment - 1]
            if plan.fragment
            else sizes
        )

    def round(self, a: ev.SendRound) -> None:
        if a.sources or not a.to:
            return
        plan, dead = a.plan, set(a.dead)
        member = plan.member(a.to[0])
        unit = plan.unit_of(member) if member else (0, 0)
        able, planned = {m.peer for m in plan.unit(unit) if m.current} - dead, plan.averagers(unit)
        for part in self._carried(plan, unit[0]):
            if a.owners.get(part, planned[part]) not in able:
                raise self.broken(
                    f"attempt {a.attempt} gives part {part} to {a.owners.get(part, planned[part])}"
                )


class CountsOnce(Checker):
    """I3: a micro-batch contributes to a stage at most once."""

    id = "I3"

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self._seen: dict[tuple[str, int], dict[int, PeerId]] = {}

    def plan(self, plan: Plan) -> None:
        """A swarm that has lost everything may begin with the very same plan again: what was
        counted by it before is gone."""
        for stage in self.swarm.setup.names:
            self._seen.pop((plan.hash, stage), None)

    def counted(self, peer: SimPeer, plan: Plan, index: int, again: bool) -> None:
        if again:
            raise self.broken(
                f"micro-batch {index} of epoch {plan.epoch} counts twice at {peer.name}"
            )

    def taken(self, peer: SimPeer, plan: Plan | None, plan_hash: str) -> None:
        if plan is None or plan.hash != plan_hash:
            raise self.broken(
                f"{peer.name} takes a tensor of plan {plan_hash[:8]}, which is not in force"
            )

    def step(self, peer: SimPeer, request: Request, shares: Sequence[Share]) -> None:
        seen = self._seen.setdefault((request.plan.hash, peer.stage), {})
        for share in shares:
            for index in share.indices:
                other = seen.setdefault(index, share.peer)
                if other != share.peer:
                    text = (
                        f"micro-batch {index} of epoch {request.plan.epoch} counts at {other} "
                        f"and at {share.peer}"
                    )
                    raise self.broken(text)
        _shorten(self._seen)


class NoSampleLost(Checker):
    """I4: samples taken = counted + given back + knowingly given up, along every history."""

    id = "I4"

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self.books: dict[Version, Ledger] = {GENESIS: Ledger(None, 0, frozenset(), 0, 0, 0, 0)}
        self.guessed: set[Version] = set()

    def plan(self, plan: Plan) -> None:
        book = self.books.get(plan.base)
        if book is None:
            raise self.broken(f"a plan starts from {plan.base}, which nobody made")
        start, returned = plan.cursor
        if (start, frozenset(returned)) != (book.next, book.returned):
            if plan.base not in self.guessed:
                raise self.broken(
                    f"epoch {plan.epoch} starts with the sampler at {start} and {len(returned)} "
                    "samples back, "
                    f"not {book.next} and {len(book.returned)}"
                )
            lost = start - len(returned) - book.counted
            self.books[plan.base] = Ledger(
                book.parent, start, frozenset(returned), book.counted, lost, book.tokens, book.depth
            )

    def close(self, plan: Plan, dropped: Sequence[int], tokens: int) -> None:
        made = Version(plan.epoch + 1, lineage_after(plan, dropped))
        if made in self.books:
            return
        book, lost = self.books[plan.base], set(dropped)
        back, taken = set(book.returned), book.next
        counted = 0
        for path in plan.paths:
            for sample in path.samples:
                if sample in back:
                    back.discard(sample)
                elif sample == taken:
                    taken += 1
                else:
                    raise self.broken(
                        f"epoch {plan.epoch} takes sample {sample}, which is not free"
                    )
                counted += path.index not in lost
        returned = back | {s for p in plan.paths if p.index in lost for s in p.samples}
        new = Ledger(
            plan.base,
            taken,
            frozenset(returned),
            book.counted + counted,
            book.lost,
            book.tokens + tokens,
            book.depth + 1,
        )
        if new.next != new.counted + len(new.returned) + new.lost:
            raise self.broken(
                f"epoch {plan.epoch}: {new.next} taken, {new.counted} counted, {len(new.returned)} "
                "back"
            )
        self.books[made] = new

    def ancestor(self, old: Version, new: Version) -> bool:
        """Whether ``new`` was made from ``old``, or is it."""
        at: Version | None = new
        while at is not None and at.epoch >= old.epoch:
            if at == old:
                return True
            at = self.books[at].parent if at in self.books else None
        return False


class WeightedMean(Checker):
    """I5: a step sums each contribution once and divides by exactly its tokens, all of one plan."""

    id = "I5"

    def step(
        self,
        peer: SimPeer,
        request: Request,
        contributors: Sequence[PeerId],
        tokens: int,
        shares: Sequence[Share],
    ) -> None:
        able = set(request.members) - request.listeners
        if len(set(contributors)) != len(contributors) or not set(contributors) <= able:
            raise self.broken(f"{peer.name} averages {contributors}")
        if tokens != sum(s.tokens for s in shares):
            raise self.broken(
                f"{peer.name} divides by {tokens}, not {sum(s.tokens for s in shares)}"
            )
        each = self.swarm.setup.tokens
        for share in shares:
            if share.plan and share.plan != request.plan.hash:
                raise self.broken(
                    f"{peer.name} averages gradients of {share.peer} that belong to another plan"
                )
            if (
                not share.marks
                and share.tokens != each * len(share.indices)
                and self.swarm.honest(share.peer)
            ):
                raise self.broken(
                    f"{share.peer} gives {share.tokens} tokens for {len(share.indices)} "
                    "micro-batches"
                )


class WholeCheckpoint(Checker):
    """I6: what is read back from a disk is whole, of one version, and what was held at it."""

    id = "I6"

    def restored(self, peer: SimPeer, found: Checkpoint) -> None:
        if not found.whole or any(v.made != found.version for v in found.values.values()):
            raise self.broken(
                f"{peer.name} reads a checkpoint of epoch {found.version.epoch} that is not whole"
            )


class OnlyGrow(Checker):
    """I7: terms grow; an epoch goes back only where that was decided and said."""

    id = "I7"

    def member(
        self, peer: SimPeer, event: Any, actions: Iterable[Any], at: Version, term: int
    ) -> None:
        m = peer.member
        if m.term < term:
            raise self.broken(f"{peer.name} falls back from term {term} to {m.term}")
        if m.at.epoch < at.epoch and not any(isinstance(a, ev.GoTo) for a in actions):
            mine = m.plan.member(peer.name) if m.plan else None
            if mine is None or mine.current:
                raise self.broken(
                    f"{peer.name} falls back from epoch {at.epoch} to {m.at.epoch} at "
                    f"{type(event).__name__}"
                )

    def plan(
        self, peer: SimPeer, plan: Plan, before: tuple[int, Version | None], actions: Sequence[Any]
    ) -> None:
        term, base = before
        if plan.term <= term:
            raise self.broken(f"{peer.name} plans term {plan.term} after {term}")
        said = any(
            isinstance(a, ev.Report) and a.kind in ("went-back", "history-changed") for a in actions
        )
        if base is not None and plan.epoch < base.epoch and not said:
            raise self.broken(
                f"{peer.name} goes back from epoch {base.epoch} to {plan.epoch} and does not say so"
            )


class AppliedOnce(Checker):
    """I8: the step of a part that makes a version is applied once, to the version before, and
    settled by one owner."""

    id = "I8"

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self._settled: dict[tuple[str, str, int], PeerId] = {}

    def stepping(
        self, peer: SimPeer, plan: Plan, part: str, old: Value, moment: Moment | None, again: bool
    ) -> None:
        if again:
            raise self.broken(
                f"{peer.name} steps {part} of epoch {plan.epoch} twice under one plan"
            )
        if old.made != plan.base:
            raise self.broken(
                f"{peer.name} steps {part} of epoch {plan.epoch} from a value of epoch "
                f"{old.made.epoch}"
            )
        if moment is not None and not self.swarm.watch.samples.ancestor(moment.through, plan.base):
            text = (
                f"optimizer state of {part} at {peer.name} holds a step of epoch "
                f"{moment.through.epoch} of another history"
            )
            raise self.broken(f"{text}, at epoch {plan.epoch}")

    def owing(self, peer: SimPeer, plan: Plan, part: str, debt: Moment) -> None:
        """What is added to a word was lost in the history it is said in."""
        if not self.swarm.watch.samples.ancestor(debt.through, plan.base):
            text = (
                f"{peer.name} adds to {part} what it lost on the way to epoch "
                f"{debt.through.epoch} of another history"
            )
            raise self.broken(f"{text}, at epoch {plan.epoch}")

    def settling(self, peer: SimPeer, plan: Plan, moments: Mapping[str, Moment]) -> None:
        for part, moment in moments.items():
            owner = self._settled.setdefault((plan.hash, part, peer.labour.cell), peer.name)
            if owner != peer.name:
                raise self.broken(
                    f"{owner} and {peer.name} both settle their step of {part} for epoch "
                    f"{plan.epoch}"
                )
            held = peer.labour.moments.get(part)
            if held is not None and held.through == moment.through:
                raise self.broken(
                    f"{peer.name} settles the step of {part} for epoch {plan.epoch} twice"
                )
            if moment.through != plan.base:
                raise self.broken(
                    f"{peer.name} settles a step of {part} that did not make epoch {plan.epoch}"
                )
        _shorten(self._settled)


class PurePlan(Checker):
    """I9: the same leader, event and time give the same plan, tried on a copy now and then; and
    nobody objects to one."""

    id = "I9"
    EVERY = 29

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self._count = 0

    def objected(self, peer: SimPeer, plan: Plan, why: str) -> None:
        raise self.broken(
            f"{peer.name} objects to the plan of {plan.leader} for epoch {plan.epoch}: {why}"
        )

    def before(self, leader: Leader, event: Any) -> Leader | None:
        if leader.phase is Phase.RUN or isinstance(event, ev.Tick):
            return None
        self._count += 1
        # A copy costs as much as there are peers, so that in a big swarm it is made less often.
        if self._count % (self.EVERY * max(1, len(self.swarm.peers) // 8)):
            return None
        facts, memory = leader.facts, leader.memory
        memo: dict[int, Any] = {
            id(x): x
            for x in (facts, *vars(facts).values(), *vars(memory).values())
            if callable(x) or x is facts
        }
        for plan in (leader.plan, leader.memory.history):
            memo[id(plan)] = plan
        return copy.deepcopy(leader, memo)

    def after(self, twin: Leader | None, event: Any, actions: Sequence[Any]) -> None:
        if twin is None:
            return
        again = twin.handle(event, self.swarm.world.now)
        plans = [a.plan.hash for a in actions if isinstance(a, ev.SendPlan)]
        if plans != [a.plan.hash for a in again if isinstance(a, ev.SendPlan)] or len(
            actions
        ) != len(again):
            raise self.broken(f"the leader answers {type(event).__name__} in two ways")
        for a in actions:
            if isinstance(a, ev.SendPlan) and Plan.parse(a.plan.canonical()).hash != a.plan.hash:
                raise self.broken(f"the plan of epoch {a.plan.epoch} is not what is read of it")


@dataclass
class _Running:
    plan: Plan
    since: float
    faults: list[str] = field(default_factory=list)
    forgiven: bool = False


class OneFault(Checker):
    """I10: an epoch under which at most one peer died, one that was not the leader and had a live
    replica, commits."""

    id = "I10"
    CALM_S = 25.0

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self._running: dict[PeerId, _Running] = {}
        self._disturbed = -1e9

    def fault(self, kind: str, peer: PeerId | None, spared: bool) -> None:
        """``spared``: a live current replica is left, and it does not lead."""
        mild = kind == "kill" and spared
        for r in self._running.values():
            r.faults.append(kind)
            r.forgiven = r.forgiven or not mild or len(r.faults) > 1 or peer == r.plan.leader
        self._disturbed = self.swarm.world.now

    def planned(self, peer: SimPeer, plan: Plan) -> None:
        calm = self.swarm.world.now - self._disturbed > self.CALM_S and self.swarm.calm()
        self._running[peer.name] = _Running(plan, self.swarm.world.now, [], not calm)

    def ended(self, peer: SimPeer, committed: bool, why: str) -> None:
        r = self._running.pop(peer.name, None)
        if r is not None and not committed and not r.forgiven:
            raise self.broken(
                f"epoch {r.plan.epoch} was given up after {r.faults or 'no fault'}: {why}"
            )


def _shorten(seen: dict[Any, Any]) -> None:
    if len(seen) > KEPT:
        for key in list(seen)[: KEPT // 2]:
            del seen[key]
