"""A member's answers to plans, rounds and their results."""

from dataclasses import replace
from typing import Any

import pytest

from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Hop, Path, Plan, PlanMember, Version, Window
from node.epoch import events as ev
from node.epoch.member import FETCH_S, Member, MemberState
from node.epoch.plan_context import GENESIS, makes

ME = PeerId("me")
OTHER = PeerId("other")
LEADER = PeerId("leader")
TOKENS = 64
PATHS = (Path(0, LEADER, (0,), (Hop(1, ME),)), Path(1, LEADER, (1,), (Hop(1, ME),)))


def plan_from(base: Version, term: int, current: bool = True, **about: Any) -> Plan:
    members = (PlanMember(LEADER, 0), PlanMember(ME, 1, 1.0, current), PlanMember(OTHER, 1))
    made = Plan(base.epoch, term, LEADER, members, PATHS, {}, lineage=base.lineage)
    return replace(made, **about)


def opened(plan: Plan, attempt: int = 0, **about: Any) -> ev.RoundArrived:
    """The note that opens an attempt of the plan's round."""
    note = ev.RoundArrived(
        LEADER,
        plan.epoch,
        plan.term,
        plan.hash,
        attempt,
        (),
        {},
        (),
        (),
        6.0,
        tally=ev.EpochTally(TOKENS),
    )
    return replace(note, **about)


def ended(plan: Plan, attempt: int = 0, missing: tuple[str, ...] = ()) -> ev.RoundEnded:
    return ev.RoundEnded(plan.epoch, plan.term, attempt, (), missing, ())


def told(member: Member, event: ev.MemberEvent) -> list[Any]:
    return member.handle(event, 0.0)


def refusal(member: Member, event: ev.MemberEvent) -> str:
    """The reason for which the member refuses; fails if it does not."""
    (refused,) = told(member, event)
    assert isinstance(refused, ev.RefuseCaller)
    return refused.reason


def adopts(member: Member, plan: Plan, attempt: int = 0, dropped: tuple[int, ...] = ()) -> None:
    """Let the member follow a plan until the result is in place."""
    told(member, ev.PlanArrived(plan))
    told(member, opened(plan, attempt, dropped=dropped))
    result = ended(plan, attempt)
    assert told(member, result) == [ev.AdoptParts(plan, result)]
    committed = told(member, ev.Adopted(result, "d"))
    assert committed == [ev.TellCommitted(plan, attempt, "d")]


def after_one_epoch(**about: Any) -> tuple[Member, Plan]:
    """A member that has done the first epoch, and its plan."""
    member = Member(ME, GENESIS)
    plan = plan_from(GENESIS, 1, **about)
    adopts(member, plan)
    return member, plan


def test_an_epoch_leads_from_the_plan_to_the_next_version() -> None:
    member = Member(ME, GENESIS)
    plan = plan_from(GENESIS, 1)
    assert not member.busy
    assert told(member, ev.PlanArrived(plan)) == [ev.BeginEpoch(plan, None)]
    assert member.busy
    note = opened(plan, dropped=(1,))
    assert told(member, note) == [ev.StartRound(plan, note, False)]
    assert member.busy
    told(member, ended(plan))
    assert told(member, ev.Adopted(ended(plan), "d")) == [ev.TellCommitted(plan, 0, "d")]
    assert not member.busy
    assert (member.at, member.before, member.dropped) == (makes(plan, (1,)), GENESIS, (1,))
    assert (member.tokens, member.term) == (TOKENS, 1)


def test_the_plan_of_the_next_version_settles_the_one_before() -> None:
    member, _ = after_one_epoch()
    following = plan_from(member.at, 2, tokens=500)
    done = told(member, ev.PlanArrived(following))
    assert done == [ev.Settle(1), ev.BeginEpoch(following, None)]
    assert (member.before, member.tokens) == (None, 500), "the leader's count counts"
    again = plan_from(member.at, 3)
    assert told(member, ev.PlanArrived(again)) == [ev.BeginEpoch(again, None)], "settled once"


def test_a_plan_of_the_same_version_undoes_the_epoch() -> None:
    member, _ = after_one_epoch()
    assert member.reachable == (GENESIS,)
    again = plan_from(GENESIS, 2)
    done = told(member, ev.PlanArrived(again))
    assert done == [ev.GoTo(GENESIS, "roll-back"), ev.BeginEpoch(again, None)]
    assert (member.at, member.before, member.reachable) == (GENESIS, None, ())


def test_a_plan_of_a_version_on_the_disk_is_followed_from_there() -> None:
    member, _ = after_one_epoch()
    older = Version(1, "ab" * 16)
    told(member, ev.CheckpointsKept((older, member.at)))
    assert member.reachable == (GENESIS, older), "sorted, without the version in place"
    there = plan_from(older, 2)
    done = told(member, ev.PlanArrived(there))
    assert done == [ev.GoTo(older, "checkpoint"), ev.BeginEpoch(there, None)]
    assert member.at == older


@pytest.mark.parametrize("place", ["at", "before"])
def test_a_member_of_a_stage_that_was_left_out_goes_on_from_its_version(place: str) -> None:
    member, plan = after_one_epoch()
    held = {"at": member.at, "before": GENESIS}[place]
    later = plan_from(Version(9, "cd" * 16), 2, stood={1: held})
    moves = {"at": ev.Settle(1), "before": ev.GoTo(GENESIS, "roll-back")}
    done = told(member, ev.PlanArrived(later))
    assert done == [moves[place], ev.GoTo(later.base, "left out"), ev.BeginEpoch(later, None)]


def test_a_listener_takes_its_update_back_and_names_the_version_it_had() -> None:
    member, _ = after_one_epoch()
    had = member.at
    other = plan_from(Version(4, "ef" * 16), 2, current=False, electorate=Electorate(orphan=True))
    done = told(member, ev.PlanArrived(other))
    assert done == [ev.GoTo(GENESIS, "roll-back"), ev.BeginEpoch(other, (had, TOKENS))]
    assert (member.at, member.before, member.tokens) == (GENESIS, None, TOKENS)
    assert not member.orphan, "it does not hold that history yet"
    note = opened(other)
    assert told(member, note) == [ev.StartRound(other, note, True)]
    told(member, ended(other))
    told(member, ev.Adopted(ended(other), "d"))
    assert (member.at, member.before) == (makes(other, ()), None), "it never held the base"
    assert member.orphan


def test_a_listener_of_a_first_plan_names_the_version_that_it_came_with() -> None:
    at = Version(6, "aa" * 16)
    plan = plan_from(GENESIS, 1, current=False)
    done = told(Member(ME, at, tokens=77), ev.PlanArrived(plan))
    assert done == [ev.BeginEpoch(plan, (at, 77))]


def test_a_current_member_is_an_orphan_as_long_as_its_plans_say_so() -> None:
    alone = Electorate(orphan=True)
    member = Member(ME, GENESIS)
    assert not member.orphan
    told(member, ev.PlanArrived(plan_from(GENESIS, 1, electorate=alone)))
    assert member.orphan
    told(member, ev.PlanArrived(plan_from(GENESIS, 2)))
    assert not member.orphan


def test_the_last_plan_ends_the_work_and_a_founding_plan_opens_another_cell() -> None:
    member, _ = after_one_epoch()
    cell = CellId("ab" * 8)
    founds = plan_from(member.at, 2, paths=(), cell_id=CellId("cd" * 8), parent=cell)
    assert told(member, ev.PlanArrived(founds)) == [ev.Settle(1), ev.EnterCell(founds)]
    assert member.state is MemberState.IDLE
    assert told(member, ev.PlanArrived(founds)) == [], "told twice"
    last = plan_from(member.at, 3, paths=())
    assert told(member, ev.PlanArrived(last)) == [ev.Finish(last)]
    assert member.state is MemberState.FINISHED
    assert not member.busy


def test_a_plan_of_an_outer_round_opens_its_round() -> None:
    member = Member(ME, GENESIS)
    window = Window(means={1: "m"})
    plan = plan_from(GENESIS, 1, paths=(), outer=7, window=window, deadline_s=9.0)
    begins, starts = told(member, ev.PlanArrived(plan))
    assert begins == ev.BeginEpoch(plan, None)
    note = opened(plan, deadline_s=9.0, tally=ev.EpochTally())
    assert starts == ev.StartRound(plan, note, False)
    told(member, ended(plan))
    told(member, ev.Adopted(ended(plan), "d"))
    assert member.at == makes(plan, ())


def test_a_round_of_another_plan_or_another_leader_is_refused() -> None:
    member = Member(ME, GENESIS)
    plan = plan_from(GENESIS, 2)
    assert "not in force" in refusal(member, opened(plan))
    told(member, ev.PlanArrived(plan))
    for about in ({"epoch": 1}, {"term": 1}, {"plan_hash": "another"}):
        assert "not in force" in refusal(member, opened(plan, **about))
    assert "only the leader of this epoch" in refusal(member, opened(plan, leader=OTHER))
    assert "counts this peer as dead" in refusal(member, opened(plan, dead=(ME,)))
    assert "attempt -1 is over" in refusal(member, opened(plan, -1))
    assert told(member, opened(plan, dead=(OTHER,))) != [], "nothing of these was begun"


def test_a_repeated_round_is_told_once_and_an_older_one_refused() -> None:
    member = Member(ME, GENESIS)
    plan = plan_from(GENESIS, 1)
    told(member, ev.PlanArrived(plan))
    told(member, opened(plan))
    assert told(member, opened(plan)) == []
    copy = opened(plan, 2, sources=(OTHER,))
    assert told(member, copy) == [ev.StartRound(plan, copy, False)]
    assert member.state is MemberState.COPY
    assert member.busy
    assert told(member, copy) == []
    assert "attempt 1 is over" in refusal(member, opened(plan, 1))
    third = opened(plan, 3)
    assert told(member, third) == [ev.StartRound(plan, third, False)]
    assert member.state is MemberState.AVERAGE
    told(member, ended(plan, 3))
    told(member, ev.Adopted(ended(plan, 3), "d"))
    assert told(member, opened(plan, 4)) == [], "it has committed"


def test_only_the_end_of_the_attempt_under_way_counts() -> None:
    member = Member(ME, GENESIS)
    plan = plan_from(GENESIS, 2)
    assert told(member, ended(plan)) == []
    told(member, ev.PlanArrived(plan))
    assert told(member, ended(plan)) == [], "no round is under way"
    assert told(member, ev.Adopted(ended(plan), "d")) == []
    told(member, opened(plan, 1))
    stale = ended(plan, 1)
    for other in (ended(plan), replace(stale, epoch=1), replace(stale, term=1)):
        assert told(member, other) == []
    short = ended(plan, 1, missing=("w",))
    assert told(member, short) == [ev.TellIncomplete(plan, short)]
    told(member, opened(plan, 2, sources=(OTHER,)))
    for other in (replace(stale, epoch=1), replace(stale, term=1)):
        assert told(member, ev.Adopted(other, "d")) == []
    assert told(member, ended(plan, 2)) == [ev.AdoptParts(plan, ended(plan, 2))]
    assert told(member, ev.Adopted(ended(plan, 2), "d")) == [ev.TellCommitted(plan, 2, "d")]
    assert told(member, ev.Adopted(ended(plan, 2), "d")) == [], "once"


def test_a_version_from_elsewhere_replaces_all_that_an_epoch_left() -> None:
    member, plan = after_one_epoch(electorate=Electorate((ME,)))
    at = Version(6, "aa" * 16)
    older = Version(5, "bb" * 16)
    assert told(member, ev.VersionPlaced(at, (older,), 300, term=7)) == []
    assert (member.at, member.before, member.reachable) == (at, None, (older,))
    assert (member.tokens, member.term) == (300, 7)
    assert not member.busy
    told(member, ev.VersionPlaced(at, (), 300, term=3))
    assert member.term == 7, "it has voted in that term"
    assert "term 7 is over" in refusal(member, ev.PlanArrived(plan_from(at, 7)))
    assert "not be put in place" in refusal(member, ev.PlanArrived(plan)), "the plan before"


def test_a_version_that_was_put_in_place_during_an_epoch_ends_it() -> None:
    member = Member(ME, GENESIS)
    plan = plan_from(GENESIS, 1)
    told(member, ev.PlanArrived(plan))
    told(member, opened(plan))
    told(member, ev.VersionPlaced(GENESIS, (), 0))
    assert told(member, ended(plan)) == []
    assert "over" in refusal(member, opened(plan, 1))


def test_a_current_member_with_an_older_version_fetches_the_base() -> None:
    member, before = after_one_epoch()
    told(member, ev.PlanArrived(plan_from(makes(before, ()), 2)))
    at = member.at
    later = plan_from(Version(at.epoch + 2, "cd" * 16), 5, digests={1: "wanted"})
    had = (member.at, member.term, member.state, member.plan)
    done = told(member, ev.PlanArrived(later))
    assert done == [ev.FetchBase(later.base, (OTHER,), "wanted", FETCH_S)]
    assert (member.at, member.term, member.state, member.plan) == had, "until it is here"
    told(member, ev.VersionPlaced(later.base, (), 0))
    assert told(member, ev.PlanArrived(later)) == [ev.BeginEpoch(later, None)]
    assert (member.at, member.state) == (later.base, MemberState.RUN)


def test_a_base_without_a_digest_is_not_fetched() -> None:
    member, before = after_one_epoch()
    told(member, ev.PlanArrived(plan_from(makes(before, ()), 2)))
    later = plan_from(Version(member.at.epoch + 2, "cd" * 16), 5)
    assert "is not here" in refusal(member, ev.PlanArrived(later))
