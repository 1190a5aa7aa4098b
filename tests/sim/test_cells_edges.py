"""Cells along edges, in the simulated swarm: nobody agrees to anything, whoever is missing costs
its own edge, and push-sum loses no mass."""

import pytest

from benchmarks.between.mass import total, under_way
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId
from node.core.mass import WHOLE_MASS, Books
from node.sim.process import SimPeer
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from tests.sim.outcomes import PlayedSwarm

pytestmark = pytest.mark.usefixtures("silence")


def setup(strategy: str, cells: int, cell: int = 1, every: float = 20.0) -> Setup:
    """Epochs of more than a second, and a directory that is quick enough for so short windows."""
    return Setup(
        cell=cell,
        outer=OuterSettings(strategy, window_s=every),
        ends=cells * cell,
        stages=1,
        replicas=cells * cell,
        parts=toy_parts(1, 2),
        epochs=100_000,
        spread_s=0.05,
        links=LinkProfile(0.002, 0.002),
        work=WorkTimes(ends_s=0.05, forward_s=0.25, step_s=0.05),
    )


class Swarm(PlayedSwarm):
    """Of cells that work."""

    def __init__(self, setup: Setup, cells: int, seed: int = 1) -> None:
        super().__init__(setup, seed)
        self.many = cells
        assert self.until(lambda: len(self.leaders()) == cells, 300.0)

    def leaders(self) -> dict[CellId, SimPeer]:
        """Who leads each cell that works."""
        return {
            p.training.cell: p
            for p in self.live(0)
            if p.leader is not None and p.leader.roster.base is not None
        }

    def rounds(self) -> dict[str, int]:
        """Outer rounds of each cell so far."""
        found: dict[str, int] = {}
        for commit in self.watch.commits:
            found[commit.cell] = found.get(commit.cell, 0) + (not commit.tokens)
        return found

    def apart(self) -> float:
        """From the smallest to the largest value of one parameter among the cells."""
        stages = {p.training.cell: p.work.stage for p in self.live(1) if p.ready}
        assert len(stages) == self.many
        values = [float(min(s.parameters().items())[1].flatten()[0]) for s in stages.values()]
        return max(values) - min(values)

    def books(self) -> dict[CellId, Books]:
        masses = {cell: peer.leader.windows.mass for cell, peer in self.leaders().items()}
        return {cell: mass.books for cell, mass in masses.items() if mass and mass.books}


def test_cells_along_edges_stay_together() -> None:
    """Beside cells that never meet, whose values walk away from each other."""
    apart: list[float] = []
    for strategy, every in (("ring", 20.0), ("push-sum", 20.0), ("ring", 100_000.0)):
        swarm = Swarm(setup(strategy, 3, every=every), 3)
        swarm.world.run(160.0, None)
        apart.append(swarm.apart())
        assert bool(sum(swarm.rounds().values())) == (every == 20.0)
    assert max(apart[:2]) < apart[2] / 2


def whole(books: dict[CellId, Books]) -> bool:
    return all(total(books, stage) == WHOLE_MASS for stage in (0, 1))


def test_mass_is_whole_when_a_leader_is_killed() -> None:
    swarm = Swarm(setup("push-sum", 2, cell=2), 2)
    assert swarm.until(lambda: min(swarm.rounds().values(), default=0) > 1, 120.0)
    before = swarm.books()
    assert whole(before)
    assert any(books.taken for books in before.values())
    ends = [p.training.cell for p in swarm.live(0)]
    cell, leader = next((c, p) for c, p in swarm.leaders().items() if ends.count(c) > 1)
    swarm.loses(leader)
    assert swarm.until(lambda: swarm.leaders().keys() == before.keys(), 60.0)
    assert swarm.leaders()[cell] is not leader
    met = swarm.rounds()
    assert swarm.until(lambda: all(n > met[c] for c, n in swarm.rounds().items()), 120.0)
    after = swarm.books()
    assert whole(after)
    assert after[cell].serial > before[cell].serial


def test_the_mass_of_a_cell_that_is_killed_is_known_by_its_name() -> None:
    swarm = Swarm(setup("push-sum", 3), 3)
    assert swarm.until(lambda: min(swarm.rounds().values(), default=0) > 1, 120.0)
    at_death, killed = swarm.books(), sorted(swarm.leaders())[0]
    assert whole(at_death)
    swarm.loses(*(p for p in swarm.live() if p.training.cell == killed))
    met = {c: n for c, n in swarm.rounds().items() if c != killed}
    # Until the others see that it is gone, what they grant it is granted by name.
    assert swarm.until(lambda: all(swarm.rounds()[c] > n + 1 for c, n in met.items()), 300.0)
    books = {**swarm.books(), killed: at_death[killed]}
    assert len(books) == 3
    assert whole(books)
    lost = at_death[killed].held[0] + sum(
        units[0] for ends, units in under_way(books).items() if killed in ends
    )
    assert 0 < lost < WHOLE_MASS
