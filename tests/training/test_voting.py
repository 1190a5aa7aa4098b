"""Voters on versions, and the numbers of votes that are enough."""

from dataclasses import replace

import pytest

from node.consensus.voters import FORGET_S, Quorum, decide, is_majority
from node.consensus.voters import RIPE as BINDS
from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Plan, PlanMember, Version
from node.epoch.leader.voting import ALONE_S, FEW, RIPE, Voting, without
from node.epoch.waiting import Lack, Wait

A, B, C, D, E, F, G, H = (PeerId(name) for name in "ABCDEFGH")
ALL = (A, B, C, D, E, F)


def plan(electorate: Electorate, current: tuple[PeerId, ...] = ALL, term: int = 1) -> Plan:
    members = tuple(PlanMember(p, 0) for p in current)
    return Plan(3, term, A, members, (), {}, electorate=electorate)


def test_two_sides_of_a_parted_network_never_both_decide() -> None:
    for count in range(3, 8):
        voters = tuple(PeerId(str(i)) for i in range(count))
        for sides in range(1 << count):
            here = {p for i, p in enumerate(voters) if sides >> i & 1}
            assert is_majority(voters, here) != is_majority(voters, set(voters) - here)


@pytest.mark.parametrize(
    ("electorate", "among", "enough"),
    [
        (Electorate((A, B)), {B}, True),  # of two voters one is believed
        (Electorate((A, B)), {C}, False),
        (Electorate(), set(), True),
        (Electorate((A, B, C), ALL), {A, B, C}, True),
        (Electorate((A, B, C), ALL), {A, B}, False),  # two of six
        (Electorate((A, B, C), ALL), {A, B, D, E}, True),
        (Electorate((A, B, C), ALL, orphan=True), {A, B}, True),
    ],
)
def test_a_plan_needs_its_voters_and_those_of_the_plan_before(
    electorate: Electorate, among: set[PeerId], enough: bool
) -> None:
    assert decide(electorate, among) is enough


def test_a_certificate_binds_past_the_first_epochs_until_it_is_forgotten() -> None:
    bound = Quorum(ALL, Version(BINDS), 100.0)
    assert bound.holds(100.0 + FORGET_S)
    assert not bound.holds(100.5 + FORGET_S)
    assert not replace(bound, version=Version(BINDS - 1)).holds(100.0)
    assert not Quorum().holds(0.0)


@pytest.mark.parametrize(
    ("holders", "here", "doubted"),
    [
        ({A, B, C}, {A, B, C, D, E, F}, False),  # half of them, with the first
        ({B, C, D}, {A, B, C, D, E, F}, True),
        ({B, C, D}, {B, C, D, E, F}, False),  # A is absent, and may hold it too
        (set(), {D, E, F}, False),
        (set(), {C, D, E, F}, True),
    ],
)
def test_a_version_is_doubted_where_too_few_voters_can_have_committed_it(
    holders: set[PeerId], here: set[PeerId], doubted: bool
) -> None:
    certified = Version(20, "a" * 32)
    other = Version(21, "b" * 32)
    quorum = Quorum(ALL, certified, 0.0)
    assert quorum.doubts(other, holders, here, 1.0) is doubted
    assert not quorum.doubts(certified, holders, here, 1.0)
    assert not quorum.doubts(other, holders, here, FORGET_S + 1)


def test_voters_change_only_after_what_they_voted_on_counts() -> None:
    voting = Voting(A)
    assert voting.electorate(None, (C, B, A), ()) == Electorate((A, B, C))
    made = plan(Electorate(ALL))
    # The plan is not committed here: the same voters decide, whichever of them are here.
    assert voting.electorate(made, (A, B, C), ()) == Electorate(ALL)
    assert voting.committed(made, {A, B, C})
    assert voting.electorate(made, (A, B, C, D, E), ()) == Electorate((A, B, C, D, E), ALL)


def test_less_than_half_commit_nothing() -> None:
    voting = Voting(B)
    made = plan(Electorate(ALL))
    assert not voting.committed(made, {B, C, D})
    assert voting.electorate(made, (B, C, D), ()) == Electorate(ALL)


def test_keys_that_have_just_come_do_not_vote() -> None:
    voting = Voting(A)
    e = Electorate(ALL)
    crowd = (*ALL, *(PeerId(f"x{i}") for i in range(20)))
    for term in range(1, RIPE + 1):
        made = plan(e, crowd, term)
        assert voting.committed(made, set(crowd))
        e = voting.electorate(made, crowd, ())
        assert e.voters == ALL if term < RIPE else set(e.voters) == set(crowd)


def test_where_few_vote_all_current_members_do() -> None:
    voting = Voting(A)
    made = plan(Electorate((A, B, C)), (A, B, G))
    assert voting.committed(made, {A, B, G})
    assert voting.electorate(made, (A, B, G), ()) == Electorate((A, B, G), (A, B, C))
    assert len((A, B, G)) < FEW


def test_a_peer_that_leaves_takes_no_votes_along() -> None:
    assert without(Electorate((A, B), (A, B, C)), {B, C}) == Electorate((A,), (A,))
    assert Voting(A).electorate(plan(Electorate(ALL)), (A, B, C), {D, E, F}) == Electorate(
        (A, B, C)
    )


def test_a_peer_that_waits_in_vain_goes_on_as_an_orphan() -> None:
    voting = Voting(D)
    e = Electorate(ALL, ALL)
    wait = voting.lacks(e, {D, E, F}, 5.0, 0.0)
    assert wait == Wait(Lack.VOTERS, peers=(A, B, C), here=3, of=6)
    assert str(wait) == "more than half of the voters (3 of 6 are here; without A, B, C)"
    assert isinstance(voting.lacks(e, {D, E, F}, 4.9 + ALONE_S, 0.0), Wait)
    for later in (0.0, 1.0):  # no plan could be made yet
        alone = voting.lacks(e, {D, E, F}, 5.0 + ALONE_S + later, 0.0)
        assert alone == Electorate((D, E, F), ALL, True)
    voting.planned()
    assert isinstance(voting.lacks(e, {D}, 7.0 + ALONE_S, 0.0), Wait)
    made = plan(alone, (D, E, F))
    assert voting.committed(made, {D, E, F})
    still = voting.electorate(made, (D, E, F), ())
    assert still == Electorate((D, E, F), ALL, True)
    again = plan(still, (D, E, F, A, B), 2)
    assert voting.committed(again, {D, E, F, A, B})
    ended = voting.electorate(again, (D, E, F, A, B), ())
    assert (ended.orphan, ended.elders) == (False, ALL)


def test_a_slow_swarm_waits_longer_for_its_voters() -> None:
    voting = Voting(D)
    e = Electorate(ALL)
    assert isinstance(voting.lacks(e, {D}, 0.0, 100.0), Wait)
    assert isinstance(voting.lacks(e, {D}, 499.0, 100.0), Wait)
    assert voting.lacks(e, {D}, 500.0, 100.0) == Electorate((D,), ALL, True)


def test_the_leader_comes_first_among_the_voters_if_it_votes() -> None:
    made = plan(Electorate(ALL), (*ALL, G))
    for me, first in ((C, (C, A, B, D, E, F)), (G, ALL)):
        voting = Voting(me)
        assert voting.electorate(None, (*ALL, G), ()).voters[0] == me
        assert voting.committed(made, ALL)
        assert voting.electorate(made, (*ALL, G), ()).voters == first


def test_a_new_cell_begins_with_the_voters_that_founded_it() -> None:
    founds = replace(plan(Electorate((B, A, H), ALL)), parent=CellId("ab" * 8))
    assert Voting(A).electorate(founds, (A, B, C), ()) == Electorate((B, A))
    assert Voting(C).electorate(founds, (D, C), ()) == Electorate((C, D)), "none of them is here"
    assert Voting(C).electorate(plan(Electorate()), (D, C), ()) == Electorate((C, D))


def test_work_counts_only_in_a_row() -> None:
    voting = Voting(A)
    made = plan(Electorate(ALL), (*ALL, G))
    for _ in range(RIPE - 1):
        voting.committed(made, ALL)
    voting.committed(plan(Electorate(ALL)), ALL)
    voting.committed(made, ALL)
    assert G not in voting.electorate(made, (*ALL, G), ()).voters


def test_the_absent_voters_of_the_plan_before_are_named_if_they_are_the_lack() -> None:
    voting = Voting(D)
    e = Electorate((D, E), ALL)
    assert voting.lacks(e, {D, E}, 0.0, 0.0) == Wait(Lack.VOTERS, peers=(A, B, C, F), here=2, of=6)
    assert voting.lacks(e, {D, E, A, B}, 30.0, 0.0) == e
    assert isinstance(voting.lacks(e, {D, E}, 31.0, 0.0), Wait)
    assert isinstance(voting.lacks(e, {D, E}, 30.9 + ALONE_S, 0.0), Wait), "it was enough before"
    alone = voting.lacks(e, {E, D, G}, 31.0 + ALONE_S, 0.0)
    assert alone == Electorate((D, E, G), (D, E), True)
    still = voting.lacks(replace(alone, voters=(D, A, B, C)), {D}, 31.0 + ALONE_S, 0.0)
    assert still == Electorate((D,), (D, E), True)
