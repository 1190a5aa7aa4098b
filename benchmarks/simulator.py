"""Many random schedules of faults over a simulated swarm, bugs planted in it, and the cost of
simulating a big swarm.

    python -m benchmarks.simulator [--schedules 10000] [--sizes 10,100,1000] [--json -]
    python -m benchmarks.simulator --replay [--schedules 1000]

Schedules come from ``tutti simulate --small --epochs 6 --scenario random --seed N``, N from 0. A
schedule that breaks an invariant is shrunk and printed. Cost is processor time for one epoch and
one peer under churn, of one process.

With ``--replay`` nothing else is measured: every process of each schedule records its leader and
member machines, and another process plays the recordings into fresh machines. The two processes
iterate over sets in different orders, as two runs of a daemon do.
"""

import gc
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.report import Report, command_line
from node.coordinator.recording.player import Player
from node.coordinator.recording.show import difference_lines
from node.sim.command import setup_of
from node.sim.faults import lay
from node.sim.run import run, shrink
from node.sim.setup import Setup
from testbed.swarms.planted import ALL_BUGS, hunt
from testbed.swarms.tapes import Tapes

BATCH = 50
EPOCHS = 4
SMALL = Setup(epochs=6)
"""Setup of the schedules: faults come within the first epochs, so more epochs mostly cost time."""


def main() -> int:
    """Measure, print, and exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="random schedules to play")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes at once"
    )
    parser.add_argument(
        "--sizes", default="10,100,1000", help="peers of the swarms whose cost is measured"
    )
    parser.add_argument(
        "--replay", action="store_true", help="record the machines, play them again, and end"
    )
    args = parser.parse_args()
    report = Report()
    if args.replay:
        _replays(report, args.schedules, args.first, args.workers)
        return report.end(args.json)
    _schedules(report, args.schedules, args.first, args.workers)
    _planted(report)
    _cost(report, [int(n) for n in args.sizes.split(",") if n])
    return report.end(args.json)


def _schedules(report: Report, count: int, first: int, workers: int) -> None:
    began = time.perf_counter()
    broken = []
    spent = 0.0
    epochs = 0
    faults = 0
    events = 0
    lost = 0
    batches = [(s, min(s + BATCH, first + count)) for s in range(first, first + count, BATCH)]
    # Loaded modules are exempt from the search for garbage.
    with multiprocessing.get_context("spawn").Pool(workers, gc.freeze) as pool:
        for part in pool.imap_unordered(_play, batches):
            spent = spent + part[0]
            epochs = epochs + part[1]
            faults = faults + part[2]
            events = events + part[3]
            broken = broken + part[4]
            lost = lost + part[5]
    for seed, what in sorted(broken):
        print(
            f"seed {seed}: {what}\n"
            f"  tutti simulate --small --epochs 6 --scenario random --seed {seed}",
            file=sys.stderr,
        )
    for seed, _ in sorted(broken)[:3]:
        setup = SMALL
        print(
            shrink(setup, run(setup, lay(("random",), setup, seed))).schedule.to_json(),
            file=sys.stderr,
        )
    setup = SMALL
    beside = (
        f"{setup.peers} peers, {setup.epochs} epochs, {faults / max(1, count):.1f} faults "
        f"each; seeds {first} to {first + count - 1}"
    )
    report.add("3 schedules", count, "schedules", beside, ">= 10000", count >= 10_000)
    kinds = ", ".join(
        f"{k} {n}" for k, n in sorted(Counter(w.split(" ")[0] for _, w in broken).items())
    )
    report.add("3 violations", len(broken), "schedules", kinds, "0", not broken)
    report.add(
        "3 schedules that destroyed every copy of a stage",
        lost,
        "schedules",
        "the swarm waits and says so",
    )
    report.add(
        "3 cpu for a schedule",
        round(1000 * spent / max(1, count), 1),
        "ms",
        f"{events / max(1, count):.0f} events",
        "",
        None,
    )
    report.add(
        "3 schedules, wall", round(time.perf_counter() - began, 1), "s", f"{workers} processes"
    )
    report.add("3 epochs committed", epochs, "epochs")


def _play(batch: tuple[int, int]) -> tuple[float, int, int, int, list[tuple[int, str]], int]:
    setup = SMALL
    began = time.process_time()
    broken = []
    epochs = 0
    faults = 0
    events = 0
    lost = 0
    for seed in range(*batch):
        schedule = lay(("random",), setup, seed)
        try:
            outcome = run(setup, schedule)
        except Exception as e:
            e.add_note(f"tutti simulate --small --epochs 6 --scenario random --seed {seed}")
            raise
        epochs = epochs + len(outcome.commits)
        faults = faults + len(schedule.faults)
        events = events + outcome.events
        lost += outcome.stage_lost
        if outcome.violation is not None:
            broken.append((seed, str(outcome.violation)))
    return time.process_time() - began, epochs, faults, events, broken, lost


@dataclass
class _Replayed:
    """Recordings of some schedules that were played. ``other``: seed, peer and first difference of
    each recording with other actions."""

    recordings: int = 0
    bytes: int = 0
    events: int = 0
    actions: int = 0
    other: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, more: "_Replayed") -> None:
        self.recordings += more.recordings
        self.bytes += more.bytes
        self.events += more.events
        self.actions += more.actions
        self.other += more.other


def _replays(report: Report, count: int, first: int, workers: int) -> None:
    began = time.perf_counter()
    found = _Replayed()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="tutti-replay-") as home,
        context.Pool(workers, gc.freeze) as records,
        context.Pool(workers, gc.freeze) as plays,
    ):
        seeds = ((home, seed) for seed in range(first, first + count))
        recorded = records.imap_unordered(_record, seeds)
        for done, replayed in enumerate(plays.imap_unordered(_replay, recorded), 1):
            found.add(replayed)
            if done % BATCH == 0:
                other = f"{len(found.other)} of {found.recordings} recordings"
                print(f"{done} schedules: {other} with other actions", file=sys.stderr, flush=True)
    for seed, peer, what in sorted(found.other)[:10]:
        print(f"seed {seed}, {peer}: {what}", file=sys.stderr)
    report.add("4 schedules recorded and replayed", count, "schedules", f"seeds from {first}")
    beside = f"{found.bytes / max(1, found.recordings) / 1024:.0f} KiB each"
    report.add("4 recordings", found.recordings, "processes", beside)
    report.add("4 events played", found.events, "events", f"{found.actions} actions")
    report.add("4 other actions", len(found.other), "recordings", "", "0", not found.other)
    report.add("4 replays, wall", round(time.perf_counter() - began, 1), "s", f"{workers} workers")


def _record(job: tuple[str, int]) -> tuple[str, int]:
    """Play a schedule and write the recordings of its processes. Returns their directory, and the
    seed."""
    home, seed = job
    tapes = Tapes()
    run(SMALL, lay(("random",), SMALL, seed), tapes.factory())
    place = Path(home) / str(seed)
    place.mkdir()
    for number, (peer, lines) in enumerate(tapes.tapes):
        (place / f"{number:04}-{peer}").write_bytes(b"".join(lines))
    return str(place), seed


def _replay(job: tuple[str, int]) -> _Replayed:
    """Play the recordings of a directory, and remove it."""
    place, seed = job
    found = _Replayed()
    for path in sorted(Path(place).iterdir()):
        player = Player()
        with path.open("rb") as lines:
            played = player.play(lines)
        found.recordings += 1
        found.bytes += path.stat().st_size
        found.events += sum(played.events.values())
        found.actions += played.actions
        if played.difference is not None:
            said = " ".join(difference_lines(played.difference, player.shared))
            found.other.append((seed, path.name, said))
    shutil.rmtree(place)
    return found


def _planted(report: Report) -> None:
    """The bugs of ``testbed/swarms/planted.py``, looked for as the test does."""
    tries = {}
    for bug in ALL_BUGS:
        found, tried = hunt(bug)
        if found is not None and found.violation is not None and found.violation.id in bug.ids:
            tries[bug.name] = tried
    beside = "schedules until found: " + ", ".join(f"{name} {n}" for name, n in tries.items())
    report.add(
        "3 planted bugs caught",
        len(tries),
        f"of {len(ALL_BUGS)}",
        beside,
        "all",
        len(tries) == len(ALL_BUGS),
    )


def _cost(report: Report, sizes: list[int]) -> None:
    costs = dict(_costs(sizes))
    for peers, (cost, seconds) in costs.items():
        beside = f"{seconds:.1f} s for {EPOCHS} epochs under churn"
        report.add(
            f"3 cost per epoch and peer at {peers} peers", round(1000 * cost, 3), "ms", beside
        )
    if len(costs) > 1:
        (small, (low, _)), (big, (high, _)) = min(costs.items()), max(costs.items())
        exponent = 1 + math.log(high / low) / math.log(big / small)
        report.add(
            "3 growth exponent",
            round(exponent, 2),
            "of an epoch's cost over peers",
            f"{small} to {big} peers",
        )


def _costs(sizes: list[int]) -> Iterator[tuple[int, tuple[float, float]]]:
    for peers in sizes:
        spent = []
        for seed in range(3 if peers < 500 else 1):
            setup = setup_of(peers=peers, epochs=EPOCHS)
            schedule = lay(("churn",), setup, seed)
            began = time.process_time()
            outcome = run(setup, schedule)
            if outcome.violation is not None:
                print(json.dumps(outcome.summary()["violation"]), file=sys.stderr)
            spent.append(time.process_time() - began)
        yield (
            peers,
            (median(spent) / EPOCHS / setup_of(peers=peers).peers, median(spent)),
        )


if __name__ == "__main__":
    sys.exit(main())
