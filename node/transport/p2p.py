"""The p2p daemon (hivemind's p2pd, go-libp2p) under supervision: streams between proven PeerIds,
whatever the NAT.

p2pd is a child process spoken to over unix sockets in a directory of our own. hivemind starts it
but never notices its death; this file does, starts it again with the same identity and ports, and
gives it the stream handlers back. The way into the swarm is here too: initial peers, dialled in the
background until each has answered.
"""

import asyncio
import contextlib
import fcntl
import itertools
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import node.core.bare  # noqa: F401  first: hivemind without its averager and optimizer

# isort: split
from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID, StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import (
    ControlFailure,
    P2PDaemonError,
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2 as _p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from node.core.errors import (
    LocalFault,
    NetworkFault,
    OutOfResources,
    PeerFault,
    TuttiError,
    WireError,
)
from node.core.home import fits_socket
from node.core.ids import PeerId, short
from node.core.memory import resident
from node.core.tasks import Tasks
from node.identity.faults import TokenBucket
from node.identity.keys import Identity
from node.identity.places import PlacesByPeer
from node.reach.interfaces import (
    check_free,
    free_port,
    is_loopback,
    wildcards,
    without_own_bridges,
)
from node.reach.knock import refused
from node.reach.ladder import Rung
from node.telemetry.events import Journal, JournalHandler, RateLimitedLog
from node.transport import links
from node.transport.addresses import (
    AddressBook,
    host_of,
    is_quic,
    multiaddr,
    part_of,
    split_multiaddr,
)
from node.transport.links import Links, inbound_limit
from node.transport.settings import TransportSettings

StreamHandler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

p2pd_pb2: Any = _p2pd_pb2  # generated at run time, so a type checker sees nothing in it
STREAM_BUFFER = 1 << 20
"""Bytes read ahead of the reader of a stream; above it p2pd, and so the sender, has to wait."""
HEALTH_EVERY_S = 10.0
HEALTH_TIMEOUT_S = 15.0
HEALTH_TIMES = 2
LAUNCH_S = 90.0
"""Seconds for p2pd to say that it is up: where two dozen start on two cores it takes a while. One
that fails says so at once."""
LINKS_EVERY_S = 3.0
"""Seconds between two looks at the peers that p2pd is connected to."""
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 10.0
STABLE_S = 60.0
CONNECT_TIMEOUT_S = 10.0
TCP_FIRST_S = 2.0
STREAMS_PER_PEER = 64
"""Streams of one peer."""
STREAMS = 1024
"""Streams of all peers. Half of them is for established peers."""
RELAYED_PER_PEER = 256
"""Streams that one relay may bring for its clients; they do not count as its own."""
RELAYED = 1024
"""Streams that all relays may bring. Half of them is for relays that are established peers."""
UNARY_BYTES = 1 << 18
"""Largest request to a handler of the directory, and the bytes of the requests that one peer may
send at once. More are refused before they are parsed: 256 KiB of empty keys take milliseconds."""
UNARY_BYTES_PER_S = 1 << 16
"""Bytes of one peer's requests to handlers of the directory a second, in the long run. A post every
few seconds has one KiB; the records offered to a new neighbour have at most 130 KiB, once."""
MEMORY_EVERY_S = 1.0
"""Between two looks at p2pd's memory."""
CONFIGURATION = "p2pd.json"
"""Name of p2pd's configuration file in the runtime directory."""
NO_RELAY = '{"Relay": {"Enabled": false}}'
"""Configuration of p2pd. Its flag -relay=0 leaves the default of the configuration, which is a
relay for anybody, with circuits of 4 GiB. That relay's table of the world's networks takes a third
of a second of processor time and 30 MiB in every daemon."""
HANG_UP = 0.375
"""Share of p2pd's memory limit from which on its garbage collector works harder. Strangers of
which nothing was heard, ever or for :data:`MUTE_S` seconds, are hung up on."""
HANG_UP_ALL = 0.9
"""Share of p2pd's memory limit from which on all strangers are hung up on."""
MUTE_S = 10.0
NOT_TRIED = "not tried yet"
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
NAME_BYTES = 28
"""Longest name of a socket in our directory, with the slash before it."""
_PREFIX = "tutti-rt-"
_LOCK = "lock"
_NEW = "lock.new"
_PARENT_WATCH = str(Path(__file__).with_name("parent_watch.py"))
_GONE = (OSError, EOFError, P2PDaemonError)
"""Exceptions of a call to a p2pd that is dead or dying."""


@dataclass
class Calls:
    """Bytes of the calls that p2pd has carried for this process: of requests and answers ``given``
    to it for other peers, and ``taken`` from it, in all."""

    given: int = 0
    taken: int = 0


@dataclass(eq=False)
class _Stream:
    """A stream that a peer opened here, and the task of its handler."""

    peer: PeerId
    writer: asyncio.StreamWriter
    task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """End it from outside."""
        if self.task is not None:
            self.task.cancel()


class P2pDaemon:
    """p2pd of ``identity``. ``restarts`` counts how often it had to be started again."""

    def __init__(
        self,
        identity: Identity,
        settings: TransportSettings,
        journal: Journal,
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        self.restarts = 0
        self.outgrown = 0
        """Restarts because p2pd held more memory than ``p2pd_memory``."""
        self.slack: Callable[[], float] = lambda: 0.0
        """Seconds that this process ran late lately. Its child on the same machine gets the same
        time in addition to answer."""
        self._runtime = RuntimeDirectory()
        self.runtime = self._runtime.path
        """A directory 0700 for sockets, gone after :meth:`close`."""
        self._identity = identity
        self._settings = settings
        self._journal = journal
        self._rate_limit = RateLimitedLog(journal)
        self._tasks = Tasks("p2p", on_error)
        self._entrances: dict[str, Callable[[StreamInfo, Any, Any], Awaitable[None]]] = {}
        self.on_up: list[Callable[[P2P], Coroutine[Any, Any, None]]] = []
        """Awaited with the running hivemind P2P after every start and restart of the child."""
        self.book = AddressBook(self.peer_id)
        self.bootstrap = Bootstrap(self.connect, journal)
        self.established: Callable[[PeerId], bool] = lambda peer: False
        """Return True for a member of the run and for a peer that this one has worked with. Half
        of the connections and streams is for them."""
        self.refusals: Counter[str] = Counter()
        """Number of strangers' requests refused or connections ended, by kind: ``streams``,
        ``connections``, ``requests`` (too large, or too many bytes of them), ``memory`` (hung up to
        save memory)."""
        self.on_refusal: Callable[[PeerId], None] = lambda peer: None
        """Told of each peer that was refused."""
        most = min(links.MOST, inbound_limit(psutil.virtual_memory().total) * 3 // 2)
        self._links = Links(most, lambda peer: self.established(peer))
        self._requests = TokenBucket(UNARY_BYTES_PER_S, UNARY_BYTES)
        self._outgoing: dict[PeerId, list[asyncio.StreamWriter]] = {}
        """Streams to a peer that were opened here."""
        self._incoming: Counter[PeerId] = Counter()
        """Streams of each peer that are under way here."""
        self._streams = PlacesByPeer[_Stream](
            "streams", STREAMS, STREAMS_PER_PEER, lambda peer: self.established(peer)
        )
        self._relayed = PlacesByPeer[_Stream](
            "streams", RELAYED, RELAYED_PER_PEER, lambda peer: self.established(peer)
        )
        self.links: dict[PeerId, tuple[str, ...]] = {}
        """Peers p2pd has a connection to, with the multiaddrs of their ends of it; at most a few
        seconds old."""
        self.punched: set[PeerId] = set()
        """Peers with a punched connection, which exists now or in a moment."""
        self._up = asyncio.Event()
        # hivemind is not typed, and the parts of it that supervision needs (client and child
        # process) are private there.
        self._p2p: Any = None
        self._joining: asyncio.Task[None] | None = None
        self._addresses: tuple[str, ...] = ()
        self._ports = settings.p2p_port, settings.p2p_port
        self._said: deque[str] = deque(maxlen=100)
        self._overgrown = ""
        """The size of a child that was killed for it."""
        self.calls = Calls()
        self._kind = _watching_parent(
            self.runtime,
            self._said,
            settings.p2pd_memory,
            self.calls,
            self._heard,
            self._weigh,
        )

    @property
    def p2p(self) -> Any:
        """The hivemind P2P of the running child; another object after a restart. Raises
        NetworkFault while there is none."""
        if self._p2p is None:
            raise NetworkFault(
                "the p2p daemon is not running", "wait a moment; it is restarted by itself"
            )
        return self._p2p

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self.p2p._child.pid

    def addresses(self) -> list[str]:
        """Multiaddrs under which others may reach us, each ending in our PeerId. Refreshed every
        few seconds."""
        return list(self._addresses)

    @property
    def up(self) -> bool:
        """True while the child runs and answers."""
        return self._up.is_set()

    @property
    def port(self) -> int:
        """The TCP port it listens on; 0 before the start."""
        return self._ports[0]

    def how(self, peer: PeerId) -> Rung:
        """Rung of a tunnel through the connection to a peer; NONE if there is none."""
        ends = self.links.get(peer)
        if ends is None:
            return Rung.NONE
        if peer in self.punched:
            return Rung.PUNCHED
        if set(ends) & set(self.book.of(peer)):
            return Rung.TUNNEL
        return Rung.REVERSED

    def block(self, peer: PeerId) -> str:
        """The address block of the connection to a peer; "" where there is none."""
        return links.block(self.links.get(peer, ()))

    async def look(self) -> dict[PeerId, tuple[str, ...]]:
        """:attr:`links`, asked for now. Raises NetworkFault while p2pd is down."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await self.p2p.list_peers()
        except (*_GONE, TimeoutError) as e:
            raise NetworkFault(
                "the p2p daemon does not answer", "wait a moment; it is restarted by itself"
            ) from e
        before = self.links.keys()
        self.links = {PeerId(p.peer_id.to_base58()): _texts(p.addrs) for p in found}
        self.punched -= before - self.links.keys()
        return self.links

    def prefer(self, port: int) -> None:
        """Listen on this port if the settings leave it open and it is free; before
        :meth:`start`."""
        if port and not self._settings.p2p_port:
            with contextlib.suppress(NetworkFault):
                for host in [self._settings.host] if self._settings.host else wildcards():
                    check_free(host, port, "")
                    check_free(host, port, "", socket.SOCK_DGRAM)
                self._ports = port, port

    async def start(self, initial_peers: Sequence[str] = ()) -> None:
        """Start the child; connecting to ``initial_peers`` goes on in the background and may fail
        (see ``bootstrap``).

        Raises NetworkFault when a port is taken or p2pd does not start, OutOfResources where the
        runtime directory cannot be written.
        """
        for address in initial_peers:
            self.book.learn(split_multiaddr(address)[1], [address])
        self.bootstrap.results = dict.fromkeys(self.dialable(initial_peers), NOT_TRIED)
        _quiet_hivemind(self._journal)
        if self._identity.path is None:
            key = self.runtime / "key"
            key.touch(0o600)
            key.write_bytes(self._identity.key_file_bytes())
        try:
            p2p = await self._launch()
        except _GONE as e:
            cause = next(
                (line for line in self._said if "panic:" in line or "ERROR" in line), str(e)
            )
            raise NetworkFault(
                f"p2pd did not start: {cause}", "check transport.host and transport.announce"
            ) from e
        for callback in self.on_up:
            await callback(p2p)
        self._tasks.spawn(self._supervise(), "supervise", eternal=True)
        self._tasks.spawn(self._keep_looking(), "links", eternal=True)
        self._tasks.spawn(self._keep_small(), "memory", eternal=True)
        self._rejoin()

    async def close(self) -> None:
        """End the child and remove the sockets. Safe to call twice."""
        self._up.clear()
        await self._tasks.close()
        self._rate_limit.close()
        await self._end()
        self._runtime.close()

    def dialable(self, multiaddrs: Sequence[str]) -> list[str]:
        """The addresses that this peer dials: without QUIC ones where QUIC is off, unless there are
        no others, for then the reason is worth knowing."""
        usable = [a for a in multiaddrs if self._settings.quic or not is_quic(a)]
        return usable or list(multiaddrs)

    async def connect(
        self, multiaddrs: Sequence[str], timeout: float = CONNECT_TIMEOUT_S
    ) -> dict[str, str]:
        """Dial each multiaddr (which names its peer). Returns for each "" or the reason it failed;
        raises nothing."""

        async def one(text: str) -> str:
            try:
                address, peer = split_multiaddr(text)
                if peer not in self.links and await refused([text]):
                    return "nobody listens there"
                await self.reach(peer, timeout, (address,))
            except WireError as e:
                return str(e)
            except PeerFault as e:
                return e.reason
            self.book.learn(peer, [text])
            return ""

        return dict(zip(multiaddrs, await asyncio.gather(*map(one, multiaddrs)), strict=True))

    def add_stream(self, name: str, handler: StreamHandler, *, carrier: bool = False) -> None:
        """Call ``handler(peer, reader, writer)`` for each stream a peer opens under ``name``, also
        after restarts; before :meth:`start`.

        ``peer`` is proven by libp2p's handshake. The writer is closed when the handler returns or
        raises. A ``carrier`` opens streams for many peers behind it, so their number is limited by
        these peers.
        """
        places = self._streams
        if carrier:
            places = self._relayed

        async def host(stream: _Stream, reader: asyncio.StreamReader) -> None:
            try:
                await handler(stream.peer, reader, stream.writer)
            except (TuttiError, TimeoutError, *_GONE) as e:
                text = f"{name} of {short(stream.peer)}: {e}"
                self._rate_limit.emit(stream.peer, "transport", "stream-failed", text, "debug")

        def left(stream: _Stream) -> None:
            places.leave(stream)
            self._incoming -= Counter([stream.peer])
            stream.writer.close()

        async def enter(
            info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            stream = _Stream(PeerId(info.peer_id.to_base58()), writer)
            self._heard(stream.peer)
            taken = places.take(stream, stream.peer, links.block(_texts([info.addr])))
            if not taken:
                self._refuse(stream.peer, "streams")
                writer.close()
                return
            if taken.evicted is not None:
                self._refuse(taken.evicted.peer, "streams")
                taken.evicted.end()
            self._incoming[stream.peer] += 1
            stream.task = self._tasks.spawn(host(stream, reader), f"stream {short(stream.peer)}")
            # A task that is cancelled before its first step would close nothing itself.
            stream.task.add_done_callback(lambda _: left(stream))

        self._entrances[name] = enter

    def _heard(self, peer: PeerId) -> None:
        self._links.used(peer, time.monotonic())

    def _weigh(self, peer: PeerId, nbytes: int) -> None:
        """Count a request to a handler of the directory. Raises WireError for one that is too
        large, or comes too soon after others."""
        why = ""
        if nbytes > UNARY_BYTES:
            why = f"a request of {nbytes} bytes, {UNARY_BYTES} are allowed"
        elif not self._requests.allow(peer, time.monotonic(), nbytes):
            why = f"more than {UNARY_BYTES_PER_S} bytes of requests a second"
        if why:
            self._refuse(peer, "requests")
            raise WireError(why)

    def _refuse(self, peer: PeerId, kind: str) -> None:
        self.refusals[kind] += 1
        self.on_refusal(peer)

    async def open_stream(
        self,
        peer: PeerId,
        name: str,
        timeout: float = CONNECT_TIMEOUT_S,
        limit: int = STREAM_BUFFER,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to the handler ``name`` of ``peer``; the caller closes the writer.
        ``limit``: bytes; up to twice this number wait here unread before the sender has to wait.

        Waits for a restart that is going on. Raises PeerFault after ``timeout`` seconds, when the
        peer cannot be reached or has no such handler, and at once when our own p2pd dies meanwhile.
        """
        async with self._asked(peer, timeout, f"stream {name}"):
            if known := self.book.of(peer):
                # Nothing new is dialled when p2pd has a connection already, also one the peer made
                # from behind a NAT.
                with contextlib.suppress(ControlFailure, PeerFault, TimeoutError, ValueError):
                    async with asyncio.timeout(timeout / 2):
                        await self._dial(peer, known)
            self._heard(peer)
            reader, writer = await self._open(peer, name, limit)
            self._outgoing.setdefault(peer, []).append(writer)
            return reader, writer

    async def reach(
        self, peer: PeerId, timeout: float = CONNECT_TIMEOUT_S, at: Sequence[str] = ()
    ) -> None:
        """Have a connection to ``peer``: the present one, else a new one to the addresses in ``at``
        (without PeerId; they are not remembered), or to learned ones. Raises PeerFault."""
        known = tuple(at) or self.book.of(peer)
        if not known:
            raise PeerFault(peer, "no address of it is known")
        async with self._asked(peer, timeout, "connection"):
            there = peer in self.links
            await self._dial(peer, known)
            await self.look()
            if not there:
                self._links.dialled(peer)

    @contextlib.asynccontextmanager
    async def _asked(self, peer: PeerId, timeout: float, what: str) -> AsyncIterator[None]:
        """Context of a question to p2pd, entered once p2pd is up. Raises PeerFault if the question
        fails, and if there is no ``what`` after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
                yield
        except TimeoutError as e:
            raise PeerFault(peer, f"no {what} in {timeout:g} s") from e
        except ControlFailure as e:
            raise PeerFault(peer, f"cannot be reached: {_short(e)}") from e
        except ValueError as e:
            raise PeerFault(peer, f"not a PeerId: {e}") from e
        except (*_GONE, NetworkFault) as e:
            raise PeerFault(peer, "our own p2p daemon went away") from e

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect p2pd to ``peer``, over TCP first. Left alone p2pd prefers QUIC, which carries
        half the bytes a second and notices a dead peer late; it is used only where the settings
        allow it. Raises PeerFault if all addresses are QUIC's and the settings do not allow it."""
        addresses = without_own_bridges(addresses, host_of)
        who = PeerID.from_base58(peer)
        tcp = [a for a in addresses if not is_quic(a)]
        if not self._settings.quic and not tcp and addresses:
            raise PeerFault(peer, "only QUIC addresses of it are known; transport.quic is off here")
        if 0 < len(tcp) < len(addresses) and self._settings.quic:
            with contextlib.suppress(ControlFailure, TimeoutError):
                async with asyncio.timeout(TCP_FIRST_S):
                    await self.p2p._client.connect(who, [Multiaddr(a) for a in tcp])
                return
        usable = tcp
        if self._settings.quic:
            usable = addresses
        await self.p2p._client.connect(who, [Multiaddr(a) for a in usable])

    async def _open(
        self, peer: PeerId, name: str, limit: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(
            str(self.p2p.daemon_listen_maddr["unix"]), limit=limit
        )
        try:
            ask = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[name])
            await write_pbmsg(
                writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=ask)
            )
            answer: Any = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except BaseException:  # also cancelled
            writer.close()
            raise
        return reader, writer

    async def _launch(self) -> Any:
        """A child that answers and has every handler. Raises NetworkFault for taken ports,
        OutOfResources where its configuration cannot be written, one of ``_GONE`` otherwise."""
        self._configure()
        settings = self._settings
        tcp, udp = self._ports
        local = is_loopback(settings.host)
        if settings.host:
            hosts = [settings.host]
        else:
            hosts = list(wildcards())
        if not tcp and len(hosts) > 1:
            # One port for all families and transports: what others are told must not depend on how
            # they come.
            tcp = udp = free_port(hosts)
        for host in hosts:
            check_free(host, tcp, "transport.p2p_port")
            if settings.quic and not local:
                check_free(host, udp, "transport.p2p_port", socket.SOCK_DGRAM)
        quic_port = None
        if settings.quic and not local:
            quic_port = udp
        listen = listen_addresses(hosts, tcp, quic_port)
        made: Any = await self._kind.create(
            host_maddrs=listen,
            announce_maddrs=self._announced() or None,
            identity_path=str(self._identity.path or self.runtime / "key"),
            check_if_identity_free=False,
            # Port mapping, relaying and hole punching are tutti's own (node/reach): p2pd's relays
            # are found after minutes or not at all, and its mapping knows neither the gRPC port nor
            # a router that comes up later.
            use_relay=False,
            nat_port_map=False,
            auto_nat=False,
            dht_mode="server",
            startup_timeout=LAUNCH_S,
        )
        made._client.control._pending_calls = _PendingCalls()
        made._client.control._handler_tasks = _HandlerTasks()
        self._p2p = made
        try:
            await self._identify(made)
            for name, entrance in self._entrances.items():
                await made.add_binary_stream_handler(name, entrance)
        except BaseException:  # also cancelled
            await self._end()
            raise
        self._up.set()
        return made

    def _configure(self) -> None:
        """Write p2pd's configuration, at every launch: cleaners of /tmp remove files that nobody
        has read for days."""
        path = self.runtime / CONFIGURATION
        try:
            path.write_text(NO_RELAY, encoding="utf-8")
        except OSError as e:
            raise OutOfResources(
                f"{path} cannot be written: {e.strerror}",
                "free space there, or set TMPDIR to another directory",
            ) from e

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LINKS_EVERY_S)
            with contextlib.suppress(NetworkFault):
                await self._mind_links(await self.look())

    async def _keep_small(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_EVERY_S)
            with contextlib.suppress(NetworkFault):
                await self._mind_memory()

    async def _mind_links(self, present: dict[PeerId, tuple[str, ...]]) -> None:
        """End the connections of strangers that nobody uses or that take too many places."""
        outgoing = {p: [w for w in ws if not w.is_closing()] for p, ws in self._outgoing.items()}
        self._outgoing = {peer: writers for peer, writers in outgoing.items() if writers}
        busy = {*self._outgoing, *self._incoming}
        await self._hang_up(self._links.look(present, busy, time.monotonic()))

    async def _mind_memory(self) -> None:
        """Hang up on strangers while p2pd is short of memory; end it when it holds too much."""
        limit = self._settings.p2pd_memory
        held = resident(self.pid)
        if held > limit:
            self._overgrown = f"held {held >> 20} MiB of memory, {limit >> 20} are allowed"
            self.p2p._child.kill()
        elif held > HANG_UP * limit:
            if held > HANG_UP_ALL * limit:
                before = math.inf
            else:
                before = time.monotonic() - MUTE_S
            await self._hang_up(dict.fromkeys(self._links.strangers(before), "memory"))

    async def _hang_up(self, ended: dict[PeerId, str]) -> None:
        """End connections. ``ended``: reasons of :meth:`Links.look`, or ``memory``, by peer."""
        for peer, why in ended.items():
            if why != "idle":
                self._refuse(peer, "connections" if why == "places" else why)
            with contextlib.suppress(ControlFailure, ValueError, TimeoutError, *_GONE):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self.p2p._client.disconnect(PeerID.from_base58(peer))

    def _announced(self) -> list[str]:
        if not self._settings.p2p_port:
            return []
        hosts = dict.fromkeys(a.rpartition(":")[0].strip("[]") for a in self._settings.announce)
        return [multiaddr(host, self._settings.p2p_port) for host in hosts]

    async def _identify(self, p2p: Any) -> None:
        async with asyncio.timeout(HEALTH_TIMEOUT_S + self.slack()):
            peer, found = await p2p._client.identify()
        if peer.to_base58() != self.peer_id:
            raise LocalFault(
                f"p2pd runs as {peer}, not as {self.peer_id}", "check the identity key file"
            )
        # p2pd leaves its PeerId off the addresses it was told to announce.
        mark = f"/p2p/{self.peer_id}"
        self._addresses = tuple(a if a.endswith(mark) else a + mark for a in _texts(found))
        if not self._settings.p2p_port:
            tcp = next((int(p) for a in self._addresses if (p := part_of(a, "tcp"))), 0)
            udp = next((int(p) for a in self._addresses if (p := part_of(a, "udp"))), 0)
            self._ports = self._ports[0] or tcp, self._ports[1] or udp

    async def _end(self) -> None:
        self._up.clear()
        p2p = self._p2p
        self._p2p = None
        if p2p is None:
            return
        try:
            async with asyncio.timeout(3.0):
                await p2p.shutdown()
        except TimeoutError:
            p2p._child.kill()
            await p2p._child.wait()

    async def _supervise(self) -> None:
        delay = FIRST_DELAY_S
        while True:
            began = time.monotonic()
            why = await self._death(self.p2p)
            await self._end()
            self.restarts += 1
            if self._overgrown:
                why = self._overgrown
                self._overgrown = ""
                self.outgrown += 1
            self._journal.emit(
                "transport",
                "p2pd-died",
                f"p2pd {why}; starting it again",
                level="warning",
                restarts=self.restarts,
            )
            if time.monotonic() - began > STABLE_S:
                delay = FIRST_DELAY_S
            p2p = await self._revive(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)
            self._journal.emit("transport", "p2pd-up", "p2pd runs again", restarts=self.restarts)
            for number, callback in enumerate(self.on_up):
                self._tasks.spawn(callback(p2p), f"on-up {number}")
            self._rejoin()

    async def _revive(self, delay: float) -> Any:
        for attempt in itertools.count():
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)
            try:
                return await self._launch()
            except (LocalFault, TimeoutError, *_GONE) as e:
                self._journal.emit(
                    "transport",
                    "p2pd-down",
                    f"p2pd does not start: {e}",
                    level="error",
                    attempt=attempt,
                )
                if attempt == 5 and not self._settings.p2p_port:
                    # Somebody took the port that was only ours by chance: any other will do, the
                    # directory will tell.
                    self._ports = 0, 0

    async def _death(self, p2p: Any) -> str:
        """Returns how the child died, once it has; a child that does not answer is killed first."""
        end = self._tasks.spawn(p2p._child.wait(), "child")
        silent = 0
        while True:
            done, _ = await asyncio.wait({end}, timeout=HEALTH_EVERY_S)
            if done:
                return f"ended with code {end.result()}"
            if p2p._client.control._read_task.done():
                p2p._child.kill()
                await end
                return "was not listened to any more"
            try:
                await self._identify(p2p)
                silent = 0
            except TimeoutError:
                silent += 1  # one may be a busy machine
                if silent >= HEALTH_TIMES:
                    p2p._child.kill()
                    await end
                    return f"did not answer {silent} times for {HEALTH_TIMEOUT_S:g} s and more"
            except _GONE:
                continue  # it is dying; the wait above tells when it is dead

    def _rejoin(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
        self._joining = self._tasks.spawn(self.bootstrap.run(), "bootstrap")


class Bootstrap:
    """``results``: each initial peer's multiaddr, with "" when connected, else why not (yet)."""

    def __init__(
        self, connect: Callable[[Sequence[str]], Awaitable[dict[str, str]]], journal: Journal
    ) -> None:
        self._connect = connect
        self._journal = journal
        self.results: dict[str, str] = {}

    async def run(self) -> None:
        """Dial every initial peer, and those that failed again and again; returns when all have
        answered."""
        delay = FIRST_RETRY_S
        missing = list(self.results)
        while missing:
            found = await self._connect(missing)
            for address, why in found.items():
                self._note(address, why)
            missing = [address for address, why in found.items() if why]
            if missing:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_RETRY_S)

    def _note(self, address: str, why: str) -> None:
        before = self.results[address]
        if before == NOT_TRIED or bool(why) != bool(before):
            text = f"connected to initial peer {address}"
            level = "info"
            if why:
                text = f"cannot reach initial peer {address}: {why}"
                level = "warning"
            self._journal.emit("transport", "bootstrap", text, level=level, address=address)
        # "backoff" only says that it was tried a moment ago; the earlier reason tells more.
        told = bool(before) and before != NOT_TRIED
        if "dial backoff" in why and told:
            return
        self.results[address] = why


class RuntimeDirectory:
    """A directory of our own for unix sockets. ``path`` is 0700 and exists until :meth:`close`; one
    of a daemon that was killed is swept by the next to start."""

    def __init__(self) -> None:
        made = tempfile.mkdtemp(prefix=_PREFIX)
        if not fits_socket(Path(made), NAME_BYTES):
            os.rmdir(made)
            made = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
        self.path = Path(made)
        # The lock goes when its holder does, however that ends, so a directory that can be locked
        # belongs to nobody. A child process may not inherit it: os.open makes descriptors that are
        # closed on exec. It gets its name once it is locked: another daemon that starts meanwhile
        # would sweep it.
        self._lock = os.open(self.path / _NEW, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / _NEW, self.path / _LOCK)
        _sweep(self.path.parent)

    def close(self) -> None:
        """Remove the directory. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(directory: Path) -> None:
    for other in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not other.is_symlink() and other.stat().st_uid == os.getuid():
                # Without a lock file it is just being made, or none of ours.
                lock = os.open(other / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other, ignore_errors=True)
                finally:
                    os.close(lock)


def _watching_parent(
    runtime: Path,
    said: deque[str],
    memory: int,
    calls: Calls,
    heard: Callable[[PeerId], None],
    weigh: Callable[[PeerId, int], None],
) -> type[P2P]:
    """hivemind's P2P with a child of our kind. ``memory``: its limit in bytes. ``calls`` counts
    the bytes of calls. ``heard(peer)`` is called at every request to or from a peer;
    ``weigh(peer, nbytes)`` raises WireError for a request that is not to be parsed."""

    class Watching(P2P):
        """Sockets in our directory, and a child that dies with us and not of our Ctrl-C."""

        _UNIX_SOCKET_PREFIX = f"/unix{runtime}/"

        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            return [
                sys.executable,
                "-I",
                "-S",
                _PARENT_WATCH,
                str(os.getpid()),
                # From this number of bytes on, Go's collector works harder and gives memory back.
                "/usr/bin/env",
                f"GOMEMLIMIT={round(HANG_UP * memory)}",
                # Below that it may let the heap of a few MiB triple before it looks for garbage.
                "GOGC=200",
                *P2P._make_process_args(*args, **kwargs),
                "-f",
                str(runtime / CONFIGURATION),
            ]

        @staticmethod
        def _log_p2pd_message(line: str) -> None:
            said.append(line)

        async def _add_protobuf_unary_handler(
            self, handle_name: str, handler: Any, input_protobuf_type: Any, balanced: bool = False
        ) -> None:
            async def served(request: bytes, caller: PeerID) -> bytes:
                peer = PeerId(caller.to_base58())
                heard(peer)
                calls.taken += len(request)
                weigh(peer, len(request))
                me: Any = self.peer_id
                context = P2PContext(handle_name, me, caller)
                found = await handler(input_protobuf_type.FromString(request), context)
                answer = found.SerializeToString()
                calls.given += len(answer)
                return answer

            client: Any = self._client
            await client.add_unary_handler(handle_name, served, balanced=balanced)

        async def _call_unary_protobuf_handler(
            self, peer_id: PeerID, handle_name: str, input: Any, output_protobuf_type: Any
        ) -> Any:
            heard(PeerId(peer_id.to_base58()))
            client: Any = self._client
            request = input.SerializeToString()
            calls.given += len(request)
            answer = await client.call_unary_handler(peer_id, handle_name, request)
            calls.taken += len(answer)
            return output_protobuf_type.FromString(answer)

    return Watching


def listen_addresses(hosts: Sequence[str], tcp: int, udp: int | None) -> list[str]:
    """Multiaddrs for p2pd to listen on. ``udp``: the port of QUIC; None: no QUIC. It gets through
    some firewalls that TCP does not. On one machine there is none, and TCP is twice as fast."""
    quic = []
    if udp is not None:
        quic = [multiaddr(host, udp, "quic") for host in hosts]
    return [*(multiaddr(host, tcp) for host in hosts), *quic]


def _texts(addresses: Iterable[Multiaddr]) -> tuple[str, ...]:
    """Addresses that p2pd has told, as text, without those that cannot be read: hivemind does not
    know every protocol of p2pd's, such as WebTransport, and strangers choose their addresses."""
    found: list[str] = []
    for address in addresses:
        with contextlib.suppress(ValueError, TypeError, LookupError):
            found.append(str(address))
    return tuple(found)


def _short(error: BaseException) -> str:
    """p2pd's reason in one line: of Go's chain of errors the end, which names the cause."""
    text = (
        str(error).replace("Connect failed. msg=", "").rpartition("all dials failed")[2].strip()
        or type(error).__name__
    )
    return "; ".join(line.strip(" *\t") for line in text.splitlines() if line.strip())[:300]


class _PendingCalls(dict[Any, "asyncio.Future[Any]"]):
    """Calls of hivemind that p2pd has not answered yet. hivemind sets the result also of a call
    that has just been cancelled, which would end the task that reads all answers; so a cancelled
    call counts as absent."""

    def __contains__(self, call: object) -> bool:
        return (found := self.get(call)) is not None and not found.done()


class _HandlerTasks(dict[Any, "asyncio.Task[Any]"]):
    """hivemind's answers under way, by the ids that the askers chose. hivemind removes an answer in
    its last line. An answer that was cancelled before its first line never gets there, and would
    stay with its request of up to 4 MiB; nor does one to a request for an unknown protocol. So here
    an answer goes when its task has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: set[asyncio.Task[Any]] = set()
        """All of them: of two with the same id the dictionary has the second alone, and the event
        loop keeps no task alive."""

    def __setitem__(self, call: Any, answer: "asyncio.Task[Any]") -> None:
        super().__setitem__(call, answer)
        self._under_way.add(answer)
        answer.add_done_callback(lambda ended: self._ended(call, ended))

    def pop(self, call: Any, default: Any = None, /) -> Any:
        """Return the answer, which stays until its task has ended: it may be another one, to a
        request with the same id. Raises nothing."""
        return self.get(call, default)

    def _ended(self, call: Any, answer: "asyncio.Task[Any]") -> None:
        self._under_way.discard(answer)
        if self.get(call) is answer:
            del self[call]
        if not answer.cancelled():
            # An exception that nobody has asked for would be a line for each request of a stranger.
            answer.exception()


def _quiet_hivemind(journal: Journal) -> None:
    """hivemind and p2pd write for developers; their warnings go to the journal's debug level, not
    to the terminal."""
    use_hivemind_log_handler("nowhere")
    logger = logging.getLogger("hivemind")
    logger.propagate = False
    logger.handlers[:] = [JournalHandler(journal, quiet=True)]
    # Its warning names the protocol of a request: a stranger decides what it says and how often.
    logging.getLogger("hivemind.p2p.p2p_daemon_bindings.control").setLevel(logging.ERROR)
