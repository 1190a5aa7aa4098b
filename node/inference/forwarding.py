"""``generate`` and ``eval`` at a peer that hosts no ends: an ends peer runs the passes, and its
answer streams back.

Enters: the operator's request, the ends peers in sight. Leaves: what one of them answers, its sizes
checked. Never: half of a text from one peer and half from another.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence, Set
from typing import Any, TypeVar

import grpc.aio

from node.app.assembly import EACH, Assembled
from node.control.service import MAX_TOKENS, refuse
from node.control.sockets import carried
from node.core.errors import (
    ExitCode,
    LocalFault,
    NetworkFault,
    PeerFault,
    TimedOut,
    UsageFault,
    WireError,
)
from node.core.ids import PeerId, short
from node.core.tasks import Tasks
from node.inference.at_ends import MOST_CHOICES, answer, check_drawing, speak
from node.inference.chat import check_messages
from node.inference.forward_router import TRIES, WATCH_S, is_alive, named
from node.transport.port import EOF, TransportPort, printable, translate
from protos import control_pb2 as pb
from protos import ends_pb2_grpc as rpc

T = TypeVar("T", pb.Piece, pb.Evaluated)
LIMIT_S = 600.0
"""Seconds for one whole answer, at the asker and at the ends peer."""
SERVED = 32
"""Questions of other peers that an ends peer works on at once: it has its own work."""
GUESTS = 4
"""Most questions of peers outside the plan at a time. Any peer can have a record, and the hops take
the questions of an ends peer for work of a member."""
OTHERS = 12
"""Texts of other peers that an ends peer generates at once: the rest of its places is for its own
operator."""
UNREAD_S = 30.0
"""Seconds within which a part of an answer that was sent must be taken."""
MISSES = 3
"""Signs of life missed one after the other before an ends peer that is silent is given up."""
MAX_PROMPT = 1 << 16
"""Bytes of a prompt that others are asked to continue."""
MAX_PIECE = 1 << 12
"""Characters of one token."""
MAX_SAID = 500
"""Characters kept of a fault that an ends peer reports."""


class EndsService(rpc.EndsServicer):
    """Runs forward passes for members of the run. Made before the transport serves: it adds itself
    to the transport's server.

    ``members()`` are the peers that are answered.
    """

    def __init__(
        self, a: Assembled, transport: TransportPort, members: Callable[[], Set[PeerId]]
    ) -> None:
        self._a = a
        self._transport = transport
        self._members = members
        self._serving: Counter[PeerId] = Counter()
        self._places = asyncio.Semaphore(OTHERS)
        rpc.add_EndsServicer_to_server(self, transport.server)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Serve ``tutti generate`` at this peer. PERMISSION_DENIED for strangers,
        RESOURCE_EXHAUSTED when others are served."""
        request.max_tokens = min(request.max_tokens or 100, MAX_TOKENS)
        await self._serve(context, lambda: self._spoken(request))

    async def Evaluate(self, request: pb.EvaluateRequest, context: Any) -> None:
        """As ``tutti eval`` at this peer, refused as :meth:`Generate` is."""
        await self._serve(context, lambda: answer(self._a, self._transport, request))

    async def _serve(self, context: Any, begin: Callable[[], AsyncGenerator[Any, None]]) -> None:
        peer = self._transport.caller(context)
        if peer not in self._members():
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "only members of the run are answered"
            )
        if self._is_busy(peer):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "busy with the questions of others"
            )
        self._serving[peer] += 1
        ended: TimeoutError | LocalFault | PeerFault | WireError | None = None
        try:
            async with asyncio.timeout(LIMIT_S), contextlib.aclosing(begin()) as answers:
                async for item in answers:
                    async with asyncio.timeout(UNREAD_S):
                        await context.write(item)
        except (TimeoutError, LocalFault, PeerFault, WireError) as error:
            ended = error
        finally:
            self._serving[peer] -= 1
            self._serving += Counter()  # without those who have none
        # Its place is free by now: a call ends when the peer has read its answer or is gone.
        if isinstance(ended, TimeoutError):
            text = f"not done after {LIMIT_S:.0f} s, or not read"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        elif ended is not None:
            await refuse(context, ended)

    def _is_busy(self, peer: PeerId) -> bool:
        """True while no further question of ``peer`` is taken."""
        if self._serving[peer] >= EACH or self._serving.total() >= SERVED:
            return True
        plan = self._a.work.plan
        planned = set[PeerId]()
        if plan is not None:
            planned = {m.peer for m in plan.members}
        guests = sum(count for other, count in self._serving.items() if other not in planned)
        return peer not in planned and guests >= GUESTS

    async def _spoken(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Piece, None]:
        """The pieces of a text, once there is a place for it. Raises as :func:`speak`."""
        check(request)
        async with (
            self._places,
            contextlib.aclosing(speak(self._a, self._transport, request)) as pieces,
        ):
            async for piece in pieces:
                yield piece


def check(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request itself. Raises UsageFault if it is more than a peer may be asked for."""
    size = len(request.prompt.encode())
    if size > MAX_PROMPT:
        raise UsageFault(
            f"the prompt has {size:,} bytes",
            f"give at most {MAX_PROMPT:,}: the model sees its last tokens only",
        )
    check_drawing(request)
    if request.messages:
        check_messages([(m.role, m.content) for m in request.messages])
    return request


def generate(
    transport: TransportPort, ends: Sequence[PeerId], stages: int, request: pb.GenerateRequest
) -> AsyncGenerator[pb.Piece, None]:
    """The text that one of the peers ``ends`` makes, in a run of ``stages`` block stages; its first
    piece names the peer.

    Raises UsageFault for an impossible request, NetworkFault when no peer answers or the answering
    one is lost, TimedOut after :data:`LIMIT_S` seconds, and the first fault that an ends peer
    reports as a LocalFault, if no other one answers.
    """
    check(request)
    named(stages, request.leave_out.stages, request.leave_out.after)
    most = 2 * (request.max_tokens or 100) + 2  # each may come with a word on missing stages
    counted = not request.messages

    def knows(piece: pb.Piece) -> bool:
        """An older ends peer leaves the messages out and goes on from nothing."""
        nonlocal counted
        counted = counted or piece.prompt_tokens > 0
        return counted or not piece.HasField("token")

    return _ask(
        transport,
        ends,
        lambda stub: stub.Generate,
        request,
        lambda piece, count: (
            count <= most
            and max(len(piece.text), len(piece.slow)) <= MAX_PIECE
            and _fits(piece.missing, stages)
        ),
        knows,
    )


def evaluate(
    transport: TransportPort, ends: Sequence[PeerId], stages: int, request: pb.EvaluateRequest
) -> AsyncGenerator[pb.Evaluated, None]:
    """The losses that one of the peers ``ends`` measures; the first one names the peer. Raises as
    :func:`generate`."""
    named(stages, request.leave_out.stages, request.leave_out.after)
    return _ask(
        transport,
        ends,
        lambda stub: stub.Evaluate,
        request,
        lambda found, count: count <= MOST_CHOICES + 1 and _fits(found.missing, stages),
    )


def _fits(missing: pb.Missing, stages: int) -> bool:
    return max(len(missing.asked), len(missing.dead), missing.stages) <= stages


async def _ask(
    transport: TransportPort,
    ends: Sequence[PeerId],
    call: Callable[[Any], Callable[..., Any]],
    request: Any,
    fits: Callable[[T, int], bool],
    knows: Callable[[T], bool] = lambda item: True,
) -> AsyncGenerator[T, None]:
    until = time.monotonic() + LIMIT_S
    why = list[str]()
    told: LocalFault | None = None
    for peer in ends[:TRIES]:
        count = 0
        try:
            left = until - time.monotonic()
            async with contextlib.aclosing(_answers(transport, peer, call, request, left)) as items:
                async for item in items:
                    count += 1
                    if not fits(item, count):
                        raise PeerFault(peer, "answered with more than it was asked for", 1.0)
                    if not knows(item):
                        count -= 1
                        raise PeerFault(peer, "its version knows no conversations")
                    item.by = peer if count == 1 else ""
                    item.by_name = ""
                    yield item
            return
        except PeerFault as e:
            if e.weight:
                transport.fault(peer, e.reason, e.weight)
            if count:
                raise NetworkFault(
                    f"ends peer {short(peer)}, which ran the passes, was lost before the end: "
                    f"{e.reason}",
                    "ask again; tutti peers  shows who is there",
                ) from e
            why.append(str(e))
        except TimedOut:
            raise  # the time for the whole answer is over
        except LocalFault as e:
            if count or e.code is ExitCode.USAGE:
                raise
            told = told or e
    if told is not None:
        raise told
    if not why:
        raise NetworkFault(
            "this peer hosts no ends, and no peer that does is in sight",
            "wait for one, or bring one:  tutti swarm invite ; tutti peers  shows who is there",
        )
    listed = "".join(f"\n  {reason}" for reason in why)
    raise NetworkFault(
        f"none of {len(why)} ends peers ran it{listed}",
        "ask again; tutti peers  shows who is there",
    )


async def _answers(
    transport: TransportPort,
    peer: PeerId,
    call: Callable[[Any], Callable[..., Any]],
    request: Any,
    seconds: float,
) -> AsyncGenerator[Any, None]:
    """Answers of one ends peer. Raises PeerFault when it does not answer, or not any more."""
    stream = call(rpc.EndsStub(await transport.channel(peer)))(request, timeout=max(0.0, seconds))
    tasks = Tasks("forwarding")
    try:
        while (item := await _next(transport, peer, tasks.spawn(stream.read(), "read"))) is not EOF:
            yield item
    except grpc.aio.AioRpcError as e:
        raise _fault(peer, e) from e
    finally:
        stream.cancel()
        await tasks.close()


async def _next(transport: TransportPort, peer: PeerId, read: asyncio.Task[Any]) -> Any:
    """The next message. A pass may take long: the peer is asked for signs of life meanwhile, and is
    given up without them."""
    missed = 0
    while not (await asyncio.wait((read,), timeout=WATCH_S))[0]:
        if await is_alive(transport, peer):
            missed = 0
        else:
            missed += 1
        if missed >= MISSES:
            raise PeerFault(peer, "does not answer any more")
    if read.cancelled():  # not by this task: the call went with its channel
        raise PeerFault(peer, "its connection broke")
    return read.result()


def _fault(peer: PeerId, error: grpc.aio.AioRpcError) -> LocalFault | PeerFault:
    """The fault that the ends peer reports, its words clipped. A PeerFault if it reports none, and
    another peer may be asked."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimedOut(
            f"ends peer {short(peer)} was not done after {LIMIT_S:.0f} s",
            "ask for less, or ask at an ends peer",
        )
    told = carried(error, ExitCode.NETWORK)
    if error.code() != grpc.StatusCode.FAILED_PRECONDITION or told is None:
        return translate(peer, error)
    return LocalFault(
        f"ends peer {short(peer)} says: {printable(error.details(), MAX_SAID)}",
        printable(told[0], MAX_SAID),
        told[1],
    )
