import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.scheduler.costs import SecondsPerUnit, quantise


def test_the_first_measurement_is_kept_and_later_ones_averaged() -> None:
    rate = SecondsPerUnit(alpha=0.5)
    assert rate.per_second == 0.0
    rate.observe(4, 2.0)
    assert rate.per_second == 2.0
    rate.observe(1, 2.0)  # weight 0.5 / (1 - 0.25) = 2/3
    assert rate.seconds_per_unit == pytest.approx(0.5 + 2 / 3 * 1.5)


@pytest.mark.parametrize(
    ("units", "seconds"), [(0, 1), (1, 0), (-1, 1), (1, math.inf), (math.nan, 1)]
)
def test_what_is_no_measurement_is_refused(units: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="no measurement"):
        SecondsPerUnit().observe(units, seconds)


@given(st.floats(1e-6, 1e9))
def test_quantise_is_close_and_idempotent(speed: float) -> None:
    q = quantise(speed)
    assert abs(math.log2(q / speed)) <= 1 / 8 + 1e-9
    assert quantise(q) == q


def test_quantise_keeps_the_old_value_until_the_speed_changes() -> None:
    old = quantise(10.0)
    assert quantise(10.0 * 2**0.12, old) == old
    assert quantise(20.0, old) != old
    assert [quantise(x) for x in (0.0, -1.0, math.nan, math.inf)] == [0.0] * 4
    assert quantise(10.0, math.nan) == old
