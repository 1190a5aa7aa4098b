"""Bounds of messages, checked on the raw bytes before an object is made of them.

A protobuf message of a few MiB can hold a million entries; parsing it takes seconds and a hundred
times its size in memory. The walk here reads tags and lengths only, compares them with
:mod:`node.wire.limits`, and stops at the first one beyond its bound. Its work is bounded too: by
``limits.FIELDS``. Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from node.core.errors import WireError
from node.wire.limits import FIELDS, LIMITS, SIZES, UNKNOWN, FieldLimit

M = TypeVar("M", bound=Message)
Deserialiser = Callable[[bytes], Any] | None

# Wire types. Groups (3 and 4) are refused: proto3 has none.
_VARINT = 0
_FIXED64 = 1
_SIZED = 2
_FIXED32 = 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
"""Bytes of a value of a fixed size."""
_LONGEST_VARINT = 10
_WIDTHS = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_STRING: _SIZED,
    FieldDescriptor.TYPE_BYTES: _SIZED,
    FieldDescriptor.TYPE_MESSAGE: _SIZED,
}
_HIGH = bytes(range(128, 256))
"""Bytes of a varint that are not its last one."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a message. Fields of a oneof share a ``slot``, by which entries are counted.
    ``inside``: the fields of its message, None where the bound on its bytes is enough."""

    name: str
    wire: int
    slot: int
    limit: FieldLimit
    packable: bool
    inside: "Mapping[int, _Field] | None"


def parse(kind: type[M], raw: bytes, what: str = "") -> M:
    """The message in ``raw``. Raises WireError, before anything is made of the bytes, for a message
    beyond its bounds, and for bytes that are no such message; ``what`` names it in the text."""
    check(kind, raw)
    try:
        return kind.FromString(raw)
    except DecodeError as e:
        raise WireError(f"not {what or _named(kind.DESCRIPTOR)}: {e}") from e


def check(kind: type[Message], raw: bytes) -> None:
    """Raises WireError for bytes that are no message, or that exceed the bounds of ``kind``."""
    name = _named(kind.DESCRIPTOR)
    if len(raw) > (most := SIZES[name]):
        raise WireError(f"a {name} of {len(raw)} bytes, at most {most} are read")
    try:
        _walk(raw, 0, len(raw), _fields(kind.DESCRIPTOR), FIELDS)
    except IndexError as e:
        raise WireError(f"a {name} that ends inside a field") from e


def strict(deserialise: Deserialiser) -> Deserialiser:
    """``Kind.FromString`` within the bounds of ``Kind``: raises WireError. A deserialiser of other
    bytes, or of a message without a row in ``limits.SIZES``, is returned as it is."""
    kind = _kind_of(deserialise)
    if kind is None:
        return deserialise
    return partial(parse, kind)


def lenient(deserialise: Deserialiser) -> Deserialiser:
    """As :func:`strict`, for answers: bytes that are not parsed read as an empty message, which no
    honest peer answers. gRPC's client has no way to pass an error on."""
    kind = _kind_of(deserialise)
    if kind is None:
        return deserialise

    def told(raw: bytes) -> Message:
        try:
            return parse(kind, raw)
        except WireError:
            return kind()

    return told


def _kind_of(deserialise: Deserialiser) -> type[Message] | None:
    kind = getattr(deserialise, "__self__", None)
    if not (isinstance(kind, type) and issubclass(kind, Message)):
        return None
    return kind if _named(kind.DESCRIPTOR) in SIZES else None


def _walk(raw: bytes, at: int, end: int, fields: Mapping[int, _Field], left: int) -> int:
    """Check the fields from ``at`` to ``end``, of which ``left`` may come; how many are left then.
    Raises WireError, or IndexError where the bytes end too early."""
    seen: dict[int, int] = {}
    while at < end:
        left -= 1
        if left < 0:
            raise WireError(f"a message with more than {FIELDS} fields")
        tag = raw[at]
        at += 1
        if tag > 127:
            tag, at = _varint(raw, at - 1)
        wire = tag & 7
        field = fields.get(tag >> 3)
        start = at
        at = _behind(raw, at, wire)
        if field is None:
            seen[-1] = seen.get(-1, 0) + 1
            if seen[-1] > UNKNOWN:
                raise WireError(f"a message with more than {UNKNOWN} unknown fields")
            continue
        limit = field.limit
        count = 1
        size = 0
        if wire == _SIZED:
            size = at - _varint(raw, start)[1]
            if field.packable:
                count = _packed(raw[at - size : at], field.wire)
            elif size > limit.nbytes:
                raise WireError(f"{field.name} has {size} bytes, at most {limit.nbytes} are read")
        if wire != field.wire and not (field.packable and wire == _SIZED):
            raise WireError(f"{field.name} is of another type")
        seen[field.slot] = count = seen.get(field.slot, 0) + count
        if count > limit.entries:
            raise WireError(f"{field.name} has {count} entries, at most {limit.entries} are read")
        if field.inside is not None:
            if at > end:
                raise WireError(f"{field.name} ends behind its message")
            left = _walk(raw, at - size, at, field.inside, left)
    if at != end:
        raise WireError("a message that ends inside a field")
    return left


def _behind(raw: bytes, at: int, wire: int) -> int:
    """Position behind the value that begins at ``at``."""
    if wire == _VARINT:
        first = at
        while raw[at] > 127:
            at += 1
        if at - first >= _LONGEST_VARINT:
            raise WireError("a number with too many bytes")
        return at + 1
    if wire == _SIZED:
        size = raw[at]
        if size < 128:
            at += 1
        else:
            size, at = _varint(raw, at)
        at += size
    elif wire in _FIXED:
        at += _FIXED[wire]
    else:
        raise WireError(f"a field of the unknown wire type {wire}")
    if at > len(raw):
        raise WireError("a message that ends inside a field")
    return at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and where it ends."""
    value = 0
    for shift in range(0, 7 * _LONGEST_VARINT, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise WireError("a number with too many bytes")


def _packed(values: bytes, wire: int) -> int:
    """Number of values in a packed field."""
    if wire == _VARINT:
        return len(values.translate(None, _HIGH))
    return len(values) // _FIXED[wire]


@cache
def _fields(message: Descriptor) -> Mapping[int, _Field]:
    return {field.number: _field(field) for field in message.fields}


def _field(field: FieldDescriptor) -> _Field:
    name = _named(field)
    wire = _WIDTHS.get(field.type, _VARINT)
    inside = None
    if field.message_type is not None and _is_walked(field.message_type):
        inside = _fields(field.message_type)
    oneof = field.containing_oneof
    slot = field.number if oneof is None else -2 - oneof.index
    # Entries of messages and texts repeat one by one; a message has its own bounds.
    default = FieldLimit() if field.message_type is None else FieldLimit(nbytes=max(SIZES.values()))
    limit = LIMITS.get(name, default)
    return _Field(name, wire, slot, limit, field.is_repeated and wire != _SIZED, inside)


def _is_walked(message: Descriptor) -> bool:
    """True unless the message holds single numbers only, which its size bounds."""
    return any(f.is_repeated or _WIDTHS.get(f.type) == _SIZED for f in message.fields)


def _named(of: Any) -> str:
    """The name of a message or a field as the tables of limits have it."""
    return of.full_name.removeprefix("tutti.")
