"""Limits on what others may send: a row for each RPC, libp2p stream and kind of training message.

The server checks a call before it reads or parses the message: calls a second, calls at once; then
the size of the message as it comes, and when it is whole whether its sender may send it.
docs/protocol.md shows the same table, and a test compares both with protos/. Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from node.core.errors import WireError

KIB = 1 << 10
MIB = 1 << 20
LARGEST = 4 * MIB + 64 * KIB
"""Bytes of the largest message of any call: a piece of a tensor of 4 MiB, and its names."""


class SenderKind(Enum):
    """Peers that may send something."""

    ANYBODY = "any peer of the run"
    LEADER = "the leader that this peer has reported to within 60 s"
    STRANGER = "anybody"


@dataclass(frozen=True, slots=True)
class Limit:
    """A row of the table.

    ``size``: bytes of one message. ``at_once``: calls that one peer may have open. ``per_s`` and
    ``burst``: calls of one stranger a second in the long run, and at once after a pause; an
    established peer may make :data:`FAVOUR` times the number. ``within_s``: seconds in which the
    message of a call with one message must be complete. ``breach``: weight of the fault of a peer
    that sends more than ``size`` bytes, or a message that it may not send; 0 for an accident.
    """

    size: int
    at_once: int
    per_s: float
    burst: float
    within_s: float = 5.0
    breach: float = 1.0
    sender: SenderKind = SenderKind.ANYBODY


@dataclass(frozen=True, slots=True)
class MessageLimit:
    """Limit of one kind of message of a call: its ``size``, its ``sender`` and its ``breach``, as
    in :class:`Limit`. How often it comes, how many at once and how soon it is complete are bounded
    for all kinds of the call together."""

    size: int
    breach: float = 1.0
    sender: SenderKind = SenderKind.ANYBODY


FAVOUR = 10.0
"""Calls that an established peer may make for each call of a stranger."""

RPCS: Mapping[str, Limit] = {
    "/tutti.v1.Training/Tell": Limit(LARGEST, at_once=32, per_s=10, burst=60, within_s=10.0),
    "/tutti.v1.Training/History": Limit(KIB, at_once=4, per_s=2, burst=20),
    "/tutti.v1.Pipeline/Forward": Limit(LARGEST, at_once=32, per_s=50, burst=500),
    "/tutti.v1.Pipeline/Backward": Limit(LARGEST, at_once=32, per_s=50, burst=500),
    "/tutti.v1.Pipeline/Fetch": Limit(16 * KIB, at_once=16, per_s=50, burst=500),
    "/tutti.v1.Pipeline/Lost": Limit(16 * KIB, at_once=16, per_s=50, burst=500),
    "/tutti.v1.Pipeline/Counted": Limit(MIB, at_once=16, per_s=10, burst=60),
    "/tutti.averaging.v1.Averaging/Exchange": Limit(LARGEST, at_once=8, per_s=10, burst=60),
    "/tutti.v1.State/Describe": Limit(2 * MIB, at_once=4, per_s=5, burst=30),
    "/tutti.v1.State/Fetch": Limit(4 * KIB, at_once=16, per_s=50, burst=500),
    "/tutti.v1.State/List": Limit(KIB, at_once=4, per_s=5, burst=30),
    "/tutti.v1.State/File": Limit(4 * KIB, at_once=4, per_s=5, burst=30),
    "/tutti.v1.Ends/Generate": Limit(256 * KIB, at_once=32, per_s=2, burst=40),
    "/tutti.v1.Ends/Evaluate": Limit(256 * KIB, at_once=2, per_s=1, burst=5),
    "/tutti.v1.Cells/Tell": Limit(LARGEST, at_once=8, per_s=5, burst=60),
    "/tutti.v1.Link/Ping": Limit(KIB, at_once=8, per_s=5, burst=60),
    "/tutti.v1.Link/Punch": Limit(4 * KIB, at_once=2, per_s=1, burst=5),
    "/tutti.v1.Link/Share": Limit(KIB, at_once=1, per_s=0.1, burst=5),
}
"""Calls of gRPC between peers. A method without a row is not served."""

NOTES: Mapping[int, tuple[str, MessageLimit]] = {
    10: ("plan", MessageLimit(LARGEST, breach=0.25, sender=SenderKind.LEADER)),
    11: ("finished", MessageLimit(MIB)),
    12: ("round", MessageLimit(LARGEST, breach=0.25, sender=SenderKind.LEADER)),
    13: ("committed", MessageLimit(228 * KIB)),
    14: ("incomplete", MessageLimit(2 * MIB)),
    15: ("fault", MessageLimit(KIB)),
    16: ("ready", MessageLimit(64 * KIB)),
    18: ("move", MessageLimit(KIB)),
    19: ("dead", MessageLimit(MIB)),
    20: ("lead", MessageLimit(KIB)),
    21: ("takeover", MessageLimit(MIB, breach=0.25, sender=SenderKind.LEADER)),
}
"""Kinds of messages of Training/Tell, by the number of their field."""

_TELL = "/tutti.v1.Training/Tell"
MOST_FIELDS = 16
"""Fields at the top of a training message that are looked at; it has three."""


def short(method: str) -> str:
    """The name of a method without its package, for example "Training/Tell"."""
    return method.rpartition(".")[2]


def limit_of(method: str, row: Limit, raw: bytes) -> tuple[str, Limit | MessageLimit]:
    """Return the name of a message of ``method``, for example "Training/Tell plan", and its limit.
    ``row``: the method's row in the table. Raises WireError for a training message that is no
    protobuf or is of several kinds."""
    name = short(method)
    if method != _TELL:
        return name, row
    kinds = {number for number in _fields(raw) if number in NOTES}
    if len(kinds) > 1:
        raise WireError("a training message of several kinds")
    if not kinds:
        # A probe: the empty message, or the two numbers that every message begins with.
        return f"{name} probe", MessageLimit(KIB)
    kind, limit = NOTES[kinds.pop()]
    return f"{name} {kind}", limit


def _fields(raw: bytes) -> Iterator[int]:
    """The numbers of the top-level fields of a protobuf message. Raises WireError if the bytes are
    no message, or have more than :data:`MOST_FIELDS` fields."""
    at = count = 0
    end = len(raw)
    while at < end:
        count += 1
        if count > MOST_FIELDS:
            raise WireError(f"a training message of more than {MOST_FIELDS} fields")
        tag, at = _varint(raw, at)
        yield tag >> 3
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                length, at = _varint(raw, at)
                at += length
            case 5:
                at += 4
            case _:
                raise WireError("not a protobuf message")
    if at != end:
        raise WireError("a protobuf message that breaks off")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises WireError."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            raise WireError("a protobuf message that breaks off")
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise WireError("a number of more than ten bytes")
