"""The epochs of a run as one peer saw them, and the work of each peer in them. Pure.

Enters: plans, as they arrive. Leaves: lines of a curve. The memory is bounded: old epochs are put
together, two at a time. Never: a clock, a file.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile

from node.core.ids import ENDS, CellId, PeerId
from node.core.journey import Plan

MOST_LINES = 512
"""Lines that are kept."""
WHOLE = 128
"""Newest lines that stay single epochs when older ones are put together."""
MOST_WORKERS = 4096
"""Places, each one peer at one stage, with a count of their work."""


@dataclass(frozen=True, slots=True)
class EpochLine:
    """One committed epoch, or ``epochs`` of them in a row, of which ``epoch`` is the last.

    ``tokens``: counted by the swarm until its end; ``loss``: nats per token of the last one, 0 for
    an epoch without samples; ``loss_val``: held-out loss that was measured in them, 0 for none;
    ``seconds``: duration of those epochs that this peer saw from begin to end; ``repaired``: rounds
    that were repeated.
    """

    epoch: int
    tokens: int
    loss: float
    loss_val: float = 0.0
    seconds: float = 0.0
    repaired: int = 0
    epochs: int = 1

    def behind(self, earlier: "EpochLine") -> "EpochLine":
        """This line and the one before it as one."""
        return replace(
            self,
            loss=self.loss or earlier.loss,
            loss_val=self.loss_val or earlier.loss_val,
            seconds=self.seconds + earlier.seconds,
            repaired=self.repaired + earlier.repaired,
            epochs=self.epochs + earlier.epochs,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Micro-batches of committed epochs that plans gave to one peer at one stage. ``of_stage``:
    micro-batches of all peers at this stage."""

    peer: PeerId
    stage: int
    micro_batches: int
    epochs: int
    of_stage: int


class History:
    """The committed epochs since this peer started. ``edition`` changes when lines that a reader
    has seen are no longer so; it begins with a number that no earlier history of this peer had."""

    def __init__(self, edition: int = 1) -> None:
        self.edition = edition
        self._lines: list[EpochLine] = []
        self._held_out = 0.0
        self._plan: tuple[CellId, int, int] | None = None
        """Cell, epoch and tokens of the newest plan."""
        self._given = Counter[tuple[PeerId, int]]()
        """Micro-batches of the newest plan by peer and stage."""
        self._micro_batches = Counter[tuple[PeerId, int]]()
        self._epochs = Counter[tuple[PeerId, int]]()
        self._of_stage = Counter[int]()
        """Micro-batches of all peers by stage."""

    def planned(self, plan: Plan, seconds: float = 0.0, repaired: int = 0) -> EpochLine | None:
        """Take a plan, which reports on the epoch before it. ``seconds``: duration of that epoch, 0
        for unknown; ``repaired``: its repeated rounds that this peer saw. Returns the line of that
        epoch; None if the plan reports on none, or on one that was told already."""
        line = None
        before = self._plan
        if before is not None and before[0] != plan.cell_id:
            before = None
        if before is not None and plan.epoch == before[1] + 1:
            self._count()
        if before is None or plan.epoch != before[1]:
            line = self._goes_on(plan, seconds, repaired)
        self._plan = (plan.cell_id, plan.epoch, plan.tokens)
        self._given = _given(plan)
        return line

    def after(self, epoch: int, edition: int) -> list[EpochLine]:
        """Lines above ``epoch``, oldest first; all lines for a reader of another edition."""
        if edition != self.edition:
            return list(self._lines)
        newest_first = takewhile(lambda line: line.epoch > epoch, reversed(self._lines))
        return [*newest_first][::-1]

    def work(self, most: int, me: PeerId) -> list[Work]:
        """At most ``most`` places, those with most micro-batches first; behind them the other
        places of ``me``."""
        ranked = self._micro_batches.most_common()
        chosen = [*ranked[:most], *(one for one in ranked[most:] if one[0][0] == me)]
        return [
            Work(peer, stage, count, self._epochs[peer, stage], self._of_stage[stage])
            for (peer, stage), count in chosen
        ]

    def _goes_on(self, plan: Plan, seconds: float, repaired: int) -> EpochLine | None:
        """Add the line of the epoch that led to ``plan``, and return it; None at the beginning of
        a run."""
        lines = self._lines
        if lines and lines[-1].epoch >= plan.epoch:
            # The swarm went back, or this peer came into another cell.
            self.edition += 1
            while lines and lines[-1].epoch >= plan.epoch:
                lines.pop()
        if plan.epoch == 0 or plan.tokens == 0:
            return None
        held_out = 0.0
        if plan.loss_val != self._held_out:
            held_out = plan.loss_val
            self._held_out = plan.loss_val
        line = EpochLine(plan.epoch, plan.tokens, plan.loss, held_out, seconds, repaired)
        lines.append(line)
        if len(lines) > MOST_LINES:
            self._thin()
        return line

    def _thin(self) -> None:
        """Put the older lines together, two at a time."""
        self.edition += 1
        older = self._lines[:-WHOLE]
        if len(older) % 2:
            older = older[:-1]
        pairs = zip(older[::2], older[1::2], strict=True)
        self._lines[: len(older)] = [later.behind(earlier) for earlier, later in pairs]

    def _count(self) -> None:
        """The micro-batches of the newest plan are committed."""
        self._micro_batches.update(self._given)
        self._epochs.update(self._given.keys())
        for (_, stage), count in self._given.items():
            self._of_stage[stage] += count
        if len(self._micro_batches) > MOST_WORKERS:
            kept = self._micro_batches.most_common(MOST_WORKERS * 3 // 4)
            self._micro_batches = Counter(dict(kept))
            self._epochs = Counter({place: self._epochs[place] for place, _ in kept})


def _given(plan: Plan) -> Counter[tuple[PeerId, int]]:
    given = Counter[tuple[PeerId, int]]((path.origin, ENDS) for path in plan.paths)
    for path in plan.paths:
        given.update((hop.peer, hop.stage) for hop in path.hops)
    return given
