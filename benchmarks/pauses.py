"""An owner takes a machine back: seconds until the memory of a paused daemon is free, epochs of the
others meanwhile, seconds until it is in a plan again.

    python -m benchmarks.pauses [--times 6] [--json -]

One swarm of three daemons: one at the ends, two replicas of a block stage of 2 M parameters. One
replica pauses and resumes at random moments, after the epoch under way and without it (``--now``).
All figures are of the same daemons.
"""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, command_line
from node.core.memory import resident
from testbed.daemons.books import COMMITTED, PLANNED
from testbed.daemons.fleet import Box, Peer, folder
from testbed.daemons.forks import Forks

ITEM = "2"
TIMES = 6
FREE_S = 2.0
"""Target for the time between the command and the memory given back."""
BACK_S = 5.0
"""Target for the time between the resume and the next plan with this daemon."""
PAUSED_S = 5.0
"""Seconds of a pause, beside its own."""
WAIT_S = 120.0
RUN: dict[str, Any] = {
    "pipeline__stages": 1,
    "pipeline__micro_batch": 2,
    "training__min_replicas": 1,
    "training__epochs": 100_000,
    "training__target_batch": 8,
    "training__eval_every": 0,
    "model__d_model": 256,
    "model__heads": 4,
    "model__kv_heads": 4,
    "model__d_ff": 1024,
}
DISTURBED = ("peer-lost", "epoch-abandoned", "digest-mismatch", "task-failed")
"""Kinds of events that a pause must not cause at another daemon."""


@dataclass(frozen=True)
class Paused:
    """One pause. ``free_s``: from the command to its answer; ``epochs``: committed by the others
    meanwhile; ``back_s``: from the resume to a plan with this daemon; ``freed``: bytes."""

    now: bool
    free_s: float
    freed: int
    epochs: int
    back_s: float


class PauseSwarm:
    """The three daemons."""

    def __init__(self, root: Path) -> None:
        self.box = Box(root, forks=Forks())
        self.peers = self.box.swarm((1, 2), **RUN)
        self.ends, _, self.victim = self.peers

    def start(self) -> None:
        """Start them, and wait until all are in one plan."""
        self.box.start(*self.peers)
        self._in_a_plan(3, 0.0)

    def _in_a_plan(self, members: int, since: float) -> float:
        """Wait for a plan with ``members`` members that was made after ``since``. Returns its time,
        in seconds of the wall clock."""

        def found() -> float | None:
            plans = [e for e in self.ends.told() if e.kind == PLANNED and e.at > since]
            return next((e.at for e in plans if e.get("members") == members), None)

        return self.box.wait(f"a plan of {members}", found, WAIT_S, tuple(self.peers))

    def pause(self, now: bool, dice: random.Random) -> Paused:
        """Pause the victim at a random moment, and resume it."""
        time.sleep(dice.uniform(1.0, 3.0))
        used = resident(self.victim.pid)
        began = time.time()
        self.victim.client().pause(None, "measured", now=now)
        free = time.time()
        freed = used - resident(self.victim.pid)
        time.sleep(PAUSED_S)
        resumed = time.time()
        self.victim.client().resume()
        back = self._in_a_plan(3, resumed)
        commits = [e for e in self.ends.told() if e.kind == COMMITTED]
        epochs = sum(began < e.at <= resumed for e in commits)
        return Paused(now, free - began, freed, epochs, back - resumed)

    def disturbances(self) -> list[str]:
        """Kinds of events that no pause should cause, at the daemons that went on."""
        others: list[Peer] = [p for p in self.peers if p is not self.victim]
        return [e.kind for p in others for e in p.told() if e.kind in DISTURBED]


def rows(report: Report, root: Path | None = None, quick: bool = False, *, times: int = TIMES):
    """Measure and add the rows; ``quick`` halves the pauses. ``root`` is not used: the swarm has a
    folder of its own, which is removed afterwards."""
    times = max(2, times // 2) if quick else times
    dice = random.Random(1)
    with folder() as where:
        swarm = PauseSwarm(where)
        try:
            swarm.start()
            found = [swarm.pause(bool(i % 2), dice) for i in range(times)]
            disturbed = swarm.disturbances()
        except Exception:
            print(swarm.box.story(), file=sys.stderr)
            raise
        finally:
            swarm.box.clean_up()
    for now in (False, True):
        of = [p for p in found if p.now == now]
        name = f"{ITEM} pause{' --now' if now else ''}"
        worst = round(max(p.free_s for p in of), 2)
        said = f"median {median(p.free_s for p in of):.2f} s"
        asked = f"<= {FREE_S:g}"
        report.add(f"{name}: memory given back, worst", worst, "s", said, asked, worst <= FREE_S)
        least = round(min(p.freed for p in of) / 2**20, 1)
        report.add(f"{name}: memory given back, least", least, "MiB", "", "> 0", least > 0)
        epochs = min(p.epochs for p in of)
        lasts = f"in {PAUSED_S:g} s and the leaving"
        report.add(
            f"{name}: epochs of the others, least", epochs, "epochs", lasts, ">= 1", epochs > 0
        )
        worst = round(max(p.back_s for p in of), 2)
        said = f"median {median(p.back_s for p in of):.2f} s"
        asked = f"<= {BACK_S:g}"
        report.add(f"{name}: in a plan again, worst", worst, "s", said, asked, worst <= BACK_S)
    said = ", ".join(sorted(set(disturbed)))
    count = len(disturbed)
    report.add(f"{ITEM} disturbances of the others", count, "events", said, "0", holds=not count)


def main() -> int:
    """Measure, print, and exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--times", type=int, default=TIMES, help="pauses, by turns of both kinds")
    asked = parser.parse_args()
    report = Report()
    rows(report, times=asked.times)
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
