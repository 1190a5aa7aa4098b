"""How mass moves between cells that lead themselves: one machine for each cell's leader. Enters:
who is at the ends of the cell's edges in a window, questions of takers, answers of givers, plans
that were committed. Leaves: questions, answers, the shares that a window brings. Never: a value.

A taker asks for its share and reports in the same note what it has taken so far: the receipt. The
giver grants once in a window. It answers only when a plan whose books have the grant has been
committed, so that every member of its cell knows of it, and a new leader gives the same answer. The
taker counts a share when the outer round that puts the value in place is committed, and reports
that with its next question. Units that were granted and not taken stay in the taker's account, and
are offered again.
"""

from dataclasses import dataclass

from node.averaging.exchange.events import TimePassed
from node.core.ids import CellId
from node.core.mass import Account, Books, Shares, Units, parse_books


@dataclass(frozen=True, slots=True)
class WindowBegan:
    """In ``window`` the cell takes from ``givers`` and gives to ``takers``. What is not granted and
    answered at ``until`` is left for another window."""

    window: int
    givers: tuple[CellId, ...]
    takers: tuple[CellId, ...]
    until: float


@dataclass(frozen=True, slots=True)
class UnitsAsked:
    """The taker wants its share of ``window``, and has taken ``units`` since ``since``. ``cell``:
    the other one. As an event this is the taker that asks, as an action the giver whose leader is
    to be asked."""

    cell: CellId
    window: int
    since: int
    units: Units


@dataclass(frozen=True, slots=True)
class UnitsGranted:
    """The giver has granted the taker ``units`` since ``since``, and knows that it took ``agreed``.
    ``cell``: the other one. As an event this is the giver, as an action the taker whose leader is
    to be told."""

    cell: CellId
    window: int
    since: int
    units: Units
    agreed: Units


@dataclass(frozen=True, slots=True)
class BooksCommitted:
    """All members of the cell have a plan that says ``books``; it put the values of ``shares`` in
    place."""

    books: Books
    shares: Shares


@dataclass(frozen=True, slots=True)
class BooksRead:
    """A plan that was followed here says ``books``. Of two the later count."""

    books: Books


Event = WindowBegan | UnitsAsked | UnitsGranted | BooksCommitted | BooksRead | TimePassed


@dataclass(frozen=True, slots=True)
class NotYet:
    """``taker`` is to ask again: what it may have is in no committed plan yet."""

    taker: CellId


@dataclass(frozen=True, slots=True)
class SharesCame:
    """Nobody is waited for any longer in ``window``: the cell may give, and take ``shares``."""

    window: int
    shares: Shares


Action = UnitsAsked | UnitsGranted | NotYet | SharesCame
NOTHING = Account(0, 0)


class PushSum:
    """The state machine of one cell's leader. ``books``: of the next plan, None while unknown."""

    def __init__(self, fanout: int, books: Books | None = None) -> None:
        self._parts = fanout + 1
        self.books = books
        self._sure: Books | None = None
        """The books of the last plan that was committed; None: not known yet."""
        self._window = 0
        self.asks = False
        """A window has begun, and not all is granted and answered."""
        self._givers: frozenset[CellId] = frozenset()
        self._takers: frozenset[CellId] = frozenset()
        self._until = 0.0
        self._portion: Units = {}
        self._granted: set[CellId] = set()
        self._served: set[CellId] = set()
        self._owed: dict[CellId, Units] = {}

    def divided(self, me: CellId, child: CellId) -> Books | None:
        """The books of a cell that is founded from this one, ``me``, and what these become."""
        if self.books is None:
            return None
        self.books, founded = self.books.divided(me, child, self._window)
        return founded

    def handle(self, event: Event, now: float) -> list[Action]:
        """One event in, actions out. Events of another window change nothing but the books."""
        if isinstance(event, BooksRead):
            if self.books is None or event.books.serial > self.books.serial:
                self.books, self._sure = event.books, None
            return []
        if isinstance(event, BooksCommitted):
            self._committed(event)
            return []
        books = self.books
        if books is None:
            return [NotYet(event.cell)] if isinstance(event, UnitsAsked) else []
        match event:
            case WindowBegan():
                return self._begin(event, books)
            case UnitsAsked():
                return [self._asked(event, books), *self._over(now)]
            case UnitsGranted():
                self._answered(event, books)
                return self._over(now)
            case TimePassed():
                return self._over(now) or (self._questions() if self.asks else [])

    def _begin(self, e: WindowBegan, books: Books) -> list[Action]:
        self.books = books = books.tidied(e.window)
        self._window, self.asks, self._until = e.window, True, e.until
        self._givers, self._takers = frozenset(e.givers), frozenset(e.takers)
        self._portion = {stage: n // self._parts for stage, n in books.held.items()}
        self._granted, self._served, self._owed = set(), set(), {}
        return self._questions()

    def _questions(self) -> list[Action]:
        """Questions to the givers. What was taken is reported from committed books, so that no
        giver counts a share as taken that this cell forgets when its leader changes."""
        sure = self._sure
        if sure is None:
            return []
        silent = sorted(self._givers - self._owed.keys())
        had = {giver: sure.taken.get(giver, NOTHING) for giver in silent}
        return [UnitsAsked(g, self._window, a.since, a.units) for g, a in had.items()]

    def _asked(self, e: UnitsAsked, books: Books) -> Action:
        books = books.tidied(e.window)
        books = _if_told(books.receipt(e.cell, e.window, e.since, e.units), books)
        now = e.window == self._window and self.asks and e.cell in self._takers
        if now and e.cell not in self._granted:
            self._granted.add(e.cell)
            books = _if_told(books.grants(e.cell, e.window, self._portion), books)
        self.books = books
        a = books.given.get(e.cell, NOTHING)
        if self._sure is None or not a.says_as(self._sure.given.get(e.cell, NOTHING)):
            return NotYet(e.cell)
        if now:
            self._served.add(e.cell)
        return UnitsGranted(e.cell, e.window, a.since, a.units, a.agreed)

    def _answered(self, e: UnitsGranted, books: Books) -> None:
        waited = self.asks and e.cell in self._givers and e.cell not in self._owed
        if e.window != self._window or not waited:
            return
        self._owed[e.cell] = books.owed(e.cell, e.since, e.units, e.agreed)
        if e.since:
            books = books.answered(e.cell, e.window, e.since, e.agreed)
        taken = books.took(self._shares())
        if _if_told(taken, books) is taken:
            self.books = books
        else:
            self._owed[e.cell] = {}

    def _over(self, now: float) -> list[Action]:
        whole = self._givers <= self._owed.keys() and self._takers <= self._served
        if not self.asks or (now < self._until and not whole):
            return []
        self.asks = False
        return [SharesCame(self._window, self._shares())]

    def _shares(self) -> Shares:
        """What is owed by those who have answered."""
        stages = sorted({stage for owed in self._owed.values() for stage in owed})
        return {
            stage: {g: owed[stage] for g, owed in sorted(self._owed.items()) if owed.get(stage)}
            for stage in stages
        }

    def _committed(self, e: BooksCommitted) -> None:
        newest, sure = self.books, e.books
        if newest is None or sure.serial > newest.serial:
            newest = sure
        if any(e.shares.values()):
            newest, sure = newest.took(e.shares), sure.took(e.shares)
        self.books, self._sure = newest, sure


def _if_told(books: Books, before: Books) -> Books:
    """``books`` where a plan can tell them, else those ``before``: what another cell claims must
    not make books with which nobody could read this cell's plans any more."""
    if books is before:  # most that is said again changes nothing
        return books
    try:
        parse_books(books.rows())
    except ValueError:
        return before
    return books


def weights(books: Books, shares: Shares, stage: int) -> dict[CellId, float]:
    """How far a cell moves towards each giver's value of a stage: its share of the mass that the
    cell then holds. Empty where it holds none."""
    mine = shares.get(stage, {})
    whole = books.held.get(stage, 0) + sum(mine.values())
    return {cell: units / whole for cell, units in mine.items()} if whole > 0 else {}
