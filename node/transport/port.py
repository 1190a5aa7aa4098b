"""The transport that the engines need: a channel to a peer, a server for the calls of others, and
the identity of each caller."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.patience import Patience
from node.core.tasks import is_cancelled

EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs
"""Result of ``read`` at the end of a stream."""
REASON_LENGTH = 200
"""Characters of a remote error text that are kept; the text is the peer's, so it is clipped and
made printable."""

_SAID = {
    grpc.StatusCode.UNAVAILABLE: "connection lost",
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time",
    grpc.StatusCode.CANCELLED: "call cancelled",
    grpc.StatusCode.UNAUTHENTICATED: "does not know our token",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "over its limits",
    grpc.StatusCode.PERMISSION_DENIED: "refuses us",
    grpc.StatusCode.UNIMPLEMENTED: "does not offer this call",
}


@dataclass(frozen=True, slots=True)
class PeerLink:
    """How one peer is reached now. ``path`` is a word of :class:`~node.reach.ladder.Rung`, "" for
    known without a channel; ``rtt`` seconds, 0 unknown; ``via`` the relay, "" for none."""

    path: str = ""
    rtt: float = 0.0
    sent: int = 0
    received: int = 0
    name: str = ""
    version: str = ""
    since: float = 0.0
    """Wall clock of the handshake behind the channel, Unix seconds."""
    via: PeerId = PeerId("")
    up: float = 0.0
    down: float = 0.0
    """Bytes a second sent and received, the most in any second of the last minute."""
    proven: float = 0.0
    """Wall clock when the way was last proven to work, Unix seconds, 0 for never."""


class TransportPort(Protocol):
    """Implemented by ``service.Transport`` (the network) and by ``MemoryTransport`` of
    testbed/fakes/memory_net.py (one process)."""

    @property
    def peer_id(self) -> PeerId:
        """PeerId of this peer."""
        ...

    @property
    def patience(self) -> Patience:
        """Adaptive timeouts of this process; every user adds its measurements."""
        ...

    @property
    def server(self) -> grpc.aio.Server:
        """The server others call; add servicers to it before the transport starts."""
        ...

    async def channel(self, peer: PeerId) -> grpc.aio.Channel:
        """A channel that ``XStub(channel)`` can be made from. Cached and shared: ask for it before
        each call, never close it. Raises PeerFault when the peer cannot be reached, refuses us, or
        is banned."""
        ...

    def caller(self, context: Any) -> PeerId:
        """Peer that makes the call which a servicer is handling; ``context`` is its
        ServicerContext. Raises PeerFault if the caller is unknown (the server refuses unknown
        callers before a servicer sees them)."""
        ...

    def forget(self, peer: PeerId) -> None:
        """Drop the channel to a peer, so that the next ``channel()`` dials anew. Calls in flight
        are left to finish."""
        ...

    def has_met(self, peer: PeerId) -> bool:
        """Return True if a dial to the peer has succeeded, or the peer has reached this one."""
        ...

    def doubt(self, peer: PeerId) -> None:
        """The leader says that the peer is dead: end a dial that is under way; later dials are
        short."""
        ...

    def path(self, peer: PeerId) -> str:
        """A word of :class:`~node.reach.ladder.Rung`, "" when there is no channel."""
        ...

    def rate_left(self, peer: PeerId) -> float:
        """Bytes a second that the relay to a peer has left for it; 0 where there is no relay, or no
        limit."""
        ...

    def caps(self) -> tuple[float, float]:
        """Bytes of tensors a second that this peer may send and receive in all; 0 for no cap."""
        ...

    def expel(
        self, revoked: Callable[[PeerId], bool], out: Callable[[PeerId], bool] | None = None
    ) -> None:
        """From now on, peers that are ``revoked`` are refused in both directions. Sessions with
        peers that are ``out`` end now, by default those that are revoked."""
        ...

    def fault(self, peer: PeerId, reason: str, weight: float = 1.0) -> None:
        """Count a fault against a peer; enough of them and it is refused for a while, in both
        directions."""
        ...

    def count(self, peer: PeerId, sent: int = 0, received: int = 0, plane: str = "bulk") -> None:
        """Report tensor bytes moved; ``plane`` labels them in the metrics ("pipeline", "averaging",
        "state").

        A package knows its sizes for free; counting inside gRPC would cost every message.
        """
        ...

    def leave(self, peer: PeerId, data: memoryview) -> bytes | None:
        """Leave bytes for a peer in memory that it shares with this one. Returns where they are, to
        be sent to it instead of them; None if they have to be sent."""
        ...

    def withdraw(self, peer: PeerId, places: Sequence[bytes]) -> None:
        """The peer has ended the call in which it was told these places, so it takes no bytes from
        them any more."""
        ...

    def fetch(self, peer: PeerId, place: bytes, into: memoryview) -> int:
        """Copy the bytes that a peer has left to the beginning of ``into``, and return their
        number. ``place``: as the peer said. Raises WireError unless such bytes are there, and
        fit."""
        ...

    async def ping(self, peer: PeerId, timeout: float = 5.0) -> float:
        """Seconds of a round trip on the path work takes. Raises PeerFault."""
        ...

    def on_lost(self, callback: Callable[[PeerId], None]) -> None:
        """Call ``callback(peer)`` when the established channel to a peer breaks. It must not block
        or raise."""
        ...


def printable(text: str | None, most: int = REASON_LENGTH) -> str:
    """One line of a text that a peer wrote, clipped to ``most`` characters."""
    return "".join(c if c.isprintable() else " " for c in (text or "")[:most]).strip()


@asynccontextmanager
async def answers(peer: PeerId, timeout: float) -> AsyncIterator[None]:
    """Around a call of ``peer``, its channel included, that has ``timeout`` seconds. Raises
    PeerFault when the answer does not come by then, the call fails, or its channel is closed."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as e:
        raise PeerFault(peer, "no answer in time") from e
    except grpc.aio.AioRpcError as e:
        raise translate(peer, e) from e
    except asyncio.CancelledError as e:
        if is_cancelled():
            raise
        raise PeerFault(peer, "its connection was closed") from e


@asynccontextmanager
async def blamed(transport: TransportPort, peer: PeerId, context: Any) -> AsyncIterator[None]:
    """Context for reading a message of ``peer`` in a servicer: a WireError counts as the peer's
    fault, and ends the call with INVALID_ARGUMENT."""
    try:
        yield
    except WireError as e:
        transport.fault(peer, str(e), 1.0)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, printable(str(e)))
        raise


def translate(peer: PeerId, error: grpc.aio.AioRpcError) -> PeerFault:
    """The PeerFault behind a failed call, to be raised ``from`` it. Weight 0: a status proves no
    bad intent."""
    code = error.code()
    details = printable(error.details())
    unusual = "answered an unknown status"
    if isinstance(code, grpc.StatusCode):
        unusual = f"answered {code.name}"
    said = _SAID.get(code, unusual)
    if details:
        said = f"{said}: {details}"
    return PeerFault(peer, said)
