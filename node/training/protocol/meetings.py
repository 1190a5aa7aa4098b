"""Outer rounds as a leader plans them: when, which cells of a stage meet, who of a group averages
which part. Enters: the manifest's [outer] table, cells, the number of the round. Leaves: groups of
cells, an averager for every part. Never: a tensor, a clock, chance that two leaders would see
differently.

An outer round is an epoch without micro-batches: the cells of a group give their parameters, or
what they moved by, one member for each cell; all members of the group gather the mean. So death,
repair, joining and digests are those of any epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Unit

if TYPE_CHECKING:
    from node.averaging.strategies.strategy import Meeting


PUSH_AGAIN = 2
"""Attempts after the first in which a cell that was not answered pushes again, and who serves is
there for it; then it copies."""


LANDS_WITHIN = 0.5
"""Where a fragment lands, it is waited for so much of the round's deadline; then whoever has it
gives it to the others."""


class Meetings:
    """``sizes``: bytes of every part by stage; ``epochs``: of the run, whose last one is an outer
    round too."""

    def __init__(
        self,
        settings: OuterSettings,
        sizes: Mapping[int, Mapping[str, int]],
        seed: int,
        epochs: int,
    ) -> None:
        self.settings, self._sizes, self._seed, self._epochs = settings, sizes, seed, epochs

    def number(self, epoch: int) -> int:
        """Of the outer round that the epoch which starts from version ``epoch`` is; 0 for one of
        micro-batches."""
        return number(epoch, self.settings.gap, self._epochs)

    def fragment(self, epoch: int) -> int:
        """Which fragment that round carries, from 1; 0 for all parts."""
        return fragment(self.settings, epoch, self._epochs)

    def sends(self, epoch: int) -> int:
        """The number of the outer round whose fragment is sent with the plan from version
        ``epoch``, 0 for none."""
        return sends(self.settings, epoch, self._epochs)

    def groups(self, cells: Sequence[int], number: int) -> tuple[dict[int, int], tuple[int, ...]]:
        """(cell to group, the cells that average for all: none when everybody does). A group has
        the number of its first cell; along directed edges every cell is one of its own."""
        from node.averaging.strategies.strategy import Groups

        order = sorted(cells)
        if self.settings.pushes:
            return dict.fromkeys(order, order[0]), self._servers(order)
        meeting = self._meet(len(order), number)
        if not isinstance(meeting, Groups):
            return {cell: cell for cell in order}, ()
        first: dict[int, int] = {}
        for cell, label in zip(order, meeting.labels.tolist(), strict=True):
            first.setdefault(label, cell)
        found = {
            cell: first[label] for cell, label in zip(order, meeting.labels.tolist(), strict=True)
        }
        return found, tuple(order[place] for place in meeting.owners)

    def senders(self, cells: Sequence[int], number: int) -> dict[int, tuple[int, ...]]:
        """Along directed edges: which cells send to each, where others send to it. Nothing where
        cells meet in groups."""
        from node.averaging.strategies.strategy import Edges

        order = sorted(cells)
        if self.settings.pushes:
            return {}
        meeting = self._meet(len(order), number)
        if not isinstance(meeting, Edges):
            return {}
        found: dict[int, set[int]] = {}
        for source, target in zip(meeting.source.tolist(), meeting.target.tolist(), strict=True):
            if source != target:  # one alone has itself for a neighbour
                found.setdefault(order[target], set()).add(order[source])
        return {cell: tuple(sorted(sources)) for cell, sources in sorted(found.items())}

    def _servers(self, order: Sequence[int]) -> tuple[int, ...]:
        """The cells that serve pushes, by a hash of their numbers: they stay the same when others
        come and go."""
        from node.averaging.strategies.strategy import rank

        ranked = sorted(order, key=lambda cell: rank(PeerId(str(cell)), f"{self._seed}:servers"))
        return tuple(sorted(ranked[: self.settings.shards]))

    def _meet(self, count: int, number: int) -> Meeting:
        # Here and not above: numpy takes a while, and only who leads a run with cells needs it.
        from node.averaging.strategies.outer import strategy_of
        from node.averaging.strategies.strategy import Pushes

        s = self.settings
        while s.strategy == "moshpit" and count > _room(s.grid):
            # More cells than the owner of the run thought of: the shortest axis grows.
            short = min(range(len(s.grid)), key=lambda axis: s.grid[axis])
            s = replace(
                s, grid=tuple(length + (axis == short) for axis, length in enumerate(s.grid))
            )
        if s.shards > count:
            s = replace(s, shards=count)
        if s.strategy == "push-sum":
            s = replace(s, fanout=max(1, min(s.fanout, (count - 1).bit_length())))
        meeting = strategy_of(s).meet(count, number - 1, self._seed)
        if isinstance(meeting, Pushes):
            raise TypeError(f"{s.strategy} makes neither groups of cells nor edges between them")
        return meeting

    def averagers(
        self, stage: int, members: Sequence[PlanMember], cells: Sequence[int], fragment: int = 0
    ) -> dict[str, PeerId]:
        """Every part of a fragment to a current member of the group, about equal bytes each; only
        members of ``cells``, if there are any. Of pushes one member of each of these serves, and
        stays when others come and go, because what is served is its own."""
        sizes = self._sizes[stage]
        parts = pieces(sizes, self.settings.fragments)[fragment - 1] if fragment else sizes
        able = [m for m in members if m.current and m.cell in cells] or [
            m for m in members if m.current
        ]
        load = dict.fromkeys(
            self._first(able) if self.settings.pushes else sorted(m.peer for m in able), 0
        )
        found: dict[str, PeerId] = {}
        for name, size in sorted(
            ((n, sizes[n]) for n in parts), key=lambda item: (-item[1], item[0])
        ):
            peer = min(load, key=lambda p: load[p])
            found[name], load[peer] = peer, load[peer] + size
        return found

    def _first(self, able: Sequence[PlanMember]) -> list[PeerId]:
        """One of each cell, by a hash of who it is; in order of the cells."""
        from node.averaging.strategies.strategy import rank

        found: dict[int, PeerId] = {}
        for m in sorted(able, key=lambda m: rank(m.peer, f"{self._seed}:servers")):
            found.setdefault(m.cell, m.peer)
        return [found[cell] for cell in sorted(found)][: self.settings.shards]


def number(epoch: int, every: int, epochs: int) -> int:
    """See :meth:`Meetings.number`; ``every`` epochs of micro-batches lie between two outer
    rounds."""
    if not every or ((epoch + 1) % (every + 1) and epoch + 1 != epochs):
        return 0
    return -(-(epoch + 1) // (every + 1))


def fragment(settings: OuterSettings, epoch: int, epochs: int) -> int:
    """Which fragment the outer round from version ``epoch`` carries, from 1, each in its turn; 0
    for all parts, after which cells hold the same: nothing is streamed, or it is the last round of
    the run; nor does the plan that ends the run carry one."""
    round = number(epoch, settings.gap, epochs)
    if not settings.streams or not round or epoch + 1 >= epochs:
        return 0
    return (round - 1) % settings.fragments + 1


def sends(settings: OuterSettings, epoch: int, epochs: int) -> int:
    """The number of the outer round whose fragment is sent with the plan from version ``epoch``,
    ``overlap`` epochs before it lands; 0 for none. The last round of a run waits for what it
    carries."""
    lands = epoch + settings.overlap
    return number(lands, settings.gap, epochs) if settings.overlap and lands + 1 < epochs else 0


def meeting(plan: Plan, fragments: int) -> Plan:
    """The outer round that a plan sends for, as if it were that round's plan."""
    return replace(
        plan, outer=plan.sends, fragment=(plan.sends - 1) % fragments + 1, sends=0, paths=()
    )


def pieces(sizes: Mapping[str, int], count: int) -> list[frozenset[str]]:
    """The parts of a stage in so many fragments of about equal bytes: largest first, each to the
    smallest. A stage of few parts has fragments without any."""
    found: list[set[str]] = [set() for _ in range(count)]
    held = [0] * count
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        i = min(range(count), key=lambda i: (held[i], i))
        found[i].add(name)
        held[i] += size
    return [frozenset(names) for names in found]


def speakers(plan: Plan, unit: Unit, dead: Collection[PeerId]) -> frozenset[PeerId]:
    """One living current member of each cell of a group, who gives what its cell has; they take
    turns from round to round."""
    found: dict[int, list[PeerId]] = {}
    for m in plan.unit(unit):
        if m.current and m.peer not in dead:
            found.setdefault(m.cell, []).append(m.peer)
    return frozenset(peers[plan.outer % len(peers)] for peers in found.values())


def weights(plan: Plan, unit: Unit, settings: OuterSettings) -> dict[int, int]:
    """What each cell of a group counts for in an outer round.

    Its micro-batches since the last one, at least 1, where the round leaves everybody with the same
    values: cells began with the same, and what moved one further from there is the mean of more
    gradients, so its noise is smaller by as much. Where a round brings only some together, what a
    cell holds is also what it has from others, and equal weights keep the mean of all.
    """
    cells = {m.cell for m in plan.unit(unit) if m.current}
    if settings.partial:
        return dict.fromkeys(cells, 1)
    return {cell: max(1, plan.worked.get((unit[0], cell), 0)) for cell in cells}


def _room(grid: Sequence[int]) -> int:
    room = 1
    for length in grid:
        room *= length
    return room
