import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.pipeline import events as ev
from node.pipeline.events import Trouble
from node.pipeline.machine import PipelineMachine
from node.pipeline.route import ATTEMPTS, Delivery, RoutePause, Suspects, Workloads, predicted

A, B, C, D = (PeerId(x) for x in "abcd")


def asked(delivery, preferred, suspects):
    """Peers of A, B and C in the order in which they are asked, all of them busy."""
    for _ in range(3):
        peer = delivery.choose(preferred, (A, B, C), suspects, 0.0)
        yield peer
        delivery.turned(peer, Trouble.BUSY)


def test_the_planned_peer_first_then_the_others_then_a_pause():
    delivery = Delivery(1)
    suspects = Suspects()
    assert [*asked(delivery, B, suspects)] == [B, C, A]
    assert isinstance(delivery.choose(B, (A, B, C), suspects, 0.0), RoutePause)
    assert delivery.choose(B, (A, B, C), suspects, 0.0) == B


def test_peers_have_no_room_only_if_none_of_them_failed():
    delivery = Delivery(0)
    pauses = []
    for trouble in (Trouble.FAILED, Trouble.BUSY):
        for peer in (A, B):
            assert delivery.choose(peer, (A, B), Suspects(), 0.0) in (A, B)
            delivery.turned(peer, trouble if peer == A else Trouble.BUSY)
        pauses.append(delivery.choose(A, (A, B), Suspects(), 0.0))
    assert [pause.full for pause in pauses] == [False, True]


def test_a_suspect_is_asked_last_until_it_is_heard_of():
    suspects = Suspects()
    suspects.add(A, 0.0)
    assert Delivery(0).choose(A, (A, B), suspects, 1.0) == B
    assert Delivery(0).choose(A, (A,), suspects, 1.0) == A
    suspects.clear(A)
    assert Delivery(0).choose(A, (A, B), suspects, 1.0) == A
    suspects.add(A, 0.0)
    assert Delivery(0).choose(A, (A, B), suspects, 1e9) == A


def test_a_slow_replica_is_asked_last_unless_the_plan_chose_it():
    suspects = Suspects()
    suspects.slow = frozenset({A, B})
    assert [*asked(Delivery(0), A, suspects)] == [A, C, B]
    suspects.add(C, 0.0)
    assert Delivery(0).choose(C, (B, C), suspects, 1.0) == B


def test_pauses_grow_to_a_bound():
    delivery = Delivery(0)
    pauses = []
    for _ in range(30):
        choice = delivery.choose(A, (A,), Suspects(), 0.0)
        if isinstance(choice, RoutePause):
            pauses.append(choice.seconds)
        elif choice:
            delivery.turned(choice, Trouble.BUSY)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05 < pauses[-1] < 1.0


@given(st.lists(st.sampled_from([Trouble.FAILED, Trouble.REFUSED]), min_size=1), st.integers(0, 9))
def test_delivery_gives_up_after_enough_refusals_and_failures(troubles, spread):
    delivery = Delivery(spread)
    counts = dict.fromkeys((A, B, C), 0.0)
    for i in range(100):
        choice = delivery.choose(A, (A, B, C), Suspects(), 0.0)
        if choice is None:
            assert all(n >= 1 for n in counts.values())
            return
        if isinstance(choice, RoutePause):
            continue
        assert counts[choice] < 1
        trouble = troubles[i % len(troubles)]
        counts[choice] += 1 if trouble is Trouble.REFUSED else 1 / ATTEMPTS
        delivery.turned(choice, trouble)
    raise AssertionError("it never gave up")


def test_the_least_loaded_replica_is_chosen_first() -> None:
    busy = {A: 3.0, B: 9.0, C: 1.0, D: 1.0}
    dead = Suspects()
    dead.gone.add(B)
    assert [Delivery(i).choose(B, (A, B, C, D), dead, 0.0, busy) for i in range(4)] == [C, C, D, C]
    assert Delivery(0).choose(A, (A, B, C), Suspects(), 0.0, busy) == A, (
        "the plan's choice is the plan's"
    )
    dead.add(C, 0.0)
    assert Delivery(0).choose(B, (A, B, C), dead, 1.0, busy) == A, (
        "a suspect comes last whatever it has to do"
    )


def test_work_of_a_dead_replica_goes_where_it_is_done_first() -> None:
    """Of the dead replica's twelve micro-batches, most go to the replica that is three times as
    fast and to the one without work."""
    e = PeerId("e")
    names = (A, B, C, D)
    speeds = {A: 1.0, B: 3.0, C: 1.0, D: 0.0}
    work = [A] * 12 + [B] * 6 + [C] * 6
    paths = tuple(Path(i, e, (i,), (Hop(1, p),)) for i, p in enumerate(work))
    members = (PlanMember(e, 0), *(PlanMember(p, 1, speeds[p]) for p in names))
    plan = Plan(1, 1, e, members, paths, {})
    each, done = predicted(plan)
    assert each == pytest.approx({A: 1.0, B: 1 / 3, C: 1.0, D: 1.0})
    assert done == pytest.approx({A: 13.0, B: 7 / 3, C: 7.0, D: 1.0})
    machine = PipelineMachine(e)
    machine.handle(ev.AdoptPlan(plan), 0.0)
    machine.handle(ev.PeerDied(A), 0.0)
    got: list[PeerId] = []
    for path in paths[:12]:
        machine.handle(ev.Start(path.index), 0.0)
        done = machine.handle(ev.Computed(ev.Key(1, path.index, 0), ev.Direction.FORWARD), 0.0)
        got += [a.journey[1].peer for a in done if isinstance(a, ev.Send)]
    assert (len(got), {p: got.count(p) for p in (A, C)}) == (12, {A: 0, C: 0})
    assert 7 <= got.count(B) <= 8, (
        "so that it and the idle one are done at the same time, before C is"
    )


def test_all_senders_share_the_work_of_a_dead_replica() -> None:
    """Six ends peers with two micro-batches each at the dead replica: none of them knows what the
    others do, and no sibling gets more than its share."""
    origins = [PeerId(f"e{n}") for n in range(6)]
    paths = tuple(Path(i, origins[i % 6], (i,), (Hop(1, A),)) for i in range(12))
    members = (*(PlanMember(e, 0) for e in origins), *(PlanMember(p, 1, 1.0) for p in (A, B, C, D)))
    plan = Plan(1, 1, origins[0], members, paths, {})
    got: list[PeerId] = []
    for origin in origins:
        machine = PipelineMachine(origin)
        machine.handle(ev.AdoptPlan(plan), 0.0)
        machine.handle(ev.PeerDied(A), 0.0)
        for path in paths:
            if path.origin == origin:
                machine.handle(ev.Start(path.index), 0.0)
                key = ev.Key(1, path.index, 0)
                done = machine.handle(ev.Computed(key, ev.Direction.FORWARD), 0.0)
                got += [a.journey[1].peer for a in done if isinstance(a, ev.Send)]
    assert {p: got.count(p) for p in (B, C, D)} == {B: 4, C: 4, D: 4}


def test_a_heir_that_is_gone_too_leaves_its_share_to_the_others() -> None:
    loads = Workloads(plan_of(12, A, (A, B, C, D)))
    first = loads.heir(0, A, (A, B, C, D), {A})
    later = loads.heir(0, A, (A, B, C, D), {A, first})
    assert first in (B, C, D)
    assert later == first, "the machine asks the others when it finds that this one is gone"
    assert Workloads(plan_of(12, A, (A,))).heir(0, A, (A,), {A}) == A, "nobody is left"
    assert Workloads().heir(0, A, (A, B), {A}) == A, "no plan is in force"


def plan_of(count: int, peer: PeerId, replicas: tuple[PeerId, ...]) -> Plan:
    """A plan of this number of micro-batches, all over one of the replicas."""
    e = PeerId("e")
    paths = tuple(Path(i, e, (i,), (Hop(1, peer),)) for i in range(count))
    members = (PlanMember(e, 0), *(PlanMember(p, 1, 1.0) for p in replicas))
    return Plan(1, 1, e, members, paths, {})


def test_only_who_is_asked_last_is_waited_for() -> None:
    delivery = Delivery(0)
    for asked in (A, B):
        assert delivery.choose(A, (A, B), Suspects(), 0.0) == asked
        assert not delivery.patient, "somebody else may have room"
        delivery.turned(asked, Trouble.BUSY)
    assert isinstance(delivery.choose(A, (A, B), Suspects(), 0.0), RoutePause)
    assert delivery.choose(A, (A, B), Suspects(), 0.0) == A
    assert delivery.patient
    alone = Delivery(0)
    assert alone.choose(A, (A,), Suspects(), 0.0) == A
    assert alone.patient
