"""Activations kept for backward, bounded in bytes."""

from collections.abc import Callable, Mapping

from node.core.ids import PeerId
from node.pipeline.accounts import SharedBudget
from node.pipeline.events import Key
from node.pipeline.visit_buffers import VisitBuffers


class Stash:
    """Activations kept for backward of unfinished micro-batches, bounded in bytes.

    ``limit`` is in bytes; ``on_room()`` is called when there is more room. Every byte is charged to
    the origin of its micro-batch, and an origin that holds more than its part leaves half of the
    stash to the others (:class:`~node.pipeline.accounts.SharedBudget`). A tensor is charged
    (:meth:`charge`) before it is read, so that frames which are still arriving count too. Gradients
    of activations that are here and the origin's own micro-batches are never turned away. An empty
    stash always takes one micro-batch, however small the limit: otherwise a stage with a tiny limit
    would never finish anything.
    """

    def __init__(self, limit: int, on_room: Callable[[], None] = lambda: None) -> None:
        self._account = SharedBudget[PeerId](limit)
        self._on_room = on_room
        self._entries: dict[Key, VisitBuffers] = {}

    @property
    def limit(self) -> int:
        return self._account.limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._account.limit = nbytes

    @property
    def used(self) -> int:
        """Bytes charged at present."""
        return self._account.used

    def divide(self, micro_batches: Mapping[PeerId, int]) -> None:
        """Give every origin a part in proportion to its micro-batches in the plan."""
        self._account.divide(micro_batches)

    def room(self, nbytes: int, origin: PeerId | None = None) -> bool:
        """Return True if ``nbytes`` more bytes of ``origin`` may come in. ``origin`` is None for
        work without a plan."""
        return self._account.room(origin, nbytes)

    def charge(self, nbytes: int, origin: PeerId | None = None) -> None:
        """Reserve ``nbytes`` bytes for a frame that starts to arrive, after :meth:`room` allowed
        it. Release them with the negative number when the frame is here, or will not come."""
        self._account.charge(origin, nbytes)
        if nbytes < 0:
            self._on_room()

    def put(self, key: Key, work: VisitBuffers, nbytes: int) -> None:
        """Keep ``work`` until it is popped, and charge ``nbytes`` bytes for it."""
        self.pop(key)
        self._entries[key] = work
        work.nbytes = nbytes
        self.charge(nbytes, work.origin)

    def recharge(self, key: Key, nbytes: int) -> None:
        """Correct the charge of an entry to ``nbytes`` bytes once its real size is known. An
        unknown key is ignored: its entry was freed meanwhile."""
        work = self._entries.get(key)
        if work is not None:
            self.charge(nbytes - work.nbytes, work.origin)
            work.nbytes = nbytes

    def get(self, key: Key) -> VisitBuffers | None:
        return self._entries.get(key)

    def pop(self, key: Key) -> VisitBuffers | None:
        """Remove an entry and return it; None if there is no such entry."""
        work = self._entries.pop(key, None)
        if work is not None:
            self.charge(-work.nbytes, work.origin)
        return work

    def first_deadline(self) -> float | None:
        """The earliest deadline of all entries, in seconds of the clock; None if the stash is
        empty."""
        return min((work.deadline for work in self._entries.values()), default=None)

    def expired(self, now: float) -> list[Key]:
        """Keys of the entries past the deadline of their micro-batch, oldest first."""
        by_time = sorted(self._entries.items(), key=lambda entry: entry[1].deadline)
        return [key for key, work in by_time if work.deadline <= now]
