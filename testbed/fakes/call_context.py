"""The server's side of a gRPC call whose caller a test plays."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from node.core.ids import PeerId
from testbed.fakes.memory_net import PEER_KEY


class CallContext:
    """Context of a call from ``peer`` over a :class:`~testbed.fakes.memory_net.MemoryNet`.

    ``read``: gets each message that the server writes; None: the caller reads nothing, so a write
    never ends. ``ends``: called when the server aborts the call. ``aborted``: status codes of
    aborts; ``unread`` is set when a message waits for a caller that reads nothing.
    """

    def __init__(
        self,
        peer: PeerId | str,
        read: Callable[[Any], object] | None = None,
        ends: Callable[[], object] = lambda: None,
    ) -> None:
        self._peer = PeerId(peer)
        self._read = read
        self._ends = ends
        self.unread = asyncio.Event()
        self.aborted: list[grpc.StatusCode] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((PEER_KEY, self._peer),)

    async def write(self, message: Any) -> None:
        if self._read is None:
            self.unread.set()
            await asyncio.Event().wait()
        else:
            self._read(message)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.aborted.append(code)
        self._ends()
