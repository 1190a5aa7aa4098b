"""Peers that a peer measures its paths to, and its heartbeats, in large runs."""

import pytest

from node.core.ids import PeerId
from node.epoch.pace import (
    CALM_BEAT_S,
    COMPANY,
    HEARTBEAT_S,
    MOST_WAYS,
    PROBE_FAILED_S,
    STRANGERS_AT_ONCE,
    STRANGERS_PER_S,
    WAYS_AT_ONCE,
    StrangerTurns,
    beat_s,
    facing,
    whom_to_measure,
)

LEADER = PeerId("e000")


def company(ends: int, stages: int, replicas: int) -> dict[PeerId, int]:
    found = {PeerId(f"e{i:03d}"): 0 for i in range(ends)}
    return found | {
        PeerId(f"s{s}{i:03d}"): s for s in range(1, stages + 1) for i in range(replicas)
    }


def chosen(everybody: dict[PeerId, int]) -> dict[PeerId, list[PeerId]]:
    return {
        me: whom_to_measure(me, stage, {p: s for p, s in everybody.items() if p != me}, LEADER)
        for me, stage in everybody.items()
    }


def test_in_a_small_run_everybody_measures_everybody() -> None:
    everybody = company(2, 3, 20)
    for me, ways in chosen(everybody).items():
        assert sorted(ways) == sorted(everybody.keys() - {me})


@pytest.mark.parametrize("replicas", [33, 120])
def test_in_a_large_run_leader_replicas_and_neighbours_pair_up(replicas: int) -> None:
    everybody = company(2, 3, replicas)
    ways = chosen(everybody)
    assert len(ways[LEADER]) == len(everybody) - 1
    for me, others in ways.items():
        assert len({me, *others}) == 1 + len(others), "each of the others once"
        assert me == LEADER or len(others) <= MOST_WAYS
        assert me == LEADER or LEADER in others
    both = {(a, b) for a, others in ways.items() for b in others if a in ways[b]}
    for stage in (1, 2, 3):
        first = [p for p, s in everybody.items() if s == stage][: MOST_WAYS // 2]
        assert all((a, b) in both for a in first for b in first if a != b)
    for a, stage in everybody.items():
        after = {p for p, s in everybody.items() if s == stage + 1}
        assert stage == 3 or any((a, b) in both for b in after), f"{a} has no way on"


def test_all_ways_that_may_be_measured_are_used_and_one_is_the_leaders() -> None:
    everybody = company(80, 1, 80)
    for me, others in chosen(everybody).items():
        assert me == LEADER or LEADER in others
        assert me == LEADER or not me.startswith("s") or MOST_WAYS - 1 <= len(others) <= MOST_WAYS


def test_two_stages_face_each_other_in_their_order() -> None:
    mates, peers = ([PeerId(f"{s}{i}") for i in range(10)] for s in "ab")
    assert facing(mates[0], mates, peers, 4) == peers[:4]
    assert facing(mates[5], mates, peers, 4) in (peers[3:7], peers[4:8])
    assert facing(mates[9], mates, peers, 4) == peers[6:]
    assert facing(mates[9], mates, peers, 40) == peers


def test_a_leader_that_nobody_sees_yet_is_left_out() -> None:
    for leader in (None, LEADER):
        assert whom_to_measure(PeerId("s1001"), 1, {PeerId("s1000"): 1}, leader) == ["s1000"]


def test_a_leader_of_many_hears_about_as_many_heartbeats_as_one_of_few() -> None:
    assert beat_s(1, False) == beat_s(COMPANY, False) == HEARTBEAT_S
    assert beat_s(3 * COMPANY, False) == 3 * HEARTBEAT_S
    assert beat_s(1000, False) == beat_s(1, True) == CALM_BEAT_S


NOBODY: set[PeerId] = set()


def test_strangers_have_turns_one_after_the_other() -> None:
    turns = StrangerTurns()
    strangers = {PeerId(f"n{i}") for i in range(6)}
    first = turns.next(strangers, NOBODY, WAYS_AT_ONCE, 0.0)
    second = turns.next(strangers, NOBODY, WAYS_AT_ONCE, 0.5)
    assert sorted(first + second) == sorted(strangers)
    assert turns.next(strangers, NOBODY, WAYS_AT_ONCE, 1.0) == []
    assert turns.next(strangers, NOBODY, WAYS_AT_ONCE, PROBE_FAILED_S) == first


def test_strangers_that_do_not_answer_leave_a_slot_for_others() -> None:
    turns = StrangerTurns()
    strangers = {PeerId(f"n{i}") for i in range(6)}
    measuring = set(turns.next(strangers, NOBODY, WAYS_AT_ONCE, 0.0))
    assert len(measuring) == WAYS_AT_ONCE - 1
    slots = WAYS_AT_ONCE - len(measuring)
    assert turns.next(strangers, measuring, slots, 1.0) == []


def test_however_many_strangers_there_are_few_have_turns() -> None:
    turns = StrangerTurns()
    seconds = 100
    tried = 0
    for second in range(seconds):
        made_up = {PeerId(f"{second}-{i}") for i in range(500)}
        tried += len(turns.next(made_up, NOBODY, WAYS_AT_ONCE, float(second)))
    assert tried <= STRANGERS_AT_ONCE + STRANGERS_PER_S * seconds
    assert tried < seconds * (WAYS_AT_ONCE - 1)
