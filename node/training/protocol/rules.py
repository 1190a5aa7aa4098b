"""Which averaging settings a plan is under: the manifest's, or the owner's newest change to them.
Pure. Enters: settings, a plan. Leaves: whether an epoch is an outer round, and of which kind; what
a peer tells and refuses. Never: a signature: who reads a change has checked it.

The plan in which a change comes into force *levels*: it is an outer round in which all cells of a
stage average their parameters. Whatever cells and anchors there were before, everybody goes on from
the same parameters afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId
from node.core.journey import Plan
from node.training.protocol import meetings
from node.training.protocol.meetings import fragment, number

MAX_CHANGE = 4096
"""Characters of a signed change."""
LEVEL = OuterSettings("butterfly", "parameters", every=1 << 30)
"""How a change comes into force. It is never due by itself."""


@dataclass(frozen=True)
class Rules:
    """``cell``: most peers of a cell, 0 for all of a stage. ``revision`` 0: the manifest's own;
    else ``change`` is what the owner signed, and of two the higher revision counts."""

    cell: int = 0
    outer: OuterSettings = OuterSettings()
    revision: int = 0
    change: str = ""


Read = Callable[[str], Rules]
"""A change, checked; "" for the manifest's own settings. Raises Refused."""


def levels(plan: Plan) -> bool:
    """Whether this plan is the outer round in which its change comes into force."""
    return bool(plan.change) and plan.since == plan.epoch and plan.outer > 0


def between(plan: Plan, read: Read) -> OuterSettings:
    """By which settings the cells of a plan average with each other."""
    return LEVEL if levels(plan) else read(plan.change).outer


def due(rules: Rules, since: int, epoch: int, epochs: int) -> int:
    """The number of the outer round that the epoch from version ``epoch`` is, 0 for none;
    ``since``: the epoch in which the change came into force."""
    if epoch >= epochs:
        return 0
    return number(epoch, rules.outer.gap, epochs) or int(rules.revision > 0 and since == epoch)


def carries(rules: Rules, since: int, epoch: int, epochs: int) -> int:
    """Which fragment the outer round from version ``epoch`` carries, 0 for all parts; ``since`` as
    in :func:`due`."""
    return 0 if rules.revision > 0 and since == epoch else fragment(rules.outer, epoch, epochs)


def sends(rules: Rules, since: int, epoch: int, epochs: int) -> int:
    """The number of the outer round whose fragment is sent with the plan from version ``epoch``, 0
    for none; ``since`` as in :func:`due`."""
    return 0 if due(rules, since, epoch, epochs) else meetings.sends(rules.outer, epoch, epochs)


def lands(plan: Plan, settings: OuterSettings) -> bool:
    """Whether an outer round's fragment has been sent before, by an earlier plan under the same
    settings."""
    return bool(plan.fragment and settings.overlap) and (
        not plan.change or plan.epoch - settings.overlap > plan.since
    )


class ChangeStatus:
    """Where one peer is with the owner's changes. ``known``: the newest it has heard of;
    ``in_force``: that of the newest plan it followed. A leader that has not shown that it knows as
    much is told with every heartbeat."""

    def __init__(self, own: Rules) -> None:
        self.known = self.in_force = own
        self._shown: PeerId | None = None

    def tells(self, leader: PeerId) -> str:
        """What this leader has to hear; empty for nothing."""
        return "" if leader == self._shown else self.known.change

    def learns(self, rules: Rules) -> bool:
        """Somebody has a change; True for one that is news."""
        if rules.revision <= self.known.revision:
            return False
        self.known, self._shown = rules, None
        return True

    def refuses(self, plan: Plan, rules: Rules) -> str:
        """Why a plan under these settings is not followed: an older change never comes back. Empty
        for one that is. What ends the run is followed whatever it says."""
        if plan.last or rules.revision >= self.in_force.revision:
            return ""
        self._shown = None
        return (
            f"a plan under change {rules.revision} of the owner, and change "
            f"{self.in_force.revision} is in force here"
        )

    def follows(self, leader: PeerId, rules: Rules) -> bool:
        """A plan of this leader under these settings is in force now; True when they are news."""
        # Of two that the owner gave one number, the one in a plan counts.
        news = rules.revision >= self.known.revision and rules.change != self.known.change
        self.in_force = rules
        self.known = rules if news else self.known
        self._shown = leader if rules.revision == self.known.revision else None
        return news
