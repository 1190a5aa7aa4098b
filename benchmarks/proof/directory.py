"""500 nodes of the directory in one machine, with the records of daemons, while nodes leave and
others come; beside hivemind's DHT as it comes.

Every node is a daemon's :class:`~node.dht.directory.Directory` and
:class:`~node.coordinator.presence.Presence`, with a TCP socket of its own on loopback instead of a
p2pd (:mod:`testbed.networks.loopback`); a few processes share the nodes. In each cell a node posts
its record and reads those of its cell at a daemon's pace. A tenth of the nodes leaves every minute,
in turn by withdrawal, by a kill, and without a sign: its connections stay and nobody answers. Half
a second after each departure on average a newcomer joins that knows the founders.

Readings that count are those of a node drawn by lot of a cell drawn by lot, so the reader seldom
knows any of the records before. One is good if it ended in time and shows every peer of the cell
whose first record was stored before it began and that did not leave before it ended.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Report

NODES, CELLS = 500, 25
WORKERS = 4
LEAVE_PER_MIN = 0.1
READS_PER_S = 10.0
COME_S, SETTLE_S, MEASURE_S = 40.0, 10.0, 60.0
"""Seconds in which all nodes come; from then on others leave; after SETTLE_S more readings count
for MEASURE_S."""
CLOSE_S = 60.0
IN_TIME_S = 2.0
LEAST = 0.99
MIB = 1 << 20
KINDS = ("tutti", "hivemind")


@dataclass(frozen=True)
class Reading:
    """One reading. ``missing``: peers that it should have shown; ``of``: peers that it should
    show."""

    seconds: float
    missing: int
    of: int
    first: bool
    """It is a newcomer's first one, of its own cell."""

    @property
    def good(self) -> bool:
        return self.seconds <= IN_TIME_S and not self.missing


@dataclass
class Ran:
    """One swarm of a kind. ``cores``: cores that its processes kept busy; ``late_s``: longest delay
    of a task in any of them."""

    readings: list[Reading] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    nodes: int = 0
    left: int = 0
    came: int = 0
    bytes_each: float = 0.0
    cores: float = 0.0
    late_s: float = 0.0
    links: float = 0.0

    def of(self, *, first: bool) -> list[Reading]:
        """The readings of newcomers, or all others."""
        return [reading for reading in self.readings if reading.first == first]


def rows(report: Report, root: Path, quick: bool = False) -> None:
    """The rows of part 11."""
    nodes, cells = (100, 5) if quick else (NODES, CELLS)
    times = (8.0, 2.0, 15.0) if quick else (COME_S, SETTLE_S, MEASURE_S)
    ran = {kind: run(kind, nodes, cells, times) for kind in KINDS}
    tell(report, ran["tutti"], ran["hivemind"])


def run(
    kind: str,
    nodes: int,
    cells: int,
    times: tuple[float, float, float],
    settings: dict[str, Any] | None = None,
) -> Ran:
    """Run a swarm of a kind. ``times``: seconds as COME_S, SETTLE_S and MEASURE_S. Raises
    RuntimeError when a process of it fails."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.residents"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(WORKERS)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        full = time.monotonic() + times[0]
        measured = full + times[1]
        order = {
            "kind": kind,
            "workers": WORKERS,
            "nodes": nodes,
            "cells": cells,
            "begin": full - times[0],
            "full": full,
            "measured": measured,
            "end": measured + times[2],
            "leave_per_min": LEAVE_PER_MIN,
            "reads_per_s": READS_PER_S,
            "settings": settings or {},
        }
        for worker, process in enumerate(started):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**order, "worker": worker}) + "\n")
            process.stdin.flush()
        told = [_said(process, measured + times[2] + CLOSE_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return judge(told, full, measured, times[2])


def _said(process: subprocess.Popen[str], until: float) -> dict[str, Any]:
    """The result of a process. Raises RuntimeError without one."""
    try:
        said, _ = process.communicate(timeout=until - time.monotonic())
    except subprocess.TimeoutExpired as e:
        raise RuntimeError("a process of nodes did not come to its end") from e
    if process.returncode:
        raise RuntimeError(f"a process of nodes ended with code {process.returncode}")
    return json.loads(said)


def judge(told: Sequence[dict[str, Any]], full: float, measured: float, seconds: float) -> Ran:
    """Compare the readings with the posts of all processes. ``full``: from this time on others
    leave; ``measured``: readings that began later count; ``seconds`` of measurement."""
    posted = [record for each in told for record in each["posted"]]
    ran = Ran(
        failed=[why for each in told for why in each["failed"]],
        nodes=sum(each["lives"] for each in told),
        left=sum(end is not None and math.isfinite(end) for *_, end in posted),
        came=sum(at > full for _, _, at, _ in posted),
        cores=sum(each["cpu_s"] for each in told) / seconds,
        late_s=max(each["late_s"] for each in told),
        links=sum(each["links"] for each in told),
    )
    ran.bytes_each = sum(each["bytes_each"] * each["lives"] for each in told) / ran.nodes
    ran.links /= ran.nodes
    for began, ended, cell, found, first in (read for each in told for read in each["reads"]):
        if began < measured and not (first and began > full):
            continue
        wanted = {
            peer for peer, of, at, until in posted if of == cell and at < began and until > ended
        }
        ran.readings.append(Reading(ended - began, len(wanted - set(found)), len(wanted), first))
    return ran


def percentile(readings: Sequence[Reading], share: float) -> float:
    """Seconds in which this share of the readings ended; infinite without readings."""
    ordered = sorted(reading.seconds for reading in readings)
    if not ordered:
        return math.inf
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def good_share(readings: Sequence[Reading]) -> float:
    """Share of good readings, 0 without any."""
    return sum(reading.good for reading in readings) / max(1, len(readings))


def tell(report: Report, ran: Ran, peer: Ran) -> None:
    """Add the rows."""
    reads, others = ran.of(first=False), peer.of(first=False)
    share = good_share(reads)
    report.add(
        f"11 readings that are whole within {IN_TIME_S:g} s",
        share,
        f"share of {len(reads)}",
        f"hivemind {good_share(others):.4f} of {len(others)}",
        f"at least {LEAST}",
        share >= LEAST,
    )
    late = percentile(reads, 0.99)
    report.add(
        "11 99th percentile of readings",
        late,
        "s",
        f"hivemind {percentile(others, 0.99):.3f} s; medians {percentile(reads, 0.5):.3f} and "
        f"{percentile(others, 0.5):.3f} s",
        f"at most {IN_TIME_S:g}",
        late <= IN_TIME_S,
    )
    report.add(
        "11 records that readings lacked",
        _missing(reads),
        "share of the records that they should show",
        f"hivemind {_missing(others):.5f}",
    )
    report.add(
        "11 first readings of newcomers that are whole in time",
        good_share(ran.of(first=True)),
        f"share of {len(ran.of(first=True))}",
        f"hivemind {good_share(peer.of(first=True)):.4f} of {len(peer.of(first=True))}",
    )
    report.add(
        "11 memory a node",
        ran.bytes_each / MIB,
        "MiB, without a p2pd",
        f"hivemind {peer.bytes_each / MIB:.2f} MiB; {ran.links:.0f} and {peer.links:.0f} "
        "connections",
    )
    for name, each in zip(KINDS, (ran, peer), strict=True):
        report.add(
            f"11 nodes of {name} at the end",
            each.nodes,
            "nodes",
            f"{each.came} came and {each.left} left meanwhile, {len(each.failed)} could not join; "
            f"{each.cores:.2f} cores busy, a task late by {each.late_s:.2f} s at most",
        )


def _missing(readings: Sequence[Reading]) -> float:
    wanted = sum(reading.of for reading in readings)
    return sum(reading.missing for reading in readings) / max(1, wanted)
