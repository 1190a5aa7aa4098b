"""A peer's memory of the versions it can put in place: a request for one of them gets the plan that
explains it."""

from dataclasses import replace

from node.core.ids import PeerId
from node.core.journey import Hop, Path, Plan, Version
from node.core.journey import PlanMember as Listed
from node.epoch import events as ev
from node.epoch.member import Member
from node.epoch.plan_context import makes

ME = PeerId("me")
LEADER = PeerId("leader")
DROPPED = (3,)


def plan_for(base: Version, term: int) -> Plan:
    paths = (Path(0, LEADER, (0,), (Hop(1, ME),)),)
    return Plan(base.epoch, term, LEADER, (Listed(ME, 1),), paths, {}, lineage=base.lineage)


def commit(member: Member, plan: Plan) -> None:
    """Run one epoch at a member, with a micro-batch that does not count."""
    member.handle(ev.PlanArrived(plan), 0.0)
    member.handle(
        ev.RoundArrived(LEADER, plan.epoch, plan.term, plan.hash, 0, (), {}, (), DROPPED, 10.0), 0.0
    )
    ended = ev.RoundEnded(plan.epoch, plan.term, 0, (), (), ())
    member.handle(ended, 0.0)
    member.handle(ev.Adopted(ended, "d"), 0.0)
    assert member.at == makes(plan, DROPPED)


def trained(epochs: int, checkpoint_at: int = -1) -> tuple[Member, list[Plan]]:
    member = Member(ME, Version(0))
    plans = []
    for epoch in range(epochs):
        plans.append(plan_for(member.at, epoch + 1))
        commit(member, plans[-1])
        if epoch + 1 == checkpoint_at:
            member.handle(ev.CheckpointsKept((member.at,)), 0.0)
    return member, plans


def test_the_plan_behind_a_checkpoint_is_remembered() -> None:
    member, plans = trained(5, checkpoint_at=2)
    kept = makes(plans[1], DROPPED)
    assert member.remembers(kept) == (plans[2], DROPPED), (
        "the newest that explains it: the next epoch began there"
    )
    member.handle(ev.PlanArrived(plan_for(member.at, 6)), 0.0)
    assert member.remembers(kept) == (plans[2], DROPPED)
    assert member.remembers(replace(kept, lineage="0" * 32)) == (None, ())


def test_the_newest_of_several_plans_explains_a_version() -> None:
    member, plans = trained(1)
    kept = []
    for term in range(2, 6):
        kept.append(member.at)
        member.handle(ev.CheckpointsKept(tuple(kept[:3])), 0.0)
        plans.append(plan_for(member.at, term))
        commit(member, plans[-1])
    for version, newest in zip(kept[:3], plans[1:], strict=False):
        assert member.remembers(version) == (newest, DROPPED), "the plan before made it"


def test_an_undone_version_is_explained_by_a_passing_plan() -> None:
    """Epoch 2 is under way, the network parts, and a leader on the other side begins again from the
    checkpoint before it."""
    member, plans = trained(2, checkpoint_at=1)
    kept = member.checkpoints[0]
    there = plan_for(kept, 9)
    assert not any(
        isinstance(a, ev.RefuseCaller) for a in member.handle(ev.PlanArrived(there), 0.0)
    )
    assert member.remembers(kept) == (there, ())
    assert member.remembers(makes(plans[1], DROPPED)) == (plans[1], DROPPED), (
        "the last plan too: what it made was somewhere"
    )


def test_what_nobody_can_put_in_place_is_forgotten() -> None:
    member, plans = trained(8, checkpoint_at=2)
    for plan in (plans[0], plans[4], plans[5]):
        assert member.remembers(plan.base) == (None, ())
    again = [plan_for(member.at, 9 + i) for i in range(50)]
    for plan in again:
        member.handle(ev.PlanArrived(plan), 0.0)
    assert len(member._older) <= 1 + 1 + len(member.checkpoints), (
        "one plan a place, however often an epoch is begun again"
    )
    assert member.remembers(member.at) == (again[-1], ())


def test_a_plan_that_cannot_be_followed_is_refused_twice() -> None:
    """The first answer was lost on its way while the checkpoint was read."""
    member, _ = trained(3, checkpoint_at=1)
    back = plan_for(member.checkpoints[0], 9)
    assert isinstance(member.handle(ev.PlanArrived(back), 0.0)[0], ev.GoTo)
    assert member.handle(ev.PlanArrived(back), 0.0) == [], "told twice"
    member.handle(ev.VersionPlaced(Version(0), (), 0), 0.0)  # it could not be read
    (refused,) = member.handle(ev.PlanArrived(back), 0.0)
    assert isinstance(refused, ev.RefuseCaller)


def test_a_plan_with_another_digest_of_the_version_is_refused() -> None:
    """A peer that restarted and fetched another cell's version is still in the roster with its
    former one."""
    member, _ = trained(2)
    here = replace(plan_for(member.at, 3), digests={1: "d"})
    (refused,) = member.handle(ev.PlanArrived(here, "of another cell"), 0.0)
    assert isinstance(refused, ev.RefuseCaller)
    assert member.term == 2, "what is refused changes nothing"
    begun = member.handle(ev.PlanArrived(here, "d"), 0.0)
    assert any(isinstance(a, ev.BeginEpoch) for a in begun)


def test_a_plan_of_a_term_that_is_over_is_refused() -> None:
    member, plans = trained(2)
    for term in (1, 2):
        (refused,) = member.handle(ev.PlanArrived(plan_for(member.at, term)), 0.0)
        assert refused == ev.RefuseCaller(f"term {term} is over, this is term 2")
    assert member.plan == plans[-1]
    member.handle(ev.PlanArrived(plan_for(member.at, 3)), 0.0)
    assert member.term == 3
