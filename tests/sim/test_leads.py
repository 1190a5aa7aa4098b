"""A run in which the owner admits leaders: only those lead, and all others take part as ever."""

from dataclasses import replace
from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId
from node.epoch.facts import RunFacts
from node.epoch.leader import division
from node.scheduler.near import leavers
from node.sim.process import SimPeer
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from node.sim.swarm import MachineFactory
from tests.sim.outcomes import PlayedSwarm

pytestmark = pytest.mark.usefixtures("silence")

ONE = Setup(
    ends=4,
    epochs=100_000,
    links=LinkProfile(0.002, 0.002),
    work=WorkTimes(ends_s=0.05, forward_s=0.15, step_s=0.05),
)
CELLS = replace(
    ONE,
    cell=2,
    stages=1,
    replicas=4,
    parts=toy_parts(1, 3),
    outer=OuterSettings("gossip", window_s=10.0),
)


class Chosen(PlayedSwarm):
    """A swarm in which only `leaders` may lead."""

    def __init__(
        self, setup: Setup, leaders: set[PeerId], make: MachineFactory | None = None
    ) -> None:
        self.leaders = leaders
        super().__init__(setup, 1, make)

    def facts(self, facts: RunFacts) -> RunFacts:
        return replace(super().facts(facts), may_lead=self.leaders.__contains__)

    def led(self, since: float = 0.0) -> dict[str, set[PeerId]]:
        """Leaders of the commits since that time, by cell."""
        led: dict[str, set[PeerId]] = {}
        for commit in self.watch.commits:
            if commit.at >= since:
                led.setdefault(commit.cell, set()).add(commit.leader)
        return led


def claims_to_lead(peer: SimPeer) -> None:
    """The first ends peer takes itself for the only one that may lead."""
    if peer.name == FIRST:
        kit = peer.training.kit
        object.__setattr__(kit, "facts", replace(kit.facts, may_lead=FIRST.__eq__))
        peer.training.admission._admitted = FIRST.__eq__


FIRST = PeerId("e00-000")


def chosen(setup: Setup, *numbers: int) -> Chosen:
    """A swarm in which the ends peers of these numbers may lead."""
    return Chosen(setup, {PeerId(f"e00-{n:03}") for n in numbers})


def test_only_those_lead_who_may() -> None:
    swarm = chosen(ONE, 1, 3)
    swarm.world.run(15.0, None)
    assert swarm.led() == {"": {"e00-001"}}
    swarm.loses(swarm.peers[PeerId("e00-001")])
    swarm.world.run(40.0, None)
    assert swarm.led(20.0) == {"": {"e00-003"}}


def test_nobody_leads_where_none_of_them_is_left() -> None:
    swarm = chosen(ONE, 0)
    swarm.world.run(15.0, None)
    swarm.loses(swarm.peers[PeerId("e00-000")])
    swarm.world.run(40.0, None)
    assert swarm.led(20.0) == {}


def test_a_cell_divides_only_where_both_parts_have_a_leader() -> None:
    one = chosen(CELLS, 2)
    two = chosen(CELLS, 1, 2)
    for swarm in (one, two):
        swarm.world.run(20.0, None)
    assert list(one.led().values()) == [{"e00-002"}], "one cell"
    assert sorted(two.led().values()) == [{"e00-001"}, {"e00-002"}]


def test_a_cell_without_a_second_leader_looks_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(division, "leavers", lambda *of: asked.append(of) or leavers(*of))
    chosen(CELLS, 2).world.run(20.0, None)
    assert len(asked) == 1


def test_nobody_follows_who_claims_it_nevertheless() -> None:
    swarm = Chosen(ONE, {PeerId("e00-001")}, MachineFactory(services=claims_to_lead))
    swarm.world.run(30.0, None)
    assert swarm.peers[FIRST].training.leader is not None, "it takes itself for the leader"
    assert swarm.led() == {"": {"e00-001"}}


def test_a_leader_that_leads_on_without_admission_loses_its_followers() -> None:
    swarm = Chosen(ONE, {FIRST, PeerId("e00-001")}, MachineFactory(services=claims_to_lead))
    swarm.world.run(15.0, None)
    assert swarm.led() == {"": {FIRST}}
    swarm.watch.one_fault.fault("lie")
    swarm.leaders.remove(FIRST)
    swarm.world.run(30.0, None)
    assert swarm.peers[FIRST].training.leader is not None, "it takes itself for the leader"
    assert swarm.led(20.0) == {"": {"e00-001"}}
