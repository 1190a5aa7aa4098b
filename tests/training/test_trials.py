"""A replica that nobody has measured gets a visit."""

from collections.abc import Callable

import pytest

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path
from node.epoch.leader.routing import with_trials

END, A, B, C, D, F = (PeerId(p) for p in ("end", "a", "b", "c", "d", "f"))
ROWS = {ENDS: [(END, 1.0)], 1: [(A, 1.0), (B, 0.0)], 2: [(C, 1.0)]}
PATHS = tuple(Path(i, END, (i,), (Hop(1, A), Hop(2, C))) for i in range(3))


AROUND = tuple(Path(i, END, (i,), (Hop(2, C),)) for i in range(3))


def any_pair(a: PeerId, b: PeerId) -> bool:
    return True


def test_an_unmeasured_replica_takes_one_visit_over() -> None:
    tried = with_trials(PATHS, ROWS, {A, C}, any_pair)
    assert [path.hops[0].peer for path in tried] == [A, A, B]


def test_each_unmeasured_replica_takes_one_visit_and_the_busiest_keeps_one() -> None:
    rows = {**ROWS, 1: [(A, 1.0), (B, 0.0), (D, 0.0), (F, 0.0)]}
    tried = with_trials(PATHS, rows, {A, C}, any_pair)
    assert [path.hops[0].peer for path in tried] == [A, D, B]


@pytest.mark.parametrize(
    ("paths", "measured", "proven"),
    [
        (PATHS, {A, B, C}, any_pair),
        (PATHS, {C}, any_pair),
        (PATHS, {A, C}, lambda a, b: {a, b} != {B, C}),
        (PATHS[:1], {A, C}, any_pair),
        (AROUND, {A, C}, any_pair),
    ],
    ids=["measured", "nobody-measured", "unproven-pair", "last-visit", "stage-left-out"],
)
def test_paths_stay_where_a_trial_is_not_needed_or_not_possible(
    paths: tuple[Path, ...], measured: set[PeerId], proven: Callable[[PeerId, PeerId], bool]
) -> None:
    assert with_trials(paths, ROWS, measured, proven) == paths
