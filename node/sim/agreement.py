"""The numbers of all peers, round by round, as the daemon's strategies change them; vectors,
because there may be thousands. Enters: a strategy, numbers, who is there. Leaves: numbers. Never:
chance, but for messages that get lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from node.averaging.strategies.strategy import (
    Barrierless,
    Butterfly,
    Edges,
    Exponential,
    Groups,
    Moshpit,
    Strategy,
    advance,
    first_keys,
    meet_by_key,
)

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass
class Direct:
    """Groups, and edges that mix: nothing is carried from round to round but the values."""

    strategy: Strategy
    values: Values
    seed: int

    def round(self, number: int, alive: Flags) -> Values:
        meeting = self.strategy.meet(len(alive), number, self.seed)
        if isinstance(meeting, Groups):
            self.values = grouped(meeting, self.values, alive)
        elif isinstance(meeting, Edges):
            self.values = neighbourly(meeting, self.values, alive)
        return self.values


@dataclass
class Keyed:
    """Moshpit without a view: keys move with the groups that met."""

    grid: tuple[int, ...]
    values: Values
    seed: int

    def __post_init__(self) -> None:
        self.keys = first_keys(len(self.values), self.grid, self.seed)

    def round(self, number: int, alive: Flags) -> Values:
        shape = Moshpit(self.grid).shape(len(self.values))
        # Indices come one axis after the other, the last one first.
        length = shape[(len(shape) - 1 - number) % len(shape)]
        groups = meet_by_key(self.keys, length)
        self.values = grouped(groups, self.values, alive)
        self.keys = advance(self.keys, groups, alive, length, number, self.seed)
        return self.values


class PushSum:
    """Mass over directed edges. What a lost message carried stays owed on its edge and comes with
    the next one there."""

    def __init__(
        self,
        strategy: Exponential,
        values: Values,
        seed: int,
        loss: float,
        dice: np.random.RandomState,
    ) -> None:
        self.strategy, self.seed, self.loss, self.dice = strategy, seed, loss, dice
        count = len(values)
        self.mass = np.concatenate((values, np.ones((count, 1))), axis=1)
        self.owed = np.zeros((strategy.period(count), strategy.fanout * count, self.mass.shape[1]))

    def round(self, number: int, alive: Flags) -> Values:
        count = len(alive)
        edges = self.strategy.meet(count, number, self.seed)
        open_ = alive[edges.source] & alive[edges.target]
        share = self.mass / (1 + np.bincount(edges.source[open_], minlength=count))[:, None]
        carried = np.where(open_[:, None], share[edges.source], 0.0)
        if self.loss:
            owed = self.owed[number % len(self.owed)]
            owed += carried
            arrives = open_ & (self.dice.uniform(size=len(open_)) >= self.loss)
            carried = np.where(arrives[:, None], owed, 0.0)
            owed[arrives] = 0.0
        self.mass = share.copy()
        np.add.at(self.mass, edges.target, carried)
        return self.mass[:, :-1] / self.mass[:, -1:]


class Pushed:
    """One running mean at the server. Each peer pushes what it has changed since its pull, divided
    by the peers, and pulls."""

    def __init__(self, strategy: Barrierless, values: Values, seed: int) -> None:
        self.strategy, self.seed, self.values = strategy, seed, values.copy()
        self.server = np.zeros(values.shape[1])
        self.base = np.zeros_like(values)
        self.version, self.seen = 0, np.zeros(len(values), np.int64)

    def round(self, number: int, alive: Flags) -> Values:
        meeting = self.strategy.meet(len(alive), number, self.seed)
        if not alive[list(meeting.owners)].all():
            return self.values
        if meeting.locked:
            self._turns(meeting.order[alive[meeting.order]], meeting.bound, slice(None))
        else:
            # every coordinate sees the pushes in an order of its own
            for c in range(self.values.shape[1]):
                mixed = np.roll(meeting.order, c * len(alive) // self.values.shape[1])
                self._turns(mixed[alive[mixed]], None, slice(c, c + 1))
        return self.values

    def _turns(self, turns: NDArray[np.int64], bound: int | None, where: slice) -> None:
        changed = self.values[turns, where] - self.base[turns, where]
        taken = self._admitted(turns, bound)
        after = self.server[where] + np.cumsum(
            np.where(taken[:, None], changed / len(self.values), 0.0), axis=0
        )
        # Who is refused keeps what it has to say, on top of what it pulls.
        self.base[turns, where] = after
        self.values[turns, where] = np.where(taken[:, None], after, after + changed)
        self.server[where] = after[-1] if len(turns) else self.server[where]

    def _admitted(self, turns: NDArray[np.int64], bound: int | None) -> Flags:
        if bound is None:
            return np.ones(len(turns), bool)
        taken = np.zeros(len(turns), bool)
        for i, peer in enumerate(turns.tolist()):
            taken[i] = self.version - self.seen[peer] <= bound
            self.version += int(taken[i])
            self.seen[peer] = self.version
        return taken


class Outer:
    """DiLoCo over one group, outer rate 1 and no momentum: everybody is ``values`` away from a
    common anchor. Who was absent gives its difference when it is back, and takes the newest anchor.
    ``fragments``: columns, one of them a round."""

    def __init__(self, strategy: Butterfly, values: Values, seed: int, fragments: int) -> None:
        self.strategy, self.seed, self.fragments = strategy, seed, fragments
        self.values, self.base, self.anchor = (
            values.copy(),
            np.zeros_like(values),
            np.zeros(values.shape[1]),
        )

    def round(self, number: int, alive: Flags) -> Values:
        meeting = self.strategy.meet(len(alive), number, self.seed)
        if alive.any():
            column = slice(number % self.fragments, None, self.fragments)
            mean = grouped(meeting, self.values - self.base, alive)[np.argmax(alive)]
            self.anchor[column] += mean[column]
            self.values[alive, column] = self.base[alive, column] = self.anchor[column]
        return self.values


World = Direct | Keyed | PushSum | Pushed | Outer
"""``round(number, alive)`` plays one round; the values [n, c] that the peers have then."""


def grouped(groups: Groups, values: Values, alive: Flags) -> Values:
    """Means within groups over who is alive; the others keep their values [n, c]. An absent owner's
    shares are not averaged."""
    if groups.whole and not alive.all():
        broken = np.unique(groups.labels[~alive])
        alive = alive & ~np.isin(groups.labels, broken)
    labels = groups.labels[alive]
    sizes = np.bincount(labels)
    new = values.copy()
    for c in range(values.shape[1]):
        if groups.owners and not alive[groups.owners[c % len(groups.owners)]]:
            continue
        sums = np.bincount(labels, weights=values[alive, c])
        new[alive, c] = sums[labels] / sizes[labels]
    return new


def neighbourly(edges: Edges, values: Values, alive: Flags) -> Values:
    """Means over oneself and who sends to one, of those alive."""
    kept = alive[edges.source] & alive[edges.target]
    source, target = edges.source[kept], edges.target[kept]
    heard = 1 + np.bincount(target, minlength=len(values))
    sums = values.copy()
    np.add.at(sums, target, values[source])
    return sums / heard[:, None]
