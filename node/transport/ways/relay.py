"""The relay: splices libp2p streams of two peers that both have a connection to this one but none
to each other. Enters: reservations of clients, requests to reach them. Leaves: bytes, unchanged.
Never: their meaning: they are encrypted and signed end to end (:mod:`node.reach.secure`).

client (nobody can dial it)  --RELAY/reserve-->  relay
caller  --RELAY/connect-->  relay  --RELAYED, over the connection that the client made-->  client

A circuit to the stream of bypasses carries no bytes but the caller's proof. Both ends get a ticket
with it, and the sockets that show them are joined for as long as the circuit lasts.
"""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from node.core.errors import LocalFault, PeerFault
from node.core.ids import PeerId, short
from node.core.tasks import Tasks
from node.identity.faults import TokenBucket
from node.identity.places import PlacesByPeer, Taken
from node.reach.settings import ReachSettings
from node.telemetry.events import Journal, RateLimitedLog
from node.telemetry.metrics import Metrics
from node.transport.frames import Streams, parsed, read_frame, write_frame
from node.transport.limits import FAVOUR
from node.transport.port import printable
from node.transport.traffic import Share, Traffic
from node.transport.ways import bypass
from node.transport.ways.arrivals import Expected, WayListener
from node.transport.ways.join import join
from node.transport.ways.tunnel import splice
from protos.reach_pb2 import RelayAnswer, RelayAsk, Relayed

RELAY = "/tutti/relay/1"
RELAYED = "/tutti/relayed/1"
ASK_BYTES = 4096
FIRST_WORD_S = 5.0
"""Seconds for the question of a stream that a peer has opened."""
OPEN_S = 5.0
"""Seconds to open a stream to the client."""
SILENT_S = 20.0
"""Seconds without a byte of its client after which a reservation ends."""
CIRCUIT_SILENT_S = 60.0
"""Seconds without a byte after which a circuit ends. gRPC's servers probe their connections every
15 s."""
UNUSED_S = 60.0
"""Seconds without a circuit after which a stranger's reservation gives way to another stranger's
when there are no more places."""
CIRCUITS_PER_PAIR = 8
"""Circuits between the same two peers, opened by either of them."""
RELAY_BUFFER = 1 << 16
"""Bytes read ahead of either end of a circuit, and bytes that wait to be written to it. With more,
short messages wait for long behind bulk where the rate is bounded, and the peer that waits for one
takes the connection for dead. A circuit with an end that does not read holds this much memory."""
SOCKET_PIECE = 1 << 18
"""Bytes of a circuit past libp2p that are moved at once, and that a pipe of the kernel holds for an
end that does not read."""
UNDER_WAY = 1 << 20
"""Bytes of a circuit that p2pd may have moved to us and we have not read."""
QUESTIONS_PER_S, QUESTIONS_AT_ONCE = 5.0, 64.0
"""Limits on the questions of a stranger; an established peer may ask :data:`FAVOUR` times as many.
A newcomer asks two or three for each peer behind the relay."""
STREAM_NAME = 64
"""Characters of a stream's name."""


@dataclass(eq=False)
class _Circuit:
    """A relayed connection. ``pair``: its two ends in order. ``alive`` ends it when it is silent
    for too long or loses its place."""

    caller: PeerId
    pair: tuple[PeerId, PeerId]
    alive: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    ended: bool = False

    def moved(self) -> None:
        """A byte has moved: the circuit lives on for as long as it may be silent."""
        if not self.ended and not self.alive.expired():
            self.alive.reschedule(asyncio.get_running_loop().time() + CIRCUIT_SILENT_S)

    def end(self) -> None:
        """End it soon, from outside, whatever moves until then."""
        self.ended = True
        if not self.alive.expired():
            self.alive.reschedule(0.0)


@dataclass(eq=False)
class _Client:
    """A reservation: the stream that holds it, and the monotonic time of its last circuit."""

    peer: PeerId
    writer: asyncio.StreamWriter
    used: float = field(default_factory=time.monotonic)


class Relay:
    """The relay of one node. ``offers()``: True while this node relays; ``allow(peer, question)``
    raises LocalFault for a peer that it does not relay for. ``traffic``: the node's caps on all
    that it sends and receives.

    Half of the reservations and circuits is for ``established`` peers. Strangers share the rest by
    address block (``block(peer)``) and by key. The sockets of circuits come to ``arrivals``;
    ``outside()``: its port as others dial it, 0: none.
    """

    def __init__(
        self,
        streams: Streams,
        settings: ReachSettings,
        allow: Callable[[PeerId, RelayAsk], None],
        offers: Callable[[], bool],
        journal: Journal,
        metrics: Metrics,
        traffic: Traffic | None = None,
        *,
        established: Callable[[PeerId], bool] = lambda peer: False,
        block: Callable[[PeerId], str] = lambda peer: "",
        arrivals: WayListener | None = None,
        outside: Callable[[], int] = lambda: 0,
    ) -> None:
        self._streams = streams
        self._settings = settings
        self._allow = allow
        self._offers = offers
        self._rate_limit = RateLimitedLog(journal)
        self._metrics = metrics
        self.established = established
        """Return True for a member of the run and for a peer that this one has worked with."""
        self._block = block
        self._arrivals = arrivals
        self._outside = outside
        self._clients: dict[PeerId, _Client] = {}
        self._reservations = PlacesByPeer[PeerId](
            "reservations", 2 * settings.relay_clients, 1, lambda peer: self.established(peer)
        )
        self._open = PlacesByPeer[_Circuit](
            "circuits",
            2 * settings.relay_circuits,
            settings.relay_circuits_each,
            lambda peer: self.established(peer),
        )
        self._circuits: Counter[tuple[PeerId, PeerId]] = Counter()
        self._rate = TokenBucket(FAVOUR * QUESTIONS_PER_S, FAVOUR * QUESTIONS_AT_ONCE)
        self._strangers = TokenBucket(QUESTIONS_PER_S, QUESTIONS_AT_ONCE)
        self._share = Share(settings.relay_rate)
        self._traffic = traffic or Traffic()
        self.refusals: Counter[str] = Counter()
        """Questions of others that were refused, and places that they lost, by kind:
        ``questions`` (too many), ``not allowed``, ``reservations``, ``circuits``,
        ``no client``."""
        self.on_refusal: Callable[[PeerId], None] = lambda peer: None
        """Told of each peer that was refused, or lost a place."""
        self.carried = 0
        """Bytes of circuits that crossed between p2pd and this process; a relayed byte counts
        twice, on its way in and out."""

    @property
    def clients(self) -> int:
        """Peers that can be reached through this node."""
        return len(self._clients)

    @property
    def circuits(self) -> int:
        """Connections that are relayed now."""
        return len(self._open)

    @property
    def room(self) -> int:
        """Strangers that would still be taken as clients; 0 while this node does not relay. At
        least 1 otherwise: another one may have to give way."""
        most = self._settings.relay_clients
        if self._offers() and most:
            return max(1, most - self._reservations.strangers)
        return 0

    @property
    def rate_left(self) -> float:
        """Bytes a second left for one further circuit; 0: no limit."""
        limits = self._settings.relay_rate, self._traffic.max_up, self._traffic.max_down
        return min((limit for limit in limits if limit), default=0.0) / (1 + len(self._circuits))

    async def serve(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one question of ``peer``. Raises WireError for a malformed question, TimeoutError
        if none comes."""
        async with asyncio.timeout(FIRST_WORD_S):
            raw = await read_frame(reader, ASK_BYTES)
        rate = self._strangers
        if self.established(peer):
            rate = self._rate
        if not rate.allow(peer, time.monotonic()):
            await self._refuse(peer, "questions", "too many questions", reader, writer)
            return
        ask = parsed(RelayAsk, raw, "a question to a relay")
        kind, why = self._refusal(peer, ask)
        if why:
            await self._refuse(peer, kind, why, reader, writer)
        elif ask.WhichOneof("what") == "reserve":
            await self._hold(peer, ask, reader, writer)
        else:
            await self._carry(peer, ask, reader, writer)

    async def _refuse(
        self,
        peer: PeerId,
        kind: str,
        why: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._count(peer, kind)
        await write_frame(writer, RelayAnswer(granted=False, reason=why).SerializeToString())
        await asyncio.wait_for(reader.read(1), FIRST_WORD_S)

    def _count(self, peer: PeerId, kind: str) -> None:
        self.refusals[kind] += 1
        self.on_refusal(peer)

    def _refusal(self, peer: PeerId, ask: RelayAsk) -> tuple[str, str]:
        """The kind of a refusal, and the reason for the peer; both "" where only a place is
        missing, if anything."""
        what = ask.WhichOneof("what")
        if what is None:
            return "not allowed", "this question is not understood here"
        if not self._offers():
            return "not allowed", "this node does not relay"
        try:
            self._allow(peer, ask)
        except LocalFault as e:
            return "not allowed", e.what
        if ask.connect.stream == bypass.STREAM and not (self._arrivals and self._outside()):
            return "not allowed", "this relay joins no sockets"
        if what == "connect" and PeerId(ask.connect.target) not in self._clients:
            return "no client", "it is not connected to this relay"
        return "", ""

    def _reserve(self, peer: PeerId) -> str:
        """Give a client its place; returns the reason when there is none."""
        taken = self._reservations.take(peer, peer, self._block(peer))
        if not taken and (unused := self._unused()) is not None:
            self._reservations.leave(unused)
            self._reservations.take(peer, peer, self._block(peer))
            taken = Taken(evicted=unused)
        if taken.evicted is not None:
            self._count(taken.evicted, "reservations")
            self._clients.pop(taken.evicted).writer.close()
        return taken.refusal

    def _unused(self) -> PeerId | None:
        """The stranger with the reservation to give away: without a circuit for longest, and for
        longer than :data:`UNUSED_S`."""
        now = time.monotonic()
        called = {end for pair in self._circuits for end in pair}
        unused = [
            client
            for peer, client in self._clients.items()
            if now - client.used > UNUSED_S and peer not in called and not self.established(peer)
        ]
        if not unused:
            return None
        return min(unused, key=lambda client: client.used).peer

    async def _hold(
        self,
        peer: PeerId,
        ask: RelayAsk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """A reservation, until its client goes, falls silent, would be refused or loses its
        place."""
        old = self._clients.pop(peer, None)
        if old is not None:
            self._reservations.leave(peer)
            old.writer.close()
        if why := self._reserve(peer):
            await self._refuse(peer, "reservations", why, reader, writer)
            return
        client = self._clients[peer] = _Client(peer, writer)
        text = f"relaying for {short(peer)}"
        self._rate_limit.emit(
            peer, "transport", "relay-client", text, "debug", clients=self.clients
        )
        try:
            await write_frame(writer, RelayAnswer(granted=True).SerializeToString())
            while True:
                async with asyncio.timeout(SILENT_S):
                    # All that have come: a flood of single ones would hold up everybody else.
                    beat = await reader.read(RELAY_BUFFER)
                if not beat or writer.is_closing() or self._refusal(peer, ask)[1]:
                    return
                writer.write(beat)
                await writer.drain()
        finally:
            if self._clients.get(peer) is client:
                del self._clients[peer]
                self._reservations.leave(peer)

    async def _carry(
        self,
        peer: PeerId,
        ask: RelayAsk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        # One pair for both directions: two peers' traffic shares by pairs, whoever called.
        target = PeerId(ask.connect.target)
        pair = min(peer, target), max(peer, target)
        circuit = _Circuit(peer, pair)
        if why := self._take(circuit):
            await self._refuse(peer, "circuits", why, reader, writer)
            return
        self._clients[target].used = time.monotonic()
        try:
            async with circuit.alive:
                word = Relayed(source=peer, stream=printable(ask.connect.stream)[:STREAM_NAME])
                await self._connect(circuit, target, word, reader, writer)
        except TimeoutError:
            if not circuit.alive.expired():
                raise
        finally:
            self._open.leave(circuit)
            # Subtracting in place, a counter forgets a key whose count is zero.
            self._circuits -= Counter([pair])
            if pair not in self._circuits:
                self._share.gone(pair)

    def _take(self, circuit: _Circuit) -> str:
        """Give a circuit its place; returns the reason when there is none."""
        if self._circuits[circuit.pair] >= CIRCUITS_PER_PAIR:
            return f"{CIRCUITS_PER_PAIR} circuits between these two peers are open"
        taken = self._open.take(circuit, circuit.caller, self._block(circuit.caller))
        if not taken:
            return taken.refusal
        self._circuits[circuit.pair] += 1
        if taken.evicted is not None:
            self._count(taken.evicted.caller, "circuits")
            taken.evicted.end()
        return ""

    async def _connect(
        self,
        circuit: _Circuit,
        target: PeerId,
        word: Relayed,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Join a caller's stream to one to its target, until either ends or both are silent."""
        circuit.moved()
        try:
            far_reader, far_writer = await self._streams.open_stream(
                target, RELAYED, OPEN_S, RELAY_BUFFER
            )
        except PeerFault as e:
            answer = RelayAnswer(granted=False, reason=e.reason)
            await write_frame(writer, answer.SerializeToString())
            await asyncio.wait_for(reader.read(1), FIRST_WORD_S)
            return
        answer = RelayAnswer(granted=True)
        with contextlib.ExitStack() as stack:
            stack.callback(far_writer.close)
            tasks = Tasks("circuit")
            if word.stream == bypass.STREAM and self._arrivals is not None:
                near = stack.enter_context(self._arrivals.expect())
                far = stack.enter_context(self._arrivals.expect())
                answer.port = word.port = self._outside()
                answer.ticket = near.ticket
                word.ticket = far.ticket
                tasks.spawn(self._join(circuit, near, far, writer), "join")
            try:
                await write_frame(far_writer, word.SerializeToString())
                await write_frame(writer, answer.SerializeToString())
                pay = self._meter(circuit)
                await splice(reader, writer, far_reader, far_writer, pay, RELAY_BUFFER)
            finally:
                await tasks.close()

    async def _join(
        self, circuit: _Circuit, near: Expected, far: Expected, writer: asyncio.StreamWriter
    ) -> None:
        """Join the two sockets of a circuit, and end its streams with them."""
        try:
            with await near.arrival() as left, await far.arrival() as right:
                piece = SOCKET_PIECE
                if self.rate_left:
                    piece = RELAY_BUFFER
                    for end in (left, right):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RELAY_BUFFER)
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, RELAY_BUFFER)
                await join(left, right, self._meter(circuit, by_p2pd=False), piece)
        except (OSError, TimeoutError):
            # The streams end below, which tells both ends.
            pass
        finally:
            writer.transport.abort()

    def _meter(self, circuit: _Circuit, by_p2pd: bool = True) -> Callable[[int], Awaitable[None]]:
        """Count the bytes of a circuit and wait for their turns. ``by_p2pd``: they come from p2pd
        and go back to it."""
        crossing = int(by_p2pd)

        async def pay(count: int) -> None:
            circuit.moved()
            self.carried += count * crossing
            await self._share.take(circuit.pair, count)
            await self._traffic.may_relay(count)
            self._metrics.relayed_bytes_total.inc(count)
            self.carried += count * crossing

        return pay
