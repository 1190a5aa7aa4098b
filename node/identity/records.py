"""A signed, numbered, expiring note that anybody may carry: only its writer can have made it, and
only for its key.

Layout: ``01`` · seq u64 · not_after u64 (Unix milliseconds) · signature 64 · body, integers big
endian. The signature covers the key as well, which does not travel: a record moved to another key,
or to another writer, does not open.
"""

import math
import struct
from dataclasses import dataclass

from node.core.errors import Refused, WireError
from node.core.ids import PeerId
from node.identity.keys import SIGNATURE_BYTES, Identity, labelled, verify

_DOMAIN = "tutti/record/1"
_VERSION = 1
_HEAD = struct.Struct(">BQQ")
OVERHEAD = _HEAD.size + SIGNATURE_BYTES
"""Bytes a record is longer than its body."""
MAX_SEQ = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """Content of an opened record. ``not_after`` in Unix seconds. The reader decides if ``seq`` is
    news."""

    seq: int
    not_after: float
    body: bytes


def seal(identity: Identity, key: str, body: bytes, seq: int, not_after: float) -> bytes:
    """A record by ``identity`` for ``key``. Raises ValueError for a time that cannot be written."""
    head = _HEAD.pack(_VERSION, seq, milliseconds(not_after))
    return head + identity.sign(labelled(head + body, key), _DOMAIN) + body


def open_record(
    raw: bytes,
    *,
    key: str,
    writer: PeerId,
    now_wall: float,
    max_ttl_s: float,
    max_bytes: int,
    newest: int = -1,
) -> SignedRecord:
    """The record of ``writer`` for ``key``.

    Raises WireError when it is larger than ``max_bytes`` (whole record), not a record, not newer
    than sequence number ``newest``, expired, lives longer than ``max_ttl_s`` from ``now_wall``, or
    was not signed by ``writer`` for ``key``. Cheap checks come before the signature.
    """
    if len(raw) > max_bytes:
        raise WireError(f"a record of {len(raw)} bytes, the limit is {max_bytes}")
    if len(raw) < OVERHEAD:
        raise WireError(f"{len(raw)} bytes are no record")
    version, seq, not_after_ms = _HEAD.unpack_from(raw)
    if version != _VERSION or seq > MAX_SEQ:
        raise WireError(f"not a record of version {_VERSION}")
    if seq <= newest:
        # This is nobody's fault: old copies elsewhere take a moment to be replaced.
        raise WireError(f"record {seq} comes after {newest} of the same writer")
    not_after = not_after_ms / 1000
    if not_after <= now_wall:
        raise WireError(f"the record expired {now_wall - not_after:.0f} s ago")
    if not_after > now_wall + max_ttl_s:
        raise WireError(
            f"the record wants to live {not_after - now_wall:.0f} s, the limit is {max_ttl_s:.0f}"
        )
    head = raw[: _HEAD.size]
    signature = raw[_HEAD.size : OVERHEAD]
    body = raw[OVERHEAD:]
    try:
        verify(writer, labelled(head + body, key), signature, _DOMAIN)
    except Refused as e:
        raise WireError(str(e)) from e
    return SignedRecord(seq, not_after, body)


def milliseconds(wall: float) -> int:
    """Unix seconds as they are written: whole milliseconds. Raises ValueError for a number that is
    no such time: not finite, negative, or 2**40 and more."""
    if not math.isfinite(wall) or not 0 <= wall < 2**40:
        raise ValueError(f"not a time: {wall}")
    return round(wall * 1000)
