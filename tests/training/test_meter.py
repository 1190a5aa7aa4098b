"""A peer's report of its own speed."""

from typing import Any

import pytest

from node.pipeline.timing import Timing
from node.stage.engines import PipelineMeter
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from tests.training.conftest import TOKENS, shared


def test_small_parts_do_not_make_an_optimizer_slow() -> None:
    meter = PipelineMeter(Journal([]), Metrics())
    meter.steps.product_s = 3.0
    for epoch in range(8):
        assert meter.steps.tera_s == pytest.approx(10.0 if epoch > 1 else 3.0, rel=0.01)
        for _ in range(50):
            meter.steps.stepped(epoch, 1e4, 1e-4)  # a vector: 10^4 s for 10^12 operations
        meter.steps.stepped(epoch, 2e12, 20.0)


async def test_a_plain_product_is_reported_beside_the_steps_of_the_optimizer(rig: Any) -> None:
    (a,) = await rig.add("a")
    a.pipeline.timing = Timing()
    a.pipeline.slots = lambda: 1
    steps = a.work.engines.meter.steps
    steps.product_s = 3.0
    for epoch in range(2):
        steps.stepped(epoch, 2e12, 20.0)
    costs = a.work.costs()
    assert (costs.tera_s, costs.product_s) == (10.0, 3.0)


async def test_work_that_does_not_count_makes_no_device_slow(rig: Any) -> None:
    a, b = await rig.add("a", "b")
    plan = await rig.begun((a, b), shared(a, b))
    a.pipeline.computed = 4.0
    meter = a.work.engines.meter
    meter.spent("compute", 8.0)
    await rig.averaged(plan, a, b)
    assert meter.micro_batches == 1
    assert meter.speed == pytest.approx(0.5)
    assert meter.tokens_per_s == pytest.approx(4 * TOKENS / 8.0)
