"""Deaths and lost momentum beside a tuned quiet run. A small model trains in one process, its
stages at replicas that own the parts of the optimizer together, with the product's optimizer,
owners, copies at the buddy and repair of ownership.

Every few epochs a peer dies. Its gradients of that epoch are lost, and so is the optimizer state of
its parts, except for the newest copy. A newcomer takes its place some epochs later and takes over
parts from their living owners. Learning rate and momentum are found on a grid for the run without
deaths and for the run with deaths, each on its own, on another text than the judged one. A third
run has the same deaths and no copies: it shows how much the judged loss depends on momentum. A
fourth copies all state every epoch: the rest of its distance is that of the lost gradients.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import ROOT, Report
from benchmarks.skipping import Staged, text_of
from node.core.ids import ENDS, PeerId
from node.data.order import SampleOrder, Sampler
from node.data.sources import Corpus
from node.manifest import Manifest, amended
from node.stage.text import Text
from testbed.models.owner_group import Group

EPOCHS = 600
SHAPE: dict[str, Any] = {
    "model.layers": 3,
    "model.d_model": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.d_ff": 96,
    "model.seq_len": 64,
    "pipeline.stages": 3,
    "pipeline.micro_batch": 2,
    "training.target_batch": 4,
    "training.epochs": EPOCHS,
}
"""An epoch has 256 tokens: gradients are mostly noise, which momentum averages. With 512 tokens the
best run without any momentum is 3 % behind, too little for a judge of lost momentum; with 128 the
orders of the text differ by more than the deaths cost."""
REPLICAS = 2
EVERY = 4
"""Epochs between two deaths: of eight peers one. Copies are made every five, so that they have all
ages."""
ABSENT = 2
"""Epochs from a death until a newcomer takes part."""
RATES = (0.01, 0.02, 0.04, 0.08)
MOMENTA = (0.0, 0.5, 0.8, 0.9)
ENDS_RATE = 0.15
"""Peak rate of AdamW at the ends over that of Muon, as in the default settings."""
SEEDS = (1, 2, 3)
HELD_OUT = 256
"""Held-out micro-batches of a loss."""
MOST = 1.02


@dataclass(frozen=True)
class Way:
    """How peers die. ``every``: epochs between two deaths, 0 for none; ``copies``: epochs between
    two copies of an owner's state, 0 for none."""

    every: int
    copies: int


QUIET = Way(0, 0)
COPIES = Way(EVERY, Manifest.default_demo().training.buddy_every)
FORGETS = Way(EVERY, 0)
CONTROL = Way(EVERY, 1)
"""The same deaths, and no state that is older than an epoch: what is lost is gradients alone."""


@dataclass(frozen=True)
class Tuned:
    """Peak learning rate and momentum of Muon."""

    rate: float
    momentum: float


QUICK = Tuned(0.02, 0.5)
"""Settings of a quick run, which searches for none."""


@dataclass(frozen=True)
class Ran:
    """Held-out loss at the end in nats per token; deaths; parts of the dead that went on without
    state."""

    loss: float
    deaths: int
    lost: int


class Cell:
    """Stages with two replicas each, in one process. Peers die as ``way`` has it, chosen by
    ``seed``."""

    def __init__(self, m: Manifest, text: Text, way: Way, seed: int) -> None:
        self._manifest = m
        self._text = text
        self._way = way
        self._dice = random.Random(seed)
        self._model = Staged(m)
        self._modules = [self._model.ends, *self._model.blocks]
        self._members = [
            [PeerId(f"{stage}-{i}") for i in range(REPLICAS)] for stage in range(len(self._modules))
        ]
        self._groups = [
            Group(
                m.optimizer,
                {name: tuple(p.shape) for name, p in module.named_parameters()},
                members,
                epochs=m.training.epochs,
                every=way.copies,
                repeats=False,
            )
            for module, members in zip(self._modules, self._members, strict=True)
        ]
        self._arrivals: list[tuple[int, int]] = []
        """Epoch and stage of each newcomer on its way."""
        self._deaths = 0

    def run(self) -> Ran:
        """Train all epochs."""
        sampler = Sampler()
        for epoch in range(self._manifest.training.epochs):
            self._arrive(epoch)
            victim = self._strike(epoch)
            means = self._gradients(sampler, victim)
            if victim is not None:
                stage, peer = victim
                self._members[stage].remove(peer)
                self._groups[stage].change(self._members[stage], epoch - 1)
            for module, group, mean in zip(self._modules, self._groups, means, strict=True):
                live = dict(module.named_parameters())
                held = {name: p.data for name, p in live.items()}
                for name, fresh in group.epoch(held, mean, epoch).items():
                    live[name].data = fresh
        return Ran(self._held_out(), self._deaths, sum(group.lost for group in self._groups))

    def _arrive(self, epoch: int) -> None:
        """Newcomers whose time has come take part."""
        for due, stage in [a for a in self._arrivals if a[0] == epoch]:
            self._arrivals.remove((due, stage))
            self._members[stage].append(PeerId(f"{stage}-{epoch}"))
            self._groups[stage].change(self._members[stage], epoch - 1)

    def _strike(self, epoch: int) -> tuple[int, PeerId] | None:
        """Choose the stage and peer that die in this epoch: any but the last of a stage."""
        if not self._way.every or not epoch or epoch % self._way.every:
            return None
        able = [(s, p) for s, peers in enumerate(self._members) if len(peers) > 1 for p in peers]
        stage, peer = self._dice.choice(able)
        self._arrivals.append((epoch + ABSENT, stage))
        self._deaths += 1
        return stage, peer

    def _gradients(
        self, sampler: Sampler, victim: tuple[int, PeerId] | None
    ) -> list[dict[str, Tensor]]:
        """Mean gradients of each stage over its own tokens, without those of the victim. The
        micro-batches that a dead ends peer began do not count at all."""
        size = self._manifest.pipeline.micro_batch
        visits = range(1, len(self._modules))
        sums: list[dict[str, Tensor]] = [{} for _ in self._modules]
        counts = [0] * len(self._modules)
        for i in range(self._manifest.training.target_batch // size):
            batch = self._text.at(sampler.take(size))
            hops = [peers[i % len(peers)] for peers in self._members]
            if victim == (ENDS, hops[ENDS]):
                continue
            loss, count = self._model.loss(*batch, visits)
            loss.backward()
            for stage, module in enumerate(self._modules):
                for name, p in module.named_parameters():
                    if p.grad is not None and victim != (stage, hops[stage]):
                        sums[stage][name] = p.grad + sums[stage].get(name, 0.0)
                    p.grad = None
                counts[stage] += count * (victim != (stage, hops[stage]))
        return [
            {name: total / count for name, total in of.items()}
            for of, count in zip(sums, counts, strict=True)
        ]

    @torch.no_grad()
    def _held_out(self) -> float:
        visits = range(1, len(self._modules))
        pairs = [self._model.loss(*self._text.held_out(i), visits) for i in range(HELD_OUT)]
        return sum(float(loss) for loss, _ in pairs) / sum(n for _, n in pairs)


def manifest(tuned: Tuned, seed: int) -> Manifest:
    """The run of a cell; ``seed`` draws the first parameters and the order of the text."""
    chosen = {
        "optimizer.lr": tuned.rate,
        "optimizer.adam_lr": ENDS_RATE * tuned.rate,
        "optimizer.momentum": tuned.momentum,
        "model.init_seed": seed,
        "data.seed": seed,
    }
    return amended(Manifest.default_demo(), SHAPE | chosen)


def other_text(m: Manifest) -> Text:
    """The text of this repository's documents, on which settings are chosen."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = np.frombuffer(text, dtype=np.uint8)
    cut = len(ids) * 9 // 10
    corpus = Corpus(ids[:cut], ids[cut:], "", m.model.vocab, m.model.seq_len)
    return Text(corpus, SampleOrder(corpus.windows, m.data.seed), m.pipeline.micro_batch)


def tune(way: Way) -> tuple[Tuned, dict[Tuned, float]]:
    """The best point of the grid on the other text, and the loss of every point."""
    found: dict[Tuned, float] = {}
    for rate in RATES:
        for momentum in MOMENTA:
            tuned = Tuned(rate, momentum)
            m = manifest(tuned, 0)
            found[tuned] = Cell(m, other_text(m), way, 0).run().loss
    return min(found, key=found.__getitem__), found


def rows(report: Report, root: Path, quick: bool = False) -> None:
    """Rows of the settings found, of runs that forget momentum, and of runs with copies."""
    torch.set_num_threads(1)
    best = {QUIET: QUICK, COPIES: QUICK}
    if not quick:
        for way in best:
            best[way] = _tuned(report, way)
    runs: dict[Way, list[Ran]] = {}
    for seed in SEEDS[:1] if quick else SEEDS:
        for way in (QUIET, COPIES, CONTROL, FORGETS):
            given = best[COPIES] if way is CONTROL else best.get(way, best[QUIET])
            m = manifest(given, seed)
            text = text_of(m, m.pipeline.micro_batch, root)
            runs.setdefault(way, []).append(Cell(m, text, way, seed).run())
    forgets = _ratios(runs[FORGETS], runs[QUIET])
    report.add(
        "4 held-out loss over that of the quiet run, where momentum dies with its owner",
        min(forgets),
        "ratio, least of the seeds",
        _said(runs[FORGETS], forgets),
        f"above {MOST}: the judged loss depends on momentum",
        holds=min(forgets) > MOST,
    )
    copies = _ratios(runs[COPIES], runs[QUIET])
    report.add(
        f"4 held-out loss over that of the quiet run, with a copy every {COPIES.copies} epochs",
        max(copies),
        "ratio, worst of the seeds",
        _said(runs[COPIES], copies),
        f"at most {MOST}",
        holds=max(copies) <= MOST,
    )
    control = _ratios(runs[CONTROL], runs[QUIET])
    report.add(
        "4 the same with a copy every epoch",
        max(control),
        "ratio, worst of the seeds",
        _said(runs[CONTROL], control),
    )


def _tuned(report: Report, way: Way) -> Tuned:
    """The settings for a way, and a row of them."""
    tuned, found = tune(way)
    near = sorted(found, key=found.__getitem__)[:4]
    inside = tuned.rate in RATES[1:-1] and tuned.momentum in MOMENTA[1:-1]
    report.add(
        f"4 learning rate found {'with' if way.every else 'without'} deaths",
        tuned.rate,
        f"with momentum {tuned.momentum}",
        f"of {len(found)} points: "
        + ", ".join(f"{found[t]:.4f} at {t.rate}, {t.momentum}" for t in near),
        "inside the grid",
        holds=inside,
    )
    return tuned


def _ratios(runs: Sequence[Ran], quiet: Sequence[Ran]) -> list[float]:
    return [a.loss / b.loss for a, b in zip(runs, quiet, strict=True)]


def _said(runs: Sequence[Ran], ratios: Sequence[float]) -> str:
    each = ", ".join(f"{ratio:.4f}" for ratio in ratios)
    lost = sum(run.lost for run in runs)
    return (
        f"{each}; {sum(run.deaths for run in runs)} deaths, one every {EVERY} epochs of 8 peers; "
        f"{lost} parts went on without state"
    )
