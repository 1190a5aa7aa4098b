"""A plan's note to one member, with receipts for it alone. Pure. Enters: the note to all, as bytes
that all members share, and the receipts. Leaves: the bytes that are sent, one member at a time.
Never: a copy of the plan for each member at once; it may have 4 MiB, for a thousand members.
"""

from protos import training_pb2 as pb

_TAG = pb.Note.PLAN_FIELD_NUMBER << 3 | 2
"""Number and wire type of the plan in a note."""


class PlanBytes:
    """The bytes of a plan's note, without receipts."""

    def __init__(self, note: pb.Note) -> None:
        self.plan = note.plan.SerializeToString()
        self.rest = pb.Note(epoch=note.epoch, term=note.term).SerializeToString()


class SharedNote:
    """The note to one member. It has the methods of a message that a sender calls."""

    def __init__(self, shared: PlanBytes, receipts: pb.ReceiptsNote) -> None:
        self._shared = shared
        self.receipts = receipts

    def SerializeToString(self) -> bytes:
        """The bytes of the whole note."""
        # Fields of a message may follow each other in any order.
        receipts = pb.PlanNote(receipts=self.receipts).SerializeToString()
        size = len(self._shared.plan) + len(receipts)
        head = self._shared.rest + _varint(_TAG) + _varint(size)
        return b"".join((head, self._shared.plan, receipts))

    def WhichOneof(self, oneof: str) -> str:
        """The kind of the note."""
        return "plan"

    def whole(self) -> pb.Note:
        """The note as a message."""
        return pb.Note.FromString(self.SerializeToString())


Sent = pb.Note | SharedNote
"""A note that can be sent."""


def encoded(note: Sent) -> bytes:
    """The bytes of a note."""
    return note.SerializeToString()


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
