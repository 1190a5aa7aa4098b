"""A replica that comes during an epoch, in the simulated swarm: where its parameters come quickly,
it works in the next plan."""

import asyncio
from typing import Any

import pytest

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.core.journey import Plan
from node.sim.setup import LinkProfile, Setup, WorkTimes
from node.sim.swarm import SimSwarm
from node.stage.runtime import StageRuntime

SLOW = Setup(epochs=1000, links=LinkProfile(0.01, 0.002), work=WorkTimes(ends_s=0.3, forward_s=1.0))
"""Epochs so long that a fetch takes a small share of them."""


class Joined:
    """A swarm that a replica of stage 1 joins, and the plans with it."""

    def __init__(self) -> None:
        self.swarm = SimSwarm(SLOW, 1)
        self.swarm.world.run(60.0, None)
        self.comer = self.swarm.add(1)
        self.plans = list[Plan]()

    def run(self, plans: int) -> None:
        """Let time pass until the newcomer is in this number of plans, and the last is over."""
        until = self.swarm.world.now + 300.0
        while self.swarm.world.now < until and len(self.plans) <= plans:
            self.swarm.world.run(self.swarm.world.now + 0.1, None)
            chief = self.swarm.chief()
            plan = None
            if chief is not None and chief.leader is not None:
                plan = chief.leader.plan
            if plan is not None and plan.member(self.comer.name) and plan not in self.plans:
                self.plans.append(plan)

    def current(self) -> list[bool]:
        """For each plan, whether the newcomer is a current member of it."""
        rows = [plan.member(self.comer.name) for plan in self.plans]
        return [row is not None and row.current for row in rows]


@pytest.mark.usefixtures("silence")
def test_it_works_in_the_next_plan() -> None:
    joined = Joined()
    joined.run(1)
    first = joined.plans[0]
    assert joined.current()[0]
    assert joined.comer.name in {hop.peer for path in first.paths for hop in path.hops}
    assert joined.comer.member.at.epoch > first.epoch, "it has committed the epoch"


async def gone(*_: Any) -> Any:
    raise PeerFault(PeerId("s01-000"), "is gone")


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("fetch", [gone, never])
@pytest.mark.usefixtures("silence")
def test_a_fetch_that_fails_costs_it_an_epoch(monkeypatch: Any, fetch: Any) -> None:
    """It goes back to nothing, and works after it has listened."""
    joined = Joined()
    whole = StageRuntime._fetch
    failed = []

    async def fails_for_a_base(self: StageRuntime, donors: Any, version: Any, *rest: Any) -> Any:
        if version is not None and version.lineage:
            failed.append(version)
            return await fetch()
        return await whole(self, donors, version, *rest)

    monkeypatch.setattr(StageRuntime, "_fetch", fails_for_a_base)
    joined.run(5)
    current = joined.current()
    assert current[0]
    assert current[-1]
    assert False in current
    assert len(failed) == 1
    assert joined.comer.member.at.epoch > joined.plans[0].epoch
