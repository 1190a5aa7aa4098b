"""One attempt at an epoch, as its leader tracks it: dead members, the state of each member, the
notes that begin and repeat rounds. Pure."""

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence

from node.consensus.voters import Commitment, decide
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Version
from node.epoch import events as ev
from node.epoch.attempts.digests import StageDigests
from node.epoch.attempts.part_owners import PartOwners
from node.epoch.attempts.results import MicroBatchResults
from node.epoch.attempts.timing import AttemptTimes
from node.epoch.facts import Assign
from node.epoch.peers.versions import majority
from node.epoch.plan_context import makes
from node.pipeline.events import VisitSketches

FEW = 0.03
"""Share of the micro-batches without which an epoch may be closed."""
LATE, LATE_S = 8.0, 2.0
"""Multiple of the usual time between two results, and least seconds, without a result after which
the last micro-batches are late."""
ATTEMPTS = 1 << 8
"""Numbers of attempts at the rounds of one leader."""
COPIES = 2
"""Copies of the parameters that a member may fail to make. Then the epoch goes on without it."""


class Copies:
    """Members that were told to copy their parameters from others."""

    def __init__(self) -> None:
        self._times: Counter[PeerId] = Counter()
        self.last: frozenset[PeerId] = frozenset()
        """Members that copied their parameters in their last round."""

    def round(self, to: Collection[PeerId], copies: bool) -> None:
        """These members begin a round, in which they copy (``copies``) or average."""
        if copies:
            self._times.update(to)
            self.last = self.last.union(to)
        else:
            self.last = self.last.difference(to)

    def is_hopeless(self, peer: PeerId) -> bool:
        """Return True if a member has failed to copy :data:`COPIES` times."""
        return self._times[peer] >= COPIES


class EpochAttempt:
    """The state of one attempt at the epoch of ``plan``. ``leader``: the peer that leads it, which
    made the plan or took the epoch over; ``probation``: members on probation, which only listen;
    ``steady``: no part has another owner than in the epoch before, so nobody waits for optimizer
    state."""

    def __init__(
        self,
        plan: Plan,
        timing: AttemptTimes,
        *,
        leader: PeerId | None = None,
        probation: frozenset[PeerId] = frozenset(),
        steady: bool = False,
    ) -> None:
        self.plan = plan
        self._leader = leader or plan.leader
        self.timing = timing
        self.probation = probation
        self.steady = steady
        self.results = MicroBatchResults(plan)
        self.owners = PartOwners(plan)
        self.copies = Copies()
        self.dead: set[PeerId] = set()
        self.outcomes: dict[PeerId, ev.Committed | ev.Incomplete] = {}
        """The report of each member on its current round."""
        self.attempts: dict[int, int] = {}
        """Number of the current round of each stage, from the first one on."""
        self.sketches: dict[PeerId, tuple[VisitSketches, ...]] = {}
        """Sketches of the tensors of each member."""

    # ----------------------------------------------------------- members

    @property
    def alive(self) -> list[PlanMember]:
        """Members that are not known to be dead."""
        return [m for m in self.plan.members if m.peer not in self.dead]

    @property
    def stages(self) -> list[int]:
        """The stages of the plan's members."""
        return sorted({m.stage for m in self.plan.members})

    @property
    def bare(self) -> int | None:
        """A stage without a living member that holds the version the epoch starts from, or the one
        it makes: only listeners are left there."""
        return self._bare_without(())

    def _bare_without(self, away: Collection[PeerId]) -> int | None:
        """As :attr:`bare`, if these members were dead too."""
        committed = self.committed
        here = [m for m in self.alive if m.peer not in away]
        able = {m.stage for m in here if m.current or m.peer in committed}
        return next((stage for stage in self.stages if stage not in able), None)

    def can_spare(self, away: Collection[PeerId]) -> bool:
        """Return True if the epoch can be committed without these members."""
        rest = {m.peer for m in self.alive if m.peer not in away}
        return self._bare_without(away) is None and decide(self.plan.electorate, rest)

    @property
    def awaited(self) -> set[PeerId]:
        """Living members that must commit before the epoch ends. Members on probation are left out
        if the others can commit it."""
        alive = {m.peer for m in self.alive}
        if self.can_spare(self.probation):
            return alive - self.probation
        return alive

    @property
    def unreported(self) -> list[PeerId]:
        """Awaited members that have not reported the end of their round."""
        return sorted(self.awaited - self.outcomes.keys())

    def living(self, stage: int) -> list[PlanMember]:
        """Members of a stage that are not known to be dead."""
        return [m for m in self.plan.stage(stage) if m.peer not in self.dead]

    def lose(self, peers: Collection[PeerId]) -> None:
        """Go on without these members: they are dead, or took parameters which no honest owner
        gives."""
        for peer in peers:
            self.dead.add(peer)
            self.outcomes.pop(peer, None)

    @property
    def taken_over(self) -> bool:
        """True if another leader began this epoch."""
        return self._leader != self.plan.leader

    def waits_for_few(self, now: float) -> bool:
        """Return True if the last few micro-batches are so late that waiting for them costs the
        others more than they bring: at most :data:`FEW` of all are missing, and nothing has come
        for :data:`LATE` times the usual time between two results. Their samples go back. The usual
        time is not known of an epoch that was taken over: many results come at once."""
        count = self.results.count
        missing = len(self.plan.paths) - count
        if self.taken_over or not 0 < missing <= FEW * len(self.plan.paths):
            return False
        usual_s = (self.timing.reported - self.timing.started) / count
        return now - self.timing.reported > max(LATE_S, LATE * usual_s)

    # ----------------------------------------------------------- rounds

    def is_stale(self, e: ev.Incomplete, stage: int) -> bool:
        """Return True if a report is of an earlier round of its stage, or of a member that has
        committed since."""
        committed = isinstance(self.outcomes.get(e.peer), ev.Committed)
        return committed or e.attempt != self.attempts[stage]

    def take(self, e: ev.Committed | ev.Incomplete, now: float) -> None:
        """A living member reports the end of its round. Repetitions give nobody more time."""
        if e.peer not in self.outcomes:
            self.timing.heard(now)
        self.outcomes[e.peer] = e
        if self.timing.enough > now and self.can_spare(self.uncommitted):
            self.timing.can_commit(now)

    def open(self, assign: Assign) -> list[ev.SendRound]:
        """The notes that tell the living members of every stage to average."""
        return [
            self._round(
                stage,
                tuple(m.peer for m in self.living(stage)),
                self._reown(stage, {}, assign),
                self.timing.round_s,
            )
            for stage in self.stages
        ]

    @property
    def _first(self) -> int:
        """Number of the first attempt at the rounds. Every member has a range of numbers of its own
        for the case that it takes the epoch over, so that rounds of two leaders are never taken for
        one."""
        if not self.taken_over:
            return 0
        return ATTEMPTS * (1 + [m.peer for m in self.plan.members].index(self._leader))

    def number_rounds(self) -> None:
        """Every stage begins its first round."""
        self.attempts = dict.fromkeys(self.stages, self._first)

    def next_round(self, stage: int) -> int:
        """A stage repeats its round. Returns the number of the repetition, from 1."""
        self.attempts[stage] += 1
        return self.attempts[stage] - self._first

    def repair(
        self, stage: int, unfinished: Sequence[PeerId], assign: Assign, deadline_s: float
    ) -> ev.SendRound:
        """The note after a round in which some members of the stage did not get all parts: copy
        from members that have committed; if there are none, average again with new owners for the
        parts of dead and stuck ones."""
        awaited = self.awaited
        said = {p: d for p, d in self.stage_digests(stage).said.items() if p in awaited}
        ended = {p: o for p in unfinished if isinstance(o := self.outcomes.pop(p), ev.Incomplete)}
        to = tuple(unfinished)
        if said:
            # A member with another digest would be blamed for not giving this one.
            most = majority(said, "")
            sources = tuple(p for p, digest in said.items() if digest == most)
            return self._round(stage, to, {}, deadline_s, sources, most)
        self.owners.blame(ended)
        owners = self._reown(stage, self.owners.holders(ended), assign)
        return self._round(stage, to, owners, deadline_s)

    def _reown(
        self, stage: int, holders: Mapping[str, PeerId], assign: Assign
    ) -> dict[str, PeerId]:
        """The owners of a stage's parts that differ from the plan's; see
        :meth:`PartOwners.reown`."""
        return self.owners.reown(stage, self.living(stage), self.dead, holders, assign)

    def _round(
        self,
        stage: int,
        to: tuple[PeerId, ...],
        owners: dict[str, PeerId],
        deadline_s: float,
        sources: tuple[PeerId, ...] = (),
        digest: str = "",
    ) -> ev.SendRound:
        """The note that tells members of a stage to average (again), or to copy from
        ``sources``."""
        self.copies.round(to, bool(sources))
        return ev.SendRound(
            to,
            self.plan,
            ev.RoundArrived(
                self._leader,
                self.plan.epoch,
                self.plan.term,
                self.plan.hash,
                self.attempts[stage],
                tuple(sorted(self.dead)),
                owners,
                sources,
                self.results.dropped,
                deadline_s,
                digest,
                ev.EpochTally(self.results.tokens, self.results.seed),
            ),
        )

    def accusations(self, stage: int) -> dict[PeerId, tuple[frozenset[PeerId], int]]:
        """For each owner that was accused of impossible parameters: the members of its stage that
        refused its parts, and the number of members that took some of them."""
        here = {m.peer: self.outcomes.get(m.peer) for m in self.living(stage) if m.current}
        found: dict[PeerId, tuple[frozenset[PeerId], int]] = {}
        for owner in here:
            parts = self.owners.parts(owner)
            by = set[PeerId]()
            believers = 0
            for member, outcome in here.items():
                if member == owner:
                    continue
                if isinstance(outcome, ev.Incomplete) and owner in outcome.impossible:
                    by.add(member)
                elif isinstance(outcome, ev.Committed):
                    believers += 1
                elif outcome is not None:
                    believers += not parts.isdisjoint(outcome.holds)
            if by:
                found[owner] = frozenset(by), believers
        return found

    # ----------------------------------------------------------- commit

    @property
    def makes(self) -> Version:
        """The version this epoch makes if it is closed as it stands."""
        return makes(self.plan, self.results.dropped)

    @property
    def committed(self) -> set[PeerId]:
        """Members that hold the version this epoch makes."""
        return {p for p, o in self.outcomes.items() if isinstance(o, ev.Committed)}

    @property
    def uncommitted(self) -> set[PeerId]:
        """Living members that do not hold the version this epoch makes yet."""
        return {m.peer for m in self.alive} - self.committed

    def commit(self, void: Container[PeerId] = ()) -> Commitment | None:
        """The commit of the version this epoch makes, without the votes of ``void``; None if nobody
        has voted, or the history goes on without a majority."""
        e = self.plan.electorate
        counts = {*e.voters, *e.elders}
        votes = tuple(
            (m.peer, m.stage, o.attempt, o.digest)
            for m in self.plan.members
            if m.peer in counts
            and m.peer not in void
            and isinstance(o := self.outcomes.get(m.peer), ev.Committed)
            and o.voted
        )
        if e.orphan or not votes:
            return None
        return Commitment(self.plan.cell_id, self.plan.term, self.makes, e.voters, votes)

    def digests(self) -> tuple[dict[int, str], list[tuple[int, PeerId]], list[int]]:
        """Compare the digests once all have committed. Returns the agreed digest of each stage,
        (stage, peer) of each member with another digest, and the stages in which no majority shows
        the right parameters."""
        agreed: dict[int, str] = {}
        strays: list[tuple[int, PeerId]] = []
        disputed: list[int] = []
        for stage in self.stages:
            digests = self.stage_digests(stage)
            agreed[stage], sure = digests.verdict()
            strays += [(stage, p) for p in digests.strays(agreed[stage])]
            if not sure:
                disputed.append(stage)
        return agreed, strays, disputed

    def stage_digests(self, stage: int) -> StageDigests:
        """Digests that the stage's committed members report."""
        members = self.plan.stage(stage)
        said = {
            m.peer: o.digest
            for m in members
            if isinstance(o := self.outcomes.get(m.peer), ev.Committed)
        }
        current = [m.peer for m in members if m.current]
        return StageDigests(said, current, self.copies.last)
