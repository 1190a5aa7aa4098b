"""The streams that carry a tensor to or from this peer."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from node.pipeline.hops.deadlines import Deadlines

AT_ONCE = 2
"""Streams of one tensor between two peers: a sender has one, and a former one may not have ended
here yet."""


class OpenStreams:
    """Time limits of the open streams, by tensor and peer, oldest first."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._open: dict[Hashable, list[asyncio.Timeout]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def newest(self, what: Hashable) -> AsyncIterator[None]:
        """Around the bytes of one tensor to or from one peer, within a hop's time; the oldest of
        more than ``AT_ONCE`` streams of the same ends. Raises TimeoutError."""
        async with asyncio.timeout(self._deadlines.hop_s) as until:
            streams = self._open.setdefault(what, [])
            streams.append(until)
            if len(streams) > AT_ONCE and not streams[0].expired():
                streams[0].reschedule(0.0)
            try:
                yield
            finally:
                streams.remove(until)
                if not streams:
                    self._open.pop(what, None)
