"""Peers that are left out of plans: for how long, and what lets them in again."""

import copy
import math

import pytest

from node.core.ids import PeerId
from node.training.leader import conduct
from node.training.leader.conduct import Conduct

A, B, C, ME = (PeerId(p) for p in ("a", "b", "c", "me"))


def agree(found: Conduct, *peers: PeerId) -> None:
    """These replicas made the same parameters."""
    for peer in peers:
        found.good(peer, agrees=True)


def test_each_offence_leaves_a_late_peer_out_for_twice_as_long() -> None:
    found, now = Conduct(), 0.0
    for times in (1, 2, 4, 8):
        found.late(A, "plan", 5.0, now)
        assert found.left_out_s(A, now) == times * conduct.SHARE * 5.0
        now += found.left_out_s(A, now)
        assert found.left_out(now) == frozenset()
    for _ in range(20):
        found.late(A, "plan", 5.0, now)
    assert found.left_out_s(A, now) == conduct.MOST_S


def test_waiting_for_one_peer_takes_a_bounded_share_of_the_time() -> None:
    """Also where it is waited for longer each time, as an honest peer that is slow is."""
    found, now, waited = Conduct(), 0.0, 0.0
    for _ in range(8):
        cost = 5.0 * found.patience([A])
        now += cost
        waited += cost
        found.late(A, "plan", cost, now)
        now += found.left_out_s(A, now)
    assert waited / now < 0.08


def test_a_late_word_lets_a_peer_in_after_its_only_offence() -> None:
    found = Conduct()
    found.late(A, "plan", 5.0, 0.0)
    assert not found.spoke(A, "another plan")
    assert found.spoke(A, "plan")
    assert not found.left_out(0.0)
    found.late(A, "plan", 5.0, 1.0)
    assert not found.spoke(A, "plan"), "the second time it waits"
    assert not found.spoke(B, "plan")


def test_good_epochs_make_up_for_offences() -> None:
    found = Conduct()
    for _ in range(2):
        found.late(A, "plan", 5.0, 0.0)
    for _ in range(conduct.FORGIVEN_AFTER):
        found.good(A, agrees=False)
    found.late(A, "plan", 5.0, 1000.0)
    assert found.left_out_s(A, 1000.0) == 2 * conduct.SHARE * 5.0


def test_only_what_is_no_accident_is_a_fault() -> None:
    found = Conduct()
    faults = [found.late(A, "plan", 5.0, 0.0) for _ in range(4)]
    assert faults == [0.0, 0.0, 1.0, 1.0]
    found.good(A, agrees=False)
    assert found.late(A, "plan", 5.0, 0.0) == 0.0


def test_a_peer_may_die_once() -> None:
    found = Conduct()
    found.died(A, 4.0, 0.0)
    assert not found.left_out(0.0)
    found.good(A, agrees=False)
    found.died(A, 4.0, 1.0)
    assert not found.left_out(1.0)
    found.died(A, 4.0, 2.0)
    assert found.left_out(2.0) == {A}


def test_who_fails_every_plan_that_needs_it_counts_as_absent() -> None:
    found = Conduct()
    for now in range(conduct.ABSENT_AFTER - 1):
        found.failed(A, float(now))
    assert not found.absent(10.0)
    found.good(A, agrees=False)
    for now in range(conduct.ABSENT_AFTER):
        found.failed(A, float(now))
    assert found.absent(10.0) == {A}
    assert not found.absent(10.0 + conduct.ABSENT_S)


def test_a_flipped_bit_leaves_nobody_out() -> None:
    found = Conduct()
    assert found.differed(A, 0.0) == 0.0
    assert not found.left_out(0.0)
    found.differed(A, 1.0)
    assert found.left_out(1.0) == {A}
    assert found.differed(A, 2.0) == 1.0


def test_of_two_replicas_the_one_stays_that_agreed_with_more() -> None:
    found = Conduct()
    agree(found, B)
    assert found.disputed([{A}, {B}], ME, 0.0) == {}, "a bit may have flipped"
    assert found.disputed([{A}, {B}], ME, 1.0) == {A: 0.0}
    assert found.left_out(1.0) == {A}
    now = 1.0 + found.left_out_s(A, 1.0)
    assert found.disputed([{A}, {B}], ME, now) == {A: 0.0}
    assert found.left_out_s(A, now) == math.inf, "the pair is parted for good"


def test_who_differs_from_a_second_peer_is_the_cause() -> None:
    """And the one that it had a dispute with before was right."""
    found = Conduct()
    agree(found, A, B, C)
    agree(found, B)
    for now in (0.0, 1.0, 100.0):
        found.disputed([{A}, {B}], ME, now)
    assert found.left_out(200.0) == {A}
    assert found.disputed([{B}, {C}], ME, 200.0) == {B: 1.0}
    assert found.left_out(200.0) == {B}


def test_disputes_with_peers_that_never_agreed_are_no_evidence() -> None:
    found = Conduct()
    agree(found, A)
    for stranger in map(PeerId, "xyz"):
        found.disputed([{A}, {stranger}], ME, 0.0)
        assert A not in found.disputed([{A}, {stranger}], ME, 0.0)
    assert A not in found.left_out(0.0)


@pytest.mark.parametrize("first", [A, B])
def test_the_leader_takes_its_own_side(first: PeerId) -> None:
    found = Conduct()
    agree(found, A, B)
    found.disputed([{A}, {B}], first, 0.0)
    (loser,) = found.disputed([{A}, {B}], first, 0.0)
    assert loser != first


def test_one_liar_costs_a_bounded_number_of_repeated_epochs() -> None:
    """Whatever it says, and with whomever: the honest peers are there whenever they are let in."""
    found, now, repeated = Conduct(), 0.0, 0
    liar, honest = PeerId("0-liar"), [PeerId(f"honest{i}") for i in range(4)]
    agree(found, liar, *honest)
    for _ in range(5000):
        now += 10.0
        there = [p for p in honest if p not in found.left_out(now)]
        if liar not in found.left_out(now) and there:
            repeated += 1
            found.disputed([{liar}, {there[0]}], ME, now)
    assert repeated <= 7
    assert found.left_out(now) == {liar}


def test_what_strangers_do_is_forgotten_in_the_end() -> None:
    found = Conduct()
    for i in range(2 * conduct.PEERS_KEPT):
        found.late(PeerId(f"key{i}"), "plan", 5.0, 0.0)
    assert len(found.left_out(0.0)) == conduct.PEERS_KEPT


def test_a_copy_is_another_one() -> None:
    found = Conduct()
    found.late(A, "plan", 5.0, 0.0)
    twin = copy.deepcopy(found)
    twin.late(B, "plan", 5.0, 0.0)
    assert (found.left_out(0.0), twin.left_out(0.0)) == ({A}, {A, B})
    for i in range(conduct.PEERS_KEPT):
        twin.late(PeerId(f"key{i}"), "plan", 5.0, 0.0)
    assert A not in twin.left_out(0.0), "it keeps as few as the other"
