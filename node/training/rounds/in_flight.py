"""A fragment that is under way between cells while the next epochs run: from the plan that sends it
to the one in which it lands. Enters: the meeting it is for, the parameters it was taken from, the
exchange's outcome. Leaves: that outcome, where it still counts. Never: an outer step (that is made
where it lands, by everybody at the same version).

It counts where it lands as long as this peer has gone on from the version it was taken from: not
after the parameters came from elsewhere, and not when the epoch of that version has begun anew,
which sends it anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from node.averaging.exchange.request import RoundOutcome
from node.core.journey import Plan
from node.training.protocol.meetings import LANDS_WITHIN


@dataclass
class InFlightFragment:
    """``meeting``: the outer round, as if the plan that sends it were its plan. ``local``:
    parameters of the fragment at that plan's version. ``history``: of the parameters in place then,
    by identity."""

    meeting: Plan
    local: Mapping[str, Tensor]
    history: object
    exchange: asyncio.Task[RoundOutcome | None] | None = None

    def lands(self, plan: Plan, history: object) -> bool:
        """Whether this is what lands in a plan."""
        return plan.outer == self.meeting.outer and history is self.history

    async def outcome(self, deadline_s: float) -> RoundOutcome | None:
        """What the exchange has brought, waited for until the deadline; None for nothing."""
        exchange = self.exchange
        if exchange is None:
            return None
        await asyncio.wait([exchange], timeout=LANDS_WITHIN * deadline_s)
        return exchange.result() if exchange.done() and not exchange.cancelled() else None

    def stop(self) -> None:
        """Nobody here waits for it any more, or uses what it has brought: what is owed is that of
        the exchange made last."""
        if self.exchange is not None:
            self.exchange.cancel()
        self.exchange = None
