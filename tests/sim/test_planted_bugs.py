"""Every planted bug is found by an invariant within a few hundred schedules, and only the bug
is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from node.sim.run import run
from node.sim.scenarios import lay
from node.sim.setup import Setup
from node.sim.shrink import shrink


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted", Path(__file__).with_name("planted.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["planted"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


planted = _load()


@pytest.mark.parametrize("bug", planted.ALL_BUGS, ids=lambda b: b.name)
def test_it_is_caught(bug) -> None:
    found, tried = planted.hunt(bug)
    assert found is not None, f"{tried} schedules and nothing broke"
    assert found.violation.id in bug.ids, f"{found.violation} after {tried} schedules"
    assert found.violation.recent


@pytest.mark.parametrize("bug", planted.ALL_BUGS, ids=lambda b: b.name)
def test_the_same_schedules_hold_without_it(bug) -> None:
    setup = Setup()
    for seed in range(2):
        outcome = run(setup, lay(bug.scenarios, setup, seed))
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"


def test_a_failing_schedule_becomes_smaller_and_still_fails() -> None:
    bug = next(b for b in planted.BUGS if b.name == "no latch")
    setup = Setup()
    for seed in range(100):
        big = run(setup, lay((*bug.scenarios, "slow-peer", "skew", "loss"), setup, seed), bug.make)
        if big.violation is not None:
            break
    else:
        pytest.fail("nothing broke")
    small = shrink(setup, big, lambda: bug.make, most=40)
    assert len(small.schedule.faults) < len(big.schedule.faults)
    again = run(setup, small.schedule, bug.make)
    assert again.violation is not None
    assert str(again.violation) == str(small.violation)
