"""A peer's report of its own speed."""

import pytest

from node.stage.engines import PipelineMeter
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics


def test_small_parts_do_not_make_an_optimizer_slow() -> None:
    meter = PipelineMeter(Journal([]), Metrics())
    meter.steps.product_s = 3.0
    for epoch in range(8):
        assert meter.steps.tera_s == pytest.approx(10.0 if epoch > 1 else 3.0, rel=0.01)
        for _ in range(50):
            meter.steps.stepped(epoch, 1e4, 1e-4)  # a vector: 10^4 s for 10^12 operations
        meter.steps.stepped(epoch, 2e12, 20.0)
