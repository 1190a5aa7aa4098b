"""Words and losses of the model for members that hold no ends: they ask a peer that does.

Enters: a member's request. Leaves: the same stream that the operator of an ends peer gets. Never: more than a few at a time,
nor one without an end; whoever asks is a member, and a stranger may be one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from node.control.service import refuse
from node.control.sockets import NEXT_KEY
from node.core.errors import ExitCode, LocalFault, NetworkFault, PeerFault, RoundAborted
from node.core.ids import PeerId, short
from node.evaluate import answer
from node.generate import speak
from node.transport.port import TransportPort, printable, translate
from protos import control_pb2 as pb
from protos.model_pb2_grpc import ModelServicer, ModelStub, add_ModelServicer_to_server

if TYPE_CHECKING:
    from node.assembly import Assembled

T = TypeVar("T")
AT_ONCE = 2
"""Members that are served at the same time; one of them has one request under way."""
MOST_PROMPT, MOST_TOKENS, MOST_CHOICES, MOST_BATCHES = 1 << 16, 4096, 20, 64
"""What a member may ask for: characters of a prompt, tokens, choices of missing stages, batches of each."""
PATIENCE_S = 600.0
"""A whole answer takes no longer."""
MOST_TEXT = 1 << 12
"""Characters of one piece of an answer."""


class ModelService(ModelServicer):
    """Answers members from the ends that ``hosted`` holds; made before the transport serves."""

    def __init__(self, transport: TransportPort, hosted: Assembled, now: Callable[[], float] = time.monotonic) -> None:
        self._transport, self._hosted, self._now = transport, hosted, now
        self._asking = set[PeerId]()
        add_ModelServicer_to_server(self, transport.server)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.Piece]:
        """Text, a piece a token."""
        fair = len(request.prompt) <= MOST_PROMPT and 0.0 <= request.temperature <= 10.0 and request.seed < 1 << 63
        request.max_tokens = min(request.max_tokens or 100, MOST_TOKENS)
        async for piece in self._answer(context, fair, lambda: speak(self._hosted, self._transport, request)):
            yield piece

    async def Evaluate(self, request: pb.EvaluateRequest, context: Any) -> AsyncIterator[pb.Evaluated]:
        """Held-out loss, one choice of missing stages after the other."""
        fair = 0.0 <= request.share < 1.0
        request.choices = min(request.choices, MOST_CHOICES)
        request.batches = min(request.batches, MOST_BATCHES)
        async for found in self._answer(context, fair, lambda: answer(self._hosted, self._transport, request)):
            yield found

    async def _answer(self, context: Any, fair: bool, ask: Callable[[], AsyncIterator[T]]) -> AsyncIterator[T]:
        peer = self._transport.caller(context)
        if not fair:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a number out of bounds")
        if peer in self._asking or len(self._asking) >= AT_ONCE:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(self._asking)} members are being answered")
        self._asking.add(peer)
        end = self._now() + PATIENCE_S
        try:
            async with contextlib.aclosing(ask()) as answers:  # type: ignore[type-var]
                async for one in answers:
                    yield one
                    if self._now() > end:
                        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "it took too long")
        except (LocalFault, PeerFault, RoundAborted) as fault:
            await refuse(context, fault)
        finally:
            self._asking.discard(peer)


async def generated(transport: TransportPort, ends: Sequence[PeerId], request: pb.GenerateRequest) -> AsyncIterator[pb.Piece]:
    """What one of ``ends`` says to ``request``, tried in this order. Raises NetworkFault when none answers, and what a refusal
    of one that does answer says."""
    most = (request.max_tokens or 100) + 8
    async for piece in _relayed(transport, ends, lambda stub: stub.Generate(request, timeout=PATIENCE_S), most):
        yield pb.Piece(
            text=piece.text[:MOST_TEXT], last=piece.last, tokens_per_s=_finite(piece.tokens_per_s),
            missing=piece.missing if piece.HasField("missing") else None,
        )  # fmt: skip


async def evaluated(
    transport: TransportPort, ends: Sequence[PeerId], request: pb.EvaluateRequest
) -> AsyncIterator[pb.Evaluated]:
    """As :func:`generated`, of losses."""
    async for found in _relayed(transport, ends, lambda stub: stub.Evaluate(request, timeout=PATIENCE_S), MOST_CHOICES + 2):
        yield found


async def _relayed(
    transport: TransportPort, ends: Sequence[PeerId], call: Callable[[ModelStub], Any], most: int
) -> AsyncIterator[Any]:
    reasons: list[str] = []
    for peer in ends:
        count = 0
        try:
            stream = call(ModelStub(await transport.channel(peer)))
            try:
                async for one in stream:
                    count += 1
                    if count > most:
                        transport.fault(peer, "an answer without an end")
                        raise PeerFault(peer, "its answer has no end")
                    yield one
                return
            finally:
                stream.cancel()
        except grpc.aio.AioRpcError as e:
            fault = _refusal(peer, e)
            if count or isinstance(fault, LocalFault):
                raise fault from e  # half an answer of one and half of another would be none
            reasons.append(str(fault))
        except PeerFault as e:
            if count:
                raise
            reasons.append(str(e))
    raise NetworkFault(
        "no peer that holds the ends answers" + "".join(f"\n{why}" for why in reasons), "see  tutti peers --stage 0"
    )


def _refusal(peer: PeerId, error: grpc.aio.AioRpcError) -> LocalFault | PeerFault:
    """What a call that failed says: the peer's own refusal, which another ends peer would repeat, or that it cannot be asked."""
    if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
        return translate(peer, error)
    step = dict(error.trailing_metadata() or ()).get(NEXT_KEY, b"")
    said = step.decode(errors="replace") if isinstance(step, bytes) else str(step)
    return LocalFault(f"{short(peer)}, which holds the ends: {printable(error.details())}", printable(said), ExitCode.NETWORK)


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0
