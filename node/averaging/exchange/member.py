"""The member's side of the exchanges with one owner: give our gradients of its parts, take its
fresh parameters, believe nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import grpc.aio
import torch

from node.averaging.exchange import parcel
from node.averaging.exchange.events import UNDER_WAY, Group, Kind
from node.averaging.exchange.request import FreshPart, RoundRequest
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.tasks import together
from node.transport.port import TransportPort, answers, printable
from node.wire import bounds
from node.wire.coding.codecs import Coded, encode, opened
from node.wire.tensors import expected_head
from protos import averaging_pb2, tensor_pb2

SERVICE = "tutti.averaging.v1.Averaging"
"""Of gRPC."""

Part = tuple[tensor_pb2.TensorHead, torch.Tensor]
"""A contribution's head and bytes."""

CONTRIBUTORS_LIMIT = 4096
"""Peers a cell can have, generously."""


class Unwelcome(PeerFault):
    """The owner answered with a refusal instead of parts: it is alive."""


class Impossible(PeerFault):
    """The owner gave parameters that no honest owner gives."""


class Exchanges:
    """The exchanges with one owner in one attempt. ``giving``: they carry our gradients; groups are
    uploaded one at a time, in order."""

    def __init__(
        self,
        transport: TransportPort,
        owner: PeerId,
        request: RoundRequest,
        giving: bool,
        chunk: int,
    ) -> None:
        self._transport = transport
        self._owner = owner
        self._request = request
        self._giving = giving
        self._chunk = chunk
        self._turn = asyncio.Lock()
        self._redialled = 0

    async def all(
        self,
        requests: Sequence[tuple[Group, tuple[str, ...]]],
        timeout: float,
        took: Callable[[dict[str, FreshPart], int], None],
    ) -> None:
        """Exchange groups in order, ``UNDER_WAY`` of them at once, each with the parts of it that
        we want: all of them unless we give gradients. ``took`` is called with each result of
        :meth:`one`, as it comes.

        After one has failed, begins no other, lets those under way end, and raises the first
        PeerFault.
        """
        todo = iter(requests)
        faults = list[PeerFault]()
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout

        async def some() -> None:
            for group, names in todo:
                try:
                    took(*await self.one(group, names, end - loop.time()))
                except PeerFault as fault:
                    faults.append(fault)
                if faults:
                    return

        await together(*(some() for _ in range(min(UNDER_WAY, len(requests)))))
        if faults:
            raise faults[0]

    async def one(
        self, group: Group, names: tuple[str, ...], timeout: float
    ) -> tuple[dict[str, FreshPart], int]:
        """Give gradients of a group to its owner (if giving) and wait for its fresh parameters.
        Returns these parts, and the number of tensor bytes both ways.

        A lost connection is dialled anew once: an exchange may be repeated, because stepped parts
        are not stepped again. Raises Unwelcome for a refusal, Impossible for parts that do not pass
        the request's check, PeerFault with weight 1 for an invalid answer, with 0 for everything
        that may be nobody's fault.
        """
        try:
            async with answers(self._owner, timeout):
                redialled = self._redialled
                try:
                    return await self._once(group, names)
                except grpc.aio.AioRpcError as e:
                    if e.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                # else another exchange has redialled, and the connection is a new one
                if redialled == self._redialled:
                    self._redialled += 1
                    self._transport.forget(self._owner)
                return await self._once(group, names)
        except WireError as e:
            raise PeerFault(self._owner, f"gave an answer that is refused: {e}", 1.0) from e

    async def _once(self, group: Group, names: tuple[str, ...]) -> tuple[dict[str, FreshPart], int]:
        channel = await self._transport.channel(self._owner)
        # Encoded while the group before is uploaded. The lock is requested at once, so that groups
        # are uploaded in order: the owner reads only the first ones that are not fresh, and a later
        # group that held the lock would block them.
        given: tuple[str, ...] = ()
        if self._giving:
            given = names
        coded = asyncio.get_running_loop().run_in_executor(None, self._coded, given)
        await self._turn.acquire()
        with ExitStack() as turn:
            turn.callback(self._turn.release)
            upload = _Upload(self._request, group, self._chunk, await coded, turn)
            call = channel.stream_stream(f"/{SERVICE}/Exchange")(upload.messages())
            try:
                held, received = await _fresh(call, self._owner, self._request, names)
            finally:
                call.cancel()
        self._transport.count(self._owner, sent=upload.sent, received=received, plane="averaging")
        return held, upload.sent + received

    def _coded(self, names: Sequence[str]) -> list[Part]:
        request = self._request
        given = self._request.gradients or {}
        return [
            (expected_head(n, request.shapes[n], request.up), encode(given[n], request.up))
            for n in names
        ]


@dataclass(slots=True)
class _Upload:
    """The upload of one exchange. ``turn`` is closed after the last byte, so that the next upload
    begins; ``sent``: tensor bytes handed to the network."""

    request: RoundRequest
    group: Group
    chunk: int
    parts: Sequence[Part]
    turn: ExitStack
    sent: int = 0

    async def messages(self) -> AsyncIterator[bytes]:
        request = self.request
        tokens = 0
        if self.parts:
            tokens = request.tokens
        head = averaging_pb2.ContributionHead(
            epoch=request.round.epoch,
            term=request.round.term,
            attempt=request.round.attempt,
            plan_hash=request.plan_hash,
            ownership_hash=request.ownership_hash,
            tokens=tokens,
            tensors=[head for head, _ in self.parts],
            group=self.group.index,
            group_digest=self.group.digest,
        )
        yield averaging_pb2.Contribution(head=head).SerializeToString()
        left = sum(data.numel() for _, data in self.parts)
        for message in parcel.messages((data for _, data in self.parts), self.chunk):
            yield message
            self.sent += min(self.chunk, left - self.sent)
        self.turn.close()


async def _fresh(
    call: grpc.aio.StreamStreamCall, owner: PeerId, request: RoundRequest, names: Sequence[str]
) -> tuple[dict[str, FreshPart], int]:
    """Read and check an owner's answer. Raises WireError for an answer that does not parse, or that
    does not match the request."""
    first: bytes | None = await anext(aiter(call), None)
    if first is None:
        raise WireError("an empty answer")
    message = bounds.parse(averaging_pb2.Fresh, first)
    if message.WhichOneof("part") == "refusal":
        kind = _kind(message.refusal.kind)
        text = printable(message.refusal.text)
        raise Unwelcome(owner, f"refused our exchange, {kind.value}: {text}")
    if message.WhichOneof("part") != "head":
        raise WireError("the first message is not the head")
    head = message.head
    expected = [(n, request.shapes[n]) for n in sorted(names)]
    if any(
        (not m.tokens and request.hold is None) or len(m.contributors) > CONTRIBUTORS_LIMIT
        for m in head.made
    ):
        raise WireError("parts that were made from nothing, or from too many")
    if not all(m.tensors for m in head.made) or sum(m.tensors for m in head.made) != len(expected):
        raise WireError("does not say how each part was made")
    reader = parcel.ParcelReader(list(head.tensors), expected, request.down)
    if reader.remaining:
        async for raw in call:
            reader.feed(parcel.payload(raw))
            if not reader.remaining:
                break
    parts = reader.raw()
    tensors, why = await asyncio.to_thread(_checked, parts, expected, request)
    if why:
        raise Impossible(owner, f"gave parameters that it cannot have made: {why}", 1.0)
    made = [
        (m.tokens, tuple(map(PeerId, m.contributors))) for m in head.made for _ in range(m.tensors)
    ]
    rows = zip(sorted(names), tensors, parts, made, strict=True)
    return {
        n: FreshPart(t, owner, *how, request.down, data) for n, t, data, how in rows
    }, reader.nbytes


def _checked(
    parts: Sequence[torch.Tensor],
    expected: Sequence[tuple[str, Sequence[int]]],
    request: RoundRequest,
) -> tuple[list[torch.Tensor], str]:
    """Numbers of the parts, and the reason for which they are refused. Raises WireError for numbers
    that are not finite."""
    tensors = _opened(parts, [shape for _, shape in expected], request.down)
    if request.check is None:
        return tensors, ""
    names = [name for name, _ in expected]
    return tensors, request.check(dict(zip(names, tensors, strict=True)))


def _opened(
    parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], codec: str
) -> list[torch.Tensor]:
    found = [opened(Coded(data, shape, codec)) for data, shape in zip(parts, shapes, strict=True)]
    if not all(fine for _, fine in found):
        raise WireError("fresh parameters that are not finite")
    return [numbers for numbers, _ in found]


def _kind(number: int) -> Kind:
    try:
        return Kind[averaging_pb2.RefusalKind.Name(number)]  # type: ignore[arg-type]
    except (ValueError, KeyError) as e:
        raise WireError(f"a refusal of unknown kind {number}") from e
