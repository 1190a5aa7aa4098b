"""Turns under a rate, on the clock of the event loop: :class:`~node.reach.shares.Shares` for those
who wait in tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

from node.reach.shares import BURST_S, Shares


class Share(Shares):
    """``rate``: bytes a second for all together; 0: nobody ever waits."""

    def __init__(self, rate: float, burst_s: float = BURST_S) -> None:
        super().__init__(rate, time.monotonic(), burst_s)
        self._granted: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, pair: Hashable, count: int, weight: float = 1.0) -> None:
        """Return when ``pair`` may send ``count`` bytes; see
        :meth:`~node.reach.shares.Shares.ask`."""
        if not self.rate:
            return
        number = self.ask(pair, count, weight)
        granted = self._granted[number] = asyncio.get_running_loop().create_future()
        if self._timer is None:
            self._go_on()
        try:
            await granted
        finally:
            self._granted.pop(number, None)
            self.drop(number)

    def _go_on(self) -> None:
        for number in self.grant(time.monotonic()):
            if (granted := self._granted.get(number)) is not None and not granted.done():
                granted.set_result(None)
        wait = self.wait()
        self._timer = (
            None if wait is None else asyncio.get_running_loop().call_later(wait, self._go_on)
        )
