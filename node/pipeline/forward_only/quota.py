"""The part of the stash that forward-only work may use."""

from collections import Counter

from node.core.ids import PeerId
from node.pipeline.hops.keeper import StashKeeper
from node.pipeline.hops.stash import Stash
from node.pipeline.machine import PipelineMachine

SHARE = 0.5
"""Share of the stash for all forward-only work. Any peer may ask for it, but training comes first,
and then the evaluation that the leader waits for."""
GUESTS = 0.25
"""Share of the stash for the work of all peers outside the plan."""
GUEST = 0.125
"""Share of the stash for the work of one peer outside the plan."""


class ForwardQuota:
    """Bytes that others' forward-only work has reserved here."""

    def __init__(self, machine: PipelineMachine, stash: Stash, keeper: StashKeeper) -> None:
        self._machine = machine
        self._stash = stash
        self._keeper = keeper
        self._held = 0
        self._guests = 0
        """Bytes of ``_held`` that guests have."""
        self._of_guest: Counter[PeerId] = Counter()
        """Bytes reserved for guests, by the guest or member that brought the work."""

    def guest(self, caller: PeerId, origin: PeerId) -> PeerId | None:
        """``caller`` if it or ``origin`` is no member of the plan, else None: work of members is
        nobody's guest. Each hop before this one has checked that the work came from the peer that
        the journey names."""
        plan = self._machine.plan
        members = {m.peer for m in plan.members} if plan is not None else set[PeerId]()
        return None if {caller, origin} <= members else caller

    def objection(self, cost: int, guest: PeerId | None) -> str:
        """Reason for which ``cost`` bytes more may not be reserved, empty if they may."""
        limit = self._stash.limit
        if self._held + cost > max(cost, SHARE * limit) or (
            guest is not None
            and (
                self._guests + cost > max(cost, GUESTS * limit)
                or self._of_guest[guest] + cost > max(cost, GUEST * limit)
            )
        ):
            return "forward-only work has its share of the stash"
        if not self._keeper.make_room(cost):
            return "my stash is full"
        return ""

    def charge(self, cost: int, guest: PeerId | None) -> None:
        """Reserve ``cost`` bytes; a negative amount gives them back."""
        self._stash.charge(cost)
        self._held += cost
        if guest is not None:
            self._guests += cost
            self._of_guest[guest] += cost
            if not self._of_guest[guest]:
                del self._of_guest[guest]
