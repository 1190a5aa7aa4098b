"""Route of a tensor: the hop that comes next if stages are left out, the journeys that a plan
allows, the replica of that hop that gets the tensor, and the next replica after that. Pure: hops,
peers and times in; a hop, a peer or a pause out."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.pipeline.events import Claim, Direction, Trouble

NOBODY = PeerId("")
"""The peer of a hop that a journey leaves out. The hop keeps its position, so keys mean the same to
everybody."""
SUSPECT_S = 10.0
"""Seconds for which a peer that has failed is asked last: eight micro-batches need not all find out
by themselves."""
ATTEMPTS = 2
"""Failures of one peer, for one tensor, before it counts as gone: a single reset connection is not
a death."""
PAUSE_S = (0.02, 0.64)
"""First and longest pause, in seconds, when everybody was asked and nobody took it; doubles in
between."""


def fewest_hops(stages: int, may_skip: float) -> int:
    """The block stages a journey must visit when ``may_skip`` of ``stages`` may be left out: one at
    least."""
    return max(1, stages - math.floor(may_skip * stages + 1e-9))


def visited(journey: Sequence[Hop]) -> int:
    """Block stages this journey visits."""
    return sum(hop.stage != ENDS and hop.peer != NOBODY for hop in journey)


def skipped(journey: Sequence[Hop], position: int) -> tuple[int, ...]:
    """The positions before ``position`` that are left out. Two tensors of one micro-batch are equal
    when these are."""
    return tuple(i for i in range(position) if journey[i].peer == NOBODY)


def beside(journey: Sequence[Hop], position: int, way: Direction) -> int:
    """The next position that is visited, onwards for FORWARD, back for BACKWARD; -1 or
    ``len(journey)`` beyond the ends."""
    step = 1 if way is Direction.FORWARD else -1
    at = position + step
    while 0 <= at < len(journey) and journey[at].peer == NOBODY:
        at += step
    return at


def wire_of(plan: Plan, path: Path, position: int, way: Direction) -> str:
    """Number format of the tensor that the hop at ``position`` of a micro-batch sends; "" for the
    run's. It is the plan's for the peers between which ``path``, the plan's, has this tensor go. So
    a sender's bytes stay as they are when others take the place of these peers, and its receiver
    expects them."""
    journey = path.journey
    there = position + 1
    if way is Direction.BACKWARD:
        there = position - 1
    if not (0 <= position < len(journey) and 0 <= there < len(journey)):
        return ""
    return plan.wires.get((journey[position].peer, journey[there].peer), "")


def current(plan: Plan) -> dict[int, list[PlanMember]]:
    """Members of each stage that hold it in the plan's parameters, in PeerId order."""
    found: dict[int, list[PlanMember]] = {}
    for m in sorted(plan.members, key=lambda m: m.peer):
        if m.current:
            found.setdefault(m.stage, []).append(m)
    return found


def predicted(plan: Plan) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
    """Speed of each peer of a block stage, by the plan: its seconds for one micro-batch, and the
    time at which it would be done with one more than the plan gives it. A peer that was not
    measured counts with its stage's median; in a stage without measurements, all peers count
    alike."""
    peers = {stage: cell for stage, cell in current(plan).items() if stage != ENDS}
    usual = {
        s: median(known) if (known := [m.speed for m in row if m.speed > 0]) else 1.0
        for s, row in peers.items()
    }
    each = {m.peer: 1 / (m.speed or usual[s]) for s, row in peers.items() for m in row}
    work = Counter(hop.peer for path in plan.paths for hop in path.hops)
    return each, {p: (work[p] + 1) * seconds for p, seconds in each.items()}


class Workloads:
    """Work of the replicas of block stages in the epoch of a plan, as its members reckon it.

    The micro-batches of a replica that is gone are shared among its siblings by a rule: every
    member finds the same heir for each of them. If each sender chose the sibling that seems to be
    done first, all of them would choose the same one.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan
        self._each: dict[PeerId, float] = {}
        self.done_s: dict[PeerId, float] = {}
        """Time at which each replica would be done with one more micro-batch."""
        if plan is not None:
            self._each, self.done_s = predicted(plan)
        self._heirs: dict[PeerId, dict[int, PeerId]] = {}

    def takes(self, peer: PeerId) -> None:
        """A replica takes one micro-batch more than planned."""
        self.done_s[peer] += self._each[peer]

    def heir(
        self, index: int, peer: PeerId, siblings: Sequence[PeerId], gone: Collection[PeerId]
    ) -> PeerId:
        """The replica that takes micro-batch ``index`` over from ``peer``; ``peer`` itself if there
        is none. ``siblings``: the replicas of its stage; ``gone``: the dead peers."""
        if peer not in self._heirs:
            able = sorted(p for p in siblings if p != peer and p not in gone)
            self._heirs[peer] = self._shared(peer, able)
        return self._heirs[peer].get(index, peer)

    def _shared(self, peer: PeerId, able: Sequence[PeerId]) -> dict[int, PeerId]:
        found: dict[int, PeerId] = {}
        if self._plan is None or not able:
            return found
        for path in self._plan.paths:
            if any(hop.peer == peer for hop in path.hops):
                heir = found[path.index] = min(able, key=lambda p: self.done_s[p])
                self.takes(heir)
        return found


def misfit(
    path: Path,
    claim: Claim,
    way: Direction,
    me: PeerId,
    caller: PeerId,
    fewest: int,
    replicas: Callable[[int], Sequence[PeerId]],
) -> str:
    """Reason for which this journey is not the plan's with replicas swapped and hops left out, or
    not ``caller``'s to send; empty if it is both.

    ``replicas(stage)`` are the peers that may stand in for each other at a block stage.
    """
    planned = path.journey
    journey = claim.journey
    if len(planned) != len(journey):
        return "the journey is not the plan's"
    for hop, meant in zip(journey, planned, strict=True):
        swapped = meant.stage != ENDS and (hop.peer == NOBODY or hop.peer in replicas(meant.stage))
        if hop.stage != meant.stage or (hop.peer != meant.peer and not swapped):
            return "the journey is not the plan's"
    if visited(journey) < min(fewest, len(path.hops)):
        return "the journey leaves out too much"
    sender = beside(
        journey,
        claim.position,
        Direction.BACKWARD if way is Direction.FORWARD else Direction.FORWARD,
    )
    if not (0 <= claim.position < len(planned) and 0 <= sender < len(planned)):
        return "no such position"
    if journey[claim.position].peer != me:
        return "not for me"
    return "" if journey[sender].peer == caller else "not from the hop before it"


# Replicas
# ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoutePause:
    """Every peer that might take the tensor was asked; ask again after ``seconds``. ``full``: none
    of them failed, so all have no room."""

    seconds: float
    full: bool


@dataclass(slots=True)
class Suspects:
    """Peers that failed lately, and ``slow`` ones: those measured to answer much later than a
    sibling."""

    slow: frozenset[PeerId] = frozenset()
    gone: set[PeerId] = field(default_factory=set)
    """Dead for the plan in force: not asked at all."""
    _until: dict[PeerId, float] = field(default_factory=dict)

    def add(self, peer: PeerId, now: float) -> None:
        self._until[peer] = now + SUSPECT_S

    def clear(self, peer: PeerId) -> None:
        """A message of the peer came, so it is alive: forget that it failed."""
        self._until.pop(peer, None)

    def has(self, peer: PeerId, now: float) -> bool:
        return self._until.get(peer, 0.0) > now


@dataclass(slots=True)
class Delivery:
    """One tensor on its way to one stage.

    ``spread`` (the micro-batch's index) turns the order of the replicas, so that the work of a dead
    one is shared.
    """

    spread: int
    failures: dict[PeerId, int] = field(default_factory=dict)
    refused: set[PeerId] = field(default_factory=set)
    asked: set[PeerId] = field(default_factory=set)
    full: bool = True
    """No peer has failed since all were asked last."""
    pauses: int = 0
    patient: bool = False
    """The peer chosen last is to be waited for when it has no room: all others were asked, or there
    are none."""

    def turned(self, peer: PeerId, trouble: Trouble) -> None:
        """Record what came of asking ``peer``."""
        self.asked.add(peer)
        if trouble is Trouble.REFUSED:
            self.refused.add(peer)
        elif trouble is Trouble.FAILED:
            self.failures[peer] = self.failures.get(peer, 0) + 1
            self.full = False

    def choose(
        self,
        preferred: PeerId,
        replicas: Sequence[PeerId],
        suspects: Suspects,
        now: float,
        done_s: Mapping[PeerId, float] = {},
        heir: PeerId = NOBODY,
    ) -> PeerId | RoutePause | None:
        """The peer to ask next: ``preferred`` if it may be, then the other ``replicas``; None when
        all are gone. ``done_s``: when each would be done with it; of the others ``heir`` comes
        first, then the earliest, in turns where they are equal. Suspects come last and slow ones
        before them; ``preferred`` may be slow, the plan has taken that into account.
        """
        others = sorted(set(replicas) - {preferred})
        turn = self.spread % len(others) if others else 0
        others = sorted(
            (*others[turn:], *others[:turn]), key=lambda p: (p != heir, done_s.get(p, 0.0))
        )
        able = [
            p
            for p in (preferred, *others)
            if p not in suspects.gone
            and p not in self.refused
            and self.failures.get(p, 0) < ATTEMPTS
        ]
        if not able:
            return None
        self.patient = self.pauses > 0 or len(able) == 1
        fresh = [p for p in able if p not in self.asked]
        if fresh:
            return min(
                fresh, key=lambda p: (suspects.has(p, now), p != preferred and p in suspects.slow)
            )
        self.asked.clear()
        seconds = min(PAUSE_S[0] * 2**self.pauses, PAUSE_S[1])
        self.pauses = min(self.pauses + 1, 16)
        full = self.full
        self.full = True
        return RoutePause(seconds, full)
