"""A member of a round that misbehaves on the wire: real frames in both directions, bent as a
:class:`Lie` says. Never: the engine's own member or owner, which would not let it lie."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache

import grpc
import grpc.aio
import torch
from torch import Tensor

from benchmarks.averaging.meeting import CHUNK, FAULTY, MEMBERS, SETTINGS, TOKENS, given, truth
from node.averaging.exchange import parcel
from node.averaging.exchange.member import SERVICE
from node.averaging.exchange.request import RoundRequest
from node.core.errors import PeerFault
from node.wire.coding.codecs import encode
from node.wire.tensors import expected_head
from protos import averaging_pb2
from testbed.fakes.memory_net import MemoryTransport

Frames = list[bytes]


def _same_tensor(tensor: Tensor) -> Tensor:
    return tensor


def _same_frames(frames: Frames) -> Frames:
    return frames


@dataclass(frozen=True)
class Lie:
    """A lie of a member in a round.

    `bend` changes every tensor, which is announced as changed; `cut` changes the frames behind a
    head; both in every group from `since` on. `tokens`: the claimed number, 0 for the truth.
    `silent`: opens no exchange and answers none. `stalls`: sends nothing after its last frame, but
    hangs on. `owns`: it owns parts too, and answers with the same lies.
    """

    bend: Callable[[Tensor], Tensor] = _same_tensor
    cut: Callable[[Frames], Frames] = _same_frames
    since: int = 0
    tokens: int = 0
    silent: bool = False
    stalls: bool = False
    owns: bool = True


class Rogue:
    """A lying member; make it before its transport starts. `told`: each owner's answer to its
    contribution."""

    def __init__(self, transport: MemoryTransport, lie: Lie) -> None:
        self._transport = transport
        self._lie = lie
        self.told: dict[str, str] = {}
        self._request: RoundRequest | None = None
        self._open = asyncio.Event()
        handler = grpc.stream_stream_rpc_method_handler(self._answer)
        transport.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Exchange": handler}),)
        )

    async def run(self, request: RoundRequest) -> None:
        """Take part until everything has been said and answered; a lie that stalls does not end."""
        self._request = request
        self._open.set()
        if self._lie.silent:
            return
        others = sorted(set(request.owners.values()) - {FAULTY})
        await asyncio.gather(*(self._give(owner, request) for owner in others))

    async def _give(self, owner: str, request: RoundRequest) -> None:
        peer = next(p for p in MEMBERS if p == owner)
        for group in request.groups_of(peer, SETTINGS.group_bytes):
            heads, frames = self._words([(n, given(FAULTY)[n]) for n in group.names], group.index)
            head = averaging_pb2.ContributionHead(
                epoch=request.round.epoch,
                term=request.round.term,
                attempt=request.round.attempt,
                plan_hash=request.plan_hash,
                ownership_hash=request.ownership_hash,
                tokens=self._lie.tokens or TOKENS[FAULTY],
                tensors=heads,
                group=group.index,
                group_digest=group.digest,
            )
            try:
                channel = await self._transport.channel(peer)
                first = averaging_pb2.Contribution(head=head).SerializeToString()
                call = channel.stream_stream(f"/{SERVICE}/Exchange")(
                    self._spoken([first, *frames], group.index)
                )
                answer = averaging_pb2.Fresh.FromString(await anext(aiter(call)))
                if answer.WhichOneof("part") == "refusal":
                    self.told[owner] = averaging_pb2.RefusalKind.Name(answer.refusal.kind)
                    return
                self.told[owner] = "served"
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as e:
                self.told[owner] = e.code().name
                return
            except (PeerFault, StopAsyncIteration):
                self.told[owner] = "hung up"
                return

    async def _answer(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Answer with its own parts, made of all contributions, in the format of its lies."""
        await self._open.wait()
        if self._lie.silent or self._request is None:
            await asyncio.Event().wait()
            return
        head = averaging_pb2.Contribution.FromString(await anext(requests)).head
        left = sum(t.nbytes for t in head.tensors)
        while left > 0:
            left -= len(parcel.payload(await anext(requests)))
        group = self._request.groups_of(FAULTY, SETTINGS.group_bytes)[head.group]
        heads, frames = self._words([(n, truth(n, MEMBERS)) for n in group.names], group.index)
        made = averaging_pb2.Made(
            tensors=len(heads), tokens=sum(TOKENS.values()), contributors=MEMBERS
        )
        fresh = averaging_pb2.FreshHead(tensors=heads, made=[made])
        async for message in self._spoken(
            [averaging_pb2.Fresh(head=fresh).SerializeToString(), *frames], group.index
        ):
            await context.write(message)

    def _words(self, parts: Sequence[tuple[str, Tensor]], group: int) -> tuple[list, Frames]:
        """Heads and frames of parts, bent."""
        lies = group >= self._lie.since
        bent = [(name, self._lie.bend(tensor) if lies else tensor) for name, tensor in parts]
        heads = [expected_head(name, tuple(tensor.shape), "fp32") for name, tensor in bent]
        frames = list(parcel.messages([encode(tensor, "fp32") for _, tensor in bent], CHUNK))
        return heads, self._lie.cut(frames) if lies else frames

    async def _spoken(self, messages: Frames, group: int) -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        if self._lie.stalls and group >= self._lie.since:
            await asyncio.Event().wait()


@cache
def framed(size: int, says: int) -> bytes:
    """A frame of ``size`` zeros that says they are ``says``."""
    length = bytearray()
    while says > 0x7F:
        length.append(says & 0x7F | 0x80)
        says >>= 7
    return bytes([parcel.CHUNK_TAG]) + bytes(length) + bytes([says]) + bytes(size)


def all_of(value: float) -> Callable[[Tensor], Tensor]:
    """Every number of a tensor becomes ``value``."""
    return lambda tensor: torch.full_like(tensor, value)


def one_of(value: float) -> Callable[[Tensor], Tensor]:
    """One number in the middle does."""

    def bend(tensor: Tensor) -> Tensor:
        bent = tensor.clone()
        bent.view(-1)[bent.numel() // 2] = value
        return bent

    return bend
