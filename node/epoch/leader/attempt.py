"""One attempt at an epoch, as its leader tracks it: the result of every micro-batch, dead members,
the state of each member. Pure."""

import math
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from node.consensus.voters import Commitment, decide
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Version
from node.epoch import events as ev
from node.epoch.facts import Assign
from node.epoch.leader.roster import majority
from node.epoch.pace import ALL_OWN
from node.epoch.plan_context import makes
from node.pipeline.events import MicroBatchDone

COPIES = 2
"""Copies of the parameters that a member may fail to make. Then the epoch goes on without it."""
STUCK_ROUNDS = 2
"""Rounds in a row without its parts after which an owner that lives, but does not step, owns
nothing in this epoch."""


@dataclass
class EpochAttempt:
    """The state of one attempt. ``results``: by micro-batch; ``outcomes``: by member; ``attempts``:
    number of the current round of each stage, from 0; ``owners``: by part, only owners that differ
    from the plan's. Times are by the leader's clock."""

    plan: Plan
    started: float
    deadline: float
    closed: float = 0.0
    round_s: float = 0.0
    """The longest deadline that an attempt of its round has had, in seconds."""
    late_at: float = math.inf
    """Time from which a few members that have not reported are late."""
    reported: float = 0.0
    """Time of the last report that said something new."""
    enough: float = math.inf
    """Time from which the epoch could be committed without the members that have not committed."""
    steady: bool = False
    """True if no part has another owner than in the epoch before, so nobody waits for optimizer
    state."""
    probation: frozenset[PeerId] = frozenset()
    """Members on probation, which only listen."""
    results: dict[int, MicroBatchDone] = field(default_factory=dict)
    dead: set[PeerId] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    outcomes: dict[PeerId, ev.Committed | ev.Incomplete] = field(default_factory=dict)
    owners: dict[str, PeerId] = field(default_factory=dict)
    stuck: dict[PeerId, int] = field(default_factory=dict)
    """Rounds in a row in which a living owner did not get its parts stepped."""
    copies: Counter[PeerId] = field(default_factory=Counter)
    """Times that each member was told to copy its parameters."""
    copied: set[PeerId] = field(default_factory=set)
    """Members that copied their parameters in the last round: their digest is no evidence of which
    parameters are right."""

    @property
    def dropped(self) -> tuple[int, ...]:
        """Micro-batches that do not count."""
        return tuple(sorted(i for i, r in self.results.items() if not r.counted))

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batches that count."""
        return sum(r.tokens for r in self.results.values() if r.counted)

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

    @property
    def silent_origins(self) -> list[PeerId]:
        """Ends peers without a result of any of their micro-batches, if all others have reported
        all of theirs; else empty."""
        paths = [path for path in self.plan.paths if path.origin not in self.dead]
        told = {path.origin for path in paths if path.index in self.results}
        missing = {path.origin for path in paths if path.index not in self.results}
        if told and told.isdisjoint(missing):
            return sorted(missing)
        return []

    def living(self, stage: int) -> list[PlanMember]:
        """Members of a stage that are not known to be dead."""
        return [m for m in self.plan.stage(stage) if m.peer not in self.dead]

    @property
    def makes(self) -> Version:
        """The version this epoch makes if it is closed as it stands."""
        return makes(self.plan, self.dropped)

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

    @property
    def began(self) -> float:
        """Time at which its run, or its round, began."""
        return self.closed or self.started

    def report(self, e: ev.MicroBatchesReported, most_tokens: int) -> None:
        """Take an ends peer's results for its own micro-batches. The first result of each counts,
        because a micro-batch contributes at most once; one with more than ``most_tokens`` tokens
        (0: no bound) is ignored."""
        mine = {p.index for p in self.plan.paths if p.origin == e.peer}
        for result in e.results:
            if result.index in mine and not 0 < most_tokens < result.tokens:
                self.results.setdefault(result.index, result)

    def give_up(self, origin: PeerId | None) -> None:
        """Drop the unfinished micro-batches of this ends peer, or of all with None."""
        for path in self.plan.paths:
            if origin in (None, path.origin):
                self.results.setdefault(path.index, MicroBatchDone(path.index, False))

    def blame(self, ended: Mapping[PeerId, ev.Incomplete]) -> None:
        """Count a round that nobody completed in :attr:`stuck`, for each living owner that did not
        step its parts: its own report lacks some of them, or most of the others report that it gave
        them nothing."""
        owners = {**self.plan.owners, **self.owners}
        now: set[PeerId] = set()
        for peer, outcome in ended.items():
            mine = {part for part, owner in owners.items() if owner == peer}
            accusers = sum(peer in o.failed for other, o in ended.items() if other != peer)
            if not mine <= set(outcome.holds) or (mine and 2 * accusers > len(ended) - 1):
                now.add(peer)
        self.stuck = {p: rounds for p, rounds in self.stuck.items() if p not in ended} | {
            p: self.stuck.get(p, 0) + 1 for p in now
        }

    def reown(self, stage: int, holders: Mapping[str, PeerId], assign: Assign) -> dict[str, PeerId]:
        """Move the parts of dead owners, and of owners stuck for ``STUCK_ROUNDS``, to a peer that
        holds them fresh, else to the one that ``assign`` chooses. If all living owners are stuck,
        only parts of dead owners move. Returns the stage's owners that differ from the plan's."""
        peers = {m.peer for m in self.plan.stage(stage)}
        current = {
            part: self.owners.get(part, owner)
            for part, owner in self.plan.owners.items()
            if owner in peers
        }
        able_here = [(m.peer, m.speed) for m in self.living(stage) if m.current]
        if not able_here:
            return {}
        hung = {p for p, rounds in self.stuck.items() if rounds >= STUCK_ROUNDS}
        if len(peers) > ALL_OWN:
            # Only of the owners it is known that every other replica reaches them.
            owning = set(current.values()) - hung
            able_here = [(p, speed) for p, speed in able_here if p in owning] or able_here
        able = [(p, speed) for p, speed in able_here if p not in hung]
        useless = self.dead | hung
        if not able:
            useless = self.dead
            able = able_here
        orphans = {p for p, o in current.items() if o in useless}
        if orphans:
            kept = {part: owner for part, owner in current.items() if part not in orphans}
            repaired = assign(stage, able, kept, {})
            for part in orphans:
                self.owners[part] = holders.get(part, repaired[part])
        return {part: self.owners[part] for part in current if part in self.owners}

    def round(
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
        if sources:
            self.copied = self.copied | set(to)
            self.copies.update(to)
        else:
            self.copied = self.copied - set(to)
        return ev.SendRound(
            to,
            self.plan,
            ev.RoundArrived(
                self.plan.leader,
                self.plan.epoch,
                self.plan.term,
                self.plan.hash,
                self.attempts[stage],
                tuple(sorted(self.dead)),
                owners,
                sources,
                self.dropped,
                deadline_s,
                digest,
                self.tokens,
            ),
        )

    def accusations(self, stage: int) -> dict[PeerId, tuple[frozenset[PeerId], int]]:
        """For each owner that was accused of impossible parameters: the members of its stage that
        refused its parts, and the number of members that took some of them."""
        owners = {**self.plan.owners, **self.owners}
        here = {m.peer: self.outcomes.get(m.peer) for m in self.living(stage) if m.current}
        found: dict[PeerId, tuple[frozenset[PeerId], int]] = {}
        for owner in here:
            parts = {part for part, peer in owners.items() if peer == owner}
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

    def drop(self, peers: Collection[PeerId]) -> None:
        """Go on without members that took parameters which no honest owner gives."""
        for peer in peers:
            self.dead.add(peer)
            self.outcomes.pop(peer, None)

    def camps(self, stage: int) -> list[frozenset[PeerId]]:
        """Members of a stage grouped by the parameters that they made, without copies, and without
        listeners if there are others."""
        camps: dict[str, set[PeerId]] = {}
        for peer, digest in self._witnesses(stage, self._digests(stage)).items():
            camps.setdefault(digest, set()).add(peer)
        return [frozenset(camps[digest]) for digest in sorted(camps)]

    def rounds(self, assign: Assign) -> list[ev.SendRound]:
        """The notes that tell the living members of every stage to average."""
        return [
            self.round(
                stage,
                tuple(m.peer for m in self.living(stage)),
                self.reown(stage, {}, assign),
                self.round_s,
            )
            for stage in self.stages
        ]

    def repair(
        self, stage: int, unfinished: Sequence[PeerId], assign: Assign, deadline_s: float
    ) -> ev.SendRound:
        """The note after a round in which some members of the stage did not get all parts: copy
        from members that have committed; if there are none, average again with new owners for the
        parts of dead and stuck ones."""
        awaited = self.awaited
        said = {p: d for p, d in self._digests(stage).items() if p in awaited}
        ended = {p: o for p in unfinished if isinstance(o := self.outcomes.pop(p), ev.Incomplete)}
        to = tuple(unfinished)
        if said:
            # A member with another digest would be blamed for not giving this one.
            most = majority(said, "")
            sources = tuple(p for p, digest in said.items() if digest == most)
            return self.round(stage, to, {}, deadline_s, sources, most)
        self.blame(ended)
        # The first of them that holds a part fresh; not its owner, which may give it to nobody.
        owners = {**self.plan.owners, **self.owners}
        holders: dict[str, PeerId] = {}
        for peer, outcome in ended.items():
            for part in outcome.holds:
                if owners.get(part) != peer:
                    holders.setdefault(part, peer)
        return self.round(stage, to, self.reown(stage, holders, assign), deadline_s)

    def digests(self) -> tuple[dict[int, str], list[tuple[int, PeerId]], list[int]]:
        """Compare the digests once all have committed. Returns the agreed digest of each stage,
        (stage, peer) of each member with another digest, and the stages in which no majority shows
        the right parameters."""
        agreed: dict[int, str] = {}
        strays: list[tuple[int, PeerId]] = []
        disputed: list[int] = []
        for stage in self.stages:
            said = self._digests(stage)
            agreed[stage], sure = self._verdict(stage, said)
            strays += [(stage, p) for p in sorted(said) if said[p] != agreed[stage]]
            if not sure:
                disputed.append(stage)
        return agreed, strays, disputed

    def _digests(self, stage: int) -> dict[PeerId, str]:
        """Digests that the stage's committed members report."""
        return {
            m.peer: o.digest
            for m in self.plan.stage(stage)
            if isinstance(o := self.outcomes.get(m.peer), ev.Committed)
        }

    def _verdict(self, stage: int, said: Mapping[PeerId, str]) -> tuple[str, bool]:
        """The most common digest of ``said`` among members that have not copied it, and True if
        more than half of them have it; failing that, the same among members that held the version
        before."""
        own = self._own(said)
        witnesses = self._witnesses(stage, said)
        for words in (own, witnesses):
            most = majority(words, "")
            if 2 * sum(digest == most for digest in words.values()) > len(words):
                return most, True
        return majority(witnesses, ""), False

    def _own(self, said: Mapping[PeerId, str]) -> Mapping[PeerId, str]:
        """Digests of members that have not copied their parameters, if there are any."""
        return {p: digest for p, digest in said.items() if p not in self.copied} or said

    def _witnesses(self, stage: int, said: Mapping[PeerId, str]) -> Mapping[PeerId, str]:
        """The digests that say most about the right parameters: from members that held the version
        before, if there are any."""
        own = self._own(said)
        current = [m.peer for m in self.plan.stage(stage) if m.current]
        return {p: own[p] for p in current if p in own} or own
