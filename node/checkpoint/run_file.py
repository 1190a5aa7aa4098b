"""Fetching a small file of the run from other peers: one that the manifest names by its hash.

Enters: the sha256, and the peers that may have the file. Leaves: its bytes, verified. Never: a byte
beyond the limit, a name or a path from another peer.
"""

import asyncio
import hashlib
from collections.abc import Sequence

import grpc
import grpc.aio

from node.checkpoint.errors import NoDonor
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.transport.port import TransportPort, answers
from protos import state_pb2, state_pb2_grpc

LARGEST_FILE = 64 << 20
"""Bytes of a file that is fetched; the tokenizers of published models have up to 35 MB."""
STALL_S = 15.0
"""Longest silence of a donor before another one is asked."""
REQUEST_S = 300.0
"""Longest time of one request."""


async def fetch_file(
    transport: TransportPort, donors: Sequence[PeerId], what: str, sha256: str
) -> bytes:
    """Fetch the file with this hex sha256, called ``what`` in errors, from one donor after another.

    The next donor goes on where the one before broke off. A donor that alone sent another file is
    reported to ``transport.fault`` with weight 1. Raises NoDonor when no donor gave the file.
    """
    reasons: dict[PeerId, str] = {}
    data = bytearray()
    for donor in donors:
        # The beginning, of an earlier donor, may be wrong: then this one is asked for all of it.
        for start in dict.fromkeys((len(data), 0)):
            del data[start:]
            try:
                await _append(transport, donor, sha256, data)
            except PeerFault as e:
                reasons[donor] = e.reason
                if e.weight:
                    transport.fault(donor, e.reason, e.weight)
                    data.clear()
                break
            if await asyncio.to_thread(_sha256, data) == sha256:
                return bytes(data)
            reasons[donor] = "sent another file than the manifest names"
            if start == 0:
                transport.fault(donor, reasons[donor], 1.0)
                data.clear()
    raise NoDonor(what, reasons)


async def _append(transport: TransportPort, donor: PeerId, sha256: str, data: bytearray) -> None:
    """Read the rest of the file, from ``len(data)`` on, to the end of ``data``. Raises PeerFault,
    with weight 1 for a malformed answer."""
    async with answers(donor, REQUEST_S), asyncio.timeout(STALL_S) as silence:
        stub = state_pb2_grpc.StateStub(await transport.channel(donor))
        request = state_pb2.FileRequest(sha256=sha256, offset=len(data))
        call = stub.File(request, timeout=REQUEST_S)
        try:
            while isinstance(chunk := await call.read(), state_pb2.StateChunk):
                if chunk.offset != len(data) or not chunk.data:
                    raise PeerFault(donor, "sends a file out of order", 1.0)
                if len(data) + len(chunk.data) > LARGEST_FILE:
                    raise PeerFault(donor, f"sends a file beyond {LARGEST_FILE} bytes", 1.0)
                data += chunk.data
                transport.count(donor, received=len(chunk.data), plane="state")
                silence.reschedule(asyncio.get_running_loop().time() + STALL_S)
        except grpc.aio.AioRpcError as e:
            # Its file ends before: then the beginning, of an earlier donor, is of another file.
            if not data or e.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
        finally:
            call.cancel()


def _sha256(data: bytearray) -> str:
    return hashlib.sha256(data).hexdigest()
