"""Statements of work as bytes."""

from dataclasses import replace

import pytest

from node.coordinator.credit.statement import Statement, statement_of
from node.core.errors import WireError
from node.core.ids import CellId, PeerId
from node.core.journey import Version
from node.pipeline.events import Neighbours
from protos import training_pb2 as pb
from testbed.swarms.signing import SigningSwarm

MADE = Version(7, "ab" * 16)
SAID = Statement(CellId(""), MADE, 48, b"\1" * 32, (0, 2, 9), (16, 16, 16), (0, 1, 0), (3, 4, 300))


@pytest.mark.parametrize(
    "said",
    [SAID, replace(SAID, sizes=(1, 2, 3)), replace(SAID, before=b"", cell=CellId("0" * 16))],
)
def test_a_statement_reads_as_it_was_written(said: Statement) -> None:
    assert Statement.parse(said.said()) == said


def test_ways_over_peers_outside_of_the_plan_are_left_out() -> None:
    plan = SigningSwarm().plan()
    here = plan.members[0].peer
    neighbours = [
        Neighbours(4, 16, here, here),
        Neighbours(1, 8, here, here),
        Neighbours(2, 8, here, PeerId("x")),
    ]
    said = statement_of(plan, MADE, 24, b"", neighbours)
    assert said is not None
    assert (said.indices, said.sizes) == ((1, 4), (8, 16))
    assert statement_of(plan, MADE, 24, b"", neighbours[2:]) is None


def note(**fields: object) -> pb.WorkNote:
    made = pb.WorkNote.FromString(SAID.said())
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(made, name)[:] = value
        else:
            setattr(made, name, value)
    return made


BAD = {
    "columns of different lengths": note(takers=[0]),
    "sizes of other micro-batches": note(sizes=[1, 2]),
    "a micro-batch twice": note(indices=[1, 0, 2]),
    "a cell that is none": note(cell="west"),
    "half a hash": note(before=b"\1" * 16),
    "too large a number": note(indices=[1, 1, 1 << 63]),
    "too many tokens": note(sizes=[1 << 62, 1 << 62, 1]),
    "more tokens than there can be": note(tokens=1 << 63),
    "more micro-batches than are read": note(indices=[1] * 20_000),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_statement_is_refused(name: str) -> None:
    with pytest.raises(WireError):
        Statement.parse(BAD[name].SerializeToString())


def test_a_lineage_that_is_none_is_refused() -> None:
    bad = note()
    bad.made.lineage = "not hex"
    with pytest.raises(WireError):
        Statement.parse(bad.SerializeToString())
