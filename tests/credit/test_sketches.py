"""Sketches in the report of a commit."""

from dataclasses import replace

import pytest

from node.coordinator.credit.sketches import parse_sketches, sketches_note
from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.epoch.peers.observations import ALL, VISITS, sampled
from node.pipeline.events import Crossing, VisitSketches
from node.wire.sketch import NUMBERS, Sketch, encode_all
from protos import training_pb2 as pb

E, S = PeerId("ends"), PeerId("stage")
SEED = "ab" * 32
RAW = encode_all([Sketch(float(i), (i,) * NUMBERS) for i, _ in enumerate(Crossing)])


def plan(count: int) -> Plan:
    paths = tuple(Path(i, E, (i,), (Hop(1, S),)) for i in range(count))
    return Plan(3, 1, E, (PlanMember(E, 0), PlanMember(S, 1)), paths, {})


def test_a_report_travels() -> None:
    visits = tuple(VisitSketches(i, E, S, RAW) for i in (0, 2, 7))
    note = sketches_note(plan(8), SEED, visits)
    came = pb.SketchesNote.FromString(note.SerializeToString())
    assert parse_sketches(plan(8), came) == visits


def test_neighbours_that_are_no_members_are_left_out() -> None:
    visits = (VisitSketches(0, E, PeerId("stranger"), RAW), VisitSketches(1, E, S, RAW))
    assert parse_sketches(plan(8), sketches_note(plan(8), SEED, visits)) == visits[1:]


def test_of_a_large_plan_all_members_report_the_same_micro_batches() -> None:
    large = plan(4 * ALL)
    assert sampled(plan(ALL), SEED) == set(range(ALL))
    found = sampled(large, SEED)
    assert len(found) == ALL
    assert found == sampled(replace(large, deadline_s=1.0), SEED)
    assert found != sampled(large, "cd" * 32)


@pytest.mark.parametrize(
    "change",
    [
        {"takers": [0]},
        {"givers": [0, 2]},
        {"indices": [0, 0]},
        {"sketches": RAW},
    ],
)
def test_a_report_that_is_none_is_refused(change: dict[str, object]) -> None:
    visits = tuple(VisitSketches(i, E, S, RAW) for i in (0, 1))
    note = sketches_note(plan(8), SEED, visits)
    fields = {f.name: v for f, v in note.ListFields()} | change
    with pytest.raises(WireError):
        parse_sketches(plan(8), pb.SketchesNote(**fields))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("hops", [1, 4, 64, 2 * VISITS])
def test_the_inspected_visits_are_bounded_in_every_plan(hops: int) -> None:
    """A leader inspects on its event loop."""
    route = tuple(Hop(stage, PeerId(f"s{stage}")) for stage in range(1, hops + 1))
    members = (PlanMember(E, 0), *(PlanMember(hop.peer, hop.stage) for hop in route))
    paths = tuple(Path(i, E, (i,), route) for i in range(1000))
    found = sampled(Plan(3, 1, E, members, paths, {}), SEED)
    assert 1 <= len(found) <= max(1, VISITS // hops)
