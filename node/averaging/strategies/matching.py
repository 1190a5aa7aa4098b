"""Finding a group through the directory, where no view says who is there. One machine for each
attempt of each member. Enters: who declared the same key, what others asked and said, the time.
Leaves: what to declare, look up, ask, answer; the group. Never: a fixed wait.

Members under one key are ranked by the hash of (round, key, peer). Everybody asks the best-ranked
member it sees, itself included, so asking goes strictly upwards and cannot run in circles. The best
leads: it closes the group at once when it is full, or everybody ``expected`` is in; otherwise when
nobody new has come for as long as twice the longest gap between arrivals. A leader that sees
somebody better hands its followers over to it. What a leader closes is believed only as far as its
members declared the key themselves; everybody in a group knows who leads next when the leader is
lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from node.averaging.strategies.strategy import leaders, rank
from node.core.ids import PeerId

LOOKS = 2
"""Looks at the directory without anybody new before a group of unknown size is closed: one may have
been too early."""


@dataclass(frozen=True, slots=True)
class FindGroup:
    """Find a group now."""


@dataclass(frozen=True, slots=True)
class PeersRead:
    """The directory's answer to :class:`ReadPeers`: ``peers`` declared the key."""

    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """``peer`` wants to be in the group we lead."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Taken:
    """``leader`` will have us in its group and tells when it is closed."""

    leader: PeerId


@dataclass(frozen=True, slots=True)
class JoinDeclined:
    """``peer`` does not have us: it follows ``better`` itself; None: its group is closed."""

    peer: PeerId
    better: PeerId | None = None


@dataclass(frozen=True, slots=True)
class GroupNamed:
    """``leader`` says: this is the group."""

    leader: PeerId
    members: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class MemberLost:
    """``peer`` cannot be reached, or has not answered in time."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time asked for by :class:`SetTimer` has come."""


@dataclass(frozen=True, slots=True)
class Declare:
    """Write that we are there under the key, until ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class ReadPeers:
    """Read who is there under the key, and give :class:`PeersRead` in any case; empty when the
    directory does not answer."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask ``leader`` to have us."""

    leader: PeerId


@dataclass(frozen=True, slots=True)
class Take:
    """Tell ``peer`` that we have it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class DeclineJoin:
    """Tell ``peer`` that we do not; ``better``: whom to ask instead."""

    peer: PeerId
    better: PeerId | None


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Tell all ``members`` but ourselves that they are the group."""

    members: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Met:
    """Done: the group. ``members[0]`` leads, the next succeed it."""

    members: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Alone:
    """Done: no group. ``liar``: who told of a group that cannot be, if that is why."""

    reason: str
    liar: PeerId | None = None


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Give :class:`TimerFired` at this time."""

    at: float


Event = (
    FindGroup
    | PeersRead
    | JoinRequested
    | Taken
    | JoinDeclined
    | GroupNamed
    | MemberLost
    | TimerFired
)
Action = Declare | ReadPeers | Ask | Take | DeclineJoin | NameGroup | Met | Alone | SetTimer


@dataclass
class Matching:
    """``me`` looks for at most ``most`` members under ``key`` in ``round``. ``expected``: members
    under this key, as far as known (0: unknown); ``deadline``: when it gives up; ``look_s``: pause
    between looks, at first. Times are the caller's clock."""

    me: PeerId
    key: str
    round: int
    most: int
    deadline: float
    expected: int = 0
    least: int = 2
    look_s: float = 0.25
    done: Met | Alone | None = None
    _seen: set[PeerId] = field(default_factory=set)
    _gone: set[PeerId] = field(default_factory=set)
    _followers: set[PeerId] = field(default_factory=set)
    _leader: PeerId | None = None
    _told: GroupNamed | None = None
    _quiet_looks: int = 0
    _last_came: float = 0.0
    _gap: float = 0.0
    _looking: bool = False
    _wake: float = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about it. After the end only those who still ask are answered, and a lost
        leader is succeeded."""
        if self.done is not None:
            return self._afterwards(event)
        if now >= self.deadline:
            return self._give_up()
        match event:
            case FindGroup():
                self._last_came, self._looking = now, True
                return [Declare(self.deadline), ReadPeers(), *self._later(now)]
            case PeersRead():
                return self._saw(event, now)
            case JoinRequested(peer):
                return self._asked(peer, now)
            case Taken():
                return []  # we wait for it anyway: until it tells, refuses or is lost
            case JoinDeclined():
                return self._refused(event, now)
            case GroupNamed():
                return self._tell(event, now)
            case MemberLost(peer):
                return self._lose(peer, now)
            case TimerFired():
                return self._tick(now)

    @property
    def leading(self) -> bool:
        """Whether others may follow us."""
        return self._leader == self.me

    def _saw(self, event: PeersRead, now: float) -> list[Action]:
        self._looking = False
        fresh = event.peers - self._seen - {self.me}
        self._seen |= fresh
        self._came(fresh, now)
        self._quiet_looks = 0 if fresh else self._quiet_looks + 1
        if self._told is not None:
            return self._judge(self._told)
        return [*self._choose(now), *self._close_if_ready(now)]

    def _asked(self, peer: PeerId, now: float) -> list[Action]:
        if self._leader not in (None, self.me):
            return [DeclineJoin(peer, self._leader)]
        if self._rank(peer) < self._rank(self.me):
            # It asks below itself, having seen less than we do: it leads, we follow.
            self._came({peer} - self._seen, now)
            self._seen.add(peer)
            return [DeclineJoin(peer, None), *self._choose(now)]
        self._leader = self.me
        if peer not in self._followers:
            self._came({peer}, now)
            self._seen.add(peer)
            self._gone.discard(peer)
            self._followers.add(peer)
        return [Take(peer), *self._close_if_ready(now)]

    def _refused(self, event: JoinDeclined, now: float) -> list[Action]:
        if event.peer != self._leader:
            return []
        self._leader = None
        if (
            event.better is None
            or event.better == self.me
            or self._rank(event.better) >= self._rank(event.peer)
        ):
            self._gone.add(event.peer)
        else:
            self._seen.add(event.better)
        return self._choose(now)

    def _tell(self, event: GroupNamed, now: float) -> list[Action]:
        if event.leader != self._leader:
            return []
        members = event.members
        if (
            self.me not in members
            or event.leader not in members
            or len(set(members)) != len(members)
            or len(members) > self.most
        ):
            return self._end(Alone("the leader told of a group that cannot be", event.leader))
        self._told, self._quiet_looks = event, 0
        return self._judge(event)

    def _judge(self, told: GroupNamed) -> list[Action]:
        """Believe it when all members declared themselves; they may have done so after our last
        look."""
        if set(told.members) - self._seen - {self.me}:
            if self._quiet_looks > LOOKS:
                return self._end(Alone("the leader told of members who did not declare themselves"))
            return self._look()
        # The leader first whatever the ranks say, then in order: so all agree who succeeds it.
        return self._end(
            Met((told.leader, *leaders(set(told.members) - {told.leader}, self._salt)))
        )

    def _lose(self, peer: PeerId, now: float) -> list[Action]:
        self._gone.add(peer)
        self._followers.discard(peer)
        if peer == self._leader:
            self._leader, self._told = None, None
        return [*self._choose(now), *self._close_if_ready(now)]

    def _tick(self, now: float) -> list[Action]:
        if now < self._wake:
            return []
        return [
            *self._close_if_ready(now),
            *([] if self.done else [*self._look(), *self._later(now)]),
        ]

    def _choose(self, now: float) -> list[Action]:
        """Follow the best that is there. A leader with somebody better above it hands its followers
        over.

        Whoever was asked is waited for: it may have closed a group with us. If there is somebody
        better, it says so.
        """
        if self._leader not in (None, self.me):
            return []
        there = (self._seen | {self.me}) - self._gone
        best = min(there, key=self._rank)
        if best == self.me:
            self._leader = self.me
            return []
        followers, self._followers = sorted(self._followers), set()
        self._leader = best
        return [*(DeclineJoin(peer, best) for peer in followers), Ask(best)]

    def _close_if_ready(self, now: float) -> list[Action]:
        if self.done is not None or not self.leading:
            return []
        size = 1 + len(self._followers)
        if (
            size >= self.most
            or (self.expected and size >= self.expected)
            or (size >= self.least and self._settled(now))
        ):
            chosen = set(leaders(self._followers, self._salt)[: self.most - 1])
            members = (self.me, *leaders(chosen, self._salt))
            left = [DeclineJoin(peer, None) for peer in sorted(self._followers - chosen)]
            return [NameGroup(members), *left, *self._end(Met(members))]
        return []

    def _settled(self, now: float) -> bool:
        """Everybody who declared is in, and has been for a while that fits how they came. Who was
        expected is waited for longer."""
        if (self._seen - self._gone) - self._followers or self._quiet_looks < LOOKS:
            return False
        patience = 4 if self.expected else 2
        return now - self._last_came >= patience * max(self._gap, self.look_s)

    def _afterwards(self, event: Event) -> list[Action]:
        match event, self.done:
            case JoinRequested(peer), _:
                return [DeclineJoin(peer, None)]
            case MemberLost(peer), Met(members) if peer in members:
                return self._end(Met(tuple(p for p in members if p != peer)))
            case _:
                return []

    def _came(self, fresh: Collection[PeerId], now: float) -> None:
        if fresh:
            self._gap, self._last_came = max(self._gap, now - self._last_came), now

    def _look(self) -> list[Action]:
        if self._looking:
            return []
        self._looking = True
        return [ReadPeers()]

    def _later(self, now: float) -> list[Action]:
        self._wake = min(self.deadline, now + self.look_s)
        return [SetTimer(self._wake)]

    def _give_up(self) -> list[Action]:
        """At the deadline a leader closes with whom it has."""
        if self.leading and 1 + len(self._followers) >= self.least:
            members = (self.me, *leaders(self._followers, self._salt)[: self.most - 1])
            return [NameGroup(members), *self._end(Met(members))]
        others = (self._seen | self._followers) - self._gone
        return self._end(Alone("nobody else came" if not others else "no group was closed in time"))

    def _end(self, done: Met | Alone) -> list[Action]:
        self.done = done
        return [done]

    @property
    def _salt(self) -> str:
        return f"{self.round}:{self.key}"

    def _rank(self, peer: PeerId) -> tuple[bytes, PeerId]:
        return rank(peer, self._salt)
