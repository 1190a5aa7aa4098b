"""Comparison of two optimizer steps over the two ranks of a box: one leaves gradients and state in
pieces, the other gathers everything at rank 0. Figures: equal bits, bytes of each rank, and
milliseconds.

Part 4 of ``python -m benchmarks.device``. The second rank is a process of this benchmark that
carries out the product's commands and also says how many bytes it holds. The step that gathers
everything keeps whole gradients and whole momentum at rank 0 and gives others only matrices to
orthogonalise. Both begin with sums of gradients in pieces and end with whole fresh parameters at
rank 0; they take turns, each process has one thread, and the figures are medians.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.report import Report
from node.core.errors import DeviceLost
from node.core.ids import ENDS
from node.local.groups import Sharded
from node.local.optimizer import CutSteps, CutTensor, RankSteps
from node.local.program import Program
from node.local.rank import Rank
from node.local.ranks import START_S, Ranks
from node.local.stage import LocalStage
from node.local.step import TensorParallelStep
from node.local.worker import Worker
from node.model.device import Device
from node.model.settings import ModelSettings
from node.model.stages import build
from node.optim.muon import State, muon_direction, muon_fresh, next_counts
from node.optim.owner import Owner
from node.optim.parts import method_of
from node.optim.settings import OptimSettings
from node.optim.steps import PartSteps
from node.pipeline.visit_buffers import VisitBuffers
from node.wire.remote import collected
from testbed.models.visits import arrived, read, visit

ITEM = "4"
RANKS = 2
MOST_SHARE = 0.55
"""Largest share of the optimizer state, and of the gradients, that one rank may hold."""
TIMES = 5
STEPS = 3
"""Steps after which bits are compared."""
EPOCHS = 100
SMALL = ModelSettings(layers=4, ends_layers=1, d_model=128, heads=4, kv_heads=2, d_ff=384)
LARGE = ModelSettings(layers=4, d_model=512, heads=8, kv_heads=4, d_ff=1536)
OPTIMIZERS = {
    "simple": OptimSettings(warmup=1),
    "quintic": OptimSettings(warmup=1, coefficients="quintic"),
    "polar_express": OptimSettings(warmup=1, coefficients="polar_express", ns_steps=8),
    "deepseek_v4": OptimSettings(warmup=1, coefficients="deepseek_v4", ns_steps=10),
    "AdamW for all": OptimSettings(warmup=1, name="adamw"),
    "SOAP": OptimSettings(warmup=1, name="soap", precondition_every=2),
    "Shampoo": OptimSettings(warmup=1, name="shampoo", precondition_every=2),
}


# ------------------------------------------------------------------ the second rank


class PipedRanks(Ranks):
    """Rank 0's control of one process of this benchmark."""

    def __init__(self, line: Connection, process: Any) -> None:
        super().__init__(Path(), _lost)
        self._line = line
        self._processes = [process]

    def _tell(self, process: Any, words: dict[str, Any]) -> None:  # pyright: ignore
        self._line.send(words)

    def _cause(self, error: Exception) -> str:
        return f"{type(error).__name__}: {error}"

    def held(self) -> dict[str, int]:
        """Bytes that the other rank holds."""
        self._line.send({"do": "held"})
        return self._line.recv()


def _lost(fault: DeviceLost) -> None:
    raise fault


def _other(line: Connection, store: Path) -> None:
    """The second rank: builds stages, gathers matrices, does what the product's rank 0 says."""
    torch.set_num_threads(1)
    line.send("ready")
    here = Rank.meet(1, RANKS, Device.pick("cpu"), store)
    worker: Worker | None = None
    gather: TensorParallelStep | None = None
    while words := line.recv():
        match words["do"]:
            case "build":
                program = Program(here, words["model"], 1, words["stage"])
                steps = RankSteps(program, words["optimizer"], EPOCHS)
                worker = Worker(program, steps)
            case "held" if worker is not None:
                line.send({"state": _state_at(worker), "gradients": _gradients_at(worker)})
            case "orthogonalise":
                gather = gather or _whole_at_first(here, words["shapes"], words["optimizer"])
                gather.run({}, lambda name, update: None)
            case _ if worker is not None:
                worker.do(words)
    Rank.leave()


def _state_at(worker: Worker) -> int:
    """Bytes of optimizer state, which are kept by key; gradients are kept by name."""
    kept = [k for k in worker._kept.values() if isinstance(k, dict)]
    return sum(_bytes(k) for k in kept if not any("." in key for key in k))


def _gradients_at(worker: Worker) -> int:
    return _bytes(worker._sum.whole()[0])


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


# ------------------------------------------------------------------ rank 0


@dataclass
class Box:
    """A stage over both ranks, and the owner of all its parts."""

    ranks: PipedRanks
    here: Rank
    local: LocalStage
    owner: Owner
    optimizer: OptimSettings
    stage: int

    def parameters(self) -> dict[str, Tensor]:
        """Whole parameters."""
        return {n: p.data for n, p in self.local.module.named_parameters()}

    def train(self) -> None:
        """Add the gradients of a micro-batch to the sums."""
        model = self.local.settings
        math = self.local.math(
            self.local.module, "fp32", lambda: torch.autocast("cpu", enabled=False)
        )
        dice = torch.Generator().manual_seed(self.stage)
        shape = (2, model.seq_len, model.d_model)
        h = torch.randn(shape, generator=dice)
        tokens = shape[0] * shape[1]
        if self.stage != ENDS:
            _, _, share = visit(math, h, torch.randn(shape, generator=dice))
            self.local.gradients.offer([share], tokens)
        else:
            x = torch.randint(0, model.vocab, (2, model.seq_len), generator=dice)
            first = VisitBuffers(0.0, shape, batch=lambda: (x, x))
            math.embed(first)
            last = arrived(h)
            last.targets = x
            math.loss(last)
            upstream = torch.frombuffer(last.upstream, dtype=torch.float32)  # pyright: ignore
            first.gradient = read(upstream.view(shape))
            math.embed_backward(first)
            shares = [cast(Any, last.share), cast(Any, first.share)]
            self.local.gradients.offer(shares, tokens)
        self.local.gradients.drain()

    def means(self) -> dict[str, Tensor]:
        """Mean gradients, whole at rank 0."""
        sums, tokens = self.local.gradients.whole()
        return {name: sums[name] / tokens for name in sums}

    def place(self, fresh: Mapping[str, Tensor]) -> None:
        """Put parameters in place at both ranks."""
        self.local.place(fresh)
        for name, parameter in self.local.module.named_parameters():
            parameter.data = fresh[name]

    def held(self) -> tuple[int, int]:
        """Bytes of optimizer state and of gradients at rank 0."""
        states = [self.owner.held_after(n, STEPS - 1) for n in self.owner.names()]
        held = [t for state in states for t in state.values()]
        pieces = [t.piece for t in held if isinstance(t, CutTensor) and t.piece is not None]
        pieces += [t for t in held if isinstance(t, Tensor)]
        state = sum(t.untyped_storage().nbytes() for t in pieces)
        return state, _bytes(self.local.gradients.sums)


@contextmanager
def two_ranks() -> Iterator[tuple[Rank, PipedRanks]]:
    """Both ranks, met."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tutti-ranks-") as folder:
        ours, theirs = context.Pipe()
        store = Path(folder) / "store"
        process = context.Process(target=_other, args=(theirs, store))
        process.start()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            if not ours.poll(START_S):
                raise RuntimeError("the second rank did not come up")
            ours.recv()
            here = Rank.meet(0, RANKS, Device.pick("cpu"), store)
            yield here, PipedRanks(cast(Connection, ours), process)
            ours.send({})
            process.join()
        finally:
            process.kill()
            Rank.leave()
            torch.set_num_threads(threads)


def box(
    here: Rank, ranks: PipedRanks, model: ModelSettings, stage: int, optimizer: OptimSettings
) -> Box:
    """A stage cut over both ranks."""
    ranks._line.send({"do": "build", "model": model, "stage": stage, "optimizer": optimizer})
    program = Program(here, model, 1, stage)
    steps = CutSteps(ranks, program, optimizer, EPOCHS)
    local = LocalStage(ranks, program, build(model, 1, stage), model, steps)
    return Box(ranks, here, local, Owner(optimizer, EPOCHS, steps=steps), optimizer, stage)


# ------------------------------------------------------------------ bits and bytes


@dataclass
class Found:
    """Figures of both stages of a model with one optimizer. ``off``: largest difference from one
    device; ``state`` and ``gradients``: bytes at each rank; ``whole``: bytes of both at one
    device."""

    off: float = 0.0
    state: list[int] = field(default_factory=lambda: [0] * RANKS)
    gradients: list[int] = field(default_factory=lambda: [0] * RANKS)
    whole: list[int] = field(default_factory=lambda: [0, 0])

    def differ(self, mine: Tensor, wanted: Tensor) -> None:
        """Compare a tensor with the tensor that one device has in its place."""
        self.off = max(self.off, float((mine - wanted).abs().max()))


def stepped(
    here: Rank, ranks: PipedRanks, stage: int, optimizer: OptimSettings, found: Found
) -> None:
    """Make :data:`STEPS` steps of a stage, over both ranks and on one device, and record the
    differences and bytes."""
    two = box(here, ranks, SMALL, stage, optimizer)
    alone = Owner(optimizer, EPOCHS)
    for epoch in range(STEPS):
        two.local.gradients.reset()
        two.train()
        means = two.means()
        before = two.parameters()
        fresh = two.owner.step_parts(before, means, epoch)
        for name, wanted in alone.step_parts(before, means, epoch).items():
            found.differ(fresh[name], wanted)
        two.owner.commit(epoch)
        alone.commit(epoch)
        two.place(fresh)
    state, gradients = two.held()
    there = ranks.held()
    for kind, held in (
        (found.state, (state, there["state"])),
        (found.gradients, (gradients, there["gradients"])),
        (found.whole, (alone.nbytes, sum(p.nbytes for p in two.parameters().values()))),
    ):
        kind[:] = [before + more for before, more in zip(kind, held, strict=True)]
    for name in alone.names():
        for key, tensor in alone.state(name).items():
            found.differ(collected(two.owner.state(name)[key]), collected(tensor))


def bits(
    report: Report, here: Rank, ranks: PipedRanks, optimizers: Mapping[str, OptimSettings]
) -> None:
    """Add the rows of differences from one device, and of the bytes of the fuller rank."""
    for name, optimizer in optimizers.items():
        found = Found()
        for stage in (ENDS, 1):
            stepped(here, ranks, stage, optimizer, found)
        what = f"{ITEM} tensor-parallel step, two ranks, {name}"
        report.add(
            f"{what}: largest difference of parameters and state from one device",
            found.off,
            "",
            f"after {STEPS} steps of the ends and of a block stage: AdamW works on numbers one by "
            "one, and a host multiplies the same whole matrices",
            "0: bit for bit",
            found.off == 0.0,
        )
        kinds = {"optimizer state": found.state, "gradients": found.gradients}
        for (kind, held), whole in zip(kinds.items(), found.whole, strict=True):
            share = max(held) / whole
            report.add(
                f"{what}: {kind} of the fuller rank",
                round(share, 4),
                "of one device's",
                f"{held[0]:,} and {held[1]:,} bytes",
                f"<= {MOST_SHARE}",
                share <= MOST_SHARE,
            )


# ------------------------------------------------------------------ time


class GatherEverything:
    """The step with whole gradients and whole state at rank 0."""

    def __init__(self, two: Box) -> None:
        self._two = two
        self._steps = PartSteps(two.optimizer, EPOCHS)
        self._states: dict[str, State] = {}
        self._product: TensorParallelStep | None = None

    def step(self, epoch: int) -> dict[str, Tensor]:
        """Whole fresh parameters of all parts."""
        two = self._two
        before = two.parameters()
        means = two.means()
        matrices = [n for n in sorted(means) if _by_muon(n, means[n], two.optimizer)]
        rest = {n: g for n, g in means.items() if n not in matrices}
        fresh, made = self._steps.step(before, rest, self._states, epoch)
        self._states |= cast(Mapping[str, State], made)
        both = {
            n: muon_direction(
                two.optimizer,
                means[n],
                self._states.get(n, {}).get("momentum", torch.zeros_like(means[n])),
            )
            for n in matrices
        }
        updates = self._orthogonalised({n: direction for n, (direction, _) in both.items()})
        rate = self._steps.rate("muon", epoch)
        counts = next_counts([self._states.get(n, {}) for n in matrices])
        for n, count in zip(matrices, counts, strict=True):
            fresh[n] = muon_fresh(two.optimizer, before[n], updates[n], rate)
            self._states[n] = {"momentum": both[n][1], "steps": count}
        return fresh

    def _orthogonalised(self, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shapes = [(n, *d.shape) for n, d in directions.items()]
        optimizer = self._two.optimizer
        self._two.ranks._line.send(
            {"do": "orthogonalise", "shapes": shapes, "optimizer": optimizer}
        )
        if self._product is None:
            self._product = _whole_at_first(self._two.here, shapes, optimizer)
        found: dict[str, Tensor] = {}
        self._product.run(directions, lambda n, update: found.update({n: update.clone()}))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the state at rank 0."""
        return sum(_bytes(state) for state in self._states.values())


def _by_muon(name: str, gradient: Tensor, optimizer: OptimSettings) -> bool:
    return method_of(name, tuple(gradient.shape), optimizer) == "muon"


def _whole_at_first(here: Rank, shapes: list[Any], optimizer: OptimSettings) -> TensorParallelStep:
    """The exchange of matrices that are whole at rank 0."""
    matrices = [Sharded.at(0, name, (rows, cols), here.size) for name, rows, cols in shapes]
    return TensorParallelStep(
        here,
        matrices,
        optimizer.ns_steps,
        stack=optimizer.stack,
        coefficients=optimizer.coefficients,
    )


def speed(report: Report, here: Rank, ranks: PipedRanks, model: ModelSettings) -> None:
    """Add the rows of milliseconds, and of the bytes kept by the step that gathers everything."""
    two = box(here, ranks, model, 1, OPTIMIZERS["simple"])
    two.train()
    everything = GatherEverything(two)

    def sharded(epoch: int) -> dict[str, Tensor]:
        fresh = two.owner.step_parts(two.parameters(), two.means(), epoch)
        two.owner.commit(epoch)
        return fresh

    ways: dict[str, Callable[[int], dict[str, Tensor]]] = {
        "sharded": sharded,
        "gather everything": everything.step,
    }
    ms: dict[str, list[float]] = {way: [] for way in ways}
    off = 0.0
    for epoch in range(TIMES + 1):
        fresh = []
        for way, step in ways.items():
            began = time.perf_counter()
            fresh.append(step(epoch))
            if epoch:  # the first step makes plans and buffers
                ms[way].append(1000 * (time.perf_counter() - began))
        off = max(off, *(float((fresh[0][n] - w).abs().max()) for n, w in fresh[1].items()))
    numbers = sum(p.numel() for p in two.parameters().values())
    what = f"{ITEM} tensor-parallel step of {numbers / 1e6:.1f} M parameters, two ranks"
    ratio = median(ms["sharded"]) / median(ms["gather everything"])
    for way in ways:
        said = f"{min(ms[way]):.0f} to {max(ms[way]):.0f}, median of {TIMES}"
        report.add(f"{what}, {way}", round(median(ms[way]), 1), "ms", said)
    report.add(f"{what}: time of sharded over gather everything", round(ratio, 3), "ratio")
    report.add(
        f"{what}: largest difference between both", off, "", "", "0: bit for bit", off == 0.0
    )
    state = two.owner.nbytes
    report.add(
        f"{what}: optimizer state at rank 0, gather everything",
        round(everything.nbytes / state, 4),
        "of the whole",
        f"{state:,} bytes",
    )


def rows(report: Report, root: Path | None = None, quick: bool = False) -> None:
    """Measure and add the rows of item 4."""
    optimizers = OPTIMIZERS
    model = LARGE
    if quick:
        optimizers = {"simple": OPTIMIZERS["simple"]}
        model = replace(LARGE, layers=2, d_model=256, d_ff=768)
    with two_ranks() as (here, ranks):
        bits(report, here, ranks, optimizers)
        speed(report, here, ranks, model)
