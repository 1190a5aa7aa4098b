"""What a server makes of pushes without a barrier: each is applied by itself, as it comes, and
answered with what is there then. Enters: what is served of a part, a cell's push of it. Leaves:
what is served of it next. Never: a half-made step: every function gives a new value, the caller
adopts it on commit; a lock, a clock, a word with anybody.

A push is a cell's pseudo-gradient: what it pulled last minus what it has. Hogwild (Niu et al. 2011)
applies every one; the stale-bounded server (Ho et al. 2013) refuses one when more than a bound of
others were applied since its cell's last pull. The server itself keeps what each cell pulled, so
nobody can claim to know of something newer than it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Served(Generic[T]):
    """Of one part: its ``value`` (never written again), its ``version``, which is the number of
    pushes applied since this server began to serve it, and the version each cell has ``pulled``. A
    cell that never did is taken to know the present one."""

    value: T
    version: int = 0
    pulled: Mapping[int, int] = field(default_factory=dict)

    def age(self, cell: int) -> int:
        """Pushes of others applied since this cell's last pull."""
        return self.version - self.pulled.get(cell, self.version)


def admit(version: int, seen: int, bound: int | None, *, damp: bool = False) -> float:
    """What a push weighs that was computed from version ``seen`` when the owner is at ``version``:
    0 refuses it.

    ``damp``: the weight is 1 / (1 + age) instead of 1 (Zhang et al. 2016). Raises ValueError for a
    version from the future.
    """
    age = version - seen
    if age < 0:
        raise ValueError(f"a push for version {seen}, which is later than {version}")
    if bound is not None and age > bound:
        return 0.0
    return 1.0 / (1 + age) if damp else 1.0


def push(
    here: Served[T], cell: int, delta: T | None, bound: int | None, step: Callable[[T, T], T]
) -> tuple[Served[T], bool]:
    """(what is served after a cell's push, whether it was applied): ``step(value, delta)`` is
    served then. None: it only pulls.

    A push older than ``bound`` (None: none is) changes nothing; its cell gets the value all the
    same. Raises what ``step`` raises.
    """
    version = here.version
    if delta is None or not admit(version, version - here.age(cell), bound):
        return Served(here.value, version, {**here.pulled, cell: version}), False
    return Served(step(here.value, delta), version + 1, {**here.pulled, cell: version + 1}), True
