"""Matching through the directory: machines in virtual time, over lines with delays, losses and
members that die."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from node.averaging.strategies import matching as m
from node.averaging.strategies.matching import Alone, Matching, Met
from node.core.ids import PeerId


class Net:
    """Members under one key. A message takes ``trip`` seconds, the directory as long; who is dead
    is noticed after ``dead_s``."""

    def __init__(
        self,
        count: int,
        most: int,
        seed: int = 0,
        *,
        deadline: float = 30.0,
        expected: int = 0,
        trip: float = 0.05,
    ) -> None:
        self.dice = np.random.default_rng(seed)
        self.peers = [PeerId(f"p{i:02}") for i in range(count)]
        self.machines = {p: Matching(p, "key", 7, most, deadline, expected) for p in self.peers}
        self.events: list[tuple[float, int, PeerId, m.Event]] = []
        self.ids, self.trip, self.now = itertools.count(), trip, 0.0
        self.declared: dict[PeerId, float] = {}
        self.dead: set[PeerId] = set()
        self.ended: dict[PeerId, float] = {}
        self.met: dict[PeerId, tuple[PeerId, ...]] = {}
        self.messages = 0

    def at(self, when: float, peer: PeerId, event: m.Event) -> None:
        heapq.heappush(self.events, (when, next(self.ids), peer, event))

    def send(self, sender: PeerId, to: PeerId, event: m.Event) -> None:
        self.messages += 1
        if to in self.dead:
            self.at(self.now + 1.0, sender, m.MemberLost(to))
        else:
            self.at(self.now + self.trip * (0.5 + self.dice.random()), to, event)

    def act(self, me: PeerId, actions: Iterable[m.Action]) -> None:
        for action in actions:
            if isinstance(action, m.Declare):
                self.declared[me] = self.now + self.trip * (0.5 + self.dice.random())
            elif isinstance(action, m.ReadPeers):
                there = frozenset(p for p, since in self.declared.items() if since <= self.now)
                self.at(self.now + self.trip, me, m.PeersRead(there))
            elif isinstance(action, m.Ask):
                self.send(me, action.leader, m.JoinRequested(me))
            elif isinstance(action, m.Take):
                self.send(me, action.peer, m.Taken(me))
            elif isinstance(action, m.DeclineJoin):
                self.send(me, action.peer, m.JoinDeclined(me, action.better))
            elif isinstance(action, m.NameGroup):
                for peer in action.members:
                    if peer != me:
                        self.send(me, peer, m.GroupNamed(me, action.members))
            elif isinstance(action, m.SetTimer):
                self.at(action.at, me, m.TimerFired())
            else:
                self.ended.setdefault(me, self.now)
                if isinstance(action, Met):  # the first: later ones leave out who was lost since
                    self.met.setdefault(me, action.members)

    def run(
        self, begins: dict[PeerId, float] | None = None, kills: dict[PeerId, float] | None = None
    ) -> None:
        for peer in self.peers:
            self.at((begins or {}).get(peer, 0.0), peer, m.FindGroup())
        kills = dict(kills or {})
        while self.events:
            self.now, _, peer, event = heapq.heappop(self.events)
            for victim, when in list(kills.items()):
                if when <= self.now:
                    self.dead.add(victim)
                    del kills[victim]
            if peer not in self.dead:
                self.act(peer, self.machines[peer].handle(event, self.now))

    def groups(self) -> list[tuple[PeerId, ...]]:
        return sorted({group for peer, group in self.met.items() if peer not in self.dead})


def assert_sound(net: Net, most: int) -> None:
    """Groups do not overlap, nobody's view of its group differs, everybody came to an end."""
    alive = [p for p in net.peers if p not in net.dead]
    assert all(net.machines[p].done is not None for p in alive)
    seen: set[PeerId] = set()
    for group in net.groups():
        assert 2 <= len(group) <= most
        assert not seen & set(group)
        seen |= set(group)
        for member in group:
            if member not in net.dead:
                assert net.met.get(member, group) == group


def test_a_full_group_closes_without_waiting() -> None:
    net = Net(8, 8)
    net.run()
    assert len(net.groups()) == 1
    assert len(net.groups()[0]) == 8
    assert max(net.ended.values()) < 1.0  # a few trips of 0.05 s and one more look


def test_who_is_expected_is_enough() -> None:
    net = Net(5, 16, expected=5)
    net.run()
    assert [len(g) for g in net.groups()] == [5]
    assert max(net.ended.values()) < 1.0


def test_a_group_of_unknown_size_closes_before_the_deadline() -> None:
    net = Net(6, 16, deadline=600.0)
    net.run()
    assert [len(g) for g in net.groups()] == [6]
    assert max(net.ended.values()) < 3.0


def test_more_than_fit_make_several_groups() -> None:
    net = Net(20, 4)
    net.run()
    assert_sound(net, 4)
    assert sum(len(g) for g in net.groups()) == 20
    assert [len(g) for g in net.groups()] == [4] * 5


@pytest.mark.parametrize("seed", range(60))
def test_whoever_comes_dies_or_is_late_groups_do_not_overlap(seed: int) -> None:
    dice = np.random.default_rng(seed)
    count, most = int(dice.integers(2, 18)), int(dice.integers(2, 9))
    net = Net(
        count,
        most,
        seed,
        deadline=20.0,
        expected=int(dice.choice([0, count])),
        trip=float(dice.choice([0.01, 0.2])),
    )
    begins = {p: float(dice.random() * dice.choice([0.0, 1.0, 5.0])) for p in net.peers}
    kills = {p: float(dice.random() * 3) for p in net.peers if dice.random() < 0.15}
    net.run(begins, kills)
    assert_sound(net, most)
    assert net.now < 30.0
    if not kills and count >= 2:
        assert net.groups()


def test_members_regroup_when_a_leader_dies_before_closing() -> None:
    net = Net(6, 6, expected=6)
    first = min(net.peers, key=net.machines[net.peers[0]]._rank)
    net.run(kills={first: 0.06})
    assert [set(g) for g in net.groups()] == [set(net.peers) - {first}]


def test_every_member_knows_the_successor_of_a_lost_leader() -> None:
    net = Net(5, 5)
    net.run()
    (group,) = net.groups()
    after = {p: net.machines[p].handle(m.MemberLost(group[0]), net.now) for p in group[1:]}
    assert set(map(tuple, after.values())) == {(Met(group[1:]),)}
    assert net.machines[group[1]].handle(m.MemberLost(PeerId("stranger")), net.now) == []


def machine(me: str = "p1", most: int = 4) -> Matching:
    made = Matching(PeerId(me), "key", 1, most, deadline=10.0)
    made.handle(m.FindGroup(), 0.0)
    return made


def order_of(*names: str) -> list[PeerId]:
    return sorted(map(PeerId, names), key=machine()._rank)


def test_a_group_that_cannot_be_is_not_believed() -> None:
    lead, me, other = order_of("a", "b", "c")
    for members in ((lead, other), (lead, me, me), (me, other), (lead, me, *map(PeerId, "defgh"))):
        mine = machine(me)
        mine.handle(m.PeersRead(frozenset((lead, other))), 0.1)
        (done,) = mine.handle(m.GroupNamed(lead, members), 0.2)
        assert isinstance(done, Alone)
        assert done.liar == lead


def test_undeclared_group_members_are_looked_up_then_rejected() -> None:
    lead, me, other = order_of("a", "b", "c")
    for found in (True, False):
        mine = machine(me)
        mine.handle(m.PeersRead(frozenset((lead,))), 0.1)
        assert mine.handle(m.GroupNamed(lead, (lead, me, other)), 0.2) == [m.ReadPeers()]
        for look in range(3):
            actions = mine.handle(
                m.PeersRead(frozenset((lead, other)) if found else frozenset((lead,))), 0.3 + look
            )
            if mine.done:
                break
        assert actions == (
            [Met((lead, *sorted((me, other), key=mine._rank)))] if found else [mine.done]
        )
        assert isinstance(mine.done, Met) is found


def test_only_the_leader_that_was_asked_is_listened_to() -> None:
    lead, me, other = order_of("a", "b", "c")
    mine = machine(me)
    assert m.Ask(lead) in mine.handle(m.PeersRead(frozenset((lead, other))), 0.1)
    assert mine.handle(m.GroupNamed(other, (other, me)), 0.2) == []
    assert mine.handle(m.JoinDeclined(other, None), 0.2) == []
    assert mine.handle(m.JoinRequested(other), 0.2) == [m.DeclineJoin(other, lead)]


def test_a_leader_hands_its_followers_to_a_better_one() -> None:
    lead, me, other = order_of("a", "b", "c")
    mine = machine(me)
    assert m.Take(other) in mine.handle(m.JoinRequested(other), 0.1)
    assert mine.handle(m.PeersRead(frozenset((lead, other))), 0.2) == [
        m.DeclineJoin(other, lead),
        m.Ask(lead),
    ]
    mine.handle(m.MemberLost(lead), 0.3)
    assert mine.leading
    # with nobody: those it handed over went elsewhere
    assert isinstance(mine.handle(m.TimerFired(), 10.0)[0], Alone)


def test_a_leader_closes_its_group_at_the_deadline() -> None:
    lead, me, other = order_of("a", "b", "c")
    mine = machine(lead)
    mine.handle(m.JoinRequested(other), 0.1)
    assert mine.handle(m.TimerFired(), 10.0) == [m.NameGroup((lead, other)), Met((lead, other))]
    assert mine.handle(m.JoinRequested(me), 11.0) == [m.DeclineJoin(me, None)]
    assert isinstance(machine("x").handle(m.TimerFired(), 10.0)[0], Alone)
