"""Peers of swarms on this LAN: DNS-SD over mDNS, announced by daemons, browsed by joiners. Enters:
this daemon's announcement, records that any host of the LAN sends. Leaves: addresses to try. Never:
a connection, or trust. Noise proves the identity of a peer at an address that was found here.
"""

import asyncio
import contextlib
import ipaddress
import logging
import random
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psutil
import zeroconf
from zeroconf import RecordUpdate, RecordUpdateListener
from zeroconf._dns import DNSPointer, DNSQuestion
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from node.core.errors import NetworkFault, WireError
from node.core.tasks import Tasks
from node.identity.keys import public_key_of
from node.reach.interfaces import InterfaceKind, kind_of
from node.telemetry.events import Journal, JournalHandler

TYPE = "_tutti._tcp.local."
VERSION = "1"
"""Version of the TXT record: peers that write another one are not understood."""
REMEMBERED = 256
"""Peers a browser keeps; the one first found makes room for another."""
ADDRESSES = 8
"""Addresses kept of one peer."""
TEXT_BYTES = 160
"""UTF-8 bytes of a swarm's or a node's name: 40 characters of any script."""
STAGES = 4096
RESCAN_S = 15.0
"""Seconds between two looks at this host's interfaces, so that a network may come up later."""
CLOSE_S = 1.5
"""Seconds that leaving the mDNS group may take; the goodbyes are sent in the first 0.25."""
SETTLE_S = 1.5
"""Seconds without a new peer after which :func:`look` has seen all: a responder may hold an answer
back for a second when it has just multicast it (RFC 6762, 6), and then gathers others for 0.2 s."""
LONGEST_PAUSE_S = 1200.0
"""Seconds between two queries; pointers live for 75 minutes, so each is refreshed in time."""

_RUN = re.compile(r"[0-9a-f]{64}")
_STAGES = re.compile(r"[1-9][0-9]{0,3}")
_KEYS = ("v", "run", "swarm", "owner", "peer", "name", "stages")
_PTR = 12  # RFC 1035, 3.2.2
_IN = 1  # RFC 1035, 3.2.4
_QUERY = 0  # RFC 1035, 4.1.1

Interfaces = tuple[tuple[str | int, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _PeerOfRun:
    run_id: str
    swarm: str
    owner: str
    peer: str
    name: str
    stages: int


@dataclass(frozen=True, slots=True)
class Advert(_PeerOfRun):
    """A daemon's announcement on the LAN; ``port`` is the TCP port of its libp2p."""

    port: int


@dataclass(frozen=True, slots=True)
class Found(_PeerOfRun):
    """A peer of a swarm on this LAN, by its own word. ``addresses``: multiaddrs with its PeerId."""

    addresses: tuple[str, ...]


def text_of(facts: Advert) -> dict[str, str | bytes | None]:
    """The TXT record of ``facts``, at most 550 bytes; names are clipped to TEXT_BYTES."""
    said = facts.run_id, facts.swarm, facts.owner, facts.peer, facts.name, str(facts.stages)
    clipped = (v.encode()[:TEXT_BYTES].decode(errors="ignore") for v in (VERSION, *said))
    return dict(zip(_KEYS, clipped, strict=True))


def found_of(
    peer: str,
    text: Mapping[bytes, bytes | None],
    hosts: Iterable[str],
    port: int | None,
) -> Found | None:
    """The peer that an instance of the service describes; None when part of it cannot be used.

    ``peer`` is the instance's name, ``text`` its TXT record, ``hosts`` and ``port`` come from its
    SRV record.
    """
    values = [text.get(key.encode()) or b"" for key in _KEYS]
    try:
        version, run_id, swarm, owner, said, name, stages = (v.decode() for v in values)
        public_key_of(peer)
        public_key_of(owner)
    except (UnicodeDecodeError, WireError):
        return None
    if version != VERSION or said != peer or not _RUN.fullmatch(run_id) or not swarm:
        return None
    if any(len(v) > TEXT_BYTES for v in values) or not (swarm + name).isprintable():
        return None
    if not _STAGES.fullmatch(stages) or int(stages) > STAGES or not 0 < (port or 0) < 65536:
        return None
    usable = [ipaddress.ip_address(h) for h in dict.fromkeys(hosts) if _dialable(h)][:ADDRESSES]
    if not usable:
        return None
    addresses = tuple(f"/ip{a.version}/{a}/tcp/{port}/p2p/{peer}" for a in usable)
    return Found(run_id, swarm, owner, peer, name, int(stages), addresses)


class Nearby(RecordUpdateListener):
    """Membership of the mDNS group on all interfaces of this host; it is entered anew when the
    interfaces change.

    Announces ``advert`` on the LAN (None: nothing). Calls ``on_found`` for each peer announced
    there, and again when its announcement changes; this peer is found, too. At most REMEMBERED
    peers are kept, but a host on the LAN can make up any number of them: limit your dials.
    ``on_found`` is called in the loop and must not raise.

    Where no interface takes part, ``trouble`` names the reason and the journal is told once.
    ``on_error(name, error)`` hears of unexpected errors.
    """

    def __init__(
        self,
        journal: Journal,
        on_found: Callable[[Found], None],
        on_error: Callable[[str, BaseException], None] | None = None,
        advert: Advert | None = None,
    ) -> None:
        super().__init__()
        self._journal = journal
        self._on_found = on_found
        self._advert = advert
        self._tasks = Tasks("nearby", on_error)
        self._zeroconf: AsyncZeroconf | None = None
        self._mdns: zeroconf.Zeroconf
        self._ours: tuple[str, ...] = ()
        self._asker: asyncio.Task[None] | None = None
        # That a printer speaks mDNS badly is no warning of ours.
        self._log = JournalHandler(journal, quiet=True)
        self._found: dict[str, Found] = {}
        self._changed: set[str] = set()
        self._ignored = 0
        self.trouble = ""

    @property
    def found(self) -> tuple[Found, ...]:
        """The peers that are there now: neither gone with a goodbye nor expired."""
        return tuple(self._found.values())

    async def start(self) -> None:
        """Take part from now on. Returns at once."""
        self._tasks.spawn(self._follow(), "follow", eternal=True)

    async def close(self) -> None:
        """Say goodbye and leave the group, in 2 seconds at most. Safe to call twice."""
        await self._tasks.close()
        await self._shut()

    async def _follow(self) -> None:
        opened: Interfaces | None = None
        while True:
            try:
                here = _interfaces()
                if here != opened:
                    await self._shut()
                    await self._open(here)
                    opened = here
                    self.trouble = ""
            except (OSError, RuntimeError, zeroconf.Error) as e:
                opened = None
                await self._shut()
                if (why := str(e) or type(e).__name__) != self.trouble:
                    self.trouble = why
                    self._journal.emit(
                        "reach", "lan-unavailable", f"no discovery on the LAN: {why}"
                    )
            await asyncio.sleep(RESCAN_S)

    async def _open(self, here: Interfaces) -> None:
        senders, hosts = here
        if not senders:
            raise OSError("no interface but loopback is up with an address and multicast")
        log = logging.getLogger("zeroconf")
        log.propagate = False  # or the root logger would write its warnings as warnings
        log.addHandler(self._log)
        # A new one each time: on another network all has to be asked and said anew in any case.
        self._zeroconf = mdns = AsyncZeroconf(interfaces=list(senders))
        await mdns.zeroconf.async_wait_for_start()
        if not mdns.zeroconf.engine.senders:
            raise OSError("no interface lets a socket join the mDNS group")
        self._listen(mdns.zeroconf, hosts)
        if (facts := self._advert) is not None:
            info = AsyncServiceInfo(
                TYPE,
                f"{facts.peer}.{TYPE}",
                port=facts.port,
                properties=text_of(facts),
                server=f"{facts.peer}.local.",
                parsed_addresses=list(hosts),
            )
            # Cooperating: no probing for others of that name, which takes a second; it is a PeerId.
            await (await mdns.async_register_service(info, cooperating_responders=True))
            self._journal.emit(
                "reach",
                "lan-announced",
                f"announced on the LAN at {', '.join(hosts)}",
                "debug",
                port=facts.port,
            )

    def _listen(self, mdns: zeroconf.Zeroconf, ours: tuple[str, ...]) -> None:
        self._mdns = mdns
        self._ours = ours
        mdns.async_add_listener(self, None)
        self._asker = self._tasks.spawn(self._ask(mdns), "ask", eternal=True)

    async def _shut(self) -> None:
        if self._asker is not None:
            self._asker.cancel()
            self._asker = None
        self._found.clear()
        if (mdns := self._zeroconf) is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await mdns.async_close()
            except (OSError, RuntimeError, zeroconf.Error):  # TimeoutError is an OSError
                mdns.zeroconf.close()
            self._zeroconf = None
        logging.getLogger("zeroconf").removeHandler(self._log)

    async def _ask(self, mdns: zeroconf.Zeroconf) -> None:
        """Query often at first, then rarely, naming the answers that we have (RFC 6762, 5.2, 7.1).

        zeroconf's own browser would stop asking for good once it had heard a name that is no UTF-8,
        and its list of answers to refresh grows with each name it hears.
        """
        pause = 1.0
        while True:
            await asyncio.sleep(random.uniform(0.02, 0.12))
            now = zeroconf.current_time_millis()
            query = DNSOutgoing(_QUERY)
            query.add_question(DNSQuestion(TYPE, _PTR, _IN))
            for record in mdns.cache.async_all_by_details(TYPE, _PTR, _IN):
                known = isinstance(record, DNSPointer) and _peer_of(record) in self._found
                if known and not record.is_stale(now):
                    query.add_answer_at_time(record, now)
            mdns.async_send(query)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def async_update_records(
        self,
        zc: zeroconf.Zeroconf,
        now: float,
        records: list[RecordUpdate],
    ) -> None:
        """Note the records of a packet, before the cache holds them, and expired ones."""
        for record in (update.new for update in records):
            expired = record.is_expired(now)  # by a goodbye, too
            if isinstance(record, DNSPointer):
                if record.key == TYPE and expired:
                    self._found.pop(_peer_of(record), None)
                elif record.key == TYPE:
                    self._changed.add(_peer_of(record))
            elif record.name.startswith("12D3Koo") and not expired:
                # SRV and TXT: PEERID._tutti._tcp.local., addresses: PEERID.local.
                self._changed.add(record.name.partition(".")[0])

    def async_update_records_complete(self) -> None:
        """The cache holds it now."""
        changed = self._changed
        self._changed = set()
        for peer in changed:
            try:
                public_key_of(peer)
            except WireError:
                self._heard(peer, None)
                continue
            info = AsyncServiceInfo(TYPE, f"{peer}.{TYPE}")
            if not info.load_from_cache(self._mdns):
                continue  # the next query asks for all of it
            # Ours last: the address of a bridge for containers is the same on many hosts.
            hosts = info.parsed_addresses()
            hosts.sort(key=lambda h: (h in self._ours, ":" in h, h))
            self._heard(peer, found_of(peer, info.properties, hosts, info.port))

    def _heard(self, peer: str, found: Found | None) -> None:
        """Take in the present announcement of the instance ``peer``; None if it is of no use."""
        if found is None:
            self._found.pop(peer, None)
            self._ignored += 1
            if self._ignored.bit_count() == 1:  # 1, 2, 4...: a flood must not fill the journal
                self._journal.emit(
                    "reach",
                    "lan-ignored",
                    f"ignored {self._ignored} records on the LAN, the last of {peer[:80]!r}",
                    "debug",
                    times=self._ignored,
                )
        elif self._found.get(peer) != found:
            if peer not in self._found and len(self._found) >= REMEMBERED:
                del self._found[next(iter(self._found))]
            self._found[peer] = found
            self._on_found(found)


async def look(seconds: float) -> list[Found]:
    """The peers on this LAN, sorted by run and name.

    Takes ``seconds``, or less: until after the first one no other was found for SETTLE_S. Raises
    NetworkFault when no interface of this host takes part in mDNS.
    """
    news = asyncio.Event()
    here = Nearby(Journal(keep=1), lambda _: news.set())
    await here.start()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await news.wait()
                while True:
                    news.clear()
                    async with asyncio.timeout(SETTLE_S):
                        await news.wait()
        if here.trouble:
            raise NetworkFault(
                f"no discovery on the LAN: {here.trouble}",
                "join with an invite or an address instead",
            )
        return sorted(here.found, key=lambda f: (f.run_id, f.name, f.peer))
    finally:
        await here.close()


def _peer_of(pointer: DNSPointer) -> str:
    return pointer.alias.removesuffix(f".{TYPE}")


def _dialable(host: str) -> bool:
    """Return True if others of this LAN may dial ``host``. Link-local IPv6 would need a zone,
    theirs."""
    try:
        a = ipaddress.ip_address(host)
    except ValueError:
        return False
    here = a.is_loopback or a.is_unspecified or (a.version == 6 and a.is_link_local)
    return not (here or a.is_multicast or a.is_reserved)


def _interfaces() -> Interfaces:
    """Interfaces to send to, and our addresses.

    Of each interface an IPv4 address that it has, and its index where it has IPv6. Addresses of
    bridges for containers and of tunnels are told only where there are no others: a listener keeps
    few addresses of a peer.
    """
    senders: list[str | int] = []
    ours: list[tuple[InterfaceKind, str]] = []
    stats = psutil.net_if_stats()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        flags = []
        if name in stats and stats[name].isup:
            flags = stats[name].flags.split(",")
        if "multicast" not in flags or "loopback" in flags:
            continue
        usable = [
            e
            for e in entries
            if e.family in (socket.AF_INET, socket.AF_INET6) and _dialable(e.address)
        ]
        senders += [e.address for e in usable if e.family == socket.AF_INET][:1]
        if any(e.family == socket.AF_INET6 for e in usable):
            senders.append(socket.if_nametoindex(name))
        ours += [(kind_of(name), e.address) for e in usable]
    best = [address for kind, address in ours if kind < InterfaceKind.TUNNEL]
    return tuple(senders), tuple(best or [address for _, address in ours])
