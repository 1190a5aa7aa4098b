"""Whom a peer takes for the leader of the epochs. Pure: sightings and time in, a PeerId out.

Who leads stays the leader while it lives, so that a newcomer with a smaller PeerId costs nobody an epoch. Where nobody
leads it is the smallest live ends peer. After a healed partition two lead: the one with the smaller PeerId goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from node.core.ids import PeerId

SHUN_S = 10.0
"""An ends peer that did not answer is not taken for the leader for so long, and then only after a new sign of life."""
DOUBT_S = 3.0
"""One that answered that it does not lead comes after all others for so long."""
LOOK_S = 2.0
"""A peer that has just started and sees other ends peers waits so long for one of them to say that it leads."""
KNOWN = 1024
"""Ends peers remembered after they are seen no more. A plan is believed of a remembered peer, whatever the directory shows just now."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """An ends peer as its record shows it: ``seq`` grows with every record, ``leads`` is its own claim."""

    seq: int
    leads: bool = False


class Acquaintances:
    """The ends peers seen last, ``most`` of them, or as many as are seen now."""

    def __init__(self, most: int = KNOWN) -> None:
        self._most = most
        self._peers: dict[PeerId, None] = {}

    def see(self, peers: Collection[PeerId]) -> None:
        """These are there now."""
        for peer in peers:
            self._peers.pop(peer, None)
            self._peers[peer] = None
        for peer in list(self._peers)[: max(0, len(self._peers) - max(self._most, len(peers)))]:
            del self._peers[peer]

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)


class Election:
    """``started`` is the clock when this peer began to take part."""

    def __init__(self, me: PeerId, started: float) -> None:
        self._me, self._started = me, started
        self._seen: Mapping[PeerId, Sighting] = {}
        self._shunned: dict[PeerId, tuple[float, int]] = {}
        self._doubted: dict[PeerId, float] = {}

    def see(self, ends: Mapping[PeerId, Sighting]) -> None:
        """The other ends peers the directory shows now."""
        self._seen = ends
        self._shunned = {p: (until, seq) for p, (until, seq) in self._shunned.items() if p in ends}

    def shun(self, peer: PeerId, now: float) -> None:
        """It did not answer."""
        seen = self._seen.get(peer)
        self._shunned[peer] = (now + SHUN_S, seen.seq if seen else 0)

    def doubt(self, peer: PeerId, now: float) -> None:
        """It answered that it does not lead: it has just stopped, or not yet begun."""
        self._doubted = {p: until for p, until in self._doubted.items() if now < until} | {peer: now + DOUBT_S}

    def forgive(self, peer: PeerId) -> None:
        """It sent what only a leader sends."""
        self._shunned.pop(peer, None)
        self._doubted.pop(peer, None)

    def leader(self, now: float, *, able: bool, leads: bool) -> PeerId | None:
        """The leader; None when no ends peer is seen. ``able``: this peer could lead; ``leads``: it does."""
        live = {p: s for p, s in self._seen.items() if p != self._me and not self._is_shunned(p, s, now)}
        sure = {p: s for p, s in live.items() if now >= self._doubted.get(p, now)}
        others = sure or ({} if able else live)
        incumbents = {p for p, s in others.items() if s.leads}
        if leads and able:
            incumbents.add(self._me)
        if incumbents:
            return min(incumbents)
        if not able:
            return min(others, default=None)
        if others and now - self._started < LOOK_S:
            return min(others)
        return min({*others, self._me})

    def _is_shunned(self, peer: PeerId, seen: Sighting, now: float) -> bool:
        if peer not in self._shunned:
            return False
        until, seq = self._shunned[peer]
        if now < until:
            self._shunned[peer] = (until, max(seq, seen.seq))  # its last words reach us a little later
            return True
        # A peer that is dead or cut off leaves its last record behind: only a newer one says that it is back.
        return seen.seq <= seq
