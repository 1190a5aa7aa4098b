"""The directory on hivemind's DHT: posts the own record, reads everybody's, keeps in touch with
bootstrap peers."""

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import node.core.bare  # noqa: F401  first: hivemind without its averager and optimizer

# isort: split
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.multiaddr import Multiaddr

from node.core.clock import Clock
from node.core.errors import UsageFault, WireError
from node.core.ids import PeerId, RunId, short
from node.core.tasks import Tasks
from node.dht import guard
from node.dht.record import DirectoryEntry, PeerBody, PeerEntry, Posting, peers_among
from node.dht.record_store import Admit, Author, RecordStore, TopicStore
from node.dht.room import NO_COMPANY, Company
from node.dht.settings import DirectorySettings
from node.dht.topics import PEERS, check_posting, key_of, wrap
from node.dht.walk import SwarmNode
from node.identity.keys import Identity, peer_id_of, public_key_of
from node.reach.knock import refused
from node.telemetry.events import Journal, RateLimitedLog

_DOWN = (
    P2PDaemonError,
    P2PHandlerError,
    OSError,
    EOFError,
    ValueError,
    AssertionError,
    TimeoutError,
    asyncio.TimeoutError,
)
"""What hivemind raises when its p2pd, the network or the other side fails; AssertionError for a
malformed node id."""


NEAREST = 8
"""Nodes that a walk through the DHT asks, and that a bucket of its routing table holds (Kademlia's
k). hivemind's 20 are for swarms of thousands; each question costs both sides a millisecond of
processor time, every few seconds, for ever."""
ASKED_AFTER_S = (0.0, 2.0, 5.0)
"""Seconds between questions to a peer for its own record: it may just be about to post it."""
ASKED_AT_ONCE = 64
"""Most peers that are asked for their own records at a time; the others are found by readings."""
RENEWED = 2.0
"""An established peer is asked for its own record when the one here holds for less than this number
of refreshes: others that were near the key have not passed on its last ones."""
FRESH_S = 0.5
"""A walk that posts a record asks as many nodes as a walk for a reading, and gets all records. So
a reading that begins within these seconds of such a walk asks nobody."""
SEED_ADDRESSES = 16
"""Most addresses of one bootstrap peer that are tried: the limit of an invite."""
ATTACH_S = 120.0
"""For p2pd to take the DHT's handlers. Its supervisor replaces one that does not answer sooner, and
hivemind waits for ever for one that is gone."""


class Directory:
    """Who is in the swarm (see ``DirectoryPort``), over the p2pd of :meth:`attach`.

    In a private run ``admit`` says who may read and write here, and ``admission`` is the token this
    peer shows. ``company`` says which other peers keep their places when there are more records
    than places. ``max_up``: bytes a second that this peer sends at most; 0: no cap.

    Before the first :meth:`attach`, and while p2pd is down, publishing keeps the record for later
    and reading gives what was heard so far. Only its own p2pd's connections are used; no public
    bootstrap peers.
    """

    def __init__(
        self,
        identity: Identity,
        settings: DirectorySettings,
        clock: Clock,
        run_id: RunId,
        journal: Journal,
        *,
        admit: Admit | None = None,
        admission: bytes = b"",
        company: Company = NO_COMPANY,
        max_up: float = 0.0,
    ) -> None:
        self.me = identity.peer_id
        self._others = company
        self._settings, self._clock, self._journal = settings, clock, journal
        self._record_store = RecordStore(run_id, settings, self.me, admit, company=company)
        self._author = Author(identity, run_id, settings, admission)
        self._topics = TopicStore(run_id, settings, self.me, admit, company=company)
        self._rate_limit = RateLimitedLog(journal, clock.now)
        self._door = guard.AdmissionFilter(
            clock,
            admit,
            admission,
            lambda peer, kind, text: self._rate_limit.emit(peer, "dht", kind, text),
            company,
            max_up,
        )
        self._body: PeerBody | None = None
        self._topic = PEERS
        self._node: SwarmNode | None = None
        self._p2p: P2P | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._company: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._posted_at, self._times = 0.0, 1.0
        self._searches: dict[str, asyncio.Task[Any]] = {}
        self._asking = set[PeerId]()
        """Peers that are asked for their own records."""
        self._heard = "", -math.inf
        """Key of the last post of the own record, and the time at which that walk ended."""
        self._serving = self._served = True
        """Whether this node is to answer others, and whether the one there does."""
        self._seeds: dict[PeerId, list[Multiaddr]] = {}
        self._tasks = Tasks(
            "dht", lambda name, error: self._tell("task_failed", f"{name}: {error!r}", "error")
        )

    @property
    def refusals(self) -> Counter[str]:
        """Requests and records of others that were refused, by kind: ``not admitted``,
        ``requests`` (too many), ``answers`` (too many bytes of them to strangers), ``records``
        (invalid), ``places`` (no room)."""
        return self._door.refusals

    def on_refusal(self, callback: Callable[[PeerId], None]) -> None:
        """Call ``callback`` with each peer that is refused."""
        self._door.on_refusal = callback

    @property
    def neighbours(self) -> int:
        """Peers this node can ask; 0 means it is alone."""
        if self._node is None:
            return 0
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def attach(self, p2p: P2P, initial_peers: Sequence[str] = ()) -> None:
        """Use ``p2p`` from now on: at the start, and again after every restart of p2pd.

        ``initial_peers`` are multiaddrs with /p2p/; none for the first peer of a run. Those that do
        not answer are tried again in the background, for as long as they are missing. A p2pd that
        does not answer is waited for ``ATTACH_S`` here, and from then on in the background, until
        there is another one. Raises UsageFault for one that is not a multiaddr with /p2p/.
        """
        # After a restart of p2pd these addresses are old, and those in ``_seeds`` are newer.
        self._seeds = _merged(self._seeds, _by_peer(initial_peers))
        guard.install()
        if self._attaching is not None:
            self._attaching.cancel()
        self._attaching = self._tasks.spawn(self._attach(p2p), "attach")
        done, _ = await asyncio.wait({self._attaching}, timeout=ATTACH_S)
        if not done:
            self._tell(
                "not-attached",
                f"p2pd has not taken the directory's handlers in {ATTACH_S:g} s",
                "warning",
            )

    async def _attach(self, p2p: P2P) -> None:
        await self._detach(keep=p2p)
        self._served = self._serving
        node: Any = await SwarmNode.create(
            p2p=p2p,
            # A client asks and is never asked: whom others cannot dial would only be waited for in
            # their routing tables.
            client_mode=not self._served,
            node_id=guard.node_id_of(PeerID.from_base58(str(p2p.peer_id))),
            bucket_size=NEAREST,
            record_validator=guard.EnvelopeValidator(
                self._record_store,
                self._clock,
                self._settings.max_record,
                self._door,
                self._topics,
            ),
            # The board is our cache, and it knows which records still hold; a cached dictionary
            # would be stale.
            cache_on_store=False,
        )
        node.landmarks = self._landmarks
        self._node = node
        self._p2p = p2p
        self._company = self._tasks.spawn(self._keep_company(p2p, node), "company", eternal=True)
        if self._body is not None:
            await self._post(self._body.pack())

    async def serve(self, serving: bool) -> None:
        """Answer others' requests, or only ask. Takes the place in the DHT anew when the node there
        is of the other kind; while one is being made this has to be said again."""
        self._serving = serving
        if self._p2p is not None and self._node is not None and self._served != serving:
            await self.attach(self._p2p)

    def meet(self, multiaddrs: Sequence[str]) -> None:
        """A bootstrap peer, or new addresses of one, tried from now on for as long as it is
        missing. Raises UsageFault as :meth:`attach`."""
        self._seeds = _merged(_by_peer(multiaddrs), self._seeds)

    def ask(self, peer: PeerId) -> None:
        """Ask a connected peer for its own record, in the background. A reading may find it much
        later, where the nodes near the key are slow, or strangers."""
        known = peer in self._record_store or self._topics.knows(self._topic, peer)
        if known or peer in self._asking:
            return
        text = f"{short(peer)} is asked for its own record"
        self._rate_limit.emit(peer, "dht", "record-asked", text, "debug")
        self._begin_to_ask(peer, ASKED_AFTER_S)

    def _begin_to_ask(self, peer: PeerId, after_s: Sequence[float]) -> None:
        if peer not in self._asking and len(self._asking) < ASKED_AT_ONCE:
            self._asking.add(peer)
            self._tasks.spawn(self._ask(peer, after_s), f"ask {short(peer)}")

    async def _ask(self, peer: PeerId, after_s: Sequence[float]) -> None:
        """Ask a peer for its own record after each of these pauses, until there is a newer one."""
        known = self._newest(peer)
        try:
            for pause_s in after_s:
                await asyncio.sleep(pause_s)
                node = self._node
                if node is None or self._newest(peer) != known:
                    return
                names = {PEERS, self._topic}
                keys = [
                    guard.own_key(key_of(self._topics.run_id, name), peer) for name in sorted(names)
                ]
                await _caught(node.protocol.call_find(PeerID.from_base58(peer), keys))
        finally:
            self._asking.discard(peer)

    def _newest(self, peer: PeerId) -> object:
        """Numbers and expiries of the newest records of a peer."""
        return self._record_store.newest(peer), self._topics.newest(self._topic, peer)

    def _established(self) -> dict[PeerId, float]:
        """Established peers with records here, and the Unix time at which each record expires."""
        now = self._clock.wall()
        known: dict[PeerId, DirectoryEntry[Any]] = {**self._topics.entries(self._topic, now)}
        known |= self._record_store.entries(now)
        known.pop(self.me, None)
        return {
            peer: entry.not_after for peer, entry in known.items() if self._others.established(peer)
        }

    def _landmarks(self) -> list[PeerID]:
        """Bootstrap peers and established peers, by lot: first one of each address block, one that
        is known to answer if there is any, then the others."""
        known = (self._seeds.keys() | self._established().keys()) - {self.me}
        drawn = [PeerID.from_base58(peer) for peer in random.sample(sorted(known), len(known))]
        if self._node is not None:
            answering = self._node.protocol.routing_table.peer_id_to_uid
            drawn.sort(key=lambda peer: peer not in answering)
        by_block: dict[str, PeerID] = {}
        for peer in drawn:
            by_block.setdefault(self._others.block(PeerId(peer.to_base58())), peer)
        return list(dict.fromkeys([*by_block.values(), *drawn]))

    async def publish(self, body: PeerBody, times: float = 1.0, topic: str = PEERS) -> bool:
        """Post ``body`` under ``topic``, that of a cell or ``peers``, for ``times`` ``ttl_s``. The
        caller publishes again every ``times`` ``refresh_s``; whenever it has not for twice as long,
        the same is posted again, until :meth:`withdraw`. What was published under another topic is
        withdrawn.

        False when no storage took it, this node's own included: not attached, or p2pd is down; the
        refresh tries again. Raises WireError for a body that others would refuse.
        """
        packed = body.pack()
        if topic != self._topic:
            await self.withdraw()
        self._body, self._times, self._topic = body, times, topic
        if self._heartbeat is None:
            self._heartbeat = self._tasks.spawn(self._refresh(), "refresh", eternal=True)
        return await self._post(packed)

    async def withdraw(self) -> None:
        """Replace the own record by a signed withdrawal; others stop seeing this peer with their
        next reading."""
        if self._body is not None:
            self._body = None
            await self._post(b"")

    async def read(self, topic: str = PEERS) -> dict[PeerId, PeerEntry]:
        """The verified, unexpired record of everybody who published under ``topic``, in PeerId
        order, the own one included.

        Asks the DHT for at most ``lookup_timeout_s``; what was heard earlier and still holds is
        there in any case.
        """
        if topic != PEERS:
            return peers_among(await self.look(topic))
        await self._read("read", self._record_store.key)
        return self._record_store.entries(self._clock.wall())

    async def post(self, topic: str, body: bytes, life_s: float) -> bool:
        """Post ``body``, 1 to 2,048 bytes, under a topic for ``life_s`` seconds, at most
        ``max_ttl_s``; it is not posted again.

        False when no storage took it. Raises WireError for what others would refuse.
        """
        check_posting(body, life_s)
        return await self._put(topic, body, life_s / self._settings.ttl_s)

    async def _put(self, topic: str, body: bytes, times: float) -> bool:
        """As :meth:`post`, for ``times`` the usual life of a record; an empty ``body`` takes down
        what was posted before."""
        now = self._clock.wall()
        self._topics.use(topic, now)
        sealed, expires = self._author.seal(
            body, now, self._topics.newest(topic, self.me), times, topic
        )
        raw = wrap(topic, sealed)
        if len(raw) > (limit := self._settings.max_record):
            raise WireError(f"a record has at most {limit} bytes, not {len(raw)}")
        self._topics.offer(topic, self.me, sealed, expires, now)
        return await self._store(f"post {topic}", key_of(self._topics.run_id, topic), raw, expires)

    async def look(self, topic: str) -> dict[PeerId, Posting]:
        """Everybody's verified, unexpired posting under a topic, the own one included, in PeerId
        order. Asks the DHT for at most ``lookup_timeout_s``. Raises WireError for what is no
        topic."""
        self._topics.use(topic, self._clock.wall())
        await self._read(f"look {topic}", key_of(self._topics.run_id, topic))
        return self._topics.entries(topic, self._clock.wall())

    async def _read(self, name: str, key: str) -> None:
        """Ask the DHT for all records under a key, unless the walk of the own post has just done
        so."""
        posted = -math.inf
        if self._heard[0] == key:
            posted = self._heard[1]
        if (node := self._node) is not None and self._clock.now() - posted > FRESH_S:
            with contextlib.suppress(*_DOWN):
                await self._search(name, lambda: node.read(key))

    async def close(self) -> None:
        """Leave the DHT and stop refreshing. The record is left to expire: :meth:`withdraw` first
        to be gone at once."""
        await self._tasks.close()
        self._rate_limit.close()
        self._heartbeat = None
        await self._detach(keep=None)

    async def _post(self, packed: bytes) -> bool:
        self._posted_at = self._clock.now()
        if self._topic != PEERS:
            key = key_of(self._topics.run_id, self._topic)
            stored = await self._put(self._topic, packed, self._times)
        else:
            key = self._record_store.key
            now = self._clock.wall()
            raw, expires = self._author.seal(
                packed, now, self._record_store.newest(self.me), self._times
            )
            self._record_store.offer(self.me, raw, expires, now)
            stored = await self._store("post", key, raw, expires)
        if stored:
            self._heard = key, self._clock.now()
        return stored

    async def _store(self, name: str, key: str, raw: bytes, expires: float) -> bool:
        """False when no storage took it: not attached, or p2pd is down."""
        if (node := self._node) is not None:
            with contextlib.suppress(*_DOWN):
                return await self._search(
                    name, lambda: node.post(key, raw, expires, str(self.me)), anew=True
                )
        return False

    async def _search(
        self, name: str, search: Callable[[], Coroutine[Any, Any, Any]], *, anew: bool = False
    ) -> Any:
        """What a walk through the DHT gives, waited for ``lookup_timeout_s``; raises TimeoutError
        after that.

        The walk itself goes on: it ends by its own time-outs, and cancelled in between it leaves
        tasks behind that nobody ends. So there is one of each ``name`` at a time; who comes
        meanwhile waits for it, and with ``anew`` makes another one afterwards.
        """
        async with self._in_time():
            while (running := self._searches.get(name)) is not None and not running.done() and anew:
                await asyncio.wait({running})
            if running is None or running.done():
                self._searches = {n: t for n, t in self._searches.items() if not t.done()}
                running = self._searches[name] = self._tasks.spawn(_caught(search()), name)
            found = await asyncio.shield(running)
        if isinstance(found, Exception):
            raise found
        return found

    async def _refresh(self) -> None:
        """Post again what was not published again in time: whoever publishes may have to wait for
        the DHT in between, longer than a record lives. And ask established peers for their own
        records before these expire."""
        while True:
            await asyncio.sleep(self._settings.refresh_s)
            soon = self._clock.wall() + RENEWED * self._settings.refresh_s
            for peer, expires in self._established().items():
                if expires < soon:
                    self._begin_to_ask(peer, (0.0,))
            idle = self._clock.now() - self._posted_at
            if self._body is not None and idle >= 2 * self._times * self._settings.refresh_s:
                await self._post(self._body.pack())

    async def _keep_company(self, p2p: P2P, node: SwarmNode) -> None:
        """Meet the bootstrap peers, and whoever is on the board when nobody is left to ask."""
        pause, complained = self._settings.rejoin_s, False
        while True:
            table = node.protocol.routing_table
            wanted = dict(self._seeds)
            if not table.uid_to_peer_id:
                now = self._clock.wall()
                mates = peers_among(self._topics.entries(self._topic, now))
                known = self._record_store.entries(now) | mates
                wanted |= _by_peer_leniently(known.values(), self.me)
            missing = {
                p: addrs
                for p, addrs in wanted.items()
                if PeerID.from_base58(p) not in table.peer_id_to_uid
            }
            met = await asyncio.gather(
                *(self._meet(p2p, node, peer, addrs) for peer, addrs in missing.items())
            )
            if any(met):
                await self._settle(node)
                self._tell("joined", f"{sum(met)} bootstrap peers answered", peers=sum(met))
                pause, complained = self._settings.rejoin_s, False
            elif missing and not table.uid_to_peer_id and not complained:
                complained = True
                names = ", ".join(short(p) for p in missing)
                self._tell(
                    "alone",
                    f"no bootstrap peer answers ({names}); trying on",
                    level="warning",
                    peers=len(missing),
                )
            self._topics.forget_expired(self._clock.wall())
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._settings.rejoin_max_s)

    async def _meet(
        self, p2p: P2P, node: SwarmNode, peer: PeerId, addresses: list[Multiaddr]
    ) -> bool:
        who = PeerID.from_base58(peer)
        client: Any = p2p._client  # the public face of P2P has no way to dial an address
        try:
            if await refused([str(address) for address in addresses]):
                async with self._in_time():
                    connected = {one.peer_id for one in await p2p.list_peers()}
                # One that nobody can dial may have dialled this peer.
                if who not in connected:
                    return False
            async with self._in_time():
                await client.connect(who, addresses)
            async with self._in_time():
                return await node.protocol.call_ping(who) == guard.node_id_of(who)
        except _DOWN:
            return False

    async def _settle(self, node: SwarmNode) -> None:
        """Having met somebody: find the nodes near this one, and post the record among them."""
        with contextlib.suppress(*_DOWN):
            await self._search("settle", lambda: node.find_nearest_nodes([node.node_id]))
        if self._body is not None:
            await self._post(self._body.pack())

    async def _detach(self, keep: P2P | None) -> None:
        """Let go of the node. Its handlers are removed unless p2pd is gone, which is all a dead one
        needs."""
        node, self._node = self._node, None
        company, self._company = self._company, None
        if company is not None:
            company.cancel()
            # Not awaited itself: whoever is cancelled here meanwhile would go on.
            await asyncio.wait({company})
        if node is None:
            return
        if keep is None or keep is self._p2p:
            # hivemind stops reading what p2pd says when an answer comes that nobody waits for any
            # more, so the wait is cut short only where that p2pd is not used again.
            wait_s = None
            if keep is None:
                wait_s = 1.0
            with contextlib.suppress(*_DOWN):
                async with asyncio.timeout(wait_s):
                    await node.shutdown()
        node.is_alive = False

    def _in_time(self) -> asyncio.Timeout:
        # Not wait_for: on Python 3.11 it loses a cancellation that comes with the result, and
        # close() waits for ever.
        return asyncio.timeout(self._settings.lookup_timeout_s)

    def _tell(self, kind: str, text: str, level: str = "info", **fields: int) -> None:
        self._journal.emit("dht", kind, text, level=level, **fields)


async def _caught(search: Coroutine[Any, Any, Any]) -> Any:
    """What a search gives, or why it gives nothing: a network that is down is no task that
    failed."""
    try:
        return await search
    except _DOWN as e:
        return e


def _by_peer(multiaddrs: Iterable[str]) -> dict[PeerId, list[Multiaddr]]:
    """Addresses to dial, grouped by the PeerId at their end. Raises UsageFault."""
    out: dict[PeerId, list[Multiaddr]] = {}
    for text in multiaddrs:
        # p2pd wants the address without the PeerId it leads to; behind a relay there is a second
        # one, which stays.
        where, _, who = text.rpartition("/p2p/")
        try:
            address, peer = Multiaddr(where), peer_id_of(public_key_of(who))
        except (ValueError, LookupError) as e:
            raise UsageFault(
                f"not a multiaddr with /p2p/: {text}",
                "copy it from `tutti peers` of a running peer",
            ) from e
        out.setdefault(peer, []).append(address)
    return out


def _merged(
    newer: Mapping[PeerId, list[Multiaddr]], older: Mapping[PeerId, list[Multiaddr]]
) -> dict[PeerId, list[Multiaddr]]:
    """The addresses of every peer, the newer ones first: a peer may have moved, or may be back at
    its old place."""
    out: dict[PeerId, list[Multiaddr]] = {}
    for peer in dict.fromkeys([*newer, *older]):
        every = dict.fromkeys([*newer.get(peer, ()), *older.get(peer, ())])
        out[peer] = list(every)[:SEED_ADDRESSES]
    return out


def _by_peer_leniently(entries: Iterable[PeerEntry], me: PeerId) -> dict[PeerId, list[Multiaddr]]:
    """The same for addresses that others claim: only those that end in the writer's own PeerId and
    are not QUIC's, the rest is dropped."""
    out: dict[PeerId, list[Multiaddr]] = {}
    for entry in entries:
        if entry.peer == me:
            continue
        claimed = [text for text in entry.body.maddrs if "/udp/" not in text]
        for text in claimed:
            with contextlib.suppress(UsageFault):
                out.setdefault(entry.peer, []).extend(_by_peer([text]).get(entry.peer, []))
    return {peer: addresses for peer, addresses in out.items() if addresses}
