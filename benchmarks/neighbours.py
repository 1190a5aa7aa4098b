"""Daemons of one machine with shared memory between them, beside the same daemons without it.

    python -m benchmarks.neighbours [--runs 5] [--epochs 16] [--only 1,2] [--json -]

Part 1: a call that carries a tensor as the pipeline does, of 1 MiB and of 8 MiB: processor time of
both peers together, less that of the same call without a tensor. Part 2: the demo's model on four
daemons, the ends and three block stages: tokens a second, and processor time a token, p2pd not
counted. Runs alternate, so that a slow minute of the machine hits both sides; figures are medians.
Nothing is judged: what memory saves is the share that bytes have in the work, which depends on the
model and the device.
"""

import asyncio
import math
import os
import sys
import time
from functools import partial
from statistics import median
from typing import Any

import grpc

from benchmarks.pipeline import measure_swarm
from benchmarks.report import Report, chosen, command_line
from node.core.ids import PeerId
from node.core.journey import Hop
from node.identity.keys import Identity
from node.pipeline.events import Claim
from node.pipeline.frames import FrameReader, FrameShape, frames, read_chunks
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.handshake import Facts
from node.transport.service import Transport
from node.transport.settings import TransportSettings
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import PipelineServicer, PipelineStub, add_PipelineServicer_to_server

MIB = 1 << 20
WIDTH = 1024
ROWS = {"1 MiB": 256, "8 MiB": 2048}
"""Tokens of a tensor of this size, in fp32."""
CALLS = 48
PARTS = ("1", "2")
NODES = (1, 1, 1, 1)
WAYS = ("off", "auto")
"""Values of ``transport.shared_memory``."""


def main() -> int:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each side")
    parser.add_argument("--epochs", type=int, default=16, help="epochs of a run of part 2")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    args = parser.parse_args()
    parts = chosen(parser, args.only, PARTS)
    report = Report()
    if "1" in parts:
        _tensors(report, args.runs)
    if "2" in parts:
        _swarms(report, args.runs, args.epochs)
    return report.end(args.json)


def _tensors(report: Report, runs: int) -> None:
    spent: dict[tuple[str, str], list[float]] = {}
    for _ in range(runs):
        for way in WAYS:
            for size, seconds in asyncio.run(_spent(way)).items():
                spent.setdefault((way, size), []).append(1000 * seconds)
    for size in ROWS:
        without, within = (median(spent[way, size]) for way in WAYS)
        peer = f"without {without:.2f} ms, median of {runs}"
        report.add(f"1 processor time of {size}", round(within, 2), "ms", peer)
        report.add(f"1 processor time of {size}, of that", round(within / without, 3), "x", peer)


def _swarms(report: Report, runs: int, epochs: int) -> None:
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for run in range(runs):
        for way in WAYS:
            os.environ["TUTTI_TRANSPORT_SHARED_MEMORY"] = way
            measured[way].append(measure_swarm(epochs, NODES))
            print(f"run {run + 1}, {way}: {measured[way][-1]}", file=sys.stderr)
    for name, key, times, unit in (
        ("tokens a second", "tokens_per_s", 1, "tokens/s"),
        ("processor time a token", "cpu_per_token", 1e6, "µs"),
    ):
        without, within = (times * median(run[key] for run in measured[way]) for way in WAYS)
        peer = f"without {without:.4g}, median of {runs}"
        report.add(f"2 {name}", float(f"{within:.4g}"), unit, peer)
        report.add(f"2 {name}, of that", round(within / without, 3), "x", peer)


class _Receiver(PipelineServicer):
    """Servicer that reads the tensor of each call; the head has its shape."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def Forward(self, request_iterator: Any, context: Any) -> None:
        head = (await context.read()).head
        reader = FrameReader(head, tuple(head.tensor.shape), "fp32")
        fetch = partial(self._transport.fetch, self._transport.caller(context))
        await read_chunks(context.read, reader, fetch)
        await context.write(pb.Receipt(verdict=pb.DONE))


async def _spent(way: str) -> dict[str, float]:
    """Seconds of processor time for a tensor of each size."""
    here = _peer(way)
    there = _peer(way)
    try:
        await here.start()
        await there.start()
        here.learn(there.peer_id, there.p2p.addresses())
        while here.sharing.on and not here.sharing.carried:
            await _send(here, there.peer_id, max(ROWS.values()))
        found = {size: await _cost(here, there.peer_id, rows) for size, rows in ROWS.items()}
        empty = await _cost(here, there.peer_id, 0)
        return {size: seconds - empty for size, seconds in found.items()}
    finally:
        await here.close()
        await there.close()


async def _cost(here: Transport, peer: PeerId, rows: int) -> float:
    began = time.process_time()
    for _ in range(CALLS):
        await _send(here, peer, rows)
    return (time.process_time() - began) / CALLS


async def _send(here: Transport, peer: PeerId, rows: int) -> None:
    data = bytes(4 * rows * WIDTH)
    hops = (Hop(0, here.peer_id), Hop(1, peer), Hop(0, here.peer_id))
    claim = Claim(1, "plan", 0, hops, 1)
    shape = FrameShape(1, rows, WIDTH, "fp32", 2)
    leave = partial(here.leave, peer)
    messages = frames(claim, pb.TRAIN, 1.0, (1, rows, WIDTH), data, shape, leave=leave)
    call = PipelineStub(await here.channel(peer)).Forward(messages)
    await call.read()
    if await call.code() is not grpc.StatusCode.OK:
        raise SystemExit("a tensor did not arrive")


def _peer(way: str) -> Transport:
    made = Transport(
        Identity.ephemeral(),
        TransportSettings(host="127.0.0.1", shared_memory=way),
        Journal(),
        Metrics(),
        lambda: Facts("a" * 64, "", "0"),
        lambda peer, hello: math.inf,
    )
    made.established = lambda peer: True
    add_PipelineServicer_to_server(_Receiver(made), made.server)
    return made


if __name__ == "__main__":
    sys.exit(main())
