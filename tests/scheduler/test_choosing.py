"""Peers that come to a swarm at one moment, each with a late view of its own, in virtual time."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from node.core.ids import ENDS, PeerId
from node.scheduler import choosing
from node.scheduler.choosing import (
    LOOK_S,
    ROUNDS,
    SETTLE_S,
    STABLE_S,
    WITHOUT_ENDS_S,
    Choosing,
    Placed,
)

LOOK_AGAIN_S = 0.5
Delay = Callable[[random.Random], float]
ANY = (0, 1, 2)
BLOCKS = (1, 2)


class Posted(NamedTuple):
    at: float
    body: Placed
    delays: dict[PeerId, float]


@dataclass
class Hall:
    """A directory: every reader sees every record after a time of its own."""

    dice: random.Random
    delay: Delay
    stages: int
    peers: dict[PeerId, Choosing] = field(default_factory=dict)
    posted: dict[PeerId, list[Posted]] = field(default_factory=dict)
    built: dict[PeerId, float] = field(default_factory=dict)
    late: Counter[PeerId] = field(default_factory=Counter)

    def host(self, stage: int, *names: str) -> None:
        """Peers that have been there for a long time."""
        for name in names:
            self.posted[PeerId(name)] = [Posted(-1e9, Placed(stage), {})]

    def post(self, peer: PeerId, now: float) -> None:
        j = self.peers[peer]
        self.posted.setdefault(peer, []).append(Posted(now, Placed(j.stage, j.able, j.settled), {}))

    def seen_by(self, reader: PeerId, now: float) -> dict[PeerId, Placed]:
        found = {}
        for peer, records in self.posted.items():
            for at, body, delays in records if peer != reader else ():
                if at + delays.setdefault(reader, self.delay(self.dice)) <= now:
                    found[peer] = body
        return found

    def play(self, comers: Mapping[str, tuple[float, tuple[int, ...]]]) -> Counter[int]:
        """Replicas of every stage after all have settled. `comers`: by name, the time in s at which
        the peer comes, and the stages it can host."""
        queue = [(at, PeerId(name)) for name, (at, _) in comers.items()]
        heapq.heapify(queue)
        while queue:
            now, peer = heapq.heappop(queue)
            assert now < 90.0, "somebody never settles"
            if peer not in self.peers:
                self.peers[peer] = Choosing(peer, comers[peer][1], self.stages, now)
                self.post(peer, now)
            j = self.peers[peer]
            building = j.may_build
            settled = j.settled
            changed = j.look(self.seen_by(peer, now), now) is not None
            self.late[peer] += changed and building
            if changed or j.settled != settled:
                self.post(peer, now)
            if j.may_build:
                self.built.setdefault(peer, now - comers[peer][0])
            if not j.settled:
                heapq.heappush(queue, (now + LOOK_AGAIN_S, peer))
        here = [records[-1].body.stage for records in self.posted.values()]
        return Counter({stage: here.count(stage) for stage in range(self.stages + 1)})


DELAYS: dict[str, Delay] = {
    "none": lambda dice: 0.0,
    "up to a second": lambda dice: dice.uniform(0.1, 1.0),
    "up to three": lambda dice: dice.uniform(0.0, 3.0),
    "three": lambda dice: 3.0,
    "none or three": lambda dice: dice.choice((0.0, 3.0)),
}


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_joiners_of_one_second_spread_evenly_whatever_they_see(delay: str, stages: int) -> None:
    able = tuple(range(stages + 1))
    for n in range(2, 21):
        for seed in range(2):
            hall = Hall(random.Random(f"{delay} {stages} {n} {seed}"), DELAYS[delay], stages)
            if seed:
                hall.host(ENDS, "founder")
            counts = hall.play({f"{seed}-{n}-{i}": (hall.dice.random(), able) for i in range(n)})
            assert max(counts.values()) - min(counts.values()) <= 1, (n, seed, counts)
            assert max(hall.late.values()) <= 1
            if delay in ("none", "up to a second"):
                assert not hall.late.total(), "what is seen in time is settled before one builds"


def test_a_peer_that_comes_alone_loses_no_more_than_the_moment_it_looks() -> None:
    hall = Hall(random.Random(1), DELAYS["none"], 2)
    hall.host(ENDS, "a")
    hall.host(1, "b", "c")
    hall.host(2, "d", "e")
    hall.play({"x": (0.0, BLOCKS)})
    assert hall.built == {"x": STABLE_S}


@pytest.mark.parametrize("seed", range(40))
def test_block_only_peers_leave_the_ends_to_the_others(seed: int) -> None:
    hall = Hall(random.Random(seed), DELAYS["up to a second"], 2)
    able = {f"{seed}-{i}": BLOCKS if i % 3 else ANY for i in range(6)}
    counts = hall.play({name: (hall.dice.random(), able[name]) for name in able})
    assert sorted(counts.values()) == [2, 2, 2]
    assert all(hall.peers[PeerId(name)].stage in able[name] for name in able)


def test_the_operators_word_is_not_argued_with() -> None:
    hall = Hall(random.Random(2), DELAYS["none"], 2)
    hall.host(ENDS, "founder")
    hall.host(1, *"abcd")
    assert hall.play({f"x{i}": (0.1 * i, ANY) for i in range(5)}) == {0: 3, 1: 4, 2: 3}


def test_a_peer_that_has_built_gives_way_once() -> None:
    j = Choosing(PeerId("me"), BLOCKS, 2, 0.0)
    now = 0.0
    others = dict[PeerId, Placed]()
    while not j.may_build:
        j.look(others, now := now + LOOK_AGAIN_S)
    changes = 0
    for _ in range(60):
        # Wherever it is, three others are there.
        crowd = {PeerId(c): Placed(j.stage) for c in "abc"}
        changes += j.look(crowd, now := now + LOOK_AGAIN_S) is not None
    assert (changes, j.settled) == (1, True)


@pytest.mark.parametrize(("fast", "slow", "moves"), [(3, 4, 0), (2, 4, 0), (4, 2, 1)])
def test_a_peer_that_has_built_does_not_move_for_speed_alone(
    fast: int, slow: int, moves: int
) -> None:
    """The peer has `fast` peers beside it at its stage, with all the speed, and `slow` ones at the
    other stage."""
    j = Choosing(PeerId("me"), BLOCKS, 2, 0.0)
    now = 0.0
    while not j.may_build:
        j.look({}, now := now + LOOK_AGAIN_S)
    other = 3 - (j.stage or 0)
    here = {PeerId(f"f{i}"): Placed(j.stage, speed=9.0) for i in range(fast)}
    here |= {PeerId(f"s{i}"): Placed(other, speed=1.0) for i in range(slow)}
    looks = [j.look(here, now := now + LOOK_AGAIN_S) for _ in range(60)]
    assert sum(to is not None for to in looks) == moves
    assert j.settled


def test_a_crowd_that_never_stands_still_is_not_waited_for() -> None:
    j = Choosing(PeerId("me"), BLOCKS, 2, 0.0)
    now = 0.0
    while not j.may_build:
        now += LOOK_AGAIN_S
        j.look({PeerId(f"{now}"): Placed(None, BLOCKS, settled=False)}, now)
        assert (j.stage is None) == (now < LOOK_S)
    assert now == 2 * LOOK_S


def test_nobody_argues_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others always come to the stage that it has just chosen, and give way to nobody."""
    monkeypatch.setattr(choosing, "LOOK_S", 1e9)
    j = Choosing(PeerId("me"), BLOCKS, 2, 0.0)
    now = 0.0
    claims = 0
    while not j.may_build:
        now += LOOK_AGAIN_S
        seen = {PeerId(c): Placed(j.stage or 1) for c in "abc"}
        seen[PeerId("d")] = Placed(None, BLOCKS, settled=False)
        claims += j.look(seen, now) is not None
        assert now < 100
    assert claims == 1 + ROUNDS


def waiting(me: str, here: Mapping[str, Placed], seconds: float = 60.0) -> list[int]:
    """Stages to which `me` changes while it waits for `seconds` among the peers `here`."""
    mine = here[me]
    j = Choosing(PeerId(me), mine.able, 2, 0.0, mine.stage)
    done = list[int]()
    others = {PeerId(p): placed for p, placed in here.items() if p != me}
    for i in range(int(seconds / LOOK_AGAIN_S) + 1):
        to = j.look(others, i * LOOK_AGAIN_S, waits=True)
        done += [] if to is None else [to]
    return done


def test_one_waiting_peer_moves_to_the_ends_nobody_hosts() -> None:
    here = {p: Placed(1 if p < "d" else 2, ANY, speed=ord(p)) for p in "abcde"}
    (mover,) = [p for p in here if waiting(p, here)]
    assert waiting(mover, here, WITHOUT_ENDS_S) == [ENDS]
    assert waiting(mover, here, WITHOUT_ENDS_S - 1) == []
    assert here[mover].stage == 1, "the stage that has three gives"


def test_the_peer_that_goes_to_the_ends_is_one_that_would() -> None:
    here = {"a": Placed(1), "b": Placed(1, BLOCKS), "c": Placed(1, ANY), "d": Placed(2, ANY)}
    assert {p: waiting(p, here) for p in here} == {"a": [], "b": [], "c": [ENDS], "d": []}


def test_nobody_leaves_as_the_last_or_while_the_ends_are_filled() -> None:
    assert waiting("a", {"a": Placed(1, ANY), "b": Placed(2, ANY)}) == []
    assert waiting("a", {"a": Placed(1, ANY), "b": Placed(1), "c": Placed(ENDS)}) == []


def test_another_empty_stage_is_filled_if_nobody_can_host_ends() -> None:
    here = {p: Placed(1, BLOCKS) for p in "abc"}
    assert sorted(waiting(p, here) for p in here) == [[], [], [2]]
    here["c"] = Placed(1, ANY)
    assert [waiting(p, here) for p in here] == [[], [], [ENDS]], "one at a time, the ends first"


def test_a_change_that_cannot_be_made_is_not_tried_again() -> None:
    j = Choosing(PeerId("a"), ANY, 2, 0.0, 1)
    others = {PeerId("b"): Placed(1), PeerId("c"): Placed(2)}
    j.look(others, 0.0, waits=True)
    assert j.look(others, WITHOUT_ENDS_S, waits=True) == ENDS
    j.stays(1)
    assert j.stage == 1
    assert all(j.look(others, 2 * WITHOUT_ENDS_S + i, waits=True) is None for i in range(60))


def test_a_settled_peer_is_moved_by_its_leader_only() -> None:
    here = {p: Placed(1, ANY) for p in "abcde"} | {"f": Placed(ENDS)}
    assert waiting("a", here, 20 * SETTLE_S) == []
