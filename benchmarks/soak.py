"""Growth of a daemon after minutes of churn: memory, file descriptors, threads, tasks, processes.

    python -m benchmarks.soak [--minutes 10] [--json -]

Eight daemons on loopback; every 20 s a random one of four is killed and a stranger joins in its
place. The other four, one of each stage, are never killed and are looked at every 2 s. Takes 2
minutes more than --minutes. The first third is left out: caches fill, allocators settle. Each
measure is reported for the worst of the four daemons: the slope of a Theil-Sen line (the median of
all pairwise slopes) per minute, and the line's growth over the time observed.
"""

import contextlib
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import psutil

from benchmarks.report import Report, command_line
from benchmarks.shared.churn import Churn
from testbed.daemons.fleet import Hang, Peer
from testbed.swarms.arena import arena

NODES = (2, 2, 2, 2)
KILL_EVERY_S = 20.0
LOOK_EVERY_S = 2.0
PROTECTED = ("ends-0", "stage-1-0", "stage-2-0", "stage-3-0")
SHAPE: dict[str, Any] = {
    "model__layers": 3,
    "pipeline__stages": 3,
    "training__target_batch": 32,
    "training__epochs": 1_000_000,
}
STUCK_S = 120.0
TASKS = "tutti_tasks"

MEASURES: dict[str, tuple[str, float, float]] = {
    "memory": ("MB", 1.0, 10.0),
    "resident": ("MB", 1.0, 10.0),
    "file descriptors": ("", 0.5, 10.0),
    "threads": ("", 0.2, 4.0),
    "tasks": ("", 0.5, 10.0),
    "child processes": ("", 0.05, 1.0),
}
"""Unit; most growth a minute; most growth in all. Memory is the process's own alone (USS). The
slack is the noise of connections that come and go with the neighbours."""


@dataclass
class Series:
    """Measures of one daemon, with their times in s since the start."""

    at: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, at: float, found: dict[str, float]) -> None:
        self.at.append(at)
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)
        # A kind of task that is not there is there zero times.
        for name, values in self.values.items():
            if name.startswith("tasks: ") and len(values) < len(self.at):
                missing = [0.0] * (len(self.at) - len(values))
                values[:] = [*missing, *values] if name in found else [*values, *missing]


def main() -> int:
    """Watch, print, and exit 0 when nothing grows."""
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to watch")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of victims")
    args = parser.parse_args()
    report = Report()
    try:
        watch(report, args.minutes * 60.0, args.seed)
    except Hang as e:
        report.add("5 hangs", True, str(e), "", "false", False)
    return report.end(args.json)


def watch(report: Report, seconds: float, seed: int) -> None:
    """The soak itself. Raises Hang."""
    with arena(NODES, network=False, **SHAPE) as a:
        churn = Churn(a, seed, PROTECTED)
        kept = {label: Series() for label in PROTECTED}
        began = moved = time.monotonic()
        kill_at = KILL_EVERY_S
        look_at = 0.0
        first = a.box.epoch()
        last = -1
        while (now := time.monotonic() - began) < seconds:
            if now >= look_at:
                look_at += LOOK_EVERY_S
                for label, series in kept.items():
                    series.add(now, held(a.peers[label]))
            if now >= kill_at:
                kill_at += KILL_EVERY_S
                print(
                    f"{now:.0f} s, epoch {a.box.epoch()}: {churn.strike() or 'nobody'} killed",
                    file=sys.stderr,
                )
            churn.mind()
            epoch = max((int(e.get("epoch", 0)) for e in a.commits()[-4:]), default=0)
            if epoch > last:
                last = epoch
                moved = time.monotonic()
            if time.monotonic() - moved > STUCK_S:
                raise Hang(f"no epoch after {last} for {STUCK_S:.0f} s")
            time.sleep(0.2)
        tell(report, kept)
        report.add(
            "5 epochs",
            a.box.epoch() - first,
            "epochs meanwhile",
            f"{len(churn.kills)} deaths of neighbours",
        )


def held(peer: Peer) -> dict[str, float]:
    """Present measures of the daemon. Raises Hang when it has ended."""
    try:
        process = psutil.Process(peer.pid)
        memory = process.memory_full_info()
        found = {
            "memory": memory.uss / 1e6,
            "resident": memory.rss / 1e6,
            "file descriptors": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "child processes": float(len(process.children(recursive=True))),
        }
    except psutil.Error as e:
        raise Hang(f"{peer.label}, which nobody killed, has ended: {peer.child.tail(5)}") from e
    tasks = scraped(peer.status().metrics_url, TASKS)
    return (
        found | {"tasks": sum(tasks.values())} | {f"tasks: {kind}": n for kind, n in tasks.items()}
        if tasks
        else found
    )


def scraped(url: str, name: str) -> dict[str, float]:
    """The numbers of a metrics page by their label; none when they are not there."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=5.0) as page:
        for line in page.read().decode().splitlines():
            if line.startswith(f"{name}{{"):
                labels, _, number = line[len(name) + 1 :].rpartition("} ")
                found[labels.partition('"')[2].rstrip('"')] = float(number)
    return found


def theil_sen(x: list[float], y: list[float]) -> float:
    """The median of the slopes between all pairs of points; 0 for fewer than two (Theil 1950, Sen
    1968)."""
    slopes = [
        (y[j] - y[i]) / (x[j] - x[i])
        for i in range(len(x))
        for j in range(i + 1, len(x))
        if x[j] > x[i]
    ]
    return median(slopes) if slopes else 0.0


def tell(report: Report, kept: dict[str, Series]) -> None:
    """The rows of item 5."""
    for name, (unit, most, in_all) in MEASURES.items():
        slopes: dict[str, tuple[float, float, float]] = {}
        for label, series in kept.items():
            values = series.values.get(name, [])
            skip = len(values) // 3
            x = [t / 60.0 for t in series.at[skip : len(values)]]
            y = values[skip:]
            if len(y) > 2:
                slope = theil_sen(x, y)
                slopes[label] = (slope, slope * (x[-1] - x[0]), median(y))
        if not slopes:
            report.unmeasured(f"5 {name} growth", f"<= {most}", "the daemons do not tell it")
            continue
        worst = max(slopes, key=lambda label: slopes[label][0])
        slope, growth, level = slopes[worst]
        beside = f"{worst} of {len(slopes)} daemons, {level:.4g} {unit}".rstrip()
        report.add(
            f"5 {name} growth",
            round(slope, 3),
            f"{unit} per min".strip(),
            beside,
            f"<= {most}",
            slope <= most,
        )
        report.add(
            f"5 {name} growth in all",
            round(growth, 2),
            unit,
            beside,
            f"<= {in_all}",
            growth <= in_all,
        )
    for kind, growth in grown_kinds(kept):
        print(f"  tasks that grew: {kind} {growth:+.2f}", file=sys.stderr)


def grown_kinds(kept: dict[str, Series]) -> list[tuple[str, float]]:
    """Kinds of tasks, all daemons together, that are more in the last third than in the second,
    most first."""
    grown: dict[str, float] = {}
    for series in kept.values():
        for name, values in series.values.items():
            if name.startswith("tasks: ") and len(values) >= 9:
                third = len(values) // 3
                more = mean(values[-third:]) - mean(values[third:-third])
                grown[name[7:]] = grown.get(name[7:], 0.0) + more
    return sorted(((k, g) for k, g in grown.items() if g >= 0.2), key=lambda item: -item[1])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
