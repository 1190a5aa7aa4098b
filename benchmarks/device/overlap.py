"""Throughput of a block stage on a device that copies slowly, in micro-batches a second: with
copies concurrent to computations, and in the same run with synchronous lanes.

Part 3 of ``python -m benchmarks.device``. An ends peer and a block stage train in one process by
real frames over gRPC; pipelines, device threads, arithmetic and codec are taken from the product.
The device of the stage is a double (``testbed/fakes/slow_lanes.py``): 20 ms for the computations of
a job, 10 ms for a copy each way. A micro-batch is two jobs, forward and backward, so computing
alone allows 25 of them a second. Figures are of the middle of an epoch, when the window is full.
"""

import asyncio
import pathlib
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Report
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.model.lanes import Lanes
from node.model.settings import ModelSettings
from node.model.stages import build
from node.pipeline.device import DeviceThread
from node.pipeline.events import MicroBatchDone
from node.pipeline.service import Pipeline
from node.pipeline.settings import PipelineLimits, PipelineSettings
from testbed.fakes.memory_net import MemoryNet
from testbed.fakes.slow_lanes import SlowLanes

ITEM = "3"
COMPUTE_S = 0.020
COPY_S = 0.010
LEAST = 0.9
"""Least share of the micro-batches a second that computing alone allows."""
MODEL = ModelSettings(layers=1, d_model=64, heads=2, kv_heads=1, d_ff=96, vocab=64, seq_len=32)
IN_FLIGHT = 8
MICRO_BATCHES = 96
EDGE = 16
"""Micro-batches at the beginning and at the end of an epoch that are not measured."""
WIRES = ("bf16", "int8")
WAIT_S = 120.0


class Silent:
    """Telemetry that nobody reads."""

    def spent(self, kind: str, seconds: float) -> None:
        pass

    def emit(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        pass


async def paced(wire: str, lanes: Lanes, count: int) -> float:
    """Micro-batches a second of a block stage with these lanes."""
    settings = PipelineSettings(stages=1, micro_batch=4, wire=wire, forward_timeout_s=30.0)
    net = MemoryNet()
    origin = PeerId("ends")
    stage = PeerId("stage")
    paths = tuple(
        Path(i, origin, tuple(range(4 * i, 4 * i + 4)), (Hop(1, stage),)) for i in range(count)
    )
    members = (PlanMember(origin, ENDS, 1.0), PlanMember(stage, 1, 1.0))
    plan = Plan(1, 1, origin, members, paths, {}, deadline_s=WAIT_S)
    pipelines: list[Pipeline] = []
    done: list[float] = []

    def finished(result: MicroBatchDone) -> None:
        if not result.counted:
            raise RuntimeError(f"micro-batch {result.index} does not count")
        done.append(perf_counter())

    try:
        for number, (peer, found) in enumerate(((origin, Lanes()), (stage, lanes))):
            transport = net.transport(peer)
            pipelines.append(
                Pipeline(
                    transport,
                    build(MODEL, 1, number),
                    DeviceThread(peer, lanes=found),
                    settings,
                    PipelineLimits(in_flight=IN_FLIGHT),
                    stage=number,
                    model=MODEL,
                    telemetry=Silent(),
                )
            )
            await transport.start()
        for pipeline in pipelines:
            pipeline.set_plan(plan)
        await asyncio.wait_for(pipelines[0].origin.run(paths, batch_of, finished), WAIT_S)
    finally:
        for pipeline in pipelines:
            await pipeline.close()
        await net.close()
        for pipeline in pipelines:
            pipeline.host.device.close()
    middle = done[EDGE:-EDGE]
    return (len(middle) - 1) / (middle[-1] - middle[0])


async def batch_of(path: Path) -> Callable[[], tuple[Tensor, Tensor]]:
    """Random tokens of a path."""
    return partial(_batch, path.index)


def _batch(index: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(index + 1)
    tokens = torch.randint(0, MODEL.vocab, (4, MODEL.seq_len + 1), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rows(report: Report, root: pathlib.Path | None = None, quick: bool = False) -> None:
    """Measure and add the rows."""
    count = MICRO_BATCHES
    if quick:
        count = 3 * EDGE
    allowed = 1 / (2 * COMPUTE_S)
    about = f"computing {COMPUTE_S * 1000:g} ms, copies {COPY_S * 1000:g} ms each way"
    for wire in WIRES:
        rates = {
            beside: asyncio.run(paced(wire, SlowLanes(COMPUTE_S, COPY_S, beside=beside), count))
            for beside in (False, True)
        }
        before = rates[False] / allowed
        report.add(
            f"{ITEM} {wire}, {about}: micro-batches a second over those that computing alone "
            "allows, every step in line",
            round(before, 3),
            "x",
            f"{rates[False]:.1f} of {allowed:.1f} a second",
        )
        share = rates[True] / allowed
        report.add(
            f"{ITEM} {wire}, {about}: micro-batches a second over those that computing alone "
            "allows, copies beside",
            round(share, 3),
            "x",
            f"{rates[True]:.1f} of {allowed:.1f} a second",
            f">= {LEAST}",
            share >= LEAST,
        )
