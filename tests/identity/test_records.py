"""Records: only the writer, only the key, only for a while, and no bytes that break the reader."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import WireError
from node.identity.keys import Identity
from node.identity.records import OVERHEAD, SignedRecord, open_record, seal

ME = Identity.ephemeral()
OTHER = Identity.ephemeral()
NOW = 1_700_000_000.0


def opened(
    raw: bytes,
    *,
    key: str = "run/peers",
    who: Identity = ME,
    now: float = NOW,
    max_bytes: int = 4096,
) -> SignedRecord:
    return open_record(
        raw, key=key, writer=who.peer_id, now_wall=now, max_ttl_s=600, max_bytes=max_bytes
    )


def sealed(body: bytes = b"body", seq: int = 7, not_after: float = NOW + 15) -> bytes:
    return seal(ME, "run/peers", body, seq, not_after)


@given(st.binary(max_size=500), st.integers(0, 2**63 - 1), st.floats(0.001, 599))
def test_what_was_sealed_is_what_opens(body: bytes, seq: int, life: float) -> None:
    raw = sealed(body, seq, NOW + life)
    assert len(raw) == len(body) + OVERHEAD
    record = opened(raw, max_bytes=len(raw), now=NOW - 0.001)
    assert (record.seq, record.body) == (seq, body)
    assert record.not_after == pytest.approx(NOW + life, abs=1e-3)


@given(st.integers(0, len(sealed()) * 8 - 1))
def test_no_bit_may_change(bit: int) -> None:
    raw = bytearray(sealed())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        opened(bytes(raw))


def test_a_record_lives_as_long_as_the_limit() -> None:
    assert opened(sealed(not_after=NOW + 600)).not_after == NOW + 600


@pytest.mark.parametrize(
    ("raw", "more", "says"),
    [
        (sealed(), {"who": OTHER}, "not by"),
        (sealed(), {"key": "run/other"}, "not by"),
        # A key and a head do not run into each other.
        (seal(ME, "ab", b"", 1, NOW + 1), {"key": "a"}, ""),
        *((sealed()[:n], {}, "") for n in range(0, OVERHEAD + 4, 7)),
        (sealed(not_after=NOW), {}, "expired"),
        (sealed(not_after=NOW - 60), {}, "expired"),
        (sealed(not_after=NOW + 601), {}, "wants to live"),
        (sealed(not_after=2.0**40 - 1), {}, "wants to live"),
        (b"x" * 101, {"max_bytes": 100}, "limit is 100"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,
)
def test_any_other_record_is_refused_with_the_reason(raw: bytes, more, says: str) -> None:
    with pytest.raises(WireError, match=says or None):
        opened(raw, **more)


@pytest.mark.parametrize("not_after", [math.inf, math.nan, -1.0, 2.0**40])
def test_no_record_for_ever(not_after: float) -> None:
    with pytest.raises(ValueError, match="time"):
        sealed(not_after=not_after)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_one_way(raw: bytes) -> None:
    with pytest.raises(WireError):
        opened(raw)
