"""Cost of each way of averaging beside its slow twin and the mean, and its worth when a member
lies.

    python -m benchmarks.reducers [--runs 5] [--megabytes 16] [--no-study] [--json -]

Cost: processor seconds of one thread per gigabyte *received* (n contributions of ``--megabytes``
each), the lowest of ``--runs``. The twins (testbed/reference/reducers.py) sort with torch; stacking
their input is not counted. The study trains a small convex and a small non-convex model with one
liar among four or eight, by each reducer, and ends with its loss.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.report import Report, command_line
from node.averaging.reducers.reducer import Gathered, Reducer, means
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId
from node.wire.coding.codecs import Coded
from testbed.reference.reducers import TWINS, flat, means_of

COUNTS = (2, 4, 8, 16)
ALLOWED = {
    "mean": 0.8,
    "clipped-mean": 1.0,
    "median": 0.65,
    "trimmed-mean": 0.65,
    "centered-clip": 2.0,
}
"""Seconds per gigabyte that may be spent for 8 and more contributors, norms and quarantine
included."""
STEPS = 30
RATE = 0.5
LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "honest": lambda g: g,
    "huge (x 1e6)": lambda g: g * 1e6,
    "loud (x 5)": lambda g: g * 5,
    "sign flipped": lambda g: -g,
    "sign flipped, x 5": lambda g: -5 * g,
}


def main() -> int:
    """Measure, print, and exit 0 when every cost is within its bound."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--runs", type=int, default=5, help="repetitions, of which the fastest counts"
    )
    parser.add_argument("--megabytes", type=int, default=16, help="size of one contribution")
    parser.add_argument("--no-study", action="store_true", help="costs only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report()
    for count in COUNTS:
        _costs(report, count, args.megabytes, args.runs)
    if not args.no_study:
        for model in (_convex, _curved):
            for among in (4, 8):
                _study(report, model, among)
    return report.end(args.json)


def _costs(report: Report, count: int, megabytes: int, runs: int) -> None:
    numbers = megabytes * 1_000_000 // 4
    generator = torch.Generator().manual_seed(count)
    peers = [PeerId(f"p{i:02}") for i in range(count)]
    shapes = [(numbers // 2,), (numbers // 4,), (numbers - numbers // 2 - numbers // 4,)]
    sums = {p: [torch.randn(s, generator=generator) for s in shapes] for p in peers}
    claims = {p: 1000 + i for i, p in enumerate(peers)}
    coded = {p: [Coded.of(t) for t in given] for p, given in sums.items()}
    gathered = Gathered(1, ("a", "b", "c"), claims, coded)
    received = count * numbers * 4 / 1e9
    plain = (
        _fastest(runs, lambda: [m.whole() for m in means(coded, peers, sum(claims.values()))])
        / received
    )
    report.add(f"mean alone, n={count}", plain, "s/GB", "no norms, no quarantine")
    stacked = torch.stack([flat(sums[p], claims[p]) for p in peers])
    for name, twin in TWINS.items():
        reducer = Reducer(AveragingSettings(reducer=name))
        cost = _fastest(runs, lambda r=reducer: r.reduce(gathered)) / received
        slow = (
            _fastest(max(1, runs // 3), lambda t=twin: t(stacked, list(claims.values()))) / received
        )
        bound = ALLOWED[name] if count >= 8 else None
        note = " (falls back to the mean)" if count == 2 and name != "mean" else ""
        report.add(
            f"{name}, n={count}{note}",
            cost,
            "s/GB",
            f"twin {slow:.3g} s/GB, {slow / cost:.1f} times; mean alone x {cost / plain:.2f}",
            "" if bound is None else f"at most {bound}",
            None if bound is None else cost <= bound,
        )


def _fastest(runs: int, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(runs):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best


# Worth of each reducer


class _convex:
    """Linear regression, 64 numbers, noisy targets: loss is half the mean square; the noise alone
    leaves 0.005."""

    name = "convex"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(4096, 64, generator=generator)
        self.y = self.x @ torch.randn(64, generator=generator) + 0.1 * torch.randn(
            4096, generator=generator
        )
        self.start = torch.zeros(64)

    def loss(self, at: Tensor, rows: Tensor) -> Tensor:
        return 0.5 * (self.x[rows] @ at - self.y[rows]).square().mean()


class _curved:
    """Two layers with a tanh between them, 16-16-1, learning another such pair."""

    name = "non-convex"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(4096, 16, generator=generator)
        self.y = self._out(torch.randn(272, generator=generator), self.x)
        self.start = torch.randn(272, generator=generator) * 0.3

    @staticmethod
    def _out(at: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ at[:256].view(16, 16) / 4) @ at[256:] / 4

    def loss(self, at: Tensor, rows: Tensor) -> Tensor:
        return 0.5 * (self._out(at, self.x[rows]) - self.y[rows]).square().mean()


def _study(report: Report, model: type[_convex] | type[_curved], among: int) -> None:
    for lie, change in LIES.items():
        for quarantine in (10.0, 0.0) if lie.startswith("huge") else (10.0,):
            settings = {
                name: AveragingSettings(reducer=name, quarantine=quarantine) for name in TWINS
            }
            losses = {name: _train(model(), s, among, change) for name, s in settings.items()}
            said = {name: round(v, 5) if v < 1e6 else "diverged" for name, v in losses.items()}
            off = "" if quarantine else ", no quarantine"
            report.add(
                f"{model.name}, 1 liar of {among}, {lie}{off}", said, f"loss after {STEPS} steps"
            )


def _train(
    model: _convex | _curved,
    settings: AveragingSettings,
    among: int,
    lie: Callable[[Tensor], Tensor],
) -> float:
    """Plain gradient descent; every member has 64 rows of its own a step, the first one lies."""
    generator = torch.Generator().manual_seed(3)
    reducer = Reducer(settings)
    at = model.start.clone()
    peers = [PeerId(f"p{i}") for i in range(among)]
    for epoch in range(STEPS):
        sums: dict[PeerId, list[Coded]] = {}
        for i, peer in enumerate(peers):
            here = at.clone().requires_grad_()
            rows = torch.randint(len(model.y), (64,), generator=generator)
            (gradient,) = torch.autograd.grad(model.loss(here, rows), here)
            sums[peer] = [Coded.of((lie(gradient) if i == 0 else gradient) * 64)]
        reduced = reducer.reduce(Gathered(epoch, ("at",), dict.fromkeys(peers, 64), sums))
        reducer.remember(reduced)
        at = at - RATE * means_of(reduced)[0]
        if not bool(torch.isfinite(at).all()):
            return float("inf")
    return float(model.loss(at, torch.arange(len(model.y))))


if __name__ == "__main__":
    sys.exit(main())
