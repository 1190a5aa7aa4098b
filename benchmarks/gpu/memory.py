"""Part d: memory planned for a block stage beside the most that its tensors took in two epochs.

A stage is trained as a daemon trains it, without a network: micro-batches in flight, shares that
wait until they count, the sum, the owner's step in micro-groups, both versions in place.
"""

from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.report import Report
from node.app.capacity import AMPLE, check_memory
from node.averaging.exchange.events import micro_groups
from node.config import NodeConfig
from node.core.journey import Version
from node.core.numbers import human
from node.manifest import Manifest, amended
from node.model.cost import RECOMPUTE, Verdict, uncounted_shares
from node.model.stages import Blocks, Ends, build
from node.optim.owner import Owner
from node.pipeline.gradients import GradientSum, Share
from node.pipeline.settings import PipelineLimits
from node.pipeline.visit_buffers import StageMath
from node.stage.state import StageState
from testbed.models.visits import arrived, read

SHAPES: dict[str, dict[str, int]] = {
    "wide": {"layers": 2, "d_model": 2048, "d_ff": 8192, "heads": 16, "kv_heads": 16,
             "seq_len": 256, "sequences": 2},
    "long": {"layers": 4, "d_model": 1024, "d_ff": 4096, "heads": 16, "kv_heads": 8,
             "seq_len": 4096, "sequences": 2},
    "even": {"layers": 6, "d_model": 768, "d_ff": 3072, "heads": 12, "kv_heads": 12,
             "seq_len": 512, "sequences": 8},
}  # fmt: skip
TINY: dict[str, dict[str, int]] = {
    "wide": {"layers": 2, "d_model": 128, "d_ff": 512, "heads": 4, "kv_heads": 4,
             "seq_len": 16, "sequences": 2},
    "long": {"layers": 2, "d_model": 64, "d_ff": 256, "heads": 4, "kv_heads": 2,
             "seq_len": 256, "sequences": 2},
    "even": {"layers": 3, "d_model": 64, "d_ff": 256, "heads": 4, "kv_heads": 4,
             "seq_len": 64, "sequences": 4},
}  # fmt: skip
EPOCHS = 2
IN_FLIGHT = 4
MICRO_BATCHES = 6
LOOSE = 2.0
"""Planned over measured: beyond, a stage that would fit is refused."""


def rows(report: Report, device: str, rehearse: bool) -> None:
    """A row for each shape and each setting of recompute."""
    bench = Bench.on(device, rehearse)
    warm, _ = _run(TINY["even"], "off")
    _train(bench, warm, build(warm.model, 1, 1), "off")  # libraries allocate their workspaces
    for name, shape in (TINY if rehearse else SHAPES).items():
        module = build(_run(shape, "off")[0].model, 1, 1)
        for mode in RECOMPUTE:
            manifest, verdict = _run(shape, mode)
            with bench.peak() as most:
                _train(bench, manifest, module, mode)
            ratio = verdict.needed / most[0]
            report.add(
                f"6.d {name}, recompute = {mode}: planned over measured memory of tensors",
                ratio,
                f"ratio; {human(verdict.needed)} planned",
                f"{human(most[0])} measured, {IN_FLIGHT} micro-batches in flight",
                f"1 to {LOOSE:g}",
                holds=1 <= ratio <= LOOSE,
            )


def _run(shape: dict[str, int], mode: str) -> tuple[Manifest, Verdict]:
    """A run with this block stage, and its plan for a GPU."""
    fields: dict[str, Any] = {
        f"model.{key}": value for key, value in shape.items() if key != "sequences"
    }
    manifest = amended(
        Manifest.default_demo(),
        fields
        | {"pipeline.stages": 1, "pipeline.micro_batch": shape["sequences"]}
        | {"training.min_replicas": 1, "optimizer.name": "muon"},
    )
    limits = PipelineLimits(recompute=mode, in_flight=IN_FLIGHT)
    config = NodeConfig(Path("/"), limits=limits)
    return manifest, check_memory(config, manifest, 1, AMPLE, AMPLE)


def _train(bench: Bench, manifest: Manifest, begun: Ends | Blocks, mode: str) -> None:
    m = manifest.model
    sequences = manifest.pipeline.micro_batch
    module = deepcopy(begun).to(bench.device.device)
    state = StageState(module, 1, copies=module.keep_copies())
    owner = Owner(manifest.optimizer, 0)
    math = StageMath(module, "fp32", bench.autocast, recompute=mode)
    sums = GradientSum()
    sizes = {name: parameter.nbytes for name, parameter in state.parameters().items()}
    for epoch in range(EPOCHS):
        sums.reset()
        for share in _shares(bench, math, (sequences, m.seq_len, m.d_model)):
            sums.offer([share], sequences * m.seq_len)
            del share
            sums.drain()
        total, tokens = sums.whole()
        fresh: dict[str, torch.Tensor] = {}
        for group in micro_groups(sizes, manifest.averaging.group_bytes):
            mean = {name: total[name].cpu() / tokens for name in group.names}
            stepped = owner.step_parts(state.parameters(), mean, epoch)
            fresh |= {name: tensor.cpu() for name, tensor in stepped.items()}
        state.adopt(fresh, Version(epoch + 1))
        del fresh, total
        owner.commit(epoch)
        state.settle()


def _shares(bench: Bench, math: StageMath, shape: tuple[int, int, int]) -> Iterator[Share]:
    """The gradients of each micro-batch, when it counts: some wait behind the one in its backward,
    in the place of activations."""
    waiting = deque[Any]()
    made = deque[Share]()
    most = min(IN_FLIGHT, uncounted_shares(1))
    for number in range(MICRO_BATCHES):
        work = arrived(bench.normal(*shape, seed=number))
        math.forward(work)
        work.output = None  # sent, and DONE has come
        waiting.append(work)
        if len(waiting) + len(made) < IN_FLIGHT:
            continue
        made.append(_returned(bench, math, waiting.popleft(), shape))
        if len(made) == most:
            yield made.popleft()
    while waiting:
        made.append(_returned(bench, math, waiting.popleft(), shape))
        if len(made) == most:
            yield made.popleft()
    yield from made


def _returned(bench: Bench, math: StageMath, work: Any, shape: tuple[int, int, int]) -> Share:
    work.gradient = read(bench.normal(*shape))
    math.backward(work)
    share = work.share
    work.free_graph()
    work.share = work.upstream = None
    return share
