import pytest

from node.core.ids import PeerId
from node.pipeline.pace import SURE, Pace

A, B, C = (PeerId(x) for x in "abc")


def test_frames_that_overlap_are_not_charged_twice():
    pace = Pace()
    for i in range(40):  # four under way at a time, one done every 0.1 s
        pace.observe(A, i * 0.1, i * 0.1 + 0.4)
    assert pace.rates()[A] == pytest.approx(0.5 / 0.1, rel=0.05)
    pace.observe(A, 1.0, 1.5)  # over long ago
    assert pace.rates()[A] == pytest.approx(0.5 / 0.1, rel=0.05)


def test_a_slow_sibling_is_detected_when_sure_and_forgiven():
    pace = Pace()
    for i in range(SURE):
        assert pace.slow([A, B, C]) == frozenset()
        pace.observe(A, float(i), i + 0.1)
        pace.observe(B, float(i), i + 0.9)
    assert pace.slow([A, B, C]) == {B}
    assert pace.slow([B, C]) == frozenset()
    for i in range(10, 40):
        pace.observe(B, float(i), i + 0.1)
    assert pace.slow([A, B]) == frozenset()


def test_one_pause_makes_no_replica_slow():
    pace = Pace()
    for i in range(20):
        pace.observe(A, float(i), i + 0.1)
        pace.observe(B, float(i), i + 0.1)
    pace.observe(B, 20.0, 80.0)
    assert pace.slow([A, B]) == frozenset()
