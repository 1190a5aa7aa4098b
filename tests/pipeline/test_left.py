"""Tensors of frames whose bytes are left in memory that both peers share."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import Hop
from node.pipeline.events import Claim
from node.pipeline.frames import CHUNK, LEFT, FrameReader, FrameShape, frames, read_chunks
from node.wire.tensors import encode
from protos import pipeline_pb2 as pb
from testbed.fakes.memory_net import MemoryTransport
from tests.pipeline.conftest import STAGES, begun
from tests.transport.conftest import until

HOPS = (Hop(0, PeerId("a")), Hop(1, PeerId("b")), Hop(0, PeerId("a")))
SHAPE = FrameShape(1, 700, 1024, "fp32", 2)


class Memory:
    """Memory in which every piece is left for which `takes` returns True."""

    def __init__(self, takes: Callable[[int], bool]) -> None:
        self._takes = takes
        self._asked = itertools.count()
        self.pieces: list[bytes] = []

    def leave(self, data: memoryview) -> bytes | None:
        if not self._takes(next(self._asked)):
            return None
        self.pieces.append(bytes(data))
        return bytes((len(self.pieces) - 1,))

    def fetch(self, place: bytes, into: memoryview) -> int:
        piece = self.pieces[place[0]]
        if len(piece) > len(into):
            raise WireError("too long")
        into[: len(piece)] = piece
        return len(piece)


def messages(tensor: torch.Tensor, memory: Memory | None) -> list[pb.Frame]:
    """The messages that bring a tensor."""
    leave = None if memory is None else memory.leave
    claim = Claim(1, "plan", 0, HOPS, 1)
    return list(
        frames(
            claim, pb.TRAIN, 1.0, tuple(tensor.shape), encode(tensor, "fp32"), SHAPE, leave=leave
        )
    )


async def received(sent: list[pb.Frame], memory: Memory | None) -> torch.Tensor:
    """The tensor in these messages."""
    rest = iter(sent[1:])
    reader = FrameReader(sent[0].head, (1, 700, 1024), "fp32")

    async def read() -> pb.Frame:
        return next(rest)

    await read_chunks(read, reader, None if memory is None else memory.fetch)
    return reader.finish()[0]


@pytest.mark.parametrize(
    ("takes", "left"),
    [(lambda n: True, 3), (lambda n: False, 0), (lambda n: n == 1, 1), (lambda n: n != 1, 2)],
)
async def test_a_tensor_arrives_wherever_its_pieces_are_left(takes, left):
    tensor = torch.randn(1, 700, 1024)
    memory = Memory(takes)
    sent = messages(tensor, memory)
    assert len(memory.pieces) == left
    sizes = [len(frame.chunk) for frame in sent[1:] if frame.WhichOneof("part") == "chunk"]
    assert sum(sizes) + sum(map(len, memory.pieces)) == 4 * tensor.numel()
    assert max(sizes, default=0) <= CHUNK
    assert all(len(piece) <= LEFT for piece in memory.pieces)
    assert torch.equal(await received(sent, memory), tensor)


async def test_a_peer_that_shares_no_memory_is_sent_chunks_and_takes_nothing_else():
    tensor = torch.randn(1, 700, 1024)
    assert torch.equal(await received(messages(tensor, None), None), tensor)
    with pytest.raises(WireError, match="expected a chunk"):
        await received(messages(tensor, Memory(lambda n: True)), None)


async def test_a_piece_longer_than_the_rest_of_the_tensor_is_refused():
    memory = Memory(lambda n: True)
    sent = messages(torch.randn(1, 700, 1024), memory)
    sent[-1] = sent[1]
    with pytest.raises(WireError, match="too long"):
        await received(sent, memory)


async def test_bytes_behind_the_tensor_are_refused():
    memory = Memory(lambda n: True)
    sent = messages(torch.randn(1, 700, 1024), memory)
    reader = FrameReader(sent[0].head, (1, 700, 1024), "fp32")
    for frame in sent[1:]:
        reader.fill(lambda into, place=frame.left: memory.fetch(place, into))
    with pytest.raises(WireError, match="more bytes"):
        reader.fill(lambda into: 0)


class SharedTable:
    """Memory that all peers of a MemoryNet share, in place of none."""

    def __init__(self, monkeypatch) -> None:
        self.held: dict[bytes, tuple[PeerId, PeerId, bytes]] = {}
        self.left = 0
        self.withdrawn = 0
        table = self

        def leave(self: MemoryTransport, peer: PeerId, data: memoryview) -> bytes:
            table.left += 1
            place = table.left.to_bytes(8, "big")
            table.held[place] = self.peer_id, peer, bytes(data)
            return place

        def withdraw(self: MemoryTransport, peer: PeerId, places: Sequence[bytes]) -> None:
            for place in places:
                table.withdrawn += table.held.pop(place, None) is not None

        def fetch(self: MemoryTransport, peer: PeerId, place: bytes, into: memoryview) -> int:
            giver, taker, data = table.held.pop(place)
            assert (giver, taker) == (peer, self.peer_id)
            assert len(data) <= len(into)
            into[: len(data)] = data
            return len(data)

        for method in (leave, withdraw, fetch):
            monkeypatch.setattr(MemoryTransport, method.__name__, method)


async def test_a_pipeline_learns_the_same_through_shared_memory(make_swarm, monkeypatch):
    table = SharedTable(monkeypatch)
    swarm, plan = await begun(make_swarm().fill(replicas=2), 6)
    await swarm.run(plan, counted=True)
    await swarm.check(plan)
    assert table.left >= 6 * 2 * (STAGES + 1), "every tensor, and none of them in its call"
    assert not table.held


async def test_bytes_for_a_peer_without_room_are_withdrawn(make_swarm, monkeypatch):
    table = SharedTable(monkeypatch)
    swarm, plan = await begun(make_swarm().fill(replicas=1), 2)
    stash = swarm.pipelines["s1a"].stash
    stash.charge(stash.limit)
    running = asyncio.ensure_future(swarm.run(plan, counted=True))
    await until(lambda: table.withdrawn, 20)
    stash.charge(-stash.limit)
    await running
    await swarm.check(plan)
    assert not table.held
