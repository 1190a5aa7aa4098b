"""Mutations of valid bytes, drawn from a seeded generator: of bytes, of JSON and of protobuf
messages. The same seed gives the same bytes."""

import json
import math
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

LONGEST = 1 << 16
"""Bytes of a mutated message, unless it is blown up."""
BLOWN_UP = 1 << 22
"""Bytes of a message in which one piece is repeated."""
WORDS = (
    b"NaN",
    b"a." * 4000,
    b"Infinity",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"1" + b"0" * 4400,
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"[" * 300,
    b'{"a":' * 300,
    b'""',
    b"\xc2\xb2",
    b"\xd9\xa3",
    b"\xff\xfe",
    b"\\ud800",
    b"\0",
    b"\n",
    b"\x1b[2J",
    b"../",
    b"18446744073709551616",
    b"-0.0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xdd\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x50",
)
"""Pieces that parsers are known to stumble over."""
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 63,
    1 << 64,
    10**400,
    math.nan,
    math.inf,
    -0.0,
    1e300,
    "",
    "²",
    "\ud800",
    "a" * 5000,
    [],
    {},
    [[]],
    [None] * 3,
    {"": None},
)
"""Values that stand where another type or range is expected."""


def mutated(
    raw: bytes, others: tuple[bytes, ...], kind: type[Message] | None, dice: Random
) -> bytes:
    """One to four mutations of ``raw``; ``others`` are further valid bytes of its kind."""
    for _ in range(dice.randint(1, 4)):
        how = dice.random()
        if len(raw) > LONGEST:  # bytes this long are not built into messages here
            raw = _bytes(raw, others, dice)
        elif kind is not None and how < 0.5:
            raw = _message(raw, kind, dice)
        elif raw[:1] in (b"{", b"[") and how < 0.6:
            raw = _json(raw, dice)
        else:
            raw = _bytes(raw, others, dice)
    return raw


def _bytes(raw: bytes, others: tuple[bytes, ...], dice: Random) -> bytes:
    at = dice.randrange(len(raw) + 1)
    end = min(len(raw), at + dice.choice((1, 2, 4, 16, 64)))
    piece = raw[at:end] or b"\0"
    match dice.randrange(8):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + raw[end:]
        case 2:
            return raw[:at] + bytes(dice.randrange(256) for _ in piece) + raw[end:]
        case 3:
            return raw[:at] + dice.choice(WORDS) + raw[end:]
        case 4:
            other = dice.choice(others)
            return (raw[:at] + other[dice.randrange(len(other) + 1) :])[:LONGEST]
        case 5:
            return (
                raw[:at] + piece * min(dice.choice((2, 8, 200)), LONGEST // len(piece)) + raw[end:]
            )
        case 6:
            most = dice.choice((LONGEST, LONGEST, LONGEST, BLOWN_UP))
            return raw[:at] + piece * (most // len(piece)) + raw[end:]
        case _:
            return dice.randbytes(dice.choice((0, 1, 8, 64, 1024)))


def _json(raw: bytes, dice: Random) -> bytes:
    """The same document with one value replaced, repeated or gone."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return raw + b"]"
    places = list(_places(body))
    if not places:
        return raw
    holder, key = dice.choice(places)
    match dice.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.extend([holder[key]] * dice.choice((1, 70, 3000)))
        case 2:
            holder[key] = holder[dice.choice(list(_keys(holder)))]
        case _:
            holder[key] = dice.choice(_ODD)
    try:
        return json.dumps(body, separators=(",", ":")).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return raw


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _places(body: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found = []
    waiting = [body]
    while waiting and len(found) < 5000:
        holder = waiting.pop()
        if isinstance(holder, dict | list):
            for key in _keys(holder):
                found.append((holder, key))
                waiting.append(holder[key])
    return found


def _message(raw: bytes, kind: type[Message], dice: Random) -> bytes:
    """The same message with one field changed, somewhere in it."""
    try:
        whole = kind.FromString(raw)
    except DecodeError:
        return raw
    at: Any = whole
    for _ in range(6):
        fields = at.DESCRIPTOR.fields
        if not fields:
            break
        field = dice.choice(fields)
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            _change(at, field, dice)
            break
        if field.is_repeated:
            held = getattr(at, field.name)
            if not held or dice.random() < 0.4:
                _repeat(held, dice)
                break
            at = dice.choice(held)
        elif dice.random() < 0.1:
            at.ClearField(field.name)
            break
        else:
            at = getattr(at, field.name)
            at.SetInParent()
    return whole.SerializeToString()


def _repeat(held: Any, dice: Random) -> None:
    many = dice.choice((1, 9, 70, 1100, 5000))
    first = held[0] if len(held) else None
    for _ in range(many):
        one = held.add()
        if first is not None and one.ByteSize() < 64 and first.ByteSize() < 256:
            one.CopyFrom(first)


def _change(at: Any, field: FieldDescriptor, dice: Random) -> None:
    if field.message_type is not None:
        entries = getattr(at, field.name)
        key_field = field.message_type.fields_by_name["key"]
        value_field = field.message_type.fields_by_name["value"]
        for _ in range(dice.choice((1, 70, 1100))):
            entries[_drawn(key_field, dice)] = _drawn(value_field, dice)
    elif field.is_repeated:
        held = getattr(at, field.name)
        value = _drawn(field, dice)
        short = len(value) < 100 if isinstance(value, str | bytes) else True
        held.extend([value] * (dice.choice((1, 9, 1100, 30000)) if short else 1))
    else:
        setattr(at, field.name, _drawn(field, dice))


def _drawn(field: FieldDescriptor, dice: Random) -> Any:
    kind = FieldDescriptor
    match field.type:
        case kind.TYPE_STRING:
            odd = ("", "²", "a" * 200, "a" * 6000, "\0", "/", "é" * 40, "9" * 4400)
            return dice.choice(odd) if dice.random() < 0.6 else str(dice.getrandbits(40))
        case kind.TYPE_BYTES:
            return dice.randbytes(dice.choice((0, 1, 63, 64, 65, 5000)))
        case kind.TYPE_DOUBLE | kind.TYPE_FLOAT:
            return dice.choice((0.0, -0.0, -1.0, math.nan, math.inf, 1e308, 5e-324, 1e-12))
        case kind.TYPE_BOOL:
            return dice.random() < 0.5
        case kind.TYPE_ENUM:
            return dice.choice((0, 1, 2, 99))
        case _:
            bits = 64 if field.type in (kind.TYPE_UINT64, kind.TYPE_FIXED64) else 32
            signed = field.type in (kind.TYPE_INT32, kind.TYPE_INT64)
            most = (1 << (bits - signed)) - 1
            return dice.choice((0, 1, most, most // 2, dice.getrandbits(16)))
