"""What stands for parameters, gradients and optimizer state: hashes of everything that went into
them.

Two peers hold equal values only if the very same steps reached both, in the same order, from the
same contributors and optimizer state; a step that is applied twice, or left out, shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from node.core.ids import PeerId
from node.core.journey import Version


class Value(NamedTuple):
    """One part's parameters: ``mark`` is all that is in them, ``made`` the version they belong
    to."""

    mark: str
    made: Version


class Moment(NamedTuple):
    """One part's optimizer state: ``through`` is the last version whose step is in it, ``steps``
    how many are."""

    mark: str
    through: Version
    steps: int


class Share(NamedTuple):
    """One peer's gradient sums of an epoch: the micro-batches in them, their tokens, and the hash
    of their plan. In an outer round it has ``marks`` instead: its parameters, which weigh as many
    tokens."""

    peer: PeerId
    indices: tuple[int, ...]
    tokens: int
    plan: str = ""
    marks: tuple[tuple[str, str], ...] = ()


GENESIS = Version(0)


def mark_of(*things: object) -> str:
    """A short name of exactly these things."""
    return blake2b("\x1f".join(map(str, things)).encode(), digest_size=8).hexdigest()


def first_values(parts: Iterable[str]) -> dict[str, Value]:
    """What every peer builds from the run's seed."""
    return {part: Value(mark_of("init", part), GENESIS) for part in parts}


def fresh_value(
    part: str, old: Value, shares: Iterable[Share], moment: Moment | None, makes: Version
) -> Value:
    """The part after its step: shares in the order they are summed."""
    given = ";".join(f"{s.peer}:{s.tokens}:{s.indices}" for s in shares)
    return Value(mark_of(part, old.mark, given, moment.mark if moment else "zero"), makes)


def mean_value(part: str, shares: Iterable[Share], makes: Version) -> Value:
    """The mean of what was given of a part: of equal values it is that value."""
    given = sorted({(mark, s.tokens) for s in shares for name, mark in s.marks if name == part})
    marks = {mark for mark, _ in given}
    return Value(marks.pop() if len(marks) == 1 else mark_of(part, "mean", *given), makes)


def next_moment(part: str, moment: Moment | None, value: Value, makes: Version) -> Moment:
    """The optimizer state after the step that made ``value``."""
    steps = moment.steps if moment else 0
    return Moment(
        mark_of("moment", part, moment.mark if moment else "zero", value.mark), makes, steps + 1
    )


def digest_of(values: Mapping[str, Value]) -> str:
    """The name of a whole stage."""
    return mark_of(*(f"{part}={values[part].mark}" for part in sorted(values)))
