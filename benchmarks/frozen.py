"""A daemon that stands still or dies: seconds until its cell commits the next epoch.

    python -m benchmarks.frozen [--only leader,member,...] [--moments 6] [--seed 1] [--json -]

One swarm of four daemons (two ends, one block stage of two), and one of eight in two cells. At
random moments drawn from the seed a victim is struck; it comes back when its cell has committed,
and the next one is struck when all are in one plan again. ``leader`` and ``member``: SIGSTOP, of
the daemon alone or with its p2pd; ``killed-leader`` and ``killed-member``: SIGKILL. Epochs take
about 0.1 s. All figures of one swarm are of the same daemons, so those that were frozen before are
struck again.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.report import Report, chosen, command_line
from testbed.daemons.fleet import folder
from testbed.daemons.forks import Forks
from testbed.daemons.told import Told
from testbed.swarms.frozen import (
    SHAPES,
    FrozenSwarm,
    Shape,
    Struck,
)

ITEM = "4"
MOMENTS = 6
TARGET_S = 10.0
"""Target for the time between the signal and the next commit."""


DEEDS = ("leader", "member", "killed-leader", "killed-member")


@dataclass(frozen=True)
class Measured:
    """All victims of a swarm, epochs committed again, and events that no victim should cause."""

    struck: list["Struck"]
    again: int
    disturbed: list[Told]


def measure(
    shape: Shape, deeds: Sequence[str], moments: int, seed: int, **changes: Any
) -> Measured:
    """Strike ``moments`` times for each deed, in turns."""
    dice = random.Random(f"{shape.name} {seed}")
    with folder() as root:
        swarm = FrozenSwarm(shape, root, Forks(), **changes)
        try:
            swarm.start()
            struck = []
            for _ in range(moments):
                for deed in deeds:
                    struck.append(swarm.strike(deed, dice))
                    print(f"  {shape.name}: {struck[-1]}", file=sys.stderr, flush=True)
            return Measured(struck, swarm.again(), swarm.disturbances())
        except Exception:
            print(swarm.box.story(), file=sys.stderr)
            raise
        finally:
            swarm.close()


def rows(
    report: Report,
    *,
    deeds: Sequence[str] = ("leader",),
    moments: int = MOMENTS,
    seed: int = 1,
) -> None:
    """Measure both shapes and add their rows. Each swarm has a folder of its own, which is removed
    afterwards."""
    for letter, shape in zip("ab", SHAPES, strict=True):
        item = f"{ITEM}.{letter}"
        found = measure(shape, deeds, moments, seed)
        for deed in deeds:
            of = [s for s in found.struck if s.deed == deed]
            seconds = [s.commit_s for s in of]
            what = deed if deed.startswith("killed") else f"frozen {deed}"
            name = f"{item} {what.replace('-', ' ')}, {shape.name}"
            back = f"all in one plan {median(s.back_s for s in of):.1f} s after it came back"
            report.add(f"{name}: next commit, median", round(median(seconds), 2), "s", back)
            worst = round(max(seconds), 2)
            asked = f"<= {TARGET_S:g}"
            report.add(f"{name}: next commit, worst", worst, "s", "", asked, worst <= TARGET_S)
        name = f"{item} woke and did not say so"
        count = sum(s.quiet for s in found.struck)
        report.add(f"{name}, {shape.name}", count, "daemons", "", "0", holds=not count)
        said = ", ".join(sorted({e.kind for e in found.disturbed}))
        name = f"{item} disturbances, {shape.name}"
        count = len(found.disturbed)
        report.add(name, count, "events", said, "0", holds=not count)
        name = f"{item} committed again, {shape.name}"
        count = found.again
        report.add(name, count, "epochs", "", "0", holds=not count)


def main() -> int:
    """Measure, print, and exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(DEEDS), help="some of the four deeds above")
    parser.add_argument("--moments", type=int, default=MOMENTS, help="of each deed in each swarm")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    report = Report()
    deeds = chosen(parser, asked.only, DEEDS)
    rows(report, deeds=deeds, moments=asked.moments, seed=asked.seed)
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
