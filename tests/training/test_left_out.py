"""A stage without peers: plans go around it where the run allows, and it comes back with the
parameters it had."""

import dataclasses
from typing import Any

from node.core.ids import PeerId
from node.core.journey import Plan, Version, lineage_after
from node.epoch import events as ev
from node.epoch.leader.leader import Leader, Phase
from node.epoch.leader.starting_point import MISSED_S
from node.epoch.leader.voting import ALONE_S
from node.epoch.member import Member, MemberState
from node.epoch.plan_context import PastPlan
from tests.training import test_leader
from tests.training.run_facts import facts
from tests.training.test_leader import (
    S1,
    S2,
    E,
    commits,
    heard,
    kinds,
    led,
    next_plan,
    tell,
    the_plan,
    waits,
)

S3 = PeerId("stage3a")
PATIENCE = 10.0


SKIPPING: dict[str, Any] = {"stages": 3, "spare": 1, "patience_s": PATIENCE, "late_s": 1e9}


def begun(*who: PeerId, **kw: Any) -> tuple[Leader, Plan]:
    return test_leader.begun([heard(p) for p in who or (E, S1, S2, S3)], **SKIPPING | kw)


def after(plan: Plan) -> Version:
    return Version(plan.epoch + 1, lineage_after(plan, ()))


def lose(leader: Leader, peer: PeerId, now: float) -> tuple[Plan, list[Any]]:
    """The last holder of its stage dies in the run: the epoch begins anew without the stage."""
    done = leader.handle(ev.Unreachable(peer), now)
    assert leader.phase is Phase.GATHER
    assert "epoch-abandoned" in kinds(done)
    for t in (now, now + MISSED_S - 0.1):
        assert the_plan(leader.handle(ev.ClockTick(), t)) is None, "it may be there in a moment"
    assert "stage 2" in str(leader.gathering.waiting or "")
    done = leader.handle(ev.ClockTick(), now + MISSED_S + 0.1)
    return next_plan(done), done


def without_stage_2() -> tuple[Leader, Plan, Plan]:
    """A leader, its first plan, and its plan after the stage has died out."""
    leader, first = begun()
    plan, _ = lose(leader, S2, 3.0)
    return leader, first, plan


def current(plan: Plan, peer: PeerId) -> bool:
    return any(m.current for m in plan.members if m.peer == peer)


def visited(plan: Plan) -> set[int]:
    return {h.stage for p in plan.paths for h in p.hops}


def test_paths_leave_out_a_stage_nobody_holds_every_epoch() -> None:
    leader, first = begun()
    plan, said = lose(leader, S2, 3.0)
    assert (plan.base, visited(plan), plan.stood) == (first.base, {1, 3}, {2: first.base})
    assert {m.stage for m in plan.members} == {0, 1, 3}
    assert "s2" not in plan.owners
    assert plan.digests.keys() == {0, 1, 3}
    (planned,) = [a for a in said if isinstance(a, ev.RecordFact) and a.kind == "epoch-planned"]
    assert planned.facts["left_out"] == [2]
    (left,) = [a for a in said if isinstance(a, ev.RecordFact) and a.kind == "stage-left-out"]
    assert (left.level, left.facts["stage"]) == ("warning", 2)
    for now in (10.0, 11.0, 12.0):
        done = commits(leader, plan, now)
        epoch = plan.epoch + 1
        plan = next_plan(done)  # no waiting while it is gone
        assert (plan.epoch, visited(plan), plan.stood) == (epoch, {1, 3}, {2: first.base})
        assert not {"stage-left-out", "epoch-abandoned"} & set(kinds(done)), "said once"


def test_more_stages_than_a_plan_may_leave_out_are_waited_for() -> None:
    leader, _ = begun()
    leader.handle(ev.Unreachable(S2), 3.0)
    leader.handle(ev.Unreachable(S3), 3.0)
    assert waits(leader, 30.0) == "a peer for stages 2, 3"
    none, _ = begun(spare=0)
    none.handle(ev.Unreachable(S2), 3.0)
    assert the_plan(none.handle(ev.ClockTick(), 30.0)) is None


def test_a_run_begins_and_ends_with_every_stage() -> None:
    leader = led(facts(**SKIPPING), [heard(p) for p in (E, S1, S3)])
    assert the_plan(leader.handle(ev.ClockTick(), 30.0)) is None
    leader, _ = begun(epochs=1)
    plan, _ = lose(leader, S2, 3.0)
    assert the_plan(commits(leader, plan, 10.0)) is None
    assert the_plan(leader.handle(ev.ClockTick(), 100.0)) is None, (
        "what is complete has all of the model"
    )
    last = next_plan(leader.handle(heard(S2, plan.base), 101.0))
    assert last.last
    assert last.member(S2) is not None


def test_a_peer_that_comes_with_what_the_stage_had_is_current_at_once() -> None:
    leader, first, plan = without_stage_2()
    plan = next_plan(commits(leader, plan, 10.0))
    newcomer = heard(PeerId("stage2b"), first.base, 0)
    done = commits(leader, plan, 11.0, [newcomer])
    back = next_plan(done)
    assert visited(back) <= {1, 2, 3}
    assert (current(back, newcomer.peer), back.owners["s2"]) == (True, newcomer.peer)
    assert back.stood == {2: first.base}, "so that it takes what it has for the newest"
    assert "stage-back" in kinds(done)
    assert next_plan(commits(leader, back, 12.0)).stood == {}


def test_an_older_copy_is_used_when_nobody_has_a_newer_one() -> None:
    leader, first = begun()
    plan = next_plan(commits(leader, first, 3.0))
    old = plan.base
    plan = next_plan(commits(leader, plan, 4.0))
    plan, _ = lose(leader, S2, 5.0)
    older = heard(PeerId("stage2b"), old, 0)
    for now in (10.0, 10.0 + PATIENCE - 1):
        plan = next_plan(commits(leader, plan, now, [older]))
        assert plan.member(older.peer) is None, "others may have more"
    plan = next_plan(commits(leader, plan, 10.0 + PATIENCE + 1))
    assert (current(plan, older.peer), plan.stood) == (True, {2: old})


def test_a_peer_that_has_nothing_of_the_stage_does_not_bring_it_back() -> None:
    leader, first = begun()
    plan = next_plan(commits(leader, first, 3.0))
    plan, _ = lose(leader, S2, 5.0)
    fresh = heard(PeerId("stage2b"))
    for now in (10.0, 25.0, 40.0):
        plan = next_plan(commits(leader, plan, now, [fresh]))
        assert (visited(plan), plan.member(fresh.peer)) == ({1, 3}, None)


def test_voters_of_a_stage_left_out_do_not_count_as_here() -> None:
    """They could not follow the plan, so each would be given up at once, and planned again."""
    lost = [PeerId(f"stage2{c}") for c in "abcd"]
    leader, first = begun(E, S1, *lost, S3)
    plan = next_plan(commits(leader, first, 3.0))
    assert len(plan.electorate.voters) == 7
    for p in lost:
        leader.handle(ev.Unreachable(p), 5.0)
    tell(leader, [heard(p) for p in lost], 6.0)  # again, from disks that have nothing
    assert waits(leader, 20.0).startswith("more than half of the voters (3 of 7 are here; without")
    alone = next_plan(leader.handle(ev.ClockTick(), 21.0 + ALONE_S))
    assert (visited(alone), alone.electorate.orphan) == ({1, 3}, True)
    assert alone.electorate.voters == (E, S1, S3), "who can follow it"


def test_the_next_leader_learns_the_stages_version_by_the_plan() -> None:
    leader, first, plan = without_stage_2()
    at = after(plan)
    other = PeerId("ends0")
    successor = Leader(other, facts(**SKIPPING), term=plan.term, history=PastPlan(plan))
    assert successor.memory.stood(plan.base) == {2: first.base}
    there = [heard(p, at, 128) for p in (other, E, S1, S3)]
    tell(successor, there, 20.0)
    for t in (20.0, 20.0 + MISSED_S - 0.5):
        assert the_plan(successor.handle(ev.ClockTick(), t)) is None, "not all have been heard yet"
    back = next_plan(
        tell(successor, [heard(S2, first.base, 0)], 23.0) + successor.handle(ev.ClockTick(), 24.5)
    )
    assert (back.base, back.stood) == (at, {2: first.base})
    assert back.member(S2) is not None


def test_a_member_relabels_its_version_only_if_the_plan_allows() -> None:
    _, first = begun()
    held = Version(3, "aa" * 16)
    later = dataclasses.replace(first, epoch=7, lineage="bb" * 16, term=5, digests={})
    says = dataclasses.replace(later, stood={2: held})
    member = Member(S2, held)
    assert [type(a) for a in member.handle(ev.PlanArrived(later), 0.0)] == [ev.RefuseCaller]
    done = member.handle(ev.PlanArrived(dataclasses.replace(says, term=6)), 0.0)
    assert done[0] == ev.GoTo(says.base, "left out")
    assert isinstance(done[1], ev.BeginEpoch)
    assert (member.at, member.state) == (says.base, MemberState.RUN)
    # The version comes from the disk if another one is in place. The plan permits it to stage 2
    # alone.
    stale = Member(S2, Version(1), checkpoints=(held,))
    done = stale.handle(ev.PlanArrived(dataclasses.replace(says, term=7)), 0.0)
    assert done[:2] == [ev.GoTo(held, "checkpoint"), ev.GoTo(says.base, "left out")]
    done = Member(S1, held).handle(ev.PlanArrived(dataclasses.replace(says, term=8)), 0.0)
    assert [type(a) for a in done] == [ev.RefuseCaller]


def test_the_next_leader_goes_around_a_stage_that_nobody_brings() -> None:
    leader, first, plan = without_stage_2()
    at = after(plan)
    successor = Leader(E, facts(**SKIPPING), term=plan.term, history=PastPlan(plan))
    tell(successor, [heard(p, at, 128) for p in (E, S1, S3)], 20.0)
    assert the_plan(successor.handle(ev.ClockTick(), 20.0 + MISSED_S - 0.1)) is None
    following = next_plan(successor.handle(ev.ClockTick(), 20.0 + MISSED_S + 0.1))
    assert (following.base, following.stood) == (at, {2: first.base})
    assert visited(following) == {1, 3}
    assert leader.phase is Phase.RUN
