"""Activations kept for backward, bounded in bytes. Values are opaque here; the bound is a decision,
not a tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    nbytes: int
    expires: float


class Stash(Generic[K, V]):
    """What this peer keeps for micro-batches that are not finished.

    ``limit`` is in bytes. A forward asks with :meth:`reserve` before its tensor is read, so that
    frames which are still arriving count too; backward work and the origin's own micro-batches go
    in with :meth:`put` alone and are never turned away. One micro-batch always fits into an empty
    stash, however small the limit, otherwise a stage with a tiny limit would never finish anything.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak = limit, 0, 0
        self._entries: dict[K, _Entry[V]] = {}
        self._reserved: dict[int, int] = {}
        self._ticket = 0

    def room(self, nbytes: int) -> bool:
        """True when ``nbytes`` more may come in."""
        return self.used == 0 or self.used + nbytes <= self.limit

    def reserve(self, nbytes: int) -> int:
        """Set ``nbytes`` aside for a frame that starts to arrive, where there is :meth:`room`;
        returns the ticket for :meth:`put` or :meth:`cancel`."""
        self._ticket += 1
        self._reserved[self._ticket] = nbytes
        self._grow(nbytes)
        return self._ticket

    def cancel(self, ticket: int) -> None:
        """Give a reservation back. Does nothing for a ticket that was used or cancelled already."""
        self.used -= self._reserved.pop(ticket, 0)

    def put(self, key: K, value: V, nbytes: int, expires: float, ticket: int = 0) -> None:
        """Keep ``value`` until popped; ``expires`` is the clock time after which :meth:`expired`
        names it."""
        self.cancel(ticket)
        self.pop(key)
        self._entries[key] = _Entry(value, nbytes, expires)
        self._grow(nbytes)

    def recharge(self, key: K, nbytes: int) -> None:
        """Correct the charge of an entry once its real size is known. Unknown keys are left alone:
        it was freed meanwhile."""
        entry = self._entries.get(key)
        if entry is not None:
            self._grow(nbytes - entry.nbytes)
            entry.nbytes = nbytes

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def pop(self, key: K) -> V | None:
        """Free an entry; None when it is not there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.used -= entry.nbytes
        return entry.value

    def expired(self, now: float) -> list[K]:
        """Entries whose micro-batch nobody waits for any more, oldest first."""
        by_time = sorted(self._entries.items(), key=lambda entry: entry[1].expires)
        return [key for key, entry in by_time if entry.expires <= now]

    def _grow(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)
