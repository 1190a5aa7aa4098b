"""Rows 7: how old the pushes are that a server without a barrier takes, and that nobody waits for
anybody. The services of the daemon in virtual time: five cells, the averaging of
configs/hogwild.toml and of configs/parameter-server-stale.toml. Then one cell becomes four and one
eight times slower, and a third one is parted from all others for some windows; or the two slow ones
die instead. The pace of the cells that nothing happens to is compared with the same run without
trouble."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells.faults import wall
from benchmarks.cells.independence import LOSS, SETTLED_S, STRIKES_S, Book, Recorder, by_cell
from benchmarks.report import Report
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId
from node.scheduler.settings import SchedulerSettings
from node.sim.setup import Setup, WorkTimes, toy_parts
from node.sim.swarm import SimSwarm
from node.sim.world.loop import bury, quiet
from node.telemetry.events import Event

HOGWILD = OuterSettings(
    "hogwild", "deltas", window_s=10.0, optimizer="sgd", lr=1.0, momentum=0.0, codec="int8"
)
STALE = replace(HOGWILD, strategy="parameter-server", window_s=20.0, shards=2, staleness=4)
"""As the two manifests have it."""
CELLS = 5
SLOWER = (4.0, 8.0)
SETUP = Setup(
    ends=CELLS,
    stages=1,
    replicas=CELLS,
    epochs=100_000,
    parts=toy_parts(1, 3),
    cell=1,
    scheduler=SchedulerSettings("round-robin", 0.0),
    work=WorkTimes(ends_s=0.05, forward_s=0.15, step_s=0.05, unequal=1.0),
    epoch_timeout_s=80.0,
    forward_timeout_s=30.0,
)
"""Epochs of 1.7 s; of 7 and 14 s in the slow cells."""
SEED, WINDOWS, PARTED, MEET_AGAIN = 0, 30, 6, 20
"""Windows that are looked at; for how many of them a cell is parted from the others, until which
one."""
GAP_S = 1.0
"""Longer between two commits than without the trouble: a second of waiting."""


@dataclass
class Story:
    """Of one run. ``ages``: of the pushes that came to servers, in steps of the server, with the
    cell that each is of; ``fast``: cells that nothing happened to; ``slow`` the others."""

    book: Book
    ends: float
    ages: list[tuple[CellId, int]] = field(default_factory=list)
    fast: Sequence[CellId] = ()
    slow: Sequence[CellId] = ()

    def taken(self, s: OuterSettings) -> list[int]:
        """Ages of the pushes that were not too old."""
        return [age for _, age in self.ages if s.staleness is None or age <= s.staleness]

    def gap(self, cell: CellId) -> float:
        """The longest time between two commits of a cell, seconds, since the trouble began."""
        commits = sorted([*self.book.epochs[cell], *self.book.windows.get(cell, ())])
        times = [at for at in commits if at > STRIKES_S] + [self.ends]
        return max(b - a for a, b in zip(times, times[1:], strict=False))


class Pushed(Recorder):
    """That notes what the record of a server says of the pushes that came to it."""

    def __init__(self, swarm: SimSwarm, story: Story) -> None:
        super().__init__(swarm, story.book)
        self._story = story
        self._world = swarm.world

    def accept(self, event: Event) -> None:
        super().accept(event)
        if event.kind == "pushes" and self._world.now > STRIKES_S:
            self._story.ages += [(CellId(cell), age) for cell, age in event.fields["ages"].items()]


def rows(report: Report, root: Path) -> None:
    """Add rows for both kinds of servers: ages beside slow cells, and the pace of the others."""
    for name, s in (("Hogwild", HOGWILD), (f"server, staleness {STALE.staleness}", STALE)):
        calm, slow, dead = (play(s, what) for what in ("", "slow", "dead"))
        _ages(report, name, s, slow)
        _waiting(report, name, f"cells {SLOWER[0]:g} and {SLOWER[1]:g} times slower", slow, calm)
        _waiting(report, name, "the same cells dead", dead, calm)


def _ages(report: Report, name: str, s: OuterSettings, story: Story) -> None:
    taken = story.taken(s)
    late = len(story.ages) - len(taken)
    of = Counter("slow" if cell in story.slow else "others" for cell, _ in story.ages)
    what = (
        f"{len(taken)} pushes taken, {late} refused; {of['slow']} of the slow cells; epochs of a "
        f"cell in {WINDOWS} windows: {_epochs(story, story.slow)} and {_epochs(story, story.fast)}"
    )
    bound = s.staleness
    for which, share in (("median", 50), ("95th percentile", 95), ("maximum", 100)):
        most = which == "maximum"
        value = int(np.percentile(taken, share, method="higher")) if taken else -1
        report.add(
            f"7 {name}: age of a push that was merged, {which}",
            value,
            "steps of the server",
            what if most else "",
            f"at most {bound}" if most and bound is not None else "",
            holds=(bool(taken) and value <= bound) if most and bound is not None else None,
        )


def _epochs(story: Story, cells: Sequence[CellId]) -> str:
    return ", ".join(str(story.book.count(story.book.epochs, cell)) for cell in cells)


def _waiting(report: Report, name: str, text: str, story: Story, calm: Story) -> None:
    pace = [
        story.book.count(story.book.epochs, cell) / calm.book.count(calm.book.epochs, cell)
        for cell in story.fast
    ]
    means = [story.book.count(story.book.windows, cell) for cell in story.fast]
    report.add(
        f"7 {name}, {text}: epochs a second of the others",
        min(pace),
        "of the same run without, the slowest cell",
        f"{', '.join(f'{p:.3f}' for p in pace)}; windows with a mean in place: "
        f"{', '.join(map(str, means))} of {WINDOWS}",
        f"at least {1 - LOSS:g}",
        holds=min(pace) >= 1 - LOSS,
    )
    more = max(story.gap(cell) - calm.gap(cell) for cell in story.fast)
    report.add(
        f"7 {name}, {text}: longest time between two commits of another cell",
        more,
        "s more than without",
        f"{max(story.gap(cell) for cell in story.fast):.2f} s, "
        f"{max(calm.gap(cell) for cell in story.fast):.2f} s without",
        f"less than {GAP_S:g}",
        holds=more < GAP_S,
    )


def play(s: OuterSettings, what: str = "", seed: int = SEED) -> Story:
    """Play one run: "slow", "dead", or "" without trouble. Raises RuntimeError when the cells are
    not CELLS in time."""
    story = Story(Book(seed), STRIKES_S + WINDOWS * s.window_s)
    with quiet():
        swarm = SimSwarm(replace(SETUP, outer=s), seed)
        swarm.watch = Pushed(swarm, story)
        swarm.world.run(SETTLED_S, None)
        cells = by_cell(swarm)
        if len(cells) != CELLS:
            raise RuntimeError(f"{len(cells)} cells instead of {CELLS}")
        swarm.world.run(STRIKES_S, None)
        *fast, parted = sorted(cells)[: -len(SLOWER)]
        story.fast = fast
        story.slow = sorted(cells)[-len(SLOWER) :]
        for cell, slower in zip(story.slow, SLOWER, strict=True):
            for name in cells[cell]:
                peer: Any = swarm.peers[name]
                if what == "slow":
                    peer.device.slowness *= slower
                elif what == "dead":
                    peer.kill()
        if what == "slow":
            swarm.world.run(STRIKES_S + (MEET_AGAIN - PARTED) * s.window_s, None)
            swarm.watch.one_fault.fault("parted")
            falls = wall(swarm, cells[parted])
            swarm.world.run(STRIKES_S + MEET_AGAIN * s.window_s, None)
            falls()
            swarm.watch.one_fault.fault("over")
        swarm.world.run(story.ends, None)
        bury()
    return story
