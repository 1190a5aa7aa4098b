"""Push-sum's books of one cell: the mass that it holds of every stage, and what has moved along its
edges. Values and their arithmetic; no library.

A unit of mass leaves the giver's ``held`` when it is granted and enters the taker's when the taker
has put the giver's value in place. Both count what moved between them since the same window and
never subtract, so a question or an answer that is lost, late or repeated changes nothing, and a
cell that has returned to older books is told by the other's what it has forgotten.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from node.core.ids import CellId
from node.core.numbers import cell_name, whole

WHOLE_MASS = 1 << 40
"""Units of a stage, over all cells of a run."""
KEEP = 64
"""Windows without a word after which a giver forgets an account that both agree on; the taker keeps
it twice as long."""
MOST = 128
"""Accounts of takers that a cell opens; who would be one more is given nothing. Of givers it has at
most twice as many, because it keeps them twice as long; from one more it takes nothing."""
MOST_STAGES, MOST_UNITS = 1024, 1 << 62
"""Of books, or of a message, that is read."""

Units = Mapping[int, int]
"""By stage."""
Shares = Mapping[int, Mapping[CellId, int]]
"""By stage, what a cell takes from each giver."""


@dataclass(frozen=True, slots=True)
class Account:
    """What has moved from one cell to another since window ``since``: ``units`` granted, or taken;
    of these the other cell has confirmed ``agreed``. They spoke last in window ``met``."""

    since: int
    met: int
    units: Units = field(default_factory=dict)
    agreed: Units = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Nothing is under way."""
        return _positive(self.units) == _positive(self.agreed)

    def says_as(self, other: "Account") -> bool:
        """Whether the other cell is told the same of both."""
        return (self.since, self.units, self.agreed) == (other.since, other.units, other.agreed)


@dataclass(frozen=True, slots=True)
class Books:
    """What a cell holds, has granted and has taken. ``held``: units of each stage; negative where
    others took units whose grant these books had lost. ``serial`` grows with every change.
    ``given`` and ``taken``: accounts by the other cell.

    Closed accounts are dropped after a while. One of ``given`` that began in window ``floor`` or
    before, and is missing, was closed: receipts for it are ignored. One of ``taken`` that began in
    window ``low`` or before, and is missing, was closed too: all that its giver has confirmed was
    taken.
    """

    held: Units
    serial: int = 0
    floor: int = 0
    given: Mapping[CellId, Account] = field(default_factory=dict)
    taken: Mapping[CellId, Account] = field(default_factory=dict)
    low: int = 0

    @classmethod
    def begin(cls, stages: int, units: int) -> "Books":
        """Of a cell with ``stages`` block stages that holds so much of every stage."""
        return cls(dict.fromkeys(range(stages + 1), units))

    def grants(self, taker: CellId, window: int, units: Units) -> "Books":
        """``taker`` may have these. Of a stage of which it has not confirmed all it was granted it
        gets no more."""
        old = self.given.get(taker, Account(window, window))
        if taker not in self.given and len(self.given) >= MOST:
            return self
        more = {
            stage: n
            for stage, n in units.items()
            if 0 < n < self.held.get(stage, 0)
            and old.units.get(stage, 0) == old.agreed.get(stage, 0)
        }
        account = replace(old, met=window, units=_sum(old.units, more))
        return self._next(
            held={s: n - more.get(s, 0) for s, n in self.held.items()},
            given={**self.given, taker: account},
        )

    def receipt(self, taker: CellId, window: int, since: int, units: Units) -> "Books":
        """``taker`` reports that it has taken ``units`` since window ``since``. Units that these
        books have not granted were granted by lost books, and are deducted now."""
        old = self.given.get(taker)
        if old is None and (since <= self.floor or not _positive(units)):
            return self
        if old is None or old.since < since:
            old = Account(since, window)
        if since < old.since:
            return self
        units = {s: n for s, n in units.items() if s in self.held}
        lost = {s: n - old.units.get(s, 0) for s, n in units.items() if n > old.units.get(s, 0)}
        agreed = {s: max(n, old.agreed.get(s, 0)) for s, n in units.items()}
        account = replace(
            old,
            met=max(window, old.met),
            units=_sum(old.units, lost),
            agreed={**old.agreed, **agreed},
        )
        if account == old:
            return self
        return self._next(
            held={s: n - lost.get(s, 0) for s, n in self.held.items()},
            given={**self.given, taker: account},
        )

    def answered(self, giver: CellId, window: int, since: int, agreed: Units) -> "Books":
        """``giver`` counts since ``since`` and has confirmed so much."""
        old = self.taken.get(giver)
        if old is None or old.since < since:
            old = Account(since, window, self.had(giver, since, agreed))
        if since < old.since:
            return self
        # Books that are lost may have confirmed more than these have taken.
        sure = {s: min(n, old.units.get(s, 0)) for s, n in agreed.items()}
        account = replace(old, met=max(window, old.met), agreed={**old.agreed, **sure})
        return self._next(taken={**self.taken, giver: account})

    def had(self, giver: CellId, since: int, agreed: Units) -> Units:
        """What was taken from ``giver`` since ``since``, by these books or, where they have
        forgotten a closed account, by what it knows of."""
        old = self.taken.get(giver)
        if old is not None and old.since == since:
            return old.units
        return dict(agreed) if old is None and since <= self.low else {}

    def owed(self, giver: CellId, since: int, units: Units, agreed: Units) -> Units:
        """Of what ``giver`` has granted since ``since``, what was not taken yet."""
        old = self.taken.get(giver)
        if old is not None and old.since > since:
            return {}
        had = self.had(giver, since, agreed)
        left = {s: n - had.get(s, 0) for s, n in units.items() if s in self.held}
        return _positive(left)

    def took(self, shares: Shares) -> "Books":
        """The values that go with these shares are in place."""
        held, taken = dict(self.held), dict(self.taken)
        for stage, of in shares.items():
            for giver, units in of.items():
                if giver in taken and stage in held:
                    held[stage] += units
                    account = taken[giver]
                    taken[giver] = replace(account, units=_sum(account.units, {stage: units}))
        return self._next(held=held, taken=taken)

    def divided(self, me: CellId, child: CellId, window: int) -> "tuple[Books, Books]":
        """The books of this cell and of a new one that gets half of the mass. The half counts as
        granted by the parent, so its books name the child that has it."""
        half = {stage: max(0, n // 2) for stage, n in self.held.items()}
        since = max(window, self.floor + 1)
        given = {**self.given, child: Account(since, since, half, half)}
        stays = self._next(held={s: n - half[s] for s, n in self.held.items()}, given=given)
        return stays, Books(half, taken={me: Account(since, since, half, half)})

    def tidied(self, window: int) -> "Books":
        """Without accounts that both sides agree on and have not used for long."""
        old = {c: a for c, a in self.given.items() if a.closed and a.met + KEEP < window}
        gone = {c: a for c, a in self.taken.items() if a.closed and a.met + 2 * KEEP < window}
        if not old and not gone:
            return self
        return self._next(
            given={c: a for c, a in self.given.items() if c not in old},
            taken={c: a for c, a in self.taken.items() if c not in gone},
            floor=max([self.floor, *(a.since for a in old.values())]),
            low=max([self.low, *(a.since for a in gone.values())]),
        )

    def _next(self, **changed: Any) -> "Books":
        return replace(self, serial=self.serial + 1, **changed)

    def rows(self) -> list[Any]:
        """As JSON has it."""
        return [
            self.serial,
            self.floor,
            self.low,
            _told(self.held),
            [_account(cell, a) for cell, a in sorted(self.given.items())],
            [_account(cell, a) for cell, a in sorted(self.taken.items())],
        ]


def parse_books(rows: Any) -> Books:
    """The inverse of :meth:`Books.rows`. Raises ValueError for anything else."""
    try:
        serial, floor, low, held, given, taken = rows
        if max(len(given), len(taken)) > 2 * MOST:
            raise ValueError(f"push-sum's books have at most {2 * MOST} accounts of a kind")
        return Books(
            {stage: whole(n, -MOST_UNITS, MOST_UNITS) for stage, n in _stages(held)},
            _whole(serial),
            _whole(floor),
            dict(map(_parsed, given)),
            dict(map(_parsed, taken)),
            _whole(low),
        )
    except (TypeError, AttributeError, KeyError) as e:
        raise ValueError(f"no books of a push-sum: {e}") from e


def parse_units(rows: Any) -> dict[int, int]:
    """Units by stage, as JSON has them. Raises ValueError."""
    try:
        return {stage: _whole(n) for stage, n in _stages(rows)}
    except (TypeError, AttributeError) as e:
        raise ValueError(f"no units of mass: {e}") from e


def _stages(rows: Any) -> list[tuple[int, Any]]:
    if len(rows) > MOST_STAGES:
        raise ValueError(f"mass of more than {MOST_STAGES} stages")
    return [(_whole(int(stage)), n) for stage, n in rows.items()]


def _parsed(row: Any) -> tuple[CellId, Account]:
    cell, since, met, units, agreed = row
    account = Account(_whole(since), _whole(met), parse_units(units), parse_units(agreed))
    return cell_name(cell), account


def _account(cell: CellId, a: Account) -> list[Any]:
    return [cell, a.since, a.met, _told(a.units), _told(a.agreed)]


def _told(units: Units) -> dict[str, int]:
    return {str(stage): n for stage, n in units.items()}


def _whole(value: Any) -> int:
    return whole(value, below=MOST_UNITS)


def _sum(a: Units, b: Units) -> dict[int, int]:
    return {stage: a.get(stage, 0) + b.get(stage, 0) for stage in sorted({*a, *b})}


def _positive(units: Units) -> dict[int, int]:
    return {stage: n for stage, n in units.items() if n > 0}
