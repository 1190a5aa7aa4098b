"""One attempt at an epoch as its leader keeps it: what became of every micro-batch, who died, who
has what. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from node.averaging.reducers.spread import Sketch, apart
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Unit, Version, in_cell
from node.training.leader.roster import majority
from node.training.protocol import events as ev
from node.training.protocol.meetings import PUSH_AGAIN
from node.training.protocol.plan_context import makes

STUCK_ROUNDS = 2
"""Rounds in a row without its parts after which an owner that lives, but does not step, owns
nothing in this epoch."""

Assign = Callable[
    [int, Sequence[tuple[PeerId, float]], Mapping[str, PeerId] | None], dict[str, PeerId]
]
"""``(stage, ((peer, speed), …), previous owners) -> owners`` of the parts of one stage."""


@dataclass
class EpochAttempt:
    """``results`` by micro-batch, ``outcomes`` by member; ``attempts`` counts the rounds of each
    unit, ``owners`` are those that differ from the plan's, named as there. Times are the leader's
    clock."""

    plan: Plan
    started: float
    deadline: float
    closed: float = 0.0
    round_s: float = 0.0
    """The longest deadline that an attempt of its round has had, seconds."""
    results: dict[int, ev.MicroBatchResult] = field(default_factory=dict)
    dead: set[PeerId] = field(default_factory=set)
    attempts: dict[Unit, int] = field(default_factory=dict)
    outcomes: dict[PeerId, ev.Committed | ev.Incomplete] = field(default_factory=dict)
    owners: dict[str, PeerId] = field(default_factory=dict)
    repaired: int = 0
    pushes: bool = False
    """An outer round without a barrier: every cell is answered by itself, and ends with parameters
    of its own."""
    stuck: dict[PeerId, int] = field(default_factory=dict)
    """Rounds in a row in which a living owner did not get its parts stepped."""
    copied: set[PeerId] = field(default_factory=set)
    """Who took what others had whole, and bears no witness to whether it is right."""

    @property
    def dropped(self) -> tuple[int, ...]:
        """Micro-batches that do not count."""
        return tuple(sorted(i for i, r in self.results.items() if not r.counted))

    @property
    def tokens(self) -> int:
        """Of the micro-batches that count."""
        return sum(r.tokens for r in self.results.values() if r.counted)

    @property
    def alive(self) -> list[PlanMember]:
        """Members that are not known to be dead."""
        return [m for m in self.plan.members if m.peer not in self.dead]

    @property
    def bare(self) -> int | None:
        """A stage without a living member that holds the version the epoch starts from, or the one
        it makes."""
        stages = {m.stage for m in self.plan.members} - {unit[0] for unit in self.units}
        return min(stages, default=None)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Those that somebody living can bring to the next version. Of the others only listeners
        are left, whom nobody waits for; a cell that is gone takes with it what it had learned since
        it last met others."""
        able = [
            m
            for m in self.alive
            if m.current or isinstance(self.outcomes.get(m.peer), ev.Committed)
        ]
        return tuple(sorted({self.plan.unit_of(m) for m in able}))

    @property
    def awaited(self) -> list[PlanMember]:
        """Living members of living units."""
        units = set(self.units)
        return [m for m in self._coming(self.plan.members) if self.plan.unit_of(m) in units]

    def living(self, unit: Unit) -> list[PlanMember]:
        """Members of a unit that are not known to be dead, and can come to the next version."""
        return self._coming(self.plan.unit(unit))

    def _coming(self, members: Sequence[PlanMember]) -> list[PlanMember]:
        """Those of whole cells that are not known to be dead, and can come to the next version:
        after a round of a fragment only one's own cell has the other parts, so that nobody waits
        for the listeners of a cell that is gone."""
        alive = [m for m in members if m.peer not in self.dead]
        if not self.plan.fragment:
            return alive
        able = {
            (m.stage, m.cell)
            for m in alive
            if m.current or isinstance(self.outcomes.get(m.peer), ev.Committed)
        }
        return [m for m in alive if (m.stage, m.cell) in able]

    @property
    def final_owners(self) -> dict[str, PeerId]:
        """Who stepped what in the end."""
        return dict(self.plan.owners) if self.plan.outer else {**self.plan.owners, **self.owners}

    @property
    def makes(self) -> Version:
        """The version this epoch makes when it is closed as it stands."""
        return makes(self.plan, self.dropped)

    @property
    def committed(self) -> set[PeerId]:
        """Members that hold what it makes."""
        return {p for p, o in self.outcomes.items() if isinstance(o, ev.Committed)}

    def apart(self, agreed: Mapping[Unit, str]) -> dict[int, tuple[int, float]]:
        """How many cells of a stage could be compared and how far they are apart, by stage;
        ``agreed``: what each cell holds."""
        told: dict[Unit, dict[PeerId, Sketch]] = {}
        for m in self.plan.members:
            o = self.outcomes.get(m.peer)
            if (
                isinstance(o, ev.Committed)
                and o.sketch
                and o.digest == agreed.get((m.stage, m.cell))
            ):
                told.setdefault((m.stage, m.cell), {})[m.peer] = o.sketch
        cells: dict[int, list[Sketch]] = {}
        for (stage, _), said in sorted(told.items()):
            cells.setdefault(stage, []).append(majority(said))
        return {stage: (len(of), apart(of)) for stage, of in cells.items() if len(of) > 1}

    def report(self, e: ev.MicroBatchesReported, most_tokens: int) -> None:
        """An ends peer's word on its own micro-batches. The first word counts, for a micro-batch
        contributes at most once; more than ``most_tokens`` (0: no bound) is not heard."""
        mine = {p.index for p in self.plan.paths if p.origin == e.peer}
        for result in e.results:
            if result.index in mine and not 0 < most_tokens < result.tokens:
                self.results.setdefault(result.index, result)

    def give_up(self, origin: PeerId | None) -> None:
        """What is not finished of this ends peer (of all: None) does not count."""
        for path in self.plan.paths:
            if origin in (None, path.origin):
                self.results.setdefault(path.index, ev.MicroBatchResult(path.index, False, 0.0, 0))

    def blame(self, ended: Mapping[PeerId, ev.Incomplete]) -> None:
        """After a round that nobody completed: which owners, though alive, did not step their
        parts.

        It says so itself, or most of the others say that it gave them nothing.
        """
        owners = {**(self.plan.reducers if self.plan.outer else self.plan.owners), **self.owners}
        now: set[PeerId] = set()
        for peer, outcome in ended.items():
            mine = {part.partition("#")[0] for part, owner in owners.items() if owner == peer}
            accusers = sum(peer in o.failed for other, o in ended.items() if other != peer)
            if not mine <= set(outcome.holds) or (mine and 2 * accusers > len(ended) - 1):
                now.add(peer)
        others = {p: rounds for p, rounds in self.stuck.items() if p not in ended}
        self.stuck = others | {p: self.stuck.get(p, 0) + 1 for p in now}

    def reown(
        self,
        unit: Unit,
        holders: Mapping[str, PeerId],
        assign: Assign,
        among: Collection[PeerId] = (),
    ) -> dict[str, PeerId]:
        """Owners of a living unit's parts that differ from the plan's, by the parts' own names:
        those of the dead, and of who was stuck for ``STUCK_ROUNDS``, go to whoever holds them
        fresh, else are repaired; to one of ``among``, unless that is empty.
        """
        stage, number = unit
        peers = {m.peer for m in self.plan.unit(unit)}
        planned = {
            part: owner for part, owner in self.plan.averagers(unit).items() if owner in peers
        }
        current = {
            part: self.owners.get(in_cell(part, number), owner) for part, owner in planned.items()
        }
        cell = [
            (m.peer, m.speed)
            for m in self.living(unit)
            if m.current and (not among or m.peer in among)
        ]
        if not cell:
            return {}
        hung = {p for p, rounds in self.stuck.items() if rounds >= STUCK_ROUNDS}
        able = [(p, speed) for p, speed in cell if p not in hung]
        useless, cell = (self.dead | hung, able) if able else (self.dead, cell)
        orphans = {p for p, o in current.items() if o in useless}
        if orphans:
            able_too = {peer for peer, _ in cell}
            repaired = assign(
                stage,
                cell,
                {p: o for p, o in current.items() if p not in orphans and o in able_too},
            )
            for part in orphans:
                self.owners[in_cell(part, number)] = holders.get(part, repaired[part])
        changed = {part: self.owners.get(in_cell(part, number)) for part in current}
        return {part: owner for part, owner in changed.items() if owner is not None}

    def round(
        self,
        unit: Unit,
        to: tuple[PeerId, ...],
        owners: dict[str, PeerId],
        deadline_s: float,
        sources: tuple[PeerId, ...] = (),
        digest: str = "",
        among: tuple[PeerId, ...] = (),
    ) -> ev.SendRound:
        """The word to these members of a unit that they average (again), or copy from
        ``sources``."""
        dead = tuple(sorted(self.dead))
        self.copied = self.copied | set(to) if sources else self.copied - set(to)
        return ev.SendRound(
            to,
            self.plan,
            self.attempts[unit],
            dead,
            owners,
            sources,
            self.dropped,
            deadline_s,
            digest,
            self.tokens,
            among,
        )

    def repair(
        self, unit: Unit, unfinished: Sequence[PeerId], assign: Assign, deadline_s: float
    ) -> list[ev.SendRound]:
        """Nobody in the unit is averaging any more and some lack parts: copy from who has all, else
        re-own the dead's."""
        said = {
            m.peer: o.digest
            for m in self.living(unit)
            if isinstance(o := self.outcomes.get(m.peer), ev.Committed)
        }
        ended = {p: o for p in unfinished if isinstance(o := self.outcomes.pop(p), ev.Incomplete)}
        self.repaired += 1
        if self.pushes and said:
            return self._push_again(unit, ended, said, assign, deadline_s)
        if said:
            digest = "" if self.plan.fragment else majority(said)
            return [self.round(unit, tuple(unfinished), {}, deadline_s, tuple(said), digest)]
        self.blame(ended)
        return [
            self.round(
                unit, tuple(unfinished), self.reown(unit, _holders(ended), assign), deadline_s
            )
        ]

    def _push_again(
        self,
        unit: Unit,
        ended: Mapping[PeerId, ev.Incomplete],
        said: Mapping[PeerId, str],
        assign: Assign,
        deadline_s: float,
    ) -> list[ev.SendRound]:
        """Some cells have been answered and some have not. Those push again, to who serves or
        serves from now on, a few times, as long as it is there for them; who lags behind its own
        cell copies from it, and who is not answered at all from any other.
        """
        home = {m.peer: m.cell for m in self.living(unit)}
        mates = {
            cell: tuple(q for q in sorted(said) if home[q] == cell) for cell in set(home.values())
        }
        lacking = tuple(p for p in sorted(ended) if not mates[home[p]])
        again: list[ev.SendRound] = []
        if lacking and self.attempts[unit] <= PUSH_AGAIN:
            self.blame(ended)
            changed = self.reown(unit, _holders({p: ended[p] for p in lacking}), assign, lacking)
            owners = {
                part: o for part, o in {**self.plan.averagers(unit), **changed}.items() if o in home
            }
            held = set.intersection(*(set(ended[p].holds) for p in lacking))
            asked = {o for part, o in owners.items() if part not in held}
            # Who serves and is done already takes no part in another attempt.
            if asked <= ended.keys():
                to = tuple(sorted({*lacking, *(set(owners.values()) & ended.keys())}))
                again = [self.round(unit, to, changed, deadline_s, among=lacking)]
        rest = sorted(ended.keys() - {p for r in again for p in r.to})
        sources = {p: mates[home[p]] or tuple(sorted(said)) for p in rest}
        for among in dict.fromkeys(sources.values()):
            to = tuple(p for p in rest if sources[p] == among)
            again.append(
                self.round(unit, to, {}, deadline_s, among, majority({q: said[q] for q in among}))
            )
        return again

    def digests(self) -> tuple[dict[Unit, str], list[tuple[int, PeerId]]]:
        """What each cell that worked has agreed on, and (stage, peer) of those that differ from
        most who should hold the same."""
        agreed: dict[Unit, str] = {}
        strays: list[tuple[int, PeerId]] = []
        for stage, alike, said in self._compared():
            best, _ = self._verdict(alike, said)
            agreed |= {(stage, m.cell): best for m in alike}
            strays += [
                (stage, p) for p in sorted(p for p, digest in said.items() if digest != best)
            ]
        return agreed, strays

    @property
    def disputed(self) -> tuple[int, ...]:
        """Stages in which members that should hold the same do not, and nobody can say whose
        parameters are right."""
        return tuple(
            sorted(
                {
                    stage
                    for stage, alike, said in self._compared()
                    if not self._verdict(alike, said)[1]
                }
            )
        )

    def _compared(self) -> Iterator[tuple[int, list[PlanMember], dict[PeerId, str]]]:
        """Stage, members that must end with the same, and the digests they report."""
        for unit in self.units:
            for alike in self._alike(self.plan.unit(unit)):
                said = {
                    m.peer: o.digest
                    for m in alike
                    if isinstance(o := self.outcomes.get(m.peer), ev.Committed)
                }
                if said:
                    yield unit[0], alike, said

    def _verdict(self, alike: Sequence[PlanMember], said: Mapping[PeerId, str]) -> tuple[str, bool]:
        """What most of ``said`` hold who have not copied it, and whether that is more than half of
        them, or else of those who held the version before."""
        own = {p: digest for p, digest in said.items() if p not in self.copied} or said
        elders = {m.peer: own[m.peer] for m in alike if m.current and m.peer in own}
        for words in (own, elders):
            if words and 2 * sum(digest == majority(words) for digest in words.values()) > len(
                words
            ):
                return majority(words), True
        return majority(elders or own), False

    def _alike(self, members: Sequence[PlanMember]) -> list[list[PlanMember]]:
        """Members of a unit by what they must end with: all the same, or each cell its own."""
        cells = sorted({m.cell for m in members}) if self.pushes or self.plan.fragment else []
        return [[m for m in members if m.cell == cell] for cell in cells] or [list(members)]


def _holders(ended: Mapping[PeerId, ev.Incomplete]) -> dict[str, PeerId]:
    """Somebody who holds each part fresh."""
    found: dict[str, PeerId] = {}
    for peer, outcome in ended.items():
        found.update({part: peer for part in outcome.holds if part not in found})
    return found
