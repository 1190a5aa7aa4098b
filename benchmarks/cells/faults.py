"""Faults between cells: the services of the daemon in virtual time. One of three cells is killed
whole, or parted from the others for ten windows, or stands still, or all leaders die at once. And a
run of one cell is parted into halves that meet again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.cells.independence import SETTLED_S, SETUP, STRIKES_S, Book, Recorder, by_cell
from benchmarks.report import Report
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import ENDS, CellId, PeerId
from node.sim.swarm import SimSwarm
from node.sim.watch import CommitSeen
from node.sim.world.loop import bury, quiet
from node.sim.world.network import Wall

SEEDS, TRIED = 1, 12
"""Runs of each trouble, and seeds that are tried to find this number of runs that divide into three
cells."""
PAIRED = replace(SETUP, ends=6, replicas=6)
"""Three cells with two of everything: none loses its last peer of a stage with its leader."""
ONE = replace(PAIRED, ends=4, replicas=4, cell=0, outer=OuterSettings())
WINDOWS = 10
STILL_S = 30.0
HALVED_S = 60.0
AFTER_S = 180.0
"""Seconds that a run goes on after its trouble: three windows."""
BACK_S = 10.0
"""Bound in s from a leader's death, or the moment that halves meet, to the next commit."""
Cells = Mapping[CellId, Sequence[PeerId]]


@dataclass(frozen=True)
class Trouble:
    """``strikes``: begins it, and gives what ends it after ``seconds``."""

    text: str
    seconds: float
    strikes: Callable[[SimSwarm, Cells], Callable[[], None]]


@dataclass
class Story:
    """Of one run. ``alive``: cells that are to go on; ``ended``: when the trouble was over."""

    book: Book
    alive: list[CellId]
    began: float
    ended: float

    def next(self, cell: CellId, since: float) -> float:
        """Seconds from then until a cell's next commit, of either kind; the rest of the run where
        there is none."""
        commits = [*self.book.epochs.get(cell, ()), *self.book.windows.get(cell, ())]
        return min((at for at in commits if at > since), default=self.ended + AFTER_S) - since

    def lost(self) -> int:
        """Epochs given up by the cells that go on."""
        return sum(
            at > self.began for cell in self.alive for at in self.book.abandoned.get(cell, ())
        )

    def averaged(self) -> int:
        """Windows after the trouble in which the cell with the fewest put a mean in place."""
        return min(
            sum(at > self.ended for at in self.book.windows.get(cell, ())) for cell in self.alive
        )


def rows(report: Report, root: Path, seeds: int = SEEDS) -> None:
    """Three rows for each trouble between cells, two for the halves of one cell."""
    for trouble in TROUBLES:
        stories = _stories(trouble, seeds)
        back = [s.next(c, s.began) for s in stories for c in s.alive]
        waits = "all leaders" in trouble.text
        report.add(
            f"9 {trouble.text}: next commit of the cells that go on",
            max(back),
            "s, the longest",
            f"median {median(back):.2f} s, {len(back)} cells of {len(stories)} runs",
            f"at most {BACK_S:g}",
            holds=max(back) <= BACK_S,
        )
        lost = [s.lost() for s in stories]
        most = sum(len(s.alive) for s in stories) if waits else 0
        report.add(
            f"9 {trouble.text}: epochs that those cells gave up",
            sum(lost),
            f"in {len(lost)} runs",
            "one of each cell may be lost with its leader" if waits else "",
            f"at most {most}",
            holds=sum(lost) <= most,
        )
        averaged = min(s.averaged() for s in stories)
        report.add(
            f"9 {trouble.text}: windows afterwards in which every cell averaged",
            averaged,
            f"of {AFTER_S / PAIRED.outer.window_s:.0f}, fewest of a cell",
            "",
            "1 or more",
            holds=averaged >= 1,
        )
    _halves(report, seeds)


def _killed(swarm: SimSwarm, cells: Cells) -> Callable[[], None]:
    for name in cells[max(cells)]:
        swarm.peers[name].kill()
    return lambda: None


def _parted(swarm: SimSwarm, cells: Cells) -> Callable[[], None]:
    return wall(swarm, cells[max(cells)])


def _still(swarm: SimSwarm, cells: Cells) -> Callable[[], None]:
    still = [swarm.peers[name] for name in cells[max(cells)]]
    for peer in still:
        peer.loop.frozen = True

    def wakes() -> None:
        for peer in still:
            peer.loop.thaw()

    return wakes


def _leaders(swarm: SimSwarm, cells: Cells) -> Callable[[], None]:
    for peer in swarm.live(ENDS):
        if peer.leader is not None:
            peer.kill()
    return lambda: None


def wall(swarm: SimSwarm, some: Sequence[PeerId]) -> Callable[[], None]:
    """Nothing passes between these peers and the others."""
    inside = frozenset(some)
    outside = frozenset(swarm.peers) - inside
    walls = [Wall(inside, outside), Wall(outside, inside)]
    swarm.links.walls.extend(walls)

    def falls() -> None:
        for wall in walls:
            swarm.links.walls.remove(wall)

    return falls


TROUBLES = (
    Trouble("a cell killed whole", 0.0, _killed),
    Trouble(
        f"a cell parted from the others for {WINDOWS} windows",
        WINDOWS * PAIRED.outer.window_s,
        _parted,
    ),
    Trouble(f"a cell that stands still for {STILL_S:g} s", STILL_S, _still),
    Trouble("all leaders killed at once", 0.0, _leaders),
)


def _stories(trouble: Trouble, seeds: int) -> list[Story]:
    found: list[Story] = []
    for seed in range(TRIED):
        if len(found) < seeds and (story := play(trouble, seed)) is not None:
            found.append(story)
    if not found:
        raise RuntimeError(f"no seed of {TRIED} divided into three cells")
    return found


def play(trouble: Trouble, seed: int) -> Story | None:
    """One run with this trouble; None when there are not three cells in time."""
    book = Book(seed)
    with quiet():
        swarm = SimSwarm(PAIRED, seed)
        swarm.watch = Recorder(swarm, book)
        swarm.world.run(SETTLED_S, None)
        cells = by_cell(swarm)
        if len(cells) != 3:
            return None
        swarm.world.run(STRIKES_S, None)
        swarm.watch.one_fault.fault(trouble.text)
        swarm.troubles += 1
        ends = trouble.strikes(swarm, cells)
        alive = [c for c in cells if any(_works(swarm, name) for name in cells[c])]
        swarm.world.run(STRIKES_S + trouble.seconds, None)
        ends()
        swarm.troubles -= 1
        swarm.watch.one_fault.fault("over")
        swarm.world.run(STRIKES_S + trouble.seconds + AFTER_S, None)
        bury()
    return Story(book, alive, STRIKES_S, STRIKES_S + trouble.seconds)


def _works(swarm: SimSwarm, name: PeerId) -> bool:
    return swarm.peers[name].alive and not swarm.peers[name].loop.frozen


def _halves(report: Report, seeds: int) -> None:
    """Both halves of one cell go on alone; then they meet, and one history goes on."""
    found = [_meet_again(seed) for seed in range(seeds)]
    report.add(
        "9 two halves of one cell meet again: until an epoch of both is committed",
        max(seconds for seconds, _ in found),
        "s, the longest",
        f"{', '.join(f'{s:.1f}' for s, _ in found)} s; parted for {HALVED_S:g} s",
        f"at most {BACK_S:g}",
        holds=max(seconds for seconds, _ in found) <= BACK_S,
    )
    report.add(
        "9 two halves of one cell meet again: epochs given up",
        max(epochs for _, epochs in found),
        "epochs of the smaller half, the most",
        ", ".join(str(epochs) for _, epochs in found),
    )


def _meet_again(seed: int) -> tuple[float, int]:
    """(Seconds until a leader has committed an epoch with peers of both halves, epochs given
    up)."""
    with quiet():
        swarm = SimSwarm(ONE, seed)
        swarm.world.run(SETTLED_S, None)
        some = frozenset(p.name for s in range(ONE.stages + 1) for p in swarm.live(s)[::2])
        swarm.watch.one_fault.fault("halved")
        falls = wall(swarm, sorted(some))
        swarm.world.run(SETTLED_S + HALVED_S, None)
        falls()
        swarm.watch.one_fault.fault("over")
        met = swarm.world.now
        plans = set[str]()

        def both() -> bool:
            """A version is in place that a plan with workers of both halves made."""
            for peer in swarm.live():
                plan = peer.work.plan
                if plan is not None and plan.paths:
                    work = {hop.peer for path in plan.paths for hop in path.journey}
                    if work & some and work - some:
                        plans.add(plan.hash)
            done = swarm.watch.commits[-1:]
            return bool(plans) and bool(done) and done[0].at > met and _planned_by_both(done[0])

        def _planned_by_both(commit: CommitSeen) -> bool:
            plan = swarm.peers[commit.leader].work.plan
            return plan is not None and plan.hash in plans

        swarm.world.run(met + AFTER_S, both)
        seconds = swarm.world.now - met
        epochs = swarm.watch.counts["epochs-given-up"]
        bury()
    return seconds, epochs
