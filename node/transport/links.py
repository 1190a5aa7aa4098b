"""Connections of others to this peer's p2pd, and the choice of the ones to end. Pure: time is an
argument.

p2pd takes incoming connections from anybody, up to a limit of go-libp2p's resource manager, and
keeps them for ever. A peer that opens them all would keep newcomers out. So the daemon looks at
them every few seconds: half of the places is for established peers, strangers share the other half
by address block and by key, and a stranger's unused connection ends.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from node.core.ids import PeerId
from node.identity.places import PlacesByPeer, block_of
from node.transport.addresses import ip_of

GIB = 1 << 30
IDLE_S = 120.0
"""Seconds without a stream or a request after which a stranger's connection ends."""
MOST = 512
"""Peers that stay connected, where the machine's memory allows it. p2pd's connection manager closes
connections beyond this number by itself, anybody's."""

MOST_DIALLED = 192
"""Connections that this peer makes of its own accord. A peer that nobody can dial keeps 128."""


def inbound_limit(memory: int) -> int:
    """Incoming connections that go-libp2p 0.32 takes on a machine with ``memory`` bytes: 64, and
    64 for each GiB of an eighth of the memory."""
    return 64 + int(64 * memory / 8 / GIB)


class Links:
    """``total`` peers that may be connected; ``established(peer)``: a member of the run, or a peer
    that this one has worked with. Times are monotonic seconds."""

    def __init__(
        self, total: int, established: Callable[[PeerId], bool] = lambda peer: False
    ) -> None:
        self.established = established
        self._places = PlacesByPeer[PeerId](
            "connections", total, 1, lambda peer: self.established(peer)
        )
        self._used: dict[PeerId, float] = {}
        self._dialled: set[PeerId] = set()
        """Peers that this one has chosen to connect to."""
        self._heard: set[PeerId] = set()
        """Peers that have used their connection."""
        self._charged: dict[PeerId, bool] = {}
        """Peers that hold a place, and whether as established ones."""

    def used(self, peer: PeerId, now: float) -> None:
        """A stream or a request went over the connection to a peer, in either direction."""
        self._used[peer] = now
        self._heard.add(peer)

    def dialled(self, peer: PeerId) -> None:
        """This peer has made a connection to ``peer`` of its own accord: it needs no place, and
        ends when this peer wants it to. There are at most :data:`MOST_DIALLED`."""
        if peer not in self._charged and len(self._dialled) < MOST_DIALLED:
            self._dialled.add(peer)

    def look(
        self, links: Mapping[PeerId, tuple[str, ...]], busy: Iterable[PeerId], now: float
    ) -> dict[PeerId, str]:
        """The peers to disconnect now, and why: ``places`` or ``idle``. ``links``: connected peers
        and the multiaddrs of their ends; ``busy``: peers with a stream under way."""
        for peer in self._charged.keys() - links.keys():
            self._leave(peer)
        self._heard &= links.keys()
        self._dialled &= links.keys()
        self._used = {p: at for p, at in self._used.items() if p in links or now - at < IDLE_S}
        for peer in busy:
            self.used(peer, now)
        ended: dict[PeerId, str] = {}
        for peer, ends in links.items():
            if peer in self._dialled:
                continue
            established = self.established(peer)
            if peer not in self._charged:
                self._used[peer] = now
            if self._charged.get(peer) == established:
                continue
            self._leave(peer)
            taken = self._places.take(peer, peer, block(ends))
            if not taken:
                ended[peer] = "places"
                continue
            self._charged[peer] = established
            if taken.evicted is not None:
                self._leave(taken.evicted)
                ended[taken.evicted] = "places"
        for peer, established in list(self._charged.items()):
            if not established and now - self._used[peer] > IDLE_S:
                ended[peer] = "idle"
        for peer in ended:
            self._leave(peer)
        return ended

    def strangers(self, before: float = math.inf) -> list[PeerId]:
        """Connected peers that are not established, and of which nothing was heard at all or since
        ``before``."""
        strangers = (peer for peer, established in self._charged.items() if not established)
        return [p for p in strangers if p not in self._heard or self._used[p] <= before]

    def _leave(self, peer: PeerId) -> None:
        self._charged.pop(peer, None)
        self._places.leave(peer)


def block(ends: Iterable[str]) -> str:
    """The address block of a connection, by the multiaddrs of its other end; "" for none."""
    found = (at for text in ends if (at := ip_of(text)) is not None)
    return next((block_of(host) for host, _ in found), "")
