"""Invariants of a run, each a checker of its own that looks only at the latest change.

I1 equal digests in a cell, I2 one owner for every part, I3 a micro-batch counts once, I4 no sample
is lost, I5 the mean is the weighted mean, I6 checkpoints are whole, I7 epochs and terms only grow,
I8 a step is applied once, I9 plans are pure and nobody objects, I10 one fault costs no epoch, I11
the versions that enough voters commit form one line. A checker raises :class:`InvariantViolation`;
the claims of a liar about itself are not checked.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from node.averaging.exchange.events import Opened, ReduceAndStep, Stepped
from node.averaging.reducers.quarantine import weights
from node.checkpoint.store import Checkpoint
from node.core.errors import TuttiError
from node.core.ids import PeerId, RoundId
from node.core.journey import Plan, Version, lineage_after
from node.core.newest import Newest
from node.core.samples import Cursor, SampleClass, split
from node.epoch import events as ev
from node.epoch.leader.leader import Leader, Phase
from node.optim.owner import Owner
from node.sim.process import SimPeer, Swarm
from node.stage.inner_round import caps_of
from node.wire.remote import HeldTensor, collected

NEAR = 1e-4
"""Most by which a mean may differ from the right one: the rounding of fp32."""
KEPT = 512
"""Number of plans, and of versions, whose observations are kept."""


class InvariantViolation(TuttiError):
    """A broken invariant. ``id``: I1 to I11 or "liveness"; ``time``: virtual seconds; ``recent``:
    the latest notes of the run."""

    def __init__(self, id: str, time: float, what: str, seed: int, recent: Iterable[str]) -> None:
        super().__init__(f"{id} at {time:.3f} s: {what}")
        self.id = id
        self.time = time
        self.what = what
        self.seed = seed
        self.recent = tuple(recent)


@dataclass(frozen=True, slots=True)
class TakenBatches:
    """Content of one peer's gradients of an epoch: samples, their sum for any part, tokens."""

    samples: tuple[int, ...]
    sums: Tensor
    tokens: int


@dataclass
class EpochRun:
    """The rounds that one peer's exchange has open, and the steps made in them."""

    opened: dict[RoundId, Opened] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    stepped: dict[int, set[tuple[str, str]]] = field(default_factory=dict)
    """By epoch: (plan, part)."""

    def opens(self, opened: Opened) -> None:
        """An attempt begins."""
        epoch = opened.round.epoch
        self.opened = {r: o for r, o in self.opened.items() if r.epoch >= epoch - 2}
        self.opened[opened.round] = opened
        self.failed.discard(epoch)

    def failed_step(self, event: Stepped) -> None:
        """A step failed: forget that its parts were stepped."""
        stepped = self.stepped.get(event.epoch, set())
        stepped -= {key for key in stepped if key[1] in event.names}

    def voids(self, epoch: int) -> None:
        """The swarm went back before it."""
        self.opened = {r: o for r, o in self.opened.items() if r.epoch < epoch}
        self.stepped = {e: s for e, s in self.stepped.items() if e < epoch}
        self.failed = {e for e in self.failed if e < epoch}


@dataclass(slots=True)
class VersionBooks:
    """A version's books: its parent, the sampler's place after it, the number of samples counted in
    it, and the number knowingly given up on the way."""

    parent: Version | None
    next: dict[tuple[int, int], int]
    """The first position never taken of each class (remainder, bits)."""
    returned: frozenset[int]
    counted: int
    lost: int = 0

    @property
    def taken(self) -> int:
        """Number of positions that were ever taken."""
        return sum(first >> bits for (_, bits), first in self.next.items())


@dataclass
class Checker:
    """Base of all: knows the swarm and how to raise."""

    swarm: Swarm
    id: ClassVar[str] = ""

    def must(self, holds: object, what: str) -> None:
        """Raises InvariantViolation if ``holds`` is false; the swarm halts even if a caller catches
        it."""
        if not holds:
            found = self.swarm.watch.violation(self.id, what)
            self.swarm.world.halt(found)
            raise found


@dataclass
class EqualDigests(Checker):
    """I1: a peer that begins an epoch as a current member holds the same as the rest of its
    cell."""

    id = "I1"
    _seen: dict[tuple[str, int], tuple[str, PeerId]] = field(default_factory=lambda: Newest(KEPT))

    def began(self, peer: SimPeer, plan: Plan) -> None:
        me = plan.member(peer.name)
        digest = peer.digest
        self.must(
            peer.in_place() == digest,
            f"{peer.name} begins epoch {plan.epoch} with parameters of another digest than it says",
        )
        first = self._seen.setdefault((plan.hash, peer.stage), (digest, peer.name))
        self.must(
            first[0] == digest,
            f"{peer.name} and {first[1]} begin epoch {plan.epoch} with different parameters",
        )
        self.must(
            me is None or plan.digests.get(me.stage, digest) == digest,
            f"{peer.name} begins epoch {plan.epoch} with parameters the plan does not name",
        )


class OneOwner(Checker):
    """I2: every part has exactly one owner, a current member of its stage that is not counted as
    dead."""

    id = "I2"

    def plan(self, plan: Plan) -> None:
        if plan.parent:
            return  # the owners are the parent's, and nobody steps
        names = self.swarm.setup.names
        there = {m.stage for m in plan.members if m.current}
        self.must(
            len(plan.owners) == sum(len(names[stage]) for stage in there),
            f"the plan of epoch {plan.epoch} names {len(plan.owners)} parts",
        )
        for stage in sorted(there):
            able = {m.peer for m in plan.stage(stage) if m.current}
            for part in names[stage]:
                self.must(
                    plan.owners[part] in able,
                    f"part {part} of epoch {plan.epoch} is owned by {plan.owners[part]}",
                )

    def round(self, a: ev.SendRound) -> None:
        if a.round.sources or not a.to:
            return
        plan = a.plan
        member = a.plan.member(a.to[0])
        if member is None:
            return
        able = {m.peer for m in plan.stage(member.stage) if m.current} - set(a.round.dead)
        for part in self.swarm.setup.names[member.stage]:
            owner = a.round.owners.get(part, plan.owners[part])
            self.must(owner in able, f"attempt {a.round.attempt} gives part {part} to {owner}")


@dataclass
class CountsOnce(Checker):
    """I3: a micro-batch contributes to a stage at most once."""

    id = "I3"
    _seen: dict[tuple[str, int], dict[int, PeerId]] = field(default_factory=lambda: Newest(KEPT))

    def plan(self, plan: Plan) -> None:
        """Forget the counts of this very plan: a swarm that has lost everything may begin with it
        again, and the earlier counts are gone."""
        for stage in self.swarm.setup.names:
            self._seen.pop((plan.hash, stage), None)

    def counted(self, peer: SimPeer, plan: Plan, index: int, again: bool) -> None:
        self.must(
            not again, f"micro-batch {index} of epoch {plan.epoch} counts twice at {peer.name}"
        )

    def taken(self, peer: SimPeer, plan: Plan | None, plan_hash: str) -> None:
        self.must(
            plan is not None and plan.hash == plan_hash,
            f"{peer.name} takes a tensor of plan {plan_hash[:8]}, which is not in force",
        )

    def gave(self, peer: SimPeer, plan: Plan, taken: TakenBatches) -> None:
        """A peer contributes samples of the plan only, and each once."""
        self.must(
            {s for p in plan.paths for s in p.samples}.issuperset(taken.samples),
            f"{peer.name} counts samples that epoch {plan.epoch} has not",
        )
        self.must(
            len(set(taken.samples)) == len(taken.samples),
            f"{peer.name} counts a sample of epoch {plan.epoch} twice",
        )

    def step(
        self, peer: SimPeer, opened: Opened, step: ReduceAndStep, mean: "WeightedMean"
    ) -> None:
        """The samples that one contributor gives, no other has given."""
        seen = self._seen.setdefault((opened.plan_hash, peer.stage), {})
        for giver in step.contributors:
            taken = mean.of(opened.plan_hash, giver)
            if not taken or not self.swarm.honest(giver):
                continue
            for sample in taken.samples:
                other = seen.setdefault(sample, giver)
                self.must(
                    other == giver,
                    f"sample {sample} of epoch {step.round.epoch} counts at {other} and at {giver}",
                )


@dataclass
class NoSampleLost(Checker):
    """I4: samples taken = counted + given back + knowingly given up, along every history, and no
    two cells take the same: where a cell divides, so does its share."""

    id = "I4"
    books: dict[Version, VersionBooks] = field(
        default_factory=lambda: {Version(0): VersionBooks(None, {(0, 0): 0}, frozenset(), 0)}
    )
    guessed: set[Version] = field(default_factory=set)
    _shares: dict[tuple[Version, str], VersionBooks] = field(default_factory=dict)
    """The books of each cell at a version at which one has divided."""

    def book(self, plan: Plan) -> VersionBooks:
        """Books of the version that a plan starts from, for the plan's cell."""
        self.must(plan.base in self.books, f"a plan starts from {plan.base}, which nobody made")
        cell = plan.parent or plan.cell_id
        return self._shares.get((plan.base, cell), self.books[plan.base])

    def plan(self, plan: Plan) -> None:
        book = self.book(plan)
        if plan.parent:
            self._divides(plan, book)
            return
        start, returned = _place(plan.cursor)
        if (start, returned) != (book.next, book.returned):
            self.must(
                plan.base in self.guessed,
                f"epoch {plan.epoch} starts with the sampler at {start} and {len(returned)} "
                "samples back, "
                f"not {book.next} and {len(book.returned)}",
            )
            new = replace(book, next=start, returned=returned)
            new.lost = new.taken - len(returned) - book.counted
            self.books[plan.base] = new

    def _divides(self, plan: Plan, book: VersionBooks) -> None:
        """A new cell begins with one half of its parent's share, and the parent goes on with the
        other. Samples of a cell's half that were taken before count in that cell's books."""
        share = tuple(
            SampleClass(
                remainder,
                bits,
                first,
                tuple(sorted(p for p in book.returned if p % (1 << bits) == remainder)),
            )
            for (remainder, bits), first in sorted(book.next.items())
        )
        stays, leaves = split(share)
        self.must(
            plan.cursor == leaves, f"cell {plan.cell_id} begins with {plan.cursor}, not {leaves}"
        )
        for cell, half in ((plan.parent, stays), (plan.cell_id, leaves)):
            start, returned = _place(half)
            new = replace(book, next=start, returned=returned, lost=0)
            new.counted = new.taken - len(returned)
            self._shares[plan.base, cell] = new

    def close(self, plan: Plan, dropped: Sequence[int]) -> None:
        made = Version(plan.epoch + 1, lineage_after(plan, dropped))
        if made in self.books:
            return
        book = self.book(plan)
        lost = set(dropped)
        back = set(book.returned)
        free = dict(book.next)
        for sample in (s for path in plan.paths for s in path.samples):
            if sample in back:
                back.discard(sample)
            else:
                behind = min(free, key=lambda c: free[c])
                self.must(
                    sample == free[behind],
                    f"epoch {plan.epoch} takes sample {sample}, which is not free",
                )
                free[behind] += 1 << behind[1]
        counted = sum(len(path.samples) for path in plan.paths if path.index not in lost)
        returned = back | {s for p in plan.paths if p.index in lost for s in p.samples}
        new = VersionBooks(
            plan.base,
            free,
            frozenset(returned),
            book.counted + counted,
            book.lost,
        )
        self.must(
            new.taken == new.counted + len(new.returned) + new.lost,
            f"epoch {plan.epoch}: {new.taken} taken, {new.counted} counted, "
            f"{len(new.returned)} back",
        )
        self.books[made] = new

    def ancestor(self, old: Version, new: Version) -> bool:
        """Return True if ``new`` was made from ``old``, or equals it."""
        at: Version | None = new
        while at is not None and at.epoch >= old.epoch:
            if at == old:
                return True
            if at not in self.books:
                return False
            at = self.books[at].parent
        return False


def _place(cursor: Cursor) -> tuple[dict[tuple[int, int], int], frozenset[int]]:
    """The first position never taken of each class, and all positions handed back."""
    back = frozenset(p for c in cursor for p in c.returned)
    return {(c.remainder, c.bits): c.next for c in cursor}, back


@dataclass
class WeightedMean(Checker):
    """I5: a step sums each contribution once and divides by exactly its tokens, all of one plan."""

    id = "I5"
    _given: dict[tuple[str, PeerId], TakenBatches] = field(default_factory=dict)
    _followed: int = 0
    """Number of contributions kept for plans in force when old ones were last dropped."""
    _by: dict[tuple[PeerId, str], tuple[str, tuple[PeerId, ...]]] = field(default_factory=dict)

    def gave(self, plan_hash: str, peer: PeerId, taken: TakenBatches) -> None:
        """Record a peer's gradients under a plan."""
        each = self.swarm.setup.tokens // self.swarm.setup.micro_batch
        self.must(
            taken.tokens == each * len(taken.samples),
            f"{peer} gives {taken.tokens} tokens for {len(taken.samples)} samples",
        )
        self._given[plan_hash, peer] = taken
        self._forget()

    def _forget(self) -> None:
        """Drop the oldest, except what belongs to a plan in force: one side of a partition may wait
        in an epoch while the other side goes through many."""
        kept = 2 * len(self.swarm.peers)
        if len(self._given) <= self._followed + 2 * kept:
            return
        in_force = {p.work.plan.hash for p in self.swarm.live() if p.work.plan is not None}
        old = list(self._given)[:-kept]
        for key in old:
            if key[0] not in in_force:
                del self._given[key]
        self._followed = len(self._given) - kept

    def of(self, plan_hash: str, peer: PeerId) -> TakenBatches | None:
        """The gradients that a peer gave under a plan, or None."""
        return self._given.get((plan_hash, peer))

    def step(self, peer: SimPeer, opened: Opened, step: ReduceAndStep) -> None:
        """An owner's machine orders a step."""
        able = set(opened.members) - opened.listeners
        by = step.contributors
        self.must(len(set(by)) == len(by) and set(by) <= able, f"{peer.name} averages {by}")
        for name in step.names:
            self._by[peer.name, name] = opened.plan_hash, by

    def stepping(self, peer: SimPeer, plan: Plan, means: Mapping[str, Tensor]) -> None:
        """The mean that is stepped is the mean of the given gradients."""
        for name, mean in means.items():
            plan_hash, by = self._by.get((peer.name, name), ("", ()))
            if plan_hash != plan.hash or not all(self.swarm.honest(p) for p in by):
                continue
            given = {p: g for p in by if (g := self.of(plan.hash, p)) is not None}
            self.must(
                len(given) == len(by),
                f"{peer.name} averages gradients that belong to another plan than that of "
                f"epoch {plan.epoch}",
            )
            counts = self._counts(peer, plan, given)
            tokens = sum(counts.values())
            shares = (
                g.sums if counts[p] == g.tokens else g.sums * counts[p] / g.tokens
                for p, g in given.items()
            )
            total = sum(shares, start=mean * 0.0)
            self.must(
                tokens and (total / tokens - mean).abs().max().item() <= NEAR * SCALE,
                f"{peer.name} steps {name} of epoch {plan.epoch} by a mean that is not the mean of "
                f"what {', '.join(by)} gave",
            )

    def _counts(
        self, peer: SimPeer, plan: Plan, given: Mapping[PeerId, TakenBatches]
    ) -> Mapping[PeerId, int]:
        """Tokens for which each contribution counts: all its own, in the usual case. If a
        micro-batch was given up after its origin had named its workers, a share of it is in a sum
        already; then the sum counts for no more than the tokens that the plan leaves to its
        giver."""
        claims = {p: g.tokens for p, g in given.items()}
        dropped = peer.member.dropped
        lost = {s for path in plan.paths if path.index in dropped for s in path.samples}
        if not any(lost.intersection(g.samples) for g in given.values()):
            return claims
        setup = self.swarm.setup
        caps = caps_of(plan, peer.stage, setup.tokens // setup.micro_batch, dropped)
        return weights(claims, caps.allowed, caps.total)


SCALE = 64.0
"""Scale of the gradients in this simulation."""


@dataclass
class WholeCheckpoint(Checker):
    """I6: a checkpoint read back from a disk is whole, of one version, and equal to the parameters
    held at that version."""

    id = "I6"
    _held: dict[tuple[int, Version], str] = field(default_factory=dict)

    def stood(self, peer: SimPeer, plan: Plan) -> None:
        """Record the digest that a peer's cell holds at the version a plan starts from."""
        self._held.setdefault((peer.stage, plan.base), peer.digest)

    def restored(self, peer: SimPeer, found: Checkpoint) -> None:
        """A checkpoint has been read."""
        version = Version(found.epoch, str(found.meta.get("lineage", "")))
        names = set(self.swarm.setup.names[found.stage])
        held = self._held.get((found.stage, version), found.digest)
        self.must(
            set(found.parameters) == names and held == found.digest,
            f"{peer.name} reads a checkpoint of epoch {found.epoch} that is not what was held",
        )


class OnlyGrow(Checker):
    """I7: terms grow; an epoch goes back only where that was decided and announced."""

    id = "I7"

    def member(
        self, peer: SimPeer, event: Any, actions: Iterable[Any], at: Version, term: int
    ) -> None:
        m = peer.member
        self.must(m.term >= term, f"{peer.name} falls back from term {term} to {m.term}")
        if m.at.epoch < at.epoch and not any(isinstance(a, ev.GoTo) for a in actions):
            mine = None
            if m.plan:
                mine = m.plan.member(peer.name)
            self.must(
                mine is not None and not mine.current,
                f"{peer.name} falls back from epoch {at.epoch} to {m.at.epoch} at "
                f"{type(event).__name__}",
            )

    def plan(
        self,
        peer: SimPeer,
        plan: Plan,
        before: tuple[int, Version | None],
        actions: Sequence[Any],
    ) -> None:
        term, base = before
        self.must(plan.term > term, f"{peer.name} plans term {plan.term} after {term}")
        said = any(
            isinstance(a, ev.RecordFact) and a.kind in ("went-back", "history-changed")
            for a in actions
        )
        self.must(
            said or base is None or plan.epoch >= base.epoch,
            f"{peer.name} goes back from {base} to epoch {plan.epoch} and does not say so",
        )


@dataclass
class AppliedOnce(Checker):
    """I8: the step of a part that makes a version is applied once, to the version before, and
    settled by one owner."""

    id = "I8"
    _settled: dict[tuple[Version, str], PeerId] = field(default_factory=lambda: Newest(64 * KEPT))
    _through: dict[tuple[str, bytes], list[Version]] = field(
        default_factory=lambda: Newest(64 * KEPT)
    )
    """The versions at which an optimizer state first appeared: work that is repeated from the same
    place gives the same bits in another history."""

    def once(self, peer: SimPeer, running: EpochRun, opened: Opened, step: ReduceAndStep) -> None:
        """An owner's machine orders a step."""
        stepped = running.stepped.setdefault(step.round.epoch, set())
        for name in step.names:
            key = opened.plan_hash, name
            self.must(
                key not in stepped,
                f"{peer.name} steps {name} of epoch {step.round.epoch} twice under one plan",
            )
            stepped.add(key)

    def stepping(
        self, peer: SimPeer, plan: Plan, owner: Owner, means: Mapping[str, Tensor]
    ) -> None:
        """A step starts from the plan's base version, with optimizer state of its history."""
        at = peer.work.stage.version
        self.must(
            at == plan.base,
            f"{peer.name} steps parts of epoch {plan.epoch} from values of epoch {at.epoch}",
        )
        leads = self.swarm.watch.samples.ancestor
        for name in means:
            through = self._through.get((name, _mark(owner.state(name))))
            self.must(
                through is None or any(leads(v, plan.base) for v in through),
                f"optimizer state of {name} at {peer.name} holds a step of another history, at "
                f"epoch {plan.epoch}",
            )

    def settling(self, peer: SimPeer, owner: Owner, names: Iterable[str]) -> None:
        """Steps that made the version in place are final."""
        version = peer.work.stage.version
        for name in sorted(names):
            key = name, _mark(owner.state(name))
            through = self._through.setdefault(key, [])
            if any(self.swarm.watch.samples.ancestor(v, version) for v in through):
                continue  # it was kept as it is
            through.append(version)
            first = self._settled.setdefault((version, name), peer.name)
            self.must(
                first == peer.name,
                f"{first} and {peer.name} both settle their step of {name} for epoch "
                f"{version.epoch}",
            )


def _mark(state: Mapping[str, HeldTensor]) -> bytes:
    return b"".join(collected(state[key]).numpy().tobytes() for key in sorted(state))


@dataclass
class PurePlan(Checker):
    """I9: the same leader, event and time give the same plan, tried on a copy now and then; and
    nobody objects to one."""

    id = "I9"
    EVERY = 61
    _count: int = 0

    def before(self, leader: Leader, event: Any) -> Leader | None:
        if leader.phase is Phase.RUN or isinstance(event, ev.ClockTick):
            return None
        self._count += 1
        # A copy costs time in proportion to the number of peers; a big swarm makes fewer copies.
        if self._count % (self.EVERY * max(1, len(self.swarm.peers) // 8)):
            return None
        facts = leader.facts
        memory = leader.memory
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
        again = type(twin).handle(twin, event, self.swarm.world.now)
        plans = [a.plan for a in actions if isinstance(a, ev.SendPlan)]
        self.must(
            [p.hash for p in plans] == [a.plan.hash for a in again if isinstance(a, ev.SendPlan)]
            and len(actions) == len(again),
            f"the leader answers {type(event).__name__} in two ways",
        )
        for plan in plans:
            self.must(
                Plan.parse(plan.canonical()).hash == plan.hash,
                f"the plan of epoch {plan.epoch} is not what is read of it",
            )


@dataclass
class _EpochFaults:
    plan: Plan
    faults: list[str] = field(default_factory=list)
    forgiven: bool = False


@dataclass
class OneFault(Checker):
    """I10: an epoch commits if at most one peer died under it, a peer that was not the leader and
    had a live replica."""

    id = "I10"
    CALM_S = 25.0
    _running: dict[PeerId, _EpochFaults] = field(default_factory=dict)
    _disturbed: float = -1e9

    def fault(self, kind: str, killed: PeerId | None = None) -> None:
        """Record a fault. ``killed``: the peer that has died, if it did not lead and a live current
        replica of its stage is left."""
        for r in self._running.values():
            r.faults.append(kind)
            r.forgiven = (
                r.forgiven or killed is None or len(r.faults) > 1 or killed == r.plan.leader
            )
        self._disturbed = self.swarm.world.now

    def leads(self, peer: SimPeer) -> None:
        """A peer begins to lead; other peers know the end of the plans that it made before it
        stopped."""
        self._running.pop(peer.name, None)

    def planned(self, peer: SimPeer, plan: Plan) -> None:
        calm = self.swarm.world.now - self._disturbed > self.CALM_S and self.swarm.calm()
        self._running[peer.name] = _EpochFaults(plan, forgiven=not calm)

    def outgrown(self, peer: SimPeer) -> None:
        """An epoch begins anew for peers that wait."""
        self._running.pop(peer.name, None)

    def ended(self, peer: SimPeer, committed: bool, why: str) -> None:
        r = self._running.pop(peer.name, None)
        if r is not None:
            self.must(
                committed or r.forgiven,
                f"epoch {r.plan.epoch} was given up after {r.faults or 'no fault'}: {why}",
            )


@dataclass
class OneLine(Checker):
    """I11: two leaders of one cell never commit by turns: each commit is of a newer plan than the
    one before, wherever in the network that was. Leaders that go on without enough voters say so,
    and their commits do not count. A leader may hear late that its plan was carried out, after
    others have gone on from its result: that is no step back."""

    id = "I11"
    _last: dict[tuple[str, str], tuple[int, PeerId, str]] = field(default_factory=dict)
    _base: dict[str, str] = field(default_factory=lambda: Newest(KEPT))
    """The lineage that each plan goes on from."""
    _line: dict[str, str] = field(default_factory=lambda: Newest(KEPT))
    """The first plan in the line of each plan; a cell that remembers none of its plans begins a new
    line."""
    _parents: dict[str, str] = field(default_factory=lambda: Newest(KEPT))
    """The parent of each committed lineage."""

    def planned(self, plan: Plan, after: str) -> None:
        """A plan by the voters of the plan with the hash ``after``."""
        key = plan.hash[:12]
        self._base[key] = plan.lineage
        self._line[key] = self._line.get(after[:12], key)

    def committed(self, peer: SimPeer, cell: str, plan: str, term: int, made: Version) -> None:
        """A leader says that the plan whose hash begins with ``plan`` has made this version, and
        not as an orphan."""
        key = cell, self._line.get(plan, plan)
        before, other, newest = self._last.get(key, (0, peer.name, ""))
        if term <= before and self._comes_from(newest, made.lineage):
            return
        self.must(
            term > before,
            f"{peer.name} commits epoch {made.epoch} by a plan of term {term} after {other} has "
            f"committed one of term {before}",
        )
        self._last[key] = term, peer.name, made.lineage
        self._parents[made.lineage] = self._base.get(plan, "")

    def _comes_from(self, lineage: str, older: str) -> bool:
        """Return True if the committed ``lineage`` was made from ``older``."""
        while lineage := self._parents.get(lineage, ""):
            if lineage == older:
                return True
        return False
