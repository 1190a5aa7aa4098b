"""Choice of a stage by a peer without a named one: when it claims, builds and settles.
``placement.py`` makes the choice.

    CHOOSING  the same peers have been in sight for a while    -> a claim            -> CLAIMED
    CLAIMED   the others' claims stand as well                 -> it may build       -> BUILDING
              the claims are uneven, and it is its turn        -> another claim
    BUILDING  nothing changes for longer than records take     -> SETTLED
              the claims are uneven by speed and by number     -> a change of stage  -> SETTLED
    SETTLED   nobody is at the ends, and so nobody leads       -> a change of stage

Records take their time, so peers that come together may claim one place before they see each
other. All go by the same pure rules: once they see the same, they agree on who gives way.
The machine has no clock and asks nobody.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from node.core.ids import ENDS, PeerId
from node.scheduler.placement import Move, level, spread

LOOK_S = 8.0
"""Seconds after which a joiner claims a stage at the latest; it builds it after twice as long."""
STABLE_S = 1.5
"""Seconds for which the records that a joiner sees must not change before it claims a stage, and
again before it builds one beside others that choose."""
SETTLE_S = 4.0
"""Seconds without a change in sight after which a claim is settled: longer than records take to
spread."""
ROUNDS = 6
"""Other stages that a joiner claims after its first one, at most."""
WITHOUT_ENDS_S = 12.0
"""Seconds without a peer at the ends after which a waiting peer takes a stage without peers: longer
than joiners need to choose, and than two readings of the directory are apart."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A peer as its record shows it.

    ``stage``: None while it chooses one; ``able``: the stages it would host, none when it stays
    where it is; ``settled``: it gives way to nobody; ``speed``: micro-batches per second, 0 for
    unknown; ``closed``: nobody can dial it.
    """

    stage: int | None
    able: Collection[int] = ()
    settled: bool = True
    speed: float = 0.0
    closed: bool = False


def able(open_to: str, stages: int) -> range:
    """The stages that a peer would host, by the ``open_to`` of its record: "auto" all, "stage" the
    block stages, anything else none."""
    return {"auto": range(stages + 1), "stage": range(ENDS + 1, stages + 1)}.get(open_to, range(0))


def _alike(others: Mapping[PeerId, Placed]) -> dict[PeerId, Placed]:
    """The peers of ``others`` without their speeds, so that replicas count alike."""
    return {p: replace(placed, speed=0.0) for p, placed in others.items()}


class Choosing:
    """The machine of peer ``me``, which may host the stages ``able``, of a run with ``stages``
    block stages. ``stage``: where its operator or its leader wants it, which is settled.
    """

    def __init__(
        self,
        me: PeerId,
        able: Collection[int],
        stages: int,
        now: float,
        stage: int | None = None,
    ) -> None:
        self.me = me
        self.able = able
        self._stages = stages
        self.stage = stage
        self.settled = stage is not None
        self.may_build = self.settled
        """True if the claimed stage may be built; a peer that changes its stage after that leaves a
        stage that it hosts."""
        self._began = self._since = now
        self._claimed = -math.inf
        self._seen: Mapping[PeerId, int | None] = {}
        self._rounds = 0

    def look(
        self,
        others: Mapping[PeerId, Placed],
        now: float,
        *,
        waits: bool = False,
        closed: bool = False,
    ) -> int | None:
        """Handle a new view of the directory. Returns the stage to claim or to change to, or None
        for no change.

        ``waits``: this peer takes part, and no epoch has been under way yet; ``closed``: no other
        peer can dial it. Raises ValueError if it can host no stage.
        """
        # For a peer without a claim, claims of others change nothing; peers that come or go do.
        choosing = self.stage is None
        seen = {p: None if choosing else placed.stage for p, placed in others.items()}
        if seen != self._seen:
            self._seen = seen
            self._since = now
        calm = now - max(self._since, self._claimed)
        age = now - self._began
        if choosing:
            if calm >= STABLE_S or age >= LOOK_S:
                return self._claim(others, now, closed)
            return None
        if self.settled:
            if waits and calm >= WITHOUT_ENDS_S:
                return self._help(others, now)
            return None
        self.may_build |= age >= 2 * LOOK_S
        patience = STABLE_S
        if self.may_build:
            patience = SETTLE_S
        if calm >= patience:
            return self._correct(others, now)
        return None

    def stays(self, stage: int) -> None:
        """This peer could not change its stage: it stays at ``stage`` and does not try again."""
        self.stage = stage
        self.settled = True
        self.able = ()

    def _claim(self, others: Mapping[PeerId, Placed], now: float, closed: bool) -> int:
        rivals = {p: placed.able for p, placed in others.items() if placed.stage is None}
        choosers = {p: able for p, able in rivals.items() if able} | {self.me: self.able}
        hidden = {p for p, placed in others.items() if placed.closed}
        if closed:
            hidden.add(self.me)
        self.stage = spread(self._view(others), choosers, hidden)[self.me]
        self._claimed = now
        # If nobody else is about to settle, there is nothing to wait for.
        self.may_build = all(placed.settled for placed in others.values())
        self._seen = {p: placed.stage for p, placed in others.items()}
        return self.stage

    def _correct(self, others: Mapping[PeerId, Placed], now: float) -> int | None:
        free = {p: placed.able for p, placed in others.items() if not placed.settled}
        to = self._target(self._level(others, free))
        if self.may_build and to != self._target(self._level(_alike(others), free)):
            # Speeds measured while a crowd joins change from one reading to the next, and leaving a
            # stage that was built costs a restart. The leader evens out speeds later.
            to = None
        if to is None or self._rounds == ROUNDS:
            # Before it builds nothing is settled: peers that came at the same time may not be in
            # sight yet.
            self.settled = self.may_build
            self.may_build = True
            return None
        self._rounds = self._rounds + 1
        self._claimed = now
        self.stage = to
        self.settled = self.may_build
        return to

    def _help(self, others: Mapping[PeerId, Placed], now: float) -> int | None:
        # No measurement exists that all peers would agree on.
        others = _alike(others)
        view = self._view(others)
        if view[ENDS] or self.stage == ENDS:
            return None
        lacking = [stage for stage in view if not view[stage] and stage != self.stage]
        moves = self._level(others, {p: placed.able for p, placed in others.items()}, lacking)
        # One at a time, the ends first: the new leader sees to the rest.
        if not moves or moves[0].peer != self.me:
            return None
        self._claimed = now
        self.stage = moves[0].target
        return self.stage

    def _target(self, moves: Collection[Move]) -> int | None:
        """The stage that these moves give to this peer; None if it stays."""
        return next((move.target for move in moves if move.peer == self.me), None)

    def _level(
        self,
        others: Mapping[PeerId, Placed],
        free: Mapping[PeerId, Collection[int]],
        lacking: Collection[int] | None = None,
    ) -> list[Move]:
        view = self._view(others)
        view.setdefault(self.stage or ENDS, {})[self.me] = 0.0
        return level(view, {**free, self.me: self.able}, lacking)

    def _view(self, others: Mapping[PeerId, Placed]) -> dict[int, dict[PeerId, float]]:
        view: dict[int, dict[PeerId, float]] = {s: {} for s in range(self._stages + 1)}
        for peer, placed in others.items():
            if placed.stage in view:
                # Peers that come together count alike, also if one of them has worked already.
                view[placed.stage][peer] = placed.speed if placed.settled else 0.0
        return view
