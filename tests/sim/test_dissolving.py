"""Cells that lose peers for good: a peer that cannot go on joins another cell, which notices only
more peers; a peer that can go on stays."""

import random
from itertools import pairwise

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import ENDS, CellId, first_cell
from node.sim.process import SimPeer
from node.sim.setup import Setup, WorkTimes
from node.sim.world.network import Wall
from tests.sim.outcomes import PlayedSwarm

SLOW = WorkTimes(ends_s=0.05, forward_s=0.25, step_s=0.05)
"""Work with epochs of some seconds: the waits here last minutes."""


pytestmark = pytest.mark.usefixtures("silence")


class Swarm(PlayedSwarm):
    """A working swarm of `cells` cells, each with `cell` replicas of every stage."""

    def __init__(self, seed: int, cells: int, cell: int = 1, work: WorkTimes = SLOW) -> None:
        outer = OuterSettings("gossip", "parameters", window_s=60.0)
        many = cells * cell
        setup = Setup(many, replicas=many, epochs=100_000, cell=cell, outer=outer, work=work)
        super().__init__(setup, seed)
        assert self.until(lambda: len(self.cells()) >= cells and self.whole(), 400.0)

    def cells(self) -> dict[CellId, list[SimPeer]]:
        found: dict[CellId, list[SimPeer]] = {}
        for peer in self.live():
            found.setdefault(peer.training.cell, []).append(peer)
        return found

    def current(self, peer: SimPeer) -> bool:
        """Return True if the peer works in the cell that it belongs to."""
        plan = peer.member.plan if peer.ready else None
        me = plan.member(peer.name) if plan is not None else None
        return bool(plan and plan.paths and plan.cell_id == peer.training.cell and me.current)

    def whole(self) -> bool:
        """Return True if every living peer works, and one peer of each cell leads."""
        leaders = [[p for p in cell if p.leader is not None] for cell in self.cells().values()]
        return all(map(self.current, self.live())) and all(len(of) == 1 for of in leaders)

    def waits(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds, None)

    def epochs(self, cell: CellId, since: int) -> list[int]:
        """Epochs that the cell has committed after the swarm's first `since` commits."""
        return [c.epoch for c in self.watch.commits[since:] if c.cell == cell]


def follow(epochs: list[int]) -> bool:
    """Return True if the epochs follow each other one by one, and are more than ten."""
    return len(epochs) > 10 and all(b == a + 1 for a, b in pairwise(epochs))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_peer_that_has_lost_the_ends_works_in_the_other_cell(seed: int) -> None:
    swarm = Swarm(seed, 2)
    (_, lost), (cell, _) = sorted(swarm.cells().items())
    stay = [p for p in lost if p.stage != ENDS]
    before = len(swarm.watch.commits)
    swarm.loses(*(p for p in lost if p.stage == ENDS))
    assert swarm.until(
        lambda: all(swarm.current(p) and p.training.cell == cell for p in stay), 180.0
    )
    assert swarm.watch.counts["cells-left"] == len(stay)
    swarm.waits(20.0)
    assert follow(swarm.epochs(cell, before)), "the other cell loses no epoch"


def test_a_cell_outlives_the_founders_and_takes_joiners() -> None:
    swarm = Swarm(2, 3)
    root = first_cell(swarm.manifest.run_id)
    before = len(swarm.watch.commits)
    swarm.loses(*swarm.cells()[root])
    swarm.waits(60.0)
    assert all(follow(swarm.epochs(cell, before)) for cell in swarm.cells())
    comer = swarm.add(None)
    assert swarm.until(lambda: comer.ready and swarm.current(comer), 60.0)
    assert comer.training.cell != root
    assert "cells-left" not in swarm.watch.counts


def test_another_ends_peer_leads_before_anybody_leaves() -> None:
    swarm = Swarm(0, 2, cell=2)
    cells = swarm.cells()
    # Some seeds make three cells of the four ends peers.
    led = {
        cell: next(p for p in peers if p.leader is not None)
        for cell, peers in cells.items()
        if sum(p.stage == ENDS for p in peers) > 1
    }
    assert led
    before = len(swarm.watch.commits)
    swarm.loses(*led.values())
    swarm.waits(100.0)
    assert set(swarm.cells()) == set(cells)
    assert all(len(swarm.epochs(cell, before)) > 10 for cell in led)
    assert "cells-left" not in swarm.watch.counts


@pytest.mark.parametrize(("seed", "work"), [(0, SLOW), (1, WorkTimes())])
def test_three_cells_that_start_again_are_three_cells(seed: int, work: WorkTimes) -> None:
    swarm = Swarm(seed, 3, work=work)
    swarm.waits(20.0)
    before = {p.name: (p.training.cell, p.stage) for p in swarm.live()}
    reached = {
        cell: min(p.work.stage.version.epoch for p in of) for cell, of in swarm.cells().items()
    }
    swarm.loses(*swarm.live())
    dice = random.Random(seed)
    for name in before:
        swarm.world.push(dice.uniform(1.0, 40.0), swarm.peers[name].boot)
    assert swarm.until(lambda: len(swarm.live()) == len(before) and swarm.whole(), 240.0)
    assert {p.name: (p.training.cell, p.stage) for p in swarm.live()} == before
    kept = swarm.setup.checkpoint_every * swarm.setup.checkpoint_keep
    for cell, peers in swarm.cells().items():
        assert min(p.work.stage.version.epoch for p in peers) >= reached[cell] - kept
    assert "cells-left" not in swarm.watch.counts


def test_a_cell_that_was_cut_in_half_has_one_leader_again() -> None:
    swarm = Swarm(2, 2, cell=2)
    swarm.waits(45.0)  # until those who work together are colleagues
    cell, peers = max(swarm.cells().items(), key=lambda of: len(of[1]))
    half = frozenset(next(p.name for p in peers if p.stage == stage) for stage in range(3))
    rest = frozenset(swarm.peers) - half
    walls = [Wall(half, rest), Wall(rest, half)]
    swarm.watch.one_fault.fault("partition")
    swarm.links.walls.extend(walls)
    swarm.troubles += 1
    assert swarm.until(lambda: sum(p.leader is not None for p in peers) == 2, 60.0)
    swarm.waits(30.0)
    for wall in walls:
        swarm.links.walls.remove(wall)
    swarm.troubles -= 1
    assert swarm.until(swarm.whole, 60.0)
    swarm.waits(30.0)
    assert swarm.until(swarm.whole, 20.0)
    assert all(p.training.cell == cell for p in peers)
