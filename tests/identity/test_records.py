"""Records: only the writer, only the key, only for a while, and no bytes that break the reader."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import WireError
from node.identity.keys import Identity
from node.identity.records import OVERHEAD, SignedRecord, open_record, seal

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
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
    assert (record.writer, record.seq, record.body) == (ME.peer_id, seq, body)
    assert record.not_after == pytest.approx(NOW + life, abs=1e-3)


def test_not_of_another_writer_or_key() -> None:
    with pytest.raises(WireError, match="not by"):
        opened(sealed(), who=OTHER)
    with pytest.raises(WireError, match="not by"):
        opened(sealed(), key="run/other")


def test_a_key_and_a_head_do_not_run_into_each_other() -> None:
    raw = seal(ME, "ab", b"", 1, NOW + 1)
    with pytest.raises(WireError):
        opened(raw, key="a")


@given(st.integers(0, len(sealed()) * 8 - 1))
def test_no_bit_may_change(bit: int) -> None:
    raw = bytearray(sealed())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        opened(bytes(raw))


@pytest.mark.parametrize("n", range(0, OVERHEAD + 4, 7))
def test_cut_records_do_not_open(n: int) -> None:
    with pytest.raises(WireError):
        opened(sealed()[:n])


def test_time_is_checked_at_both_ends() -> None:
    assert opened(sealed(not_after=NOW + 600)).not_after == NOW + 600
    for not_after, says in [
        (NOW, "expired"),
        (NOW - 60, "expired"),
        (NOW + 601, "wants to live"),
        (2.0**40 - 1, "wants to live"),
    ]:
        with pytest.raises(WireError, match=says):
            opened(sealed(not_after=not_after))


def test_size_is_checked_before_anything_else() -> None:
    with pytest.raises(WireError, match="limit is 100"):
        opened(b"x" * 101, max_bytes=100)


@pytest.mark.parametrize("not_after", [math.inf, math.nan, -1.0, 2.0**40])
def test_no_record_for_ever(not_after: float) -> None:
    with pytest.raises(ValueError, match="time"):
        sealed(not_after=not_after)
    with pytest.raises(ValueError, match="seq"):
        sealed(seq=-1)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_one_way(raw: bytes) -> None:
    with pytest.raises(WireError):
        opened(raw)
