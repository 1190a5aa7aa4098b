"""Cost of missing stages in loss: a model trained with a quarter of its block stages left out by
turns, its twin without.

    python -m benchmarks.skipping [--json -] [--epochs 330] [--only first-kept,any,whole]
        [--curves FILE]

All are the real stages, text, sample order and optimizer of a swarm, in one process with one torch
thread, on the same tokens. The planner decides which stages a micro-batch visits: every epoch is a
path problem of its own (two ends peers, two replicas of every stage at eight places, costs that
drift); stage 0 is never left out, the others are visited equally often. A stage divides its
gradient by the tokens that went through it, as a cell does.

  first-kept  stage 0 holds the first layers too, as SkipPipe's does: the first block stage is on
              every path
  any         stage 0 is the embedding and the head alone, and every block stage may be left out:
              as in a swarm here
  whole       every stage on every path

Afterwards the held-out text goes through every choice of a number of missing stages; a figure over
choices is the mean of their losses. Where the first stage was kept, it is never missing either; the
twin is measured both ways.
"""

import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.report import Report, chosen, command_line
from node.core.ids import ENDS
from node.data.order import SampleOrder, Sampler
from node.data.sources import open_data
from node.manifest import Manifest, amended
from node.model.stages import Blocks, Ends, build
from node.optim.owner import Owner
from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.problem import PathProblem
from node.scheduler.planning.rules import broken
from node.stage.text import Text
from testbed.reference.swarm import step_all

STAGES = 8
HOPS = 6
EPOCHS = 330
SEQUENCES = 28
"""Sequences of an update, in 7 micro-batches or in 4, so that visits can be equal with the first
stage kept and without."""
HELD_OUT, AT_ONCE = 4, 16
"""Held-out batches for each choice of missing stages, and sequences of one."""
MOVES = 16
"""Plans the planner tries for an epoch."""
MISSING = (0, STAGES // 4, STAGES // 2)
CLAIM = "SkipPipe, arXiv 2502.19913: 1.07 with half missing, of 500 million parameters"

Visits = tuple[int, ...]
"""Block stages of a micro-batch, in order."""
Missing = tuple[int, bool]
"""How many block stages are missing, and whether the first is always there."""


@dataclass(frozen=True)
class Way:
    """How one of the models is trained. ``kept``: first block stages that are on every path, or
    None for all."""

    said: str
    kept: int | None
    micro_batches: int


WAYS = {
    "first-kept": Way(
        f"trained with {STAGES - HOPS} of {STAGES} block stages left out by turns, the first never",
        1,
        7,
    ),
    "any": Way(f"trained with {STAGES - HOPS} of {STAGES} block stages left out by turns", 0, 4),
    "whole": Way("trained without leaving out", None, 7),
}


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="updates of each model")
    parser.add_argument(
        "--only", metavar="WAY,WAY", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}"
    )
    parser.add_argument(
        "--curves", metavar="FILE", help="write the training losses and every choice's loss as JSON"
    )
    args = parser.parse_args()
    report = Report()
    rows(report, args.epochs, chosen(parser, args.only, WAYS), args.curves)
    return report.end(args.json)


def manifest(epochs: int, micro_batches: int) -> Manifest:
    """The demo's swarm with eight block stages of a layer each, narrow enough for one core."""
    return amended(
        Manifest.default_demo(),
        {
            "model.layers": STAGES,
            "model.d_model": 64,
            "model.heads": 4,
            "model.kv_heads": 2,
            "model.d_ff": 192,
            "pipeline.stages": STAGES,
            "pipeline.micro_batch": SEQUENCES // micro_batches,
            "training.target_batch": SEQUENCES,
            "training.epochs": epochs,
        },
    )


def routes(way: Way) -> Iterator[list[Visits]]:
    """The block stages of every micro-batch, epoch after epoch: a new plan whenever the costs have
    drifted."""
    first = tuple(range(1, (STAGES if way.kept is None else way.kept) + 1))
    if way.kept is None:
        yield from itertools.repeat([first] * way.micro_batches)
    swarm = _swarm(STAGES - len(first), HOPS - len(first), way.micro_batches)
    for epoch in itertools.count():
        dice = random.Random(f"drift/{epoch}")
        now = replace(
            swarm,
            delays=tuple(tuple(x * dice.uniform(0.7, 1.3) for x in row) for row in swarm.delays),
            compute=tuple(x * dice.uniform(0.7, 1.3) for x in swarm.compute),
        )
        planned = make_plan(now, moves=MOVES, seed=epoch).routes
        if why := broken(now, planned):
            raise AssertionError(why)
        yield [(*first, *(now.stage_of[n] + len(first) for n in route[1:])) for route in planned]


def _swarm(blocks: int, hops: int, micro_batches: int) -> PathProblem:
    """Two replicas of every stage at some of eight places. The problem's stage 0 holds the layers
    on every path."""
    dice = random.Random("skipping")
    peers = 2 * (blocks + 1)
    places = [(dice.random(), dice.random()) for _ in range(8)]
    at = [dice.choice(places) for _ in range(peers)]
    return PathProblem(
        name="skipping",
        delays=tuple(tuple(0.0 if a is b else 0.3 + 3.0 * math.dist(a, b) for b in at) for a in at),
        compute=(0.3,) * peers,
        stages=tuple((2 * s, 2 * s + 1) for s in range(blocks + 1)),
        length=hops + 1,
        slots=(3,) * peers,
        counts={0: micro_batches - micro_batches // 2, 1: micro_batches // 2},
    )


class Staged:
    """The stages of a swarm in one process."""

    def __init__(self, m: Manifest) -> None:
        self.manifest = m
        self.ends = build(m.model, m.pipeline.stages, ENDS)
        self.blocks = [
            build(m.model, m.pipeline.stages, s) for s in range(1, m.pipeline.stages + 1)
        ]
        self._owner = Owner(m.optimizer, m.training.epochs)

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, visits: Iterable[int]
    ) -> tuple[Tensor, int]:
        """(sum of nats, tokens) over these block stages."""
        if not isinstance(self.ends, Ends):
            raise TypeError("stage 0 is the ends")
        h_BTD = self.ends.embed(tokens_BT)
        for s in visits:
            h_BTD = self.blocks[s - 1](h_BTD)
        return self.ends.loss(h_BTD, targets_BT)

    def update(
        self, batches: Sequence[tuple[Tensor, Tensor]], routes: Sequence[Visits], epoch: int
    ) -> float:
        """One epoch: sums of gradients, each stage's over its own tokens, a step of everything. The
        mean loss before it."""
        total = 0.0
        counts = [0] * (len(self.blocks) + 1)
        for (tokens, targets), visits in zip(batches, routes, strict=True):
            loss, count = self.loss(tokens, targets, visits)
            loss.backward()
            total += float(loss.detach())
            for s in (ENDS, *visits):
                counts[s] += count
        live = dict[str, Tensor]()
        means = dict[str, Tensor]()
        modules: list[Ends | Blocks] = [self.ends, *self.blocks]
        for count, module in zip(counts, modules, strict=True):
            for name, p in module.named_parameters():
                live[name] = p
                if p.grad is not None:
                    means[name], p.grad = p.grad / count, None
        for name, fresh in step_all(
            self._owner, {n: p.data for n, p in live.items()}, means, epoch
        ).items():
            live[name].data = fresh
        return total / counts[ENDS]


@dataclass(frozen=True)
class Trained:
    """A model, its training loss by epoch, the seconds of one core it took, and the sets of stages
    it was trained over."""

    model: Staged
    curve: tuple[float, ...]
    seconds: float
    sets: int


def train(epochs: int, way: Way, home: Path) -> Trained:
    """Train from the manifest's first parameters through all its epochs."""
    m = manifest(epochs, way.micro_batches)
    text = text_of(m, m.pipeline.micro_batch, home)
    model = Staged(m)
    began = time.process_time()
    sampler = Sampler()
    curve = list[float]()
    seen = set[Visits]()
    for epoch, visits in zip(range(epochs), routes(way), strict=False):
        batches = [text.at(sampler.take(m.pipeline.micro_batch)) for _ in visits]
        curve.append(model.update(batches, visits, epoch))
        seen.update(visits)
        if epoch % 50 == 49:
            print(
                f"epoch {epoch + 1}: {fmean(curve[-10:]):.4f} nats per token",
                file=sys.stderr,
                flush=True,
            )
    return Trained(model, tuple(curve), time.process_time() - began, len(seen))


def text_of(m: Manifest, size: int, home: Path) -> Text:
    """The built-in text in batches of ``size``."""
    corpus = open_data(m.data, m.model.seq_len, m.model.vocab, home)[0]
    return Text(corpus, SampleOrder(corpus.windows, m.data.seed), size)


@torch.no_grad()
def held_out(model: Staged, text: Text, missing: Visits) -> float:
    """Nats per token without these block stages."""
    visits = [s for s in range(1, STAGES + 1) if s not in missing]
    pairs = [model.loss(*text.held_out(i), visits) for i in range(HELD_OUT)]
    return sum(float(loss) for loss, _ in pairs) / sum(n for _, n in pairs)


def rows(
    report: Report,
    epochs: int = EPOCHS,
    only: Sequence[str] = tuple(WAYS),
    curves: str | None = None,
) -> None:
    """The rows of item 6."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, object]] = {}
    means: dict[str, dict[Missing, float]] = {}
    with tempfile.TemporaryDirectory(prefix="tutti-skipping-") as home:
        for name in only:
            trained = train(epochs, WAYS[name], Path(home))
            text = text_of(trained.model.manifest, AT_ONCE, Path(home))
            all_choices = [
                c for k in MISSING for c in itertools.combinations(range(1, STAGES + 1), k)
            ]
            losses = {
                c: held_out(trained.model, text, c)
                for c in all_choices
                if not (WAYS[name].kept == 1 and 1 in c)
            }
            means[name] = _report(report, name, trained, epochs, losses)
            found[name] = {
                "curve": trained.curve,
                "held_out": {" ".join(map(str, c)): x for c, x in losses.items()},
            }
    if (twin := means.pop("whole", None)) is not None:
        for name, ours in means.items():
            _beside_the_twin(report, name, ours, twin)
    if curves:
        Path(curves).write_text(json.dumps(found))


def _report(
    report: Report, name: str, trained: Trained, epochs: int, losses: dict[Visits, float]
) -> dict[Missing, float]:
    """One model's rows: any choice of missing stages where it was trained with any, and choices
    with the first kept. Its mean losses."""
    means: dict[Missing, float] = {}
    way = WAYS[name]
    complete = losses[()]
    tokens = epochs * SEQUENCES * trained.model.manifest.model.seq_len
    text = (
        f"{way.said}; {tokens} tokens, {trained.sets} sets of stages, {trained.seconds:.0f} s "
        "of one core"
    )
    report.add(f"6 {name}: training loss", fmean(trained.curve[-10:]), "nats per token", text)
    report.add(
        f"6 {name}: nothing missing",
        complete,
        "nats per token",
        f"held out; perplexity {math.exp(complete):.3f}",
    )
    for kept in (True, False):
        for k in MISSING[1:]:
            by = {c: x for c, x in losses.items() if len(c) == k and not (kept and 1 in c)}
            if not kept and way.kept == 1:
                continue
            loss = fmean(by.values())
            order = sorted(by, key=by.__getitem__)
            means[k, kept] = loss
            best, worst = (
                f"{math.exp(by[c] - complete):.3f} without {c}" for c in (order[0], order[-1])
            )
            of = (
                f"loss {loss:.4f}, perplexity {math.exp(loss):.3f}; {len(by)} choices, {best} to "
                f"{worst}; {CLAIM}"
            )
            where = ", the first there" if kept else ""
            report.add(
                f"6 {name}: {k} of {STAGES} missing{where}, perplexity over all",
                math.exp(loss - complete),
                "ratio",
                of,
            )
    return means


def _beside_the_twin(
    report: Report, name: str, ours: dict[Missing, float], twin: dict[Missing, float]
) -> None:
    """Add the rows of the purpose: with stages missing the model is better than its twin without
    them."""
    for (k, kept), loss in ours.items():
        ratio = math.exp(loss - twin[k, kept])
        where = ", the first there" if kept else ""
        report.add(
            f"6 {name}: {k} of {STAGES} missing{where}, perplexity over the twin's",
            ratio,
            "ratio",
            f"losses {loss:.4f} and {twin[k, kept]:.4f}",
            "below 1",
            ratio < 1,
        )


if __name__ == "__main__":
    sys.exit(main())
