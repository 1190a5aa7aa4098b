"""Turns under a rate, on the clock of the event loop: :class:`~node.reach.shares.Shares` for those
who wait in tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

from node.reach.shares import BURST_S, Shares


class Share:
    """``rate``: bytes a second for all together; 0: nobody ever waits. ``burst_s`` as
    :class:`~node.reach.shares.Shares` has it."""

    def __init__(self, rate: float, burst_s: float = BURST_S) -> None:
        self.rate = rate
        self._shares = Shares(rate, time.monotonic(), burst_s) if rate else None
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, pair: Hashable, count: int, weight: float = 1.0) -> None:
        """Return when ``pair`` may send ``count`` bytes; see
        :meth:`~node.reach.shares.Shares.ask`."""
        if self._shares is None:
            return
        number = self._shares.ask(pair, count, weight)
        granted = self._waiting[number] = asyncio.get_running_loop().create_future()
        if self._timer is None:
            self._grant(self._shares)
        try:
            await granted
        finally:
            self._waiting.pop(number, None)
            self._shares.drop(number)

    def spend(self, count: int) -> None:
        """``count`` bytes went without waiting; those that wait, wait for it."""
        if self._shares is not None:
            self._shares.spend(count, time.monotonic())

    def gone(self, pair: Hashable) -> None:
        """Forget a pair that does not wait."""
        if self._shares is not None:
            self._shares.gone(pair)

    def _grant(self, shares: Shares) -> None:
        for number in shares.grant(time.monotonic()):
            if (granted := self._waiting.get(number)) is not None and not granted.done():
                granted.set_result(None)
        wait = shares.wait()
        self._timer = (
            None
            if wait is None
            else asyncio.get_running_loop().call_later(wait, self._grant, shares)
        )
