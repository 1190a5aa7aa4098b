"""A node of the directory: hivemind's, with walks of its own through the DHT.

A walk asks the nodes nearest to a key that it knows for nodes nearer to it, and for the records
under the key. In hivemind's walk a node that is gone counts as one of the nearest for as long as
others name it. It is waited for three seconds, records are posted to it for as long, and where most
of the nearest are gone nobody else is asked. Here it is left after a moment, and the next one takes
its place.

Somebody who makes keys until eight of them are nearer to a key than every honest node leads all
walks to these eight. So each walk and each post also goes to a few landmarks, nodes that are known
from elsewhere.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import node.core.bare  # noqa: F401  first: hivemind without its averager and optimizer

# isort: split
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from node.core.patience import Took
from node.core.tasks import Tasks
from node.dht.guard import SwarmProtocol, node_id_of
from node.identity.faults import PEERS_KEPT

SOURCES = 3
"""Nodes of a walk from which the records under its key are taken, the nearest ones. The others are
asked only for nodes near the key. Each record is at five nodes, and the records of sixty peers are
24 KiB, which cost both sides milliseconds of processor time."""
PARALLEL = 4
"""Nodes of a walk that are asked at the same time."""
LANDMARKS = 2
"""Landmarks that a walk asks for records in addition, and that a post goes to. A record is posted
again three times before it expires, each time to other landmarks."""
STARTS = 3
"""A walk starts from this number of known nodes for each one that it looks for, because some may be
gone."""
LEAST_PATIENCE_S = 0.4
"""Least seconds that a walk waits for one node."""

OnFound = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]]


@dataclass
class Walk:
    """The state of a walk to the ``most`` nodes nearest to ``key``. ``known``: nodes that were
    named, without those that do not answer. Pure."""

    key: DHTID
    most: int
    known: dict[DHTID, PeerID]
    asked: set[DHTID] = field(default_factory=set)
    answered: set[DHTID] = field(default_factory=set)
    few: bool = False
    """True if the walk starts from fewer nodes than it looks for. Except at a newcomer these are
    all nodes, so the nearest are asked for records at once, which spares a round trip."""
    gave: set[DHTID] = field(default_factory=set)
    """Nodes that were asked for records."""
    landmarks: set[DHTID] = field(default_factory=set)
    """Nodes that are asked for records wherever they stand."""

    def next(self) -> DHTID | None:
        """The node to ask next; None while there is none."""
        return next((node for node in self._nearest(self.known) if node not in self.asked), None)

    def heard(self, node: DHTID, named: dict[DHTID, PeerID]) -> None:
        """A node has answered, and named others."""
        self.answered.add(node)
        for other, peer in named.items():
            if other not in self.asked:
                self.known[other] = peer

    def missed(self, node: DHTID) -> None:
        """A node did not answer in time."""
        del self.known[node]

    def found(self) -> list[DHTID]:
        """The nearest nodes that have answered, the nearest one first."""
        return self._nearest(self.answered)

    def gives(self, node: DHTID) -> bool:
        """Return True to ask a node for records. Most nodes on the way of a walk are far from the
        key, and the records that they have read may be old."""
        if node in self.landmarks or node in self.answered:
            return True
        others = self._nearest(self.known.keys() - self.landmarks)
        return self.few and node in others[:SOURCES]

    def untapped(self) -> list[DHTID]:
        """The nearest nodes that answered, without those that were asked for records already."""
        return [node for node in self.found()[:SOURCES] if node not in self.gave]

    def _nearest(self, nodes: Collection[DHTID]) -> list[DHTID]:
        return sorted(nodes, key=self.key.xor_distance)[: self.most]


class SwarmNode(DHTNode):
    """A node of the directory. A node that takes much longer than usual to answer is passed over by
    all walks of this one for some seconds, unless its answer comes after all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._took = Took()
        """Seconds in which nodes answered."""
        self._tasks = Tasks("walk")
        self.landmarks: Callable[[], Iterable[PeerID]] = tuple
        """Returns the nodes that are known from elsewhere, the best ones first."""

    async def read(self, key: str) -> None:
        """Bring the records under a key to this node's stores."""
        await self.walk(DHTID.generate(source=key))

    async def post(self, key: str, raw: bytes, expires: float, writer: str) -> bool:
        """Store a record of this node at the nodes nearest to ``key`` and at landmarks, until
        ``expires`` (Unix seconds). Returns False if no node near the key took it. Raises
        ConnectionError as :meth:`find_nearest_nodes`."""
        place = DHTID.generate(source=key)
        protocol = cast(SwarmProtocol, self.protocol)
        packed = protocol.serializer.dumps(raw)
        calls = [
            self._tasks.spawn(
                protocol.call_store(peer, [place], [packed], [expires], [writer]), "landmark"
            )
            for peer in self._usable_landmarks().values()
        ]
        stored = await self.store(key, raw, expires, subkey=writer)
        # Also where other nodes are nearer: who knows this one as a landmark asks it.
        protocol.keep(place, writer, packed, expires)
        if calls:
            await asyncio.wait(calls, timeout=self._patience_s)
        return bool(stored)

    async def walk(self, key: DHTID) -> Walk:
        """Ask the nodes nearest to ``key``, and the nearest of them and landmarks for records."""
        table = self.protocol.routing_table
        most = self.protocol.bucket_size
        starts = table.get_nearest_neighbors(key, STARTS * most, exclude=self.node_id)
        landmarks = self._usable_landmarks()
        known = self._filter_blacklisted(dict(starts)) | landmarks
        few = len(starts) < most
        walk = Walk(key, most, known, asked=set(landmarks), few=few, landmarks=set(landmarks))
        pending = dict[asyncio.Task[dict[DHTID, PeerID] | None], DHTID]()
        for landmark in landmarks:
            pending[self._tasks.spawn(self._ask(walk, landmark), "ask")] = landmark
        while True:
            # A slow landmark takes no turn of the walk.
            while len(set(pending.values()) - walk.landmarks) < PARALLEL:
                node = walk.next()
                if node is None:
                    break
                walk.asked.add(node)
                pending[self._tasks.spawn(self._ask(walk, node), "ask")] = node
            if not pending:
                break
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                node = pending.pop(task)
                named = task.result()
                if named is None:
                    walk.missed(node)
                else:
                    named.pop(self.node_id, None)
                    walk.heard(node, named)
        await asyncio.gather(*(self._ask(walk, node) for node in walk.untapped()))
        # hivemind counts the failures of every node that was ever named, also of invented ones.
        if len(self.blacklist.ban_counter) > PEERS_KEPT:
            self.blacklist.ban_counter.clear()
        return walk

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        *_: Any,
        node_to_peer_id: dict[DHTID, PeerID] | None = None,
        found_callback: OnFound | None = None,
        **options: Any,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """As the parent, for nodes that answer. hivemind's post calls it, and learns the nodes by
        ``found_callback``. Raises ConnectionError if none of the nodes that were asked answers,
        unless they are landmarks that the routing table lacks."""
        found: dict[DHTID, dict[DHTID, PeerID]] = {}
        for key in tuple(queries):
            listed = set(self.protocol.routing_table.uid_to_peer_id)
            walk = await self.walk(key)
            nearest = {node: walk.known[node] for node in walk.found()}
            found[key] = nearest
            if node_to_peer_id is not None:
                node_to_peer_id.update(nearest)
            if found_callback is not None:
                await found_callback(key, list(nearest), walk.asked)
            # A landmark that is in no routing table may be a client, which answers nobody.
            if walk.asked & listed and not nearest:
                raise ConnectionError("no node of the directory answers")
        return found

    async def _ask(self, walk: Walk, node: DHTID) -> dict[DHTID, PeerID] | None:
        """Ask a node, and wait as long as nodes usually take. Returns the nodes that it names, None
        without an answer."""
        key = walk.key
        peer = walk.known[node]
        if walk.gives(node):
            walk.gave.add(node)
        else:
            # Ids that differ in the last bit are near the same nodes, and nothing is stored there.
            key = DHTID(key ^ 1)
        # The call goes on when the walk does: a late answer still brings records and nodes.
        call = self._tasks.spawn(self._call(key, peer), "call")
        done, _ = await asyncio.wait({call}, timeout=self._patience_s)
        answer = None
        if done:
            answer = call.result()
        else:
            self.blacklist.register_failure(peer)
        if answer is None:
            return None
        _, named = answer
        return named

    def _usable_landmarks(self) -> dict[DHTID, PeerID]:
        """The landmarks of a walk or of a post, without those that did not answer lately."""
        usable = (peer for peer in self.landmarks() if peer not in self.blacklist)
        return {node_id_of(peer): peer for peer in itertools.islice(usable, LANDMARKS)}

    @property
    def _patience_s(self) -> float:
        longest = self.protocol.wait_timeout
        if not self._took.count:
            return longest
        return min(longest, max(LEAST_PATIENCE_S, self._took.expected))

    async def _call(self, key: DHTID, peer: PeerID) -> tuple[Any, dict[DHTID, PeerID]] | None:
        """Records under a key, or None, and the nodes near it that a node knows; None without an
        answer."""
        began = asyncio.get_running_loop().time()
        answer = await self._call_find_with_blacklist(peer, [key])
        if not answer:
            return None
        self._took.add(asyncio.get_running_loop().time() - began)
        return answer[key]
