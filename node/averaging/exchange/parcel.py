"""Parts as bytes on their way: what heads must announce, messages, and putting them back together.

A message of bytes is one protobuf field, ``bytes chunk = 2``, written and read by hand: protobuf
copies a field three times. Enters: parts in a format of ``node.wire.coding``. Leaves: messages;
there, the coded bytes of every part. Never: memory for bytes that a head did not announce as it
must.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from node.core.errors import WireError
from node.wire.tensors import Buffer, BytesReader, expected_head
from protos import tensor_pb2

Shape = Sequence[int]
CHUNK_TAG = 0x12
"""Field 2, length delimited: of both ``Contribution.chunk`` and ``Fresh.chunk``."""
CRUMB = 1 << 12
"""Bytes that the messages of a parcel must hold on average: each message costs processor time, so a
sender may not send a mebibyte byte by byte."""
FEWEST_MESSAGES = 64
"""Messages of a parcel allowed beyond that average."""


def messages(parts: Iterable[Tensor], size: int) -> Iterator[bytes]:
    """The bytes of all parts [nbytes] uint8 back to back, in messages of ``size`` of them; the last
    may be shorter. No part may change before its last message is cut."""
    pieces: list[memoryview] = []
    room = size
    for part in parts:
        view = part.numpy().data
        while len(view):
            pieces.append(view[:room])
            view = view[room:]
            room -= len(pieces[-1])
            if not room:
                yield _framed(pieces, size)
                pieces = []
                room = size
    if pieces:
        yield _framed(pieces, size - room)


def payload(message: bytes) -> memoryview:
    """The bytes of a message. Raises WireError if it is not a chunk, or an empty one."""
    if not message or message[0] != CHUNK_TAG:
        raise WireError("a message that brings no bytes")
    length = shift = 0
    for at in range(1, min(len(message), 6)):
        length |= (message[at] & 0x7F) << shift
        shift += 7
        if not message[at] & 0x80:
            if not length or length != len(message) - at - 1:
                break
            return memoryview(message)[at + 1 :]
    raise WireError("a message of another length than it says")


class ParcelReader(BytesReader):
    """Puts the parts of a group back together.

    ``expected`` lists the (name, shape) this side knows must come, in order, all in format
    ``codec``; the heads are compared with it when the reader is made (WireError). Memory for a part
    is set aside when its first byte arrives.
    """

    def __init__(
        self,
        heads: Sequence[tensor_pb2.TensorHead],
        expected: Sequence[tuple[str, Shape]],
        codec: str,
    ) -> None:
        super().__init__(
            heads, [expected_head(name, shape, codec) for name, shape in expected], codec
        )
        self._messages = FEWEST_MESSAGES + self.nbytes // CRUMB

    def feed(self, data: Buffer) -> None:
        """Take the next bytes; they may cross parts. Raises WireError, taking nothing, when they
        are too many, or come in crumbs."""
        self._messages -= 1
        if self._messages < 0:
            raise WireError(f"{self.nbytes} bytes come in messages of less than {CRUMB}")
        super().feed(data)


def _framed(pieces: Sequence[memoryview], length: int) -> bytes:
    prefix = bytearray((CHUNK_TAG,))
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return b"".join((prefix, *pieces))
