"""Ownership of positions in the sample order: classes of positions, and a cursor of them.

A run of one cell holds the whole order. A cell that parts in two gives each half of every class.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MOST_BITS = 32
"""Most times that a class is halved."""
MOST_CLASSES = 64
"""Most classes of a cursor."""


@dataclass(frozen=True, slots=True)
class SampleClass:
    """The positions p with ``p % 2**bits == remainder``.

    ``next`` is the first position of the class that was never taken: every one below it was.
    ``returned``: taken positions that were handed back, rising. Raises ValueError for values that
    make no such class, whatever the types: a stranger may have sent them.
    """

    remainder: int
    bits: int
    next: int
    returned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.returned) is not tuple or any(
            type(n) is not int or not 0 <= n < 2**63
            for n in (self.remainder, self.bits, self.next, *self.returned)
        ):
            raise ValueError("a class of samples holds natural numbers below 2^63 only")
        if self.bits > MOST_BITS or self.remainder >= 1 << self.bits:
            raise ValueError(f"no class of samples: {self.remainder} modulo 2^{self.bits}")
        if not all(self.has(p) for p in (self.next, *self.returned)):
            raise ValueError(f"a position is not {self.remainder} modulo 2^{self.bits}")
        if any(a >= b for a, b in pairwise((*self.returned, self.next))):
            raise ValueError("positions handed back do not rise, or one was never taken")

    def has(self, position: int) -> bool:
        """Return True for a position of this class, taken or not."""
        return position % (1 << self.bits) == self.remainder

    @property
    def taken(self) -> int:
        """Number of positions of the class that any peer ever took, those handed back included."""
        return self.next >> self.bits

    def overlaps(self, other: "SampleClass") -> bool:
        """Return True if the classes have a position in common."""
        return (self.remainder - other.remainder) % (1 << min(self.bits, other.bits)) == 0


Cursor = tuple[SampleClass, ...]
"""Position of a sampler: classes without a common position, by rising remainder; never empty."""

WHOLE: Cursor = (SampleClass(0, 0, 0),)
"""The whole order before anything was taken."""


def cursor_of(classes: Iterable[SampleClass]) -> Cursor:
    """A cursor of these classes. Raises ValueError when there is none, there are more than
    MOST_CLASSES, or two overlap."""
    cursor = tuple(sorted(classes, key=lambda c: c.remainder))
    if not 1 <= len(cursor) <= MOST_CLASSES:
        raise ValueError(f"a cursor has 1 to {MOST_CLASSES} classes, not {len(cursor)}")
    if any(a.overlaps(b) for i, a in enumerate(cursor) for b in cursor[:i]):
        raise ValueError("two classes of a cursor share positions")
    return cursor


def rows(cursor: Cursor) -> list[Any]:
    """A cursor for JSON: ``[remainder, bits, next, [returned, …]]`` of each class; of the whole
    order ``[next, [returned, …]]``, as it was before there were shares of it."""
    if len(cursor) == 1 and not cursor[0].bits:
        return [cursor[0].next, list(cursor[0].returned)]
    return [[c.remainder, c.bits, c.next, list(c.returned)] for c in cursor]


def parse_cursor(said: Any) -> Cursor:
    """The inverse of :func:`rows`. Raises ValueError for anything that :func:`rows` does not
    write."""
    if type(said) is not list or len(said) > MOST_CLASSES:
        raise ValueError("a cursor is a list of a few classes")
    if said and type(said[0]) is int:
        said = [[0, 0, *said]]
    if any(type(row) is not list or len(row) != 4 or type(row[3]) is not list for row in said):
        raise ValueError("a class of samples is [remainder, bits, next, [returned, …]]")
    classes = tuple(SampleClass(r, bits, n, tuple(back)) for r, bits, n, back in said)
    if (cursor := cursor_of(classes)) != classes:
        raise ValueError("the classes of a cursor do not rise")
    return cursor


def split(cursor: Cursor) -> tuple[Cursor, Cursor]:
    """Two shares of equal density that are the cursor together: each has one half of every class.
    Raises ValueError when a class was halved MOST_BITS times, or its positions come to their
    end."""
    halves = [_halves(c) for c in _joined(cursor)]
    return cursor_of(low for low, _ in halves), cursor_of(high for _, high in halves)


def merged(a: Cursor, b: Cursor) -> Cursor:
    """One share of two. Halves of one class become that class where they were taken from equally
    far, otherwise both stay, until the one behind has caught up. Raises ValueError when the shares
    overlap, or have more than MOST_CLASSES together even so."""
    return cursor_of(_joined((*a, *b)))


def _halves(of: SampleClass) -> tuple[SampleClass, SampleClass]:
    step = 1 << of.bits
    bits = of.bits + 1

    def half(remainder: int) -> SampleClass:
        # Of two neighbours in the class one is in this half.
        first = of.next if of.next % (1 << bits) == remainder else of.next + step
        back = (p for p in of.returned if p % (1 << bits) == remainder)
        return SampleClass(remainder, bits, first, tuple(back))

    return half(of.remainder), half(of.remainder + step)


def _joined(classes: Iterable[SampleClass]) -> tuple[SampleClass, ...]:
    """The same positions in as few classes as halves can be joined to. Raises ValueError for a
    class that is there twice."""
    found: dict[tuple[int, int], SampleClass] = {}
    waiting = list(classes)
    while waiting:
        one = waiting.pop()
        if (one.bits, one.remainder) in found:
            raise ValueError("two classes of a cursor share positions")
        step = 1 << one.bits >> 1
        other = None
        if one.bits:
            other = found.get((one.bits, one.remainder ^ step))
        if other is not None and abs(one.next - other.next) == step:
            del found[other.bits, other.remainder]
            back = tuple(sorted((*one.returned, *other.returned)))
            first = min(one.next, other.next)
            waiting.append(
                SampleClass(min(one.remainder, other.remainder), one.bits - 1, first, back)
            )
        else:
            found[one.bits, one.remainder] = one
    return tuple(found.values())
