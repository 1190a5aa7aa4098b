"""Rows 7: push-sum's mass, as the leaders of cells move it, in virtual time: messages are lost,
repeated and late, leaders and whole cells die. What is held, what was granted and not taken, and
what the dead held by name are compared with what there was, to the last unit.
"""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from benchmarks.report import Report
from node.averaging.strategies import push_sum as machine
from node.averaging.strategies.keys import edge_keys
from node.averaging.strategies.outer import OuterSettings
from node.averaging.strategies.push_sum import PushSum, weights
from node.core.ids import CellId
from node.core.mass import WHOLE_MASS, Books, Shares

STAGES = 1
"""Block stages; the ends are one more."""
WINDOW_S, EPOCH_S, COMMIT_S, AGAIN_S, ASKS_S = 20.0, 1.0, 0.4, 1.0, 8.0
LEADERLESS_S, OUT_OF_SIGHT_S = 4.0, 30.0


@dataclass(frozen=True)
class Trial:
    """``loss``, ``twice``: shares of the messages that are lost, or come twice; ``leader_dies`` and
    ``cell_dies``: chances in a window for a cell that its leader dies, or all of it; ``returns``:
    that it goes on from what it was some windows ago, as after a power cut."""

    cells: int = 8
    windows: int = 1000
    fanout: int = 1
    loss: float = 0.01
    twice: float = 0.01
    leader_dies: float = 0.005
    cell_dies: float = 0.0005
    returns: float = 0.0
    divides: float = 0.0
    fewest: int = 3


@dataclass
class Cell:
    """``durable``: what every member knows, ``written``: a plan that is not committed yet,
    ``leader``: None while nobody leads. ``value`` stands for the parameters of a stage."""

    name: CellId
    durable: Books
    value: dict[int, float]
    leader: PushSum | None = None
    written: tuple[Books, Shares] | None = None
    dead_since: float | None = None
    life: int = 0
    shares: tuple[int, Shares] | None = None
    given: dict[int, Mapping[int, float]] = field(default_factory=dict)
    past: list[Books] = field(default_factory=list)


def under_way(books: Mapping[CellId, Books]) -> dict[tuple[CellId, CellId], dict[int, int]]:
    """What a cell has granted to another, which has not taken it."""
    found: dict[tuple[CellId, CellId], dict[int, int]] = {}
    for giver, of in books.items():
        for taker, account in of.given.items():
            other = books.get(taker, Books({}))
            known = other.taken.get(giver)
            if known is not None and known.since > account.since:
                continue
            had = other.had(giver, account.since, account.agreed)
            units = {stage: n - had.get(stage, 0) for stage, n in account.units.items()}
            if any(units.values()):
                found[giver, taker] = units
    return found


def total(books: Mapping[CellId, Books], stage: int) -> int:
    """All mass of a stage: held by the living and the dead, and under way to either."""
    rows = [*(b.held for b in books.values()), *under_way(books).values()]
    return sum(units.get(stage, 0) for units in rows)


class Play:
    """``check`` is called whenever a cell's books change for good."""

    def __init__(
        self, trial: Trial, seed: int, check: "Callable[[Play], None]" = lambda play: None
    ) -> None:
        self.trial, self.dice, self.check = trial, random.Random(seed), check
        self.now, self._number, self._events = (
            0.0,
            count(),
            list[tuple[float, int, Callable[[], None]]](),
        )
        self.settings = OuterSettings("push-sum", fanout=trial.fanout, window_s=WINDOW_S)
        self.moved = self.deaths = self.leader_deaths = self.returned = self.lost = 0
        share, rest = divmod(WHOLE_MASS, trial.cells)
        self.cells: dict[CellId, Cell] = {}
        for n in range(trial.cells):
            books = Books.begin(STAGES, share + (rest if not n else 0))
            self._add(Cell(self._name(), books, {s: float(n) for s in range(STAGES + 1)}))

    def _name(self) -> CellId:
        return CellId(f"{self.dice.getrandbits(64):016x}")

    def _add(self, cell: Cell) -> None:
        self.cells[cell.name] = cell
        self._lead(cell)
        self._at(self.dice.uniform(0, EPOCH_S), lambda: self._epoch(cell))

    def _at(self, after: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + after, next(self._number), what))

    def run(self, windows: int | None = None) -> None:
        """Play so many more windows, then what was begun in them."""
        first = int(self.now // WINDOW_S) + 1
        last = first + (self.trial.windows if windows is None else windows)
        for window in range(first, last):
            self._at(window * WINDOW_S - self.now, lambda w=window: self._window(w))
        end = last * WINDOW_S
        while self._events and self._events[0][0] < end:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = end

    # ----------------------------------------------------------- a cell

    def _lead(self, cell: Cell) -> None:
        """Somebody leads, who knows the last committed plan, or the one written after it."""
        cell.leader = PushSum(self.trial.fanout)
        cell.life += 1
        written = cell.written is not None and self.dice.random() < 0.5
        cell.leader.handle(
            machine.BooksRead(cell.written[0] if written and cell.written else cell.durable),
            self.now,
        )
        cell.written = cell.shares = None

    def _epoch(self, cell: Cell) -> None:
        """A plan is written, and committed a while later unless its leader dies."""
        if cell.dead_since is not None:
            return
        self._at(self.dice.uniform(0.5, 1.5) * EPOCH_S, lambda: self._epoch(cell))
        leader = cell.leader
        if leader is None or leader.books is None or cell.written is not None:
            return
        shares: Shares = {}
        if cell.shares is not None:
            window, all_shares = cell.shares
            shares, cell.shares = self._pulled(window, all_shares), None
        cell.written = leader.books, shares
        life = cell.life
        self._at(COMMIT_S, lambda: self._commit(cell, life))

    def _pulled(self, window: int, shares: Shares) -> Shares:
        """Of the stages of which everything that was granted could be fetched."""
        return {
            stage: of
            for stage, of in shares.items()
            if all(window in self.cells[g].given for g in of)
            and self.dice.random() > self.trial.loss
        }

    def _commit(self, cell: Cell, life: int) -> None:
        if cell.life != life or cell.written is None or cell.leader is None:
            return
        books, shares = cell.written
        cell.written = None
        for stage, of in shares.items():
            window = max(cell.given)
            here = cell.given[window][stage]
            for giver, share in weights(books, shares, stage).items():
                cell.value[stage] += share * (self.cells[giver].given[window][stage] - here)
            self.moved += len(of)
        cell.durable = books.took(shares) if shares else books
        cell.past = [*cell.past[-200:], cell.durable]
        cell.leader.handle(machine.BooksCommitted(books, shares), self.now)
        self.check(self)

    # ----------------------------------------------------------- a window

    def _window(self, window: int) -> None:
        for cell in list(self.cells.values()):
            if cell.dead_since is not None:
                continue
            self._fate(cell)
            self._at(self.dice.uniform(0, 1), lambda c=cell: self._begin(c, window))

    def _fate(self, cell: Cell) -> None:
        t, roll = self.trial, self.dice.random
        alive = [c for c in self.cells.values() if c.dead_since is None]
        after = self.dice.uniform(0, WINDOW_S)
        if roll() < t.cell_dies and len(alive) > t.fewest:
            self._at(after, lambda: self._dies(cell))
        elif roll() < t.leader_dies:
            self._at(after, lambda: self._loses_its_leader(cell))
        elif roll() < t.returns:
            self._at(after, lambda: self._goes_back(cell))
        elif roll() < t.divides:
            self._at(after, lambda: self._divides(cell))

    def _dies(self, cell: Cell) -> None:
        cell.dead_since, cell.leader = self.now, None
        cell.life += 1
        self.deaths += 1

    def _loses_its_leader(self, cell: Cell) -> None:
        if cell.leader is not None:
            cell.leader, self.leader_deaths = None, self.leader_deaths + 1
            cell.life += 1
            self._at(LEADERLESS_S, lambda: self._lead(cell) if cell.dead_since is None else None)

    def _goes_back(self, cell: Cell) -> None:
        """Every copy of the newest versions is lost."""
        if cell.past:
            cell.durable = self.dice.choice(cell.past)
            cell.past, cell.written = [], None
            self.returned += 1
            self._lead(cell)

    def _divides(self, cell: Cell) -> None:
        """Founder's and founded cell's books are in two plans of one leader."""
        if cell.leader is None or cell.leader.books is None or cell.written is not None:
            return
        child = self._name()
        stays, founded = cell.leader.books.divided(cell.name, child, int(self.now // WINDOW_S))
        cell.durable = stays
        self._lead(cell)
        self._add(Cell(child, founded, dict(cell.value)))

    def _begin(self, cell: Cell, window: int) -> None:
        if cell.leader is None or cell.leader.asks:
            return
        seen = {
            c.name: c
            for c in self.cells.values()
            if c.dead_since is None or self.now - c.dead_since < OUT_OF_SIGHT_S
        }
        places = {str(place): name for place, name in enumerate(sorted(seen))}
        place = sorted(seen).index(cell.name)
        keys = edge_keys(self.settings, place, len(seen), window)
        begun = machine.WindowBegan(
            window,
            tuple(places[k] for k in keys.sources),
            tuple(places[k] for k in keys.targets),
            self.now + ASKS_S,
        )
        self._does(cell, begun)
        self._ask_again(cell, window, cell.life)

    def _ask_again(self, cell: Cell, window: int, life: int) -> None:
        if cell.life == life and cell.leader is not None and cell.leader.asks:
            self._does(cell, machine.TimePassed())
            self._at(AGAIN_S, lambda: self._ask_again(cell, window, life))

    def _does(self, cell: Cell, event: machine.Event) -> None:
        if cell.leader is None:
            return
        for action in cell.leader.handle(event, self.now):
            match action:
                case machine.UnitsAsked(other) | machine.UnitsGranted(other):
                    self._send(other, replace(action, cell=cell.name))
                case machine.SharesCame(window, shares):
                    cell.given[window] = dict(cell.value)
                    cell.given.pop(window - 4, None)
                    self._at(EPOCH_S, lambda s=shares, w=window, c=cell: self._pulls(c, w, s))
                case machine.NotYet():
                    pass

    def _pulls(self, cell: Cell, window: int, shares: Shares) -> None:
        if cell.leader is not None and window in cell.given:
            cell.shares = window, shares

    def _send(self, to: CellId, event: machine.Event) -> None:
        dice, t = self.dice, self.trial
        for _ in range(2 if dice.random() < t.twice else 1):
            if dice.random() < t.loss:
                self.lost += 1
                continue
            late = 3 * WINDOW_S if dice.random() < t.twice else 0.3
            self._at(dice.uniform(0.01, late), lambda: self._does(self.cells[to], event))

    # ----------------------------------------------------------- the audit

    @property
    def books(self) -> dict[CellId, Books]:
        return {c.name: c.durable for c in self.cells.values()}

    @property
    def dead(self) -> set[CellId]:
        return {c.name for c in self.cells.values() if c.dead_since is not None}

    @property
    def missing(self) -> int:
        """Units by which the stages differ from what there was."""
        return sum(abs(total(self.books, stage) - WHOLE_MASS) for stage in range(STAGES + 1))

    @property
    def apart(self) -> float:
        """From the smallest to the largest value of the living."""
        alive = [c.value[0] for c in self.cells.values() if c.dead_since is None]
        return max(alive) - min(alive)


def rows(report: Report, root: Path) -> None:
    """Rows 7."""
    for fanout in (1, 2):
        wrong = 0

        def check(play: Play) -> None:
            nonlocal wrong
            wrong += play.missing != 0

        play = Play(replace(Trial(), fanout=fanout), seed=fanout, check=check)
        play.run()
        dead = {name: sum(play.books[name].held.values()) for name in play.dead}
        ways = under_way(play.books).items()
        owed = sum(sum(units.values()) for (_, taker), units in ways if taker in dead)
        report.add(
            f"7 push-sum to {fanout}: units created or destroyed in {play.trial.windows} rounds",
            play.missing,
            "units",
            f"of {(STAGES + 1) * WHOLE_MASS}; {wrong} moments with another sum; {play.moved} "
            f"shares moved, {play.lost} messages lost, {play.leader_deaths} leaders and "
            f"{play.deaths} cells died; {sum(dead.values())} held by {len(dead)} dead by name, "
            f"{owed} granted to them",
            "0",
            play.missing == 0 and wrong == 0 and play.moved > 0,
        )
