"""The table of reasons why a peer does not train: each row, and the order of rows."""

from typing import Any

import pytest

from node.control.causes import (
    NEXT_PLAN_S,
    NONE,
    ROWS,
    START_S,
    WEIGHTS_S,
    Cause,
    Situation,
    cause,
)
from node.coordinator.vitals import Life
from node.core.ids import ENDS, PeerId
from node.epoch.waiting import Lack, Wait
from node.transport.clocks import ClockOffset

A, B, C, D = (PeerId(f"12D3KooWxxxx{c * 6}") for c in "ABCD")
SILENT = (Life.SILENT, 12.0)
LOST = (Life.LOST, 3.0)
STAGES = Wait(Lack.PEERS, stages=(2, 3))


def of(**facts: Any) -> Cause:
    return cause(Situation(**facts))


ONE = ClockOffset(3600.0, (A,))
MANY = ClockOffset(-75.0, (A, B, C, D))
WORDS = {
    "a fault": (
        {"fault": ("the key is gone", "restore your backup")},
        "fault",
        "the key is gone",
        "restore your backup",
    ),
    "an admission that ended": (
        {"admission": "your admission to this private run ended on 2026-12-01 at 12:00"},
        "admission",
        "ended on 2026-12-01",
        "tutti join INVITE",
    ),
    "p2pd": ({"p2p_up": False}, "p2p-down", "p2p daemon is not running", "started again"),
    "one clock": (
        {"clock": ONE},
        "clock",
        "1 h ahead of that of AAAAAA: one of the",
        "timedatectl",
    ),
    "many clocks": (
        {"clock": MANY},
        "clock",
        "1 min 15 s behind the middle one of AAAAAA, BBBBBB, CCCCCC and 1 other",
        "tutti doctor clock",
    ),
    "a sleep": (
        {"stopped_s": 180.0, "slept": True, "woke_s": 5.0, "idle_s": 185.0},
        "woke",
        "this machine slept for 3 min until 5 s ago",
        "nothing to do",
    ),
    "a freeze": (
        {"stopped_s": 180.0, "woke_s": 5.0, "idle_s": 6.0},
        "woke",
        "this process stood still for 3 min",
        "nothing to do",
    ),
    "a late start": (
        {"starting": "builds stage 2", "starting_s": START_S},
        "starting",
        "builds stage 2, for 2 min so far",
        "tutti logs",
    ),
    "a full disk": (
        {"disk": "the disk of /h is full: 3 B are free", "wait": STAGES},
        "disk-full",
        "the disk of /h is full",
        "free some space",
    ),
    "a full disk while fetching": (
        {"disk": "the disk of /h is full", "fetched": 0.5},
        "disk-full",
        "is full",
        "free some space",
    ),
    "a stalled fetch": (
        {"fetched": 0.25, "fetch_still_s": 20.0},
        "fetch-stalled",
        "no state received for 20 s (25% received so far)",
        "tutti logs",
    ),
    "weights": (
        {"awaits_weights": True, "up_s": WEIGHTS_S},
        "weights",
        "weights that the run begins",
        "--weights",
    ),
    "a child that ended": (
        {"wait": STAGES, "children": (1, 2, 3), "child_trouble": ("stage 2 ended (why)",)},
        "child-ended",
        "stage 2 ended (why)",
        "started again",
    ),
    "children that take long": (
        {"wait": STAGES, "children": (2, 3), "children_s": START_S},
        "children",
        "stages 2, 3 load on this machine, for 2 min so far",
        "tutti logs",
    ),
    "text": (
        {"text": "no answer from host", "idle_s": 20.0},
        "text",
        "text for training cannot be had: no answer from host",
        "asked for again",
    ),
    "a silent leader": (
        {"leader": A, "voters": (A, B, C, D), "life": {A: SILENT}, "hosts": {A: ENDS}},
        "leader-silent",
        "the leader AAAAAA of the ends has been silent for 12 s; 3 of 4 voters live",
        "nothing to do: the voters that live follow another leader",
    ),
    "a silent leader without a majority": (
        {"leader": A, "voters": (A, B), "life": {A: LOST}},
        "leader-silent",
        "the leader AAAAAA was lost 3 s ago; 1 of 2 voters live",
        "after a minute",
    ),
    "voters that live": (
        {
            "leads": True,
            "wait": Wait(Lack.VOTERS, peers=(A, B), here=2, of=4),
            "life": {A: SILENT},
            "hosts": {A: ENDS, B: 1},
        },
        "voters",
        "2 of 4 voters report to this leader, and more than half must; 3 of 4 live; no sign of "
        "life: AAAAAA of the ends has been silent for 12 s; not heard here yet: BBBBBB of stage 1",
        "report within seconds",
    ),
    "voters that are gone": (
        {"wait": Wait(Lack.VOTERS, peers=(A, B), here=1, of=3), "life": {A: LOST, B: LOST}},
        "voters",
        "1 of 3 live",
        "start the others again",
    ),
    "stages": ({"wait": STAGES}, "stages", "waiting for a peer for stages 2, 3", "swarm invite"),
    "a stage whose peer is silent": (
        {"wait": Wait(Lack.PEERS, stages=(2,)), "hosts": {B: 2}, "life": {B: SILENT}},
        "stages",
        "waiting for a peer for stage 2; no sign of life: BBBBBB of stage 2 has been silent",
        "swarm invite",
    ),
    "a stage of two that is coming": (
        {"wait": STAGES, "coming": {C: 3}},
        "stages",
        "; CCCCCC is joining",
        "swarm invite",
    ),
    "no ends": ({"wait": Wait(Lack.ENDS)}, "ends", "in sight, so nobody leads", "--role ends"),
    "ends that are silent": (
        {"wait": Wait(Lack.ENDS), "hosts": {A: ENDS, B: 1}, "life": {A: SILENT}},
        "ends",
        "no peer at the ends answers, so nobody leads: AAAAAA of the ends has been silent",
        "--role ends",
    ),
    "ends that did not answer a moment ago": (
        {"wait": Wait(Lack.ENDS), "hosts": {A: ENDS}},
        "ends",
        "AAAAAA of the ends did not answer a moment ago",
        "asked again",
    ),
    "no ends in an epoch that its leader has left": (
        {"unled": True, "idle_s": 20.0, "contended": 0.9},
        "ends",
        "in sight, so nobody leads",
        "wait for the peer that founded the run",
    ),
    "ways between two daemons of this machine": (
        {
            "wait": Wait(Lack.WAYS, peers=(A, B), detail="a connection between X and Y"),
            "beside": frozenset({A, B}),
            "ways_had_time": True,
        },
        "ways",
        "waiting for a connection between X and Y",
        "they run on this machine",
    ),
    "ways": (
        {"wait": Wait(Lack.WAYS, detail="a connection between X and Y"), "ways_had_time": True},
        "ways",
        "waiting for a connection between X and Y",
        "let a router map a port",
    ),
    "no way to the leader": (
        {"wait": Wait(Lack.PLAN, peers=(A,)), "unreached": (A,)},
        "plan",
        "waiting for a plan from AAAAAA; no way to AAAAAA",
        "let a router map a port",
    ),
    "a leader that waits itself": (
        {
            "wait": Wait(Lack.PLAN, peers=(A,)),
            "leader": A,
            "leader_answers": True,
            "leader_waits": "a peer for stage 2",
        },
        "plan",
        "waiting for a plan from AAAAAA, which waits for a peer for stage 2",
        "tutti peers",
    ),
    "a leader that answers and sends no plan": (
        {
            "wait": Wait(Lack.PLAN, peers=(A,)),
            "leader_answers": True,
            "idle_s": NEXT_PLAN_S,
            "idle_most_s": 1e9,
        },
        "plan",
        "waiting for a plan from AAAAAA",
        "at that peer",
    ),
    "a version that a stage lacks": (
        {"wait": Wait(Lack.COMMON, stages=(2,), epoch=65)},
        "common",
        "nobody at stage 2 has epoch 65 as the others have it",
        "in memory or on disk",
    ),
    "the newest epoch of a stage": (
        {"wait": Wait(Lack.EPOCH, stages=(2, 3), epoch=65)},
        "epoch",
        "a peer of stages 2, 3 that holds epoch 65",
        "goes back to an older epoch",
    ),
    "the other side": (
        {"wait": Wait(Lack.SIDE, peers=(A,))},
        "side",
        "the side of AAAAAA, which says it has counted more tokens",
        "nothing to do",
    ),
    "memory": (
        {"wait": Wait(Lack.MEMORY, detail="memory for the optimizer's state: w keeps 3")},
        "memory",
        "w keeps 3",
        "--memory",
    ),
    "idleness": ({"idle_s": 48.0}, "idle", "no useful work for 48 s", "tutti logs"),
    "no way to a peer beside it": (
        {"idle_s": 48.0, "unreached": (A,), "beside": frozenset({A}), "hosts": {A: 2}},
        "idle",
        "no way to AAAAAA of stage 2",
        "so no port is in the way",
    ),
    "one of two peers without a way is beside it": (
        {"idle_s": 48.0, "unreached": (A, B), "beside": frozenset({A})},
        "idle",
        "no way to AAAAAA",
        "router",
    ),
    "no way on a starved machine": (
        {"wait": Wait(Lack.PLAN, peers=(A,)), "unreached": (A,), "contended": 0.9},
        "plan",
        "no way to AAAAAA",
        "too little processor time: this daemon waits for 90%",
    ),
    "idleness on a starved machine": (
        {"idle_s": 48.0, "contended": 0.9},
        "idle",
        "no useful work for 48 s",
        "end other programs",
    ),
    "idleness without a way": (
        {"idle_s": 48.0, "unreached": (A,), "hosts": {A: 2}},
        "idle",
        "no useful work for 48 s; no way to AAAAAA of stage 2",
        "router",
    ),
}


@pytest.mark.parametrize("row", WORDS, ids=lambda name: name.replace(" ", "-"))
def test_a_reason_is_named_with_its_next_step(row: str):
    facts, kind, what, step = WORDS[row]
    found = of(**facts)
    assert found.kind == kind
    assert what in found.what
    assert step in found.step
    assert not found.usual


USUAL = {
    "weights": ({"awaits_weights": True, "up_s": 3.0}, "the weights that the run begins from"),
    "starting": (
        {"starting": "builds stage 2", "starting_s": 5.0, "up_s": 10 * START_S},
        "builds stage 2",
    ),
    "ends that are coming back": (
        {"unled": True, "idle_s": 20.0, "coming": {A: None}},
        "no peer at the ends is in sight, so nobody leads; AAAAAA may take them",
    ),
    "children": (
        {"wait": STAGES, "children": (1, 2, 3), "children_s": 4.0},
        "stages 2, 3 load on this machine, for 4 s so far",
    ),
    "children of whom one has not reported yet": (
        {"wait": STAGES, "children": (3,), "children_s": 4.0, "coming": {B: 2}},
        "stage 3 loads on this machine, for 4 s so far",
    ),
    "settling": ({"wait": Wait(Lack.SETTLING)}, "all peers can report"),
    "history": ({"wait": Wait(Lack.HISTORY, epoch=7)}, "the history of epoch 7"),
    "next leader": ({"wait": Wait(Lack.NEXT_LEADER)}, "the next leader"),
    "a joiner for every stage": (
        {"wait": STAGES, "coming": {B: 2, C: 3}},
        "BBBBBB, CCCCCC are joining",
    ),
    "ways at first": (
        {"wait": Wait(Lack.WAYS, detail="a connection between X and Y")},
        "which try to reach each other",
    ),
    "the next plan": (
        {"wait": Wait(Lack.PLAN, peers=(A,)), "leader_answers": True},
        "the next one takes this peer in",
    ),
}


@pytest.mark.parametrize("row", USUAL, ids=lambda name: name.replace(" ", "-"))
def test_what_belongs_to_a_start_is_said_and_no_fault(row: str):
    facts, what = USUAL[row]
    found = of(**facts)
    assert what in found.what
    assert found.usual
    assert "invite" not in found.step


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"idle_s": 5.0},
        {"state": "finished", "idle_s": 1e6, "wait": Wait(Lack.ENDS)},
        {"state": "draining", "clock": ONE},
        {"fetched": 0.5, "fetch_still_s": 1.0, "wait": Wait(Lack.ENDS)},
        {"disk": "the disk of /h is full"},
        {"text": "no answer"},
        {"stopped_s": 180.0, "woke_s": 5.0, "idle_s": 1.0},
        {"stopped_s": 180.0, "woke_s": 90.0},
        {"leader": A, "leads": True, "life": {A: SILENT}},
        {"child_trouble": ("stage 2 ended",)},
    ],
)
def test_a_peer_that_works_or_is_not_meant_to_has_no_reason(facts: dict[str, Any]):
    assert of(**facts) == NONE


EVERYTHING: dict[str, Any] = {
    "fault": ("x", "y"),
    "admission": "it has ended",
    "p2p_up": False,
    "clock": ONE,
    "stopped_s": 60.0,
    "woke_s": 1.0,
    "starting": "builds",
    "disk": "the disk is full",
    "fetched": 0.5,
    "fetch_still_s": 60.0,
    "awaits_weights": True,
    "children": (2, 3),
    "text": "no answer",
    "leader": A,
    "life": {A: SILENT},
    "wait": STAGES,
    "idle_s": 100.0,
}
ORDER = (
    ("fault", "fault"),
    ("admission", "admission"),
    ("clock", "clock"),
    ("stopped_s", "woke"),
    ("starting", "starting"),
    ("disk", "disk-full"),
    ("fetched", "fetch-stalled"),
    ("awaits_weights", "weights"),
    ("children", "children"),
    ("text", "text"),
    ("life", "leader-silent"),
    ("wait", "stages"),
    ("idle_s", "idle"),
)


def test_the_deepest_reason_comes_first():
    """Each reason is taken away in turn, and the next one shows."""
    facts = EVERYTHING | {"p2p_up": True}
    for fact, kind in ORDER:
        assert of(**facts).kind == kind
        del facts[fact]
    assert of(**facts) == NONE
    assert of(p2p_up=False, clock=ONE).kind == "p2p-down"


def test_a_paused_peer_is_healthy_and_says_why():
    why = "outside its hours 22-07, until 22:00"
    assert of(state="paused", paused=why, starting="looks", up_s=START_S) == Cause(
        "paused", f"paused {why}", "go on at once with  tutti resume", usual=True
    )
    by_run = {"state": "paused", "paused": "by the run's owner", "paused_by_run": True}
    assert "when the run's owner resumes it" in of(**by_run).step
    assert "tutti swarm resume" in of(**by_run, owns=True).step
    assert of(state="pausing", paused=why).what == f"leaves the plan for a pause: {why}"


def test_every_row_of_the_table_is_tested():
    seen = {"_leaves", "_paused"}  # the peers that have no reason, or want it
    for facts, *_ in WORDS.values():
        seen |= {row.__name__ for row in ROWS if row(Situation(**facts)) is not None}
    assert seen == {row.__name__ for row in ROWS}
