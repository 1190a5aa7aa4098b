"""The streams that carry a tensor to or from this peer."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from node.pipeline.hops.deadlines import Deadlines

AT_ONCE = 2
"""Streams of one tensor between two peers, at most: a sender has one, and its former one may not
have ended here yet."""


class OpenStreams:
    """Time limits of the open streams, by tensor and peer, oldest first."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._open: dict[Hashable, list[asyncio.Timeout]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def newest(self, what: Hashable) -> AsyncIterator[None]:
        """A context manager for the transfer of one tensor to or from one peer (``what``). Of
        more than ``AT_ONCE`` streams of the same ``what``, the oldest are ended. Raises
        TimeoutError in a stream that is ended so, or that takes longer than a hop's time."""
        async with asyncio.timeout(self._deadlines.hop_s) as until:
            streams = self._open.setdefault(what, [])
            streams.append(until)
            # All beyond the newest: one that was told to end may not have ended yet.
            for old in streams[:-AT_ONCE]:
                if not old.expired():
                    old.reschedule(0.0)
            try:
                yield
            finally:
                streams.remove(until)
                if not streams:
                    self._open.pop(what, None)
