"""A daemon that stands still or dies: seconds until its cell commits the next epoch.

    python -m benchmarks.frozen [--only leader,member,...] [--moments 6] [--seed 1] [--json -]

One swarm of four daemons (two ends, one block stage of two), and one of eight in two cells. At
random moments drawn from the seed a victim is struck; it comes back when its cell has committed,
and the next one is struck when all are in one plan again. ``leader`` and ``member``: SIGSTOP, of
the daemon alone or with its p2pd; ``killed-leader`` and ``killed-member``: SIGKILL. Epochs take
about 0.1 s. All figures of one swarm are of the same daemons, so those that were frozen before are
struck again.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, chosen
from testbed.daemons.books import COMMITTED, PLANNED, Books
from testbed.daemons.fleet import START_S, Box, Peer, folder
from testbed.daemons.forks import Forks
from testbed.daemons.told import Chronicle, Told

ITEM = "4"
MOMENTS = 6
TARGET_S = 10.0
"""Target for the time between the signal and the next commit."""
WAIT_S = 120.0
"""Bound of every wait for a commit, and for all to be in one plan again."""
LONGEST_S = 12.0
"""Most seconds that a daemon stays frozen after the commit."""
RUN: dict[str, Any] = {
    "pipeline__stages": 1,
    "training__min_replicas": 1,
    "training__epochs": 100_000,
    "training__eval_every": 0,
    "training__rebalance_every_s": 0.0,
}
CELLS: dict[str, Any] = {
    "averaging__cell": 2,
    "outer__strategy": "gossip",
    "outer__carries": "parameters",
    "outer__window_s": 30.0,
}
STOOD_STILL = "stood-still"
"""Kind of the event by which a daemon says that it was frozen."""
NOTICED_S = 5.0
"""Seconds of standing still after which a daemon must say so."""
DISTURBED = ("banned", "digests-disputed", "digest-mismatch", "voted-twice")
"""Kinds of events that a daemon that wakes up must not cause."""


@dataclass(frozen=True)
class Shape:
    """A swarm: ``nodes`` at the ends and at the block stage, in ``cells`` cells of equal size."""

    name: str
    nodes: tuple[int, int]
    cells: int = 1
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Daemons of a cell."""
        return sum(self.nodes) // self.cells


SHAPES = (
    Shape("four daemons", (2, 2)),
    Shape("eight in two cells", (4, 4), 2, CELLS),
)
DEEDS = ("leader", "member", "killed-leader", "killed-member")


@dataclass(frozen=True)
class Measured:
    """All victims of a swarm, epochs committed again, and events that no victim should cause."""

    struck: list["Struck"]
    again: int
    disturbed: list[Told]


@dataclass(frozen=True)
class Struck:
    """One victim. Seconds from the signal to the next commit of its cell, and from SIGCONT (or the
    start of a new process) until all of the cell are current members of one plan.

    ``down_s``: seconds from the signal to SIGCONT. ``said``: it said afterwards that it had been
    frozen.
    """

    deed: str
    who: str
    commit_s: float
    back_s: float
    down_s: float
    said: bool

    @property
    def quiet(self) -> bool:
        """It was frozen for long and did not say so."""
        return not self.deed.startswith("killed") and self.down_s > NOTICED_S and not self.said


class FrozenSwarm:
    """The daemons of one shape, and their events."""

    def __init__(self, shape: Shape, root: Path, forks: Forks, **changes: Any) -> None:
        self.shape = shape
        self.box = Box(root, forks=forks)
        self.peers = self.box.swarm(shape.nodes, **{**RUN, **shape.changes, **changes})
        self._chronicle = Chronicle()
        self._began = time.time()

    def start(self) -> None:
        """Start the daemons and wait until every cell is whole."""
        self.box.start(*self.peers)
        for peer in self.peers:
            self._chronicle.follow(peer.label, peer.events_path)
        self.box.wait("the cells", lambda: len(self.cells()) == self.shape.cells, START_S)
        for cell in self.cells():
            self._whole([p.label for p in cell], 0.0)
        self._began = time.time()

    def close(self) -> None:
        """End the daemons."""
        self.box.clean_up()
        self._chronicle.close()

    def read(self) -> list[Told]:
        """Everything told until now."""
        return self._chronicle.read()

    def cells(self) -> list[list[Peer]]:
        """The daemons of each cell."""
        cells = {peer.label: "" for peer in self.peers}
        cells |= {e.who: str(e.get("cell")) for e in self.read() if e.kind == "cell-entered"}
        return [
            [p for p in self.peers if cells[p.label] == cell] for cell in sorted({*cells.values()})
        ]

    def strike(self, deed: str, dice: random.Random, bound_s: float = WAIT_S) -> Struck:
        """Strike one victim of one cell at a random moment, and bring it back. Raises Hang when
        there is no commit within ``bound_s``."""
        cell = dice.choice(self.cells())
        time.sleep(dice.uniform(1.0, 4.0))
        labels = [p.label for p in cell]
        leader = [e for e in self.read() if e.kind == PLANNED and e.who in labels][-1].who
        able = [p for p in cell if (p.label == leader) == deed.endswith("leader")]
        victim = dice.choice(able)
        family = dice.random() < 0.5
        victim.close()
        at = time.time()
        if deed.startswith("killed"):
            victim.kill()
        else:
            victim.signal(signal.SIGSTOP, family=family)
        others = [label for label in labels if label != victim.label]
        found = self.box.wait("the next commit", lambda: self._commit(others, at), bound_s)
        if not deed.startswith("killed"):
            time.sleep(dice.uniform(0.0, LONGEST_S))
        woke = time.time()
        if deed.startswith("killed"):
            victim.start()
        else:
            victim.signal(signal.SIGCONT, family=True)
        back = self._whole(others, woke)
        later = [e for e in self.read() if e.who == victim.label and e.at > woke]
        said = any(e.kind == STOOD_STILL for e in later)
        return Struck(deed, victim.label, found.at - at, back - woke, woke - at, said)

    def again(self) -> int:
        """Epochs that had been committed and were committed once more."""
        labels = [{p.label for p in cell} for cell in self.cells()]
        return sum(
            Books([e for e in self.read() if e.who in cell and e.at > self._began]).losses().again
            for cell in labels
        )

    def disturbances(self) -> list[Told]:
        """Events that a daemon that woke up must not have caused."""
        return [e for e in self.read() if e.kind in DISTURBED and e.at > self._began]

    def _commit(self, labels: Collection[str], since: float) -> Told | None:
        told = (e for e in self.read() if e.kind == COMMITTED and e.who in labels and e.at > since)
        return next(told, None)

    def _whole(self, planners: Collection[str], since: float) -> float:
        """Wait until one of these plans with all of its cell as current members. Returns the
        time."""
        everybody = self.shape.size, 0

        def plan() -> Told | None:
            plans = (e for e in self.read() if e.kind == PLANNED and e.at > since)
            mine = (e for e in plans if e.who in planners)
            return next(
                (e for e in mine if (e.get("members"), e.get("listeners")) == everybody), None
            )

        return self.box.wait("everybody in one plan", plan, WAIT_S).at


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
        except BaseException:
            print(swarm.box.story(), file=sys.stderr)
            raise
        finally:
            swarm.close()


def rows(
    report: Report,
    root: Path | None = None,
    quick: bool = False,
    *,
    deeds: Sequence[str] = ("leader",),
    moments: int = MOMENTS,
    seed: int = 1,
) -> None:
    """Measure both shapes and add their rows; ``quick`` halves the moments. ``root`` is not used:
    each swarm has a folder of its own, which is removed afterwards."""
    moments = max(1, moments // 2) if quick else moments
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(DEEDS), help="some of the four deeds above")
    parser.add_argument("--moments", type=int, default=MOMENTS, help="of each deed in each swarm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for stdout")
    asked = parser.parse_args()
    report = Report()
    deeds = chosen(parser, asked.only, DEEDS)
    rows(report, deeds=deeds, moments=asked.moments, seed=asked.seed)
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
