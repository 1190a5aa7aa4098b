"""When a round among unequal peers closes: at a quorum and a grace that fits into the time nobody
waits anyway. Enters: who reported what, measured times. Leaves: whose contributions are merged,
with what weights. Never: a clock, a tensor.

After the rule of Decoupled DiLoCo (arXiv 2604.21428): members go on training while a round is open,
so waiting costs nothing until its result is due, ``overlap`` steps later. grace = clip(safety *
(overlap * step_s - quorum_s - sync_s), 0, most). Who reports late is not thrown away: its report
goes into the next round if it is no older than ``bound`` rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.core.ids import PeerId

SAFETY = 0.8
"""Share of the time that is left which a grace may take."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A new round; ``members`` may report."""

    members: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Reported:
    """``peer`` has a contribution computed from the result of round ``since``, with ``tokens``
    behind it."""

    peer: PeerId
    since: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Left:
    """``peer`` is gone; what it reported stands."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Ticked:
    """The time asked for by :class:`Wake` has come."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Close ``round``: mean of ``weights`` (they sum to 1, by tokens). ``late``: members of whom
    nothing is in it."""

    round: int
    weights: dict[PeerId, float]
    late: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class TooOld:
    """``peer`` must take the newest result before it reports again."""

    peer: PeerId
    since: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Give :class:`Ticked` at this time."""

    at: float


Event = Begin | Reported | Left | Ticked
Action = Merge | TooOld | Wake


def grace(most: float, spare_s: float | None, quorum_s: float, safety: float = SAFETY) -> float:
    """Seconds that may pass after a quorum took ``quorum_s``, at most ``most``; ``spare_s``: nobody
    waits for the result before, None where every wait is felt."""
    return most if spare_s is None else min(most, max(0.0, safety * (spare_s - quorum_s)))


@dataclass
class Quorum:
    """Rounds of one fragment, one after the other. ``quorum`` 0: all members. Times are seconds of
    the caller's clock."""

    quorum: int
    most: float
    overlap: int = 0
    step_s: float = 0.0
    sync_s: float = 0.0
    safety: float = SAFETY
    bound: int = 1
    round: int = 0
    """The round that is open, or comes next."""
    _members: frozenset[PeerId] = frozenset()
    _reports: dict[PeerId, Reported] = field(default_factory=dict)
    _began: float = 0.0
    _closes: float | None = None
    _open: bool = False

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about it. Raises ValueError for a round begun while one is open, or a report
        from the future."""
        if isinstance(event, Begin):
            if self._open:
                raise ValueError(f"round {self.round} is open")
            self._open, self._members, self._began, self._closes = True, event.members, now, None
        elif isinstance(event, Reported):
            refused = self._take(event)
            if refused:
                return refused
        elif isinstance(event, Left):
            self._members -= {event.peer}
        return self._settle(now) if self._open else []

    def grace(self, quorum_s: float) -> float:
        """Seconds that may pass after a quorum took ``quorum_s``. Without overlap every wait is
        felt, so ``most`` is the rule."""
        return grace(
            self.most,
            self.overlap * self.step_s if self.overlap else None,
            quorum_s + self.sync_s,
            self.safety,
        )

    def _take(self, report: Reported) -> list[Action]:
        if report.since > self.round or report.tokens < 1:
            raise ValueError(
                f"a report of {report.tokens} tokens since round {report.since} in round "
                f"{self.round}"
            )
        if self.round - report.since > self.bound:
            return [TooOld(report.peer, report.since)]
        self._reports[report.peer] = report
        return []

    def _settle(self, now: float) -> list[Action]:
        waited_for = self._members - self._reports.keys()
        if self._reports and not waited_for:
            return self._close(waited_for)
        # A quorum larger than the members that are left would wait for ever.
        need = min(self.quorum or len(self._members), len(self._members)) or 1
        if len(self._reports) < need:
            return []
        if self._closes is None:
            self._closes = now + self.grace(now - self._began)
        return self._close(waited_for) if now >= self._closes else [Wake(self._closes)]

    def _close(self, late: frozenset[PeerId]) -> list[Action]:
        total = sum(report.tokens for report in self._reports.values())
        weights = {peer: self._reports[peer].tokens / total for peer in sorted(self._reports)}
        closed, self.round, self._open, self._reports = self.round, self.round + 1, False, {}
        return [Merge(closed, weights, late)]
