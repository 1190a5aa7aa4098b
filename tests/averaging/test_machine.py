"""The owner's decisions, with no network and time turned by hand."""

import weakref
from dataclasses import replace

import pytest

from node.averaging.exchange.events import (
    Began,
    Ended,
    EndStream,
    Fail,
    Forgot,
    Kind,
    Knocked,
    Opened,
    PeerFoundDead,
    Planned,
    Read,
    ReadHead,
    ReduceAndStep,
    Serve,
    Spoiled,
    Stepped,
    TimePassed,
    Uploaded,
    Voided,
    Wait,
    micro_groups,
)
from node.averaging.exchange.machine import MOST_OPEN, MOST_SERVED, PLANS_KEPT, RoundMachine
from node.core.ids import PeerId, RoundId

A, B, C, D = map(PeerId, "abcd")
P = "p.weight"
Q = "q.weight"
R0 = RoundId(3, 1, 0)
R1 = RoundId(3, 1, 1)


def one(*names):
    """Parts cut into a single group."""
    return micro_groups(dict.fromkeys(names, 4), 1 << 20)


HEADS = weakref.WeakKeyDictionary()
"""Heads of a machine's streams, by machine, then by stream number."""
ALONE = one(P)
BOTH = one(P, Q)
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


def ahead(stream, peer, round_id=R0, **changes):
    """A stream that comes before its round is open: nothing of it is read."""
    head = began(stream, peer, round_id=round_id, **changes)
    return Knocked(stream, peer, round_id, head.plan_hash), head


def feed(machine, *events, now=0.0):
    """Feed the events to the machine and return its actions.

    A number among the events is the time of those after it. A stream in a tuple comes with its
    head, which is read when the machine asks for it.
    """
    done = []
    heads = HEADS.setdefault(machine, {})
    for event in events:
        if isinstance(event, float):
            now = event
            continue
        if isinstance(event, tuple):
            heads[event[1].stream] = event[1]
            event = event[0]
        for action in machine.handle(event, now):
            done += (
                machine.handle(heads[action.stream], now)
                if isinstance(action, ReadHead)
                else [action]
            )
    return done


def opened(**changes):
    machine = RoundMachine()
    feed(machine, replace(OPEN, **changes))
    return machine


def step(*by, round_id=R0, group=0, names=(P,)):
    return ReduceAndStep(round_id, group, names, by)


def play(machine, script):
    """Feed each line's events and compare the actions; a refusal is compared by stream and kind."""
    for events, expected in script:
        done = feed(machine, *events)
        said = [(a.stream, a.kind) if isinstance(a, EndStream) else a for a in done]
        assert expected is ANYTHING or said == expected, events


ANYTHING = ...
STEPPED = Stepped(3, frozenset({P}))
BROKEN = Stepped(3, frozenset({P}), "broken")
AB = frozenset({A, B})
AHEAD = RoundId(3, 2, 0)
AGAIN = replace(OPEN, round=R1, members=AB)
REPAIR = replace(AGAIN, groups=BOTH, held=frozenset({P}), ownership_hash="new")
IN_REPAIR = {"round_id": R1, "ownership_hash": "new", "groups": BOTH}

SCRIPTS = {
    "it steps once when all have given and serves all": [
        ((OPEN, began(1, C), began(2, B)), [Read(1), Read(2)]),
        ((Uploaded(2),), []),
        ((Uploaded(1),), [step(A, B, C)]),
        ((STEPPED,), [Serve(1, (P,)), Serve(2, (P,))]),
        ((began(3, B),), [Serve(3, (P,))]),
    ],
    "the late are left out and served nevertheless": [
        ((OPEN, began(1, B), 99.9, TimePassed()), [Read(1)]),
        # a contribution that comes too late is not read further
        ((100.0, TimePassed()), [step(A), Wait(1)]),
        ((STEPPED,), [Serve(1, (P,))]),
        ((Uploaded(1), 101.0, TimePassed()), []),
    ],
    "who breaks off is not waited for": [
        ((OPEN, began(1, B), Uploaded(1), began(2, C)), [Read(1), Read(2)]),
        ((Ended(2),), [step(A, B)]),
    ],
    "who is found dead is not waited for": [
        ((OPEN, began(1, B), Uploaded(1)), [Read(1)]),
        ((PeerFoundDead(C),), [step(A, B)]),
    ],
    "what is given stays given when its peer dies": [
        ((OPEN, began(1, B), Uploaded(1), Ended(1), began(2, C)), [Read(1), Read(2)]),
        ((Uploaded(2),), [step(A, B, C)]),
    ],
    "a peer that dialled anew is waited for again": [
        ((replace(OPEN, members=frozenset({A, B, C, D})), began(1, B), Ended(1)), [Read(1)]),
        ((began(2, B), began(3, C), Uploaded(3), PeerFoundDead(D)), [Read(2), Read(3)]),
        ((Uploaded(2),), [step(A, B, C)]),
    ],
    "a newer stream of a peer replaces the one being read": [
        ((OPEN, began(1, B), began(2, B)), [Read(1), (1, Kind.SUPERSEDED), Read(2)]),
        ((Uploaded(1), Ended(1), began(3, C), Uploaded(3)), [Read(3)]),
        ((Uploaded(2),), [step(A, B, C)]),
    ],
    "who gave what is not finite is left out": [
        (
            (replace(OPEN, members=AB), began(1, B), Spoiled(1, Kind.VALUES, "nan")),
            [Read(1), (1, Kind.VALUES), step(A)],
        ),
    ],
    "who gave what is not finite may not give again": [
        ((OPEN, began(1, B), Spoiled(1, Kind.VALUES, "nan")), [Read(1), (1, Kind.VALUES)]),
        ((began(2, B),), [(2, Kind.VALUES)]),
    ],
    "listeners are not waited for and are served": [
        ((replace(OPEN, listeners=frozenset({C})), began(1, C, tokens=0)), [Wait(1)]),
        ((began(2, B), Uploaded(2)), [Read(2), step(A, B)]),
        ((STEPPED,), [Serve(1, (P,)), Serve(2, (P,))]),
        ((began(3, C),), [(3, Kind.STRANGER)]),
    ],
    "streams wait for their round": [
        ((ahead(1, B), ahead(2, C, plan_hash="other")), []),
        ((OPEN,), [Read(1), (2, Kind.PLAN)]),
    ],
    "a repair steps only what is new": [
        ((OPEN, began(1, B), Uploaded(1), began(2, C), Uploaded(2), STEPPED), ANYTHING),
        ((Ended(1), Ended(2), REPAIR), []),
        (
            (began(3, B, names=(Q,), **IN_REPAIR), Uploaded(3)),
            [Read(3), step(A, B, round_id=R1, names=(Q,))],
        ),
        ((Stepped(3, frozenset({Q})),), [Serve(3, (Q,))]),
        ((began(4, B, names=(P, Q), **IN_REPAIR),), [Serve(4, (P, Q))]),
        ((began(5, B),), [Serve(5, (P,))]),  # the former attempt is still served
    ],
    "a new attempt supersedes waiting streams": [
        ((OPEN, began(1, B), Uploaded(1)), [Read(1)]),
        ((AGAIN,), [(1, Kind.SUPERSEDED)]),
        ((began(2, B),), [(2, Kind.SUPERSEDED)]),
    ],
    "a part held from a former owner is served, not stepped": [
        ((replace(OPEN, held=frozenset({P})), 500.0, TimePassed()), []),
        ((began(1, B),), [Serve(1, (P,))]),
    ],
    "the first fault latches until the next attempt": [
        ((OPEN, began(1, B), Uploaded(1), began(2, C), Uploaded(2)), ANYTHING),
        ((BROKEN,), [(1, Kind.FAILED), (2, Kind.FAILED), Fail(3, "broken")]),
        ((began(3, B),), [(3, Kind.FAILED)]),
        ((500.0, TimePassed()), []),
        ((AGAIN,), []),
        ((began(4, B, round_id=R1), Uploaded(4)), [Read(4), step(A, B, round_id=R1)]),
    ],
    "a round without any gradients is a fault": [
        (
            (replace(OPEN, tokens=0, members=AB), began(1, B, tokens=0)),
            [
                Wait(1),
                (1, Kind.FAILED),
                Fail(3, "nobody gave gradients for these parts"),
            ],
        ),
    ],
    "a contribution must cover all that is not stepped": [
        ((replace(OPEN, groups=BOTH), began(1, B, groups=BOTH)), [(1, Kind.HEADS)]),
        ((began(2, B, names=(P, P), groups=BOTH),), [(2, Kind.HEADS)]),
        ((began(3, B, names=(P, Q, "r"), groups=BOTH),), [(3, Kind.HEADS)]),
        ((began(4, C, names=(Q, P), groups=BOTH),), [Read(4)]),
    ],
    "a forgotten epoch is over for everybody": [
        ((OPEN, began(1, B), ahead(2, C, RoundId(4, 1, 0))), [Read(1)]),
        ((Forgot(3),), [(1, Kind.FORGOTTEN)]),
        ((began(3, B),), [(3, Kind.FORGOTTEN)]),
        ((STEPPED, Uploaded(1), Ended(1)), []),
    ],
    "a voided epoch begins anew under a higher term": [
        ((OPEN, began(1, B), Uploaded(1), began(2, C), Uploaded(2), STEPPED), ANYTHING),
        ((ahead(3, B, AHEAD),), [Wait(3)]),
        ((Forgot(3),), ANYTHING),
        ((ahead(4, B, AHEAD),), [(4, Kind.FORGOTTEN)]),
        ((Voided(3),), []),
        ((ahead(5, C, AHEAD),), []),  # a faster member of the new term waits
        ((ahead(7, C, RoundId(2, 1, 0)),), [(7, Kind.FORGOTTEN)]),
        ((replace(OPEN, round=AHEAD),), [Read(5)]),
        (
            (Uploaded(5), began(6, B, round_id=AHEAD), Uploaded(6)),
            [Read(6), step(A, B, C, round_id=AHEAD)],
        ),
    ],
    "a voided epoch refuses its streams and keeps later ones": [
        ((OPEN, began(1, B), ahead(2, C, AHEAD)), [Read(1), Wait(2)]),
        ((Voided(3),), [(1, Kind.SUPERSEDED)]),
        ((Uploaded(1), Ended(1)), []),
        ((replace(OPEN, round=AHEAD),), [Read(2)]),
    ],
    "who asks only for parts that are stepped is not awaited for the rest": [
        ((OPEN, began(1, B), Uploaded(1), PeerFoundDead(C), STEPPED), ANYTHING),
        ((REPAIR,), []),
        ((began(2, B),), [Serve(2, (P,))]),  # for the attempt before
        (
            (began(3, B, names=(P,), **IN_REPAIR),),
            [Serve(3, (P,)), step(A, round_id=R1, names=(Q,))],
        ),
    ],
    "who has given may ask again and waits": [
        ((OPEN, began(1, B), Uploaded(1), began(2, B)), [Read(1), Wait(2)]),
        ((began(3, C), Uploaded(3)), [Read(3), step(A, B, C)]),
        ((STEPPED,), [Serve(1, (P,)), Serve(2, (P,)), Serve(3, (P,))]),
    ],
    "in the next attempt everybody is awaited again and may give again": [
        ((OPEN, began(1, B), Spoiled(1, Kind.VALUES, "nan")), [Read(1), (1, Kind.VALUES)]),
        ((PeerFoundDead(C),), [step(A)]),
        ((BROKEN, replace(OPEN, round=R1)), [Fail(3, "broken")]),
        ((began(2, B, round_id=R1), Uploaded(2)), [Read(2)]),
        ((began(3, C, round_id=R1), Uploaded(3)), [Read(3), step(A, B, C, round_id=R1)]),
    ],
    "a stream of an attempt that was never open here is superseded": [
        ((replace(OPEN, round=R1), ahead(1, B, R0)), [(1, Kind.SUPERSEDED)]),
    ],
    "a head of a round that is not open here is superseded": [
        ((began(1, B),), [(1, Kind.SUPERSEDED)]),
        ((replace(OPEN, round=R1), began(2, B)), [(2, Kind.SUPERSEDED)]),
        ((began(3, B, round_id=RoundId(4, 1, 0)),), [(3, Kind.SUPERSEDED)]),
    ],
    "a plan that comes late leaves streams under way alone": [
        ((OPEN, began(1, B), Planned(3, "plan", frozenset({A, B, C}))), [Read(1)]),
        ((Uploaded(1), began(2, C), Uploaded(2)), [Read(2), step(A, B, C)]),
    ],
    "word of a stream that is not read changes nothing": [
        ((OPEN, began(1, B, tokens=0)), [Wait(1)]),
        ((Spoiled(1, Kind.VALUES, "nan"), Uploaded(1), Uploaded(9), Ended(9)), []),
        ((Spoiled(9, Kind.VALUES, "nan"),), []),
    ],
    "parts that no contribution covers may stay as they are": [
        (
            (replace(OPEN, tokens=0, members=AB, may_hold=True), began(1, B, tokens=0)),
            [Wait(1), step()],
        ),
        ((STEPPED,), [Serve(1, (P,))]),
    ],
    "a lost connection does not mean that there was nothing to give": [
        (
            (replace(OPEN, tokens=0, members=AB, may_hold=True), began(1, B)),
            [Read(1)],
        ),
        ((Ended(1),), [Fail(3, "nobody gave gradients for these parts")]),
        # the repaired attempt is without the lost member
        (
            (replace(OPEN, round=R1, tokens=0, members=frozenset({A}), may_hold=True),),
            [step(round_id=R1)],
        ),
    ],
    "a dead member may have had something to give": [
        ((replace(OPEN, tokens=0, may_hold=True), began(1, B, tokens=0)), [Wait(1)]),
        (
            (PeerFoundDead(C),),
            [(1, Kind.FAILED), Fail(3, "nobody gave gradients for these parts")],
        ),
    ],
    "a member that comes too late may have had something to give": [
        (
            (replace(OPEN, tokens=0, members=AB, may_hold=True), began(1, B), 100.0, TimePassed()),
            [Read(1), (1, Kind.FAILED), Fail(3, "nobody gave gradients for these parts")],
        ),
    ],
    "listeners need not come where nobody has anything to give": [
        (
            (
                replace(OPEN, tokens=0, may_hold=True, listeners=frozenset({C})),
                began(1, B, tokens=0),
            ),
            [Wait(1), step()],
        ),
    ],
    "as many tokens as are possible may be given": [
        ((OPEN, began(1, B, tokens=1000)), [Read(1)]),
    ],
    "an uploading member is awaited though called dead": [
        (
            (OPEN, began(1, B), PeerFoundDead(B), began(2, C), Uploaded(2)),
            [Read(1), Read(2)],
        ),
        ((Uploaded(1),), [step(A, B, C)]),
    ],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_owner_decides_as_its_script_says(name):
    play(RoundMachine(), SCRIPTS[name])


PLANNED = Planned(3, "plan", frozenset({A, B, C}))


def test_waiting_for_a_round_is_bounded_per_peer_and_in_all():
    play(
        RoundMachine(held_per_peer=2, held_total=3),
        [
            ((PLANNED, ahead(1, B), ahead(2, B)), [Wait(1), Wait(2)]),
            ((ahead(3, B),), [(3, Kind.BUSY)]),
            ((ahead(4, C),), [Wait(4)]),
            ((ahead(5, C),), [(5, Kind.BUSY)]),
            ((Ended(1), ahead(6, C)), [Wait(6)]),
        ],
    )


def test_a_member_that_is_in_no_plan_takes_a_quarter_of_the_places_ahead_of_it():
    unknown = {"round_id": RoundId(4, 1, 0), "plan_hash": "next"}
    play(
        RoundMachine(held_total=8),
        [
            ((PLANNED, ahead(1, D, **unknown), ahead(2, D, **unknown)), []),
            ((ahead(3, D, **unknown),), [(3, Kind.BUSY)]),
            ((ahead(4, B, **unknown), ahead(5, C)), [Wait(5)]),
            ((Ended(1), ahead(6, D, **unknown)), []),
        ],
    )


def test_one_stranger_may_wait_where_there_are_few_places():
    unknown = {"round_id": RoundId(4, 1, 0), "plan_hash": "next"}
    play(
        RoundMachine(held_total=3),
        [
            ((ahead(1, B, **unknown),), []),
            ((ahead(2, C, **unknown),), [(2, Kind.BUSY)]),
        ],
    )


@pytest.mark.parametrize("over", [Forgot(3), Voided(3)])
def test_members_of_plans_that_are_over_are_strangers(over):
    ahead_of_all = {"round_id": RoundId(5, 1, 0), "plan_hash": "next"}
    kept = Planned(4 if isinstance(over, Forgot) else 2, "kept", frozenset({C}))
    play(
        RoundMachine(held_total=8),
        [
            ((PLANNED, kept, over), []),
            ((ahead(1, B, **ahead_of_all), ahead(2, B, **ahead_of_all)), []),
            ((ahead(3, B, **ahead_of_all),), [(3, Kind.BUSY)]),
            ((ahead(4, C, **ahead_of_all),), []),
        ],
    )


def test_members_of_the_newest_plans_are_known():
    ahead_of_all = {"round_id": RoundId(99, 1, 0), "plan_hash": "next"}
    for plans, known in ((PLANS_KEPT, True), (PLANS_KEPT + 1, False)):
        machine = RoundMachine(held_total=4)
        for epoch in range(plans):
            members = frozenset({A, B}) if epoch == 0 else frozenset({A})
            assert feed(machine, Planned(epoch, "plan", members)) == []
        assert feed(machine, ahead(1, D, **ahead_of_all)) == []
        said = feed(machine, ahead(2, B, **ahead_of_all))
        assert (said == []) is known


WRONG = {
    "plan": ({"plan_hash": "other"}, Kind.PLAN, 0.0),
    "owners": ({"ownership_hash": "other"}, Kind.OWNERSHIP, 0.0),
    "stranger": ({"peer": D}, Kind.STRANGER, 1.0),
    "listener": ({"peer": C}, Kind.STRANGER, 1.0),
    "group": ({"digest": "other"}, Kind.GROUPS, 0.0),
    "no-such-group": ({"group": 0, "index": 1}, Kind.GROUPS, 0.0),
    "tokens-without-parts": ({"names": ()}, Kind.HEADS, 1.0),
    "parts-without-tokens": ({"named": (P, Q), "tokens": 0}, Kind.HEADS, 1.0),
    "foreign-parts": ({"names": (P, Q, "r")}, Kind.HEADS, 1.0),
    "too-many-tokens": ({"tokens": 1001}, Kind.VALUES, 1.0),
    "parts-left-out": ({"names": (P,)}, Kind.HEADS, 1.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_head_weighs_only_on_a_peer_that_cannot_be_honest(name):
    about, kind, weight = WRONG[name]
    changes = {"names": (P, Q), "groups": BOTH, **about}
    index = changes.pop("index", 0)
    named = changes.pop("named", None)
    head = replace(began(1, changes.pop("peer", B), **changes), group=index)
    if named is not None:
        head = replace(head, names=named)
    machine = opened(groups=BOTH, listeners=frozenset({C}), members=frozenset({A, B, C}))
    refused = feed(machine, head)[0]
    assert (refused.stream, refused.kind, refused.weight) == (1, kind, weight)


def test_who_is_in_no_plan_that_it_names_is_to_blame():
    (refused,) = feed(RoundMachine(), PLANNED, ahead(1, D))
    assert (refused.kind, refused.weight) == (Kind.STRANGER, 1.0)


def test_a_contribution_that_is_spoiled_weighs_on_its_peer():
    _, refused = feed(opened(), began(1, B), Spoiled(1, Kind.VALUES, "nan"))
    assert refused == EndStream(1, Kind.VALUES, "nan", 1.0)


def test_each_group_has_its_deadline():
    with pytest.raises(ValueError, match="shorter"):
        opened(groups=BOTH, contribute_by=())


def test_a_plan_says_who_may_wait_for_its_round():
    play(
        RoundMachine(),
        [
            ((ahead(1, B), ahead(2, D), ahead(3, C, plan_hash="other")), []),
            ((PLANNED,), [Wait(1), (2, Kind.STRANGER)]),
            ((ahead(4, D),), [(4, Kind.STRANGER)]),
            ((ahead(5, C, RoundId(3, 1, 1)),), [Wait(5)]),  # a member is at a later attempt
            ((OPEN,), [Read(1), (3, Kind.PLAN)]),
            ((ahead(6, D),), [(6, Kind.STRANGER)]),
        ],
    )


def test_no_head_is_read_before_its_peer_has_a_place_in_an_open_round():
    machine = RoundMachine()
    said = [machine.handle(knock, 0.0) for knock, _ in (ahead(1, B), ahead(2, D))]
    assert said == [[], []]
    read = machine.handle(replace(OPEN, members=AB), 0.0)
    assert read[0] == ReadHead(1)
    (refused,) = read[1:]
    assert (refused.stream, refused.kind, refused.weight) == (2, Kind.STRANGER, 1.0)
    assert machine.handle(Spoiled(1, Kind.HEADS, "no head"), 0.0)[0].weight == 1.0


def test_a_peer_has_few_exchanges_open():
    machine = opened()
    assert ReadHead(1) in machine.handle(ahead(1, C, tokens=0)[0], 0.0)
    for stream in range(2, MOST_OPEN + 1):
        assert feed(machine, ahead(stream, C, tokens=0)) == [Wait(stream)]
    (refused,) = machine.handle(ahead(99, C, tokens=0)[0], 0.0)
    assert (refused.kind, refused.weight) == (Kind.BUSY, 0.0)
    assert machine.handle(ahead(100, B)[0], 0.0) == [ReadHead(100)]


def test_a_round_that_is_over_cannot_be_opened():
    machine = opened()
    feed(machine, Forgot(3))
    with pytest.raises(ValueError, match="over"):
        feed(machine, OPEN)


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


def test_a_member_that_lies_about_its_head_is_not_waited_for():
    for lie in ({"tokens": 1001}, {"names": (Q,)}, {"names": (P, P)}):
        machine = opened()
        feed(machine, began(1, B), Uploaded(1))
        refuse, step = feed(machine, began(2, C, **lie))
        assert (refuse.stream, refuse.weight) == (2, 1.0)
        assert step == ReduceAndStep(R0, 0, (P,), (A, B))
    machine = opened()
    feed(machine, began(1, B), Uploaded(1))
    (refuse,) = feed(machine, began(2, C, plan_hash="another"))
    assert refuse.weight == 0, "who may only be behind may come again"
    assert feed(machine, began(3, C)) == [Read(3)]


@pytest.mark.parametrize("over", [Forgot(3), Voided(3)])
def test_of_an_epoch_that_is_over_nothing_is_kept(over):
    machine = opened(listeners=frozenset({C}), may_hold=True)
    feed(machine, began(1, B), Uploaded(1), over, Ended(1))
    assert (machine._epochs, machine._streams) == ({}, {})
