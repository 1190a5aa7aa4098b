"""A small swarm in one process: every peer has its own device thread and a real gRPC server on
loopback."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.model.documents import ends_of, lengths_of
from node.model.settings import ModelSettings
from node.model.shapes import layers_of
from node.model.stages import build
from node.pipeline.device import DeviceThread
from node.pipeline.events import MicroBatchDone
from node.pipeline.service import Pipeline
from node.pipeline.settings import PipelineLimits, PipelineSettings
from testbed.fakes.memory_net import MemoryNet
from testbed.reference.unsplit import Unsplit

torch.set_num_threads(1)

ORIGIN = PeerId("s0a")
STAGES = 3

MODEL = ModelSettings(layers=3, d_model=16, heads=2, kv_heads=1, d_ff=24, vocab=31, seq_len=8)
DEEP = replace(MODEL, layers=4, ends_layers=1)
"""The ends hold the first layer."""
SETTINGS = PipelineSettings(stages=3, micro_batch=4, wire="fp32", forward_timeout_s=5.0)


def make_plan(
    batches: int,
    replicas: int,
    stages: int = STAGES,
    dice: random.Random | None = None,
    term: int = 1,
) -> Plan:
    """Plan of `batches` micro-batches over `stages` stages, replicas in turns. `dice` makes a path
    leave one block stage out or visit its stages in another order, now and then."""
    peers = {s: [PeerId(f"s{s}{'abc'[r]}") for r in range(replicas)] for s in range(1, stages + 1)}
    members = (PlanMember(ORIGIN, 0), *(PlanMember(p, s) for s, ps in peers.items() for p in ps))
    paths = []
    for i in range(batches):
        hops = [Hop(s, ps[(i + s) % replicas]) for s, ps in peers.items()]
        if dice is not None and dice.random() < 0.3:
            hops.pop(dice.randrange(len(hops)))
        if dice is not None and dice.random() < 0.3:
            dice.shuffle(hops)
        paths.append(Path(i, ORIGIN, (i,), tuple(hops)))
    return Plan(3, term, ORIGIN, members, tuple(paths), {})


class Ear:
    """Telemetry that remembers."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.events: list[str] = []

    def spent(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def emit(self, kind: str, text: str, level: str = "info", **fields: object) -> None:
        self.events.append(kind)


def stage_of(name: str) -> int:
    return int(name[1])


class Swarm:
    """Peers are called s<stage><letter>: "s0a" is an ends peer, "s2b" the second replica of stage
    2."""

    def __init__(self, model: ModelSettings = MODEL, settings: PipelineSettings = SETTINGS) -> None:
        self.net = MemoryNet()
        self.model = model
        self.settings = settings
        self.pipelines: dict[str, Pipeline] = {}
        self.ears: dict[str, Ear] = {}
        self.dead: set[str] = set()
        self.restore: Callable[[], None] = lambda: None
        self.results: list[MicroBatchDone] = []
        self.unsplit = Unsplit(model)

    async def add(
        self, name: str, limits: PipelineLimits | None = None, **extra: object
    ) -> Pipeline:
        transport = self.net.transport(name)
        stage = stage_of(name)
        ear = Ear()
        pipeline = Pipeline(
            transport,
            build(self.model, self.settings.stages, stage),
            DeviceThread(name),
            self.settings,
            limits or PipelineLimits(in_flight=4),
            stage=stage,
            model=self.model,
            telemetry=ear,
            **{"plan_wait_s": 1.0, **extra},  # pyright: ignore[reportArgumentType]
        )
        await transport.start()
        self.pipelines[name] = pipeline
        self.ears[name] = ear
        return pipeline

    async def fill(self, replicas: int = 2, **extra: object) -> "Swarm":
        await self.add("s0a", **extra)  # pyright: ignore[reportArgumentType]
        for stage in range(1, self.settings.stages + 1):
            for letter in "abc"[:replicas]:
                await self.add(f"s{stage}{letter}", **extra)  # pyright: ignore[reportArgumentType]
        return self

    def plan(
        self,
        count: int,
        epoch: int = 3,
        choose: Callable[[int, int], str] | None = None,
        deadline_s: float = 30.0,
    ) -> Plan:
        """A plan of `count` micro-batches, spread over the replicas; `choose(index, stage)` names a
        replica's letter."""
        letters = {
            s: [n[2] for n in self.pipelines if stage_of(n) == s]
            for s in range(1, self.settings.stages + 1)
        }

        def hop(index: int, stage: int) -> Hop:
            letter = choose(index, stage) if choose else letters[stage][index % len(letters[stage])]
            return Hop(stage, PeerId(f"s{stage}{letter}"))

        size = self.settings.micro_batch
        paths = tuple(
            Path(
                i,
                PeerId("s0a"),
                tuple(range(i * size, (i + 1) * size)),
                tuple(hop(i, s) for s in sorted(letters)),
            )
            for i in range(count)
        )
        members = tuple(PlanMember(PeerId(n), stage_of(n), 1.0) for n in sorted(self.pipelines))
        return Plan(epoch, 1, PeerId("s0a"), members, paths, {}, deadline_s=deadline_s)

    def batch(self, path: Path) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(path.index + 1)
        tokens = torch.randint(
            0, self.model.vocab, (len(path.samples), self.model.seq_len + 1), generator=made
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    async def fetch(self, path: Path) -> Callable[[], tuple[Tensor, Tensor]]:
        return partial(self.batch, path)

    def adopt(self, plan: Plan) -> Plan:
        """Put the plan in force at every peer and return it."""
        for pipeline in self.pipelines.values():
            pipeline.set_plan(plan)
        return plan

    async def run(self, plan: Plan, counted: bool | None = None) -> dict[int, MicroBatchDone]:
        """Run all paths of s0a and return the results by micro-batch.

        Fails unless every micro-batch is reported exactly once, and each result's `counted` is as
        given, if it is given.
        """
        self.results = []
        await asyncio.wait_for(
            self.pipelines["s0a"].origin.run(plan.paths, self.fetch, self.results.append), 60
        )
        assert sorted(r.index for r in self.results) == [p.index for p in plan.paths]
        await self.settle()
        assert counted is None or {r.counted for r in self.results} == {counted}
        return {r.index: r for r in self.results}

    async def settle(self) -> None:
        """Wait for every live peer's tasks: the origin has its results before its neighbours have
        the last receipts."""
        while under_way := [
            t
            for n, pipeline in self.pipelines.items()
            if n not in self.dead
            for t in pipeline.host.tasks._tasks
        ]:
            await asyncio.wait(under_way)

    async def kill(self, *names: str) -> None:
        """Kill peers as by SIGKILL: they answer nothing and contribute nothing to the round."""
        self.dead.update(names)
        for name in names:
            await self.net.kill(PeerId(name))

    async def gradients(self, epoch: int = 3) -> tuple[dict[str, Tensor], dict[int, int]]:
        """Gradient sums over the living replicas of each stage, and tokens by stage."""
        sums: dict[str, Tensor] = {}
        tokens: dict[int, int] = {}
        for name, pipeline in self.pipelines.items():
            if name in self.dead:
                continue
            grads, n = await pipeline.take_gradients(epoch)
            tokens[stage_of(name)] = tokens.get(stage_of(name), 0) + n
            for key, g in grads.items():
                sums[key] = sums[key] + g if key in sums else g.clone()
        return sums, tokens

    def hidden(self, tokens: Tensor, *visited: int, lengths: tuple[int, ...] = ()) -> Tensor:
        """Hidden states of the model in one piece before the head, over the layers of the ends and
        of these block stages."""
        h = self.unsplit.ends.embed(tokens)
        blocks = self.unsplit.blocks
        for stage in (ENDS, *visited):
            for layer in layers_of(self.model, self.settings.stages, stage):
                h = blocks.model.layers[str(layer)](h, blocks.rope, lengths)
        return h

    def loss(self, path: Path) -> tuple[Tensor, int]:
        """Loss of a micro-batch in the model in one piece, over the stages of its path in their
        order; documents are kept apart where targets are missing."""
        tokens, targets = self.batch(path)
        ends = ends_of(targets)
        lengths = lengths_of(ends, *tokens.shape) if ends else ()
        h = self.hidden(tokens, *(hop.stage for hop in path.hops), lengths=lengths)
        return self.unsplit.ends.loss(h, targets)

    def reference(self, plan: Plan) -> tuple[dict[str, Tensor], float]:
        """Gradient sums and loss sum of the model in one piece."""
        self.unsplit.zero_grad(set_to_none=True)
        total = 0.0
        for path in plan.paths:
            loss, _ = self.loss(path)
            loss.backward()
            total += loss.item()
        return {
            n: p.grad.clone() for n, p in self.unsplit.named_parameters() if p.grad is not None
        }, total

    async def check(self, plan: Plan, skip_stages: tuple[int, ...] = ()) -> None:
        """Assert that every gradient equals the model's in one piece, except at `skip_stages`,
        where a dead replica took some with it."""
        mine, tokens = await self.gradients()
        theirs, total = self.reference(plan)
        names = {
            n: s
            for s in range(self.settings.stages + 1)
            for n, _ in build(self.model, self.settings.stages, s).named_parameters()
        }
        each = {p.index: int((self.batch(p)[1] >= 0).sum()) for p in plan.paths}
        for name, wanted in theirs.items():
            if names[name] not in skip_stages:
                torch.testing.assert_close(
                    mine[name], wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
        for stage, n in tokens.items():
            most = sum(
                each[path.index]
                for path in plan.paths
                if stage in (0, *(hop.stage for hop in path.hops))
            )
            assert n == most if stage not in skip_stages else n <= most
        assert sum(r.loss_sum for r in self.results) == pytest.approx(total, rel=1e-5)

    async def close(self) -> None:
        self.restore()
        for pipeline in self.pipelines.values():
            await pipeline.close()
        await self.net.close()
        for pipeline in self.pipelines.values():
            pipeline.host.device.close()


async def begun(filling: Awaitable[Swarm], count: int, **how: Any) -> tuple[Swarm, Plan]:
    """A swarm in which all peers have adopted a plan of `count` micro-batches, and that plan."""
    swarm = await filling
    return swarm, swarm.adopt(swarm.plan(count, **how))


@pytest.fixture
async def make_swarm() -> AsyncIterator[Callable[..., Swarm]]:
    made: list[Swarm] = []

    def make(model: ModelSettings = MODEL, **settings: object) -> Swarm:
        swarm = Swarm(model, replace(SETTINGS, **settings))  # pyright: ignore[reportArgumentType]
        made.append(swarm)
        return swarm

    yield make
    for swarm in made:
        await swarm.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let living peers answer pings as late as a busy machine lets them."""
    monkeypatch.setattr("node.inference.forward_router.PING_S", 60.0)
    monkeypatch.setattr("node.inference.forward_router.WATCH_S", 60.0)


def dies_at(swarm: Swarm, name: str, kind: type, way: object = None, nth: int = 1) -> asyncio.Event:
    """Kill ``name`` when its machine is about to hear the ``nth`` event of ``kind``; from then on
    it does nothing at all."""
    pipeline = swarm.pipelines[name]
    died = asyncio.Event()
    seen = [0]
    handle = pipeline.machine.handle

    def mortal(event: object, now: float) -> list[object]:
        if type(event) is kind and way in (None, getattr(event, "way", None)):
            seen[0] += 1
        if seen[0] >= nth and not died.is_set():
            died.set()
            swarm.dead.add(name)
            pipeline.host.tasks.spawn(swarm.net.kill(PeerId(name)), "death")
        if died.is_set():
            raise asyncio.CancelledError
        return handle(event, now)  # pyright: ignore[reportArgumentType, reportReturnType]

    pipeline.machine.handle = mortal  # pyright: ignore[reportAttributeAccessIssue]
    swarm.restore = lambda: setattr(pipeline.machine, "handle", handle)
    return died
