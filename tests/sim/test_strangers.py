"""A stranger with the smallest PeerId sends messages that would end the run: nothing comes of them,
whatever else goes wrong."""

from dataclasses import replace

import pytest

from node.sim.faults import Fault, Schedule
from node.sim.process import RIPE_S
from node.sim.run import run
from node.sim.setup import Setup
from tests.sim.outcomes import finished

LONG = Setup(ends=3, epochs=40)
BEGIN = RIPE_S + 3.0


def with_stranger(seed: int, *faults: Fault) -> Schedule:
    return Schedule(seed, (Fault(BEGIN, "stranger", seconds=20.0), *faults))


@pytest.mark.parametrize("seed", [1])
def test_strangers_cost_no_epoch_and_nobody_else_is_banned(seed: int) -> None:
    again = Fault(BEGIN + 4.0, "stranger", seconds=12.0)
    outcome = finished(LONG, with_stranger(seed, again))
    assert outcome.epochs == LONG.epochs
    assert outcome.counts["bans"] > 0, "the strangers"
    assert not {"bans-of-honest", "epoch-abandoned", "went-back"} & outcome.counts.keys()
    assert outcome.counts["leaders"] == run(LONG, Schedule(seed, ())).counts["leaders"]


@pytest.mark.parametrize(
    "trouble",
    [
        Fault(BEGIN + 3.0, "kill-leader"),
        Fault(BEGIN + 3.0, "partition", 5, seconds=6.0, size=0.4),
        Fault(BEGIN + 3.0, "restart-all", seconds=2.0),
    ],
    ids=lambda f: f.kind,
)
def test_what_else_goes_wrong_meanwhile_mends_as_ever(trouble: Fault) -> None:
    outcome = finished(LONG, with_stranger(0, trouble))
    assert outcome.epochs == LONG.epochs
    assert not outcome.counts.get("bans-of-honest")


def test_a_later_ends_peer_leads_when_all_earlier_ones_are_gone() -> None:
    # A peer that alone holds the newest version is not killed, so one of the four kills may come
    # too early.
    kills = [Fault(BEGIN + 8.0 + 8.0 * i, "kill-leader") for i in range(4)]
    comes = Fault(BEGIN, "join", stage=0), Fault(BEGIN, "stranger", seconds=30.0)
    outcome = finished(replace(LONG, epochs=60), Schedule(1, (*comes, *kills)))
    assert outcome.commits[-1][3] == "e00-003"
