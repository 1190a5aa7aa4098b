"""The member's side of an exchange: give an owner our gradients of its parts, take its fresh parameters, believe nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import torch

from node.averaging.events import Kind
from node.averaging.ledger import Held
from node.averaging.reduce import digest
from node.averaging.request import RoundRequest
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.transport.port import TransportPort, printable, translate
from node.wire.tensors import TensorReader, chunks, encode, head_of
from protos import averaging_pb2, averaging_pb2_grpc

LARGE = 1 << 18
"""Numbers in a tensor from which its encoding leaves the event loop."""

CONTRIBUTORS_LIMIT = 4096
"""Peers a cell can have, generously."""


class Unwelcome(PeerFault):
    """The owner lives and has answered, but not with parts: ``kind`` says why."""

    def __init__(self, peer: PeerId, kind: Kind, text: str) -> None:
        super().__init__(peer, f"refused our exchange, {kind.value}: {text}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    """What one owner gave: its parts, and the tensor bytes both ways."""

    parts: dict[str, Held]
    nbytes: int


async def exchange(
    transport: TransportPort,
    owner: PeerId,
    request: RoundRequest,
    names: Sequence[str],
    giving: bool,
    wire: str,
    chunk: int,
    timeout: float,
) -> Answer:
    """Give gradients of ``names`` to their owner (unless not ``giving``) and wait for their fresh parameters.

    A lost connection is dialled anew once: an exchange may be repeated, what was stepped is not stepped again.
    Raises Unwelcome for a refusal, PeerFault with weight 1 for an answer that does not
    hold together, with 0 for everything that may be nobody's fault.
    """
    try:
        async with asyncio.timeout(timeout):
            try:
                return await _once(transport, owner, request, names, giving, wire, chunk)
            except grpc.aio.AioRpcError as e:
                if e.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            transport.forget(owner)
            return await _once(transport, owner, request, names, giving, wire, chunk)
    except grpc.aio.AioRpcError as e:
        raise translate(owner, e) from e
    except WireError as e:
        raise PeerFault(owner, f"gave an answer that is refused: {e}", 1.0) from e
    except TimeoutError as e:
        raise PeerFault(owner, "gave no fresh parts in time") from e


async def _once(
    transport: TransportPort,
    owner: PeerId,
    request: RoundRequest,
    names: Sequence[str],
    giving: bool,
    wire: str,
    chunk: int,
) -> Answer:
    stub = averaging_pb2_grpc.AveragingStub(await transport.channel(owner))
    call = stub.Exchange(_contribution(request, names if giving else (), wire, chunk))
    try:
        held, received = await _fresh(call, owner, request, names)
    finally:
        call.cancel()
    sent = sum(math.prod(request.shapes[n]) for n in names) * (4 if wire == "fp32" else 2) if giving else 0
    transport.count(owner, sent=sent, received=received)
    return Answer(held, sent + received)


async def _contribution(
    request: RoundRequest, names: Sequence[str], wire: str, chunk: int
) -> AsyncIterator[averaging_pb2.Contribution]:
    gradients = request.gradients or {}
    head = averaging_pb2.ContributionHead(
        epoch=request.round.epoch,
        term=request.round.term,
        attempt=request.round.attempt,
        plan_hash=request.plan_hash,
        ownership_hash=request.ownership_hash,
        tokens=request.tokens if names else 0,
        tensors=[head_of(name, gradients[name], wire) for name in names],
    )
    yield averaging_pb2.Contribution(head=head)
    for name in names:
        tensor = gradients[name]
        buffer = await asyncio.to_thread(encode, tensor, wire) if tensor.numel() >= LARGE else encode(tensor, wire)
        for piece in chunks(buffer, chunk):
            yield averaging_pb2.Contribution(chunk=piece)


async def _fresh(
    call: grpc.aio.StreamStreamCall, owner: PeerId, request: RoundRequest, names: Sequence[str]
) -> tuple[dict[str, Held], int]:
    """Read and check an owner's answer. Raises WireError for one that does not parse or is not what was asked for."""
    head: averaging_pb2.FreshHead | None = None
    reader: TensorReader | None = None
    async for message in call:
        if message.WhichOneof("part") == "refusal":
            raise Unwelcome(owner, _kind(message.refusal.kind), printable(message.refusal.text))
        if head is None or reader is None:
            if message.WhichOneof("part") != "head":
                raise WireError("the first message is not the head")
            announced: averaging_pb2.FreshHead = message.head
            head = announced
            reader = TensorReader(list(announced.tensors), [(n, request.shapes[n]) for n in sorted(names)], "fp32")
        elif not message.chunk:
            raise WireError("a message without bytes")
        else:
            reader.feed(message.chunk)
        if not reader.remaining:
            break
    if reader is None or head is None:
        raise WireError("an empty answer")
    if not head.tokens or len(head.contributors) > CONTRIBUTORS_LIMIT:
        raise WireError("parts that were made from nothing, or from too many")
    tensors = reader.finish()
    contributors = tuple(PeerId(p) for p in head.contributors)
    await asyncio.to_thread(_check, tensors, head.digest)
    parts = zip(sorted(names), tensors, strict=True)
    return {n: Held(t, owner, head.tokens, contributors) for n, t in parts}, reader.nbytes


def _check(tensors: Sequence[torch.Tensor], expected: str) -> None:
    if digest(tensors) != expected:
        raise WireError(f"the bytes do not have the digest {printable(expected)[:16]!r}")
    if not all(bool(torch.isfinite(t).all()) for t in tensors):
        raise WireError("fresh parameters that are not finite")


def _kind(number: int) -> Kind:
    try:
        return Kind[averaging_pb2.RefusalKind.Name(number)]  # type: ignore[arg-type]
    except (ValueError, KeyError) as e:
        raise WireError(f"a refusal of unknown kind {number}") from e
