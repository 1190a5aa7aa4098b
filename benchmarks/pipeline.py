"""Tokens per second of the demo's swarm (seven daemons) beside one process that trains the same
model on the same cores.

    python -m benchmarks.pipeline [--runs 3] [--epochs 24] [--json -]

Both sides compute the same updates (tests/golden). The one process gets every core; the swarm's
processes one torch thread each. Runs alternate, so that a slow minute of the machine hits both;
figures are medians. Epochs before ``WARM`` are left out on both sides.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, command_line

WARM = 4
TARGET = 0.5
NODES = (1, 2, 2, 2)


def main() -> int:
    """Measure, print, and exit 0 when the target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="alternating runs of each side")
    parser.add_argument("--epochs", type=int, default=24, help="epochs of a run")
    parser.add_argument("--alone", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(_alone(args.alone, args.epochs)))
        return 0
    report = Report()
    cores = os.cpu_count() or 1
    alone: dict[int, list[float]] = {n: [] for n in sorted({1, cores})}
    swarm: list[dict[str, Any]] = []
    for run in range(args.runs):
        for threads, rates in alone.items():
            rates.append(_measure_alone(threads, args.epochs))
            print(
                f"run {run + 1}: one process, {threads} threads: {rates[-1]:,.0f} tokens/s",
                file=sys.stderr,
            )
        swarm.append(measure_swarm(args.epochs, NODES))
        print(
            f"run {run + 1}: swarm of {sum(NODES)}: {swarm[-1]['tokens_per_s']:,.0f} tokens/s",
            file=sys.stderr,
        )
    return 0 if _report(report, alone, swarm, args.json) else 1


def _report(
    report: Report, alone: dict[int, list[float]], swarm: list[dict[str, Any]], where: str | None
) -> bool:
    rate = median(s["tokens_per_s"] for s in swarm)
    best_threads = max(alone, key=lambda n: median(alone[n]))
    best = median(alone[best_threads])
    ratios = [s["tokens_per_s"] / a for s, a in zip(swarm, alone[best_threads], strict=True)]
    peer = f"one process, {best_threads} threads: {best:,.0f} tokens/s, median of {len(swarm)}"
    ratio = median(ratios)
    report.add("3 ratio", round(ratio, 3), "x", peer, f">= {TARGET}", ratio >= TARGET)
    report.add("3 tokens per second", round(rate), "tokens/s", peer)
    for threads, rates in alone.items():
        report.add(f"3 one process, {threads} threads", round(median(rates)), "tokens/s")
    report.add(
        "3 bytes sent per token", round(median(s["bytes_per_token"] for s in swarm), 1), "bytes"
    )
    limit = _activation_bytes()
    report.add(
        "3 activation bytes per token, least", limit, "bytes", "hops x 2 directions x d_model x 4"
    )
    for kind in ("compute", "wire", "wait", "round"):
        share = median(s["time_s"].get(kind, 0.0) / s["device_s"] for s in swarm)
        report.add(f"3 time in {kind}", round(share, 3), "share of daemon seconds")
    report.add("3 epoch, plan to commit", round(median(s["epoch_s"] for s in swarm), 3), "s")
    report.add(
        "3 between commit and first micro-batch, close and round",
        round(median(s["gap_s"] for s in swarm), 3),
        "s per epoch",
    )
    report.add(
        "3 cores busy in the daemons",
        round(median(s["busy"] for s in swarm), 3),
        "share of all cores",
        "p2pd not counted",
    )
    flops = _flops_per_token()
    report.add(
        "3 cpu time per token, swarm over one process with 1 thread",
        round(median(s["cpu_per_token"] for s in swarm) * median(alone[1]), 3),
        "ratio",
        f"{flops / 1e6:.1f} MFLOP a token",
    )
    report.write(where)
    return ratio >= TARGET


def _manifest(epochs: int):
    from node.manifest import Manifest

    base = Manifest.default_demo()
    return dataclasses.replace(
        base, training=dataclasses.replace(base.training, epochs=epochs, eval_every=0)
    )


def _activation_bytes() -> int:
    m = _manifest(1)
    return (m.pipeline.stages + 1) * 2 * m.model.d_model * 4


def _flops_per_token() -> int:
    from node.model.cost import flops_per_token

    m = _manifest(1)
    return sum(flops_per_token(m.model, m.pipeline.stages, s) for s in range(m.pipeline.stages + 1))


def _measure_alone(threads: int, epochs: int) -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks.pipeline",
        "--alone",
        str(threads),
        "--epochs",
        str(epochs),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _alone(threads: int, epochs: int) -> float:
    from node.model.device import set_threads
    from testbed.reference.swarm import Reference

    set_threads(threads)
    with tempfile.TemporaryDirectory() as home:
        rows = list(Reference(_manifest(epochs), Path(home)).train(epochs))[WARM:]
    return sum(r.tokens for r in rows) / sum(r.seconds for r in rows)


def measure_swarm(epochs: int, nodes: tuple[int, ...]) -> dict[str, Any]:
    """Figures of one run of the demo's swarm. ``nodes``: daemons of the ends, then of each block
    stage."""
    from node.app.demo.daemons import DemoOptions
    from node.app.demo.play import play

    with (
        tempfile.TemporaryDirectory(prefix="tutti-bench-") as home,
        contextlib.redirect_stderr(open(os.devnull, "w")),
    ):
        outcome = play(
            DemoOptions(nodes, json=True, home=Path(home), manifest=_manifest(epochs), sample=False)
        )
        commits = _commits(Path(home) / "ends-0" / "log" / "events.jsonl")
    if outcome.failures or (max(nodes) > 1 and not outcome.digests_equal):
        raise SystemExit("the swarm failed while it was measured")
    kept = [c for c in commits if c["fields"]["epoch"] > WARM]
    seconds = kept[-1]["at"] - next(c["at"] for c in commits if c["fields"]["epoch"] == WARM)
    tokens = sum(c["fields"]["tokens"] for c in kept)
    spent = outcome.time_s
    device = outcome.seconds * sum(nodes)
    return {
        "tokens_per_s": tokens / seconds,
        "bytes_per_token": outcome.bytes_sent / outcome.tokens,
        "time_s": spent,
        "device_s": device,
        "epoch_s": median(c["fields"]["seconds"] for c in kept),
        "gap_s": median(c["fields"]["seconds"] - c["fields"]["run_s"] for c in kept),
        "busy": outcome.cpu_s / (outcome.seconds * (os.cpu_count() or 1)),
        "cpu_per_token": outcome.cpu_s / outcome.tokens,
    }


def _commits(path: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [e for e in events if e["kind"] == "epoch-committed"]


if __name__ == "__main__":
    sys.exit(main())
