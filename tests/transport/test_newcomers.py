"""The queue of newcomers, in virtual time: crowds of joiners that come back at the time they were
given."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from node.core.ids import PeerId
from node.transport.newcomers import (
    AGAIN_LEAST_S,
    AGAIN_MOST_S,
    AT_ONCE,
    CONTENDED,
    FASTEST_PACE_S,
    FIRST_PACE_S,
    LATE_S,
    LONGEST,
    SLOWEST_PACE_S,
    TURN_S,
    Newcomers,
    QueuePlace,
)


@dataclass
class Crowd:
    """Joiners that ask, and ask again at the time they were given.

    `busy(turns)`: share of its time that the peer waits for a processor, after `turns` newcomers
    have had their turn.
    """

    busy: Callable[[int], float] = lambda turns: 0.0
    queue: Newcomers = field(default_factory=Newcomers)
    turns: dict[PeerId, float] = field(default_factory=dict)
    told: dict[PeerId, list[QueuePlace]] = field(default_factory=dict)
    asked: int = 0

    def play(self, arrivals: dict[str, float], until: float, seed: int = 1) -> None:
        dice = random.Random(seed)
        due = [(at, PeerId(name)) for name, at in arrivals.items()]
        heapq.heapify(due)
        second = 0.0
        while due and due[0][0] < until:
            at, peer = heapq.heappop(due)
            while second < at:
                self.queue.measured(0.0, self.busy(len(self.turns)), second)
                second += 1.0
            self.asked += 1
            place = self.queue.ask(peer, at)
            if place is None:
                self.turns[peer] = at
            else:
                self.told.setdefault(peer, []).append(place)
                heapq.heappush(due, (at + place.again_s * dice.uniform(0.75, 1.5), peer))


def crowd_of(count: int, within_s: float = 5.0) -> dict[str, float]:
    return {f"peer-{i:03}": within_s * i / count for i in range(count)}


def test_a_few_newcomers_never_wait():
    queue = Newcomers()
    assert [queue.ask(PeerId(f"p{i}"), 0.0) for i in range(int(AT_ONCE))] == [None] * int(AT_ONCE)
    assert queue.waiting == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_gets_in_at_an_idle_peer_in_its_order(seed):
    crowd = Crowd()
    crowd.play(crowd_of(60), until=60.0, seed=seed)
    assert len(crowd.turns) == 60
    assert max(crowd.turns.values()) < 35.0
    # Jitter lets some neighbours change places; nobody is left behind.
    order = sorted(crowd.turns, key=lambda p: crowd.turns[p])
    assert max(abs(order.index(p) - i) for i, p in enumerate(sorted(crowd.turns))) <= 20


def test_a_crowd_gets_in_at_a_peer_that_is_always_busy():
    crowd = Crowd(busy=lambda turns: 0.9)
    crowd.play(crowd_of(60), until=300.0)
    assert len(crowd.turns) == 60
    assert max(crowd.turns.values()) < 60 * SLOWEST_PACE_S + AGAIN_MOST_S
    assert crowd.asked < 60 * 15, "who waits asks rarely"


def test_load_slows_the_queue_down_and_rest_speeds_it_up():
    queue = Newcomers()
    for i in range(20):
        queue.ask(PeerId(f"p{i}"), 0.0)
    for second in range(20):
        queue.measured(0.0, 0.0, float(second))
    assert queue.pace_s == FASTEST_PACE_S
    for late, contended in ((LATE_S + 0.1, 0.0), (0.0, CONTENDED + 0.1)):
        before = queue.pace_s
        queue.measured(late, contended, 21.0)
        assert queue.pace_s > before
    for _ in range(20):
        queue.measured(LATE_S + 0.1, 0.0, 22.0)
    assert queue.pace_s == SLOWEST_PACE_S


def test_every_crowd_begins_slowly():
    queue = Newcomers()
    for i in range(5):
        queue.ask(PeerId(f"p{i}"), 0.0)
    for second in range(6):
        queue.measured(0.0, 0.0, float(second))
    assert queue.pace_s < FIRST_PACE_S
    for second in range(60, 70):
        queue.measured(0.0, 0.0, float(second))  # the fifth has gone
    assert (queue.waiting, queue.pace_s) == (0, FIRST_PACE_S)


def test_a_turn_covers_all_questions_of_joining():
    queue = Newcomers()
    me = PeerId("me")
    assert queue.ask(me, 0.0) is None
    for i in range(50):
        queue.ask(PeerId(f"p{i}"), 0.0)
    assert queue.ask(me, TURN_S - 1) is None
    assert isinstance(queue.ask(PeerId("late"), 1.0), QueuePlace)


def test_a_peer_that_does_not_come_back_loses_its_place():
    queue = Newcomers()
    for i in range(10):
        queue.ask(PeerId(f"p{i}"), 0.0)
    me = PeerId("me")
    first = queue.ask(me, 0.1)
    assert first is not None
    assert first.number == 10 - int(AT_ONCE) + 1
    queue.measured(LATE_S + 1, 0.0, 100.0)
    assert queue.waiting == 0
    assert queue.ask(me, 100.0) is None


def test_a_flood_of_keys_takes_no_more_than_its_places():
    queue = Newcomers()
    places = [queue.ask(PeerId(f"p{i}"), 0.0) for i in range(3 * LONGEST)]
    assert queue.waiting == LONGEST
    assert places[-1] == QueuePlace(LONGEST + 1, AGAIN_MOST_S)
    assert all(p is None or AGAIN_LEAST_S <= p.again_s <= AGAIN_MOST_S for p in places)
