"""The slope by which the soak judges growth."""

import pytest

from benchmarks.soak import theil_sen


def test_the_slope_does_not_mind_a_few_wild_points():
    x = [float(i) for i in range(30)]
    y = [5.0 + 0.5 * t for t in x]
    y[3] = 1000.0
    y[20] = -1000.0
    assert theil_sen(x, y) == pytest.approx(0.5)
    assert theil_sen([1.0], [1.0]) == 0.0
