"""Swarms of daemons of which one after the other stands still or dies, and comes back."""

import random
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.daemons.books import COMMITTED, PLANNED, Books
from testbed.daemons.fleet import START_S, Box, Peer
from testbed.daemons.forks import Forks
from testbed.daemons.told import Chronicle, Told

WAIT_S = 120.0
"""Bound of every wait for a commit, and for all to be in one plan again."""

LONGEST_S = 12.0
"""Most seconds that a daemon stays frozen after the commit."""

RUN: dict[str, Any] = {
    "pipeline__stages": 1,
    "training__min_replicas": 1,
    "training__epochs": 100_000,
    "training__eval_every": 0,
    "training__rebalance_every_s": 0.0,
}

CELLS: dict[str, Any] = {
    "averaging__cell": 2,
    "outer__strategy": "gossip",
    "outer__carries": "parameters",
    "outer__window_s": 30.0,
}

STOOD_STILL = "stood-still"
"""Kind of the event by which a daemon says that it was frozen."""

NOTICED_S = 5.0
"""Seconds of standing still after which a daemon must say so."""

DISTURBED = ("banned", "digests-disputed", "digest-mismatch", "voted-twice")
"""Kinds of events that a daemon that wakes up must not cause."""


@dataclass(frozen=True)
class Shape:
    """A swarm: ``nodes`` at the ends and at the block stage, in ``cells`` cells of equal size."""

    name: str
    nodes: tuple[int, int]
    cells: int = 1
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Daemons of a cell."""
        return sum(self.nodes) // self.cells


SHAPES = (
    Shape("four daemons", (2, 2)),
    Shape("eight in two cells", (4, 4), 2, CELLS),
)


@dataclass(frozen=True)
class Struck:
    """One victim. Seconds from the signal to the next commit of its cell, and from SIGCONT (or the
    start of a new process) until all of the cell are current members of one plan.

    ``down_s``: seconds from the signal to SIGCONT. ``said``: it said afterwards that it had been
    frozen.
    """

    deed: str
    who: str
    commit_s: float
    back_s: float
    down_s: float
    said: bool

    @property
    def quiet(self) -> bool:
        """It was frozen for long and did not say so."""
        return not self.deed.startswith("killed") and self.down_s > NOTICED_S and not self.said


class FrozenSwarm:
    """The daemons of one shape, and their events."""

    def __init__(self, shape: Shape, root: Path, forks: Forks, **changes: Any) -> None:
        self.shape = shape
        self.box = Box(root, forks=forks)
        self.peers = self.box.swarm(shape.nodes, **{**RUN, **shape.changes, **changes})
        self._chronicle = Chronicle()
        self._began = time.time()

    def start(self) -> None:
        """Start the daemons and wait until every cell is whole."""
        self.box.start(*self.peers)
        for peer in self.peers:
            self._chronicle.follow(peer.label, peer.events_path)
        self.box.wait("the cells", lambda: len(self.cells()) == self.shape.cells, START_S)
        for cell in self.cells():
            self._whole([p.label for p in cell], 0.0)
        self._began = time.time()

    def close(self) -> None:
        """End the daemons."""
        self.box.clean_up()
        self._chronicle.close()

    def read(self) -> list[Told]:
        """Everything told until now."""
        return self._chronicle.read()

    def cells(self) -> list[list[Peer]]:
        """The daemons of each cell."""
        cells = {peer.label: "" for peer in self.peers}
        cells |= {e.who: str(e.get("cell")) for e in self.read() if e.kind == "cell-entered"}
        return [
            [p for p in self.peers if cells[p.label] == cell] for cell in sorted({*cells.values()})
        ]

    def strike(self, deed: str, dice: random.Random, bound_s: float = WAIT_S) -> Struck:
        """Strike one victim of one cell at a random moment, and bring it back. Raises Hang when
        there is no commit within ``bound_s``."""
        cell = dice.choice(self.cells())
        time.sleep(dice.uniform(1.0, 4.0))
        labels = [p.label for p in cell]
        leader = [e for e in self.read() if e.kind == PLANNED and e.who in labels][-1].who
        able = [p for p in cell if (p.label == leader) == deed.endswith("leader")]
        victim = dice.choice(able)
        family = dice.random() < 0.5
        victim.close()
        at = time.time()
        if deed.startswith("killed"):
            victim.kill()
        else:
            victim.signal(signal.SIGSTOP, family=family)
        others = [label for label in labels if label != victim.label]
        found = self.box.wait("the next commit", lambda: self._commit(others, at), bound_s)
        if not deed.startswith("killed"):
            time.sleep(dice.uniform(0.0, LONGEST_S))
        woke = time.time()
        if deed.startswith("killed"):
            victim.start()
        else:
            victim.signal(signal.SIGCONT, family=True)
        back = self._whole(others, woke)
        later = [e for e in self.read() if e.who == victim.label and e.at > woke]
        said = any(e.kind == STOOD_STILL for e in later)
        return Struck(deed, victim.label, found.at - at, back - woke, woke - at, said)

    def again(self) -> int:
        """Epochs that had been committed and were committed once more."""
        labels = [{p.label for p in cell} for cell in self.cells()]
        return sum(
            Books([e for e in self.read() if e.who in cell and e.at > self._began]).losses().again
            for cell in labels
        )

    def disturbances(self) -> list[Told]:
        """Events that a daemon that woke up must not have caused."""
        return [e for e in self.read() if e.kind in DISTURBED and e.at > self._began]

    def _commit(self, labels: Collection[str], since: float) -> Told | None:
        told = (e for e in self.read() if e.kind == COMMITTED and e.who in labels and e.at > since)
        return next(told, None)

    def _whole(self, planners: Collection[str], since: float) -> float:
        """Wait until one of these plans with all of its cell as current members. Returns the
        time."""
        everybody = self.shape.size, 0

        def plan() -> Told | None:
            plans = (e for e in self.read() if e.kind == PLANNED and e.at > since)
            mine = (e for e in plans if e.who in planners)
            return next(
                (e for e in mine if (e.get("members"), e.get("listeners")) == everybody), None
            )

        return self.box.wait("everybody in one plan", plan, WAIT_S).at
