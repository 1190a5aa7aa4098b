"""How cells find the group they average with in one window of wall-clock time, without a leader:
one machine for each cell and window. Enters: the cells that posted the same key, offers and answers
of others, the time. Leaves: postings, reads, offers, answers; the group. Never: a message to more
cells than read under one key.

All times count from the window's start, which is the same for everybody up to the clocks' errors.
Cells under one key are ordered by the hash of (window, key, cell), and each has a turn in that
order. The caller of a turn offers a group to all cells it saw; a free cell accepts and keeps itself
free for this caller only, for ``Times.lock``; the caller names some of the cells that accepted. A
caller that never names its group costs the cells that accepted one turn, and they bar it, unless
it names them late and they are still free. Cells that found no group try once more under a shorter
key.

A group counts for a member only if the member itself accepted it, so two groups of one window never
share a member. A cell that the naming did not reach learns of it with the first message of the
exchange, which repeats it (:class:`GroupNamed` from any member).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from node.averaging.exchange.events import TimePassed
from node.averaging.strategies.strategy import rank
from node.core.ids import CellId, PeerId


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds; the same at every cell of a run."""

    post: float = -5.0
    """Time to post the key, so that the directory has it when the others read."""
    read: float = 3.0
    """Time to read the postings: later than clocks differ."""
    turns: float = 6.0
    """Time until the first turn."""
    turn: float = 8.0
    """Time between two turns: longer than an accepted offer binds, so that the cells of a caller
    that went silent are free in the next turn."""
    answers: float = 3.0
    """Time for which a caller waits for answers."""
    lock: float = 7.0
    """Time for which an accepted offer binds the cell that accepted it."""
    attempt: float = 60.0
    """Time between two attempts, the second under a shorter key."""
    clocks: float = 2.0
    """Largest difference of two clocks."""

    def scaled(self, share: float) -> "Times":
        """All of them times ``share``."""
        return Times(**{name: share * seconds for name, seconds in asdict(self).items()})


TIMES = Times()


@dataclass(frozen=True, slots=True)
class CellsRead:
    """The directory's answer: these cells posted ``key`` for this window. The reader leaves out
    cells that cannot be averaged with: posted late, no anchor where one is needed, another change
    of the owner."""

    key: str
    cells: frozenset[CellId]


@dataclass(frozen=True, slots=True)
class Offered:
    """``caller`` offers a group under ``key``."""

    caller: CellId
    key: str


@dataclass(frozen=True, slots=True)
class OfferAnswered:
    """``cell`` accepts our offer under ``key``, or does not."""

    cell: CellId
    key: str
    accepts: bool


@dataclass(frozen=True, slots=True)
class GroupNamed:
    """``caller`` named its group, and every other member's acceptance was verified."""

    caller: CellId
    key: str
    members: frozenset[CellId]


@dataclass(frozen=True, slots=True)
class Released:
    """``caller`` has a group without us."""

    caller: CellId


Event = TimePassed | CellsRead | Offered | OfferAnswered | GroupNamed | Released


@dataclass(frozen=True, slots=True)
class Post:
    """Write into the directory that we look for a group under ``key``."""

    key: str


@dataclass(frozen=True, slots=True)
class ReadCells:
    """Read the postings under ``key``, and give :class:`CellsRead` if the directory answers."""

    key: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer a group under ``key`` to these cells."""

    to: tuple[CellId, ...]
    key: str


@dataclass(frozen=True, slots=True)
class AnswerOffer:
    """Tell ``caller`` whether we accept its offer under ``key``."""

    caller: CellId
    key: str
    accepts: bool


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Tell the members but ourselves that they are the group, with everybody's acceptance."""

    key: str
    members: frozenset[CellId]


@dataclass(frozen=True, slots=True)
class Release:
    """Tell these cells that accepted our offer that the group is full."""

    to: tuple[CellId, ...]


@dataclass(frozen=True, slots=True)
class BarCaller:
    """``caller`` bound us and named no group, or one that cannot be: ignore its offers for some
    windows."""

    caller: CellId


@dataclass(frozen=True, slots=True)
class Unbar:
    """``caller`` named its group after all: take its offers again. It was only late."""

    caller: CellId


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """Done: the group, ourselves included, formed under ``key``."""

    key: str
    members: frozenset[CellId]


@dataclass(frozen=True, slots=True)
class WindowSkipped:
    """Done: no group in this window."""


Action = (
    Post
    | ReadCells
    | Offer
    | AnswerOffer
    | NameGroup
    | Release
    | BarCaller
    | Unbar
    | GroupFormed
    | WindowSkipped
)


class Timer(Enum):
    """Task that is due at a time."""

    POST = "post"
    READ = "read"
    TURN = "turn"
    ANSWERS = "answers"
    LOCK = "lock"
    ATTEMPT = "attempt"


class GroupForming:
    """``me`` looks for a group of at most ``most`` cells in ``window``, under each of ``keys`` in
    turn. ``start``: the window's start by the caller's clock; ``barred``: cells from which no offer
    is accepted. ``together``: there is to be one group only, so where more cells have posted than
    it takes, a cell that is released stays alone."""

    def __init__(
        self,
        me: CellId,
        window: int,
        keys: Sequence[str],
        most: int,
        start: float,
        barred: Collection[CellId] = (),
        times: Times = TIMES,
        together: bool = False,
    ) -> None:
        self.me = me
        self.window = window
        self.most = most
        self.barred = set(barred)
        self.done: GroupFormed | WindowSkipped | None = None
        self._start = start
        self._keys = list(keys)
        self._times = times
        self._together = together
        self._order: list[CellId] = []
        self._timers: dict[Timer, float] = {}
        self._waits_for: set[CellId] = set()
        self._asked: set[CellId] = set()
        self._accepters: list[CellId] = []
        self._bound: CellId | None = None
        self._accepted: set[tuple[CellId, str]] = set()
        self._attempt()

    @property
    def key(self) -> str:
        """The key of this attempt."""
        return self._keys[0]

    @property
    def wakes_at(self) -> float | None:
        """Time at which :class:`TimePassed` is needed next; None when it is over."""
        if self.done is not None:
            return None
        return min(self._timers.values())

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that ``event`` calls for. After the end only late offers and answers are
        answered."""
        match event:
            case Offered(caller, key):
                return [self._consider(caller, key, now)]
            case OfferAnswered(cell, _, accepts=True) if cell not in self._asked:
                return [Release((cell,))]  # it came late, and is bound to us for nothing
            case _ if self.done is not None:
                return []
            case TimePassed():
                return self._tick(now)
            case CellsRead(key, cells) if key == self.key:
                self._read(cells)
            case OfferAnswered(cell, key, accepts) if key == self.key and cell in self._waits_for:
                return self._answered(cell, accepts)
            case GroupNamed():
                return self._named(event)
            case Released(caller):
                return self._released(caller)
            case _:
                pass
        return []

    def _attempt(self) -> None:
        """Begin an attempt under the first of the keys."""
        self._order = []
        self._timers |= {
            Timer.POST: self._start + self._times.post,
            Timer.READ: self._start + self._times.read,
            Timer.ATTEMPT: self._start + self._times.attempt + self._times.post,
        }
        self._timers.pop(Timer.TURN, None)

    def _tick(self, now: float) -> list[Action]:
        done: list[Action] = []
        for timer in [t for t in Timer if self._timers.get(t, math.inf) <= now]:
            if self.done is None and timer in self._timers:
                del self._timers[timer]
                done += self._due(timer, now)
        return done

    def _due(self, timer: Timer, now: float) -> list[Action]:
        match timer:
            case Timer.POST:
                return [Post(self.key)]
            case Timer.READ:
                return [ReadCells(self.key)]
            case Timer.TURN:
                return self._call(now)
            case Timer.ANSWERS:
                return self._close()
            case Timer.LOCK:
                return self._give_up_caller()
            case Timer.ATTEMPT:
                return self._next_key()

    def _read(self, cells: frozenset[CellId]) -> None:
        salt = f"{self.window}:{self.key}"
        everybody = (cells - self.barred) | {self.me}
        self._order = sorted(everybody, key=lambda cell: rank(PeerId(cell), salt))
        self._timers[Timer.TURN] = (
            self._start + self._times.turns + self._order.index(self.me) * self._times.turn
        )

    def _call(self, now: float) -> list[Action]:
        """Our turn: offer a group to everybody, unless we are bound; then again after a round of
        turns."""
        self._timers[Timer.TURN] = now + len(self._order) * self._times.turn
        others = tuple(cell for cell in self._order if cell != self.me)
        # An attempt does not end while answers are awaited, so that nobody is left bound.
        late = now + self._times.answers > self._timers[Timer.ATTEMPT]
        if self._bound is not None or not others or late:
            return []
        self._waits_for = set(others)
        self._asked = set(others)
        self._accepters = []
        self._timers[Timer.ANSWERS] = now + self._times.answers
        return [Offer(others, self.key)]

    def _consider(self, caller: CellId, key: str, now: float) -> AnswerOffer:
        free = self.done is None and self._bound is None and Timer.ANSWERS not in self._timers
        accepts = free and key == self.key and caller not in self.barred and caller != self.me
        if accepts:
            self._bound = caller
            self._timers[Timer.LOCK] = now + self._times.lock
            self._accepted.add((caller, key))
        return AnswerOffer(caller, key, accepts)

    def _answered(self, cell: CellId, accepts: bool) -> list[Action]:
        self._waits_for.discard(cell)
        if accepts:
            self._accepters.append(cell)
        if self._waits_for:
            return []
        return self._close()

    def _close(self) -> list[Action]:
        """Name the group. Among the cells that accepted, the ones with the furthest turns are
        chosen, so that the cell with the next turn stays free to call."""
        self._timers.pop(Timer.ANSWERS, None)
        # A cell may report its acceptance twice: it is in the group or was released.
        self._waits_for = set()
        self._asked = set(self._accepters)
        if not self._accepters:
            return []
        far = sorted(self._accepters, key=self._order.index, reverse=True)
        chosen = far[: self.most - 1]
        left = far[self.most - 1 :]
        members = frozenset((self.me, *chosen))
        self.done = GroupFormed(self.key, members)
        released = list[Action]()
        if left:
            released.append(Release(tuple(left)))
        return [NameGroup(self.key, members), *released, self.done]

    def _named(self, event: GroupNamed) -> list[Action]:
        """Believe a group's name if we accepted that caller's offer, are bound to nobody else, and
        nobody is bound to us."""
        accepted = (event.caller, event.key) in self._accepted
        elsewhere = self._bound not in (None, event.caller) or Timer.ANSWERS in self._timers
        if not accepted or elsewhere:
            return []
        if not {self.me, event.caller} <= event.members or len(event.members) > self.most:
            if not self._bound:
                return []
            return self._give_up_caller()
        self.done = GroupFormed(event.key, event.members)
        if event.caller not in self.barred:
            return [self.done]
        self.barred.discard(event.caller)
        return [Unbar(event.caller), self.done]

    def _released(self, caller: CellId) -> list[Action]:
        """``caller`` has a group without us. A second group would come to another result from the
        same beginning, and one of the two results would be given up in the next window."""
        bound = self._bound == caller
        if bound:
            self._unbind()
        # A release may come when the offer binds no more.
        free = bound or (self._bound is None and (caller, self.key) in self._accepted)
        if not (free and self._together and len(self._order) > self.most):
            return []
        self.done = WindowSkipped()
        return [self.done]

    def _give_up_caller(self) -> list[Action]:
        caller = self._bound
        self._unbind()
        if caller is None:
            return []
        self.barred.add(caller)
        return [BarCaller(caller)]

    def _unbind(self) -> None:
        self._bound = None
        self._timers.pop(Timer.LOCK, None)

    def _next_key(self) -> list[Action]:
        """Begin again under the next key, or give up."""
        if len(self._keys) == 1:
            self.done = WindowSkipped()
            return [self.done]
        del self._keys[0]
        self._start += self._times.attempt
        self._attempt()
        return []
