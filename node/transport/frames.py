"""One message on a libp2p stream: its length in 4 bytes, big endian, then the message."""

from __future__ import annotations

import asyncio

from node.core.errors import WireError

_LENGTH = 4


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    """The next message. Raises WireError above ``limit`` bytes, before they are read, and when the stream ends early."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        if length > limit:
            raise WireError(f"a message of {length} bytes, {limit} are allowed")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as e:
        raise WireError("the stream ended inside a message") from e


async def write_frame(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send one message."""
    writer.write(len(message).to_bytes(_LENGTH, "big") + message)
    await writer.drain()
