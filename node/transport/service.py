"""The transport of a daemon: a gRPC server others find through libp2p, and a channel to every peer.

libp2p (p2p.py) proves identities and crosses NATs. The handshake over it pins the certificate and
the token with which gRPC then moves the bulk: over TCP where an address can be dialled, through a
libp2p stream elsewhere.
"""

import asyncio
import contextlib
import hashlib
import math
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, cast

import grpc
import grpc.aio

from node.core.contention import Contention
from node.core.errors import ExitCode, NetworkFault, PeerFault, Refused, UsageFault, WireError
from node.core.ids import PeerId, short
from node.core.newest import Newest
from node.core.patience import Patience
from node.core.tasks import Tasks
from node.core.version import SHARED_SINCE, Protocols
from node.identity.faults import (
    PEERS_KEPT,
    FaultBook,
    TokenBucket,
    until_heard,
    until_you_are_heard,
)
from node.identity.keys import Identity
from node.identity.refusals import LATELY_S, Refusals
from node.reach.interfaces import check_free, taken
from node.reach.ladder import ClimbAttempt, Rung
from node.reach.secure import make_certificate
from node.reach.settings import ReachSettings
from node.reach.standing import Standing
from node.telemetry.events import Journal, RateLimitedLog
from node.telemetry.metrics import Metrics
from node.transport import ask, handshake
from node.transport.addresses import grpc_target, join_host, multiaddr, split_multiaddr
from node.transport.ask import Asking
from node.transport.auth import AuthInterceptor, Callers
from node.transport.clocks import PeerClocks
from node.transport.connections import Connection, Connections, descriptors, hang_up, incoming
from node.transport.desk import ServiceDesk
from node.transport.frames import StreamEnded
from node.transport.handshake import Acquaintance, Admit, Facts, Handshake, IncompatiblePeer, Tokens
from node.transport.limits import Limit
from node.transport.p2p import P2pDaemon
from node.transport.port import PeerLink, translate
from node.transport.settings import TransportSettings
from node.transport.shared import meeting
from node.transport.shared.sharing import Sharing
from node.transport.traffic import PAYLOAD, Beside, Moved, Traffic, read_io
from node.transport.ways import bypass, punch, relay, tunnel
from node.transport.ways.arrivals import WayListener
from node.transport.ways.bypass import Bypass
from node.transport.ways.lines import Lines
from node.transport.ways.reachable import Known, Reachable
from node.transport.ways.relay import UNDER_WAY, Relay
from node.transport.ways.relays import Relays
from protos.ask_pb2 import Answer, Ask
from protos.handshake_pb2 import Hello
from protos.reach_pb2 import PunchAnswer, PunchAsk, RelayAsk, ShareAnswer, ShareAsk

CONNECTIONS = 512
"""Incoming gRPC connections that stay open. gRPC accepts twice the number, so that newcomers get in
between two looks at them."""
LOOK_EVERY_S = 4.0
"""Seconds between two looks at the incoming connections while there are many."""
FEW = 128
"""Descriptors of this process up to which nobody looks."""
DESCRIPTORS = 8192
"""Sockets and files that this process may have open. At its limits a relay has some 5,000, and most
systems begin with 1,024."""
CALLS = 1024
"""Calls of others that are served at once. Half of them is for strangers."""
METADATA_BYTES = 8192
HANDSHAKES_PER_S = 0.5
HANDSHAKES_AT_ONCE = 10.0
"""Handshakes of an established peer that are answered: sustained rate, and burst."""
STRANGERS_PER_S = 0.1
STRANGERS_AT_ONCE = 6.0
"""The same for a stranger. A handshake costs about 4 ms of processor time here, and less at a
caller that does nothing else."""
TOO_OFTEN_S = 2.0
"""Seconds until a caller that greets too often is told so. One that greets again at once waits, and
each of its refusals would cost milliseconds here."""
TOO_OFTEN = "you greet too often; wait ten seconds between two greetings"
CLIMB_EVERY_S = 1.0
"""Seconds between two looks for peers to which a better way is worth a try."""
PUNCHES_PER_S = 0.2
PUNCHES_AT_ONCE = 3.0
PUNCH_ASK_S = 4.0
SHARE_ASK_S = 2 * meeting.TIMEOUT_S
"""Seconds for the answer of a peer that is asked to share memory."""
VACATED = grpc.StatusCode.FAILED_PRECONDITION, "this peer has given its stage up"
"""Status of calls that are under way when a stage's services are taken away."""
QUEUE_SAID_S = 30.0
"""Seconds between two reports that newcomers wait."""
INCOMPATIBLE_S = 60.0
"""Seconds for which a peer without a common protocol version is not called, unless it calls."""


class Transport:
    """See ``port.TransportPort``. ``facts()``: this peer's facts for handshakes; ``admit`` see
    ``handshake.Admit``; ``serves()``: the run for which this peer relays and asks relays, also
    where it takes no part in it, "" for any."""

    def __init__(
        self,
        identity: Identity,
        settings: TransportSettings,
        journal: Journal,
        metrics: Metrics,
        facts: Callable[[], Facts],
        admit: Admit,
        on_error: Callable[[str, BaseException], None] | None = None,
        reach: ReachSettings | None = None,
        serves: Callable[[], str] | None = None,
    ) -> None:
        self.settings = settings
        self._journal = journal
        self._metrics = metrics
        self._facts = facts
        self._admit = admit
        self.reach_settings = reach or ReachSettings()
        self._serves = serves or (lambda: facts().run_id)
        self.patience = Patience()
        self.p2p = P2pDaemon(identity, settings, journal, on_error)
        self.p2p.slack = lambda: self.patience.slack(time.monotonic())
        self._tasks = Tasks("transport", on_error)
        self._certificate = make_certificate()
        self._desk = ServiceDesk()
        self._serving = False
        self._tokens = Tokens(established=lambda peer: self.established(peer))
        self._arrivals = WayListener()
        self._book = FaultBook()
        self.traffic = Traffic(settings.max_up, settings.max_down)
        """All that this peer sends and receives."""
        self.sharing = Sharing(
            settings.shared_memory == "auto",
            identity.peer_id,
            self._near,
            self._share,
            journal,
            on_error,
        )
        self._beside = Beside()
        self._tunnelled = 0
        self._outgrown = 0
        self.refusals = Refusals(
            on_count=lambda kind: metrics.refused_total.labels(kind=kind).inc()
        )
        """Calls and connections of others that were refused."""
        self.established: Callable[[PeerId], bool] = lambda peer: False
        """Return True for a member of the plan in force and for a colleague. Half of all places is
        for them."""
        self.leads: Callable[[PeerId], bool] = lambda peer: True
        """Return True for a peer that this one has reported to as to its leader."""
        self._auth = AuthInterceptor(
            self._tokens,
            CALLS,
            settings.peer_streams,
            self.traffic,
            Callers(
                self._banned,
                lambda peer: self.established(peer),
                lambda peer: self.leads(peer),
                self.fault,
            ),
            self.refusals,
            lambda: self.patience.slack(time.monotonic()),
            lambda where, peer: self._connections.called(where, peer, time.monotonic()),
        )
        self._connections = Connections(CONNECTIONS, lambda peer: self.established(peer))
        self.reachable = Reachable(
            self.p2p,
            settings,
            self.reach_settings,
            journal,
            lambda peer, question, timeout: self.asking.ask(peer, question, timeout),
            lambda: self._port,
            hashlib.sha256(b"tutti/mapping" + identity.seed()).digest(),
            on_error,
            lambda: self._arrivals.port,
        )
        self._handshake = Handshake(
            self.p2p,
            self._tokens,
            facts,
            self.reachable.targets,
            self._certificate.pem,
            self._admit_unless_banned,
            self._mismatched,
        )
        self._incompatible: Newest[PeerId, tuple[Protocols, float]] = Newest(PEERS_KEPT)
        self._rate = TokenBucket(HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE)
        self._strangers = TokenBucket(STRANGERS_PER_S, STRANGERS_AT_ONCE)
        self.relay = Relay(
            self.p2p,
            self.reach_settings,
            self._relay_for,
            lambda: self.reach_settings.relay and self.reachable.standing is Standing.OPEN,
            journal,
            metrics,
            self.traffic,
            established=lambda peer: self.established(peer),
            block=self.p2p.block,
            arrivals=self._arrivals,
            outside=self.reachable.bypass_outside,
        )
        self.on_met: Callable[[PeerId], None] = lambda peer: None
        """Told of each peer that has shaken hands with this one of its own accord."""
        self.p2p.established = lambda peer: self.established(peer)
        self.p2p.on_refusal = lambda peer: self.refusals.count("connection", peer)
        self.relay.on_refusal = lambda peer: self.refusals.count("relay", peer)
        own = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
        self.near = own.get(settings.host, settings.host)
        """Address at which programs of this machine dial this peer."""
        self._tunnel_end = tunnel.TunnelEnd(
            self.near,
            lambda: self._port,
            lambda p: self._tokens.knows(p) and not self._banned(p),
            self._carry,
            established=lambda peer: self.established(peer),
            block=self.p2p.block,
        )
        self._tunnel_end.on_refusal = lambda peer: self.refusals.count("connection", peer)
        self._bypass = Bypass(
            self.p2p,
            self._arrivals,
            self._tunnel_end,
            self.reachable.host,
            self.reachable.bypass_outside,
            self.reachable.observers,
            lambda: self.reachable.outside().punch,
        )
        self.relays = Relays(
            self.p2p,
            identity,
            self._certificate,
            self._tokens,
            self._serves,
            lambda: facts().admission,
            self.reachable.relays,
            lambda peer, stream: self._welcome(peer, stream, stream),
            self._tunnel_end,
            self._bypass,
            journal,
            on_error,
        )
        self.lines = Lines(
            self.p2p,
            settings,
            self._greet,
            self._greet_through,
            self.relays,
            journal,
            self._tasks,
            self.reach_settings.punch,
            {
                ClimbAttempt.PUNCH: self._punch,
                ClimbAttempt.CONNECT: self.reachable.connect,
            },
            self.patience,
            self.traffic,
            self._carry,
            self._bypass,
            self.reachable.outside,
        )
        for rung in list(Rung)[1:]:
            metrics.peers.labels(path=rung.word).set_function(partial(self._on_rung, rung))
        self._punches = TokenBucket(PUNCHES_PER_S, PUNCHES_AT_ONCE)
        self._punching: set[PeerId] = set()
        self._rate_limit = RateLimitedLog(journal)
        self.asking = Asking(
            self.p2p,
            facts,
            self._limited,
            self.reachable.dialled,
            self._tokens.knows,
            self.reachable.bypass_outside,
        )
        self._contention = Contention()
        self._queue_said = float("-inf")
        self._refusals_said = float("-inf")
        self._met: Newest[PeerId, Acquaintance] = Newest(PEERS_KEPT)
        self._moved: Newest[PeerId, Moved] = Newest(PEERS_KEPT)
        self._pinged: Newest[PeerId, tuple[float, float]] = Newest(PEERS_KEPT)
        """Seconds of the last ping, and when it was, Unix seconds."""
        self._port = 0

    @property
    def peer_id(self) -> PeerId:
        return self.p2p.peer_id

    @property
    def server(self) -> grpc.aio.Server:
        """The server to which services are added, before :meth:`serve` or later; :meth:`vacate`
        takes them away."""
        return cast(grpc.aio.Server, self._desk)

    @cached_property
    def _server(self) -> grpc.aio.Server:
        settings = self.settings
        options: list[tuple[str, Any]] = [
            # Whoever comes through a relay comes to this server too, so it is as patient with
            # everybody.
            *settings.connection_options(relayed=True, server=True),
            ("grpc.max_concurrent_streams", settings.peer_streams),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.max_allowed_incoming_connections", 2 * CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", round(1000 * settings.handshake_timeout_s)),
            *settings.accepted_probes(),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(interceptors=[self._auth], options=options)
        server.add_generic_rpc_handlers((self._desk,))
        return server

    def serve_also(self, method: str, limit: Limit) -> None:
        """Add a row to the table of limits, for a program with a service of its own."""
        self._auth.rows[method] = limit

    @property
    def clocks(self) -> PeerClocks:
        """This clock beside the clocks of the peers that answered questions."""
        return self.asking.clocks

    def has_met(self, peer: PeerId) -> bool:
        """Return True if a dial to the peer has succeeded, or the peer has reached this one."""
        return peer in self._met or peer in self.p2p.links

    def connected(self) -> list[PeerId]:
        """Peers with a libp2p connection, which a question reaches at once."""
        return sorted(self.p2p.links)

    @property
    def ports(self) -> tuple[int, int]:
        """The TCP ports of libp2p and of gRPC; 0 before :meth:`start`."""
        return self.p2p.port, self._port

    async def start(
        self,
        initial_peers: Sequence[str] = (),
        *,
        serve: bool = True,
        prefer: tuple[int, int] = (0, 0),
    ) -> None:
        """Start p2pd, and serve; ``initial_peers`` are multiaddrs that may be dead (see
        ``p2p.Bootstrap``).

        With ``serve`` False the gRPC port is taken and nothing answers on it before :meth:`serve`,
        so that services may still be added. ``prefer``: ports of libp2p and gRPC to take where the
        settings leave them open and they are free. Raises NetworkFault when a port is taken or p2pd
        does not start, UsageFault for an address to announce that nobody could dial.
        """
        settings = self.settings
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < min(hard, DESCRIPTORS):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS), hard))
        for address in settings.announce:
            try:
                grpc_target(address)
            except WireError as e:
                raise UsageFault(
                    f"transport.announce: {e}", "give HOST:PORT, as others dial it"
                ) from e
        self.p2p.prefer(prefer[0])
        link = {
            "Ping": grpc.unary_unary_rpc_method_handler(_echo),
            "Punch": grpc.unary_unary_rpc_method_handler(
                self._punch_asked, PunchAsk.FromString, PunchAnswer.SerializeToString
            ),
            "Share": grpc.unary_unary_rpc_method_handler(
                self._share_asked, ShareAsk.FromString, ShareAnswer.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tutti.v1.Link", link),)
        )
        host = settings.host or "0.0.0.0"
        port = settings.grpc_port
        check_free(host, port, "transport.grpc_port")
        if not port:
            with contextlib.suppress(NetworkFault):
                check_free(host, prefer[1], "")
                port = prefer[1]
        try:
            # gRPC takes [::] for both families, and for IPv4 where this machine has no IPv6.
            self._port = self._server.add_secure_port(
                join_host(settings.host or "::", port),
                grpc.ssl_server_credentials([(self._certificate.key, self._certificate.pem)]),
            )
        except RuntimeError as e:
            option = "--set transport.grpc_port=PORT"
            raise taken(host, port, option, socket.SOCK_STREAM, str(e)) from e
        check_free(host, settings.bypass_port, "transport.bypass_port")
        try:
            self._arrivals.start(settings.host, settings.bypass_port)
        except OSError as e:
            option = "--set transport.bypass_port=PORT"
            why = e.strerror or str(e)
            raise taken(host, settings.bypass_port, option, socket.SOCK_STREAM, why) from e
        if serve:
            await self.serve()
        self.p2p.add_stream(handshake.STREAM, self._welcome)
        self.p2p.add_stream(tunnel.STREAM, self._tunnel_end.serve)
        self.p2p.add_stream(bypass.STREAM, self._bypass.serve)
        self.p2p.add_stream(ask.STREAM, self.asking.serve)
        self.p2p.add_stream(relay.RELAY, self.relay.serve)
        self.p2p.add_stream(relay.RELAYED, self.relays.serve, carrier=True)
        self.p2p.on_up.append(self._p2p_up)
        try:
            await self.p2p.start(initial_peers)
        except NetworkFault:
            await self.close()
            raise
        self.reachable.start()
        self.relays.start()
        self._tasks.spawn(self._climb(), "climb", eternal=True)
        self._tasks.spawn(self._mind_connections(), "connections", eternal=True)

    async def serve(self) -> None:
        """Let the gRPC server answer. Does nothing while it does."""
        if not self._serving:
            self._serving = True
            await self._server.start()

    async def stop_serving(self) -> None:
        """End all calls of others and answer none any more."""
        await self._server.stop(None)

    def vacate(self) -> None:
        """Take the services of the stage away, and end the calls to them. Others still reach this
        peer, which answers that it does not offer the call. Nobody is told of lost peers any
        more."""
        self._desk.clear()
        self.lines.on_lost.clear()
        self._auth.end(lambda peer: True, VACATED)
        self.established = lambda peer: False
        self.leads = lambda peer: True

    async def close(self) -> None:
        """End every channel, the server and p2pd; calls in flight are cancelled. Safe to call
        twice."""
        parts = (self.reachable, self.relays, self.lines, self._bypass, self._arrivals, self._tasks)
        for part in parts:
            await part.close()
        await self.stop_serving()
        await self.sharing.close()
        await self.p2p.close()
        self._rate_limit.close()

    async def channel(self, peer: PeerId) -> grpc.aio.Channel:
        if (left := self._banned(peer)) > 0:
            raise PeerFault(peer, until_heard(left))
        if peer == self.peer_id:
            raise PeerFault(peer, "this is our own PeerId")
        theirs, since = self._incompatible.get(peer, (None, 0.0))
        if theirs is not None and time.monotonic() < since + INCOMPATIBLE_S:
            raise IncompatiblePeer(peer, self._facts().protocols, theirs)
        return (await self.lines.get(peer)).channel

    def caller(self, context: Any) -> PeerId:
        peer = self._auth.caller(context.invocation_metadata())
        if peer is None:
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            raise PeerFault(PeerId("unknown"), "call with an unknown token")
        return peer

    def forget(self, peer: PeerId) -> None:
        self.lines.forget(peer)

    def on_lost(self, callback: Callable[[PeerId], None]) -> None:
        """See ``TransportPort.on_lost``."""
        self.lines.on_lost.append(callback)

    def doubt(self, peer: PeerId) -> None:
        """See ``TransportPort.doubt``."""
        self.lines.doubt(peer)

    def learn(
        self,
        peer: PeerId,
        multiaddrs: Sequence[str],
        *,
        standing: Standing = Standing.UNKNOWN,
        relays: Sequence[PeerId] = (),
        room: int = 0,
        rate: float = 0.0,
    ) -> None:
        """Take in a peer's record in the directory: its p2pd's addresses, whether others can dial
        it there, the relays that reach it, the number of peers it would still relay for, and the
        bytes a second for each (0: no limit). Text that is no multiaddr of it is ignored."""
        self.p2p.book.learn(peer, multiaddrs)
        self.relays.learn(peer, relays)
        if self.reachable.learn(peer, Known(tuple(multiaddrs), standing, room, rate)):
            self.lines.news(peer)

    def path(self, peer: PeerId) -> str:
        line = self.lines.open.get(peer)
        if line:
            return line.rung.word
        return ""

    def rate_left(self, peer: PeerId) -> float:
        """See ``TransportPort.rate_left``."""
        line = self.lines.open.get(peer)
        if not line:
            return 0.0
        return self.reachable.known.get(line.via, Known()).rate

    def caps(self) -> tuple[float, float]:
        """See ``TransportPort.caps``."""
        return PAYLOAD * self.settings.max_up, PAYLOAD * self.settings.max_down

    def leave(self, peer: PeerId, data: memoryview) -> bytes | None:
        """See ``TransportPort.leave``."""
        return self.sharing.leave(peer, data)

    def withdraw(self, peer: PeerId, places: Sequence[bytes]) -> None:
        """See ``TransportPort.withdraw``."""
        self.sharing.withdraw(peer, places)

    def fetch(self, peer: PeerId, place: bytes, into: memoryview) -> int:
        """See ``TransportPort.fetch``."""
        return self.sharing.fetch(peer, place, into)

    def peers(self) -> dict[PeerId, PeerLink]:
        found = {}
        for peer, met in self._met.items():
            line = self.lines.open.get(peer)
            moved = self._moved.get(peer) or Moved()
            rtt, proven = self._pinged.get(peer, (0.0, 0.0))
            since = 0.0
            via = PeerId("")
            if line:
                since = line.since
                via = line.via
            found[peer] = PeerLink(
                self.path(peer),
                rtt,
                moved.sent,
                moved.received,
                met.name,
                met.version,
                since,
                via,
                *moved.rates(time.monotonic()),
                proven,
            )
        return found

    async def ping(self, peer: PeerId, timeout: float = 5.0) -> float:
        channel = await self.channel(peer)
        began = time.monotonic()
        try:
            await channel.unary_unary("/tutti.v1.Link/Ping")(b"", timeout=timeout)
        except grpc.aio.AioRpcError as e:
            raise translate(peer, e) from e
        took = time.monotonic() - began
        self._pinged[peer] = took, time.time()
        return took

    def count(self, peer: PeerId, sent: int = 0, received: int = 0, plane: str = "bulk") -> None:
        self._moved.setdefault(peer, Moved()).count(sent, received, time.monotonic())
        if sent:
            self._metrics.bytes_sent_total.labels(plane=plane).inc(sent)
        if received:
            self._metrics.bytes_received_total.labels(plane=plane).inc(received)

    def fault(self, peer: PeerId, reason: str, weight: float = 1.0) -> None:
        was = self._banned(peer)
        self._book.count(peer, weight, time.monotonic())
        self._metrics.faults_total.labels(component="transport").inc()
        self._rate_limit.emit(
            peer, "transport", "fault", f"{short(peer)}: {reason}", "warning", weight=weight
        )
        left = self._banned(peer)
        if left > was and not was:
            self.forget(peer)
            self.sharing.end(peer)
            self._metrics.bans_total.inc()
            self._rate_limit.emit(
                peer, "transport", "banned", f"{short(peer)} is refused for {left:.0f} s", "warning"
            )

    async def ask(self, whom: str, question: Ask, timeout: float = 10.0) -> Answer:
        """Return the answer of ``whom``, a PeerId or a multiaddr that ends in one; it may be a
        Refusal.

        Raises WireError if ``whom`` is neither, PeerFault if no answer comes. Works before any
        handshake and for peers of no run.
        """
        peer = PeerId(whom)
        if whom.startswith("/"):
            _, peer = split_multiaddr(whom)
            self.learn(peer, [whom])
        return await self.asking.ask(peer, question, timeout)

    # ----------------------------------------------------------- better ways

    async def _climb(self) -> None:
        while True:
            due = time.monotonic() + CLIMB_EVERY_S
            await asyncio.sleep(CLIMB_EVERY_S)
            self.patience.woke(due, time.monotonic())
            self._mind_newcomers(due, time.monotonic())
            # Before it is known whether others can dial this peer, a place at a relay costs little
            # and saves seconds.
            closed = self.reachable.standing is not Standing.OPEN
            self.relays.want(closed and self.reach_settings.relayed)
            self._metrics.relay_clients.set(self.relay.clients)
            self.lines.climb(time.monotonic())
            self.lines.rest(time.monotonic())
            self._count_p2pd()
            self._tell_refusals(time.monotonic())

    def _tell_refusals(self, now: float) -> None:
        """Say once a minute that many calls are refused."""
        if now - self._refusals_said < LATELY_S:
            return
        if line := self.refusals.line():
            self._refusals_said = now
            self._journal.emit("transport", "refused-much", line, "warning")

    async def _mind_connections(self) -> None:
        """End the incoming connections that nobody needs, and those beyond a stranger's share."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            present = None
            # Without a descriptor left nothing can be counted; others may have ended by the next
            # look.
            with contextlib.suppress(OSError):
                if len(descriptors()) > FEW:
                    present = await asyncio.to_thread(incoming, self._port)
            if present is None:
                continue
            for connection in self._unneeded(present, time.monotonic()):
                if hang_up(connection):
                    self.refusals.count("connection", connection.remote[0])

    def _unneeded(self, present: Sequence[Connection], now: float) -> list[Connection]:
        """The incoming connections to end. A connection is in use for as long as a call lasts."""
        for where, peer in self._auth.running():
            self._connections.called(where, peer, now)
        return self._connections.look(present, now)

    def _mind_newcomers(self, due: float, now: float) -> None:
        """Let newcomers in as fast as this process bears it, and say that some wait."""
        newcomers = self.asking.newcomers
        if newcomers.waiting:
            contended = self._contention.share()
        else:
            contended = self._contention.rest()
        newcomers.measured(now - due, contended, now)
        self._metrics.newcomers_waiting.set(newcomers.waiting)
        if newcomers.waiting and now - self._queue_said >= QUEUE_SAID_S:
            self._queue_said = now
            self._journal.emit(
                "transport",
                "newcomers-wait",
                f"{newcomers.waiting} newcomers wait to join, one gets its turn every "
                f"{newcomers.pace_s:.1f} s",
                waiting=newcomers.waiting,
            )

    async def _carry(self, count: int) -> None:
        self._tunnelled += count

    def _count_p2pd(self) -> None:
        """Count p2pd's traffic beside our tunnels: the directory, handshakes, its own upkeep. It is
        counted after the fact, so messages that wait for a turn wait for it too."""
        with contextlib.suppress(NetworkFault):
            pid = self.p2p.pid
            if (io := read_io(pid)) is not None:
                carried = self._tunnelled + self.relay.carried
                from_us = carried + self.p2p.calls.given
                to_us = carried + self.p2p.calls.taken
                under_way = self.relay.circuits * UNDER_WAY
                self.traffic.count_raw(*self._beside.since(pid, *io, from_us, to_us, under_way))

    async def _punch(self, peer: PeerId) -> None:
        """Open a libp2p connection together with ``peer``, which is reached some other way. Raises
        PeerFault."""
        mine = self.reachable.seen()
        reachable = self.reachable
        if not mine:
            raise PeerFault(peer, "no peer has told us our public address")
        if reachable.moving_ports():
            raise PeerFault(peer, "our router gives every connection another port")
        self._punching.add(peer)
        try:
            channel = await self.channel(peer)
            call = channel.unary_unary(
                "/tutti.v1.Link/Punch", PunchAsk.SerializeToString, PunchAnswer.FromString
            )
            answer = await call(PunchAsk(addresses=mine), timeout=PUNCH_ASK_S)
            if not answer.accepted:
                raise PeerFault(peer, f"it does not punch: {answer.reason[:200]}")
            found = punch.candidates(answer.addresses)
            if not found:
                raise PeerFault(peer, "it knows no public address of its own")
            await self.p2p.reach(peer, punch.OPEN_S, [multiaddr(*at) for at in found])
            self.p2p.punched.add(peer)
        except grpc.aio.AioRpcError as e:
            raise translate(peer, e) from e
        finally:
            self._punching.discard(peer)

    async def _punch_asked(
        self, request: PunchAsk, context: grpc.aio.ServicerContext[Any, Any]
    ) -> PunchAnswer:
        peer = self.caller(context)
        targets = punch.candidates(request.addresses)
        mine = self.reachable.seen()
        refusals = {
            "hole punching is off here": not self.reach_settings.punch or self.reachable.local,
            "a punch to you is under way from here": peer in self._punching and self.peer_id < peer,
            "our router gives every connection another port": self.reachable.moving_ports(),
            "no public address was given": not targets,
            "no public address is known here": not mine,
        }
        why = next((why for why, is_so in refusals.items() if is_so), "")
        if not why and not self._punches.allow(peer, time.monotonic()):
            why = "too soon after the last attempt"
        if why:
            return PunchAnswer(reason=why)
        self._tasks.spawn(self._open_to(peer, targets), f"punch {short(peer)}")
        return PunchAnswer(accepted=True, addresses=mine)

    async def _open_to(self, peer: PeerId, targets: list[tuple[str, int]]) -> None:
        try:
            made = await punch.open_connection(self.p2p.port, targets, self._tasks)
            self.p2p.punched.add(peer)
            await punch.hand_over(made, self.near, self.p2p.port)
        except (NetworkFault, OSError) as e:
            self._journal.emit(
                "transport", "punch-failed", f"{short(peer)}: {e}", "debug", peer=peer
            )
        finally:
            self.p2p.punched.discard(peer)

    # ----------------------------------------------------------- within this machine

    def _near(self, peer: PeerId) -> bool:
        """Return True for a peer that was dialled within this machine and knows of shared
        memory."""
        line = self.lines.open.get(peer)
        return line is not None and line.near and line.met.protocol >= SHARED_SINCE

    async def _share(self, peer: PeerId, ask: ShareAsk) -> ShareAnswer:
        channel = await self.channel(peer)
        call = channel.unary_unary(
            "/tutti.v1.Link/Share", ShareAsk.SerializeToString, ShareAnswer.FromString
        )
        try:
            return await call(ask, timeout=SHARE_ASK_S)
        except grpc.aio.AioRpcError as e:
            raise translate(peer, e) from e

    async def _share_asked(
        self, request: ShareAsk, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ShareAnswer:
        return await self.sharing.asked(self.caller(context), request)

    # ----------------------------------------------------------- relaying for others

    def _relay_for(self, peer: PeerId, request: RelayAsk) -> None:
        """Raises LocalFault if this node does not relay for ``peer``."""
        ours = self._serves()
        if ours and request.run_id != ours:
            raise Refused("this node relays for another run", "", ExitCode.PROTOCOL)
        self._refuse_banned(peer)
        if ours:
            self._admit(peer, Hello(run_id=request.run_id, admission=request.admission))

    async def _greet_through(self, peer: PeerId, relay: PeerId) -> Acquaintance:
        stream = await self.relays.private(relay, peer)
        met = await self._handshake.greet_over(peer, stream, 2 * self._handshake_s())
        self._remember(met)
        return met

    # ----------------------------------------------------------- meeting

    async def _greet(self, peer: PeerId) -> Acquaintance:
        began = self.patience.running(time.monotonic())
        met = await self._handshake.greet(peer, 2 * self._handshake_s())
        self.patience.took("handshake", self.patience.running(time.monotonic()) - began)
        if not self.p2p.how(peer):
            with contextlib.suppress(NetworkFault):
                await self.p2p.look()
        self._remember(met)
        return met

    def _handshake_s(self) -> float:
        return self.patience.within(
            "handshake", self.settings.handshake_timeout_s, time.monotonic()
        )

    async def _welcome(self, peer: PeerId, reader: Any, writer: Any) -> None:
        rate = self._strangers
        if self.established(peer):
            rate = self._rate
        allowed = rate.allow(peer, time.monotonic())
        try:
            async with asyncio.timeout(self._handshake_s()):
                if not allowed:
                    self._limited(peer)
                    await asyncio.sleep(TOO_OFTEN_S)
                    await self._handshake.turn_away(reader, writer, TOO_OFTEN)
                    return
                met = await self._handshake.answer(peer, reader, writer)
        except StreamEnded:
            return
        except WireError as e:
            self.fault(peer, f"bad handshake: {e}")
            return
        if met is not None:
            line = self.lines.open.get(peer)
            if line is not None and line.met.certificate != met.certificate:
                # The peer restarted since we dialled it: our channel to it is of no use.
                self.forget(peer)
            self._remember(met)
            self.on_met(peer)

    def _mismatched(self, peer: PeerId, theirs: Protocols, version: str) -> None:
        """Log it once for each peer, and again only when it comes with other versions."""
        known = self._incompatible.get(peer)
        self._incompatible[peer] = theirs, time.monotonic()
        if known is None or known[0] != theirs:
            ours = self._facts().protocols
            software = ""
            if version:
                software = f" (tutti {version})"
            self._rate_limit.emit(
                peer,
                "transport",
                "protocol-mismatch",
                f"{short(peer)} speaks {theirs}{software}, this tutti {ours}: they do not work "
                f"together; {ours.advice(theirs)}",
                "warning",
                oldest=theirs.oldest,
                newest=theirs.newest,
            )

    def _remember(self, met: Acquaintance) -> None:
        self._incompatible.pop(met.peer, None)
        self._met[met.peer] = met
        self._journal.names.learn(met.peer, met.name)

    def _on_rung(self, rung: Rung) -> int:
        """Lines of this kind now; called by the thread that answers scrapes."""
        return sum(line.rung is rung for line in list(self.lines.open.values()))

    def expel(
        self, revoked: Callable[[PeerId], bool], out: Callable[[PeerId], bool] | None = None
    ) -> None:
        self._book.revoked = revoked
        out = out or revoked
        self._auth.end(out)
        for peer in [p for p in self._met if out(p)]:
            self.forget(peer)
            self.sharing.end(peer)

    def _banned(self, peer: PeerId) -> float:
        return self._book.banned(peer, time.monotonic())

    def _limited(self, peer: PeerId) -> None:
        self._rate_limit.emit(
            peer, "transport", "rate-limited", f"{short(peer)} asks too often; some are refused"
        )

    def _admit_unless_banned(self, peer: PeerId, hello: Hello) -> float:
        self._refuse_banned(peer)
        return self._admit(peer, hello)

    def _refuse_banned(self, peer: PeerId) -> None:
        if (left := self._banned(peer)) > 0:
            step = "ask the owner of the run"
            if left < math.inf:
                step = "wait"
            raise Refused(until_you_are_heard(left), step, ExitCode.REFUSED)

    async def _p2p_up(self, p2p: object) -> None:
        if self.p2p.restarts:
            self._metrics.p2pd_restarts_total.inc()
            outgrown = self.p2p.outgrown - self._outgrown
            self._metrics.p2pd_outgrown_total.inc(outgrown)
            self._outgrown = self.p2p.outgrown


async def _echo(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return request
