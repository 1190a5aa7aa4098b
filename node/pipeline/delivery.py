"""Which replica gets a tensor, and which one after that. Pure: peers and times in, a peer or a
pause out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from node.core.ids import PeerId

SUSPECT_S = 10.0
"""Seconds for which a peer that has failed is asked last: eight micro-batches need not all find out
by themselves."""
ATTEMPTS = 2
"""Failures of one peer, for one tensor, before it counts as gone: a single reset connection is not
a death."""
PAUSE_S = (0.02, 0.64)
"""First and longest pause, in seconds, when everybody was asked and nobody took it; doubles in
between."""


class Trouble(Enum):
    """Why a peer did not finish with a tensor."""

    BUSY = "busy"
    """Its stash is full; it may be asked again."""
    REFUSED = "refused"
    """It will not take this tensor, ever."""
    FAILED = "failed"
    """The stream broke or timed out."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Every peer that might take the tensor was asked; ask again after ``seconds``."""

    seconds: float


class Suspects:
    """Peers that failed lately, and ``slow`` ones: those measured to answer much later than a
    sibling."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}
        self.slow: frozenset[PeerId] = frozenset()
        self.gone: set[PeerId] = set()
        """Dead for the plan in force: not asked at all."""

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

    def choose(
        self,
        preferred: PeerId,
        replicas: Sequence[PeerId],
        suspects: Suspects,
        now: float,
        done_s: Mapping[PeerId, float] = {},
    ) -> PeerId | Pause | None:
        """The peer to ask next: ``preferred`` if it may be, then the other ``replicas``; None when
        all are gone. ``done_s``: when each would be done with it; of the others the earliest comes
        first, in turns where they are equal. Suspects come last and slow ones before them;
        ``preferred`` may be slow, the plan has taken that into account.
        """
        others = sorted(set(replicas) - {preferred})
        turn = self.spread % len(others) if others else 0
        others = sorted((*others[turn:], *others[:turn]), key=lambda p: done_s.get(p, 0.0))
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
        return Pause(seconds)
