"""Reachability of this peer, and the measures it takes: asks peers to dial it, keeps connections to
peers that can be dialled, finds relays while it cannot be dialled, and relays for others while it
can. Enters: peers' records in the directory, their reports. Leaves: addresses to announce,
connections of p2pd. Never: a gRPC channel (that is :mod:`node.transport.ways.lines`)."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass

from node.core.addresses import Scope, in_turns, scope
from node.core.errors import NetworkFault, PeerFault
from node.core.ids import PeerId, short
from node.core.newest import Newest
from node.core.tasks import Tasks
from node.identity.faults import PEERS_KEPT
from node.reach.interfaces import InterfaceKind, address_kinds, is_loopback, own_addresses
from node.reach.ladder import Outside, Rung
from node.reach.portmap import Mapping, PortMapper
from node.reach.settings import ReachSettings
from node.reach.standing import Reach, ReachReport, Standing
from node.telemetry.events import Journal
from node.transport.addresses import host_of, ip_of, join_host, multiaddr
from node.transport.p2p import P2pDaemon
from node.transport.settings import TransportSettings
from protos.ask_pb2 import Answer, Ask, AskReach

LOOK_S = 1.0
"""Seconds between two looks at the measures to take."""
COMPANY = 128
"""Peers to which a libp2p connection is kept."""
CONNECT_S = 8.0
AGAIN_S = 4.0
"""First pause, in seconds, after a peer could not be dialled; it doubles with every failure."""
LONGEST_S = 300.0
"""Longest pause, in seconds, after a peer could not be dialled."""
CUT_OFF_S = 15.0
"""The longest pause while this peer has no connection at all: then this machine's network is down,
and all others are there when it comes back."""
DIAL_BACK_S = 3.0
"""Seconds for a dial to a port of a peer that asks whether it can be dialled."""
OBSERVERS_KEPT = 16
"""Peers that can tell how they see a connection, which are remembered."""
PORTS = 4
"""Ports that one question may ask to be dialled."""
SIX_PUNCHED = 2
"""IPv6 addresses of this peer that others are told for hole punching. They try four in all."""


@dataclass(frozen=True)
class Known:
    """A peer's record of itself in the directory. ``room``: places it has left as a relay,
    ``rate``: bytes a second it has left for one circuit more, 0 for no limit."""

    addresses: tuple[str, ...] = ()
    standing: Standing = Standing.UNKNOWN
    room: int = 0
    rate: float = 0.0


@dataclass
class _Dials:
    """Attempts to connect to one peer."""

    failures: int = 0
    next: float = 0.0
    busy: bool = False


class Reachable:
    """``ask(peer, question)`` raises PeerFault; ``grpc_port()`` is where gRPC listens,
    ``bypass_port()`` where connections past libp2p arrive, 0 for nowhere; ``secret`` is shown to
    the router, which lets its holder renew mappings after a crash."""

    def __init__(
        self,
        p2p: P2pDaemon,
        transport: TransportSettings,
        settings: ReachSettings,
        journal: Journal,
        ask: Callable[[PeerId, Ask, float], Awaitable[Answer]],
        grpc_port: Callable[[], int],
        secret: bytes = b"",
        on_error: Callable[[str, BaseException], None] | None = None,
        bypass_port: Callable[[], int] = lambda: 0,
    ) -> None:
        self._p2p = p2p
        self._transport = transport
        self._settings = settings
        self._journal = journal
        self._ask = ask
        self._grpc_port = grpc_port
        self._bypass_port = bypass_port
        self._observers: Newest[PeerId, tuple[str, int]] = Newest(OBSERVERS_KEPT)
        self._reach = Reach()
        self.known: Newest[PeerId, Known] = Newest(PEERS_KEPT)
        """Latest record of each peer in the directory."""
        self._dials: Newest[PeerId, _Dials] = Newest(PEERS_KEPT)
        self._tasks = Tasks("reach", on_error)
        self.local = is_loopback(transport.host)
        """True if only this machine can reach this peer; it then takes no measures."""
        self.mapper = PortMapper(journal, self._mapped, on_error, secret=secret)
        self._was = Standing.UNKNOWN
        self.on_change: list[Callable[[], None]] = []
        """Told when the standing or an address changes."""

    def start(self) -> None:
        """Begin to take measures. A peer on loopback only keeps its connections."""
        self._tasks.spawn(self._run(), "run", eternal=True)

    def _mapped(self) -> None:
        self._reach.listens(*self._external())
        self.changed()

    async def close(self) -> None:
        await self._tasks.close()
        await self.mapper.close()

    # ----------------------------------------------------------- knowledge of others

    def learn(self, peer: PeerId, known: Known) -> bool:
        """Take in the directory's record of a peer. Return True if its addresses or its standing
        differ from the record before."""
        old = self.known.get(peer)
        self.known[peer] = known
        if old is None or old.addresses != known.addresses or old.standing != known.standing:
            self._dials.pop(peer, None)
            return old is not None
        return False

    @property
    def standing(self) -> Standing:
        """Reachability of this peer: whether others can dial it. On one machine every peer can."""
        if self.local:
            return Standing.OPEN
        return self._reach.standing(time.monotonic())

    def relays(self) -> list[PeerId]:
        """Peers that would relay for this one and that it is connected to."""
        return [p for p, k in self.known.items() if k.room > 0 and p in self._p2p.links]

    def words(self, relays: int) -> str:
        """One line for people: how others reach this peer. ``relays``: how many reservations it
        holds."""
        if self.local:
            return "on this machine only"
        if self.standing is Standing.OPEN:
            port = "tcp", self._p2p.port
            how = [m.how for m in self._mappings() if (m.protocol, m.internal) == port]
            if how:
                return f"direct, by a port that the router maps ({how[0]})"
            return "direct"
        if self.standing is Standing.UNKNOWN:
            return "not known yet: nobody has tried to dial this peer"
        punched = sum(self._p2p.how(p) is Rung.PUNCHED for p in self._p2p.links)
        parts = list[str]()
        if relays:
            parts.append(f"relayed by {relays}")
        if punched:
            parts.append(f"punched with {punched}")
        return (
            ", ".join(parts) or "outbound only: others cannot dial this peer, and no relay is known"
        )

    # ----------------------------------------------------------- addresses

    def multiaddrs(self) -> list[str]:
        """Multiaddrs under which others may reach this peer, each with its PeerId, the most likely
        of each scope and family first."""
        own = self._p2p.addresses()
        if self.local:
            return own
        mark = f"/p2p/{self._p2p.peer_id}"
        port = self._p2p.port
        more = [
            multiaddr(m.host, m.external, "tcp" if m.protocol == "tcp" else "quic") + mark
            for m in self._mappings()
            if m.internal == port
        ]
        if self.standing is Standing.OPEN:
            # A port that was mapped by hand: those who see us there have dialled it.
            outer = self._external()[0]
            more += [
                multiaddr(host, outer) + mark
                for host in self._reach.public(time.monotonic(), outer)
            ]
        outside = [a for a in own if scope(host_of(a)) < Scope.LINK]
        kinds = address_kinds()
        ranked = sorted(dict.fromkeys([*more, *outside]), key=lambda a: _rank(a, kinds))
        return in_turns(ranked, host_of) or own

    def targets(self) -> tuple[list[str], list[str]]:
        """host:port that others should dial for gRPC, the most likely of each scope and family
        first; and the ones among them that the router maps."""
        settings = self._transport
        port = self._grpc_port()
        now = time.monotonic()
        if settings.force_tunnel:
            return [], []
        if settings.announce:
            return list(settings.announce), []
        if settings.host not in ("", "0.0.0.0", "::"):
            return [join_host(settings.host, port)], []
        mapped = [
            join_host(m.host, m.external)
            for m in self._mappings()
            if (m.protocol, m.internal) == ("tcp", port)
        ]
        hosts = [h for h in own_addresses() if settings.host != "0.0.0.0" or ":" not in h]
        usual = [join_host(h, port) for h in hosts]
        if self._reach.bulk_open(now):
            outer = self._external()[1]
            usual = [*(join_host(h, outer) for h in self._reach.public(now, outer)), *usual]
        loop = "::1" if settings.host == "::" else "127.0.0.1"
        every = in_turns(dict.fromkeys([*mapped, *usual]), lambda at: at.rpartition(":")[0])
        return every or [join_host(loop, port)], mapped

    def seen(self) -> list[str]:
        """Multiaddrs at which others see this peer's libp2p port, public ones: for hole punching.
        At most two of IPv6, first the one that this machine has and sends from."""
        places = self._reach.seen(time.monotonic())
        # A connection over QUIC has no TCP port.
        seen = [(host, port) for host, port in places if port and scope(host) is Scope.PUBLIC]
        own = [a for a in own_addresses() if ":" in a and scope(a) is Scope.PUBLIC]
        six = [
            *(at for at in seen if at[0] in own),
            *((a, self._p2p.port) for a in own),
            *(at for at in seen if ":" in at[0]),
        ]
        four = [at for at in seen if ":" not in at[0]]
        told = [*list(dict.fromkeys(six))[:SIX_PUNCHED], *four]
        return [multiaddr(*at) for at in in_turns(told, lambda at: at[0])]

    def moving_ports(self) -> bool:
        """Return True if the router gives every connection another port (address-dependent
        mapping): nothing can be punched then."""
        return self._reach.moving_ports(time.monotonic())

    def _proven(self) -> tuple[object, ...]:
        """What others have told about this peer's addresses, as far as it is used."""
        now = time.monotonic()
        public = [frozenset(self._reach.public(now, port)) for port in self._external()]
        return frozenset(self.seen()), *public

    def _mappings(self) -> list[Mapping]:
        # A router below a second router maps to an address that nobody outside can dial.
        return [m for m in self.mapper.mappings if scope(m.host) is Scope.PUBLIC]

    def _external(self) -> tuple[int, int]:
        """The libp2p and the gRPC port as others would dial them."""
        outside = {m.internal: m.external for m in self._mappings() if m.protocol == "tcp"}
        p2p = self._p2p.port
        grpc = self._grpc_port()
        return outside.get(p2p, p2p), outside.get(grpc, grpc)

    def bypass_outside(self) -> int:
        """The port for connections past libp2p, as others would dial it; 0 for none."""
        port = self._bypass_port()
        outside = {m.internal: m.external for m in self._mappings() if m.protocol == "tcp"}
        return outside.get(port, port)

    def observers(self) -> list[tuple[str, int]]:
        """Public addresses of peers that tell a connection where it comes from, one for each family
        of addresses, the newest first."""
        found = dict[bool, tuple[str, int]]()
        for host, port in reversed(self._observers.values()):
            found.setdefault(":" in host, (host, port))
        return list(found.values())

    def outside(self) -> Outside:
        """See :class:`~node.reach.ladder.Outside`."""
        return Outside(
            listens=bool(self._bypass_port()),
            closed=self.standing is Standing.CLOSED,
            keeps_ports=not self.moving_ports(),
            seen_by=bool(self._observers),
            punch=self._settings.punch and not self.local,
        )

    # ----------------------------------------------------------- measures

    async def _run(self) -> None:
        # A peer with a public IPv4 address of its own has no router that could map to it.
        routed = not any(":" not in a and scope(a) is Scope.PUBLIC for a in own_addresses())
        if self._settings.map_ports and routed and not self.local:
            await self.mapper.start()
        while True:
            if self._p2p.up and not self.local:  # it may have come up at another port
                p2p = self._p2p.port
                wanted = [("tcp", p2p)]
                if self._transport.quic:
                    wanted.append(("udp", p2p))
                wanted.append(("tcp", self._grpc_port()))
                if bypass := self._bypass_port():
                    wanted.append(("tcp", bypass))
                self.mapper.want(wanted)
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            links = self._p2p.links
            self._keep_company(links.keys(), now)
            if self.local:
                continue
            self._reach.listens(*self._external())
            for peer in self._reach.whom_to_ask(links, now):
                self._tasks.spawn(self._be_dialled(peer, links[peer]), f"reach {short(peer)}")
            standing = self.standing
            if standing is not self._was:
                self._was = standing
                self._journal.emit(
                    "transport", "standing", _STANDING[standing], standing=standing.value
                )
                self.changed()

    def changed(self) -> None:
        """Call the listeners for a change in this peer's reachability."""
        for callback in self.on_change:
            callback()

    def _keep_company(self, connected: Container[PeerId], now: float) -> None:
        """Connect to peers that can be dialled: a peer that cannot be dialled is reached over the
        connections it makes."""
        last = sorted(self.known.items(), key=lambda one: one[1].standing is Standing.OPEN)
        for peer, known in last[-COMPANY:]:
            if peer in connected or not known.addresses:
                self._dials.pop(peer, None)
                continue
            dials = self._dials.setdefault(peer, _Dials())
            if not dials.busy and now >= dials.next:
                dials.busy = True
                self._tasks.spawn(self._connect(peer, known, dials), f"connect {short(peer)}")

    async def _connect(self, peer: PeerId, known: Known, dials: _Dials) -> None:
        try:
            await self.connect(peer)
        except PeerFault:
            # A peer that others cannot dial either is worth rare tries: it may be on this LAN.
            if known.standing is Standing.CLOSED:
                dials.failures += 3
            else:
                dials.failures += 1
            longest_s = CUT_OFF_S
            if self._p2p.links:
                longest_s = LONGEST_S
            pause_s = min(longest_s, AGAIN_S * 2.0 ** (dials.failures - 1))
            dials.next = time.monotonic() + pause_s
        finally:
            dials.busy = False

    async def connect(self, peer: PeerId) -> None:
        """A libp2p connection to the addresses that the peer announces. Raises PeerFault."""
        if not self.known.get(peer, Known()).addresses:
            raise PeerFault(peer, "it announces no address")
        await self._p2p.reach(peer, CONNECT_S)

    async def _be_dialled(self, peer: PeerId, ends: Sequence[str]) -> None:
        """Ask a peer for the address at which it sees this peer, and for the ports that it can dial
        there."""
        ports = self._external()
        try:
            answer = await self._ask(peer, Ask(reach=AskReach(ports=ports)), 2 * DIAL_BACK_S)
        except PeerFault:
            return
        if (place := ip_of(answer.reach.seen)) is None:  # or it is no answer to that question
            return
        host, port = place
        self._note_observer(peer, ends, answer.reach.bypass)
        far = scope(host) is Scope.PUBLIC and any(scope(host_of(e)) is Scope.PUBLIC for e in ends)
        found = frozenset(answer.reach.open) & frozenset(ports)
        if scope(host) <= Scope.PRIVATE:
            before = self._proven()
            self._reach.reported(ReachReport(peer, host, port, found, far, time.monotonic()))
            if self._proven() != before:
                self.changed()

    def _note_observer(self, peer: PeerId, ends: Sequence[str], port: int) -> None:
        """Remember a peer that can tell how it sees connections to this port of it."""
        hosts = [
            h for h in map(host_of, ends) if scope(h) is Scope.PUBLIC and ip_of(multiaddr(h, 1))
        ]
        if hosts and 0 < port < 1 << 16:
            self._observers[peer] = hosts[0], port

    async def host(self, peer: PeerId) -> str:
        """The address of the peer's end of its present libp2p connection, if it can be dialled.
        Raises PeerFault."""
        seen = await self._end_of(peer)
        host = host_of(seen)
        widest = Scope.PRIVATE
        if self.local:
            widest = Scope.LOOPBACK
        if not host or scope(host) > widest or self._is_carried_here(peer, host):
            raise PeerFault(peer, "no libp2p connection to an address of it")
        return host

    def _is_carried_here(self, peer: PeerId, host: str) -> bool:
        """Return True for the end of a punched connection that this process carries to p2pd: an
        address of this very machine, where p2pd listens at one of them only."""
        return self._p2p.how(peer) is Rung.PUNCHED and host in own_addresses()

    async def _end_of(self, peer: PeerId) -> str:
        """Multiaddr of the peer's end of its present connection, "" for none; over TCP where there
        are several."""
        ends = self._p2p.links.get(peer)
        if ends is None:
            with contextlib.suppress(NetworkFault):
                ends = (await self._p2p.look()).get(peer)
        return next((e for e in ends or () if "/tcp/" in e), next(iter(ends or ()), ""))

    async def dialled(self, peer: PeerId, ports: Sequence[int]) -> tuple[str, list[int]]:
        """Address at which this peer sees ``peer`` (a multiaddr, "" for none), and the TCP ports
        among ``ports`` that accept a connection there.

        Only the address of the peer's present connection is dialled, so no peer can make us dial
        others.
        """
        seen = await self._end_of(peer)
        host = host_of(seen)
        if not host or scope(host) > Scope.PRIVATE or self._is_carried_here(peer, host):
            # A punched connection comes to p2pd from this very machine, and its ports are nobody's
            # business.
            return "", []
        asked = [p for p in dict.fromkeys(ports) if 0 < p < 1 << 16][:PORTS]
        found = await asyncio.gather(*(_accepts(host, port) for port in asked))
        return seen, [port for port, good in zip(asked, found, strict=True) if good]


_STANDING = {
    Standing.UNKNOWN: "nobody has tried to dial this peer yet",
    Standing.OPEN: "other peers can dial this peer",
    Standing.CLOSED: "other peers cannot dial this peer: it is reached over connections that it "
    "makes, and through relays",
}


def _rank(address: str, kinds: dict[str, InterfaceKind]) -> tuple[int, int, bool, bool]:
    host = host_of(address)
    # An address that no interface had at the last look: mapped, seen by others, or new.
    kind = kinds.get(host, InterfaceKind.OTHER)
    return scope(host), kind, "/tcp/" not in address, ":" in host


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(DIAL_BACK_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
