"""SmolLM2 on Moby Dick by the settings that ``tutti swarm init --from`` chooses, in full and by
adapters, beside AdamW in one process at other rates and with other orders of the text; and a run
with a rate that is far too large."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real.alone import runs_of
from benchmarks.real.generated import commits, made, peers_of
from benchmarks.real.moby_dick import moby_dick
from benchmarks.real.pretrained import smollm2
from benchmarks.report import Report
from node.model.device import Format
from protos.control_pb2 import Snapshot
from testbed.daemons.fleet import Box, Hang

RANK = 16
CLOSE = 1.02
"""Times the best held-out loss of one process."""
TIMES_TOO_LARGE = 20
EPOCH_S = 600.0
"""For an epoch, beside the start."""


@dataclass(frozen=True)
class Size:
    """Length of the runs, and the runs in one process: factors of the rate, seeds of the order."""

    settings: Mapping[str, Any]
    factors: tuple[float, ...] = (1 / 3, 1.0, 3.0)
    seeds: tuple[int, ...] = (1, 2, 3)


WHOLE = Size({"training.epochs": 60})
QUICK = Size({"training.epochs": 12, "training.target_batch": 4}, seeds=(1,))
"""12 epochs of 2,048 tokens, and three runs in one process."""


def full(report: Report, root: Path, *, quick: bool = False) -> None:
    """Rows of all weights."""
    _compared(report, "full", {}, root, quick=quick)


def adapters(report: Report, root: Path, *, quick: bool = False) -> None:
    """Rows of adapters."""
    _compared(report, f"adapters of rank {RANK}", {"model.adapter": RANK}, root, quick=quick)


def _compared(
    report: Report, what: str, changes: Mapping[str, Any], root: Path, *, quick: bool
) -> None:
    size = QUICK if quick else WHOLE
    box, last, formats = _run(root, {**size.settings, **changes})
    t = box.manifest.training
    o = box.manifest.optimizer
    tokens = t.target_batch * box.manifest.model.seq_len
    report.add(
        f"1 held out after {t.epochs} epochs of {tokens:,} tokens, {what}",
        last.loss_val,
        f"nats; {last.loss_val_before:.4f} before; {o.name}, peak {o.adam_lr:g}; "
        + ", ".join(sorted(formats)),
        "SmolLM2-135M-Instruct on Moby Dick, defaults",
        "below that before",
        holds=0 < last.loss_val < last.loss_val_before,
    )
    kind: Format = "fp32"
    if "bf16" in formats:
        kind = "bf16"
    found, left_out = runs_of(box.manifest, root, kind, size.factors, size.seeds)
    (rate, seed), best = min(found.items(), key=lambda item: item[1])
    report.add(
        f"1 held out beside the best of {len(size.factors) * len(size.seeds)} runs in one process, "
        f"{what}",
        last.loss_val / best,
        f"ratio to {best:.4f}, of the rate {rate:.2g} and the order {seed}",
        f"AdamW in one process at equal tokens, {kind}: "
        + ", ".join(f"{r:.2g}/{s} {loss:.3f}" for (r, s), loss in found.items())
        + left_out,
        f"at most {CLOSE}",
        holds=last.loss_val <= CLOSE * best,
    )


def too_large(report: Report, root: Path) -> None:
    """The row of a rate 20 times the default: the status must say so, and the journal once."""
    usual = _made(root / "usual", QUICK.settings).manifest.optimizer.adam_lr
    changes = {**QUICK.settings, "optimizer.adam_lr": TIMES_TOO_LARGE * usual}
    box, last, _ = _run(root / "run", changes)
    said = next((text for text in last.warnings if "got worse" in text), "")
    told = sum(len(peer.events("worse-than-before")) for peer in box.made.values())
    report.add(
        f"1 a rate {TIMES_TOO_LARGE} times the default is said to make the model worse",
        told,
        f"lines in the journal; held out {last.loss_val:.4f}, {last.loss_val_before:.4f} before; "
        f"status: {said or 'nothing'}",
        "",
        "1, and in the status",
        holds=told == 1 and bool(said),
    )


def _made(root: Path, changes: Mapping[str, Any]) -> Box:
    """The manifest that ``init`` writes, with these changes and nothing else."""
    return made(root, smollm2(), changes, "--data", str(moby_dick()))


def _run(root: Path, changes: Mapping[str, Any]) -> tuple[Box, Snapshot, set[str]]:
    """A peer for each stage until all epochs are committed; the last status of the ends, and the
    number formats in which the peers computed."""
    box = _made(root, changes)
    peers = peers_of(box, [1] * (box.manifest.pipeline.stages + 1), threads=1)
    epochs = box.manifest.training.epochs
    try:
        box.start(*peers)
        box.wait(
            "the end of the run",
            lambda: peers[0].status().state == "finished",
            epochs * EPOCH_S,
            every=2.0,
        )
        last = peers[0].status()
        formats = {last.precision} | {peer.status().precision for peer in peers[1:]}
        if len(commits(peers[0])) < epochs:
            raise Hang(f"{len(commits(peers[0]))} of {epochs} epochs were committed")
    finally:
        box.clean_up()
    return box, last, formats
