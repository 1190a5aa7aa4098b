"""The colleagues of a peer: the peers that it has worked with. Pure: plans and time in.

A key costs nothing. So the claims of strangers do not outweigh those of colleagues: neither about
who leads (:mod:`node.training.election`) nor about which history goes on
(:mod:`node.training.leader.roster`).
"""

from __future__ import annotations

from collections.abc import Collection

from node.core.ids import PeerId

RIPE_S = 30.0
"""A peer that has been a current member of the plans followed here for so many seconds is a
colleague. At the start of a run there are none, and peers that start together may begin as two
swarms that should not stay strangers. So when the first peer becomes a colleague, all peers met
until then become colleagues too, even if a partition has separated them meanwhile. That admits no
stranger who could not have become a colleague by staying."""
KNOWN = 4096
"""Peers remembered, those seen last."""


class Colleagues:
    """The colleagues of one peer, itself not included."""

    def __init__(self, me: PeerId, ripe_s: float = RIPE_S, most: int = KNOWN) -> None:
        self._me, self._ripe_s, self._most = me, ripe_s, most
        self._since: dict[PeerId, float] = {}
        self._early: set[PeerId] = set()
        """Met while nobody was a colleague yet."""
        self._ripe: dict[PeerId, None] = {}
        self.all: frozenset[PeerId] = frozenset()
        """Those who count."""

    def recall(self, before: Collection[PeerId]) -> None:
        """Whom it worked with before it was started again."""
        self._ripe = {**dict.fromkeys(p for p in before if p != self._me), **self._ripe}
        self._forget(self._most)

    def meet(self, peers: Collection[PeerId], now: float) -> None:
        """These are the current members of a plan that is followed here."""
        if not self._ripe:
            self._early.update(p for p in peers if p != self._me)
        # A peer that is missing from one plan starts from zero again.
        self._since = {
            p: self._since.get(p, now) for p in peers if p not in self._ripe and p != self._me
        }
        for peer in [p for p, since in self._since.items() if now - since >= self._ripe_s]:
            self._ripe |= dict.fromkeys(sorted(self._early)) | {peer: None}
            self._early.clear()
            del self._since[peer]
        for peer in peers:
            if peer in self._ripe:
                self._ripe[peer] = self._ripe.pop(peer)  # met now: the last to be forgotten
        self._forget(max(self._most, len(peers)))

    def _forget(self, most: int) -> None:
        for peer in list(self._ripe)[: max(0, len(self._ripe) - most)]:
            del self._ripe[peer]
        if self._ripe.keys() != self.all:
            self.all = frozenset(self._ripe)
