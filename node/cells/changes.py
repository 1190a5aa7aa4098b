"""The owner's changes go from cell to cell through the directory. Enters: what other cells have
posted, what is known here. Leaves: changes that are news, a posting. Never: a signature: who is
given a change checks it.

Inside a cell a change spreads with heartbeats and plans. Between cells leaders look for changes
once a period; the first cells in order post the newest one that they know, and so does a cell that
finds it nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

from node.core.clock import Clock, begins
from node.core.errors import Refused
from node.core.tasks import Tasks
from node.dht.port import DirectoryPort
from node.dht.topics import CHANGES
from node.training.service import Training

REFRESH_S, LIVES = 60.0, 3
"""Seconds between two looks, and for how many of them a posting lives."""
POSTERS = 4
"""Cells that post what all of them know."""


class ChangeBoard:
    """Of one peer. ``leads()``: whether it looks at all; ``number()``: of its cell among all.
    ``pace``: everything is so many times as fast, at most 1."""

    def __init__(
        self,
        directory: DirectoryPort,
        clock: Clock,
        training: Training,
        leads: Callable[[], bool],
        number: Callable[[], int],
        pace: float = 1.0,
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._directory, self._clock, self._training = directory, clock, training
        self._leads, self._number = leads, number
        self.every = REFRESH_S * pace
        self._tasks = Tasks("changes", on_error)

    def start(self) -> None:
        """Begin to look, as long as this peer leads."""
        self._tasks.spawn(self._keep(), "changes", eternal=True)

    async def close(self) -> None:
        """What was posted expires."""
        await self._tasks.close()

    async def _keep(self) -> None:
        number = -1
        while True:
            number = await begins(self._clock, self.every, number)
            if self._leads():
                await self.exchange()

    async def exchange(self) -> None:
        """Read what others have posted, and post what they may lack."""
        told: list[str] = []
        for posting in (await self._directory.look(CHANGES)).values():
            try:
                told.append(self._training.change(posting.body.decode()).change)
            except (Refused, UnicodeDecodeError):
                continue  # a stranger may post anything
        newest = self._training.known.change
        if newest and (newest not in told or self._number() < POSTERS):
            await self._directory.post(CHANGES, newest.encode(), LIVES * self.every)
