"""Loss of cells that average in windows beside one cell that averages every step: the stages, text,
sample order, dealt skips, optimizers and window's keys of the product, in one process. Every cell
trains on its share of the samples as configs/full.toml says; the other swarm averages the gradients
of equally many micro-batches in every step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.report import ROOT, Report
from benchmarks.skipping import Staged, Visits, text_of
from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.keys import EVERYBODY, meeting_keys
from node.core.ids import CellId
from node.core.samples import WHOLE, Cursor, split
from node.data.order import Sampler
from node.manifest import Manifest, amended
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.problem import PathProblem
from node.stage.text import Text
from testbed.planning.meetings import standings

CONFIG = ROOT / "configs" / "full.toml"
CELLS = 3
SEEDS = 3
EPOCHS, BETWEEN, LATE = 240, 15, 2
"""Epochs of every cell; epochs between the starts of two windows; epochs until a window's mean is
put in place."""
HELD_OUT = 24
"""Batches of sequences that nobody trains on."""
MOST = 1.03


def rows(report: Report, root: Path, epochs: int = EPOCHS, seeds: int = SEEDS) -> None:
    """One row: the worst cell's loss of all seeds."""
    torch.set_num_threads(1)
    ratios: list[float] = []
    texts: list[str] = []
    tokens = 0
    for seed in range(seeds):
        m = amended(
            Manifest.parse(CONFIG.read_bytes()), {"data.seed": seed, "training.epochs": epochs}
        )
        text = text_of(m, m.pipeline.micro_batch, root)
        one = _one(m, text, epochs)
        cells = _cells(m, text, epochs)
        tokens = CELLS * epochs * m.training.target_batch * m.model.seq_len
        ratios.append(max(cells) / one)
        texts.append(f"{', '.join(f'{c:.4f}' for c in cells)} beside {one:.4f}")
    report.add(
        f"2 held-out loss of {CELLS} cells after {tokens} tokens in all, over one cell's that "
        "averages every step",
        max(ratios),
        "ratio, worst cell of the worst seed",
        f"nats per token, by seed: {'; '.join(texts)}; mean ratio {fmean(ratios):.4f}",
        f"at most {MOST}",
        holds=max(ratios) <= MOST,
    )


def _one(m: Manifest, text: Text, epochs: int) -> float:
    """Everybody's micro-batches in every step."""
    model = Staged(m)
    sampler = Sampler(WHOLE)
    size = m.pipeline.micro_batch
    per_cell = _visits(m)
    for epoch in range(epochs):
        visits = [v for _ in range(CELLS) for v in per_cell]
        model.update([text.at(sampler.take(size)) for _ in visits], visits, epoch)
    return _held_out(model, text)


def _cells(m: Manifest, text: Text, epochs: int) -> list[float]:
    """The held-out loss of every cell, after a last window."""
    outer = m.outer
    visits = _visits(m)
    size = m.pipeline.micro_batch
    cursors = _shares()
    names = [CellId(f"{16 * i + 15:016x}") for i in range(CELLS)]
    models = {name: Staged(m) for name in names}
    samplers = {name: Sampler(cursor) for name, cursor in zip(names, cursors, strict=True)}
    states = {name: OuterState.begin(_parameters(models[name])) for name in names}
    moves: dict[CellId, dict[str, Tensor]] = {}
    for epoch in range(epochs + LATE):
        if epoch < epochs:
            for name in names:
                batches = [text.at(samplers[name].take(size)) for _ in visits]
                models[name].update(batches, visits, epoch)
        if (epoch + 1) % BETWEEN == 0 and epoch < epochs:
            given = {name: _parameters(models[name]) for name in names}
            stepped = {
                name: outer_step(states[name], pseudo_gradient(states[name], given[name]), outer)
                for name in names
            }
            for group in _groups(m, names, epoch // BETWEEN):
                mean = _mean([stepped[name] for name in group])
                for name in group:
                    states[name] = mean
                    moves[name] = {n: mean.anchor[n] - x for n, x in given[name].items()}
        if moves and (epoch + 1) % BETWEEN == LATE % BETWEEN:
            for name, by in moves.items():
                for n, p in _live(models[name]).items():
                    p.data = p.data + by[n]
            moves = {}
    return [_held_out(models[name], text) for name in names]


def _groups(m: Manifest, names: Sequence[CellId], window: int) -> list[list[CellId]]:
    """Groups that meet in a window: cells with the same first key; a cell alone there, by its next
    key."""
    known = standings(names)
    left = {name: meeting_keys(m.outer, name, *known[name], window) for name in names}
    found: list[list[CellId]] = []
    for step in range(1 + max(len(keys) for keys, _ in left.values())):
        by_key: dict[str, list[CellId]] = {}
        for name, (keys, _) in left.items():
            by_key.setdefault(keys[step] if step < len(keys) else EVERYBODY, []).append(name)
        for group in by_key.values():
            if len(group) > 1:
                found.append(group)
                for name in group:
                    left.pop(name)
        if not left:
            break
    return found + [[name] for name in left]


def _shares() -> list[Cursor]:
    """The samples of three cells, two of which were one until the second division."""
    first, second = split(WHOLE)
    return [first, *split(second)]


def _visits(m: Manifest) -> list[Visits]:
    """The block stages of every micro-batch, as the planner deals them."""
    stages = m.pipeline.stages
    count = m.training.target_batch // m.pipeline.micro_batch
    problem = PathProblem(
        "loss",
        ((0.0,) * (stages + 1),) * (stages + 1),
        (1.0,) * (stages + 1),
        tuple((n,) for n in range(stages + 1)),
        m.scheduler.hops(stages) + 1,
        (count,) * (stages + 1),
        {0: count},
    )
    return [tuple(visits) for visits in deal(problem)]


def _live(model: Staged) -> dict[str, torch.nn.Parameter]:
    modules: list[torch.nn.Module] = [model.ends, *model.blocks]
    return {name: p for module in modules for name, p in module.named_parameters()}


def _parameters(model: Staged) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in _live(model).items()}


def _mean(states: Sequence[OuterState]) -> OuterState:
    def mean(which: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {n: torch.stack([one[n] for one in which]).mean(0) for n in which[0]}

    return OuterState(mean([s.anchor for s in states]), mean([s.momentum for s in states]))


@torch.no_grad()
def _held_out(model: Staged, text: Text) -> float:
    """Nats per token with every stage there."""
    visits = range(1, model.manifest.pipeline.stages + 1)
    pairs = [model.loss(*text.held_out(i), visits) for i in range(HELD_OUT)]
    return sum(float(loss) for loss, _ in pairs) / sum(n for _, n in pairs)
