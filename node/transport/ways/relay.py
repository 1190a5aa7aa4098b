"""The relay: splices libp2p streams of two peers that both have a connection to this one but none
to each other. Enters: reservations of clients, requests to reach them. Leaves: bytes, as they came.
Never: their meaning: what is relayed is encrypted and signed end to end (:mod:`node.reach.secure`).

client (nobody can dial it)  --RELAY/reserve-->  relay
caller  --RELAY/connect-->  relay  --RELAYED, over the connection that the client made-->  client
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from node.core.errors import LocalFault, PeerFault
from node.core.ids import PeerId, short
from node.reach.settings import ReachSettings
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.frames import Streams, parsed, read_frame, write_frame
from node.transport.port import printable
from node.transport.traffic import Share, Traffic
from node.transport.ways.tunnel import splice
from protos.reach_pb2 import RelayAnswer, RelayAsk, Relayed

RELAY, RELAYED = "/tutti/relay/1", "/tutti/relayed/1"
ASK_BYTES = 4096
FIRST_WORD_S, OPEN_S = 5.0, 5.0
"""For the question of a stream that a peer has opened, and for a stream to the client."""
SILENT_S = 20.0
"""A reservation without a byte of its client for so long ends."""
RELAY_BUFFER = 1 << 18
"""Bytes read ahead of a client: with more, a short word waits for long behind them where the rate
is bounded, and whoever waits for it takes the connection for dead."""
UNDER_WAY = 1 << 20
"""Bytes of a circuit that p2pd may have moved to us and we have not read."""
STREAM_NAME = 64
"""Characters of a stream's name."""


class Relay:
    """``offers()`` says whether this node relays now; ``allow`` for whom: it raises LocalFault for
    others. ``traffic``: what this node may send and receive in all."""

    def __init__(
        self,
        streams: Streams,
        settings: ReachSettings,
        allow: Callable[[PeerId, RelayAsk], None],
        offers: Callable[[], bool],
        journal: Journal,
        metrics: Metrics,
        traffic: Traffic | None = None,
    ) -> None:
        self._streams, self._settings, self._allow, self._offers = streams, settings, allow, offers
        self._journal, self._metrics = journal, metrics
        self._clients: dict[PeerId, asyncio.StreamWriter] = {}
        self._circuits: Counter[tuple[PeerId, PeerId]] = Counter()
        self._opened: Counter[PeerId] = Counter()
        self._share, self._traffic = Share(settings.relay_rate), traffic or Traffic()
        self.carried = 0
        """Bytes of circuits that crossed between p2pd and us: each on its way in and on its
        way out."""

    @property
    def clients(self) -> int:
        """Peers that can be reached through this node."""
        return len(self._clients)

    @property
    def circuits(self) -> int:
        """Connections that are relayed now."""
        return self._circuits.total()

    @property
    def room(self) -> int:
        """Clients that would still be taken; 0 while this node does not relay."""
        return max(0, self._settings.relay_clients - self.clients) if self._offers() else 0

    @property
    def rate_left(self) -> float:
        """Bytes a second for one circuit more; 0: no limit."""
        limits = self._settings.relay_rate, self._traffic.max_up, self._traffic.max_down
        return min((limit for limit in limits if limit), default=0.0) / (1 + len(self._circuits))

    async def serve(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One question of ``peer``. Raises WireError or TimeoutError when there is none."""
        async with asyncio.timeout(FIRST_WORD_S):
            ask = parsed(RelayAsk, await read_frame(reader, ASK_BYTES), "a question to a relay")
        if why := self._refusal(peer, ask):
            await write_frame(writer, RelayAnswer(granted=False, reason=why).SerializeToString())
            await asyncio.wait_for(reader.read(1), FIRST_WORD_S)
        elif ask.WhichOneof("what") == "reserve":
            await self._hold(peer, ask, reader, writer)
        else:
            await self._carry(peer, ask, reader, writer)

    def _refusal(self, peer: PeerId, ask: RelayAsk) -> str:
        settings, what = self._settings, ask.WhichOneof("what")
        if what is None:
            return "this question is not understood here"
        if not self._offers():
            return "this node does not relay"
        try:
            self._allow(peer, ask)
        except LocalFault as e:
            return e.what
        if what == "reserve":
            full = peer not in self._clients and self.clients >= settings.relay_clients
            return f"all {settings.relay_clients} reservations are in use" if full else ""
        target = PeerId(ask.connect.target)
        if target not in self._clients:
            return "it is not connected to this relay"
        if self.circuits >= settings.relay_circuits:
            return f"all {settings.relay_circuits} circuits are in use"
        if self._opened[peer] >= settings.relay_circuits_each:
            return f"{settings.relay_circuits_each} circuits of the caller are open"
        return ""

    async def _hold(
        self,
        peer: PeerId,
        ask: RelayAsk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """A reservation, until its client goes, falls silent or would be refused."""
        old, self._clients[peer] = self._clients.get(peer), writer
        if old is not None:
            old.close()
        self._journal.emit(
            "transport",
            "relay-client",
            f"relaying for {short(peer)}",
            "debug",
            clients=self.clients,
        )
        try:
            await write_frame(writer, RelayAnswer(granted=True).SerializeToString())
            while True:
                async with asyncio.timeout(SILENT_S):
                    # All that have come: a flood of single ones would hold up everybody else.
                    beat = await reader.read(RELAY_BUFFER)
                if not beat or self._refusal(peer, ask):
                    return
                writer.write(beat)
                await writer.drain()
        finally:
            if self._clients.get(peer) is writer:
                del self._clients[peer]

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
        self._circuits[pair] += 1
        self._opened[peer] += 1
        try:
            word = Relayed(source=peer, stream=printable(ask.connect.stream)[:STREAM_NAME])
            try:
                far_reader, far_writer = await self._streams.open_stream(
                    target, RELAYED, OPEN_S, RELAY_BUFFER
                )
            except PeerFault as e:
                await write_frame(
                    writer, RelayAnswer(granted=False, reason=e.reason).SerializeToString()
                )
                await asyncio.wait_for(reader.read(1), FIRST_WORD_S)
                return
            try:
                await write_frame(far_writer, word.SerializeToString())
                await write_frame(writer, RelayAnswer(granted=True).SerializeToString())
                await splice(reader, writer, far_reader, far_writer, self._meter(pair))
            finally:
                far_writer.close()
        finally:
            # Subtracting in place, a counter forgets what has come down to zero.
            self._circuits -= Counter([pair])
            self._opened -= Counter([peer])
            if pair not in self._circuits:
                self._share.gone(pair)

    def _meter(self, pair: tuple[PeerId, PeerId]):
        async def pay(count: int) -> None:
            self.carried += count  # from p2pd to us
            await self._share.take(pair, count)
            await self._traffic.may_relay(count)
            self._metrics.relayed_bytes_total.inc(count)
            self.carried += count  # and back

        return pay
