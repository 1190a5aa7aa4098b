"""Every planted bug is found by an invariant within a few schedules, and only the bug is."""

import pytest

from node.sim.faults import lay
from node.sim.run import run, shrink
from testbed.swarms import planted
from tests.sim.outcomes import held


@pytest.mark.parametrize("bug", planted.ALL_BUGS, ids=lambda b: b.name)
def test_it_is_caught_and_the_same_schedule_holds_without_it(bug) -> None:
    found, tried = planted.hunt(bug)
    assert found is not None, f"{tried} schedules and nothing broke"
    assert found.violation.id in bug.ids, f"{found.violation} after {tried} schedules"
    assert found.violation.recent
    held(found.setup, found.schedule)


def test_a_failing_schedule_becomes_smaller_and_still_fails() -> None:
    bug = next(b for b in planted.BUGS if b.name == "no latch")
    setup = bug.setup
    for seed in range(12, planted.MOST):
        big = run(setup, lay((*bug.scenarios, "slow-peer", "skew", "loss"), setup, seed), bug.make)
        if big.violation is not None:
            break
    else:
        pytest.fail("nothing broke")
    small = shrink(setup, big, bug.make, most=6)
    assert len(small.schedule.faults) < len(big.schedule.faults)
    again = run(setup, small.schedule, bug.make)
    assert again.violation is not None
    assert str(again.violation) == str(small.violation)
