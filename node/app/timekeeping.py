"""Watches the clock of this machine. Compares it with the clocks of other peers, and notices that
this process stood still, that the machine slept, and that the clock was set.

Enters: answers of other peers, the machine's clocks. Leaves: facts for the record and for the
status. Never: a change to a clock.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

from node.control.causes import clock_words
from node.control.words import lasting
from node.core.clock import CLOCK_S, ClockNews, ClockReading, ClockWatch
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.core.tasks import together
from node.telemetry.events import Journal
from node.transport.clocks import ClockOffset, PeerClocks
from protos.ask_pb2 import Answer, Ask, AskPing

TICK_S = 1.0
"""Seconds between two readings of the own clocks."""
COMPARE_S = 60.0
DOUBT_S = 5.0
"""Seconds after which a clock is compared again, and while the clocks differ."""
ASKED = 3
"""Peers that are asked for the time at once."""
ASK_S = 3.0
"""Seconds for an answer."""


class Askable(Protocol):
    """The part of a transport that is needed here."""

    @property
    def clocks(self) -> PeerClocks:
        """Comparisons that answers have brought."""
        ...

    def connected(self) -> Collection[PeerId]:
        """Peers that a question reaches at once."""
        ...

    async def ask(self, whom: str, question: Ask, timeout: float = 10.0) -> Answer: ...


class ClockKeeper:
    """``stopped_s``: seconds that this process stood still the last time; ``slept``: because the
    machine slept; ``woke_at``: when it ran again, by the monotonic clock."""

    def __init__(
        self,
        transport: Askable,
        journal: Journal,
        read: Callable[[], ClockReading] = ClockReading.now,
    ) -> None:
        self._transport = transport
        self._journal = journal
        self._read = read
        self._clock = ClockWatch(read(), TICK_S)
        self._asked_at: dict[PeerId, float] = {}
        self._was_wrong = False
        self.stopped_s = 0.0
        self.slept = False
        self.woke_at = 0.0

    def wrong(self) -> ClockOffset | None:
        """The difference to the clocks of other peers if that is too large, else None."""
        found = self._transport.clocks.offset()
        if found is not None and abs(found.ahead_s) > CLOCK_S:
            return found
        return None

    async def watch(self) -> None:
        """Read the own clocks for as long as the daemon runs."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    async def keep_comparing(self) -> None:
        """Compare this clock with others for as long as the daemon runs."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.compare()

    def tick(self) -> None:
        """Read the own clocks, and report a stop of this process and a set wall clock."""
        news = self._clock.read(self._read())
        if news is None:
            return
        self._transport.clocks.forget()
        self._asked_at.clear()
        if news.stopped_s:
            self.stopped_s = news.stopped_s
            self.slept = news.slept
            self.woke_at = time.monotonic()
            self._emit("woke", _woke(news), seconds=round(news.stopped_s, 1), slept=news.slept)
        if news.set_s:
            way = "forward" if news.set_s > 0 else "back"
            text = f"the clock of this machine was set {way} by {lasting(abs(news.set_s))}"
            self._emit("clock-set", text, seconds=round(news.set_s, 1))

    async def compare(self) -> None:
        """Ask peers for the time if no answer told it lately, and report a change."""
        clocks = self._transport.clocks
        now = time.monotonic()
        every_s = COMPARE_S
        if self._was_wrong:
            every_s = DOUBT_S
        there = self._transport.connected()
        self._asked_at = {p: at for p, at in self._asked_at.items() if p in there}
        if not any(clocks.knows(peer, every_s) for peer in there):
            due = [p for p in there if now - self._asked_at.get(p, -every_s) >= every_s]
            chosen = sorted(due, key=lambda p: (self._asked_at.get(p, 0.0), p))[:ASKED]
            self._asked_at |= dict.fromkeys(chosen, now)
            await together(*map(self._ask, chosen))
        self._judge()

    async def _ask(self, peer: PeerId) -> None:
        with suppress(PeerFault):
            answer = await self._transport.ask(peer, Ask(ping=AskPing()), ASK_S)
            self._journal.names.learn(peer, answer.ping.name)

    def _judge(self) -> None:
        found = self.wrong()
        if found is not None and not self._was_wrong:
            self._emit("clock-wrong", clock_words(found), ahead_s=round(found.ahead_s, 1))
        if found is None and self._was_wrong and self._transport.clocks.offset() is not None:
            text = "the clock of this machine agrees with those of the others again"
            self._journal.emit("daemon", "clock-right", text)
        if found is not None or self._transport.clocks.offset() is not None:
            self._was_wrong = found is not None

    def _emit(self, kind: str, text: str, **facts: float | bool) -> None:
        self._journal.emit("daemon", kind, text, "warning", **facts)


def _woke(news: ClockNews) -> str:
    what = "this machine slept" if news.slept else "this process stood still"
    return (
        f"woke after {news.stopped_s:.0f} s in which {what}: connects to the others again and "
        "takes their newest state"
    )
