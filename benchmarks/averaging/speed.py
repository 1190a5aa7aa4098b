"""Speed of averaging 64 MiB: hivemind's averager, gloo's all-reduce, ours over TLS gRPC and through
the libp2p tunnel.

Peers are processes on loopback with one torch thread each (benchmarks/peers/speed.py). All ways
take turns in one run, after one round each to warm up; figures are medians. Every result is
compared with the true mean, outside the time: a wrong result does not count. Beside them the same
bytes alone over our connections: no exchange of ours can be faster. Part 1 of ``python -m
benchmarks.averaging``.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.exchange import free_ports
from benchmarks.report import ROOT, Report

NUMBERS = 16 << 20
CODECS = ("fp32", "fp16", "int8")
WAYS = (
    ("gloo", "fp32"),
    *((kind, c) for kind in ("hivemind", "ours", "wire") for c in CODECS),
    ("tunnel", "fp32"),
)
SAID = {
    "hivemind": {
        "fp32": "NoCompression",
        "fp16": "Float16Compression",
        "int8": "Uniform8BitQuantization",
    },
    "gloo": {"fp32": "all_reduce, not encrypted"},
    "wire": dict.fromkeys(
        CODECS, "the same bytes over the same connections, nothing done with them: the floor"
    ),
}
FASTER = 3.0
OF_GLOO = 0.3
INT8_OF_GLOO = 1.0


class Crew:
    """``world`` processes that average with each other in one way, as the program in ``tree``
    does."""

    def __init__(self, kind: str, world: int, numbers: int, tree: Path = ROOT) -> None:
        (port,) = free_ports(1)
        here = (tree / "benchmarks" / "peers").is_dir()
        program = "benchmarks.peers.speed" if here else "benchmarks.lab.speed"  # an older tree
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    program,
                    kind,
                    *map(str, (rank, world, port, numbers)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                cwd=tree,
                env=os.environ
                | {
                    "PYTHONPATH": str(tree),
                    "OMP_NUM_THREADS": "1",
                    "GRPC_VERBOSITY": "NONE",
                    "HIVEMIND_LOGLEVEL": "ERROR",
                },
            )
            for rank in range(world)
        ]

    def __enter__(self) -> "Crew":
        self.tell(self.hear())
        self.hear()
        return self

    def __exit__(self, *_: object) -> None:
        family = [child for p in self._processes for child in _family(p.pid)]
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        stubborn = psutil.wait_procs(family, timeout=15)[1]
        for child in stubborn:  # hivemind's children outlive their parents
            child.kill()
        for process in self._processes:
            process.wait()

    def round(self, codec: str) -> dict[str, float]:
        """Everybody averages at once. ``seconds`` from the first to begin to the last to end,
        ``met`` the slowest to know its group, ``cpu`` of all with their children, ``peak`` MiB of
        one peer with its children; ``fine``: it is the mean, ``same``: all have the same bits."""
        self.tell({"codec": codec})
        self.hear()
        families = [_family(p.pid) for p in self._processes]
        for process in (one for family in families for one in family):
            _forget_peak(process.pid)
        before = _cpu(families)
        self.tell({"at": time.monotonic() + 0.1})
        told = self.hear()
        cpu = _cpu(families) - before
        peak = max(sum(_peak(p.pid) for p in family) for family in families)
        self.tell({})
        results = self.hear()
        return {
            "seconds": max(t["ended"] for t in told) - min(t["began"] for t in told),
            "met": max(t.get("met", 0.0) for t in told),
            "cpu": cpu,
            "peak": peak / 1024,
            "off": max(r["off"] for r in results),
            "fine": all(r["fine"] for r in results),
            "same": len({r["digest"] for r in results}) == 1,
        }

    def tell(self, line: Any) -> None:
        """The same to everybody."""
        for process in self._processes:
            if process.stdin:
                process.stdin.write(json.dumps(line) + "\n")
                process.stdin.flush()

    def hear(self) -> list[Any]:
        """One line of everybody."""
        lines = [process.stdout.readline() if process.stdout else "" for process in self._processes]
        if not all(lines):
            raise SystemExit("a peer has died; see what it said above")
        return [json.loads(line) for line in lines]


def speed(
    report: Report,
    runs: int = 5,
    worlds: tuple[int, ...] = (2, 4),
    numbers: int = NUMBERS,
    only: str = "",
) -> None:
    """Rows of item 1."""
    ways = [way for way in WAYS if not only or way[0] in only.split(",")]
    for world in worlds:
        told = turns(ways, world, runs, numbers)
        for (kind, codec), rows in told.items():
            _one(report, kind, codec, world, numbers, rows)
        _targets(report, world, told)


def turns(
    ways: Sequence[tuple[str, str]], world: int, runs: int, numbers: int = NUMBERS
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Results of ``runs`` rounds of each way (kind and format), in turns, after one to warm up."""
    told: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        crews = {kind: Crew(kind, world, numbers) for kind in dict.fromkeys(k for k, _ in ways)}
        for crew in crews.values():  # all have been started
            stack.enter_context(crew)
        for run in range(runs + 1):
            for kind, codec in ways:
                result = crews[kind].round(codec)
                if run:
                    told[kind, codec].append(result)
    return told


def beside(
    before: Path, now: Path, rounds: int, worlds: tuple[int, ...] = (2, 4)
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Run our rounds in two trees, in turns; yields the case, and the seconds of every pair. One
    round may take a sixth more than the next, and the machine's speed changes within an hour."""
    for world in worlds:
        pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        with ExitStack() as stack:
            crews = [Crew("ours", world, NUMBERS, tree) for tree in (before, now)]
            for crew in crews:  # all have been started
                stack.enter_context(crew)
            for run in range(rounds + 1):
                for codec in CODECS:
                    order = crews if run % 2 else crews[::-1]
                    took = [crew.round(codec)["seconds"] for crew in order]
                    old, new = took if run % 2 else took[::-1]
                    if run:
                        pairs[codec].append((old, new))
        yield from ((f"{world} peers, {codec}", seconds) for codec, seconds in pairs.items())


def _one(
    report: Report, kind: str, codec: str, world: int, numbers: int, rows: list[dict[str, float]]
) -> None:
    mid = {key: median(r[key] for r in rows) for key in ("seconds", "met", "cpu", "peak", "off")}
    name = {"tunnel": "ours, tunnel", "wire": "gRPC and TLS alone"}.get(kind, kind)
    every = [r["seconds"] for r in rows]
    size = 4 * numbers / 1e9
    apart = (
        f"its matchmaking {mid['met']:.3f} s, without {mid['seconds'] - mid['met']:.3f} s; "
        if kind in ("hivemind", "ours")
        else ""
    )
    says = SAID.get(kind, {}).get(codec, "")
    peer = (
        f"{says + '; ' if says else ''}{apart}{min(every):.3f} to {max(every):.3f} s, "
        f"{mid['cpu']:.2f} processor s of all, "
        f"{mid['seconds'] / size:.2f} s per GB of a peer, peak {mid['peak']:.0f} MiB a peer"
    )
    if kind == "wire":
        report.add(f"1 {world} peers, {name}, {codec}", round(mid["seconds"], 4), "s", peer)
        return
    peer += (
        f", off {mid['off']:.1e}, "
        f"{'the same bits everywhere' if all(r['same'] for r in rows) else 'peers differ in bits'}"
    )
    fine = all(r["fine"] for r in rows)
    report.add(
        f"1 {world} peers, {name}, {codec}",
        round(mid["seconds"], 4),
        "s",
        peer,
        "the mean at every peer",
        fine,
    )


def _targets(
    report: Report, world: int, told: dict[tuple[str, str], list[dict[str, float]]]
) -> None:
    def times(other: tuple[str, str], ours: tuple[str, str]) -> float:
        return median(
            o["seconds"] / u["seconds"] for o, u in zip(told[other], told[ours], strict=True)
        )

    wanted = [(("hivemind", c), ("ours", c), FASTER) for c in CODECS]
    wanted += [
        (("gloo", "fp32"), ("ours", "fp32"), OF_GLOO),
        (("gloo", "fp32"), ("ours", "int8"), INT8_OF_GLOO),
    ]
    wanted += [(("wire", c), ("ours", c), 0.0) for c in CODECS]
    wanted += [
        (("hivemind", "fp32"), ("tunnel", "fp32"), 0.0),
        (("gloo", "fp32"), ("tunnel", "fp32"), 0.0),
    ]
    for other, ours, least in wanted:
        if other in told and ours in told:
            ratio = times(other, ours)
            mine = f"{'ours' if ours[0] == 'ours' else 'ours, tunnel'}, {ours[1]}"
            report.add(
                f"1 {world} peers, {mine}, beside {other[0]}, {other[1]}",
                round(ratio, 3),
                "times its speed",
                "the floor" if other[0] == "wire" else "",
                f">= {least:g}" if least else "",
                ratio >= least if least else None,
            )


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _cpu(families: list[list[psutil.Process]]) -> float:
    return sum(t.user + t.system for family in families for p in family for t in [p.cpu_times()])


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak(pid: int) -> int:
    """KiB of the largest resident set since :func:`_forget_peak`; what processes share is in
    each."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
