"""Turns of the peers that a relay carries for, so that the total stays under a rate and each pair
gets an equal share. Enters: requests of pairs of peers, the time. Leaves: the requests that may
go. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996) over a token bucket: each pair has a counter of
the bytes it was granted, and the pair with the smallest counter is next. A pair that comes back
after a pause starts where the others are. Not quite: a circuit asks for one piece at a time and is
gone for a moment after each, so a pair keeps a small credit. Weights make the shares unequal.
"""

from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field

BURST_S = 0.1
"""Seconds of the rate that may go at once after a pause."""
CREDIT_S = 0.25
"""Seconds of the rate by which a pair may be behind the others and still catch up."""
LATE_S = 1.0
"""Seconds of the rate that may go at once where somebody was left waiting: a busy machine looks
late, and nothing is lost by it."""

DEBT_S = 2.0
"""Seconds of the rate that those who ask wait at most for bytes that went without asking. These are
the directory's and small messages: what bounds them is elsewhere, and work must not wait for half a
minute where they are many."""

PAIRS_KEPT = 1024
"""Pairs that are remembered; beyond this number, pairs without waiting requests are forgotten."""


@dataclass
class _PairBudget:
    granted: float = 0.0
    weight: float = 1.0
    waiting: deque[tuple[int, int]] = field(default_factory=deque)


class Shares:
    """``rate``: bytes a second for all pairs together; ``burst_s``: seconds of it that may
    go at once after a pause; ``now`` is in seconds of a steady clock."""

    def __init__(self, rate: float, now: float = 0.0, burst_s: float = BURST_S) -> None:
        self.rate = rate
        self._burst_s = burst_s
        self._pairs: dict[Hashable, _PairBudget] = {}
        self._tokens = rate * burst_s
        self._at = now
        self._next = 0
        self._floor = 0.0
        self._busy = False
        """True if the last grant left a pair waiting."""

    def ask(self, pair: Hashable, count: int, weight: float = 1.0) -> int:
        """Add the request of ``pair`` to send ``count`` bytes. Return the number by which
        :meth:`grant` names the request. Of two pairs that always want more, the one of twice the
        ``weight`` gets twice the bytes."""
        known = self._pairs.get(pair)
        if known is None:
            if len(self._pairs) >= PAIRS_KEPT:
                self._pairs = {name: one for name, one in self._pairs.items() if one.waiting}
            known = self._pairs[pair] = _PairBudget(self._floor)
        elif not known.waiting:
            known.granted = max(known.granted, self._floor - self.rate * CREDIT_S)
        known.weight = weight
        self._next += 1
        known.waiting.append((self._next, count))
        return self._next

    def grant(self, now: float) -> list[int]:
        """Requests that may go now, one of each pair. A pair that was served needs a moment to ask
        again, and is not passed over meanwhile. A request goes when there is anything in the bucket
        and may leave a debt."""
        self._fill(now)
        done = []
        served = set[int]()
        while self._tokens > 0 and (pair := self._first(served)) is not None:
            served.add(id(pair))
            number, count = pair.waiting.popleft()
            self._tokens -= count
            self._floor = max(self._floor, pair.granted)
            pair.granted += count / pair.weight
            done.append(number)
        self._busy = any(p.waiting for p in self._pairs.values())
        return done

    def spend(self, count: int, now: float) -> None:
        """``count`` bytes went without asking; those that ask wait for it, at most
        :data:`DEBT_S`."""
        self._fill(now)
        least = min(self._tokens, -DEBT_S * self.rate)
        self._tokens = max(self._tokens - count, least)

    def wait(self) -> float | None:
        """Seconds until :meth:`grant` can grant again; None while nobody waits."""
        if self._first() is None:
            return None
        return max(0.0, -self._tokens) / self.rate

    def drop(self, number: int) -> None:
        """The request will not be made."""
        for pair in self._pairs.values():
            pair.waiting = deque(w for w in pair.waiting if w[0] != number)

    def gone(self, pair: Hashable) -> None:
        """Forget a pair and its waiting requests."""
        self._pairs.pop(pair, None)

    def _fill(self, now: float) -> None:
        burst_s = self._burst_s
        if self._busy:
            burst_s = max(LATE_S, burst_s)
        most = self.rate * burst_s
        self._tokens = max(
            self._tokens, min(most, self._tokens + self.rate * max(0.0, now - self._at))
        )
        self._at = now

    def _first(self, served: Container[int] = ()) -> _PairBudget | None:
        waiting = (p for p in self._pairs.values() if p.waiting and id(p) not in served)
        return min(waiting, key=lambda p: p.granted, default=None)
