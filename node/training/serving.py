"""What this peer holds as a server of pushes without a barrier, where the run has them: :mod:`node.averaging.pushes` by version.
Enters: the parts it serves in a round, cells' pushes. Leaves: values. Never: a round, a file, a word with another server.

What a round makes of it counts when its version is settled. It is in no checkpoint and goes to nobody: who begins to serve a part begins
with what its own cell has pulled last, and the swarm goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from node.averaging.outer import OuterSettings
from node.averaging.pushes import Served, push

Apply = Callable[[int, tuple[str, ...], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""(cell, parts, what it pushes of them, or nothing) to the parts as they are then."""


class Serving:
    """Of one stage. ``refused`` counts pushes that were too old, group by group of parts."""

    def __init__(self) -> None:
        self._parts: dict[str, Served] = {}
        self._under_way: dict[str, Served] = {}
        self._plan = ""
        self.refused = 0

    @property
    def names(self) -> frozenset[str]:
        """Parts served at the version in place."""
        return frozenset(self._parts)

    def opens(
        self, plan: str, mine: Collection[str], begins: Callable[[str], Tensor], settings: OuterSettings,
        too_old: Callable[[int, int], None],
    ) -> tuple[Apply, tuple[str, ...]]:  # fmt: skip
        """What to do with pushes of a round under the plan of this hash, in which ``mine`` are ours; and the parts we begin to serve.
        ``too_old(cell, age)`` is told of each that is refused, on whatever thread.

        Attempts of one plan go on from each other; another plan begins at the version in place. What is not ours any more goes.
        """
        if plan != self._plan:
            self._plan, self._under_way = plan, dict(self._parts)
        begun = tuple(sorted(set(mine) - self._under_way.keys()))
        here = self._under_way = {
            name: self._under_way[name] if name in self._under_way else Served(begins(name)) for name in sorted(mine)
        }

        def apply(cell: int, names: tuple[str, ...], deltas: Mapping[str, Tensor]) -> dict[str, Tensor]:
            after = {name: push(here[name], cell, deltas.get(name), settings) for name in names}
            late = [here[name].age(cell) for name, (_, applied) in after.items() if name in deltas and not applied]
            here.update({name: served for name, (served, _) in after.items()})
            if late:
                self.refused += 1
                too_old(cell, max(late))
            return {name: served.value for name, (served, _) in after.items()}

        return apply, begun

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
