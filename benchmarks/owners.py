"""Owners by counted operations beside owners by measured seconds: what the slowest owner's step
takes.

    python -m benchmarks.owners [--json -]

Every part of a block stage is stepped here in turn, some steps of each, and its mean is what the
part costs; both assignments are judged by these seconds. A second measurement judges too, so that
an assignment by seconds is not judged by the noise it was fitted to.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.report import Report, command_line
from node.core.ids import PeerId
from node.model.settings import ModelSettings
from node.model.shapes import parameter_shapes
from node.optim.owner import Owner
from node.optim.ownership import assign
from node.optim.parts import ParameterPart, parts_of
from node.optim.settings import OptimSettings

MODEL = ModelSettings(layers=4, d_model=384, heads=6, kv_heads=2)
"""Four layers at one block stage, 28 matrices of four shapes and eight vectors."""
STEPS, EVERY = 10, 5
"""Steps that are timed; as Shampoo and SOAP make their bases in one of five, two of them do."""
OWNERS = (2, 3, 4)


def measured(report: Report) -> None:
    """Item 8: one row for each method and number of owners."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the clock counts one thread
    try:
        _rows(report)
    finally:
        torch.set_num_threads(threads)


def _rows(report: Report) -> None:
    for method in ("muon", "shampoo", "soap"):
        settings = OptimSettings(name=method, warmup=0, precondition_every=EVERY)
        parts = parts_of(parameter_shapes(MODEL, 1, 1), settings)
        fitted = seconds(parts, settings, 0)
        judge = seconds(parts, settings, 1)
        for count in OWNERS:
            cell = [(PeerId(f"{n:02d}"), 1.0) for n in range(count)]
            by_count = slowest(assign(parts, cell), judge)
            timed = [replace(p, cost=max(1.0, fitted[p.shape] * 1e9)) for p in parts]
            by_seconds = slowest(assign(timed, cell), judge)
            ideal = sum(judge[p.name] for p in parts) / count
            report.add(
                f"8 {method}, {count} owners: slowest by measured seconds over by operations",
                by_seconds / by_count,
                "ratio",
                f"{by_seconds * 1e3:.1f} and {by_count * 1e3:.1f} ms; over even shares "
                f"{by_seconds / ideal:.3f} and {by_count / ideal:.3f}",
            )


def seconds(
    parts: Sequence[ParameterPart], settings: OptimSettings, seed: int
) -> dict[object, float]:
    """Mean of the timed steps, by part and, over the parts of one shape, by shape: seconds of the
    processor on one thread."""
    owner = Owner(settings, 100)
    dice = torch.Generator().manual_seed(seed)
    found: dict[object, float] = {}
    by_shape: dict[tuple[int, ...], list[float]] = {}
    for part in parts:
        old = torch.randn(part.shape, generator=dice) * 0.02
        spent = 0.0
        for epoch in range(STEPS + 1):
            gradient = torch.randn(part.shape, generator=dice) * 0.01
            began = time.thread_time()
            old = owner.step(part.name, old, gradient, epoch)
            # In the first step libraries make the objects that they keep.
            spent += (time.thread_time() - began) * (epoch > 0)
            owner.commit(epoch)
        owner.drop(part.name)
        found[part.name] = spent / STEPS
        by_shape.setdefault(part.shape, []).append(spent / STEPS)
    return found | {shape: sum(each) / len(each) for shape, each in by_shape.items()}


def slowest(owners: Mapping[str, PeerId], cost: Mapping[object, float]) -> float:
    """Seconds of the owner with most to do."""
    load: dict[PeerId, float] = {}
    for name, peer in owners.items():
        load[peer] = load.get(peer, 0.0) + cost[name]
    return max(load.values())


def main() -> int:
    """Print every row; there is no target."""
    args = command_line(__doc__).parse_args()
    report = Report()
    measured(report)
    return report.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
