"""One message on a libp2p stream: its length in 4 bytes, big endian, then the message."""

import asyncio
import contextlib
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.reach.secure import Secured
from node.wire import bounds

M = TypeVar("M", bound=Message)

_LENGTH = 4


FrameReader = asyncio.StreamReader | Secured
Writer = asyncio.StreamWriter | Secured
"""A stream, whether it is libp2p's or private over a relay."""


class Streams(Protocol):
    """The methods of ``p2p.P2pDaemon`` that frames need."""

    async def open_stream(
        self, peer: PeerId, name: str, timeout: float = ..., limit: int = ...
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


class StreamEnded(WireError):
    """The stream ended inside a message. :func:`converse` tries once more."""


async def read_frame(reader: FrameReader, limit: int) -> bytes:
    """The next message. Raises WireError above ``limit`` bytes, before they are read, StreamEnded
    when it ends early."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        if length > limit:
            raise WireError(f"a message of {length} bytes, {limit} are allowed")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as e:
        raise StreamEnded("the stream ended inside a message") from e


def parsed(kind: type[M], raw: bytes, what: str) -> M:
    """The message in ``raw``, within its bounds. Raises WireError, which says that it is not
    ``what``."""
    return bounds.parse(kind, raw, what)


async def write_frame(writer: Writer, message: bytes) -> None:
    """Send one message."""
    writer.write(len(message).to_bytes(_LENGTH, "big") + message)
    await writer.drain()


async def see_off(reader: FrameReader, timeout: float) -> None:
    """Wait until the other side hangs up, at most ``timeout`` seconds. The side that sends last
    must do so before it closes the stream: p2pd turns our close into a reset, which drops bytes
    that the other side has not read yet."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout):
            await reader.read(1)


async def converse(
    streams: Streams, peer: PeerId, name: str, message: bytes, limit: int, timeout: float
) -> bytes:
    """One message to the handler ``name`` of ``peer``, one of at most ``limit`` bytes back. May be
    sent twice.

    Raises PeerFault, also after ``timeout`` seconds; weight 1 for a message that is too long.
    """
    try:
        async with asyncio.timeout(timeout):
            try:
                return await _once(streams, peer, name, message, limit, timeout)
            except (OSError, StreamEnded):
                # A connection to a p2pd that was started again looks alive until it is used; the
                # second try makes a new one.
                return await _once(streams, peer, name, message, limit, timeout)
    except TimeoutError as e:
        raise PeerFault(peer, f"no answer on {name} in {timeout:.3g} s") from e
    except (OSError, StreamEnded) as e:
        raise PeerFault(peer, f"{name} broke off: {e}") from e
    except WireError as e:
        raise PeerFault(peer, f"{name}: {e}", 1.0) from e


async def _once(
    streams: Streams, peer: PeerId, name: str, message: bytes, limit: int, timeout: float
) -> bytes:
    reader, writer = await streams.open_stream(peer, name, timeout)
    try:
        await write_frame(writer, message)
        return await read_frame(reader, limit)
    finally:
        writer.close()
