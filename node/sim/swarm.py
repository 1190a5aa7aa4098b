"""The simulated swarm: its machines, network and directory, what its peers' machines are made of,
and the few things done to it from outside."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from node.averaging.exchange.machine import RoundMachine
from node.core.errors import Refused
from node.core.ids import ENDS, PeerId
from node.dht.settings import DirectorySettings
from node.pipeline.machine import PipelineMachine
from node.sim.process import SimPeer
from node.sim.setup import Setup
from node.sim.strangers import Stranger
from node.sim.watch import HistoryRecorder
from node.sim.world.directory import SimDht
from node.sim.world.links import Links
from node.sim.world.loop import VirtualTime
from node.sim.world.network import SimNet
from node.telemetry.metrics import Metrics
from node.training.leader.leader import Leader
from node.training.member import Member
from node.training.protocol.facts import RunFacts
from node.training.protocol.rules import Rules


@dataclass(frozen=True)
class MachineFactory:
    """What makes a peer's machines. ``services``: what is done to its services before they start.
    A test plants a bug in one of them."""

    pipeline: Callable[..., PipelineMachine] = PipelineMachine
    round: Callable[..., RoundMachine] = RoundMachine
    member: Callable[..., Member] = Member
    leader: Callable[..., Leader] = Leader
    services: Callable[[SimPeer], object] = lambda peer: None


class SimSwarm:
    """Peers, links, directory, invariants. Everything that is left to chance comes from
    ``seed``."""

    def __init__(self, setup: Setup, seed: int = 0, make: MachineFactory | None = None) -> None:
        self.setup, self.seed, self.make = setup, seed, make or MachineFactory()
        rng = random.Random(f"links {seed}")
        self.links = Links(rng, setup.links)
        self.world = VirtualTime(seed)
        self.net = SimNet(self.world, self.links, setup.weigh)
        self.record_store = SimDht(
            self.links, DirectorySettings(), setup.spread_s, lambda: self.world.now
        )
        self.manifest = setup.manifest(seed)
        self.metrics = Metrics()
        self.watch = HistoryRecorder(self)
        self.changes: dict[str, Rules] = {}
        """What the owner has signed, by its text."""
        self.peers: dict[PeerId, SimPeer] = {}
        self.liars: set[PeerId] = set()
        self.strangers: set[PeerId] = set()
        self.troubles = 0
        """Faults that last and are not over."""
        self.struck: list[tuple[float, str, str, float]] = []
        """(time, kind, who, seconds) of the faults that struck"""
        self.deaths: list[tuple[float, PeerId]] = []
        self._numbers: dict[int, int] = {}
        self._newcomers = 0
        for stage, count in [
            (ENDS, setup.ends),
            *((s, setup.replicas + (s <= setup.extra)) for s in range(1, setup.stages + 1)),
        ]:
            for _ in range(count):
                peer = self._machine(stage)
                self.world.push(0.3 * self.world.rng.random(), peer.boot)

    def _machine(self, stage: int) -> SimPeer:
        number = self._numbers[stage] = self._numbers.get(stage, -1) + 1
        name = PeerId(f"{'e' if stage == ENDS else 's'}{stage:02d}-{number:03d}")
        peer = self.peers[name] = SimPeer(self, name, stage, self._slowness())
        return peer

    def _slowness(self) -> float:
        return 1.0 + (self.setup.work.unequal - 1.0) * self.world.rng.random()

    def add(self, stage: int) -> SimPeer:
        """A new peer for a stage; it joins the swarm as it runs."""
        peer = self._machine(stage)
        peer.boot()
        return peer

    def come(self, open_to: str = "auto") -> SimPeer:
        """A new peer that chooses its stage: "auto" any, "stage" a block stage."""
        self._newcomers += 1
        name = PeerId(f"n{self.seed}-{self._newcomers:03d}")
        comer = self.peers[name] = SimPeer(self, name, None, self._slowness(), open_to)
        comer.boot()
        return comer

    def intrude(self) -> Stranger:
        """A stranger that would end the run."""
        name = PeerId(f"0-stranger-{len(self.strangers)}")
        self.strangers.add(name)
        return Stranger(self, name)

    def read(self, change: str) -> Rules:
        """A change as peers read it. Raises Refused for what the owner has not signed."""
        if not change:
            return Rules(self.manifest.averaging.peers, self.setup.outer)
        if change not in self.changes:
            raise Refused("not a change that the owner signed for this run", "")
        return self.changes[change]

    def facts(self, facts: RunFacts) -> RunFacts:
        """What leaders reckon with: as long as work takes here."""
        setup = self.setup
        block = setup.operations_per_s * 3 * setup.work.forward_s
        ends = setup.operations_per_s * 4 * setup.work.ends_s
        sizes = replace(
            facts.sizes, tensor=setup.activation, operations=(ends, *[block] * setup.stages)
        )
        return replace(facts, sizes=sizes)

    def honest(self, peer: PeerId) -> bool:
        return peer not in self.liars and peer not in self.strangers

    def calm(self) -> bool:
        """No fault lasts, and none is still to strike: a bit that flips with a peer's next
        parameters."""
        coming = any(p.flip for p in self.live())
        return not self.troubles and not self.links.walls and not self.liars and not coming

    def left(self, peer: SimPeer) -> None:
        """A peer that has drained ends its process, or begins a new one at another stage, or in
        another cell."""
        peer.kill()
        if not peer.moved:
            self.record_store.withdraw(peer.name, peer.clock.wall())
            self.watch.note(f"{peer.name} has left")
            return
        if peer.to_cell is not None:
            self.watch.note(f"{peer.name} has moved to cell {peer.to_cell}")
            peer.disk.change_cell(peer.to_cell)
        else:
            self.watch.note(f"{peer.name} has moved to {peer.to_stage}")
        # Whose stage is fixed keeps it in another cell too.
        if peer.to_cell is None or peer.config.open_to:
            peer.config.stage = peer.to_stage
        peer.boot()

    # ----------------------------------------------------------- what is to be seen

    def live(self, stage: int | None = None) -> list[SimPeer]:
        """Peers whose process runs and has a stage, in PeerId order."""
        return [
            p
            for _, p in sorted(self.peers.items())
            if p.alive and p.assembled is not None and (stage is None or p.stage == stage)
        ]

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
        """Whether somebody else alive holds what this peer's stage needs."""
        cell = [p for p in self.live(peer.stage) if p.ready and self.honest(p.name)]
        newest = max((p.member.at.epoch for p in cell), default=0)
        others = [
            p for p in cell if p is not peer and not p.leaving and p.member.at.epoch >= newest
        ]
        # Where somebody lies, the honest must stay the majority: a cell believes what most of it
        # say.
        lying = sum(p.name in self.liars for p in self.live(peer.stage))
        return len(others) > lying
