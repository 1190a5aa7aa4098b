"""The queue of newcomers at a busy peer: which questions of strangers are answered now, and when
the others are asked again.

Enters: questions, and how busy this process is. Leaves: a turn, or a place in the queue. Members
never enter: they are answered at once, and newcomers get the remaining time. Pure: time is an
argument.
"""

from collections import OrderedDict
from dataclasses import dataclass

from node.core.ids import PeerId
from node.core.newest import Newest
from node.identity.faults import PEERS_KEPT

LATE_S = 0.5
"""Seconds of lateness of its timers beyond which a process is busy."""
CONTENDED = 0.5
"""Share of the time in which its threads could run, but wait for a processor, beyond which a
process is busy."""
FIRST_PACE_S = 1.0
"""Seconds between two turns of newcomers at first."""
FASTEST_PACE_S = 0.1
"""Least seconds between two turns."""
SLOWEST_PACE_S = 1.5
"""Most seconds between two turns."""
SLOWER = 1.5
"""Factor of the time between turns for each second in which this process is busy."""
FASTER = 0.8
"""Factor of the time between turns for each second in which this process is not busy."""
AT_ONCE = 4.0
"""Newcomers that get their turn at once after a pause."""
TURN_S = 120.0
"""Seconds for which a newcomer is answered from its turn on: joining takes several questions."""
AGAIN_LEAST_S = 1.0
AGAIN_MOST_S = 20.0
"""Bounds of the time after which a newcomer in the queue is to ask again. Each question costs both
sides some 50 ms of processor time, most of it for the connection."""
ABSENT_TIMES = 2.0
ABSENT_S = 5.0
"""A newcomer keeps its place for ABSENT_TIMES times the time that it was told, plus ABSENT_S."""
LONGEST = 1024
"""Places in the queue. A newcomer that finds all taken is told to come back and gets none."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """``number``: the place in the queue, from 1. ``again_s``: seconds after which to ask again."""

    number: int
    again_s: float


class Newcomers:
    """The queue and its pace.

    The pace follows measurements of lateness and contention, and doubles or halves within seconds.
    It begins slowly with every crowd, because the load that a newcomer makes comes some seconds
    after its turn.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[PeerId, float] = OrderedDict()
        """Newcomers that wait, in order, and the second at which each loses its place."""
        self._turns: Newest[PeerId, float] = Newest(PEERS_KEPT)
        """Newcomers that had their turn, and the second until which they are answered."""
        self._pace_s = FIRST_PACE_S
        self._left = AT_ONCE
        self._at = float("-inf")

    @property
    def waiting(self) -> int:
        """Number of newcomers in the queue; some of them may have gone."""
        return len(self._queue)

    @property
    def pace_s(self) -> float:
        """Seconds between two newcomers that get their turn."""
        return self._pace_s

    def measured(self, late_s: float, contended: float, now: float) -> None:
        """Take over the measurements of the last second: the lateness of timers, and the share of
        its time that this process waited for a processor."""
        self._refill(now)
        self._forget_absent(now)
        if late_s > LATE_S or contended > CONTENDED:
            self._pace_s = min(SLOWEST_PACE_S, self._pace_s * SLOWER)
        elif self._queue:
            self._pace_s = max(FASTEST_PACE_S, self._pace_s * FASTER)
        elif self._pace_s > FIRST_PACE_S:
            self._pace_s = max(FIRST_PACE_S, self._pace_s * FASTER)
        else:
            self._pace_s = FIRST_PACE_S

    def ask(self, peer: PeerId, now: float) -> QueuePlace | None:
        """Return None if a question of this newcomer is answered now, otherwise its place."""
        if now < self._turns.get(peer, now):
            return None
        self._refill(now)
        self._forget_absent(now)
        if peer not in self._queue and len(self._queue) < LONGEST:
            self._queue[peer] = now
        ahead = self._ahead(peer)
        if ahead < int(self._left):
            self._left -= 1
            self._queue.pop(peer, None)
            self._turns[peer] = now + TURN_S
            return None
        expected_s = (ahead + 1 - self._left) * self._pace_s
        again_s = min(AGAIN_MOST_S, max(AGAIN_LEAST_S, expected_s))
        if peer in self._queue:
            self._queue[peer] = now + ABSENT_TIMES * again_s + ABSENT_S
        return QueuePlace(ahead + 1, again_s)

    def _ahead(self, peer: PeerId) -> int:
        for number, other in enumerate(self._queue):
            if other == peer:
                return number
        return len(self._queue)

    def _refill(self, now: float) -> None:
        self._left = min(AT_ONCE, self._left + max(0.0, now - self._at) / self._pace_s)
        self._at = now

    def _forget_absent(self, now: float) -> None:
        for peer in [p for p, until in self._queue.items() if until < now]:
            del self._queue[peer]
