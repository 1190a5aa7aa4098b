"""Activations kept for backward, bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable

from node.pipeline.events import Key
from node.pipeline.visit_buffers import VisitBuffers


class Stash:
    """What this peer keeps for micro-batches that are not finished.

    ``limit`` is in bytes; ``on_room()`` is called when there is more room. A forward is charged
    (:meth:`charge`) before its tensor is read, so that frames which are still arriving count too;
    backward work and the origin's own micro-batches go in with :meth:`put` alone and are never
    turned away. One micro-batch always fits into an empty stash, however small the limit, otherwise
    a stage with a tiny limit would never finish anything.
    """

    def __init__(self, limit: int, on_room: Callable[[], None] = lambda: None) -> None:
        self.limit, self.used, self._on_room = limit, 0, on_room
        self._entries: dict[Key, VisitBuffers] = {}

    def room(self, nbytes: int) -> bool:
        """True when ``nbytes`` more may come in."""
        return self.used == 0 or self.used + nbytes <= self.limit

    def charge(self, nbytes: int) -> None:
        """Reserve ``nbytes`` for a frame that starts to arrive, after :meth:`room` was asked; the
        negative amount when it is here, or will not come."""
        self.used += nbytes
        if nbytes < 0:
            self._on_room()

    def put(self, key: Key, work: VisitBuffers, nbytes: int) -> None:
        """Keep ``work`` until popped; after its deadline :meth:`expired` names it."""
        self.pop(key)
        self._entries[key], work.nbytes = work, nbytes
        self.charge(nbytes)

    def recharge(self, key: Key, nbytes: int) -> None:
        """Correct the charge of an entry once its real size is known. Unknown keys are ignored: the
        entry was freed meanwhile."""
        work = self._entries.get(key)
        if work is not None:
            self.charge(nbytes - work.nbytes)
            work.nbytes = nbytes

    def get(self, key: Key) -> VisitBuffers | None:
        return self._entries.get(key)

    def pop(self, key: Key) -> VisitBuffers | None:
        """Free an entry; None when it is not there."""
        work = self._entries.pop(key, None)
        if work is not None:
            self.charge(-work.nbytes)
        return work

    def expired(self, now: float) -> list[Key]:
        """Entries whose micro-batch nobody waits for any more, oldest first."""
        by_time = sorted(self._entries.items(), key=lambda entry: entry[1].deadline)
        return [key for key, work in by_time if work.deadline <= now]
