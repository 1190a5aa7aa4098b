"""A Muon step of a cell, from the members' gradients to fresh parameters at all of them, beside the
collectives of torch.

    python -m benchmarks.exchange [--runs 5] [--width 1024] [--json -]
        [--svg FILE.svg | --png FILE.png]

Members are processes on loopback with one torch thread each (benchmarks/peers/cell.py). Ours is the
cell's round over TLS gRPC, every matrix stepped by its owner, in micro-groups; beside it, over
gloo: all-reduce and torch.optim.Muon in every process (replicated), and round-robin ownership
(DistributedMuon of pytorch_optimizer). Matrices come from Qwen3-0.6B, one layer for each member,
``--width`` wide (1024 in the original). All ways take turns in one run; figures are medians. With
more members than cores, processes wait for each other's cores: processor seconds are given too.
"""

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, command_line
from benchmarks.shared.chart import figure
from benchmarks.shared.curve import curves
from node.averaging.settings import AveragingSettings
from node.telemetry import pictures

MIB = 1 << 20
ONE = 1 << 40
"""Bytes of a group that hold whatever there is."""
SWEEP = (1, 2, 4, 8, 16, 32, 64)
"""MiB."""
MBIT = (100, 400)
"""Lines over which the overlap is asked for: on bare loopback the exchange is processor time too,
and the cores belong to the steps."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("round", {"group_bytes": AveragingSettings.group_bytes}),
    "one group": ("round", {"group_bytes": ONE}),
    "replicated": ("gloo", {"optimizer": "replicated"}),
    "replicated, our kernel": ("gloo", {"optimizer": "replicated-ours"}),
    "round robin": ("gloo", {"optimizer": "round-robin"}),
    "exchange": ("round", {"group_bytes": AveragingSettings.group_bytes, "identity": True}),
    "exchange, one group": ("round", {"group_bytes": ONE, "identity": True}),
    "compute": ("step", {}),
}
TARGET = 1.25


def main() -> int:
    """Measure, print, and exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="rounds of every way, taking turns")
    parser.add_argument("--width", type=int, default=1024, help="of the model")
    parser.add_argument(
        "--svg", "--png", dest="picture", metavar="FILE", type=Path, help="the picture of the sweep"
    )
    args = parser.parse_args()
    if args.picture is not None:
        pictures.check(args.picture)
    report = Report()
    distributed(report, args.runs, args.width, args.picture)
    return report.end(args.json)


def distributed(
    report: Report, runs: int = 5, width: int = 1024, picture: Path | None = None
) -> None:
    """Rows of item 5: step times, overlap, bytes, and the sweep of C_max."""
    for mbit in MBIT:
        with Cell(2, 2, width, mbit) as cell:
            told = _turns(
                cell,
                runs,
                {
                    name: WAYS[name]
                    for name in ("ours", "one group", "exchange", "exchange, one group", "compute")
                },
            )
            _overlap(
                report,
                told,
                f"2 processes, lines of {mbit} Mbit/s, {4 * cell.numbers / MIB:.0f} MiB",
                asked=True,
            )
    for members in (2, 4):
        with Cell(members, members, width) as cell:
            _compare(report, cell, runs)
            if members == 2:
                _sweep(report, cell, runs, picture)


class Cell:
    """Processes of ``benchmarks.peers.cell`` that take orders together; ``mbit``: of the lines
    between them, 0 for bare loopback."""

    def __init__(self, members: int, layers: int, width: int, mbit: int = 0) -> None:
        self.members = members
        self.numbers = layers * 15 * width * width
        port, *more = free_ports(1 + 2 * members)
        lines = [(more[2 * i], more[2 * i + 1]) for i in range(members)] if mbit else []
        self._line = (
            _start("line", mbit, *(f"{line}:{listen}" for listen, line in lines)) if mbit else None
        )
        self._processes = [
            _start("cell", rank, members, port, layers, width, *(lines[rank] if lines else ()))
            for rank in range(members)
        ]

    def __enter__(self) -> "Cell":
        known = {h["peer"]: h["addresses"] for h in self._hear()}
        self._tell(known)
        self._hear()
        return self

    def __exit__(self, *_: object) -> None:
        everybody = [*self._processes, *([self._line] if self._line else [])]
        for process in everybody:
            if process.stdin:
                process.stdin.close()
        for process in everybody:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def order(self, do: str, **more: Any) -> dict[str, float]:
        """Everybody does it at once. ``seconds`` from the first to begin to the last to end,
        ``cpu`` of all together, ``sent`` and ``received`` of the busiest, ``longest`` of one
        member."""
        self._tell({"do": do, "at": time.monotonic() + 0.05, **more})
        told = self._hear()
        return {
            "seconds": max(t["ended"] for t in told) - min(t["began"] for t in told),
            "longest": max(t["ended"] - t["began"] for t in told),
            "cpu": sum(t["cpu"] for t in told),
            "sent": max(t["sent"] for t in told),
            "received": max(t["received"] for t in told),
        }

    def _tell(self, line: dict[str, Any]) -> None:
        for process in self._processes:
            if process.stdin:
                process.stdin.write(json.dumps(line) + "\n")
                process.stdin.flush()

    def _hear(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() if process.stdout else "" for process in self._processes]
        if not all(lines):
            raise SystemExit("a member of the cell has died; see what it said above")
        return [json.loads(line) for line in lines]


def _start(name: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.peers.{name}", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"},
    )


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _turns(
    cell: Cell, runs: int, ways: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, list[dict[str, float]]]:
    """Every way once to warm up, then ``runs`` times in turns."""
    told: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, (do, more) in ways.items():
            result = cell.order(do, **more)
            if run:
                told[name].append(result)
    return told


def _compare(report: Report, cell: Cell, runs: int) -> None:
    n = cell.members
    told = _turns(cell, runs, WAYS)
    seconds = {name: median(t["seconds"] for t in rows) for name, rows in told.items()}
    cpu = {name: median(t["cpu"] for t in rows) for name, rows in told.items()}
    where = f"{n} processes, {4 * cell.numbers / MIB:.0f} MiB"
    for other in ("replicated", "replicated, our kernel", "round robin"):
        ratio = median(
            b["seconds"] / a["seconds"] for a, b in zip(told["ours"], told[other], strict=True)
        )
        peer = (
            f"{other}: {seconds[other]:.3f} s ({cpu[other]:.2f} processor s); ours: "
            f"{seconds['ours']:.3f} s ({cpu['ours']:.2f})"
        )
        goal = "" if other == "replicated, our kernel" else "> 1"
        report.add(
            f"5 step, {where}, {other}",
            round(ratio, 3),
            "times as long as ours",
            peer,
            goal,
            ratio > 1 if goal else None,
        )
    _overlap(report, told, where, asked=False)
    sent = median(t["sent"] for t in told["ours"])
    # A ring moves 2V(n-1)/n to reduce everywhere and V(n-1)/n to gather; what gloo really does is
    # no less.
    layer_wise = 3 * 4 * cell.numbers * (n - 1) / n
    peer = (
        f"{sent / MIB:.1f} MiB by the transport's counters; all-reduce and all-gather: "
        f"{layer_wise / MIB:.1f} (computed)"
    )
    share = sent / layer_wise
    report.add(
        f"5 bytes sent by the busiest member, {where}",
        round(share, 3),
        "of layer-wise",
        peer,
        "<= 0.7",
        share <= 0.7,
    )


def _overlap(
    report: Report, told: dict[str, list[dict[str, float]]], where: str, asked: bool
) -> None:
    """How far the exchange and the compute of a cell hide each other."""
    seconds = {name: median(t["seconds"] for t in rows) for name, rows in told.items()}
    cpu = {name: median(t["cpu"] for t in rows) for name, rows in told.items()}
    for name, alone in (("ours", "exchange"), ("one group", "exchange, one group")):
        both = [
            max(e["seconds"], c["longest"])
            for e, c in zip(told["exchange"], told["compute"], strict=True)
        ]
        ratio = median(a["seconds"] / b for a, b in zip(told[name], both, strict=True))
        cores = os.cpu_count() or 1
        peer = (
            f"{seconds[name]:.3f} s; exchange alone {seconds[alone]:.3f} ({cpu[alone]:.2f} "
            "processor s), compute alone "
            f"{seconds['compute']:.3f} ({cpu['compute']:.2f}); {cores} cores need "
            f"{(cpu[alone] + cpu['compute']) / cores:.3f} s for both"
        )
        this = asked and name == "ours"
        report.add(
            f"5 round over the longer of exchange and compute, {where}, {name}",
            round(ratio, 3),
            "x",
            peer,
            f"<= {TARGET}" if this else "",
            ratio <= TARGET if this else None,
        )


def _sweep(report: Report, cell: Cell, runs: int, picture: Path | None) -> None:
    ways: dict[str, tuple[str, dict[str, Any]]] = {}
    for size in SWEEP:
        ways[f"{size}"] = "round", {"group_bytes": size * MIB}
        ways[f"{size} exchange"] = "round", {"group_bytes": size * MIB, "identity": True}
    told = _turns(cell, runs, ways)
    rounds = [(float(size), median(t["seconds"] for t in told[f"{size}"])) for size in SWEEP]
    alone = [
        (float(size), median(t["seconds"] for t in told[f"{size} exchange"])) for size in SWEEP
    ]
    best = min(y for _, y in rounds)
    level = next(x for x, y in rounds if y <= 1.05 * best)
    owned = 4 * cell.numbers / cell.members
    report.add(
        "5 C_max swept, 2 processes",
        {f"{x:g} MiB": round(y, 3) for x, y in rounds},
        "s",
        f"exchange alone: {', '.join(f'{x:g}: {y:.3f}' for x, y in alone)}; an owner has "
        f"{owned / MIB:.0f} MiB",
    )
    report.add(
        "5 C_max from which the round is within 5 % of its best",
        level,
        "MiB",
        f"{math.ceil(owned / MIB / level)} groups an owner",
    )
    if picture is not None:
        title = (
            f"Round of 2 members, {4 * cell.numbers / MIB:.0f} MiB, over the size of a micro-group"
        )
        panel = ("C_max, MiB", "seconds", {"round": rounds, "exchange alone": alone})
        pictures.write(
            picture,
            lambda: curves(title, *panel),
            lambda: figure(title, [panel], top=math.inf, base=2),
        )


if __name__ == "__main__":
    sys.exit(main())
