"""Sketches of tensors on their way through a simulated swarm: members send them to the leader, and
a peer whose tensors do not fit gets no more work."""

from dataclasses import replace

import pytest

from node.core.ids import PeerId
from node.epoch.leader.inspection import Inspection, Liar
from node.epoch.peers import observations
from node.epoch.peers.observations import Observed
from node.pipeline.events import VisitSketches
from node.pipeline.service import Pipeline
from node.scheduler.settings import SchedulerSettings
from node.sim.faults import Schedule
from node.sim.setup import Setup
from node.wire.sketch import NUMBERS, Sketch, encode_all
from testbed.swarms.tapes import Tapes
from tests.sim.outcomes import finished

SETUP = Setup(epochs=12, micro_batches=12, replicas=2, scheduler=SchedulerSettings("round-robin"))
LIAR = PeerId("s02-001")
TRUE = Sketch(0.0, (100,) * NUMBERS)
FALSE = replace(TRUE, numbers=(-100,) * NUMBERS)
judge = Inspection.judge


@pytest.mark.parametrize("liar", ["", LIAR])
def test_a_leader_inspects_its_members(monkeypatch: pytest.MonkeyPatch, liar: str) -> None:
    judged: list[tuple[int, set[PeerId], list[Liar]]] = []

    def sketched(self: Pipeline) -> list[VisitSketches]:
        """Sketches as if all tensors were the same, but for those that the liar sends forward."""
        found: list[VisitSketches] = []
        for row in self.worked():
            came = FALSE if row.taker == liar else TRUE
            sent = FALSE if self.me == liar else TRUE
            encoded = encode_all([came, sent, TRUE, TRUE])
            found.append(VisitSketches(row.index, row.taker, row.giver, encoded))
        return found

    def watched(self: Inspection, seen: Observed, epoch: int, me: PeerId) -> list[Liar]:
        found = judge(self, seen, epoch, me)
        judged.append((epoch, {o.peer for o in seen.observations}, found))
        return found

    monkeypatch.setattr(Pipeline, "sketched", sketched)
    monkeypatch.setattr(Inspection, "judge", watched)
    tapes = Tapes()
    outcome = finished(SETUP, Schedule(1, ()), tapes.factory())
    assert {epoch for epoch, _, _ in judged} == set(range(SETUP.epochs))
    worked = judged[-1][1]
    if not liar:
        assert worked == {f"s0{s}-00{i}" for s in (1, 2) for i in (0, 1)}
        assert outcome.counts["false-tensors"] == 0
    else:
        assert LIAR in judged[0][1]
        assert LIAR not in worked
        assert len(worked) == 3
        assert [f.peer for _, _, found in judged for f in found] == [LIAR]
        assert outcome.counts["false-tensors"] == 1
    for peer, played in tapes.replay():
        assert played.difference is None, (peer, played.difference)


def test_members_report_the_micro_batches_that_the_leader_inspects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a plan with more visits than are inspected all report the same few, others each epoch."""
    chosen: list[frozenset[int]] = []

    def sketched(self: Pipeline) -> list[VisitSketches]:
        encoded = encode_all([TRUE] * 4)
        return [VisitSketches(r.index, r.taker, r.giver, encoded) for r in self.worked()]

    def watched(self: Inspection, seen: Observed, epoch: int, me: PeerId) -> list[Liar]:
        assert all(o.confirmed for o in seen.observations)
        chosen.append(frozenset(o.index for o in seen.observations))
        return judge(self, seen, epoch, me)

    monkeypatch.setattr(Pipeline, "sketched", sketched)
    monkeypatch.setattr(Inspection, "judge", watched)
    monkeypatch.setattr(observations, "VISITS", 8)
    finished(SETUP, Schedule(1, ()), Tapes().factory())
    assert {len(found) for found in chosen} == {4}
    assert len(set(chosen)) > 1
