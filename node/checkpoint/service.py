"""The donor: describes the state that this peer holds and streams it to joiners, within limits on
the rate and on the number of joiners.

The other end is :func:`node.checkpoint.fetch.fetch`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import torch

from node.checkpoint.errors import NOT_HELD
from node.checkpoint.pins import BEHIND_S, Pin, PinKey, Pins
from node.checkpoint.run_file import LARGEST_FILE
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.state import StateKind, StateProvider
from node.core.clock import Clock, SystemClock
from node.core.errors import LocalFault
from node.core.ids import PeerId
from node.core.journey import Version
from node.core.memory import give_freed_back
from node.identity.places import PlacesByPeer, block_of
from node.transport.port import TransportPort
from node.transport.traffic import Share
from node.wire.remote import HeldTensor
from protos import state_pb2, state_pb2_grpc

MESSAGE = 256 << 10
"""Bytes of one message: small, so that a joiner on a slow line sees progress before its patience
ends."""
LARGEST = 64 << 20
"""Bytes one request may ask for."""
STREAMS = 16
"""Requests of one joiner served at once."""
NAMES = 20_000
"""Tensors a question may name."""
TIDY_S = BEHIND_S / 2
"""Seconds between two looks for snapshots that nobody reads any more."""
FILES = 8
"""Requests for files of the run served at once, one of each peer; half of them may be of
strangers."""
UNREAD_S = 30.0
"""Seconds within which a message that was sent must be taken: then the request ends."""
FILE_S = 300.0
"""Seconds for one request for a file. Where another peer needs the place, a reader keeps it if it
is on its way to have the file within half of that."""


_BUSY = "all snapshots are in use, try again later"


class Unserved(Exception):
    """Refusal of a request: a status for its call, and the reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True, eq=False)
class FileReader:
    """A request for a file: when it ends, when it began, its bytes, and the bytes taken."""

    ends: asyncio.Timeout
    began: float
    total: int = 0
    got: int = 0

    def pace(self, now: float) -> float:
        """Share of the file that is taken in a second."""
        return self.got / max(1, self.total) / (1.0 + now - self.began)


class FileReaders:
    """Places of requests for files. A request ends when another peer needs its place."""

    def __init__(self, established: Callable[[PeerId], bool]) -> None:
        self._places: PlacesByPeer[FileReader] = PlacesByPeer(
            "requests for files", FILES, 1, established
        )
        self._readers: list[FileReader] = []

    def enter(self, reader: FileReader, peer: PeerId, block: str) -> str:
        """Give ``reader`` a place; the reason where there is none, else ""."""
        taken = self._places.take(reader, peer, block)
        if taken.refusal and not self._places.held_by(peer):
            slowest = min(self._readers, key=lambda r: r.pace(reader.began), default=None)
            if slowest is not None and self._behind(slowest, reader.began):
                self._end(slowest)
                taken = self._places.take(reader, peer, block)
        if taken.evicted is not None:
            self._end(taken.evicted)
        if taken:
            self._readers.append(reader)
        return taken.refusal

    def leave(self, reader: FileReader) -> None:
        """Give its place back."""
        self._places.leave(reader)
        if reader in self._readers:
            self._readers.remove(reader)

    @staticmethod
    def _behind(reader: FileReader, now: float) -> bool:
        return now - reader.began > UNREAD_S and reader.pace(now) * FILE_S < 2.0

    def _end(self, reader: FileReader) -> None:
        self.leave(reader)
        if not reader.ends.expired():
            reader.ends.reschedule(0.0)


def block(context: Any) -> str:
    """The block of the address that a call comes from."""
    return block_of(str(context.peer()).removeprefix("ipv4:").rpartition(":")[0])


class StateService(state_pb2_grpc.StateServicer):
    """Serves what ``provider`` holds. Made before the transport starts: it adds itself to the
    transport's server.

    ``on_served(kind, version, name)`` is told of every tensor that has gone out whole to a peer.
    ``weights`` reads the parameters of any stage that the run begins from, where they are on the
    disk here; it may block. ``files`` reads a file of the run by its sha256, None where it is not
    here; it may block. ``parameters``: bytes of the stage's parameters; ``established(peer)`` says
    if ``peer`` is a member of the run or has worked with this peer.
    """

    def __init__(
        self,
        transport: TransportPort,
        provider: StateProvider,
        settings: CheckpointSettings,
        *,
        clock: Clock | None = None,
        on_served: Callable[[StateKind, Version, str], None] = lambda kind, version, name: None,
        weights: Callable[[int], Mapping[str, torch.Tensor]] | None = None,
        files: Callable[[str], bytes | None] | None = None,
        parameters: int = 0,
        established: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._transport = transport
        self._provider = provider
        self._on_served = on_served
        self._clock = clock or SystemClock()
        self.pins = Pins(parameters, settings.max_up, established)
        self._weights = weights
        self._files = files
        self._taking = FileReaders(established)
        self._opened: dict[str, tuple[int, bytes]] = {}
        """Files that are being given out, by hash: the number of requests, and the bytes."""
        self._share = Share(settings.max_up)
        self._streams: Counter[PeerId] = Counter()
        self._hashing = asyncio.Lock()
        self._tidying: asyncio.TimerHandle | None = None
        state_pb2_grpc.add_StateServicer_to_server(self, transport.server)

    async def Describe(
        self, request: state_pb2.DescribeRequest, context: Any
    ) -> state_pb2.StateManifest:
        """Heads and hashes of the wanted state, which is pinned from now on: NOT_FOUND when it is
        not held, RESOURCE_EXHAUSTED when busy."""
        async with self._stream(context) as peer:
            kind = StateKind.of(request.kind)
            if kind is None or len(request.names) > NAMES:
                raise Unserved(
                    grpc.StatusCode.INVALID_ARGUMENT, "unknown kind of state, or too many names"
                )
            pin = self._pin(request, kind, peer, await self._given(request, kind))
            names = tuple(sorted(set(request.names) or pin.tensors))
            if not pin.tensors.keys() >= set(names):
                raise Unserved(grpc.StatusCode.NOT_FOUND, "not all of these tensors are held here")
            async with self._hashing:  # one core at most goes to joiners
                manifest = await asyncio.to_thread(pin.describe, names)
            if not self.pins.holds(pin):
                raise Unserved(grpc.StatusCode.RESOURCE_EXHAUSTED, _BUSY)
            self.pins.reads(pin, peer, names, self._clock.now())
            return manifest

    async def Fetch(self, request: state_pb2.FetchRequest, context: Any) -> None:
        """A byte range of one tensor of a pinned snapshot, in order."""
        async with self._stream(context) as peer:
            await self._send(self.pieces(request, peer), peer, context)

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[state_pb2.StateChunk, None]:
        """The answer to a Fetch of ``peer``, chunk by chunk. Raises Unserved."""
        pin, view = self._range(request, peer)
        pin.readers += 1
        try:
            for at in range(0, len(view), MESSAGE):
                data = bytes(view[at : at + MESSAGE])
                await self._share.take(peer, len(data))
                if not self.pins.holds(pin) or not pin.uses(peer, self._clock.now()):
                    raise Unserved(grpc.StatusCode.RESOURCE_EXHAUSTED, _BUSY)
                yield state_pb2.StateChunk(offset=request.offset + at, data=data)
                pin.took(peer, len(data), self._clock.now())
            # The pieces of a tensor are asked for in any order.
            pin.given[peer, request.name] += request.length
            if pin.given[peer, request.name] >= len(pin.views[request.name]):
                del pin.given[peer, request.name]
                self._on_served(pin.key.kind, pin.key.version, request.name)
        finally:
            pin.readers -= 1

    async def _send(
        self, chunks: AsyncGenerator[state_pb2.StateChunk, None], peer: PeerId, context: Any
    ) -> None:
        """Send chunks, each of which must be taken in time. Their source is let go before the call
        ends, which takes until the peer reads or hangs up. Raises TimeoutError, and exceptions of
        ``chunks``."""
        async with aclosing(chunks):
            async for chunk in chunks:
                async with asyncio.timeout(UNREAD_S):
                    await context.write(chunk)
                self._transport.count(peer, sent=len(chunk.data), plane="state")

    async def List(self, request: state_pb2.ListRequest, context: Any) -> state_pb2.StateList:
        """Parts there is optimizer state of here, with the version each is of. Pins nothing."""
        async with self._stream(context):
            kind = StateKind.of(request.kind)
            if kind is None or kind not in (StateKind.OPTIMIZER, StateKind.SPARE):
                raise Unserved(
                    grpc.StatusCode.INVALID_ARGUMENT, "there are no parts of this kind of state"
                )
            held = sorted(self._provider.listing(request.stage, kind).items())[:NAMES]
            return state_pb2.StateList(
                parts=[
                    state_pb2.PartVersion(name=name, epoch=v.epoch, lineage=v.lineage)
                    for name, v in held
                ]
            )

    async def File(self, request: state_pb2.FileRequest, context: Any) -> None:
        """A file that the manifest names by its hash, from an offset to its end: NOT_FOUND when it
        is not here, RESOURCE_EXHAUSTED when busy."""
        async with self._stream(context) as peer, asyncio.timeout(FILE_S) as ends:
            reader = FileReader(ends, self._clock.now())
            if refusal := self._taking.enter(reader, peer, block(context)):
                raise Unserved(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{refusal}, ask again")
            try:
                await self._send(self._of_file(request, reader, peer), peer, context)
            finally:
                self._taking.leave(reader)

    async def _of_file(
        self, request: state_pb2.FileRequest, reader: FileReader, peer: PeerId
    ) -> AsyncGenerator[state_pb2.StateChunk, None]:
        """The rest of a file, chunk by chunk. Raises Unserved."""
        async with self._file(request.sha256) as data:
            if request.offset > len(data):
                text = f"it has {len(data)} bytes"
                raise Unserved(grpc.StatusCode.INVALID_ARGUMENT, text)
            reader.total = len(data) - request.offset
            for at in range(request.offset, len(data), MESSAGE):
                piece = data[at : at + MESSAGE]
                await self._share.take(peer, len(piece))
                yield state_pb2.StateChunk(offset=at, data=piece)
                reader.got += len(piece)

    @asynccontextmanager
    async def _file(self, sha256: str) -> AsyncIterator[bytes]:
        """The bytes of a file of the run, in memory once for all requests. Raises Unserved where it
        is not here."""
        count, data = self._opened.get(sha256, (0, b""))
        if not count:
            data = await self._read_file(sha256)
            count = self._opened.get(sha256, (0, b""))[0]
        self._opened[sha256] = count + 1, data
        try:
            yield data
        finally:
            count, _ = self._opened.pop(sha256)
            if count > 1:
                self._opened[sha256] = count - 1, data

    async def _read_file(self, sha256: str) -> bytes:
        data = None
        if self._files is not None and sha256:
            try:
                data = await asyncio.to_thread(self._files, sha256)
            except LocalFault as e:
                raise Unserved(grpc.StatusCode.NOT_FOUND, "cannot be read here") from e
        if data is None or len(data) > LARGEST_FILE:
            raise Unserved(grpc.StatusCode.NOT_FOUND, NOT_HELD)
        return data

    def _range(self, request: state_pb2.FetchRequest, peer: PeerId) -> tuple[Pin, memoryview]:
        now = self._clock.now()
        kind = StateKind.of(request.kind)
        pin = self.pins.find(request.stage, kind, request.epoch, request.lineage, now)
        if pin is None or request.name not in pin.views or not pin.uses(peer, now):
            raise Unserved(
                grpc.StatusCode.NOT_FOUND, "no such tensor is held still here: describe first"
            )
        view = pin.views[request.name]
        end = request.offset + request.length
        if not 0 < request.length <= LARGEST or end > len(view):
            raise Unserved(grpc.StatusCode.INVALID_ARGUMENT, f"no such range in {len(view)} bytes")
        return pin, view[request.offset : end]

    async def _given(
        self, request: state_pb2.DescribeRequest, kind: StateKind
    ) -> tuple[Version, Mapping[str, torch.Tensor]] | None:
        """Weights that the run begins from, if they are asked for, are on the disk here and not
        held already; else None. Raises Unserved when they cannot be read."""
        if self._weights is None or kind is not StateKind.BASE:
            return None
        stage = request.stage
        async with self._hashing:  # a request that waited finds what the one before has read
            here = self.pins.find(stage, kind, 0, "", self._clock.now())
            if here or self._provider.describe(stage, kind, 0, ""):
                return None
            # Each is a stage in memory: they go out one after the other.
            if self.pins.others(stage, kind, self._clock.now()):
                raise Unserved(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "another stage is given out, ask again later",
                )
            try:
                return Version(0), await asyncio.to_thread(self._weights, stage)
            except (LocalFault, IndexError) as e:
                raise Unserved(grpc.StatusCode.NOT_FOUND, "cannot be read here") from e

    def _pin(
        self,
        request: state_pb2.DescribeRequest,
        kind: StateKind,
        peer: PeerId,
        given: tuple[Version, Mapping[str, HeldTensor]] | None,
    ) -> Pin:
        now = self._clock.now()
        stage = request.stage
        lineage = request.lineage
        epoch = None
        pin = None
        if not request.any_epoch:
            epoch = request.epoch
            pin = self.pins.find(stage, kind, epoch, lineage, now)
        # Spares of one version come one after the other, so an older snapshot of them may lack
        # some.
        if pin is not None and kind is not StateKind.SPARE:
            self.pins.reads(pin, peer, (), now)
            return pin
        held = given or self._provider.describe(stage, kind, epoch, lineage)
        if held is None:
            raise Unserved(grpc.StatusCode.NOT_FOUND, NOT_HELD)
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(TIDY_S, self._tidy)
        pin = self.pins.hold(PinKey(stage, kind, held[0]), held[1], peer, now)
        if pin is None:
            raise Unserved(grpc.StatusCode.RESOURCE_EXHAUSTED, _BUSY)
        return pin

    def _tidy(self) -> None:
        """Give the memory of snapshots back although no joiner asks again."""
        loop = asyncio.get_running_loop()
        held = self.pins.nbytes
        self.pins.expire(self._clock.now())
        if self.pins.nbytes < held:
            # The pages are needed no more: an epoch's snapshot is beside what training takes.
            loop.run_in_executor(None, give_freed_back)
        self._tidying = None
        if len(self.pins):
            self._tidying = loop.call_later(TIDY_S, self._tidy)

    def close(self) -> None:
        """Forget what others are reading. Afterwards this service holds no state, and no timer
        holds this service."""
        self.pins.clear()
        if self._tidying is not None:
            self._tidying.cancel()
            self._tidying = None

    @asynccontextmanager
    async def _stream(self, context: Any) -> AsyncIterator[PeerId]:
        """Context of the answer to a request; yields the asker. Ends the call if the asker has too
        many requests open here, with the Unserved that is raised within, and if it takes too
        long."""
        peer = self._transport.caller(context)
        try:
            if self._streams[peer] >= STREAMS:
                raise Unserved(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "you have enough requests open here"
                )
            self._streams[peer] += 1
            try:
                yield peer
            finally:
                self._streams[peer] -= 1
                if not self._streams[peer]:
                    del self._streams[peer]
        except Unserved as no:
            await context.abort(no.code, no.reason)
            raise
        except TimeoutError:
            text = "not taken in time, or another peer needs the place"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
            raise
