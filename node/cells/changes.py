"""The owner's changes go from cell to cell through the directory. Enters: what other cells have
posted, what is known here. Leaves: changes that are news, a posting. Never: a signature: who is
given a change checks it.

Inside a cell a change spreads with heartbeats and plans. Between cells leaders look for changes
once a period; the first cells in order post the newest one that they know, and so does a cell that
finds it nowhere.
"""

from __future__ import annotations

from node.cells.register import CellRegister
from node.core.clock import Clock, begins
from node.core.errors import Refused
from node.dht.port import DirectoryPort
from node.dht.topics import CHANGES
from node.training.service import Training

REFRESH_S, LIVES = 60.0, 3
"""Seconds between two looks, and for how many of them a posting lives."""
POSTERS = 4
"""Cells that post what all of them know."""


class ChangeBoard:
    """Of one peer. ``register`` knows the number of its cell among all. ``pace``: everything is so
    many times as fast, at most 1."""

    def __init__(
        self,
        directory: DirectoryPort,
        clock: Clock,
        training: Training,
        register: CellRegister,
        pace: float,
    ) -> None:
        self._directory, self._clock, self._training = directory, clock, training
        self._register, self._every = register, REFRESH_S * pace

    async def keep(self) -> None:
        """Look once a period, as long as this peer leads. What was posted expires."""
        number = -1
        while True:
            number = await begins(self._clock, self._every, number)
            if self._training.leader is not None:
                await self._exchange()

    async def _exchange(self) -> None:
        """Read what others have posted, and post what they may lack."""
        told: list[str] = []
        for posting in (await self._directory.look(CHANGES)).values():
            try:
                told.append(self._training.change(posting.body.decode()).change)
            except (Refused, UnicodeDecodeError):
                continue  # a stranger may post anything
        newest = self._training.standing.known.change
        if newest and (newest not in told or self._register.standing()[0] < POSTERS):
            await self._directory.post(CHANGES, newest.encode(), LIVES * self._every)
