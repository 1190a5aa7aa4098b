"""The network of the simulated swarm: links, connections, and gRPC's calls over them, in virtual
time.

A directed link has a latency, jitter, a bandwidth and loss. It carries its transfers one after the
other; a lost message costs a retransmission. A *wall* stands between two groups of peers, in one
direction; walls may overlap, and each is taken down by itself.

:class:`SimTransport` is what services see: the port of :mod:`node.transport.port`. A call carries
the messages themselves (nobody changes one that was sent), in order in each direction; their bytes
take the time of the link. A connection is dialled before the first call; it is reset when the other
process dies. Behind a wall, a message is sent again and again. A connection is probed as gRPC's
keepalive does it: after :data:`SILENT_S` in which nothing could be heard, because of a wall or
because the other process stands still, it is given up.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from node.coordinator.credit.shared_note import SharedNote
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.patience import Patience
from node.identity.faults import FaultBook, until_heard
from node.sim.setup import HEAD, LinkProfile
from node.sim.world.loop import ProcessLoop, TimerHandle, VirtualTime
from node.transport.port import EOF, translate
from node.transport.settings import TransportSettings

RETRANSMIT_S = 0.2
"""Least delay before a lost message is sent again, as TCP's minimum."""
KEEPALIVE_S = TransportSettings.keepalive_s
PROBE_S = TransportSettings.keepalive_timeout_s
SILENT_S = KEEPALIVE_S + PROBE_S
"""Seconds of silence after which a connection is given up."""
DIAL_S = TransportSettings.dial_timeout_s
IDLE_S = TransportSettings.idle_s
LONGEST_RETRY_S = 3.0
_NOTHING: Any = grpc.aio.Metadata()
Weigh = Callable[[str, Any], int]
"""Bytes on the wire of a message of a method."""


@dataclass(slots=True)
class Link:
    """One direction between two peers. ``free_at``: the time at which it has carried everything
    sent so far."""

    profile: LinkProfile
    free_at: float = 0.0


@dataclass(frozen=True)
class Wall:
    """A wall in one direction: nothing passes from a peer of ``sources`` to a peer of ``targets``;
    an empty group means everybody."""

    sources: frozenset[PeerId]
    targets: frozenset[PeerId]

    def parts(self, a: PeerId, b: PeerId) -> bool:
        return (
            (not self.sources or a in self.sources)
            and (not self.targets or b in self.targets)
            and a != b
        )


class SimLinks:
    """All directed links, made when first used, all alike until told otherwise."""

    def __init__(self, rng: random.Random, profile: LinkProfile) -> None:
        self._rng = rng
        self._new = profile
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self.walls: list[Wall] = []
        self.limited = profile.bandwidth > 0
        """True if bytes take time."""

    def link(self, a: PeerId, b: PeerId) -> Link:
        """The link from ``a`` to ``b``."""
        return self._links.setdefault((a, b), Link(self._new))

    def cut(self, a: PeerId, b: PeerId) -> bool:
        """Return True if a wall stands between them."""
        return bool(self.walls) and any(w.parts(a, b) for w in self.walls)

    def travel(self, a: PeerId, b: PeerId, nbytes: int, now: float) -> float:
        """Seconds until the last byte of a message sent now arrives. Takes the link for the time of
        its transfer."""
        link = self._links.get((a, b)) or self.link(a, b)
        at = link.profile
        seconds = at.latency_s + (at.jitter_s * self._rng.random() if at.jitter_s else 0.0)
        if at.loss and self._rng.random() < at.loss:
            seconds += RETRANSMIT_S + 2 * at.latency_s
        if at.bandwidth and nbytes:
            begin = now
            if link.free_at > now:
                begin = link.free_at
            link.free_at = begin + nbytes * 8 / at.bandwidth
            seconds += link.free_at - now
        return seconds


class SimNet:
    """All transports that can see each other. ``weigh``: bytes that a message takes on a link."""

    def __init__(
        self, world: VirtualTime, links: SimLinks, weigh: Weigh = lambda method, message: HEAD
    ):
        self.world = world
        self.links = links
        self.weigh = weigh
        self.transports: dict[PeerId, SimTransport] = {}

    def lost(self, peer: PeerId) -> None:
        """The process of a peer has died: every peer with a connection to it gets a reset, and the
        dead peer's own calls are cancelled."""
        dead = self.transports[peer]
        dead.lines.clear()
        for call in dead.calls:
            call.hang_up()
        for name, other in sorted(self.transports.items()):
            if peer in other.lines and not other.loop.dead and not self.links.cut(peer, name):
                after = self.links.travel(peer, name, 0, self.world.now)
                self.world.push(after, other.broken, peer, dead, loop=other.loop)


class SimServer:
    """The place where services are registered, as on a ``grpc.aio.Server``."""

    def __init__(self) -> None:
        self._generic: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """They are among the generic ones too."""

    def handler(self, method: str) -> Any:
        """The handler of a method, None for none."""
        details: Any = SimpleNamespace(method=method)
        return next(filter(None, (generic.service(details) for generic in self._generic)), None)


class SimTransport:
    """One process of a :class:`SimNet`, from its start to its end."""

    def __init__(
        self,
        net: SimNet,
        peer: PeerId,
        loop: ProcessLoop,
        book: FaultBook,
        banned: Callable[[PeerId], None] = lambda peer: None,
        accused: Callable[[PeerId, str], None] = lambda peer, reason: None,
    ) -> None:
        self.net = net
        self.peer_id = peer
        self.loop = loop
        self.book = book
        self.patience = Patience()
        self.server: Any = SimServer()
        self.serving = False
        self.lines: dict[PeerId, SimTransport] = {}
        """The peers reached now, each with its process."""
        self.used: dict[PeerId, float] = {}
        """Time of the last call to each peer."""
        self._rested = net.world.now
        self.calls: dict[Call, None] = {}
        self._keepalive: TimerHandle | None = None
        self._probed: set[SimTransport] = set()
        """Processes with a probe under way."""
        self.heard: dict[PeerId, float] = {}
        self.met: set[PeerId] = set()
        """Peers that this one had a connection with."""
        """Time of the last message from each peer."""
        self._dialling: dict[PeerId, asyncio.Future[None]] = {}
        self._on_lost: list[Callable[[PeerId], None]] = []
        self._banned = banned
        self._accused = accused
        net.transports[peer] = self

    # ----------------------------------------------------------- the port

    async def channel(self, peer: PeerId) -> Any:
        if self.loop.dead:
            raise PeerFault(peer, "this process has ended")
        now = self.net.world.now
        if (left := self.book.banned(peer, now)) > 0:
            raise PeerFault(peer, until_heard(left))
        self._rest(now)
        self.used[peer] = now
        if peer not in self.lines:
            await asyncio.shield(self._dialling.get(peer) or self._dial(peer))
        return Channel(self, peer)

    def _dial(self, peer: PeerId) -> asyncio.Future[None]:
        """A handshake: there and back, answered by a process that runs."""
        world = self.net.world
        links = self.net.links
        me = self.peer_id
        there = self.net.transports.get(peer)
        dial = self._dialling[peer] = self.loop.create_future()

        def ended(error: str) -> None:
            timer.cancel()
            if self._dialling.get(peer) is dial:
                del self._dialling[peer]
            if dial.done():
                return
            if error or there is None or there.loop.dead:
                dial.set_exception(PeerFault(peer, error or "connection refused"))
            else:
                self.lines[peer] = there
                self.heard[peer] = world.now
                self.met.add(peer)
                if self._keepalive is None:
                    self._keepalive = self.loop.call_later(KEEPALIVE_S, self._keep_alive)
                dial.set_result(None)

        def back(error: str = "connection refused") -> None:
            if not links.cut(peer, me):  # else it is not heard: the dial's time runs out
                world.push(links.travel(peer, me, 0, world.now), ended, error, loop=self.loop)

        def met() -> None:
            if there is None:
                back("nobody is known by that name")
            elif there.book.banned(me, world.now) > 0:
                back("refuses us")
            else:
                if there.serving:
                    there.met.add(me)
                back("" if there.serving else "cannot be reached")

        timer = self.loop.call_later(DIAL_S, ended, "no answer in time")
        if not links.cut(me, peer):
            after = links.travel(me, peer, 0, world.now)
            world.push(after, met, loop=there and there.loop, lost=back)
        return dial

    def _rest(self, now: float) -> None:
        """Close the lines that nobody has used for long."""
        if now - self._rested < IDLE_S:
            return
        self._rested = now
        busy = {call.there for call in self.calls}
        for peer, there in list(self.lines.items()):
            if there not in busy and now - self.used.get(peer, now) > IDLE_S:
                self.forget(peer)
        self.used = {peer: at for peer, at in self.used.items() if peer in self.lines}
        self.heard = {peer: at for peer, at in self.heard.items() if peer in self.lines}

    def caller(self, context: Any) -> PeerId:
        return context.peer

    def forget(self, peer: PeerId) -> None:
        self.lines.pop(peer, None)

    def on_lost(self, callback: Callable[[PeerId], None]) -> None:
        self._on_lost.append(callback)

    def doubt(self, peer: PeerId) -> None:
        dial = self._dialling.pop(peer, None)
        if dial is not None and not dial.done():
            dial.set_exception(PeerFault(peer, "the leader says that it is dead"))

    def has_met(self, peer: PeerId) -> bool:
        return peer in self.lines or peer in self.met

    def path(self, peer: PeerId) -> str:
        return "direct" if peer in self.lines else ""

    def rate_left(self, peer: PeerId) -> float:
        return 0.0

    def caps(self) -> tuple[float, float]:
        return 0.0, 0.0

    def leave(self, peer: PeerId, data: memoryview) -> bytes | None:
        return None

    def withdraw(self, peer: PeerId, places: Sequence[bytes]) -> None:
        """Nothing is left here."""

    def fetch(self, peer: PeerId, place: bytes, into: memoryview) -> int:
        raise WireError("no memory is shared here")

    def fault(self, peer: PeerId, reason: str, weight: float = 1.0) -> None:
        self._accused(peer, reason)
        if self.book.count(peer, weight, self.net.world.now):
            self.forget(peer)
            self._banned(peer)

    def expel(
        self, revoked: Callable[[PeerId], bool], out: Callable[[PeerId], bool] | None = None
    ) -> None:
        self.book.revoked = revoked
        for peer in [p for p in self.lines if (out or revoked)(p)]:
            self.forget(peer)

    def count(self, peer: PeerId, sent: int = 0, received: int = 0, plane: str = "bulk") -> None:
        """Do nothing: a simulated transport counts no bytes."""

    async def ping(self, peer: PeerId, timeout: float = 5.0) -> float:
        began = self.net.world.now
        channel = await self.channel(peer)
        try:
            await channel.unary_unary("/tutti.v1.Link/Ping")(b"", timeout=timeout)
        except grpc.aio.AioRpcError as e:
            raise translate(peer, e) from e
        return self.net.world.now - began

    # ----------------------------------------------------------- connections

    def _keep_alive(self) -> None:
        """Probe each process from which nothing came for :data:`KEEPALIVE_S` and that cannot answer
        now. For all others a probe would change nothing."""
        now = self.net.world.now
        after = KEEPALIVE_S
        for peer, there in list(self.lines.items()):
            if there in self._probed or not (there.loop.frozen or self._cut(peer)):
                continue
            left = self.heard[peer] + KEEPALIVE_S - now
            if left > 0:
                after = min(after, left)
            else:
                self._probed.add(there)
                Probe(self, peer)
        self._keepalive = None
        if self.lines:
            self._keepalive = self.loop.call_later(after, self._keep_alive)

    def _cut(self, peer: PeerId) -> bool:
        """Return True if a wall stands in one of the two directions."""
        links = self.net.links
        return links.cut(self.peer_id, peer) or links.cut(peer, self.peer_id)

    def probed(self, probe: "Probe", *, answered: bool) -> None:
        """A probe has ended; without an answer its connection is given up."""
        self._probed.discard(probe.there)
        if not answered:
            self.broken(probe.peer, probe.there)

    def broken(self, peer: PeerId, there: "SimTransport") -> None:
        """The connection to a process of ``peer`` is no more: its calls fail."""
        for call in [c for c in self.calls if c.there is there]:
            call.fail(grpc.StatusCode.UNAVAILABLE, "connection reset")
        if self.lines.get(peer) is there:
            del self.lines[peer]
            for callback in self._on_lost:
                callback(peer)


class Channel:
    """The channel from which ``XStub(channel)`` is made."""

    def __init__(self, here: SimTransport, peer: PeerId) -> None:
        self._here = here
        self._peer = peer

    def unary_unary(self, method: str, *coders: Any, **more: Any) -> Any:
        def begin(request: Any, timeout: float | None = None) -> Call:
            if isinstance(request, SharedNote):
                request = request.whole()
            return Call(self._here, self._peer, method, (request,), timeout)

        return begin

    unary_stream = unary_unary

    def stream_stream(self, method: str, *coders: Any, **more: Any) -> Any:
        return partial(Call, self._here, self._peer, method)


class Call:
    """One remote procedure under way: the caller's end is gRPC's call object, the other a
    :class:`Context`."""

    def __init__(
        self,
        here: SimTransport,
        peer: PeerId,
        method: str,
        requests: Any,
        timeout: float | None = None,
    ) -> None:
        self.here = here
        self.peer = peer
        self.method = method
        here.used[peer] = here.net.world.now
        self.there: Any = here.lines.get(peer)
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        """Answers that have arrived and were not read; at the end EOF, or the error that ended the
        call."""
        self.over = False
        self._serving: asyncio.Task[None] | None = None
        self._last_out = self._last_back = 0.0
        self._timer = None
        if timeout is not None:
            self._timer = here.loop.call_later(
                timeout, self.fail, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"
            )
        here.calls[self] = None
        if here.loop.dead or self.there is None:
            self.fail(grpc.StatusCode.UNAVAILABLE, "no connection")
            return
        items = _at_once(requests)
        self._carry(here, self.there, self._bytes(items), self._arrive, (items,), 0)

    # ----------------------------------------------------------- the caller's end

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await self.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._close()

    async def read(self) -> Any:
        """The next answer, EOF after the last. Raises AioRpcError."""
        answer = await self._answers.get()
        if answer is EOF or isinstance(answer, grpc.aio.AioRpcError):
            self._answers.put_nowait(answer)  # for whoever reads on
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        return answer

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterate(self.read)

    def done(self) -> bool:
        return self.over

    def cancel(self) -> None:
        """Hang up: the other side's handler is cancelled."""
        self.fail(grpc.StatusCode.CANCELLED, "cancelled")

    def fail(self, code: grpc.StatusCode, why: str) -> None:
        """The caller's side gives the call up, and the other one hears of it."""
        if self.over:
            return
        self._close()
        self._answers.put_nowait(_error(code, why))
        if not self.here.loop.dead:
            self.hang_up()

    def hang_up(self) -> None:
        """Cancel the handler on the other side, when it hears of it."""
        here = self.here
        there = self.there
        net = self.here.net
        if there is not None and not there.loop.dead:
            if net.links.cut(here.peer_id, self.peer):
                after = SILENT_S
            else:
                after = net.links.travel(here.peer_id, self.peer, 0, net.world.now)
            net.world.push(after, self._gone, loop=there.loop)

    def _close(self) -> None:
        self.over = True
        self.here.calls.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _gone(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    # ----------------------------------------------------------- on the way

    def back(self, items: tuple[Any, ...], last: bool, error: Any = None) -> None:
        """Carry answers from the serving side."""
        if not self.there.loop.dead:
            self._carry(
                self.there, self.here, self._bytes(items), self._back, (items, last, error), 0
            )

    def _bytes(self, items: tuple[Any, ...]) -> int:
        net = self.here.net
        if not net.links.limited:
            return HEAD
        return sum(net.weigh(self.method, item) for item in items)

    def _carry(
        self,
        a: SimTransport,
        b: SimTransport,
        nbytes: int,
        do: Callable[..., object],
        args: tuple[Any, ...],
        tries: int,
    ) -> None:
        """Bring messages from ``a`` to ``b``; behind a wall, try again later."""
        if self.over:
            return
        world = self.here.net.world
        links = self.here.net.links
        if links.cut(a.peer_id, b.peer_id):
            after = min(RETRANSMIT_S * 2**tries, LONGEST_RETRY_S)
            world.push(after, self._carry, a, b, nbytes, do, args, tries + 1)
            return
        at = world.now + links.travel(a.peer_id, b.peer_id, nbytes, world.now)
        # Messages of one stream come in order.
        if b is self.here:
            at = self._last_back = max(at, self._last_back)
            lost = None
        else:
            at = self._last_out = max(at, self._last_out)
            lost = self._refused
        world.push(at - world.now, do, *args, loop=b.loop, lost=lost)

    def _refused(self) -> None:
        """The other process is dead."""
        here = self.here
        if not self.over and not here.net.links.cut(self.peer, here.peer_id):
            after = here.net.links.travel(self.peer, here.peer_id, 0, here.net.world.now)
            here.net.world.push(after, here.broken, self.peer, self.there, loop=here.loop)

    def _back(self, items: tuple[Any, ...], last: bool, error: Any) -> None:
        if self.over:
            return
        self.here.heard[self.peer] = self.here.net.world.now
        self.here.met.add(self.peer)
        for item in items:
            self._answers.put_nowait(item)
        if last:
            self._close()
            self._answers.put_nowait(error or EOF)

    def _arrive(self, items: tuple[Any, ...]) -> None:
        """Begin the call, in the process that serves."""
        there = self.there
        if self.over:
            return
        handler = None
        if there.serving:
            handler = there.server.handler(self.method)
        if there.book.banned(self.here.peer_id, there.net.world.now) > 0:
            self.back((), True, _error(grpc.StatusCode.PERMISSION_DENIED, "banned"))
        elif self.method == "/tutti.v1.Link/Ping":
            self.back((b"",), True)
        elif handler is None:
            self.back((), True, _error(grpc.StatusCode.UNIMPLEMENTED, self.method))
        else:
            context = Context(self, there.loop, items)
            self._serving = there.loop.create_task(context.serve(handler))


class Probe(Call):
    """A keepalive probe: a small call that has :data:`PROBE_S` for its answer."""

    def __init__(self, here: SimTransport, peer: PeerId) -> None:
        super().__init__(here, peer, "/tutti.v1.Link/Ping", (b"",), PROBE_S)

    def fail(self, code: grpc.StatusCode, why: str) -> None:
        if not self.over:
            super().fail(code, why)
            self.here.probed(self, answered=False)

    def _back(self, items: tuple[Any, ...], last: bool, error: Any) -> None:
        if not self.over:
            super()._back(items, last, error)
            self.here.probed(self, answered=True)


class Context:
    """The serving end of a call: a servicer gets it as its context."""

    def __init__(self, call: Call, loop: ProcessLoop, items: tuple[Any, ...]) -> None:
        self.call = call
        self.peer = call.here.peer_id
        self._loop = loop
        self._requests = deque(items)
        self._batch: list[Any] | None = None

    async def serve(self, handler: Any) -> None:
        """Have the call handled, and tell how it ended."""
        error = None
        try:
            if handler.unary_unary is not None:
                await self.write(await handler.unary_unary(await self.read(), self))
            elif handler.stream_stream is not None:
                await handler.stream_stream(_iterate(self.read), self)
            elif handler.unary_stream is not None:
                answers = handler.unary_stream(await self.read(), self)
                if hasattr(answers, "__aiter__"):
                    async for answer in answers:
                        await self.write(answer)
                else:
                    await answers
        except Aborted as e:
            error = _error(*e.args)
        except asyncio.CancelledError:
            return
        except Exception as e:  # noqa: BLE001 - as gRPC: the caller gets UNKNOWN
            error = _error(grpc.StatusCode.UNKNOWN, f"{type(e).__name__}: {e}")
        except BaseException as e:  # noqa: BLE001 - nobody asks this task for its exception
            self.call.here.net.world.halt(e)
            return
        self._flush(True, error)

    async def read(self) -> Any:
        """The caller's next message, EOF after the last."""
        return self._requests.popleft() if self._requests else EOF

    async def write(self, message: Any) -> None:
        """Send a message to the caller. Messages of one instant travel together."""
        if self._batch is None:
            self._batch = []
            self._loop.call_soon(self._flush)
        self._batch.append(message)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call with this status."""
        raise Aborted(code, details)

    def _flush(self, last: bool = False, error: Any = None) -> None:
        batch = self._batch
        self._batch = None
        if batch is not None or last:
            self.call.back(tuple(batch or ()), last, error)


class Aborted(BaseException):
    """A servicer has ended its call, with this status."""


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, _NOTHING, _NOTHING, details)


async def _iterate(read: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
    while (message := await read()) is not EOF:
        yield message


def _at_once(requests: Any) -> tuple[Any, ...]:
    """The caller's messages: no stream of the product waits between two of them."""
    if not hasattr(requests, "__aiter__"):
        return tuple(requests)
    found: list[Any] = []
    while True:
        step = requests.__anext__()
        try:
            step.send(None)
        except StopIteration as e:
            found.append(e.value)
        except StopAsyncIteration:
            return tuple(found)
        else:
            raise NotImplementedError("a stream of requests that waits for something")
