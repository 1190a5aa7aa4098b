import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.scheduler.quotas import quotas, turns, working_speeds


def peers(*speeds: float) -> list[tuple[PeerId, float]]:
    return [(PeerId(f"p{i}"), speed) for i, speed in enumerate(speeds)]


@given(st.integers(0, 40), st.lists(st.floats(0.01, 100), min_size=1, max_size=4))
def test_quotas_sum_to_the_total_with_the_least_makespan(total: int, speeds: list[float]) -> None:
    got = quotas(total, peers(*speeds))
    assert sum(got.values()) == total
    makespan = max(got[PeerId(f"p{i}")] / speed for i, speed in enumerate(speeds))
    # A split that ends strictly earlier would need room for `total` jobs before that moment.
    room = sum(-(-makespan * (1 - 1e-9) * speed // 1) - 1 if makespan else 0 for speed in speeds)
    assert total == 0 or room < total


@pytest.mark.parametrize(("total", "speeds", "says"), [(3, [], "nobody"), (-1, peers(1), "islice")])
def test_quotas_refuse_what_does_not_add_up(total: int, speeds, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        quotas(total, speeds)


def test_unknown_speeds_count_as_the_median_of_the_known_ones() -> None:
    assert working_speeds(peers(2, 0, 8, 4, float("nan"), float("inf"), -1)) == {
        "p0": 2,
        "p1": 4,
        "p2": 8,
        "p3": 4,
        "p4": 4,
        "p5": 4,
        "p6": 4,
    }
    assert working_speeds(peers(0, 0)) == {"p0": 1.0, "p1": 1.0}
    with pytest.raises(ValueError, match="twice"):
        working_speeds([(PeerId("a"), 1), (PeerId("a"), 2)])


def test_turns_interleave_and_every_prefix_is_balanced() -> None:
    order = list(itertools.islice(turns(peers(1, 3)), 400))
    assert order[:4] == ["p1", "p1", "p0", "p1"]
    for n in range(4, 400, 4):
        assert order[:n].count(PeerId("p1")) == 3 * n // 4


def test_equal_speeds_alternate_for_ever() -> None:
    assert [*itertools.islice(turns(peers(0.1, 0.1, 0.1)), 3000)] == ["p0", "p1", "p2"] * 1000


def test_a_very_slow_peer_is_not_first() -> None:
    assert next(turns([(PeerId("a"), 0.001), (PeerId("b"), 10.0)])) == "b"
