"""Notes survive the wire, and a note that does not parse is refused with a typed error."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from node.consensus.terms import MOST_TERM
from node.consensus.votes import signing_domain
from node.coordinator import notes
from node.core.errors import WireError
from node.core.ids import CellId, PeerId
from node.core.journey import (
    Electorate,
    Hop,
    Host,
    Losses,
    Partner,
    Path,
    Plan,
    PlanMember,
    Version,
    Window,
    lineage_after,
)
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.pipeline.events import MicroBatchDone
from node.scheduler.costs import MOST_CODE, MOST_SLOTS, LinkCost, Measured
from protos import training_pb2 as pb
from tests.training.test_votes import certificate

A = PeerId("A")
B = PeerId("B")
C = PeerId("C")
PARTNER = Partner(CellId("ef" * 8), C, {1: (Host(A, ("/ip4/1.2.3.4/tcp/1",)),)})
PLAN = Plan(
    epoch=3,
    term=7,
    leader=A,
    members=(PlanMember(A, 0, 2.0), PlanMember(B, 1, 0.5), PlanMember(C, 1, 0.0, current=False)),
    paths=(Path(0, A, (5, 6), (Hop(1, B),)),),
    owners={"w": B, "e": A},
    moved={"w": PeerId("gone")},
    digests={0: "d0", 1: "d1"},
    deadline_s=9.0,
    cursor=(SampleClass(1, 2, 9, (5,)), SampleClass(2, 2, 2)),
    loss=2.5,
    loss_val=2.4,
    tokens=100,
    stood={2: Version(1, "ab" * 16)},
    change="signed",
)
IN_A_CELL = dataclasses.replace(PLAN, cell_id=PARTNER.cell)


def through(note: pb.Note) -> pb.Note:
    return pb.Note.FromString(note.SerializeToString())


def test_a_plan_comes_back_the_same_with_the_same_hash() -> None:
    back = notes.parse_plan(through(notes.plan_note(PLAN, b"s")).plan)
    assert back == PLAN
    assert back.hash == PLAN.hash


def test_a_cells_plan_is_the_same_bytes_as_before_sums_were_gone() -> None:
    window = Window(7, (PARTNER,), 2.5, {1: "d3"}, copies=True)
    plan = dataclasses.replace(IN_A_CELL, parent=CellId("cd" * 8), window=window)
    assert plan.hash == "283a49fe62456274451b750a2f8a7e4f9c043a29794bc8c1748d1f748179a7c0"
    body = json.loads(plan.canonical())
    assert body["sums"] == [None, {}]
    for sums in ([[1, 0, 0, {"0": 5}, [], []], {"0": {}}], "anything"):
        raw = json.dumps(body | {"sums": sums}).encode()
        assert notes.parse_plan(pb.PlanNote(plan=raw)) == plan, "read over"


def test_every_field_of_a_plan_is_in_its_hash() -> None:
    changes = {
        "epoch": 4,
        "term": 8,
        "leader": B,
        "paths": (),
        "owners": {"w": C, "e": A},
        "moved": {},
        "digests": {},
        "deadline_s": 1.0,
        "cursor": (SampleClass(1, 2, 9, (5,)), SampleClass(2, 2, 6)),
        "loss": 1.0,
        "loss_val": 1.0,
        "tokens": 1,
        "lineage": "ab" * 16,
        "members": PLAN.members[:2],
        "forecast": (1.0, 2.0),
        "outer": 1,
        "stood": {1: Version(2, "cd" * 16)},
        "change": "another",
        "cell_id": "ab" * 8,
        "parent": "cd" * 8,
        "founds": "12" * 8,
        "window": Window(7, (PARTNER,), 2.5, {1: "d3"}),
        "electorate": Electorate((B, A), (A,), True),
        "reference": Losses(4.5, 4.25),
        "wires": {(A, B): "int4"},
    }
    assert set(changes) == {f.name for f in dataclasses.fields(Plan)}
    for name, value in changes.items():
        plan = IN_A_CELL if name in ("parent", "founds", "window") else PLAN
        assert dataclasses.replace(plan, **{name: value}).hash != plan.hash, name


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_plan_or_an_error(raw: bytes) -> None:
    with pytest.raises(WireError):
        notes.parse_plan(pb.PlanNote(plan=raw))


@example(32, ord("e"))
@example(PLAN.canonical().index(b"0.0,0.0]") + 1, ord(","))
@given(st.integers(0, 600), st.integers(0, 255))
def test_a_damaged_plan_is_another_plan_or_an_error(at: int, byte: int) -> None:
    raw = bytearray(PLAN.canonical())
    at %= len(raw)
    if raw[at] == byte:
        return
    raw[at] = byte
    try:
        damaged = notes.parse_plan(pb.PlanNote(plan=bytes(raw)))
    except WireError:
        return
    # The same numbers may be written otherwise, as 9e0 for 9.0: the plan is the same, and no longer
    # the text that the leader signed.
    assert damaged.hash != PLAN.hash or json.loads(raw) == json.loads(PLAN.canonical())


def test_a_round_comes_back_the_same() -> None:
    said = ev.RoundArrived(
        A, 3, 7, PLAN.hash, 2, (A,), {"w": C}, (C,), (0,), 4.0, "d1", ev.EpochTally(64)
    )
    assert notes.round_event(through(notes.round_note(said)), A) == said


def test_notes_of_members_reach_the_leader() -> None:
    ended = ev.RoundEnded(3, 7, 1, ("e",), ("w",), (B,), (C,))
    stands = ev.Heartbeat(
        C,
        1,
        Version(4, "ab" * 16),
        "d",
        ev.Capacity(0.5, 1 << 40, ((A, 2.0), (B, 0.25))),
        (Version(2), Version(3, "cd" * 16)),
        7,
        4096,
        True,
        membership=ev.Membership(CellId("ab" * 8), "signed"),
    )
    for note, event in (
        (
            notes.finished_note(PLAN, (MicroBatchDone(0, True, 1.5, 8),)),
            ev.MicroBatchesReported(C, PLAN.hash, (MicroBatchDone(0, True, 1.5, 8),)),
        ),
        (
            notes.committed_note(ev.TellCommitted(PLAN, 1, "d"), 0.5),
            ev.Committed(C, PLAN.hash, 1, "d", 0.5),
        ),
        (
            notes.incomplete_note(ev.TellIncomplete(PLAN, ended)),
            ev.Incomplete(C, PLAN.hash, 1, ("e",), (B,), (C,)),
        ),
        (notes.ready_note(stands), stands),
        (pb.Note(fault=pb.FaultNote(about=B)), ev.Accused(B, C)),
    ):
        assert notes.leader_event(through(note), C) == event


def costs_through(said: Measured) -> Measured:
    stands = ev.Heartbeat(C, 1, Version(3), "d", ev.Capacity(costs=said))
    return notes.leader_event(through(notes.ready_note(stands)), C).capacity.costs


def test_of_many_versions_the_newest_are_told() -> None:
    kept = tuple(Version(epoch, "ab" * 16) for epoch in range(100))
    note = through(notes.ready_note(ev.Heartbeat(A, 1, Version(100), "d", reachable=kept)))
    assert notes.leader_event(note, A).reachable == kept[-notes.REACHABLE :]
    assert len(note.ready.reachable) == notes.REACHABLE


def test_costs_come_back_within_a_step_of_the_scale() -> None:
    said = Measured(
        0.012,
        0.031,
        0.004,
        7,
        ((A, LinkCost(0.25, 0.0)), (B, LinkCost(0.0, 0.08)), (PeerId("D"), LinkCost(3.0, 0.5))),
        tera_s=0.7,
        product_s=0.2,
    )
    heard = costs_through(said)
    assert costs_through(heard) == heard, "what travelled once travels unchanged"
    assert (heard.slots, dict(heard.ways).keys()) == (7, dict(said.ways).keys())

    def seconds(of: Measured) -> list[float]:
        ways = [s for _, way in sorted(of.ways) for s in (way.tensor_s, way.trip_s)]
        return [of.forward_s, of.backward_s, of.loss_s, of.tera_s, of.product_s, *ways]

    assert seconds(heard) == pytest.approx(seconds(said), rel=0.03)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, -math.inf, math.inf, 0.0])
def test_seconds_that_are_none_travel_as_unknown(seconds: float) -> None:
    said = Measured(seconds, seconds, seconds, 0, ((A, LinkCost(seconds, seconds)),))
    assert costs_through(said) == Measured(0.0, 0.0, 0.0, 0, ((A, LinkCost(0.0, 0.0)),))


def test_the_longest_seconds_and_the_most_slots_are_bounded() -> None:
    heard = costs_through(Measured(1e9, 1e-12, 0.0, 10**9, ((A, LinkCost(1e300, 0.1)),)))
    assert (heard.forward_s, heard.backward_s) == (pytest.approx(1e4), pytest.approx(1e-6))
    assert (heard.slots, dict(heard.ways)[A].tensor_s) == (MOST_SLOTS, pytest.approx(1e4))


def test_of_many_ways_those_carrying_tensors_are_reported() -> None:
    idle = tuple((PeerId(f"a{i:03d}"), LinkCost(0.0, 0.01)) for i in range(notes.SEEN))
    busy = tuple((PeerId(f"z{i}"), LinkCost(0.2, 0.01)) for i in range(3))
    told = dict(costs_through(Measured(ways=(*idle, *busy))).ways)
    assert len(told) == notes.SEEN
    assert {p for p, _ in busy} <= told.keys()


MANY = ["a"] * (notes.PARTS + 1)
HUGE = [math.inf, -1.0, math.nan, 1e300]
TINY = 5e-324
"""One over it is infinite."""


@pytest.mark.parametrize(
    "said",
    [
        *(pb.ReadyNote(speed=number) for number in HUGE),
        *(pb.FinishedNote(results=[pb.MicroBatchResult(loss_sum=number)]) for number in HUGE),
        *(pb.RoundNote(deadline_s=number) for number in HUGE),
        *(
            pb.ReadyNote(costs=costs)
            for costs in (
                pb.CostNote(forward=MOST_CODE + 1),
                pb.CostNote(backward=2**32 - 1),
                pb.CostNote(loss=500),
                pb.CostNote(ways={"A": (MOST_CODE + 1) * notes.CODES}),
                pb.CostNote(ways={"A": MOST_CODE + 1}),
                pb.CostNote(ways={"A": 2**32 - 1}),
                pb.CostNote(ways={f"p{i}": 1 for i in range(notes.SEEN + 1)}),
            )
        ),
        pb.ReadyNote(term=MOST_TERM + 1),
        *(pb.ReadyNote(stage=1, speed=TINY), pb.ReadyNote(stage=1, seen={"s1": TINY})),
        pb.CommittedNote(speed=TINY),
        pb.ReadyNote(at=pb.VersionNote(epoch=2**63)),
        pb.ReadyNote(digest="x" * 65),
        pb.ReadyNote(reachable=[pb.VersionNote(epoch=2**64 - 1)]),
        pb.ReadyNote(tokens=2**63),
        pb.ReadyNote(seen={"b": math.inf}),
        pb.ReadyNote(at=pb.VersionNote(lineage="x" * 32)),
        pb.ReadyNote(at=pb.VersionNote(lineage="ab")),
        pb.FinishedNote(results=[pb.MicroBatchResult(tokens=2**63)]),
        pb.IncompleteNote(holds=MANY),
        pb.IncompleteNote(failed=MANY),
        pb.IncompleteNote(impossible=MANY),
        pb.RoundNote(dead=MANY),
        pb.RoundNote(sources=MANY),
    ],
    ids=lambda said: type(said).__name__,
)
def test_a_note_with_numbers_beyond_all_limits_is_refused(said: Any) -> None:
    """No such number may come into a plan, which nobody could read any more."""
    kind = type(said).__name__.removesuffix("Note").lower()
    note = through(pb.Note(**{kind: said}))
    with pytest.raises(WireError):
        notes.round_event(note, A) if kind == "round" else notes.leader_event(note, C)


def test_a_huge_plan_is_not_read() -> None:
    with pytest.raises(WireError, match="at most"):
        notes.parse_plan(pb.PlanNote(plan=b" " * (notes.PLAN + 1)))


def test_a_history_comes_back_and_only_for_its_own_version() -> None:
    makes = Version(4, lineage_after(PLAN, (0,)))
    past = [(Version(3, "ab" * 16), 100), (Version(2), 50)]
    shown = certificate(makes, (A, B))
    sent = notes.history_reply(PLAN, (0,), past, shown)
    reply = pb.HistoryReply.FromString(sent.SerializeToString())
    assert notes.parse_history(makes, reply) == (ev.Recalled(makes, PLAN, (0,)), shown, past)
    assert notes.parse_history(PLAN.base, reply)[0].plan == PLAN
    for other in (
        Version(4, lineage_after(PLAN, ())),
        Version(5, makes.lineage),
        Version(3, makes.lineage),
    ):
        with pytest.raises(WireError, match="did not make"):
            notes.parse_history(other, reply)
    bare = pb.HistoryReply(certificate=sent.certificate)
    assert notes.parse_history(makes, bare) == (ev.Recalled(makes), shown, [])
    assert notes.parse_history(makes, pb.HistoryReply()) == (ev.Recalled(makes), None, [])
    with pytest.raises(WireError):
        notes.parse_history(makes, pb.HistoryReply(plan=b"{}"))


def test_a_signature_under_a_plan_is_for_one_run() -> None:
    assert signing_domain("plan", "a") != signing_domain("plan", "b")


HOSTILE = {
    "peers": [[name, "B", "C", "gone"] for name in ("\ud800", {"x": 1}, "")],
    "paths": [[[0, 3, [5, 6], [[1, 1]]]], [[0, 0, [5, 6], [[1, 3]]]]],
    "cursor": [
        None,
        [],
        [8, [9]],
        [[0, 0, 8, [8]]],
        [[0, 33, 0, []]],
        [[0, 0, 8, []], [1, 1, 3, []]],
    ],
    "window": [
        None,
        [7],
        [-1, [], 0.0, {}],
        [7, [["no cell", "A", {}]], 0.0, {}],
        [7, [["ef" * 8, "A", {"1": [["B", ["no address"]]]}]], 0.0, {}],
        [7, [["ef" * 8, "A", {"1": [["B", ["/ip4/\x1b"]]]}]], 0.0, {}],
        [7, [["ef" * 8, "A", {"x": []}]], 0.0, {}],
        [7, [], math.inf, {}],
        [7, [], 0.0, {"x": "d"}],
    ],
}


@pytest.mark.parametrize(
    ("field", "said"), [(field, value) for field, values in HOSTILE.items() for value in values]
)
def test_a_plan_with_a_hostile_field_is_refused(field: str, said: object) -> None:
    notes.parse_plan(pb.PlanNote(plan=IN_A_CELL.canonical()))
    body = json.loads(IN_A_CELL.canonical()) | {field: said}
    with pytest.raises(WireError):
        notes.parse_plan(pb.PlanNote(plan=json.dumps(body).encode()))
