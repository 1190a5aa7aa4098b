"""Cost of one cell's trouble for the others: the services of the daemon in virtual time. Of three
cells one is four times slower, or is killed whole, or the first cell is, as which the run began."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import Report
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId, PeerId, first_cell
from node.epoch import events as ev
from node.scheduler.settings import SchedulerSettings
from node.sim.process import SimPeer
from node.sim.setup import Setup, WorkTimes, toy_parts
from node.sim.swarm import SimSwarm
from node.sim.watch import HistoryRecorder
from node.sim.world.loop import bury, quiet

SETUP = Setup(
    ends=5,
    stages=2,
    replicas=5,
    epochs=100_000,
    parts=toy_parts(2, 3),
    cell=2,
    outer=OuterSettings("moshpit", "state", window_s=60.0, grid=(4, 4), optimizer="nesterov"),
    scheduler=SchedulerSettings("round-robin", 0.0),
    work=WorkTimes(ends_s=0.05, forward_s=0.15, step_s=0.05, unequal=1.0),
)
"""Five replicas of each stage become cells of two, two and one."""
SEEDS = 1
SETTLED_S, STRIKES_S, ENDS_S = 90.0, 150.0, 330.0
"""When there are three cells; when the trouble begins; the end."""
SLOWER = 4.0
LOSS = 0.02
GAP_S = 1.0
"""Longer than without the trouble: a second of waiting."""


@dataclass
class Book:
    """Times of one run by cell: commits of training epochs, means of windows put in place, epochs
    given up."""

    seed: int
    epochs: dict[CellId, list[float]] = field(default_factory=dict)
    windows: dict[CellId, list[float]] = field(default_factory=dict)
    abandoned: dict[CellId, list[float]] = field(default_factory=dict)
    struck: CellId = CellId("")

    def count(self, kind: Mapping[CellId, Sequence[float]], cell: CellId) -> int:
        """How many since the trouble began."""
        return sum(at > STRIKES_S for at in kind.get(cell, ()))

    def gap(self, cell: CellId) -> float:
        """The longest time between two commits, or a commit and the end, since shortly before the
        trouble began."""
        commits = sorted([*self.epochs[cell], *self.windows.get(cell, ())])
        times = [at for at in commits if at > STRIKES_S - 10.0] + [ENDS_S]
        return max(b - a for a, b in zip(times, times[1:], strict=False))


class Recorder(HistoryRecorder):
    """That writes the book of the cells too."""

    def __init__(self, swarm: SimSwarm, book: Book) -> None:
        super().__init__(swarm)
        self.book = book
        self._all = swarm

    def report(self, peer: SimPeer, report: ev.RecordFact) -> None:
        super().report(peer, report)
        made = self._all.peers[peer.name].assembled
        book = self.book
        if made is None:
            return
        if report.kind == "epoch-committed":
            kind = book.epochs if report.facts["tokens"] else book.windows
        elif report.kind == "epoch-abandoned":
            kind = book.abandoned
        else:
            return
        kind.setdefault(made.training.cell, []).append(self._all.world.now)


def rows(report: Report, root: Path, seeds: int = SEEDS) -> None:
    """Add rows over `seeds` runs, with seeds for which the swarm divides into three cells."""
    calm = list(itertools.islice(filter(None, (play(n) for n in itertools.count())), seeds))
    found = {
        what: [again for book in calm if (again := play(book.seed, what))] for what in TROUBLES
    }
    for what, text in TROUBLES.items():
        pairs = list(zip(found[what], calm, strict=True))
        _epochs(report, what, text, pairs)
        if what != "slow":
            _waiting(report, text, pairs)
    books = found["founder"]
    epochs, windows = (
        min(book.count(kind(book), cell) for book in books for cell in others_of(book))
        for kind in (lambda book: book.epochs, lambda book: book.windows)
    )
    seconds = ENDS_S - STRIKES_S
    report.add(
        "3 the run goes on without the cell that it began as: epochs of each cell afterwards",
        epochs,
        f"epochs in {seconds:.0f} s, fewest of a cell",
        f"and windows averaged in: {windows} or more of {seconds / SETUP.outer.window_s:.0f}",
        "both more than 0",
        holds=min(epochs, windows) > 0,
    )


TROUBLES = {
    "slow": f"one cell {SLOWER:g} times slower",
    "killed": "a cell killed whole",
    "founder": "the first cell killed whole",
}
Pairs = Sequence[tuple[Book, Book]]


def others_of(book: Book) -> list[CellId]:
    """The cells without the one in trouble."""
    return [cell for cell in book.epochs if cell != book.struck]


def _epochs(report: Report, what: str, text: str, pairs: Pairs) -> None:
    """Add the others' training epochs over the same cells' epochs in the undisturbed run."""
    ratios = [
        book.count(book.epochs, cell) / calm.count(calm.epochs, cell)
        for book, calm in pairs
        for cell in others_of(book)
    ]
    lost = [sum(book.count(book.abandoned, c) for c in others_of(book)) for book, _ in pairs]
    calm = [sum(calm.count(calm.abandoned, c) for c in others_of(book)) for book, calm in pairs]
    report.add(
        f"3 {text}: epochs a second of the others",
        fmean(ratios),
        "x, beside the same run without it",
        f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} cells",
        f"at least {1 - LOSS:g}",
        holds=fmean(ratios) >= 1 - LOSS,
    )
    report.add(
        f"3 {text}: epochs that the others gave up",
        sum(lost),
        f"in {len(lost)} runs",
        f"{sum(calm)} without it",
        "0" if what != "slow" else "",
        holds=sum(lost) == 0 if what != "slow" else None,
    )


def _waiting(report: Report, text: str, pairs: Pairs) -> None:
    gaps = [(book.gap(c), calm.gap(c)) for book, calm in pairs for c in others_of(book)]
    more = max(mine - calm for mine, calm in gaps)
    report.add(
        f"3 {text}: longest time between two commits of another cell",
        max(mine for mine, _ in gaps),
        "s",
        f"{max(calm for _, calm in gaps):.2f} s without it; at most {more:.2f} s more in one cell",
        f"less than {GAP_S:g} s more",
        holds=more < GAP_S,
    )


def play(seed: int, what: str = "") -> Book | None:
    """One run with the trouble of that name, or none. None when there are not three cells in
    time."""
    book = Book(seed)
    with quiet():
        swarm = SimSwarm(SETUP, seed)
        swarm.watch = Recorder(swarm, book)
        swarm.world.run(SETTLED_S, None)
        members = by_cell(swarm)
        if len(members) != 3:
            return None
        swarm.world.run(STRIKES_S, None)
        first = first_cell(swarm.manifest.run_id)
        last = max(cell for cell in members if cell != first)
        if what:
            book.struck = first if what == "founder" else last
        for name in members.get(book.struck, ()):
            peer: Any = swarm.peers[name]
            if what == "slow":
                peer.device.slowness *= SLOWER
            else:
                peer.kill()
        swarm.world.run(ENDS_S, None)
        bury()
    return book


def by_cell(swarm: SimSwarm) -> dict[CellId, list[PeerId]]:
    """The peers of every cell."""
    found: dict[CellId, list[PeerId]] = {}
    for peer in swarm.live():
        if peer.assembled is not None:
            found.setdefault(peer.assembled.training.cell, []).append(peer.name)
    return found
