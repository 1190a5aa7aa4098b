"""Averaging of 64 MiB beside its floor: the same bytes over gRPC and TLS, in messages as large,
with nothing done to them.

Peers are processes on loopback with one torch thread each (``benchmarks/peers/speed.py``). All ways
take turns in one run, and every ratio is a median over pairs of the same turn. Each result is
compared with the true mean. hivemind's averager stands beside ours without the seconds in which it
finds its group, and gloo's all-reduce, which does not encrypt.
"""

from pathlib import Path
from statistics import median

from benchmarks.averaging.speed import CODECS, turns
from benchmarks.report import Report

WORLDS = (2, 4)
RUNS = 5
OF_FLOOR = {"fp32": 0.85, "fp16": 0.8, "int8": 0.65}
"""Least speed over that of the floor, by number format."""
WAYS = (
    ("gloo", "fp32"),
    *((kind, codec) for codec in CODECS for kind in ("wire", "ours")),
    *(("hivemind", codec) for codec in CODECS),
)
Rounds = list[dict[str, float]]


def rows(report: Report, root: Path) -> None:
    """The rows of part 2."""
    for world in WORLDS:
        told = turns(WAYS, world, RUNS)
        for codec in CODECS:
            beside_the_floor(report, world, codec, told["ours", codec], told["wire", codec])
        for codec in CODECS:
            beside_hivemind(report, world, codec, told["ours", codec], told["hivemind", codec])
        beside_gloo(report, world, told["ours", "fp32"], told["gloo", "fp32"])


def beside_the_floor(report: Report, world: int, codec: str, ours: Rounds, floor: Rounds) -> None:
    """Rows of the ratio in seconds, which is asked for, and in processor time."""
    ratio = median(f["seconds"] / o["seconds"] for o, f in zip(ours, floor, strict=True))
    asked = OF_FLOOR[codec]
    exact = all(o["fine"] and o["same"] for o in ours)
    said = "the mean at every peer, the same bits" if exact else "WRONG at some peer"
    report.add(
        f"2 {world} peers, {codec}, beside the floor",
        round(ratio, 3),
        "times its speed",
        f"{_seconds(ours)} beside {_seconds(floor)}; {said}",
        f">= {asked:g}, and the mean",
        exact and ratio >= asked,
    )
    report.add(
        f"2 {world} peers, {codec}, processor time of the floor over ours",
        round(median(f["cpu"] for f in floor) / median(o["cpu"] for o in ours), 3),
        "ratio",
        f"{median(o['cpu'] for o in ours):.2f} s of all peers, floor "
        f"{median(f['cpu'] for f in floor):.2f} s",
    )


def beside_hivemind(report: Report, world: int, codec: str, ours: Rounds, theirs: Rounds) -> None:
    """Row of the speed beside hivemind's, without the time in which it finds its group."""
    pairs = zip(ours, theirs, strict=True)
    found = median(t["met"] for t in theirs)
    report.add(
        f"2 {world} peers, {codec}, beside hivemind without its matchmaking",
        round(median((t["seconds"] - t["met"]) / o["seconds"] for o, t in pairs), 3),
        "times its speed",
        f"{median(t['seconds'] - t['met'] for t in theirs):.3f} s, after {found:.3f} s in which it "
        "finds its group",
    )


def beside_gloo(report: Report, world: int, ours: Rounds, gloo: Rounds) -> None:
    """Row of the speed beside gloo's all-reduce."""
    report.add(
        f"2 {world} peers, fp32, beside gloo",
        round(median(g["seconds"] / o["seconds"] for o, g in zip(ours, gloo, strict=True)), 3),
        "times its speed",
        f"{_seconds(gloo)}, not encrypted",
    )


def _seconds(rounds: Rounds) -> str:
    every = [each["seconds"] for each in rounds]
    return f"{median(every):.3f} s ({min(every):.3f} to {max(every):.3f})"
