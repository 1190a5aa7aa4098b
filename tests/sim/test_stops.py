"""A stop in order loses nothing that is committed, and a crash no more than the settings allow."""

from dataclasses import replace
from itertools import pairwise

import pytest

from node.sim.faults import Fault, Schedule, lay
from node.sim.run import ScheduleOutcome
from node.sim.setup import Setup
from tests.sim.outcomes import finished
from tests.sim.test_schedules import CELLS, NEAR

RARELY = 100_000
"""Epochs between checkpoints, so that only a stop writes one."""
STOPS = Setup(checkpoint_every=RARELY)


def lossless(outcome: ScheduleOutcome) -> None:
    assert outcome.repeated == 0, "a committed epoch was done again"
    assert "history-lost" not in outcome.counts, "the order of samples was guessed"
    assert outcome.counts["restored"] > 0, "nobody came back from a disk"


@pytest.mark.parametrize("name", ["stop", "stop-all"])
@pytest.mark.parametrize("seed", range(2))
def test_stops_in_order_lose_no_committed_epoch(name: str, seed: int) -> None:
    lossless(finished(STOPS, lay((name,), STOPS, seed)))


@pytest.mark.parametrize("name", ["gossip", "butterfly"])
def test_cells_that_are_stopped_lose_no_committed_epoch(name: str) -> None:
    setup = replace(NEAR, outer=CELLS[name], checkpoint_every=RARELY)
    lossless(finished(setup, lay(("stop-all",), setup, 1)))


# A version was adopted and not settled just when the peer stops: seed 20 shows it.
@pytest.mark.parametrize("seed", [20, 23])
def test_a_stop_between_commit_and_next_plan_loses_nothing(seed: int) -> None:
    lossless(finished(STOPS, lay(("stop-all",), STOPS, seed)))


WITHIN_S = 6.0


def test_a_crash_of_everybody_costs_at_most_what_is_allowed() -> None:
    setup = Setup(epochs=40, checkpoint_every=0, checkpoint_within_s=WITHIN_S)
    crash = Fault(25.0, "restart-all", seconds=1.0)
    outcome = finished(setup, Schedule(0, (crash,)))
    before = [c for c in outcome.commits if c.at < crash.at]
    after = [c for c in outcome.commits if c.at >= crash.at + crash.seconds]
    resumed = after[0].epoch - 1
    assert 0 < resumed <= before[-1].epoch
    (made,) = [c.at for c in before if c.epoch == resumed]
    longest = max(b.at - a.at for a, b in pairwise(before))
    assert before[-1].at - made <= max(WITHIN_S, longest) + setup.work.checkpoint_s


def test_a_crash_of_a_young_swarm_leaves_what_it_wrote_at_a_power_of_two():
    setup = Setup(epochs=40, checkpoint_every=0, checkpoint_within_s=300.0)
    crash = Fault(15.0, "restart-all", seconds=1.0)
    outcome = finished(setup, Schedule(1, (crash,)))
    before = [c.epoch for c in outcome.commits if c.at < crash.at]
    after = [c.epoch for c in outcome.commits if c.at >= crash.at + crash.seconds]
    assert before[-1] >= 8
    # The newest checkpoint, at a power of two, may still be on its way to the disk.
    assert after[0] - 1 >= before[-1] // 4
