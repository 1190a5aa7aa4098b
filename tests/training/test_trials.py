"""A replica that nobody has measured gets a visit."""

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path
from node.training.leader.routing import with_trials

END, A, B, C = (PeerId(p) for p in ("end", "a", "b", "c"))
ROWS = {ENDS: [(END, 1.0)], 1: [(A, 1.0), (B, 0.0)], 2: [(C, 1.0)]}
PATHS = tuple(Path(i, END, (i,), (Hop(1, A), Hop(2, C))) for i in range(3))


def visits(paths: tuple[Path, ...]) -> list[PeerId]:
    return [path.hops[0].peer for path in paths]


def test_an_unmeasured_replica_takes_one_visit_over() -> None:
    assert visits(with_trials(PATHS, ROWS, {A, C}, lambda a, b: True)) == [A, A, B]


def test_measured_replicas_stay_where_the_plan_has_them() -> None:
    assert with_trials(PATHS, ROWS, {A, B, C}, lambda a, b: True) == PATHS


def test_a_stage_that_nobody_has_measured_stays_as_it_is() -> None:
    assert with_trials(PATHS, ROWS, {C}, lambda a, b: True) == PATHS


def test_a_trial_needs_proven_neighbours() -> None:
    assert with_trials(PATHS, ROWS, {A, C}, lambda a, b: {a, b} != {B, C}) == PATHS


def test_no_replica_loses_its_last_visit() -> None:
    assert with_trials(PATHS[:1], ROWS, {A, C}, lambda a, b: True) == PATHS[:1]


def test_stages_that_a_path_leaves_out_stay_left_out() -> None:
    around = tuple(Path(i, END, (i,), (Hop(2, C),)) for i in range(3))
    assert with_trials(around, ROWS, {A, C}, lambda a, b: True) == around
