"""What the round's machine remembers of streams, of the groups of an attempt, and of an epoch.
Enters: what the machine writes. Leaves: answers to its questions.
Never: an action."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from node.averaging.exchange.events import Began, Opened
from node.averaging.exchange.groups import LET_IN
from node.core.ids import PeerId, RoundId


class GroupPhase(Enum):
    HELD = "its round is not open here"
    QUEUED = "its group is not let in yet"
    READING = "its gradients are coming"
    WAITING = "wants its parts"
    SETTLED = "served or refused"


COMING = (GroupPhase.QUEUED, GroupPhase.READING)
OPEN = (*COMING, GroupPhase.WAITING)


@dataclass(slots=True)
class Stream:
    began: Began
    phase: GroupPhase = GroupPhase.HELD

    @property
    def live(self) -> bool:
        return self.phase is not GroupPhase.SETTLED


@dataclass(slots=True)
class GroupState:
    """One group of the current attempt. ``given``: peers that contributed to it; ``present``: those
    that came after its parts were claimed; ``missing``: those whose exchange broke off."""

    names: frozenset[str]
    contribute_by: float
    given: set[PeerId]
    present: set[PeerId] = field(default_factory=set)
    missing: set[PeerId] = field(default_factory=set)


@dataclass(slots=True)
class EpochCounts:
    """``claimed`` and ``fresh`` are of the whole epoch, ``served`` (how often each peer had each
    group) of each of its rounds, the rest of the current attempt. ``idle``: came with nothing to
    give; ``missing``: died or left; ``barred``: spoiled a contribution, or lied about one.
    ``stepping``: the optimizer has a group of ours."""

    current: Opened
    rounds: dict[RoundId, Opened] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    served: Counter[tuple[RoundId, PeerId, int]] = field(default_factory=Counter)
    groups: list[GroupState] = field(default_factory=list)
    idle: set[PeerId] = field(default_factory=set)
    missing: set[PeerId] = field(default_factory=set)
    barred: set[PeerId] = field(default_factory=set)
    fault: str = ""
    stepping: bool = False

    def begin(self, opened: Opened) -> None:
        """A new attempt: what is claimed and fresh stays."""
        self.current = self.rounds[opened.round] = opened
        self.claimed |= opened.held
        self.fresh |= opened.held
        self.groups = [
            GroupState(frozenset(group.names), until, {opened.me} if opened.tokens else set())
            for group, until in zip(opened.groups, opened.contribute_by, strict=True)
        ]
        self.idle, self.missing, self.barred, self.fault = {opened.me}, set(), set(), ""

    def unclaimed(self, group: int) -> frozenset[str]:
        """What a step of this group would take, and a contribution to it must cover."""
        return self.groups[group].names - self.claimed

    def let_in(self) -> list[int]:
        """The groups whose gradients may be here: the first ones that are not fresh."""
        return [g for g, state in enumerate(self.groups) if not state.names <= self.fresh][:LET_IN]

    def awaited(self, group: int) -> frozenset[PeerId]:
        """Whose contribution to a group of the current attempt may still come."""
        state = self.groups[group]
        out = self.idle | self.missing | self.barred | state.given | state.present | state.missing
        return self.current.members - self.current.listeners - out

    def wanted(self, stream: Stream) -> frozenset[str]:
        """A contributor is answered with the parts it gave to; a listener with all of the group it
        asked for."""
        began = stream.began
        return frozenset(began.names) or frozenset(
            self.rounds[began.round].groups[began.group].names
        )
