"""The transport of a daemon: a gRPC server others find through libp2p, and a channel to every peer.

libp2p (p2p.py) proves who is who and crosses NATs; the handshake over it pins the certificate and the token with which
gRPC then moves the bulk, over TCP where an address can be dialled and through a libp2p stream where none can.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from node.core.errors import ExitCode, NetworkFault, PeerFault, Refused, WireError
from node.core.ids import PeerId, short
from node.core.tasks import Tasks
from node.identity.faults import FaultBook
from node.telemetry.sparing import Sparing
from node.transport import ask, handshake, tunnel
from node.transport.addresses import is_loopback, join_host, part_of, split_multiaddr
from node.transport.ask import Answerer, Asking
from node.transport.doorman import Doorman
from node.transport.frames import StreamEnded
from node.transport.handshake import Acquaintance, Admit, Facts, Handshake, Tokens
from node.transport.limits import PEERS_KEPT, Rate, Seats
from node.transport.lines import Lines
from node.transport.p2p import P2pDaemon
from node.transport.port import PeerLink, translate
from node.transport.ports import check_free, taken
from node.transport.settings import TransportSettings
from node.transport.tls import make_certificate
from protos.ask_pb2 import Answer, Ask
from protos.handshake_pb2 import Hello

if TYPE_CHECKING:
    from node.identity.keys import Identity
    from node.telemetry.events import Journal
    from node.telemetry.metrics import Metrics

CONNECTIONS = 512
"""Incoming gRPC connections at once, with a handshake timeout that clears silent ones."""
METADATA_BYTES = 8192
HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE = 0.5, 10.0
_ANYWHERE = ("0.0.0.0", "::")


class Transport:
    """See ``port.TransportPort``. ``facts()`` is what we say about ourselves; ``admit`` see ``handshake.Admit``."""

    def __init__(
        self,
        identity: Identity,
        settings: TransportSettings,
        journal: Journal,
        metrics: Metrics,
        facts: Callable[[], Facts],
        admit: Admit,
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.settings, self._journal, self._metrics, self._facts, self._admit = settings, journal, metrics, facts, admit
        self.p2p = P2pDaemon(identity, settings, journal, on_error)
        self._tasks = Tasks("transport", on_error)
        self._certificate = make_certificate(time.time())
        self._tokens, self._book = Tokens(), FaultBook()
        self._doorman = Doorman(self._tokens, Seats(settings.peer_streams, 16 * settings.peer_streams), self._banned)
        self._handshake = Handshake(
            self.p2p, self._tokens, facts, self.grpc_addresses, self._certificate.pem, self._admit_unless_banned
        )
        self._rate = Rate(HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE)
        self._lines = Lines(self.p2p, settings, self._greet, self.p2p.runtime, journal, self._tasks)
        self._lines.on_lost.append(lambda _: self._gauge())
        self._sparing = Sparing(journal)
        self._asking = Asking(self.p2p, facts, self._limited)
        self._met: OrderedDict[PeerId, Acquaintance] = OrderedDict()
        self._bytes: dict[PeerId, list[int]] = {}
        self._rtt: dict[PeerId, float] = {}
        self._port = 0

    @property
    def peer_id(self) -> PeerId:
        return self.p2p.peer_id

    @property
    def server(self) -> grpc.aio.Server:
        """Add servicers to it before :meth:`serve`. Made on first use, inside the running loop."""
        return self._server

    @cached_property
    def _server(self) -> grpc.aio.Server:
        settings = self.settings
        options: list[tuple[str, Any]] = [
            *settings.connection_options(),
            ("grpc.max_concurrent_streams", settings.peer_streams),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", round(1000 * settings.handshake_timeout_s)),
            ("grpc.http2.min_ping_interval_without_data_ms", round(500 * settings.keepalive_s)),
            ("grpc.so_reuseport", 0),
        ]
        return grpc.aio.server(interceptors=[self._doorman], options=options)

    async def start(self, initial_peers: Sequence[str] = (), *, serve: bool = True) -> None:
        """Start p2pd, and serve; ``initial_peers`` are multiaddrs that may be dead (see ``p2p.bootstrap``).

        With ``serve`` False the gRPC port is taken and nothing answers on it before :meth:`serve`, so that services may
        still be added. Raises NetworkFault when a port is taken or p2pd does not start.
        """
        settings = self.settings
        ping = {"Ping": grpc.unary_unary_rpc_method_handler(_echo)}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tutti.v1.Link", ping),))
        check_free(settings.host, settings.grpc_port, "transport.grpc_port")
        pair = [(self._certificate.key, self._certificate.pem)]
        try:
            self._port = self.server.add_secure_port(
                join_host(settings.host, settings.grpc_port), grpc.ssl_server_credentials(pair)
            )
        except RuntimeError as e:
            raise taken(settings.host, settings.grpc_port, "transport.grpc_port", socket.SOCK_STREAM, str(e)) from e
        if serve:
            await self.serve()
        near = settings.host if settings.host not in _ANYWHERE else ("127.0.0.1", "::1")[settings.host == "::"]
        end = tunnel.TunnelEnd(near, lambda: self._port, lambda p: self._tokens.knows(p) and not self._banned(p))
        await self.p2p.add_stream(handshake.STREAM, self._welcome)
        await self.p2p.add_stream(tunnel.STREAM, end.serve)
        await self.p2p.add_stream(ask.STREAM, self._asking.serve)
        self.p2p.on_up(self._p2p_up)
        try:
            await self.p2p.start(initial_peers)
        except NetworkFault:
            await self.close()
            raise

    async def serve(self) -> None:
        """Let the gRPC server answer; services can no longer be added."""
        await self.server.start()

    async def close(self) -> None:
        """End every channel, the server and p2pd; calls in flight are cancelled. Safe to call twice."""
        await self._lines.close()
        await self._tasks.close()
        await self.server.stop(None)
        await self.p2p.close()
        self._sparing.close()

    def grpc_addresses(self) -> list[str]:
        """The host:port others are told to dial, best first; empty when only the tunnel leads here."""
        if self.settings.force_tunnel:
            return []
        if self.settings.announce:
            return list(self.settings.announce)
        if self.settings.host not in _ANYWHERE:
            return [join_host(self.settings.host, self._port)]
        kind = "ip6" if ":" in self.settings.host else "ip4"
        hosts = list(dict.fromkeys(filter(None, (part_of(a, kind) for a in self.p2p.addresses() if "/p2p-circuit" not in a))))
        outside = [h for h in hosts if not is_loopback(h)]
        return [join_host(h, self._port) for h in outside or hosts]

    async def channel(self, peer: PeerId) -> grpc.aio.Channel:
        self._refuse_banned(peer)
        if peer == self.peer_id:
            raise PeerFault(peer, "that is ourselves")
        line = await self._lines.get(peer)
        return line.channel

    def caller(self, context: Any) -> PeerId:
        peer = self._doorman.caller(context.invocation_metadata())
        if peer is None:
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            raise PeerFault(PeerId("unknown"), "call with an unknown token")
        return peer

    def forget(self, peer: PeerId) -> None:
        self._lines.forget(peer)
        self._gauge()

    def on_lost(self, callback: Callable[[PeerId], None]) -> None:
        """Call ``callback(peer)`` when the established channel to a peer breaks. It must not block or raise."""
        self._lines.on_lost.append(callback)

    def doubt(self, peer: PeerId) -> None:
        """See ``TransportPort.doubt``."""
        self._lines.doubt(peer)

    def learn(self, peer: PeerId, multiaddrs: Sequence[str]) -> None:
        """Remember where the peer's p2pd listens, for when it is wanted. Text that is no multiaddr of it is ignored."""
        self.p2p.learn(peer, multiaddrs)

    def path(self, peer: PeerId) -> str:
        line = self._lines.line(peer)
        return line.path if line else ""

    def rtt(self, peer: PeerId) -> float:
        """Seconds of the last ping; 0 for never measured."""
        return self._rtt.get(peer, 0.0)

    def peers(self) -> dict[PeerId, PeerLink]:
        found = {}
        for peer, met in self._met.items():
            line = self._lines.line(peer)
            sent, received = self._bytes.get(peer, (0, 0))
            since = line.since if line else 0.0
            found[peer] = PeerLink(self.path(peer), self.rtt(peer), sent, received, met.name, met.version, since)
        return found

    async def ping(self, peer: PeerId, timeout: float = 5.0) -> float:
        channel = await self.channel(peer)
        began = time.monotonic()
        try:
            await channel.unary_unary("/tutti.v1.Link/Ping")(b"", timeout=timeout)
        except grpc.aio.AioRpcError as e:
            raise translate(peer, e) from e
        self._rtt[peer] = time.monotonic() - began
        return self._rtt[peer]

    def count(self, peer: PeerId, sent: int = 0, received: int = 0, plane: str = "bulk") -> None:
        total = self._bytes.setdefault(peer, [0, 0])
        total[0] += sent
        total[1] += received
        if sent:
            self._metrics.bytes_sent_total.labels(plane=plane).inc(sent)
        if received:
            self._metrics.bytes_received_total.labels(plane=plane).inc(received)

    def fault(self, peer: PeerId, reason: str, weight: float = 1.0) -> None:
        was = self._banned(peer)
        self._book.count(peer, weight, time.monotonic())
        self._metrics.faults_total.labels(room="transport").inc()
        self._sparing.emit(peer, "transport", "fault", f"{short(peer)}: {reason}", "warning", weight=weight)
        left = self._banned(peer)
        if left > was and not was:
            self.forget(peer)
            self._metrics.bans_total.inc()
            self._sparing.emit(peer, "transport", "banned", f"{short(peer)} is refused for {left:.0f} s", "warning")

    async def ask(self, whom: str, question: Ask, timeout: float = 10.0) -> Answer:
        """The answer of ``whom``, a PeerId or a multiaddr that ends in one; it may be a Refusal.

        Raises WireError for text that is neither, PeerFault when no answer comes. Works before any handshake and for
        peers of no run.
        """
        peer = PeerId(whom)
        if whom.startswith("/"):
            _, peer = split_multiaddr(whom)
            self.learn(peer, [whom])
        return await self._asking.ask(peer, question, timeout)

    def answer_with(self, answerer: Answerer) -> None:
        """Let ``answerer(peer, ask)`` answer what peers ask over libp2p; a LocalFault it raises becomes a Refusal."""
        self._asking.answerer = answerer

    async def _greet(self, peer: PeerId) -> Acquaintance:
        met = await self._handshake.greet(peer, 2 * self.settings.handshake_timeout_s)
        self._remember(met)
        return met

    async def _welcome(self, peer: PeerId, reader: Any, writer: Any) -> None:
        if not self._rate.allow(peer, time.monotonic()):
            self._limited(peer)
            return
        try:
            async with asyncio.timeout(self.settings.handshake_timeout_s):
                met = await self._handshake.answer(peer, reader, writer)
        except StreamEnded:
            return
        except WireError as e:
            self.fault(peer, f"bad handshake: {e}")
            return
        if met is not None:
            line = self._lines.line(peer)
            if line is not None and line.met.certificate != met.certificate:
                # It was started again since we dialled it: what we hold leads nowhere.
                self.forget(peer)
            self._remember(met)

    def _remember(self, met: Acquaintance) -> None:
        self._met[met.peer] = met
        self._met.move_to_end(met.peer)
        self._gauge()
        if len(self._met) > PEERS_KEPT:
            gone, _ = self._met.popitem(last=False)
            self._bytes.pop(gone, None)
            self._rtt.pop(gone, None)

    def _gauge(self) -> None:
        paths = [line.path for line in self._lines.all().values()]
        for path in ("direct", "tunnel"):
            self._metrics.peers.labels(path=path).set(paths.count(path))

    def _banned(self, peer: PeerId) -> float:
        return self._book.banned(peer, time.monotonic())

    def _refuse_banned(self, peer: PeerId) -> None:
        if (left := self._banned(peer)) > 0:
            raise PeerFault(peer, f"is refused for {left:.0f} s more")

    def _limited(self, peer: PeerId) -> None:
        self._sparing.emit(peer, "transport", "rate-limited", f"{short(peer)} asks too much and is put off")

    def _admit_unless_banned(self, peer: PeerId, hello: Hello) -> float | None:
        if (left := self._banned(peer)) > 0:
            raise Refused(f"you are refused for {left:.0f} s", "wait", ExitCode.REFUSED)
        return self._admit(peer, hello)

    async def _p2p_up(self, p2p: object) -> None:
        if self.p2p.restarts:
            self._metrics.p2pd_restarts_total.inc()


async def _echo(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return request
