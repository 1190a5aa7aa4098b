"""Observations of a plan's tensors from reports that are missing, double or false."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from node.core.ids import PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.epoch.attempts.results import MicroBatchResults
from node.epoch.events import MicroBatchesReported
from node.epoch.leader.conduct import Conduct
from node.epoch.peers.observations import ALL as ALL_REPORTED
from node.epoch.peers.observations import Observed, observe, sampled
from node.pipeline.events import Crossing, MicroBatchDone, VisitSketches
from node.wire.sketch import NOTHING, NUMBERS, Sketch, encode_all

E, A, B, C, D = (PeerId(p) for p in ("ends", "s1a", "s1b", "s2a", "s2b"))
MEMBERS = tuple(PlanMember(p, stage) for p, stage in ((E, 0), (A, 1), (B, 1), (C, 2), (D, 2)))
TRUE = Sketch(0.0, (100,) * NUMBERS)
FALSE = Sketch(0.0, (-100,) * NUMBERS)
HUGE = Sketch(127.0, (-128,) * NUMBERS)
PLAN = Plan(1, 1, E, MEMBERS, (Path(0, E, (0,), (Hop(1, A), Hop(2, C))),), {})
SEED = "ab" * 32
Reports = dict[PeerId, list[VisitSketches]]


def visit(
    taker: PeerId, giver: PeerId, sketch: Sketch = TRUE, other: Sketch = TRUE
) -> VisitSketches:
    return VisitSketches(0, taker, giver, encode_all([sketch, other] * (len(Crossing) // 2)))


def honest() -> Reports:
    return {E: [visit(C, A)], A: [visit(E, C)], C: [visit(A, E)]}


def witnesses(seen: Observed) -> set[tuple[PeerId, PeerId, PeerId]]:
    return {(o.peer, o.sender, o.receiver) for o in seen.observations}


ALL = {(A, E, C), (A, C, E), (C, A, E), (C, E, A)}


def test_both_directions_of_every_visit_are_observed() -> None:
    seen = observe(PLAN, SEED, honest())
    assert witnesses(seen) == ALL
    assert not seen.disputes
    assert all(o.confirmed for o in seen.observations)


@pytest.mark.parametrize(
    ("peer", "false"),
    [
        (A, visit(A, A, TRUE, FALSE)),
        (A, visit(A, C)),
        (A, visit(E, E)),
        (A, visit(C, E)),
        (A, visit(PeerId("stranger"), C)),
        (C, visit(B, A)),
    ],
)
def test_a_peer_that_names_wrong_neighbours_does_not_hide_its_tensors(
    peer: PeerId, false: VisitSketches
) -> None:
    plan = PLAN
    seen = observe(plan, SEED, honest() | {peer: [false]})
    expected = {found for found in ALL if peer == found[0]}
    assert expected <= witnesses(seen)
    assert not any(o.confirmed for o in seen.observations if o.peer == peer)
    assert Conduct().inspect(plan, plan.leader, SEED, honest() | {peer: [false]}, 0.0) == []


@pytest.mark.parametrize(("peer", "false"), [(B, visit(E, C)), (D, visit(A, E))])
def test_a_replica_that_claims_the_work_of_another_hides_nothing(
    peer: PeerId, false: VisitSketches
) -> None:
    assert ALL <= witnesses(observe(PLAN, SEED, honest() | {peer: [false]}))


def test_a_replica_replaces_a_hop() -> None:
    reports = {E: [visit(C, B)], B: [visit(E, C)], C: [visit(B, E)]}
    assert witnesses(observe(PLAN, SEED, reports)) == {
        tuple(B if p == A else p for p in found) for found in ALL
    }


@pytest.mark.parametrize("about", [[], [visit(E, C)] * 3])
def test_missing_and_repeated_reports_leave_the_others(about: Sequence[VisitSketches]) -> None:
    seen = observe(PLAN, SEED, honest() | {A: list(about)})
    assert {found for found in ALL if found[0] == A} <= witnesses(seen)
    assert not seen.disputes


def test_micro_batches_of_no_plan_are_left_out() -> None:
    other = VisitSketches(1 << 60, E, C, visit(E, C).encoded)
    assert witnesses(observe(PLAN, SEED, honest() | {A: [other]})) == {(A, E, C), (A, C, E)}


@pytest.mark.parametrize("sketch", [NOTHING, FALSE, HUGE])
def test_tensors_of_any_size_only_dispute_with_the_neighbours(sketch: Sketch) -> None:
    seen = observe(PLAN, SEED, honest() | {A: [visit(E, C, sketch, sketch)]})
    assert seen.disputes == {frozenset((E, A)), frozenset((A, C))}
    assert seen.observations == ()


def test_the_seed_of_the_sample_depends_on_every_result() -> None:
    """A peer that knew the sample would lie in the other micro-batches."""

    def seed(*losses: float) -> str:
        plan = replace(PLAN, paths=tuple(Path(i, E, (i,), ()) for i in range(len(losses))))
        results = MicroBatchResults(plan)
        for i, loss in sorted(enumerate(losses), key=lambda found: -found[0]):
            results.report(
                MicroBatchesReported(E, plan.hash, (MicroBatchDone(i, True, loss, 1),)), 0
            )
        return results.seed

    assert seed(1.0, 2.0) == seed(1.0, 2.0)
    assert len({seed(1.0, 2.0), seed(1.0 + 1e-15, 2.0), seed(1.0, 2.5), seed(2.0, 1.0)}) == 4


def test_reports_on_other_micro_batches_than_the_sample_are_left_out() -> None:
    path = PLAN.paths[0]
    plan = replace(PLAN, paths=tuple(replace(path, index=i) for i in range(4 * ALL_REPORTED)))
    chosen = sampled(plan, SEED)
    reports = {
        p: [replace(v, index=path.index) for path in plan.paths for v in visits]
        for p, visits in honest().items()
    }
    assert {o.index for o in observe(plan, SEED, reports).observations} == chosen
    assert len(chosen) < len(plan.paths)
