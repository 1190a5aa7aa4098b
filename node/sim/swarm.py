"""The simulated swarm: its peers, what their machines are made of, and the few things done to it
from outside."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from node.averaging.exchange.machine import RoundMachine
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import Refused
from node.core.ids import ENDS, PeerId
from node.core.journey import Path, Version
from node.data.order import SampleOrder, Sampler
from node.dht.settings import DirectorySettings
from node.identity.faults import FaultBook
from node.optim.ownership import assign
from node.pipeline.machine import PipelineMachine
from node.pipeline.route import fewest_hops
from node.scheduler.choosing import Choosing, able
from node.scheduler.paths import assign_paths
from node.scheduler.quotas import quotas
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings
from node.sim import lies
from node.sim.directory import FakeDirectory
from node.sim.links import Links
from node.sim.peer import Newcomer, SimPeer
from node.sim.setup import Setup
from node.sim.strangers import Stranger
from node.sim.values import Share
from node.sim.watch import Watch
from node.sim.world import World
from node.training.leader.leader import Leader
from node.training.member import Member
from node.training.protocol import events as ev
from node.training.protocol.facts import RunFacts
from node.training.protocol.meetings import Meetings
from node.training.protocol.memory import Cursor
from node.training.protocol.rules import Rules


class Machines:
    """What a peer's machines are, and what it says of itself. A test plants a bug by a subclass."""

    def pipeline(self, me: PeerId) -> PipelineMachine:
        return PipelineMachine(me)

    def round(self) -> RoundMachine:
        return RoundMachine()

    def fault_book(self) -> FaultBook:
        return FaultBook()

    def member(
        self, me: PeerId, at: Version, checkpoints: tuple[Version, ...], tokens: int
    ) -> Member:
        return Member(me, at, checkpoints, tokens)

    def leader(self, me: PeerId, facts: RunFacts, **history: Any) -> Leader:
        return Leader(me, facts, **history)

    def choosing(
        self, me: PeerId, open_to: str, stages: int, now: float, stage: int | None = None
    ) -> Choosing:
        return Choosing(me, able(open_to, stages), stages, now, stage)

    def heard(self, peer: SimPeer) -> ev.Heard:
        """What the peer tells its leader once a second."""
        m, work = peer.member, peer.labour
        heard = ev.Heard(
            peer.name,
            peer.stage,
            m.at,
            work.digest,
            work.speed(),
            m.reachable,
            m.term,
            peer.swarm.facts.bounds.counted(m.at.epoch, m.tokens),
            peer.leaving,
            costs=work.costs(),
            cell=m.cell,
            arrived=work.arrived,
        )
        return lies.heard(peer, heard) if peer.lie else heard

    def parsed(self, peer: PeerId, note: Any, lying: bool) -> Any:
        """A note as the leader reads it. Raises WireError for what no honest peer would say."""
        return lies.over_the_wire(peer, note) if lying else note

    def digest(self, peer: SimPeer, digest: str) -> str:
        """The digest it reports of what it adopted."""
        return lies.digest(peer, digest)

    def share(self, peer: SimPeer, share: Share) -> Share:
        """The gradients it gives."""
        return lies.share(peer, share)

    def note(self, peer: SimPeer, note: Any) -> Any:
        """What it tells its leader of an epoch."""
        return lies.note(peer, note) if peer.lie else note


class Swarm:
    """Peers, links, noticeboard, invariants. Everything that is left to chance comes from
    ``seed``."""

    def __init__(self, setup: Setup, seed: int = 0, make: Machines | None = None) -> None:
        self.setup, self.seed, self.make = setup, seed, make or Machines()
        rng = random.Random(f"links {seed}")
        self.links = Links(rng, setup.latency_s, setup.jitter_s, setup.bandwidth, setup.loss)
        self.world = World(seed, self.links)
        self.directory = FakeDirectory(self.links, DirectorySettings(), setup.spread_s)
        self.watch = Watch(self)
        scheduler, may_skip = setup.scheduling(seed)
        self.changes: dict[str, Rules] = {}
        """What the owner has signed, by its text."""
        self.facts = replace(facts_of(setup, scheduler), read=self.read)
        self.fewest = fewest_hops(setup.stages, may_skip)
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
                peer = self.add(stage, settle=True)
                self.world.push(0.3 * self.world.rng.random(), peer, peer.boot, (True,))

    def add(self, stage: int, settle: bool = False) -> SimPeer:
        """A new peer; without ``settle`` it joins the swarm as it runs."""
        number = self._numbers[stage] = self._numbers.get(stage, -1) + 1
        name = PeerId(f"{'e' if stage == ENDS else 's'}{stage:02d}-{number:03d}")
        slowness = 1.0 + (self.setup.unequal - 1.0) * self.world.rng.random()
        peer = self.peers[name] = SimPeer(self, name, stage, slowness)
        self.world.hosts[name] = peer
        if not settle:
            peer.boot()
        return peer

    def come(self, open_to: str = "auto") -> Newcomer:
        """A new peer that chooses its stage: "auto" any, "stage" a block stage."""
        self._newcomers += 1
        name = PeerId(f"n{self.seed}-{self._newcomers:03d}")
        comer = self.world.hosts[name] = Newcomer(self, name, open_to)
        return comer

    def intrude(self) -> Stranger:
        """A stranger that would end the run."""
        name = PeerId(f"0-stranger-{len(self.strangers)}")
        self.strangers.add(name)
        made = self.world.hosts[name] = Stranger(self, name)
        return made

    def host(self, comer: Newcomer, stage: int) -> None:
        """It begins to host what it has chosen."""
        slowness = 1.0 + (self.setup.unequal - 1.0) * self.world.rng.random()
        peer = SimPeer(self, comer.name, stage, slowness, comer.open_to)
        self.peers[comer.name] = self.world.hosts[comer.name] = peer
        peer.boot(choosing=comer.choosing)

    def read(self, change: str) -> Rules:
        """A change as peers read it. Raises Refused for what the owner has not signed."""
        if not change:
            return Rules(self.setup.cell, self.setup.outer)
        if change not in self.changes:
            raise Refused("not a change that the owner signed for this run", "")
        return self.changes[change]

    def facts_for(self, peer: SimPeer) -> RunFacts:
        """What a leader at this peer plans with."""
        return replace(self.facts, recall=peer.labour.recall)

    def honest(self, peer: PeerId) -> bool:
        return peer not in self.liars and peer not in self.strangers

    def calm(self) -> bool:
        """No fault lasts."""
        return not self.troubles and not self.links.walls and not self.liars

    def move(self, peer: SimPeer, stage: int) -> str | None:
        """A peer is asked to change its stage, or does by itself; it does, as a new life."""
        stages = able(peer.open_to, self.setup.stages)
        if stage == peer.stage or stage not in stages or peer.leaving:
            return "it stays"
        self.watch.count("moves")
        peer.leave(stage)
        return None

    def left(self, peer: SimPeer, to: int | None) -> None:
        """A peer that has drained ends its process, or begins a new one at another stage."""
        self.world.kill(peer)
        if to is None:
            self.directory.withdraw(peer.name, self.world.now, peer.wall)
            self.watch.note(f"{peer.name} has left")
        else:
            self.watch.note(f"{peer.name} has moved to {to}")
            peer.stage = to
            peer.boot()

    # ----------------------------------------------------------- what is to be seen

    def live(self, stage: int | None = None) -> list[SimPeer]:
        """Peers whose process runs, in PeerId order."""
        return [
            p
            for _, p in sorted(self.peers.items())
            if p.alive and (stage is None or p.stage == stage)
        ]

    def chief(self) -> SimPeer | None:
        """The leader that has committed last, or else any."""
        for _, _, _, name in reversed(self.watch.commits[-1:]):
            if self.peers[name].alive and self.peers[name].leader is not None:
                return self.peers[name]
        return next((p for p in self.live(ENDS) if p.leader is not None), None)

    def spare(self, peer: SimPeer) -> bool:
        """Whether somebody else alive holds what this peer's stage needs."""
        cell = [p for p in self.live(peer.stage) if p.ready and self.honest(p.name)]
        newest = max((p.member.holds for p in cell), default=0)
        others = [p for p in cell if p is not peer and not p.leaving and p.member.holds >= newest]
        # Where somebody lies, the honest must stay the majority: a cell believes what most of it
        # say.
        lying = sum(p.name in self.liars for p in self.live(peer.stage))
        return len(others) > lying


def facts_of(setup: Setup, scheduler: SchedulerSettings) -> RunFacts:
    """What every leader of this swarm plans with, from the same pure functions as the daemon's."""
    order = SampleOrder(1, 0)

    def place(
        stage: int, cell: Sequence[tuple[PeerId, float]], previous: Mapping[str, PeerId] | None
    ) -> dict[str, PeerId]:
        names = setup.names[stage]
        mine = {n: previous[n] for n in names if n in previous} if previous else {}
        return dict(assign(setup.parts[stage], cell, mine or None))

    def lay(
        ends: Sequence[tuple[PeerId, float]],
        stages: Mapping[int, Sequence[tuple[PeerId, float]]],
        samples: Sequence[tuple[int, ...]],
    ) -> tuple[Path, ...]:
        return assign_paths(sorted(quotas(len(samples), list(ends)).items()), stages, samples)

    def sampler(cursor: Cursor) -> Sampler:
        s = Sampler(order)
        s.restore({"next": cursor[0], "returned": list(cursor[1])})
        return s

    def cursor(s: Sampler) -> Cursor:
        state = s.state()
        return state["next"], tuple(state["returned"])

    sizes = {stage: {p.name: p.bytes for p in parts} for stage, parts in setup.parts.items()}

    def meet(settings: OuterSettings) -> Meetings | None:
        return Meetings(settings, sizes, 0, setup.epochs) if settings.every else None

    return RunFacts(
        stages=setup.stages,
        epochs=setup.epochs,
        target_batch=setup.micro_batches * setup.micro_batch,
        micro_batch=setup.micro_batch,
        min_replicas=setup.min_replicas,
        epoch_timeout_s=setup.epoch_timeout_s,
        round_timeout_s=setup.round_timeout_s,
        eval_every=setup.eval_every,
        assign=place,
        assign_paths=lay,
        router=lambda: Router(scheduler, setup.stages),
        tensor=setup.activation,
        sizes=tuple(sum(p.bytes for p in setup.parts[s]) for s in range(setup.stages + 1)),
        sampler=sampler,
        cursor=cursor,
        sequence=setup.tokens // setup.micro_batch,
        rebalance_every_s=setup.rebalance_every_s,
        cell=setup.cell,
        spare=0 if setup.cell else setup.stages - scheduler.hops(setup.stages),
        meetings=meet(setup.outer),
        meet=meet,
    )
