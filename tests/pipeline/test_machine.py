"""Single turns of the machine, told one event at a time; random schedules of whole swarms are in
test_schedules."""

from dataclasses import replace

import pytest

from node.core.ids import PeerId
from node.core.journey import Hop, Plan, PlanMember
from node.pipeline import events as ev
from node.pipeline.events import Direction, Key, Say, Trouble
from node.pipeline.machine import PipelineMachine
from node.pipeline.route import fewest_hops
from tests.pipeline.conftest import ORIGIN, make_plan


def test_an_expired_entry_is_freed_and_fetched_for_its_gradient():
    machine, plan = at("s2a")
    forward = ev.Claim(3, plan.hash, 0, plan.paths[0].journey, 2)
    forwarded(machine, forward, "s1a")
    assert machine.handle(ev.Expired(forward.key), 9.0)[-1] == ev.Free(forward.key)
    actions = machine.handle(ev.TensorReceived(Direction.BACKWARD, forward, PeerId("s3a")), 9.0)
    assert actions == [ev.Answer(Say.TAKE), ev.Fetch(forward.key, (PeerId("s1a"),))]
    assert machine.handle(ev.Expired(forward.key), 99.0) == []


def at(
    peer: str, batches: int = 1, replicas: int = 1, fewest: int = 99
) -> tuple[PipelineMachine, Plan]:
    """A machine with a plan in force, of `batches` micro-batches and `replicas` replicas a
    stage."""
    machine = PipelineMachine(PeerId(peer), fewest)
    plan = make_plan(batches, replicas)
    machine.handle(ev.AdoptPlan(plan), 0.0)
    return machine, plan


def forwarded(machine: PipelineMachine, claim: ev.Claim, sender: str) -> list[ev.Action]:
    """Actions after the activation of `claim` came and its forward is computed."""
    machine.handle(ev.TensorReceived(Direction.FORWARD, claim, PeerId(sender)), 0.0)
    return machine.handle(ev.Computed(claim.key, Direction.FORWARD), 0.0)


def left_out(plan: Plan, position: int, *stages: int) -> ev.Claim:
    journey = tuple(
        Hop(h.stage, PeerId("")) if h.stage in stages else h for h in plan.paths[0].journey
    )
    return ev.Claim(plan.epoch, plan.hash, 0, journey, position)


def visited_backward(machine: PipelineMachine, plan: Plan) -> Key:
    """Stage 2 with its gradient computed and under way."""
    claim = left_out(plan, 2)
    forwarded(machine, claim, "s1a")
    machine.handle(ev.TensorReceived(Direction.BACKWARD, claim, PeerId("s3a")), 0.0)
    machine.handle(ev.Computed(claim.key, Direction.BACKWARD), 0.0)
    return claim.key


def play(machine: PipelineMachine, *script: tuple[ev.Event, object]) -> None:
    """Feed each event and compare the actions; an answer is compared by its verdict."""
    for event, expected in script:
        done = machine.handle(event, 0.0)
        said = [a.say if isinstance(a, ev.Answer) else a for a in done]
        assert expected is ANYTHING or said == expected, event


ANYTHING = ...


def test_a_planned_hop_is_waited_for_unless_it_is_slow() -> None:
    plan = make_plan(1, 2)
    claim = left_out(plan, 1)
    planned = claim.journey[2].peer

    def patient(*, paths_planned: bool, slow: bool) -> bool:
        machine = PipelineMachine(claim.journey[1].peer, 99, paths_planned)
        machine.handle(ev.AdoptPlan(plan), 0.0)
        machine.suspects.slow = frozenset({planned} if slow else ())
        sent = forwarded(machine, claim, ORIGIN)[-1]
        assert isinstance(sent, ev.Send)
        assert sent.peer == planned, "the plan has reckoned with slow ones"
        busy = ev.Turned(claim.key, Direction.FORWARD, planned, Trouble.BUSY)
        other = machine.handle(busy, 0.0)[-1]
        assert isinstance(other, ev.Send)
        assert other.peer != planned
        assert not other.patient, "its room is planned for others"
        return sent.patient

    assert patient(paths_planned=True, slow=False)
    assert not patient(paths_planned=True, slow=True)
    assert not patient(paths_planned=False, slow=False), "the other replica may have room"


@pytest.mark.parametrize("early", [True, False])
def test_a_share_counts_when_the_origin_names_us_and_not_before(early):
    machine, plan = at("s2a")
    key = visited_backward(machine, plan)
    named = ev.Counted(3, plan.hash, 0, ORIGIN)
    done = ev.Settled(key, Direction.BACKWARD, PeerId("s1a"))
    assert machine.unsure()
    play(
        machine,
        (
            ev.Passed(key, Direction.BACKWARD, PeerId("s1a")),
            [ev.AcknowledgeVisit(key, Direction.BACKWARD)],
        ),
        (replace(named, caller=PeerId("s1a")), [Say.REFUSED]),
        *(
            ((named, [Say.TAKE, ev.Commit(key)]), (done, [ev.Free(key)]))
            if early
            else (
                (done, [ev.FreeGradient(key)]),
                (named, [Say.TAKE, ev.Commit(key), ev.Free(key)]),
            )
        ),
        (named, [Say.TAKE]),
    )
    assert not machine.unsure()


def test_nobody_waits_for_an_origin_that_names_nothing_until_it_names_a_share():
    machine, plan = at("s2a")
    visited_backward(machine, plan)
    assert machine.unnamed() == {ORIGIN: 1}
    machine.handle(ev.Close(3), 0.0)
    following = replace(plan, epoch=4)
    machine.handle(ev.AdoptPlan(following), 0.0)
    visited_backward(machine, following)
    assert machine.unnamed() == {ORIGIN: 1}
    assert not machine.unsure()
    machine.handle(ev.Counted(4, following.hash, 0, ORIGIN), 0.0)
    third = replace(plan, epoch=5)
    machine.handle(ev.AdoptPlan(third), 0.0)
    visited_backward(machine, third)
    assert machine.unsure() == 1


def claims_at_2(plan: Plan) -> list[ev.Claim]:
    """Claims of every micro-batch at stage 2."""
    return [ev.Claim(3, plan.hash, p.index, p.journey, 2) for p in plan.paths]


def gradient(machine: PipelineMachine, claim: ev.Claim) -> ev.Action:
    """First action after the gradient of a micro-batch came."""
    forwarded(machine, claim, "s1a")
    came = ev.TensorReceived(Direction.BACKWARD, claim, PeerId("s3a"))
    return machine.handle(came, 0.0)[1]


def test_gradients_wait_for_a_place_until_an_earlier_share_is_named():
    plan = make_plan(4, 1)
    machine = PipelineMachine(PeerId("s2a"), 99, places=2)
    machine.handle(ev.AdoptPlan(plan), 0.0)
    back = Direction.BACKWARD
    keys = [claim.key for claim in claims_at_2(plan)]
    done = [gradient(machine, claim) for claim in claims_at_2(plan)]
    computes = [ev.Compute(key, back) for key in keys]
    assert done == [*computes[:2], ev.Hold(keys[2]), ev.Hold(keys[3])]
    play(
        machine,
        (ev.Computed(keys[0], back), ANYTHING),
        (
            ev.Counted(3, plan.hash, 0, ORIGIN),
            [Say.TAKE, ev.Commit(keys[0]), computes[2]],
        ),
        (ev.Retry(keys[2], back), []),  # its wait was over before it had to end
        # The last one has waited long enough. It goes on, and its share counts for nobody.
        (ev.Retry(keys[3], back), [replace(computes[3], keep=False)]),
        (
            ev.Computed(keys[3], back),
            [
                ev.FreeGraph(keys[3]),
                ev.Void(keys[3]),
                ev.Send(keys[3], back, plan.paths[3].journey, 1),
            ],
        ),
        (ev.Counted(3, plan.hash, 3, ORIGIN), [Say.TAKE]),
    )


def test_a_gradient_that_waits_past_its_deadline_is_given_up():
    plan = make_plan(2, 1)
    machine = PipelineMachine(PeerId("s2a"), 99, places=1)
    machine.handle(ev.AdoptPlan(plan), 0.0)
    first, second = claims_at_2(plan)
    gradient(machine, first)
    assert gradient(machine, second) == ev.Hold(second.key)
    assert machine.handle(ev.Expired(second.key), 9.0)[-1] == ev.Free(second.key)
    assert machine.handle(ev.Expired(first.key), 9.0) == [], "it is being computed"


def test_an_origin_that_names_nothing_takes_no_place_of_another():
    other = PeerId("s0b")
    plan = make_plan(12, 1)
    paths = tuple(replace(p, origin=other) if p.index >= 9 else p for p in plan.paths)
    members = (*plan.members, PlanMember(other, 0))
    plan = replace(plan, paths=paths, members=members)
    machine = PipelineMachine(PeerId("s2a"), 99, places=8)
    machine.handle(ev.AdoptPlan(plan), 0.0)
    done = [type(gradient(machine, claim)) for claim in claims_at_2(plan)]
    # Nine of twelve micro-batches get six of eight places.
    assert done[:9] == [ev.Compute] * 6 + [ev.Hold] * 3
    assert done[9:11] == [ev.Compute] * 2


def test_a_gradient_without_its_activation_needs_room():
    machine, plan = at("s2a")
    (claim,) = claims_at_2(plan)
    came = ev.Arrived(Direction.BACKWARD, claim, PeerId("s3a"), room=False)
    play(machine, (came, [Say.BUSY]), (replace(came, room=True), [Say.TAKE]))
    forwarded(machine, claim, "s1a")
    play(machine, (came, [Say.TAKE]))  # its activation's room serves for it


def test_nothing_counts_after_the_close():
    machine, plan = at("s2a")
    key = visited_backward(machine, plan)
    named = ev.Counted(3, plan.hash, 0, ORIGIN)
    play(machine, (ev.Close(3), [ev.Void(key)]), (named, [Say.REFUSED]))
    assert not machine.unsure()


def test_the_origin_names_the_journey_that_came_home():
    machine, plan = at("s0a", replicas=2, fewest=2)
    machine.handle(ev.Start(0), 0.0)
    start = Key(3, 0, 0)
    machine.handle(ev.Computed(start, Direction.FORWARD), 0.0)
    home = ev.Claim(
        3,
        plan.hash,
        0,
        (
            Hop(0, ORIGIN),
            Hop(1, PeerId("s1a")),
            Hop(2, PeerId("")),
            Hop(3, PeerId("s3b")),
            Hop(0, ORIGIN),
        ),
        0,
    )
    machine.handle(ev.TensorReceived(Direction.BACKWARD, home, PeerId("s1a")), 0.0)
    actions = machine.handle(ev.Computed(start, Direction.BACKWARD), 0.0)
    assert ev.TellCounted(0, (PeerId("s1a"), PeerId("s3b"))) in actions
    assert actions.index(ev.TellCounted(0, (PeerId("s1a"), PeerId("s3b")))) < actions.index(
        ev.Finished(start)
    )
    assert machine.neighbours == {0: ("s3b", "s1a")}, "it gives to the last hop"


@pytest.mark.parametrize(
    ("fewest", "expected"), [(2, ["s2a", "s3a"]), (1, ["s2a", "s3a", "s0a"]), (3, ["s2a"])]
)
def test_an_unavailable_stage_is_skipped_within_the_limit(fewest, expected):
    machine, plan = at("s1a", fewest=fewest)
    claim = left_out(plan, 1)
    asked = []
    actions = forwarded(machine, claim, ORIGIN)
    while sends := [a for a in actions if isinstance(a, ev.Send)]:
        asked.append(sends[0].peer)
        if sends[0].peer == ORIGIN:
            break
        actions = machine.handle(
            ev.Turned(claim.key, Direction.FORWARD, sends[0].peer, Trouble.REFUSED), 0.0
        )
    assert asked == expected
    if fewest == 2:
        assert ev.Failed(claim.key, Direction.FORWARD, "no live replica of stage 3") in actions


def test_the_first_way_an_activation_came_is_kept():
    machine, plan = at("s3a", fewest=2)
    back = Direction.BACKWARD
    over = left_out(plan, 3)
    around = left_out(plan, 3, 2)
    play(
        machine,
        (
            ev.TensorReceived(Direction.FORWARD, around, PeerId("s1a")),
            [Say.TAKE, ev.Compute(around.key, Direction.FORWARD)],
        ),
        (ev.Arrived(Direction.FORWARD, over, PeerId("s2a")), [Say.SETTLED]),
        (ev.Arrived(Direction.FORWARD, around, PeerId("s1a")), [Say.AGAIN]),
        (ev.Computed(around.key, Direction.FORWARD), ANYTHING),
        (ev.TensorReceived(back, over, ORIGIN), [Say.REFUSED]),
        (ev.TensorReceived(back, around, ORIGIN), ANYTHING),
        (
            ev.Computed(around.key, back),
            [ev.FreeGraph(around.key), ev.Send(around.key, back, around.journey, 1)],
        ),
    )


def test_an_input_is_given_only_for_a_path_over_the_same_stages():
    machine, plan = at("s2a", replicas=2, fewest=1)
    around = ev.Claim(
        3,
        plan.hash,
        0,
        (Hop(0, ORIGIN), Hop(1, PeerId("")), Hop(2, PeerId("s2a")), *plan.paths[0].journey[3:]),
        2,
    )
    forwarded(machine, around, ORIGIN)
    ask = ev.Asked(3, plan.hash, 0, PeerId("s3a"), 3)
    assert machine.handle(ask, 0.0) == [ev.Answer(Say.REFUSED, "here it visited other stages")]
    assert machine.handle(replace(ask, skipped=(1,)), 0.0) == [ev.Answer(Say.TAKE)]


def test_a_result_that_is_not_finite_is_reported_to_the_origin():
    machine, plan = at("s2b", replicas=2)
    claim = ev.Claim(
        3,
        plan.hash,
        0,
        (*plan.paths[0].journey[:2], Hop(2, PeerId("s2b")), *plan.paths[0].journey[3:]),
        2,
    )
    sender = claim.journey[1].peer
    machine.handle(ev.TensorReceived(Direction.FORWARD, claim, sender), 0.0)
    assert machine.handle(ev.Broken(claim.key, Direction.FORWARD, "nan", lost=True), 0.0) == [
        ev.Failed(claim.key, Direction.FORWARD, "nan"),
        ev.TellOrigin(claim.key, ORIGIN, "nan"),
        ev.Free(claim.key),
    ]
    assert machine.handle(ev.Broken(claim.key, Direction.FORWARD, "nan", lost=True), 0.0) == []


@pytest.mark.parametrize(
    ("stages", "share", "fewest"),
    [(10, 0.3, 7), (3, 0.34, 2), (3, 0.33, 3), (3, 0.0, 3), (4, 1.0, 1), (1, 1.0, 1)],
)
def test_the_fewest_hops_of_a_journey(stages, share, fewest):
    assert fewest_hops(stages, share) == fewest


@pytest.mark.parametrize("close", [ev.Close(3), ev.AdoptPlan(None)])
def test_closing_drops_each_micro_batch_once(close):
    machine, plan = at(ORIGIN, batches=2)
    machine.handle(ev.Start(0), 0.0)
    dropped = [a.index for a in machine.handle(close, 1.0) if isinstance(a, ev.Dropped)]
    assert dropped == [0]
    assert machine.handle(close, 1.0) == []
    (late,) = machine.handle(ev.Start(1), 1.0)
    assert isinstance(late, ev.Dropped)
    home = ev.Claim(3, plan.hash, 0, plan.paths[0].journey, 4)
    (answer,) = machine.handle(ev.TensorReceived(Direction.FORWARD, home, PeerId("s3a")), 1.0)
    assert isinstance(answer, ev.Answer)
    assert answer.say in (Say.REFUSED, Say.AWAIT_PLAN)


def test_nobody_waits_for_a_peer_the_leader_found_dead():
    machine, plan = at("s0a", batches=2, replicas=2)
    machine.handle(ev.Start(0), 0.0)
    (first,) = machine.handle(ev.Computed(Key(3, 0, 0), Direction.FORWARD), 0.0)
    assert isinstance(first, ev.Send)
    (again,) = machine.handle(ev.PeerDied(first.peer), 1.0)
    assert isinstance(again, ev.Send)
    assert again.peer != first.peer, "the frame under way goes to another replica at once"
    machine.handle(ev.Start(1), 1.0)
    sent = [
        a.peer
        for a in machine.handle(ev.Computed(Key(3, 1, 0), Direction.FORWARD), 1.0)
        if isinstance(a, ev.Send)
    ]
    assert first.peer not in sent, "and none is begun with it"
    actions = machine.handle(ev.PeerDied(again.peer), 2.0)
    assert {a.index for a in actions if isinstance(a, ev.Dropped)} == {0, 1}, "nobody is left"
    machine.handle(ev.AdoptPlan(replace(plan, term=plan.term + 1)), 3.0)
    machine.handle(ev.Start(0), 3.0)
    (anew,) = machine.handle(ev.Computed(Key(3, 0, 0), Direction.FORWARD), 3.0)
    assert isinstance(anew, ev.Send), "another plan, another view"


def test_neighbours_of_a_share_are_those_that_took_and_gave_a_gradient() -> None:
    machine, plan = at("s2a", replicas=2)
    claim = left_out(plan, 2)
    before = claim.journey[1].peer
    behind = claim.journey[3].peer
    forwarded(machine, claim, before)
    machine.handle(ev.TensorReceived(Direction.BACKWARD, claim, behind), 0.0)
    machine.handle(ev.Computed(claim.key, Direction.BACKWARD), 0.0)
    assert machine.neighbours == {}, "nothing counts yet"
    failed = ev.Turned(claim.key, Direction.BACKWARD, before, Trouble.FAILED)
    (again,) = machine.handle(failed, 0.0)
    assert isinstance(again, ev.Send)
    assert again.peer != before
    machine.handle(ev.Passed(claim.key, Direction.BACKWARD, again.peer), 0.0)
    machine.handle(ev.Counted(3, plan.hash, 0, ORIGIN), 0.0)
    assert machine.neighbours == {0: (again.peer, behind)}
    machine.handle(ev.AdoptPlan(None), 0.0)
    assert machine.neighbours == {}


def test_the_giver_of_a_gradient_is_the_replica_whose_gradient_was_taken() -> None:
    machine, plan = at("s2a", replicas=2)
    claim = left_out(plan, 2)
    before = claim.journey[1].peer
    planned = claim.journey[3].peer
    (other,) = {PeerId("s3a"), PeerId("s3b")} - {planned}
    forwarded(machine, claim, before)
    journey = (*claim.journey[:3], Hop(3, other), *claim.journey[4:])
    instead = replace(claim, journey=journey)
    machine.handle(ev.TensorReceived(Direction.BACKWARD, instead, other), 0.0)
    late = machine.handle(ev.TensorReceived(Direction.BACKWARD, claim, planned), 0.0)
    assert [a.say for a in late if isinstance(a, ev.Answer)] == [Say.SETTLED]
    machine.handle(ev.Computed(claim.key, Direction.BACKWARD), 0.0)
    machine.handle(ev.Passed(claim.key, Direction.BACKWARD, before), 0.0)
    machine.handle(ev.Counted(3, plan.hash, 0, ORIGIN), 0.0)
    assert machine.neighbours == {0: (before, other)}
