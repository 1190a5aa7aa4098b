"""A simulated swarm in which one peer after the other stands still, dies or is cut off, at moments
drawn from a seed. Measures the time without an epoch, and the peer's return to its place."""

import random
from collections.abc import Callable
from dataclasses import replace

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import ENDS, PeerId
from node.sim.process import SimPeer
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from node.sim.swarm import SimSwarm
from node.sim.world.network import Wall

COMMIT_S = 60.0
"""Longest wait for the next commit."""
BACK_S = 30.0
"""Longest wait for a plan with the peer that was struck. A peer that was cut off until all records
expired finds the others by the directory alone."""
SHORT = WorkTimes(ends_s=0.03, forward_s=0.1, step_s=0.03)
"""Epochs of about a second."""
FOUR = Setup(
    ends=2,
    stages=1,
    replicas=2,
    parts=toy_parts(1, 3),
    epochs=100_000,
    eval_every=3,
    work=WorkTimes(ends_s=0.06, forward_s=0.2, step_s=0.06),
)
"""Epochs of about two seconds. Faults last longer, and each epoch costs processor time."""
SHAPES = {
    "four": FOUR,
    "seven": replace(FOUR, ends=3, stages=2, parts=toy_parts(2, 3), work=SHORT),
    "two cells": replace(
        FOUR,
        ends=4,
        replicas=4,
        min_replicas=4,
        cell=2,
        outer=OuterSettings("gossip", window_s=20.0),
        links=LinkProfile(0.002, 0.002),
        work=WorkTimes(ends_s=0.1, forward_s=0.3, step_s=0.1),
    ),
}


class NoCommit(AssertionError):
    """A cell made no epoch, or has not taken the peer back, within the bound of the wait."""


class StruckSwarm(SimSwarm):
    """A swarm that is struck again and again, at moments drawn from its seed."""

    def __init__(self, setup: Setup, seed: int) -> None:
        super().__init__(setup, seed)
        self.dice = random.Random(seed)
        self._until(self._begun, COMMIT_S)
        self.world.run(self.world.now + 5.0, None)

    def _until(self, what: Callable[[], bool], most_s: float) -> bool:
        """Return True if the condition comes to hold within ``most_s``."""
        end = self.world.now + most_s
        while not what() and self.world.now < end:
            self.world.run(self.world.now + 1.0, None)
        return what()

    def _begun(self) -> bool:
        cells = {c.cell for c in self.watch.commits[-20:]}
        return len(self.watch.commits) > 3 and len(cells) == (2 if self.setup.cell else 1)

    def leaders(self) -> list[SimPeer]:
        """The leader of each cell, which has committed last there."""
        return [self.peers[c.leader] for c in {c.cell: c for c in self.watch.commits}.values()]

    def victim(self, *, leads: bool) -> SimPeer:
        """A leader or a member of any cell, after a random time. Its cell has another peer of its
        stage: a cell that lost all of them would have to wait for it."""
        self.world.run(self.world.now + self.dice.uniform(0.5, 3.0), None)
        leaders = self.leaders()
        able = leaders if leads else [p for p in self.live() if p not in leaders]
        spared = [p for p in able if self._replicas(p) > 1]
        return spared[self.dice.randrange(len(spared))]

    def _replicas(self, peer: SimPeer) -> int:
        """Number of peers of this peer's stage in its cell."""
        return sum(
            p.stage == peer.stage and p.training.cell == peer.training.cell for p in self.live()
        )

    def goes_on(self, victim: SimPeer) -> float:
        """Seconds until the cell of the victim commits without it."""
        began = self.world.now
        known = len(self.watch.commits)
        cell = victim.training.cell

        def commits() -> bool:
            new = self.watch.commits[known:]
            return any(c.cell == cell and c.leader != victim.name for c in new)

        while not commits() and self.world.now < began + COMMIT_S:
            self.world.run(self.world.now + 0.25, None)
        if not commits():
            raise NoCommit(f"no commit in {COMMIT_S:.0f} s after {victim.name} was struck")
        return self.world.now - began

    def holds(self) -> None:
        """Let the fault last: mostly for seconds, now and then longer than a peer is shunned."""
        most = self.dice.choice((1.0, 1.0, 6.0, 25.0))
        self.world.run(self.world.now + self.dice.uniform(0.0, most), None)

    def comes_back(self, victim: SimPeer) -> None:
        """Wait until a plan made from now on has the victim as a current member."""
        newest = max((c.epoch for c in self.watch.commits if c.cell == victim.disk.cell), default=0)

        def back() -> bool:
            plan = victim.work.plan if victim.ready else None
            me = plan.member(victim.name) if plan is not None else None
            return plan is not None and me is not None and me.current and plan.epoch > newest

        if not self._until(back, BACK_S):
            raise NoCommit(f"{victim.name} is in no plan after {BACK_S:.0f} s")


def frozen(swarm: StruckSwarm, *, leads: bool) -> float:
    """SIGSTOP, then SIGCONT."""
    victim = swarm.victim(leads=leads)
    swarm.watch.one_fault.fault("pause")
    victim.loop.frozen = True
    took = swarm.goes_on(victim)
    swarm.holds()
    swarm.watch.one_fault.fault("over")
    victim.loop.thaw()
    swarm.comes_back(victim)
    return took


def killed(swarm: StruckSwarm, *, leads: bool) -> float:
    """SIGKILL, then a new process."""
    victim = swarm.victim(leads=leads)
    swarm.watch.one_fault.fault("kill")
    victim.kill()
    took = swarm.goes_on(victim)
    victim.boot()
    swarm.comes_back(victim)
    return took


def cut_off(swarm: StruckSwarm, *, leads: bool) -> float:
    """The cable is pulled, and put back."""
    victim = swarm.victim(leads=leads)
    return _behind_walls(swarm, victim, frozenset())


def half_cut(swarm: StruckSwarm, *, leads: bool) -> float:
    """Only the other ends peers and the leader still reach each other."""
    victim = swarm.victim(leads=leads)
    cell = [p for p in swarm.live() if p.training.cell == victim.training.cell]
    return _behind_walls(swarm, victim, frozenset(p.name for p in cell if p.stage != ENDS))


def _behind_walls(swarm: StruckSwarm, victim: SimPeer, far: frozenset[PeerId]) -> float:
    """Separate ``victim`` from the peers in ``far`` for a while; from all others if it is empty.
    Returns the seconds until the cell goes on."""
    only = frozenset({victim.name})
    walls = [Wall(only, far), Wall(far, only)]
    swarm.watch.one_fault.fault("partition")
    swarm.links.walls.extend(walls)
    took = swarm.goes_on(victim)
    swarm.holds()
    swarm.watch.one_fault.fault("over")
    for wall in walls:
        swarm.links.walls.remove(wall)
    swarm.comes_back(victim)
    return took


DEEDS: dict[str, Callable[..., float]] = {
    "frozen": frozen,
    "killed": killed,
    "cut off": cut_off,
    "half cut": half_cut,
}
"""Faults by name. Each strikes a victim that ``leads`` or does not, brings it back, and returns the
seconds until the next commit."""
