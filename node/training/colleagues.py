"""Whom a peer has worked with. Pure: plans and time in.

A key costs nothing, so a peer that nobody has worked with says nothing that counts against those
who have worked together: not who leads (:mod:`node.training.election`), not which history goes on
(:mod:`node.training.leader.roster`).
"""

from __future__ import annotations

from collections.abc import Collection

from node.core.ids import PeerId

RIPE_S = 30.0
"""Who has been a current member of plans followed here for so long is a colleague. In the first
moments of a run nobody is one: peers that start together may begin as two swarms, and neither is to
be a stranger to the other for good. So whom a peer meets until it has its first colleagues is one
of them then, though a network parted them meanwhile: a stranger among them would have been one by
staying."""
KNOWN = 4096
"""Peers remembered, those seen last."""


class Colleagues:
    """Of one peer, itself not among them."""

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
        # Who is missing from a plan begins anew: a stranger that comes back after a while has not
        # worked meanwhile.
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
