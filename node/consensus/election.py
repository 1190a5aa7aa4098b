"""Election of the epochs' leader, as one peer sees it, and the peers that it has worked with. Pure:
sightings, plans and time in, a PeerId out.

A leader stays the leader while it lives, so a newcomer with a smaller PeerId does not cost an
epoch. When no peer leads, the first live ends peer in the newest plan's list of voters takes over;
the list is ordered by how long they have voted. Before the first plan it is the smallest PeerId,
colleagues first. When a partition heals there are two leaders: the one with more followers stays;
with equally many, the one with the smaller PeerId.

A claim to lead costs nothing, and neither does a key or a small PeerId. So followers are counted.
Colleagues are the peers that this one has worked with; all others are strangers, and strangers
never count for more than the colleagues among the same leader's followers. A peer that no colleague
follows cannot win by making keys. Nor do strangers outweigh colleagues in the choice of the history
that goes on, which the leader makes.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from node.core.ids import PeerId

CLAIM_S = 5.0
"""Seconds for which a heartbeat to a peer that does not lead counts as evidence that its sender has
lost its leader."""
SHUN_S = 10.0
"""Seconds for which an ends peer that did not answer cannot be the leader. After that it can be
only once a newer record of it is seen."""
DOUBT_S = 3.0
"""Seconds for which a peer that denied that it leads comes after all others."""
GRACE_S = 2.0
"""Seconds before the doubt about a peer that has never led: it may not know yet that its leader is
gone."""
SAID_S = 10.0
"""Seconds for which a peer that said that it leads counts as leading, until its record says so."""
KEEP_S = 60.0
"""Seconds for which a peer that accepted our heartbeat as the leader counts as leading, whatever
the directory shows: on a busy machine records come late."""
LOOK_S = 2.0
"""Seconds that a peer which sees other ends peers waits for one of them to say that it leads: one
that has just started, and after the end of a leader one that does not vote."""
TOLD_S = 60.0
"""Seconds for which a leader's plans are followed after the last heartbeat that we sent it. A
leader plans with the peers that send it heartbeats."""

RIPE_S = 30.0
"""Seconds that a peer has to be a current member of the plans followed here to become a colleague.
At the start of a run there are no colleagues, and peers that start together may begin as two swarms
that should not stay strangers. So when the first peer becomes a colleague, all peers met until then
become colleagues too, even if a partition has separated them meanwhile. That admits no stranger who
could not have become a colleague by staying."""
KNOWN = 4096
"""Number of colleagues that are remembered: the ones met last."""


class Colleagues:
    """The colleagues of one peer, itself not included."""

    def __init__(self, me: PeerId, ripe_s: float = RIPE_S, most: int = KNOWN) -> None:
        self._me = me
        self._ripe_s = ripe_s
        self._most = most
        self._since: dict[PeerId, float] = {}
        self._early: set[PeerId] = set()
        """Peers met while nobody was a colleague yet."""
        self._ripe: dict[PeerId, None] = {}
        self.all: frozenset[PeerId] = frozenset()
        """The colleagues."""

    def recall(self, before: Collection[PeerId]) -> None:
        """Add the colleagues from before this peer was restarted."""
        self._ripe = {**dict.fromkeys(p for p in before if p != self._me), **self._ripe}
        self._forget(self._most)

    def meet(self, peers: Collection[PeerId], now: float) -> None:
        """``peers`` are the current members of a plan that is followed here."""
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


@dataclass(frozen=True, slots=True)
class Sighting:
    """An ends peer as its record shows it: ``seq`` grows with every record, ``leads`` is its own
    claim."""

    seq: int
    leads: bool = False


class Suspicion:
    """Doubt about ends peers: some did not answer (shunned), some denied that they lead
    (doubted)."""

    def __init__(self) -> None:
        self._shunned: dict[PeerId, tuple[float, int]] = {}
        """Peers that did not answer: end of :data:`SHUN_S`, and ``seq`` of the last record."""
        self._doubted: dict[PeerId, tuple[float, float]] = {}
        """Peers that denied that they lead: time of the first denial, and end of the doubt."""

    def __bool__(self) -> bool:
        """True if any peer is doubted or shunned, or was lately."""
        return bool(self._shunned or self._doubted)

    def keep(self, seen: Collection[PeerId]) -> None:
        """Forget the shunned peers outside ``seen``: they have no record any more."""
        self._shunned = {p: (until, seq) for p, (until, seq) in self._shunned.items() if p in seen}

    def shun(self, peer: PeerId, seq: int, now: float) -> None:
        """``peer`` did not answer; ``seq``: number of its newest record."""
        self._shunned[peer] = (now + SHUN_S, seq)

    def doubt(self, peer: PeerId, now: float) -> None:
        """``peer`` denied that it leads."""
        self._doubted = {p: d for p, d in self._doubted.items() if now < d[1]}
        since, _ = self._doubted.get(peer, (now, 0.0))
        self._doubted[peer] = since, now + DOUBT_S

    def forgive(self, peer: PeerId) -> None:
        """``peer`` lives, and may lead."""
        self._shunned.pop(peer, None)
        self._doubted.pop(peer, None)

    def shunned(self, seen: Collection[PeerId]) -> list[PeerId]:
        """The peers of ``seen`` that did not answer, and have not shown since that they are
        back."""
        return sorted(self._shunned.keys() & set(seen))

    def is_silent(self, peer: PeerId, now: float) -> bool:
        """Return True if ``peer`` did not answer in the last :data:`SHUN_S`."""
        until, _ = self._shunned.get(peer, (now, 0))
        return now < until

    def is_doubted(self, peer: PeerId, seen: Sighting, now: float) -> bool:
        """Return True while others are preferred to ``peer``."""
        since, until = self._doubted.get(peer, (now, now))
        return now < until and (seen.leads or now - since >= GRACE_S)

    def is_shunned(self, peer: PeerId, seen: Sighting, now: float) -> bool:
        """Return True while ``peer`` cannot be the leader."""
        if peer not in self._shunned:
            return False
        until, seq = self._shunned[peer]
        if now < until:
            # a record that it posted before it died may arrive only now
            self._shunned[peer] = (until, max(seq, seen.seq))
            return True
        # A peer that is dead or cut off leaves its last record behind: only a newer one says that
        # it is back.
        return seen.seq <= seq


class Incumbents:
    """Peers that lead by another sign than their record, which may come late: they said so, or
    accepted a heartbeat of this peer."""

    def __init__(self) -> None:
        self._said: dict[PeerId, float] = {}
        """Time at which each peer last said that it leads."""
        self._answered: tuple[PeerId, float] | None = None

    @property
    def accepted(self) -> bool:
        """True if a leader has accepted a heartbeat of this peer, and answered each one since."""
        return self._answered is not None

    def says(self, peer: PeerId, seen: Collection[PeerId], now: float) -> None:
        """``peer`` says that it leads. Only the word of a peer in ``seen`` is kept."""
        self._said = {p: at for p, at in self._said.items() if now - at < SAID_S}
        if peer in seen:
            self._said[peer] = now

    def answered(self, peer: PeerId, now: float) -> None:
        """``peer`` accepted a heartbeat as the leader."""
        self._answered = peer, now

    def no_longer(self, peer: PeerId) -> None:
        """``peer`` denied that it leads, or did not answer."""
        self._said.pop(peer, None)
        if self._answered is not None and self._answered[0] == peer:
            self._answered = None

    def keep(self, admitted: Callable[[PeerId], bool]) -> None:
        """Forget the peers that are not ``admitted``."""
        known = {*self._said}
        if self._answered is not None:
            known.add(self._answered[0])
        for peer in known:
            if not admitted(peer):
                self.no_longer(peer)

    def at(self, now: float) -> set[PeerId]:
        """Peers that lead at ``now`` by these signs."""
        leads = {p for p, at in self._said.items() if now - at < SAID_S}
        if self._answered is not None and now - self._answered[1] <= KEEP_S:
            leads.add(self._answered[0])
        return leads


class Followers:
    """Followers of each leader, as they report themselves; ``me`` is this peer."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._follows: Mapping[PeerId, PeerId] | None = None
        self._behind: dict[PeerId, set[PeerId]] = {}
        self._followed: PeerId | None = None
        """The leader of the plan in force here."""

    def see(self, follows: Mapping[PeerId, PeerId] | None, followed: PeerId | None) -> None:
        """Take a reading: the leader of each other peer, and the leader that this peer follows."""
        self._followed = followed
        if follows is not self._follows:
            self._follows = follows
            self._behind = {}
            for peer, whom in (follows or {}).items():
                self._behind.setdefault(whom, set()).add(peer)

    def support(self, leader: PeerId, known: frozenset[PeerId]) -> int:
        """Number of followers that ``leader`` has, itself included. Strangers never count for more
        than the colleagues (``known``) among them."""
        followers = {*self._behind.get(leader, ()), leader}
        if self._followed == leader:
            followers.add(self._me)
        if not known:
            return len(followers)
        count = len(followers & (known | {self._me}))
        return count + min(count, len(followers) - count)


class Election:
    """Election as one peer sees it. ``started``: the clock when this peer began to take part."""

    def __init__(self, me: PeerId, started: float) -> None:
        self._me = me
        self._started = started
        self._known: frozenset[PeerId] = frozenset()
        """The colleagues: peers that this one has worked with."""
        self._seen: Mapping[PeerId, Sighting] = {}
        self._order: Sequence[PeerId] = ()
        """Voters of the newest plan followed here, in the order in which they take over the
        lead."""
        self._followers = Followers(me)
        self._suspicion = Suspicion()
        self._incumbents = Incumbents()
        self._told: dict[PeerId, float] = {}
        """Time of the last heartbeat to each peer that was taken for the leader."""
        self._claims: dict[PeerId, float] = {}
        """Last time that each other peer took this one for the leader while it did not lead."""
        self._led = -math.inf
        """Last time that a leader was seen."""

    def see(
        self,
        ends: Mapping[PeerId, Sighting],
        follows: Mapping[PeerId, PeerId] | None = None,
        following: PeerId | None = None,
        order: Sequence[PeerId] = (),
        known: frozenset[PeerId] = frozenset(),
    ) -> None:
        """Take a reading of the directory. ``ends``: other ends peers; ``follows``: for each peer,
        the leader that it says it follows; ``following``: the leader of the plan in force here;
        ``order``: the voters in the order in which they take over; ``known``: the colleagues."""
        self._seen = ends
        self._order = order
        self._known = known
        self._followers.see(follows, following)
        self._suspicion.keep(ends)

    def tells(self, peer: PeerId, now: float) -> None:
        """This peer takes ``peer`` for its leader, and sends it a heartbeat."""
        self._told = {p: at for p, at in self._told.items() if now - at < TOLD_S} | {peer: now}

    def heeds(self, peer: PeerId, now: float) -> bool:
        """Return True if plans of ``peer`` may be followed: this peer took it for its leader, and
        sent it a heartbeat, within :data:`TOLD_S`."""
        return now - self._told.get(peer, -TOLD_S) < TOLD_S

    def shun(self, peer: PeerId, now: float) -> None:
        """``peer`` did not answer: do not take it for the leader for :data:`SHUN_S`."""
        self._incumbents.no_longer(peer)
        seen = self._seen.get(peer)
        seq = 0
        if seen:
            seq = seen.seq
        self._suspicion.shun(peer, seq, now)

    def is_silent(self, peer: PeerId, now: float) -> bool:
        """Return True if ``peer`` did not answer in the last :data:`SHUN_S`."""
        return self._suspicion.is_silent(peer, now)

    @property
    def accepted(self) -> bool:
        """True if a leader has accepted a heartbeat of this peer, and answered each one since."""
        return self._incumbents.accepted

    def shunned(self) -> list[PeerId]:
        """Ends peers in sight that did not answer, and have not shown since that they are back."""
        return self._suspicion.shunned(self._seen.keys())

    def claims(self, peer: PeerId, now: float) -> bool:
        """``peer`` took this peer, which does not lead, for its leader, and sent it a heartbeat.

        Return True if more than half of the voters did so in the last :data:`CLAIM_S`, this peer
        included: their leader is gone, and nothing can be committed without them.
        """
        self._claims = {p: at for p, at in self._claims.items() if now - at < CLAIM_S}
        if peer in self._order:
            self._claims[peer] = now
        claim = {*self._claims, self._me}
        return 2 * sum(p in claim for p in self._order) > len(self._order)

    def doubt(self, peer: PeerId, now: float) -> None:
        """``peer`` answered that it does not lead (it has just stopped, or not yet begun): prefer
        others for :data:`DOUBT_S`."""
        self._incumbents.no_longer(peer)
        self._suspicion.doubt(peer, now)

    def answered(self, peer: PeerId, now: float) -> None:
        """``peer`` accepted a heartbeat as the leader."""
        self._incumbents.answered(peer, now)

    def keep(self, admitted: Callable[[PeerId], bool]) -> None:
        """Forget leaders that are not ``admitted``, whatever they said or answered."""
        self._incumbents.keep(admitted)

    def says(self, peer: PeerId, now: float) -> None:
        """``peer`` says that it leads, so it lives too."""
        self.forgive(peer)
        self._incumbents.says(peer, self._seen.keys(), now)

    def _sightings(self, now: float) -> Mapping[PeerId, Sighting]:
        leads = self._incumbents.at(now)
        if not leads:
            return self._seen
        seqs = {p: self._seen[p].seq if p in self._seen else 0 for p in leads}
        return {**self._seen, **{p: Sighting(seq, leads=True) for p, seq in seqs.items()}}

    def forgive(self, peer: PeerId) -> None:
        """``peer`` lives, and may lead: forget :meth:`shun` and :meth:`doubt`."""
        self._suspicion.forgive(peer)

    def leader(self, now: float, *, able: bool, leads: bool) -> PeerId | None:
        """The leader; None when no ends peer is seen. ``able``: this peer could lead; ``leads``: it
        does."""
        live = {p: s for p, s in self._sightings(now).items() if p != self._me}
        sure = live
        if self._suspicion:
            suspicion = self._suspicion
            live = {p: s for p, s in live.items() if not suspicion.is_shunned(p, s, now)}
            sure = {p: s for p, s in live.items() if not suspicion.is_doubted(p, s, now)}
        others = sure
        if not sure and not able:
            others = live
        incumbents = {p for p, s in others.items() if s.leads}
        if leads and able:
            incumbents.add(self._me)
        support = {p: self._followers.support(p, self._known) for p in incumbents}
        if any(support.values()):
            self._led = now
            return min(support, key=lambda p: (-support[p], p))
        since = self._started
        if self._me not in self._order:
            # Others take over before it, and their records may come late.
            since = max(since, self._led)
        waits = not able or (others and now - since < LOOK_S)
        if waits:
            return self._next(others)
        return self._next({*others, self._me})

    def _next(self, able: Collection[PeerId]) -> PeerId | None:
        """The peer of ``able`` that takes over when nobody leads: the first in the newest plan's
        order of voters. Peers outside that order come last, colleagues first and then by PeerId. A
        peer without colleagues treats all alike, itself too."""
        mine = {*self._known, self._me} if self._known else set[PeerId]()
        place = {p: i for i, p in enumerate(self._order)}
        return min(able, key=lambda p: (place.get(p, len(place)), p not in mine, p), default=None)
