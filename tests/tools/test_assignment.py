"""Assignments of peers to stages: never worse, sizes, slots and wishes kept, and an obvious case
solved."""

import pytest

from node.core.errors import UsageFault
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.problem import parse
from node.tools.assignment import assign, epoch, placed, worst_link


def two_towns(**more):
    """Four peers in each of two towns far apart; the given assignment has every stage in both."""
    far = [[0.0 if a == b else 0.01 if a % 2 == b % 2 else 5.0 for b in range(8)] for a in range(8)]
    return parse(
        {
            "delays_s": far,
            "compute_s": [0.1] * 8,
            "stages": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "path_length": 4,
            "microbatches_per_end": 4,
            **more,
        }
    )


def test_paths_that_cross_the_sea_are_brought_home() -> None:
    problem = two_towns(stages=[[0, 2], [1, 3], [4, 6], [5, 7]], sync_ratio=0.0)
    found = assign(problem, moves=400, seed=1)
    assert found.before_s == epoch(problem, deal(problem)) > 30.0, (
        "three crossings there and back, twice"
    )
    assert found.after_s == epoch(found.problem, deal(found.problem)) < 10.0
    assert all({n % 2 for n in peers} == {0, 1} for peers in found.problem.stages), (
        "a whole pipeline in either town"
    )
    assert sorted(n for peers in found.problem.stages for n in peers) == list(range(8))


def test_costly_gradients_bring_the_peers_of_a_stage_together() -> None:
    problem = two_towns(sync_ratio=100.0)
    found = assign(problem, moves=400, seed=1)
    assert worst_link(problem) == 5.0
    assert worst_link(found.problem) == 0.01
    assert found.after_s < found.before_s / 2


def test_a_peer_that_may_not_host_a_stage_is_not_put_there() -> None:
    found = assign(two_towns(may_host={"0": [0], "2": [1, 2], "7": [3]}), moves=300, seed=3)
    at = found.problem.stage_of
    assert (at[0], at[7], found.tried) == (0, 3, 300)
    assert at[2] in (1, 2)
    with pytest.raises(UsageFault, match="may not host"):
        assign(two_towns(may_host={"0": [1]}), moves=3)


def test_slots_follow_the_peers_and_micro_batches_the_places() -> None:
    problem = two_towns(
        slots_stage=[11, 12, 13, 14, 15, 16, 17, 18], slots_ends=2, microbatches_per_end=[3, 5]
    )
    moved = placed(problem, ((4, 1), (2, 3), (0, 5), (6, 7)))
    assert moved.slots == (11, 2, 13, 14, 2, 16, 17, 18)
    assert moved.counts == {4: 3, 1: 5}


def test_the_same_seed_gives_the_same_and_time_ends_it() -> None:
    one, two = (assign(two_towns(), moves=80, seed=5) for _ in range(2))
    assert one == two
    ticks = iter(range(1000))
    assert assign(two_towns(), clock=lambda: float(next(ticks)), limit_s=20.0).tried < 20


@pytest.mark.parametrize("bad", [{"99": [1]}, {"a": [1]}, {"1": [9]}, {"1": 2}, [1]])
def test_wishes_that_make_no_sense_are_refused(bad: object) -> None:
    with pytest.raises(UsageFault, match="host"):
        two_towns(may_host=bad)
