"""Weights of cells by agreement, beside equal weights and other signals. The cells of
configs/diloco.toml run in one process, with the product's stages, text, optimizer and merges (coded
differences, weights, outer step).

Of four cells one trains on random tokens and one copies its neighbour. The loss is compared with
that of the two honest cells alone. Three other signals judge the same differences: the held-out
loss without one cell's difference, and the inner product of a difference with the gradient of the
held-out loss, at the anchor before the outer step and at the one after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import ROOT, Report
from benchmarks.skipping import Staged, Visits, text_of
from node.averaging.strategies.diloco import OuterState, outer_step
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId
from node.core.samples import WHOLE, split
from node.data.order import Sampler
from node.manifest import Manifest, amended
from node.outer.merging import MOMENTUM, WindowState, mean_of, merge_of
from node.stage.text import Batch, Text

CONFIG = ROOT / "configs" / "diloco.toml"
WINDOWS, EPOCHS = 12, 15
"""Windows of a run, and epochs of a cell in each."""
BATCH = 16
"""Sequences of a cell's epoch."""
SEEDS = 2
HELD_OUT, JUDGED = 24, 4
"""Held-out micro-batches of a run's loss, and of one judgement."""
MOST_LOSS, LEAST_WEIGHT = 1.02, 0.98
HONEST = "honest"
SLOW = "slow"
"""Honest, with a third of the epochs."""
NOISE = "noise"
"""Trains on random tokens."""
COPY = "copy"
"""Gives the bytes of the cell before it."""
DISGUISED = "disguised"
"""Gives 1.2 times the difference of the cell before it, and noise of a fifth of its length."""
COPIERS = (COPY, DISGUISED)
SIGNALS = ("leave-one-out", "gradient before", "gradient after", "agreement")
Named = Mapping[str, Tensor]


@dataclass
class Ran:
    """One run. ``loss``: held-out, nats per token; ``kept``: least weight in a window of a
    difference that an honest cell made, over all stages, its copies included; ``against``: most
    weight of a noisy cell; ``doubled``: windows and stages in which a copy was not found, as a pair
    (count, of); ``accused`` and ``missed``: by signal, honest differences that it judges to do
    harm, and noisy ones that it judges to help, as pairs (count, of)."""

    loss: float = 0.0
    kept: float = 1.0
    against: float = 0.0
    doubled: tuple[int, int] = (0, 0)
    accused: dict[str, tuple[int, int]] = field(default_factory=dict)
    missed: dict[str, tuple[int, int]] = field(default_factory=dict)

    def judged(self, signal: str, role: str, harms: bool) -> None:
        """Count one judgement by ``signal`` of a cell with this role."""
        counts = self.accused
        wrong = harms
        if role == NOISE:
            counts = self.missed
            wrong = not harms
        errors, of = counts.get(signal, (0, 0))
        counts[signal] = (errors + wrong, of + 1)


def rows(report: Report, root: Path, windows: int = WINDOWS, seeds: int = SEEDS) -> None:
    """Rows of the loss beside bad cells, of the weights of honest cells, and of each signal."""
    torch.set_num_threads(1)
    alone: list[Ran] = []
    runs: dict[str, list[Ran]] = {}
    for seed in range(seeds):
        alone.append(Swarm((HONEST, HONEST), "equal", seed, windows, root).run())
        for name, (roles, weights) in RUNS.items():
            run = Swarm(roles, weights, seed, windows, root).run()
            runs.setdefault(name, []).append(run)
    for name, (roles, weights) in RUNS.items():
        if NOISE in roles:
            ratios = [a.loss / b.loss for a, b in zip(runs[name], alone, strict=True)]
            target = f"at most {MOST_LOSS}" if weights != "equal" else ""
            report.add(
                f"6 {name}: held-out loss over that of the two honest cells alone",
                max(ratios),
                "ratio, worst seed",
                "; ".join(
                    f"{a.loss:.4f} beside {b.loss:.4f}"
                    for a, b in zip(runs[name], alone, strict=True)
                ),
                target,
                holds=max(ratios) <= MOST_LOSS if target else None,
            )
        if weights != "equal":
            kept = min(run.kept for run in runs[name])
            doubled = _share([run.doubled for run in runs[name]])
            report.add(
                f"6 {name}: weight that differences of honest cells kept, with copies of them",
                kept,
                "least of a cell, a stage and a window",
                f"most of a noisy cell {max(run.against for run in runs[name]):.3g}; copies not "
                f"found in {100.0 * doubled:.0f} % of stages and windows",
                f"at least {LEAST_WEIGHT}",
                holds=kept >= LEAST_WEIGHT,
            )
    judged = [run for of in runs.values() for run in of if run.accused]
    for signal in SIGNALS:
        accused = [run.accused[signal] for run in judged]
        missed = [run.missed[signal] for run in judged if run.missed]
        report.add(
            f"6 signal {signal}: honest differences judged to do harm",
            100.0 * _share(accused),
            "%",
            f"{100.0 * _share(missed):.1f} % of the noisy ones judged to help",
        )


RUNS: dict[str, tuple[Sequence[str], str]] = {
    "noise and a copy, equal weights": ((HONEST, HONEST, COPY, NOISE), "equal"),
    "noise and a copy, by agreement": ((HONEST, HONEST, COPY, NOISE), "agreement"),
    "noise and a disguised copy, by agreement": ((HONEST, HONEST, DISGUISED, NOISE), "agreement"),
    "four honest cells, one slow, by agreement": ((HONEST, HONEST, HONEST, SLOW), "agreement"),
}


class Swarm:
    """Cells with these roles that meet in every window. All have the same anchor."""

    def __init__(
        self, roles: Sequence[str], weights: str, seed: int, windows: int, home: Path
    ) -> None:
        changed = {
            "data.seed": seed,
            "training.epochs": windows * EPOCHS,
            "training.target_batch": BATCH,
        }
        m = amended(Manifest.parse(CONFIG.read_bytes()), changed)
        self._outer: OuterSettings = replace(m.outer, weights=weights)
        self._roles = {CellId(f"{i:016x}"): role for i, role in enumerate(roles, 1)}
        self._windows = windows
        self._dice = torch.Generator().manual_seed(seed)
        self._text: Text = text_of(m, m.pipeline.micro_batch, home)
        whole: Visits = tuple(range(1, m.pipeline.stages + 1))
        self._visits = [whole] * (BATCH // m.pipeline.micro_batch)
        halves = split(WHOLE)
        shares = [share for half in halves for share in split(half)]
        self._samplers = dict(zip(self._roles, map(Sampler, shares), strict=False))
        self._models = {cell: Staged(m) for cell in self._roles}
        self._probe = Staged(m)
        self._kept = [WindowState(OuterState.begin(part)) for part in _stages(self._probe)]
        self._ran = Ran()

    def run(self) -> Ran:
        """Train all windows."""
        for window in range(self._windows):
            for cell in self._roles:
                self._train(cell, window * EPOCHS)
            before = [kept.state for kept in self._kept]
            differences, weights = self._meet()
            if self._outer.weights != "equal":
                self._judge(before, differences, weights)
            for model in self._models.values():
                _put(model, self._anchor())
        _put(self._probe, self._anchor())
        self._ran.loss = self._held_out(HELD_OUT)
        return self._ran

    def _train(self, cell: CellId, first: int) -> None:
        """A window's epochs of one cell."""
        role = self._roles[cell]
        model = self._models[cell]
        epochs = {SLOW: EPOCHS // 3, COPY: 0, DISGUISED: 0}.get(role, EPOCHS)
        for epoch in range(first, first + epochs):
            size = model.manifest.pipeline.micro_batch
            batches = [self._text.at(self._samplers[cell].take(size)) for _ in self._visits]
            if role == NOISE:
                batches = [self._random(batch) for batch in batches]
            model.update(batches, self._visits, epoch)

    def _random(self, batch: Batch) -> Batch:
        vocab = self._probe.manifest.model.vocab
        tokens, targets = (torch.randint(vocab, t.shape, generator=self._dice) for t in batch)
        return tokens, targets

    def _meet(self) -> tuple[list[dict[str, Named]], list[Mapping[str, float]]]:
        """One outer step of every stage. Returns for each stage the decoded differences and the
        weights of the cells."""
        differences: list[dict[str, Named]] = []
        weights: list[Mapping[str, float]] = []
        for stage, kept in enumerate(self._kept):
            local = {cell: _stages(model)[stage] for cell, model in self._models.items()}
            shapes = {name: tuple(t.shape) for name, t in next(iter(local.values())).items()}
            merge = merge_of(self._outer, kept, shapes, len(local))
            came: dict[str, Named] = {}
            last: dict[str, Tensor] = {}
            for cell, role in self._roles.items():
                if role == DISGUISED:
                    last = merge.gives(self._disguised(kept, merge.opens(last))) or {}
                elif role != COPY:
                    last = merge.gives(local[cell]) or {}
                came[cell] = merge.opens(last)
            differences.append(dict(came))
            first = min(came)
            made = merge.makes(first, came.pop(first), came)
            kept.state = OuterState(
                {name: made[name] for name in shapes},
                {name: made[name + MOMENTUM] for name in shapes},
            )
            weights.append(merge.weights or dict.fromkeys(self._roles, 1.0))
        return differences, weights

    def _disguised(self, kept: WindowState, copied: Named) -> dict[str, Tensor]:
        """Parameters of a copier, with 1.2 times the copied difference from the anchor, and
        noise."""
        assert kept.state is not None
        found: dict[str, Tensor] = {}
        for name, tensor in copied.items():
            noise = torch.randn(tensor.shape, generator=self._dice)
            noise *= 0.2 * tensor.norm() / noise.norm()
            found[name] = kept.state.anchor[name] - (1.2 * tensor + noise)
        return found

    def _judge(
        self,
        before: Sequence[OuterState | None],
        differences: Sequence[dict[str, Named]],
        weights: Sequence[Mapping[str, float]],
    ) -> None:
        """Judge every cell of this window by every signal."""
        whole = {c: _joined([of[c] for of in differences]) for c in self._roles}
        after = self._without(None, before, differences)
        was = {name: t for state in before if state for name, t in state.anchor.items()}
        there = self._gradient(after)
        here = self._gradient(was)
        _put(self._probe, after)
        usual = self._held_out(JUDGED)
        cells = list(self._roles)
        for cell, role in self._roles.items():
            if role in COPIERS:
                continue
            of = [each[cell] for each in weights]
            copier = cells[cells.index(cell) + 1 :][:1]
            if copier and self._roles[copier[0]] in COPIERS:
                of = [each[cell] + each[copier[0]] for each in weights]
                missed, all_of = self._ran.doubled
                missed += sum(weight > 1.0 for weight in of)
                self._ran.doubled = missed, all_of + len(of)
            if role == NOISE:
                self._ran.against = max(self._ran.against, *of)
            else:
                self._ran.kept = min(self._ran.kept, *of)
            self._ran.judged("agreement", role, min(of) < 1.0)
            self._ran.judged("gradient before", role, _product(whole[cell], here) < 0.0)
            self._ran.judged("gradient after", role, _product(whole[cell], there) < 0.0)
            _put(self._probe, self._without(cell, before, differences))
            self._ran.judged("leave-one-out", role, self._held_out(JUDGED) < usual)

    def _without(
        self,
        cell: CellId | None,
        before: Sequence[OuterState | None],
        differences: Sequence[dict[str, Named]],
    ) -> dict[str, Tensor]:
        """The anchor after an outer step with equal weights of all cells but ``cell``."""
        found: dict[str, Tensor] = {}
        for state, of in zip(before, differences, strict=True):
            assert state is not None
            others = {name: given for name, given in of.items() if name != cell}
            found |= outer_step(state, mean_of(others), self._outer).anchor
        return found

    def _gradient(self, at: Named) -> dict[str, Tensor]:
        """Gradient of the held-out loss at these parameters."""
        _put(self._probe, at)
        live = _live(self._probe)
        for i in range(JUDGED):
            loss, count = self._probe.loss(*self._text.held_out(HELD_OUT + i), self._visits[0])
            (loss / count / JUDGED).backward()
        found = {name: p.grad for name, p in live.items() if p.grad is not None}
        for p in live.values():
            p.grad = None
        return found

    def _anchor(self) -> dict[str, Tensor]:
        return {n: t for g in self._kept if g.state for n, t in g.state.anchor.items()}

    @torch.no_grad()
    def _held_out(self, batches: int) -> float:
        """Nats per token of the probe's parameters."""
        pairs = [self._probe.loss(*self._text.held_out(i), self._visits[0]) for i in range(batches)]
        return sum(float(loss) for loss, _ in pairs) / sum(n for _, n in pairs)


def _stages(model: Staged) -> list[dict[str, Tensor]]:
    """Parameters of every stage."""
    return [
        {name: p.detach().clone() for name, p in module.named_parameters()}
        for module in (model.ends, *model.blocks)
    ]


def _live(model: Staged) -> dict[str, torch.nn.Parameter]:
    modules: list[torch.nn.Module] = [model.ends, *model.blocks]
    return {name: p for module in modules for name, p in module.named_parameters()}


def _put(model: Staged, parameters: Named) -> None:
    for name, p in _live(model).items():
        p.data = parameters[name].clone()


def _joined(of: Sequence[Named]) -> dict[str, Tensor]:
    return {name: t for each in of for name, t in each.items()}


def _product(a: Named, b: Named) -> float:
    return sum(float((t * b[name]).sum()) for name, t in a.items() if name in b)


def _share(counts: Sequence[tuple[int, int]]) -> float:
    return sum(wrong for wrong, _ in counts) / max(1, sum(of for _, of in counts))
