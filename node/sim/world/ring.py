"""Where the nodes of a simulated DHT stand, and so which of them hold a key. Pure."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort

from node.core.ids import PeerId

BITS = 64
NEAREST = 8
"""Nodes that hold a key, and that a bucket of a routing table has room for (Kademlia's k)."""


class Ring:
    """Node ids are hashes of names. Every node is known to all who have room for it."""

    def __init__(self) -> None:
        self._at: dict[PeerId, int] = {}
        self._sorted: list[tuple[int, PeerId]] = []
        self._neighbours: dict[PeerId, int] = {}

    def add(self, peer: PeerId) -> None:
        """A node takes part from now on."""
        if peer not in self._at:
            self._at[peer] = at = _place(f"tutti/node/{peer}")
            insort(self._sorted, (at, peer))
            self._neighbours = {}

    def __len__(self) -> int:
        return len(self._at)

    def neighbours(self, peer: PeerId) -> int:
        """Nodes in the routing table of this one: of those that share just so many leading bits
        with it at most :data:`NEAREST`, for each number of bits."""
        if peer not in self._neighbours:
            at, known = self._at.get(peer, _place(f"tutti/node/{peer}")), 0
            for bit in reversed(range(BITS)):
                first = (at >> bit ^ 1) << bit
                known += min(NEAREST, self._between(first, first + (1 << bit)))
                same = at >> bit << bit
                if self._between(same, same + (1 << bit)) <= 1:
                    break
            self._neighbours[peer] = known
        return self._neighbours[peer]

    def holders(self, topic: str) -> list[PeerId]:
        """The nodes that hold what is posted under a topic: those nearest to its key."""
        key = _place(topic)
        bit = BITS
        low, high = 0, len(self._sorted)
        # The nodes nearest by XOR share the most leading bits.
        while bit and high - low > NEAREST:
            start = key >> (bit - 1) << (bit - 1)
            lower = self._index(start)
            upper = self._index(start + (1 << (bit - 1)))
            if upper - lower < NEAREST:
                break
            low, high, bit = lower, upper, bit - 1
        near = sorted(self._sorted[low:high], key=lambda node: node[0] ^ key)
        return [peer for _, peer in near[:NEAREST]]

    def _between(self, first: int, end: int) -> int:
        return self._index(end) - self._index(first)

    def _index(self, at: int) -> int:
        return bisect_left(self._sorted, (at, PeerId("")))


def _place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: BITS // 8], "big")
