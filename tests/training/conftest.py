"""One cell of a stage in one process: real rounds, real state over gRPC on loopback, made-up
gradients."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.averaging.exchange.service import CellRound
from node.averaging.settings import AveragingSettings
from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.service import StateService
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore
from node.consensus.rules import Rules
from node.core.clock import SystemClock
from node.core.ids import PeerId
from node.core.journey import Hop, Plan, PlanMember, lineage_after
from node.core.journey import Path as Way
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.settings import TrainingSettings
from node.optim.owner import Owner
from node.optim.ownership import assign
from node.optim.parts import parts_of
from node.optim.settings import OptimSettings
from node.optim.state_replica import Spares
from node.outer.window import outer_of
from node.pipeline.frames import FrameShape
from node.pipeline.settings import PipelineSettings
from node.stage.engines import Engines, PipelineMeter
from node.stage.runtime import StageRuntime
from node.stage.state import StageState
from node.stage.state_import import StateImport
from node.telemetry.events import Event, Journal
from node.telemetry.metrics import Metrics
from node.wire.tensors import dtype_of
from testbed.fakes.memory_net import MemoryNet
from testbed.reference.swarm import step_all

LEADER = PeerId("leader")
OPTIM = OptimSettings(warmup=0)
SHAPES = {"layers.0.a": (8, 8), "layers.0.b": (8, 6), "layers.0.norm": (8,), "layers.1.a": (8, 8)}
TOKENS = 10
EPOCHS = 100


class Block(nn.Module):
    """A few parameters with the names of a stage's; always the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            self.register_parameter(
                name.replace(".", "_"), nn.Parameter(torch.randn(shape, generator=g))
            )

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter([(name, getattr(self, name.replace(".", "_"))) for name in SHAPES])


def gradient(peer: str, epoch: int, name: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(map(ord, f"{peer}{name}")) * 1000 + epoch)
    return torch.randn(SHAPES[name], generator=g) * TOKENS


def mean(givers: Sequence[str], epoch: int) -> dict[str, torch.Tensor]:
    return {
        n: sum(gradient(p, epoch, n) for p in sorted(givers)) / (TOKENS * len(givers))
        for n in SHAPES
    }  # pyright: ignore


class Gradients:
    """Replacement for the pipeline: every epoch has gradients at once."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.settings = PipelineSettings()
        self.shape = FrameShape(1, 1, 1, "fp32", 1)
        self.micro_batches = 1
        self.computed = 1.0
        self.clock = SystemClock()

    def reset(self, epoch: int) -> None: ...

    def set_plan(self, plan: Plan) -> None: ...

    async def receipts(self, epoch: int, dropped: Sequence[int]) -> None: ...

    async def take_gradients(self, epoch: int) -> tuple[dict[str, torch.Tensor], int]:
        return {n: gradient(self.peer, epoch, n) for n in SHAPES}, TOKENS


class Peer:
    def __init__(
        self, rig: "Rig", name: str, every: int, buddy_every: int, service: type[StateService]
    ) -> None:
        self.name = name
        self.me = PeerId(name)
        self.transport = rig.net.transport(name)
        self.journal = Journal()
        metrics = Metrics()
        self.cell = CellRound(self.transport, AveragingSettings(round_timeout_s=rig.deadline_s))
        self.store = CheckpointStore(rig.home / name, CheckpointSettings(0.0, every), "run")
        self.owner = Owner(rig.optim, EPOCHS)
        self.heavy = ThreadPoolExecutor(1)
        self.pipeline = Gradients(name)
        engines = Engines(
            self.transport,
            self.pipeline,
            self.cell,
            self.owner,
            self.store,
            self.heavy,  # type: ignore[arg-type]
            self.journal,
            metrics,
            PipelineMeter(self.journal, metrics),
        )
        self.errors: list[BaseException] = []
        self.work = StageRuntime(
            StageState(Block().to(dtype_of(rig.optim.parameters)), 1),
            engines,
            TrainingSettings(buddy_every=buddy_every),
            rig.optim,
            TOKENS,
            self.me,
            lambda name, error: self.errors.append(error),
            outer_of(rig.outer),
            rig.read,
        )
        self.state = service(
            self.transport, self.work, CheckpointSettings(), on_served=self.work.state_export.served
        )
        self.plan: Plan | None = None

    def events(self, kind: str) -> list[Event]:
        return [e for e in self.journal.recent() if e.kind == kind]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in self.work.stage.parameters().items()}

    @property
    def anchored(self) -> OuterState:
        """Anchor and outer momentum; there must be some."""
        assert self.work.anchor.state is not None
        return self.work.anchor.state

    @property
    def taking(self) -> StateImport:
        """Import of the state that this peer takes over."""
        return self.work.state_export.taking

    @property
    def spares(self) -> Spares:
        """This peer's copies of others' state."""
        return self.work.state_export.spares

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        return {n: self.owner.state(n) for n in self.owner.names()}

    async def close(self) -> None:
        await self.work.close()
        await self.cell.close()
        await self.transport.close()
        self.heavy.shutdown()


def shared(a: Any, b: Any, c: Any = None) -> dict[str, Any]:
    """Owners of the parts: two parts for `a`, one each for `b` and `c`; without `c`, two for
    `b`."""
    return {"layers.0.a": a, "layers.0.norm": a, "layers.0.b": b, "layers.1.a": c or b}


def same(got: Any, expected: Any, atol: float = 2e-6, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


class Rig:
    """Peers of stage 1, and the leader's part: consecutive plans, and rounds that begin and are
    repaired."""

    shapes = SHAPES
    mean = staticmethod(mean)
    leader = LEADER
    optim = OPTIM
    outer = OuterSettings()
    deadline_s = 8.0

    def read(self, change: str) -> Rules:
        """Rules of a change: the rig's own for "", deltas for any other text."""
        return (
            Rules(1, OuterSettings("butterfly", "deltas", "nesterov", window_s=60.0), 1, change)
            if change
            else Rules(1, self.outer)
        )

    def __init__(self, home: Path) -> None:
        self.net = MemoryNet()
        self.home = home
        self.peers = dict[str, Peer]()
        self.term = 0

    async def add(
        self,
        *names: str,
        every: int = 0,
        buddy_every: int = 2,
        service: type[StateService] = StateService,
    ) -> list[Peer]:
        made = [Peer(self, name, every, buddy_every, service) for name in names]
        for peer in made:
            self.peers[peer.name] = peer
            await peer.transport.start()
        return made

    def plan(
        self,
        members: Sequence[Peer],
        owners: Mapping[str, Peer],
        after: Plan | None = None,
        *,
        moved: Mapping[str, Peer] | None = None,
        again: bool = False,
        listeners: Sequence[Peer] = (),
        **more: Any,
    ) -> Plan:
        """The next plan after ``after``; with ``again`` it starts from the same version."""
        self.term += 1
        epoch = 0
        history = ""
        tokens = 0
        if after is not None:
            epoch = after.epoch
            history = after.lineage
            tokens = after.tokens
        if after is not None and not again:
            epoch = epoch + 1
            history = lineage_after(after, ())
            tokens += TOKENS * len(after.paths)
        all_members = tuple(PlanMember(p.me, 1, 1.0, True) for p in members) + tuple(
            PlanMember(p.me, 1, 1.0, False) for p in listeners
        )
        paths = tuple(Way(i, LEADER, (i,), (Hop(1, p.me),)) for i, p in enumerate(members))
        return dataclasses.replace(
            Plan(
                epoch,
                self.term,
                LEADER,
                all_members,
                paths,
                {n: p.me for n, p in owners.items()},
                {n: p.me for n, p in (moved or {}).items()},
                {},
                10.0,
                (SampleClass(0, 0, epoch * 4),),
                tokens=tokens,
                lineage=history,
            ),
            **more,
        )

    def round(self, plan: Plan, attempt: int = 0, **more: Any) -> ev.RoundArrived:
        facts: dict[str, Any] = {
            "dead": (),
            "owners": {},
            "sources": (),
            "dropped": (),
            "deadline_s": self.deadline_s,
            "tally": ev.EpochTally(TOKENS * len(plan.paths)),
            **more,
        }
        return ev.RoundArrived(LEADER, plan.epoch, plan.term, plan.hash, attempt, **facts)

    async def begin(self, plan: Plan, *peers: Peer) -> None:
        for p in peers:
            if (
                p.plan is not None
                and p.work.stage.version == plan.base
                and p.work.stage.settled != plan.base
            ):
                await p.work.settle(plan.epoch, plan)
            elif (
                p.plan is not None
                and p.work.stage.settled == plan.base
                and p.work.stage.version != plan.base
            ):
                await p.work.go_to(plan.base, "roll-back")
            p.plan = plan
            await p.work.begin(plan, not plan.member(p.me).current)

    async def begun(
        self,
        members: Sequence[Peer],
        owners: Mapping[str, Peer],
        after: Plan | None = None,
        **more: Any,
    ) -> Plan:
        """Make the next plan and let its members begin it."""
        plan = self.plan(members, owners, after, **more)
        await self.begin(plan, *members)
        return plan

    async def average(
        self, plan: Plan, *peers: Peer, attempt: int = 0, **more: Any
    ) -> list[ev.RoundEnded]:
        r = self.round(plan, attempt, **more)

        async def one(p: Peer) -> ev.RoundEnded:
            member = plan.member(p.me)
            ended = await p.work.average(plan, r, member is not None and not member.current)
            if not ended.missing:
                await p.work.adopt(plan)
            return ended

        return list(await asyncio.gather(*(one(p) for p in peers)))

    async def averaged(self, plan: Plan, *peers: Peer, **more: Any) -> None:
        """Average, and assert that no peer misses a part."""
        for ended in await self.average(plan, *peers, **more):
            assert not ended.missing, ended

    async def epoch(self, plan: Plan, *peers: Peer) -> Plan:
        """Begin and finish a plan in which nothing goes wrong; returns the plan."""
        await self.begin(plan, *peers)
        await self.averaged(plan, *peers)
        return plan

    async def train(
        self,
        members: Sequence[Peer],
        owners: Mapping[str, Peer],
        epochs: int,
        after: Plan | None = None,
    ) -> Plan:
        """Train `epochs` epochs without trouble and return the last plan."""
        for _ in range(epochs):
            after = self.plan(members, owners, after)
            await self.epoch(after, *members)
            await self.copied(*members)
        return after

    async def trained(
        self, names: str, epochs: int, alone: "Alone | None" = None, **settings: Any
    ) -> tuple[Any, ...]:
        """New peers named by these letters that share the parts, and their plan after `epochs`
        epochs, which `alone` has done too."""
        peers = await self.add(*names, **settings)
        owners = shared(peers[0], peers[min(1, len(peers) - 1)], peers[-1])
        plan = await self.train(peers, owners, epochs)
        if alone is not None:
            alone.epochs([names] * epochs)
        return (*peers, plan)

    def placed(self, peers: Sequence[Peer], before: Mapping[str, Any] | None = None) -> Any:
        """Owners that a leader would assign."""
        was = {n: PeerId(getattr(p, "me", p)) for n, p in (before or {}).items()} or None
        owners = assign(parts_of(SHAPES, self.optim), [(p.me, 1.0) for p in peers], was)
        return {name: self.peers[peer] for name, peer in owners.items()}

    @asynccontextmanager
    async def again(self) -> "AsyncIterator[Rig]":
        """A rig that starts the swarm again, with peers that find the disks of this rig's."""
        made = Rig(self.home)
        made.optim = self.optim
        try:
            yield made
        finally:
            await made.close()

    async def copied(self, *peers: Peer) -> None:
        """Wait until no copy of optimizer state and no checkpoint is under way."""
        for p in peers:
            await p.work.local_checkpoints.saved()
            copying = p.work.state_export._copying
            if copying is not None:
                await asyncio.wait([copying[1]])

    async def close(self) -> None:
        for peer in self.peers.values():
            await peer.close()


class Alone:
    """One process that owns everything: the parameters that the cell should have learned, and the
    state after each epoch."""

    def __init__(self, optim: OptimSettings = OPTIM) -> None:
        self.optim = optim
        block = Block().to(dtype_of(optim.parameters))
        self.parameters = {n: t.detach().clone() for n, t in block.named_parameters()}
        self.owner = Owner(optim, EPOCHS)
        self.saved: dict[int, dict[str, dict[str, torch.Tensor]]] = {}

    def epochs(self, givers: Sequence[Sequence[str]]) -> None:
        """Train from the first epoch on; `givers`: peers that give gradients, for each epoch."""
        for epoch, names in enumerate(givers):
            self.parameters = step_all(self.owner, self.parameters, mean(names, epoch), epoch)
            self.saved[epoch + 1] = {
                n: {k: t.clone() for k, t in self.owner.state(n).items()}
                for n in self.owner.names()
            }

    def stepped(
        self, givers: Sequence[str], epoch: int, old: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Parameters after one more `epoch`, which are returned and not kept. `old`: version of the
        state that a part's owner had (0: none), where it was not the epoch's own."""
        owner = Owner(self.optim, EPOCHS)
        gradients = mean(givers, epoch)
        for name, shape in SHAPES.items():
            if version := old.get(name, epoch):
                owner.load_state(name, shape, self.saved[version][name], version - 1)
        return {n: owner.step(n, t, gradients[n], epoch) for n, t in self.parameters.items()}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    errors = [e for p in made.peers.values() for e in p.errors]
    await made.close()
    assert not errors


@pytest.fixture
def alone() -> Alone:
    return Alone()
