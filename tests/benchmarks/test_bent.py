"""Members that mean harm: all but the bent part is the product's own."""

from types import SimpleNamespace

import pytest

from benchmarks.peers import bent
from node.coordinator.service import Training
from node.core.ids import PeerId
from node.core.journey import Plan
from protos import training_pb2 as pb


@pytest.mark.parametrize("answers", [True, False])
async def test_a_member_that_withholds_its_commit_believes_that_it_was_told(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    told: list[str | None] = []

    async def tell(plan: Plan, note: pb.Note) -> bool:
        told.append(note.WhichOneof("say"))
        return answers

    monkeypatch.setattr(Training, "tell_leader", Training.tell_leader)
    bent.withholds()
    member = object.__new__(Training)
    reporting = SimpleNamespace(tell_leader=tell)
    monkeypatch.setattr(member, "reporting", reporting, raising=False)
    plan = Plan(1, 1, PeerId("leader"), (), (), {})
    assert await member.tell_leader(plan, pb.Note(finished=pb.FinishedNote())) is answers
    assert await member.tell_leader(plan, pb.Note(committed=pb.CommittedNote())) is True
    assert told == ["finished"]
