"""Recordings of simulated swarms, played into fresh machines."""

import pytest

from node.coordinator.recording.player import Player
from node.coordinator.recording.show import lines
from node.core.ids import PeerId
from node.epoch.leader.planning import Planning
from node.sim.faults import Schedule, lay
from node.sim.run import run
from node.sim.setup import Setup
from testbed.swarms.tapes import Tapes
from tests.sim.test_cells_lead import NEAR
from tests.sim.test_planned import SETUP as PLANNED

SCHEDULES = 10
SMALL = Setup(epochs=6)
KINDS = (b'"Grouped"', b'"Searched"')
"""Events of a leader when its cell meets another one, and when its search for paths ends."""


def recorded(seed: int, setup: Setup = SMALL) -> Tapes:
    """Recordings of the random schedule of this seed."""
    tapes = Tapes()
    run(setup, lay(("random",), setup, seed), tapes.factory())
    return tapes


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_fresh_machines_give_the_recorded_actions(seed: int) -> None:
    tapes = recorded(seed)
    actions = 0
    machines: set[str] = set()
    for peer, played in tapes.replay():
        assert played.difference is None, (peer, played.difference)
        actions += played.actions
        machines |= played.events.keys()
    assert machines == {"leader", "member"}
    assert actions > 100


@pytest.mark.parametrize("setup", [NEAR, PLANNED], ids=["cells", "planned-paths"])
def test_cells_and_searched_paths_replay(setup: Setup) -> None:
    tapes = Tapes()
    run(setup, Schedule(1, ()), tapes.factory())
    kinds = {text for _, tape in tapes.tapes for line in tape for text in KINDS if text in line}
    assert kinds >= ({KINDS[0]} if setup is NEAR else {KINDS[1]})
    for peer, played in tapes.replay():
        assert played.difference is None, (peer, played.difference)


def test_another_decision_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of these fresh leaders move a part that no recorded plan moves."""
    tapes = recorded(1)
    monkeypatch.setattr(Planning, "_moved", lambda *_: {"made-up": PeerId("x")})
    others = []
    for _, tape in tapes.tapes:
        player = Player()
        if player.play(tape).difference is not None:
            others.append(player)
    assert others
    first = others[0].played.difference
    assert first is not None
    assert (first.machine, first.expected[first.at][0]) == ("leader", "SendPlan")
    assert any("SendPlan.plan.moved" in line for line in lines(others[0], damaged=False))
