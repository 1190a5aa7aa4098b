"""What this peer holds as a server of pushes without a barrier, where the run has them:
:mod:`node.averaging.strategies.pushes` by version. Enters: the parts it serves in a round, cells'
pushes. Leaves: values. Never: a round, a file, a word with another server.

What a round makes of it counts when its version is settled. It is in no checkpoint and goes to
nobody: who begins to serve a part begins with what its own cell has pulled last, and the swarm goes
on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

from node.averaging.strategies.pushes import Served, push
from node.core.errors import StepFault

T = TypeVar("T")


class Serving(Generic[T]):
    """Of one stage. ``refused`` counts pushes that were too old, group by group of parts. An
    attempt may open on one thread while a push to the one before is applied on another."""

    def __init__(self) -> None:
        self._parts: dict[str, Served[T]] = {}
        self._under_way: dict[str, Served[T]] = {}
        self._plan = ""
        self.refused = 0

    @property
    def names(self) -> frozenset[str]:
        """Parts served at the version in place."""
        return frozenset(self._parts)

    def opens(
        self, plan: str, mine: Collection[str], begins: Callable[[str], T]
    ) -> tuple[str, ...]:
        """A round under the plan of this hash, in which ``mine`` are ours; the parts we begin to
        serve, at ``begins(name)``.

        Attempts of one plan go on from each other; another plan begins at the version in place.
        What is not ours any more goes.
        """
        if plan != self._plan:
            self._plan, self._under_way = plan, dict(self._parts)
        here = self._under_way
        begun = tuple(sorted(set(mine) - here.keys()))
        for name in here.keys() - set(mine):
            del here[name]
        here.update({name: Served(begins(name)) for name in begun})
        return begun

    def take(
        self,
        plan: str,
        cell: int,
        names: Collection[str],
        deltas: Mapping[str, T],
        bound: int | None,
        step: Callable[[T, T], T],
    ) -> tuple[dict[str, T], int]:
        """A cell pushes ``deltas`` of ``names``, or only pulls: the values it gets, and how many
        pushes of others ago it had pulled last where what it pushes is refused for that, else 0.
        Raises StepFault under another plan, for parts that others serve by now, and as
        :func:`push`.
        """
        if plan != self._plan:
            raise StepFault("a push of a round that is over")
        here = self._under_way
        try:
            before = {name: here[name] for name in names}
        except KeyError as e:
            raise StepFault("a push to parts that are not served here any more") from e
        after = {name: push(before[name], cell, deltas.get(name), bound, step) for name in names}
        late = max(
            (
                before[n].age(cell)
                for n, (_, applied) in after.items()
                if n in deltas and not applied
            ),
            default=0,
        )
        here.update({name: served for name, (served, _) in after.items() if name in here})
        self.refused += late > 0
        return {name: served.value for name, (served, _) in after.items()}, late

    def settled(self) -> None:
        """What is in place is final, and so are the pushes that went with it."""
        if self._plan:
            self._parts, self._under_way, self._plan = self._under_way, {}, ""

    def undone(self) -> None:
        """The last round did not happen."""
        self._under_way, self._plan = {}, ""

    def forget(self) -> None:
        """The parameters in place came from elsewhere: whoever is asked to serve begins anew."""
        self._parts = {}
        self.undone()
