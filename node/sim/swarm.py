"""The simulated swarm: its peers, their machines, and the few things done to it from outside."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from node.app.assembly import Machines
from node.coordinator.recording.recorder import Recorder
from node.core.ids import ENDS, PeerId
from node.sim.process import SimPeer, Swarm
from node.sim.setup import Setup
from node.sim.watch import HistoryRecorder


@dataclass(frozen=True)
class MachineFactory(Machines):
    """Factories of a peer's machines. ``services``: called with a peer before its services start. A
    test plants a bug in one of them. ``recorder``: makes the recorder of each process; None records
    nothing."""

    services: Callable[[SimPeer], object] = lambda peer: None
    recorder: Callable[[SimPeer], Recorder | None] = lambda peer: None


class SimSwarm(Swarm):
    """Its peers too, and the checkers of invariants."""

    def __init__(self, setup: Setup, seed: int = 0, make: MachineFactory | None = None) -> None:
        super().__init__(setup, seed)
        self.make = make or MachineFactory()
        self.watch = HistoryRecorder(self)
        self.struck: list[tuple[float, str, str, float]] = []
        """(time, kind, who, seconds) of the faults that struck"""
        self._numbers = defaultdict[str, Iterator[int]](count, {f"n{seed}": count(1)})
        for stage, many in [
            (ENDS, setup.ends),
            *((s, setup.replicas + (s <= setup.extra)) for s in range(1, setup.stages + 1)),
        ]:
            for _ in range(many):
                peer = self._machine(stage)
                self.world.push(0.3 * self.world.rng.random(), peer.boot)

    def _machine(self, stage: int | None, open_to: str = "auto") -> SimPeer:
        if stage is None:
            kind = f"n{self.seed}"
        elif stage:
            kind = f"s{stage:02d}"
        else:
            kind = f"e{stage:02d}"
        name = PeerId(f"{kind}-{next(self._numbers[kind]):03d}")
        slowness = 1.0 + (self.setup.work.unequal - 1.0) * self.world.rng.random()
        peer = self.peers[name] = SimPeer(self, name, stage, slowness, open_to)
        return peer

    def add(self, stage: int | None, open_to: str = "auto") -> SimPeer:
        """A new peer for a stage, or one that chooses it: "auto" any, "stage" a block stage. It
        joins the swarm as it runs."""
        peer = self._machine(stage, open_to)
        peer.boot()
        return peer

    # ----------------------------------------------------------- views

    def cells(self) -> set[str]:
        """Cells in which every stage has a peer that lives; one without a name where cells do not
        lead themselves."""
        held: dict[str, set[int]] = {}
        for peer in self.live():
            held.setdefault(peer.training.cell, set()).add(peer.stage)
        return {c for c, stages in held.items() if len(stages) > self.setup.stages}

    def chief(self) -> SimPeer | None:
        """The leader that has committed last, or else any."""
        for commit in self.watch.commits[-1:]:
            if self.peers[commit.leader].alive and self.peers[commit.leader].leader is not None:
                return self.peers[commit.leader]
        return next((p for p in self.live(ENDS) if p.leader is not None), None)

    def spare(self, peer: SimPeer) -> bool:
        """Return True if another live peer holds everything that this peer's stage needs."""
        cell = [p for p in self.live(peer.stage) if p.ready and self.honest(p.name)]
        newest = max((p.member.at.epoch for p in cell), default=0)
        others = [
            p for p in cell if p is not peer and not p.leaving and p.member.at.epoch >= newest
        ]
        # Where somebody lies, the honest must stay the majority: a cell believes what most of it
        # say.
        lying = sum(p.name in self.liars for p in self.live(peer.stage))
        return len(others) > lying
