"""Parts as bytes: messages written by hand are protobuf's, and rounds in every number format leave
everybody with the same bits."""

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.averaging.exchange import parcel
from node.averaging.settings import AveragingSettings
from node.core.errors import WireError
from node.wire.coding.codecs import encode, settle
from node.wire.coding.formats import FORMATS, nbytes_of
from node.wire.tensors import expected_head
from protos import averaging_pb2
from tests.averaging.conftest import with_peers

SIZES = st.lists(st.integers(0, 400), max_size=6)


def bytes_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@given(SIZES, st.integers(1, 300))
def test_messages_are_protobufs_own_and_full_but_the_last(sizes: list[int], size: int) -> None:
    parts = [bytes_of(n, i) for i, n in enumerate(sizes)]
    made = list(parcel.messages(parts, size))
    chunks = [averaging_pb2.Contribution.FromString(m).chunk for m in made]
    assert made == [averaging_pb2.Fresh(chunk=c).SerializeToString() for c in chunks]
    assert [bytes(parcel.payload(m)) for m in made] == chunks
    assert b"".join(chunks) == b"".join(bytes(p.numpy()) for p in parts)
    assert all(len(c) == size for c in chunks[:-1])


@given(st.binary(max_size=40))
def test_any_message_is_a_chunk_of_protobuf_or_a_wire_error(message: bytes) -> None:
    try:
        brought = bytes(parcel.payload(message))
    except WireError:
        return
    assert averaging_pb2.Fresh.FromString(message).chunk == brought


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x12",
        b"\x12\x00",
        b"\x12\x02a",
        b"\x12\x01ab",
        b"\x0a\x01a",
        b"\x12\xff\xff\xff\xff\xff\xff\x01a",
        b"\x12\x81",
    ],
)
def test_what_is_no_chunk_is_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        parcel.payload(message)


@given(SIZES, st.integers(1, 300), st.sampled_from(sorted(FORMATS)))
def test_a_reader_gives_back_what_was_sent(counts: list[int], size: int, codec: str) -> None:
    shapes = [(f"p{i}", (n,)) for i, n in enumerate(counts)]
    heads = [expected_head(name, shape, codec) for name, shape in shapes]
    parts = [encode(torch.randn(n), codec) for n in counts]
    reader = parcel.ParcelReader(heads, shapes, codec)
    assert reader.nbytes == sum(nbytes_of(n, codec) for n in counts)
    for message in parcel.messages(parts, max(size, -(-reader.nbytes // parcel.FEWEST_MESSAGES))):
        reader.feed(parcel.payload(message))
    assert all(torch.equal(a, b) for a, b in zip(reader.raw(), parts, strict=True))


def means(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return gradients


@pytest.mark.parametrize(
    ("up", "down"),
    [("int8", "int8"), ("int4", "int4"), ("top-k", "top-k"), ("fp16", "int8"), ("int8", "fp32")],
)
async def test_members_and_owners_end_with_equal_bits_in_every_format(cell_of, grads, up, down):
    cell = await cell_of(3, replace(AveragingSettings(round_timeout_s=60.0, group_bytes=1)))
    requests = {p: cell.request(p, up=up, down=down) for p in cell.peers}
    outcomes = await asyncio.gather(
        *(cell.rounds[p].run_round(r, means) for p, r in requests.items())
    )
    total = sum(map(cell.tokens, cell.peers))
    for name in cell.owners():
        sent = [settle(grads(p)[name], up)[1] for p in cell.peers]
        exact = (sent[0] + sent[1] + sent[2]) / total
        expected = settle(exact, down)[1]
        assert all(torch.equal(o.fresh[name], expected) for o in outcomes)
    for peer, outcome in zip(requests, outcomes, strict=True):
        made = cell.made(peer, outcome)
        assert {n: part.source for n, part in made.items()} == cell.owners()
        assert {(part.contributors, part.tokens) for part in made.values()} == {
            (tuple(cell.peers), total)
        }


async def test_a_survivor_serves_the_dead_owners_bytes(cell_of, bits):
    cell, p0, p1, p2 = await with_peers(cell_of(3))
    owners = cell.owners([p2])
    changes = {"listeners": frozenset({p1}), "down": "int8"}
    first, _ = await asyncio.gather(
        *(
            cell.rounds[p].run_round(cell.request(p, owners=owners, **changes), means)
            for p in (p0, p2)
        )
    )
    await cell.net.kill(p2)
    requests = {p: cell.repair(p, [p0, p1], cell.owners([p0]), **changes) for p in (p0, p1)}
    again, late = await asyncio.gather(
        *(cell.rounds[p].run_round(r, means) for p, r in requests.items())
    )
    assert bits(again.fresh, first.fresh)
    assert bits(late.fresh, first.fresh)
    assert not late.missing
