"""Whom a peer takes for the leader of the epochs. Pure: sightings and time in, a PeerId out.

Who leads stays the leader while it lives, so that a newcomer with a smaller PeerId costs nobody an
epoch. Where nobody leads it is the first live ends peer among the voters of the newest plan, in its
order, which is that of how long they have taken part; before the first plan it is the smallest, of
those this peer has worked with if there is one. After a healed partition two lead: the one that
more peers follow goes on, of two with as many the one with the smaller PeerId.

To say that one leads costs nothing, and neither does a small PeerId. So followers count, and
strangers among them at most as many as those this peer has worked with
(:mod:`node.training.colleagues`): no number of keys makes a leader of who has nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from node.core.ids import PeerId
from node.training.colleagues import Colleagues

SHUN_S = 10.0
"""An ends peer that did not answer is not taken for the leader for so long, and then only after a
new sign of life."""
DOUBT_S = 3.0
"""One that answered that it does not lead comes after all others for so long."""
KEEP_S = 60.0
"""Who has taken our word as the leader leads for so long, whatever the directory shows: on a busy
machine records come late."""
LOOK_S = 2.0
"""A peer that has just started and sees other ends peers waits so long for one of them to say that
it leads."""
TOLD_S = 60.0
"""A leader plans with who told it that it is there, once a second. Its plan is followed for so long
afterwards."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """An ends peer as its record shows it: ``seq`` grows with every record, ``leads`` is its own
    claim."""

    seq: int
    leads: bool = False


class Election:
    """``started`` is the clock when this peer began to take part; ``colleagues``: whom it has
    worked with."""

    def __init__(self, me: PeerId, started: float, colleagues: Colleagues | None = None) -> None:
        self._me, self._started = me, started
        self._colleagues = colleagues if colleagues is not None else Colleagues(me)
        self._seen: Mapping[PeerId, Sighting] = {}
        self._follows: Mapping[PeerId, PeerId] | None = None
        self._behind: dict[PeerId, set[PeerId]] = {}
        """Who says that it follows whom, by the followed."""
        self._shunned: dict[PeerId, tuple[float, int]] = {}
        self._doubted: dict[PeerId, float] = {}
        self._told: dict[PeerId, float] = {}
        self.order: Sequence[PeerId] = ()
        """Who takes over, one after the other, as the newest plan followed here says."""
        self.following: PeerId | None = None
        """Whose plan is in force here."""
        self._answered: tuple[PeerId, float] | None = None

    def see(
        self,
        ends: Mapping[PeerId, Sighting],
        follows: Mapping[PeerId, PeerId] | None = None,
        following: PeerId | None = None,
        order: Sequence[PeerId] = (),
    ) -> None:
        """The other ends peers the directory shows now, and of all other peers whose plan each says
        that it follows; :attr:`following` and :attr:`order`."""
        self._seen, self.following, self.order = ends, following, order
        if follows is not self._follows:
            self._follows, self._behind = follows, {}
            for peer, whom in (follows or {}).items():
                self._behind.setdefault(whom, set()).add(peer)
        self._shunned = {p: (until, seq) for p, (until, seq) in self._shunned.items() if p in ends}

    def tells(self, peer: PeerId, now: float) -> None:
        """This peer tells that one, as its leader, that it is there."""
        self._told = {p: at for p, at in self._told.items() if now - at < TOLD_S} | {peer: now}

    def heeds(self, peer: PeerId, now: float) -> bool:
        """Whether a plan of that peer is one to follow: it was taken for the leader a moment ago,
        and told so."""
        return now - self._told.get(peer, -TOLD_S) < TOLD_S

    def shun(self, peer: PeerId, now: float) -> None:
        """It did not answer."""
        self._no_longer(peer)
        seen = self._seen.get(peer)
        self._shunned[peer] = (now + SHUN_S, seen.seq if seen else 0)

    def doubt(self, peer: PeerId, now: float) -> None:
        """It answered that it does not lead: it has just stopped, or not yet begun."""
        self._no_longer(peer)
        self._doubted = {p: until for p, until in self._doubted.items() if now < until} | {
            peer: now + DOUBT_S
        }

    def answered(self, peer: PeerId, now: float) -> None:
        """It took what a leader is told."""
        self._answered = peer, now

    def _no_longer(self, peer: PeerId) -> None:
        if self._answered is not None and self._answered[0] == peer:
            self._answered = None

    def _sightings(self, now: float) -> Mapping[PeerId, Sighting]:
        if self._answered is None or now - self._answered[1] > KEEP_S:
            return self._seen
        peer = self._answered[0]
        return {
            **self._seen,
            peer: Sighting(self._seen[peer].seq if peer in self._seen else 0, leads=True),
        }

    def forgive(self, peer: PeerId) -> None:
        """It sent what only a leader sends."""
        self._shunned.pop(peer, None)
        self._doubted.pop(peer, None)

    def leader(self, now: float, *, able: bool, leads: bool) -> PeerId | None:
        """The leader; None when no ends peer is seen. ``able``: this peer could lead; ``leads``: it
        does."""
        live = {
            p: s
            for p, s in self._sightings(now).items()
            if p != self._me and not self._is_shunned(p, s, now)
        }
        sure = {p: s for p, s in live.items() if now >= self._doubted.get(p, now)}
        others = sure or ({} if able else live)
        incumbents = {p for p, s in others.items() if s.leads}
        if leads and able:
            incumbents.add(self._me)
        support = {p: self._support(p) for p in incumbents}
        if any(support.values()):
            return min(support, key=lambda p: (-support[p], p))
        waits = not able or (others and now - self._started < LOOK_S)
        return self._next(others if waits else {*others, self._me})

    def _next(self, able: Collection[PeerId]) -> PeerId | None:
        """Who takes over where nobody leads: the first of those who vote, in the order of the
        newest plan. Who has worked with nobody takes all others for equal, itself too."""
        mine = {*self._colleagues.all, self._me} if self._colleagues.all else set[PeerId]()
        place = {p: i for i, p in enumerate(self.order)}
        return min(able, key=lambda p: (place.get(p, len(place)), p not in mine, p), default=None)

    def _support(self, leader: PeerId) -> int:
        """How many say that they follow it, itself included."""
        followers = {*self._behind.get(leader, ()), leader}
        if self.following == leader:
            followers.add(self._me)
        if not self._colleagues.all:
            return len(followers)
        known = len(followers & (self._colleagues.all | {self._me}))
        return known + min(known, len(followers) - known)

    def _is_shunned(self, peer: PeerId, seen: Sighting, now: float) -> bool:
        if peer not in self._shunned:
            return False
        until, seq = self._shunned[peer]
        if now < until:
            # its last words reach us a little later
            self._shunned[peer] = (
                until,
                max(seq, seen.seq),
            )
            return True
        # A peer that is dead or cut off leaves its last record behind: only a newer one says that
        # it is back.
        return seen.seq <= seq
