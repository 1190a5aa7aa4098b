"""Cells that form their groups in virtual time, as daemons do: keys from
:func:`~node.averaging.strategies.keys.meeting_keys`, groups from the machines of
:class:`~node.averaging.strategies.group_forming.GroupForming`."""

import hashlib
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from node.averaging.strategies import group_forming as f
from node.averaging.strategies.group_forming import GroupFormed, GroupForming
from node.averaging.strategies.keys import meeting_keys
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId
from node.dht.topics import PREFIXES, prefix_of
from node.outer.census import standing
from node.sim.averaging import TARGETS, AveragingTrial

CAP = 50

CLOCKS_S, DIRECTORY_S, MESSAGE_S = 1.0, (1.0, 3.0), (0.02, 0.3)
"""How far clocks are off; how long the directory and a message take."""


@dataclass(frozen=True)
class Trial:
    """``unseen``: the share of the other cells that a cell does not see, others in every window."""

    cells: int
    grid: tuple[int, ...] = ()
    absent: float = 0.0
    unseen: float = 0.0

    @property
    def ideal(self) -> AveragingTrial:
        """The same for `tutti simulate`."""
        return AveragingTrial(self.cells, self.grid, self.absent, seeds=1, cap=CAP)

    @property
    def settings(self) -> OuterSettings:
        """Settings of a run with a grid that has room for lines of this length."""
        longest = self.ideal.shape()
        grid = self.grid or (max(32, *longest),) * len(longest)
        return OuterSettings("moshpit", grid=grid, window_s=240.0)


def rounds_to(history: Sequence[float]) -> list[int]:
    """Number of rounds to each of the variances that count as agreement; CAP if it was not
    reached."""
    return [next((i for i, v in enumerate(history) if v < target), CAP) for target in TARGETS]


def play(trial: Trial, seed: int) -> list[float]:
    """The variance before and after every window. The first is window ``seed``, so that every axis
    comes first in some."""
    world = np.random.RandomState(seed)
    dice = random.Random(seed)
    values = world.normal(size=(trial.cells, 1))[:, 0]
    names = [cell_id(seed, number) for number in range(trial.cells)]
    number = {cell: i for i, cell in enumerate(names)}
    history = [float(values.var())]
    for window in range(seed, seed + CAP):
        there = world.uniform(size=trial.cells) >= trial.absent
        present = [cell for cell, here in zip(names, there, strict=True) if here]
        known = standings(names, trial.unseen, dice)
        looking = {
            cell: meeting_keys(trial.settings, cell, *known[cell], window) for cell in present
        }
        before = values.copy()
        for cell, members in Window(looking, window, dice).run().items():
            values[number[cell]] = before[[number[m] for m in sorted(members)]].mean()
        history.append(float(values.var()))
        if history[-1] < TARGETS[-1]:
            break
    return history


def cell_id(seed: int, number: int) -> CellId:
    """As a hash gives it."""
    return CellId(hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:16])


def standings(
    names: Sequence[CellId], unseen: float = 0.0, dice: random.Random | None = None
) -> dict[CellId, tuple[int, int]]:
    """The number of each cell and how many there are, as it finds them when it reads the records of
    its own prefix, and there the counts that its scribe read of the scribes."""
    near = defaultdict[int, list[CellId]](list)
    for cell in names:
        near[prefix_of(cell)].append(cell)
    counts = tuple(len(seen(near[prefix], unseen, dice)) for prefix in range(PREFIXES))
    found: dict[CellId, tuple[int, int]] = {}
    for cells in near.values():
        told = counts
        if unseen and dice is not None:
            told = tuple(count if dice.random() >= unseen else 0 for count in counts)
        found |= {cell: standing(cell, seen(cells, unseen, dice), told) for cell in cells}
    return found


def seen(names: Sequence[CellId], unseen: float, dice: random.Random | None) -> Sequence[CellId]:
    """The cells of `names` that one of them sees."""
    if not unseen or dice is None:
        return names
    return [cell for cell in names if dice.random() >= unseen]


class Window:
    """The cells that look for a group in one window, each under keys of its own, with the most
    cells that its group may have."""

    def __init__(
        self,
        looking: Mapping[CellId, tuple[tuple[str, ...], int]],
        window: int,
        dice: random.Random,
    ) -> None:
        self.dice = dice
        self.ids = itertools.count()
        self.now = 0.0
        self.posted: dict[str, dict[CellId, float]] = defaultdict(dict)
        self.queue: list[tuple[float, int, CellId, f.Event]] = []
        self.machines: dict[CellId, GroupForming] = {}
        for cell, (keys, most) in looking.items():
            start = dice.uniform(-CLOCKS_S, CLOCKS_S)
            self.machines[cell] = GroupForming(cell, window, keys, most, start)
            self._wake(cell)

    def run(self) -> dict[CellId, Collection[CellId]]:
        """The group of every cell that found one, as that cell knows it."""
        while self.queue:
            self.now, _, cell, event = heapq.heappop(self.queue)
            machine = self.machines[cell]
            at = machine.wakes_at
            if isinstance(event, f.TimePassed) and (at is None or at > self.now):
                continue  # the machine has another instant now, with a tick of its own
            for action in machine.handle(event, self.now):
                self._act(cell, action)
            self._wake(cell)
        return {
            cell: m.done.members
            for cell, m in self.machines.items()
            if isinstance(m.done, GroupFormed)
        }

    def _wake(self, cell: CellId) -> None:
        if (at := self.machines[cell].wakes_at) is not None:
            self._at(at, cell, f.TimePassed())

    def _at(self, time: float, cell: CellId, event: f.Event) -> None:
        heapq.heappush(self.queue, (time, next(self.ids), cell, event))

    def _send(self, to: Iterable[CellId], event: f.Event) -> None:
        for cell in sorted(to):
            self._at(self.now + self.dice.uniform(*MESSAGE_S), cell, event)

    def _act(self, me: CellId, action: f.Action) -> None:
        match action:
            case f.Post(key):
                self.posted[key][me] = self.now + self.dice.uniform(*DIRECTORY_S)
            case f.ReadCells(key):
                found = frozenset(c for c, at in self.posted[key].items() if at <= self.now)
                later = self.now + self.dice.uniform(*DIRECTORY_S)
                self._at(later, me, f.CellsRead(key, found))
            case f.Offer(to, key):
                self._send(to, f.Offered(me, key))
            case f.AnswerOffer(caller, key, accepts):
                self._send((caller,), f.OfferAnswered(me, key, accepts))
            case f.NameGroup(key, members):
                self._send(members - {me}, f.GroupNamed(me, key, members))
            case f.Release(to):
                self._send(to, f.Released(me))
            case _:
                pass
