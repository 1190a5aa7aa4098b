"""When a peer should change its stage: the bottleneck gets help from whoever can best spare it. Pure.

The rule is :func:`node.scheduler.placement.choose_move`; here is the patience around it, so that peers do not run to and fro.
"""

from __future__ import annotations

from node.core.ids import PeerId
from node.core.journey import Version
from node.scheduler.placement import Move, choose_move
from node.training.roster import Roster

SETTLED_MOVES = 10
"""A peer that was asked to change its stage is left alone for that many times ``every_s``."""


class Balance:
    """``every_s``: between two looks, 0 never looks; ``download_s``: what a change costs the mover."""

    def __init__(self, stages: int, every_s: float, download_s: float) -> None:
        self._stages, self._every, self._download = stages, every_s, download_s
        self._asked: dict[PeerId, float] = {}
        self._looked: float | None = None

    def refused(self, peer: PeerId, now: float) -> None:
        """It stays; it is not asked again soon."""
        self._asked[peer] = now

    def look(self, roster: Roster, base: Version | None, now: float) -> Move | None:
        """The one change that pays, or None: not yet, nothing worth its price, or somebody is too new to be judged."""
        if self._looked is None:
            self._looked = now
        if not self._every or now - self._looked < self._every or base is None:
            return None
        self._looked = now
        here = {p: c for p, c in roster.candidates.items() if not c.leaving and 1 <= c.stage <= self._stages}
        if any(c.speed <= 0 or not roster.can_start(p, base) for p, c in here.items()):
            return None
        horizon = SETTLED_MOVES * self._every
        self._asked = {p: at for p, at in self._asked.items() if now - at < horizon}
        if not self._asked.keys() <= here.keys():
            return None  # whoever was asked is on its way: until it is back nobody knows what it changed
        view = {s: {p: roster.speed(p) for p, c in here.items() if c.stage == s} for s in range(1, self._stages + 1)}
        move = choose_move(view, view, download_s=self._download, horizon_s=horizon, stay=self._asked)
        if move is not None:
            self._asked[move.peer] = now
        return move
