"""The owner's decisions, with no network and time turned by hand."""

from dataclasses import replace

import pytest

from node.averaging.exchange.events import (
    Began,
    Ended,
    EndStream,
    Fail,
    Forgot,
    Kind,
    Opened,
    PeerFoundDead,
    Read,
    ReduceAndStep,
    Serve,
    Spoiled,
    StepFailed,
    Stepped,
    TimePassed,
    Uploaded,
    Voided,
    Wait,
)
from node.averaging.exchange.groups import micro_groups
from node.averaging.exchange.machine import MOST_SERVED, RoundMachine
from node.core.ids import PeerId, RoundId

A, B, C, D = map(PeerId, "abcd")
P, Q = "p.weight", "q.weight"
R0, R1 = RoundId(3, 1, 0), RoundId(3, 1, 1)


def one(*names):
    """All in one group."""
    return micro_groups(dict.fromkeys(names, 4), 1 << 20)


ALONE, BOTH = one(P), one(P, Q)
OPEN = Opened(
    round=R0,
    me=A,
    plan_hash="plan",
    ownership_hash="own",
    members=frozenset({A, B, C}),
    listeners=frozenset(),
    groups=ALONE,
    held=frozenset(),
    tokens=10,
    contribute_by=(100.0,),
    token_limit=1000,
)


def began(stream, peer, tokens=5, names=(P,), round_id=R0, groups=ALONE, group=0, **changes):
    digest = groups[group].digest
    return replace(
        Began(
            stream, peer, round_id, "plan", "own", group, digest, tokens, names if tokens else ()
        ),
        **changes,
    )


def feed(machine, *events, now=0.0):
    return [action for event in events for action in machine.handle(event, now)]


def opened(**changes):
    machine = RoundMachine()
    feed(machine, replace(OPEN, **changes))
    return machine


def test_it_steps_once_when_all_have_given_and_serves_all():
    machine = opened()
    assert feed(machine, began(1, C), began(2, B)) == [Read(1), Read(2)]
    assert feed(machine, Uploaded(2)) == []
    assert feed(machine, Uploaded(1)) == [ReduceAndStep(R0, 0, (P,), (A, B, C), 20)]
    assert feed(machine, Stepped(3, frozenset({P}))) == [Serve(1, (P,)), Serve(2, (P,))]
    assert feed(machine, began(3, B)) == [Serve(3, (P,))]


def test_nobody_is_served_the_same_again_and_again():
    machine = opened(members=frozenset({A, B}))
    feed(machine, began(1, B), Uploaded(1), Stepped(3, frozenset({P})), Ended(1))
    for stream in range(2, MOST_SERVED + 1):
        assert feed(machine, began(stream, B, tokens=stream % 2), Ended(stream)) == [
            Serve(stream, (P,))
        ]
    (refuse,) = feed(machine, began(100, B))
    assert (refuse.kind, refuse.weight) == (Kind.BUSY, 0)
    feed(machine, replace(OPEN, round=R1, members=frozenset({A, B}), held=frozenset({P})))
    assert feed(machine, began(101, B, round_id=R1)) == [Serve(101, (P,))], (
        "a new attempt is asked anew"
    )


def test_the_late_are_left_out_and_served_nevertheless():
    machine = opened()
    assert feed(machine, began(1, B), TimePassed(), now=99.9) == [Read(1)]
    assert feed(machine, TimePassed(), now=100.0) == [
        ReduceAndStep(R0, 0, (P,), (A,), 10),
        Wait(1),
    ], "what comes too late is not read on"
    assert feed(machine, Stepped(3, frozenset({P}))) == [Serve(1, (P,))]
    assert feed(machine, Uploaded(1), TimePassed(), now=101.0) == []


def test_a_dead_member_is_not_waited_for():
    machine = opened()
    feed(machine, began(1, B), Uploaded(1), began(2, C))
    assert feed(machine, Ended(2)) == [ReduceAndStep(R0, 0, (P,), (A, B), 15)]
    machine = opened()
    feed(machine, began(1, B), Uploaded(1))
    assert feed(machine, PeerFoundDead(C)) == [ReduceAndStep(R0, 0, (P,), (A, B), 15)]


def test_who_lies_about_its_head_is_not_waited_for():
    for lie in ({"tokens": 1001}, {"names": (Q,)}, {"names": (P, P)}):
        machine = opened()
        feed(machine, began(1, B), Uploaded(1))
        refuse, step = feed(machine, began(2, C, **lie))
        assert (refuse.stream, refuse.weight) == (2, 1.0)
        assert step == ReduceAndStep(R0, 0, (P,), (A, B), 15)
    machine = opened()
    feed(machine, began(1, B), Uploaded(1))
    (refuse,) = feed(machine, began(2, C, plan_hash="another"))
    assert refuse.weight == 0, "who may only be behind may come again"
    assert feed(machine, began(3, C)) == [Read(3)]


def test_what_is_given_stays_given_when_its_peer_dies():
    machine = opened()
    feed(machine, began(1, B), Uploaded(1), Ended(1), began(2, C))
    assert feed(machine, Uploaded(2)) == [ReduceAndStep(R0, 0, (P,), (A, B, C), 20)]


def test_a_peer_that_dialled_anew_is_waited_for_again():
    machine = opened(members=frozenset({A, B, C, D}))
    feed(machine, began(1, B), Ended(1), began(2, B), began(3, C), Uploaded(3))
    assert feed(machine, PeerFoundDead(D)) == []
    assert feed(machine, Uploaded(2)) == [ReduceAndStep(R0, 0, (P,), (A, B, C), 20)]


def test_a_newer_stream_of_a_peer_replaces_the_one_being_read():
    machine = opened()
    actions = feed(machine, began(1, B), began(2, B))
    assert [type(a) for a in actions] == [Read, EndStream, Read]
    assert actions[1].kind is Kind.SUPERSEDED
    assert feed(machine, Uploaded(1), Ended(1)) == []
    assert feed(machine, began(3, C), Uploaded(3)) == [Read(3)]
    assert feed(machine, Uploaded(2)) == [ReduceAndStep(R0, 0, (P,), (A, B, C), 20)]


def test_a_contribution_that_is_not_finite_is_refused_for_good():
    machine = opened(members=frozenset({A, B}))
    actions = feed(machine, began(1, B), Spoiled(1, Kind.VALUES, "nan"))
    assert actions == [
        Read(1),
        EndStream(1, Kind.VALUES, "nan", 1.0),
        ReduceAndStep(R0, 0, (P,), (A,), 10),
    ]
    machine = opened()
    feed(machine, began(1, B), Spoiled(1, Kind.VALUES, "nan"))
    assert feed(machine, began(2, B))[0].kind is Kind.VALUES


def test_listeners_are_not_waited_for_and_are_served():
    machine = opened(listeners=frozenset({C}))
    assert feed(machine, began(1, C, tokens=0)) == [Wait(1)]
    assert feed(machine, began(2, B), Uploaded(2)) == [
        Read(2),
        ReduceAndStep(R0, 0, (P,), (A, B), 15),
    ]
    assert feed(machine, Stepped(3, frozenset({P}))) == [Serve(1, (P,)), Serve(2, (P,))]
    assert feed(machine, began(3, C))[0].kind is Kind.STRANGER


def test_streams_wait_for_their_round():
    machine = RoundMachine()
    assert feed(machine, began(1, B), began(2, C, plan_hash="other")) == []
    actions = feed(machine, OPEN)
    assert actions[0] == Read(1)
    assert actions[1].kind is Kind.PLAN


def test_waiting_for_a_round_is_bounded_per_peer_and_in_all():
    machine = RoundMachine(held_per_peer=2, held_total=3)
    assert feed(machine, began(1, B), began(2, B)) == []
    assert feed(machine, began(3, B))[0].kind is Kind.BUSY
    assert feed(machine, began(4, C)) == []
    assert feed(machine, began(5, D))[0].kind is Kind.BUSY
    assert feed(machine, Ended(1), began(6, D)) == []


def test_a_repair_steps_only_what_is_new():
    machine = opened(tokens=10)
    feed(
        machine,
        began(1, B),
        Uploaded(1),
        began(2, C),
        Uploaded(2),
        Stepped(3, frozenset({P})),
        Ended(1),
        Ended(2),
    )
    repair = replace(
        OPEN,
        round=R1,
        members=frozenset({A, B}),
        groups=BOTH,
        held=frozenset({P}),
        ownership_hash="new",
    )
    assert feed(machine, repair) == []
    attempt = {"round_id": R1, "ownership_hash": "new", "groups": BOTH}
    assert feed(machine, began(3, B, names=(Q,), **attempt), Uploaded(3)) == [
        Read(3),
        ReduceAndStep(R1, 0, (Q,), (A, B), 15),
    ]
    assert feed(machine, Stepped(3, frozenset({Q}))) == [Serve(3, (Q,))]
    assert feed(machine, began(4, B, names=(P, Q), **attempt)) == [Serve(4, (P, Q))]
    assert feed(machine, began(5, B)) == [Serve(5, (P,))], "the former attempt is still served"


def test_a_new_attempt_supersedes_waiting_streams():
    machine = opened()
    feed(machine, began(1, B), Uploaded(1))
    actions = feed(machine, replace(OPEN, round=R1, members=frozenset({A, B})))
    assert [(a.stream, a.kind) for a in actions] == [(1, Kind.SUPERSEDED)]
    assert feed(machine, began(2, B))[0].kind is Kind.SUPERSEDED
    with pytest.raises(ValueError, match="not newer"):
        feed(machine, OPEN)


def test_a_part_held_from_a_former_owner_is_served_not_stepped():
    machine = RoundMachine()
    assert feed(machine, replace(OPEN, held=frozenset({P})), TimePassed(), now=500.0) == []
    assert feed(machine, began(1, B)) == [Serve(1, (P,))]


def test_the_first_fault_latches_until_the_next_attempt():
    machine = opened()
    feed(machine, began(1, B), Uploaded(1), began(2, C), Uploaded(2))
    actions = feed(machine, StepFailed(3, frozenset({P}), "broken"))
    assert [a.kind for a in actions[:2]] == [Kind.FAILED, Kind.FAILED]
    assert actions[2] == Fail(3, "broken")
    assert feed(machine, began(3, B))[0].kind is Kind.FAILED
    assert feed(machine, TimePassed(), now=500.0) == []
    feed(machine, replace(OPEN, round=R1, members=frozenset({A, B})))
    assert feed(machine, began(4, B, round_id=R1), Uploaded(4)) == [
        Read(4),
        ReduceAndStep(R1, 0, (P,), (A, B), 15),
    ]


def test_a_round_without_any_gradients_is_a_fault():
    machine = opened(tokens=0, members=frozenset({A, B}))
    actions = feed(machine, began(1, B, tokens=0))
    assert actions[0] == Wait(1)
    assert actions[1].kind is Kind.FAILED
    assert isinstance(actions[2], Fail)


def test_a_contribution_must_cover_all_that_is_not_stepped():
    machine = opened(groups=BOTH)
    assert feed(machine, began(1, B, groups=BOTH))[0].kind is Kind.HEADS
    assert feed(machine, began(2, B, names=(P, P), groups=BOTH))[0].kind is Kind.HEADS
    assert feed(machine, began(3, B, names=(P, Q, "r"), groups=BOTH))[0].kind is Kind.HEADS
    assert feed(machine, began(4, C, names=(Q, P), groups=BOTH)) == [Read(4)]


def test_a_forgotten_epoch_is_over_for_everybody():
    machine = opened()
    feed(machine, began(1, B), began(2, C, round_id=RoundId(4, 1, 0)))
    assert [(a.stream, a.kind) for a in feed(machine, Forgot(3))] == [(1, Kind.FORGOTTEN)]
    assert feed(machine, began(3, B))[0].kind is Kind.FORGOTTEN
    with pytest.raises(ValueError, match="over"):
        feed(machine, OPEN)
    assert feed(machine, Stepped(3, frozenset({P})), Uploaded(1), Ended(1)) == []


def test_a_voided_epoch_begins_anew_under_a_higher_term():
    machine = opened()
    feed(machine, began(1, B), Uploaded(1), began(2, C), Uploaded(2), Stepped(3, frozenset({P})))
    ahead = RoundId(3, 2, 0)
    assert feed(machine, began(3, B, round_id=ahead)) == []
    feed(machine, Forgot(3))
    assert feed(machine, began(4, B, round_id=ahead))[0].kind is Kind.FORGOTTEN
    assert feed(machine, Voided(3)) == []
    assert feed(machine, began(5, C, round_id=ahead)) == [], "a faster member of the new term waits"
    assert feed(machine, replace(OPEN, round=ahead)) == [Read(5)]
    assert feed(machine, Uploaded(5), began(6, B, round_id=ahead), Uploaded(6)) == [
        Read(6),
        ReduceAndStep(ahead, 0, (P,), (A, B, C), 20),
    ]


def test_a_voided_epoch_refuses_its_streams_and_keeps_later():
    machine, ahead = opened(), RoundId(3, 2, 0)
    feed(machine, began(1, B), began(2, C, round_id=ahead))
    assert [(a.stream, a.kind) for a in feed(machine, Voided(3))] == [(1, Kind.SUPERSEDED)]
    assert feed(machine, Uploaded(1), Ended(1)) == []
    assert feed(machine, replace(OPEN, round=ahead)) == [Read(2)]


def test_an_uploading_member_is_awaited_though_called_dead():
    machine = opened()
    assert feed(machine, began(1, B), PeerFoundDead(B), began(2, C), Uploaded(2)) == [
        Read(1),
        Read(2),
    ]
    assert feed(machine, Uploaded(1)) == [ReduceAndStep(R0, 0, (P,), (A, B, C), 20)]


@pytest.mark.parametrize("over", [Forgot(3), Voided(3)])
def test_of_an_epoch_that_is_over_nothing_is_kept(over):
    machine = opened(listeners=frozenset({C}), may_hold=True)
    feed(machine, began(1, B), Uploaded(1), over, Ended(1))
    assert (machine._epochs, machine._streams) == ({}, {})
