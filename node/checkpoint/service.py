"""The donor: answers what this peer holds and streams it to joiners, no faster and to no more of
them than it was told.

The other end is :func:`node.checkpoint.fetch.fetch`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import torch

from node.checkpoint.pins import IDLE_S, Pin, PinKey, Pins
from node.checkpoint.run_file import LARGEST_FILE
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.state import StateKind, StateProvider
from node.core.clock import Clock, SystemClock
from node.core.errors import LocalFault
from node.core.ids import PeerId
from node.core.journey import Version
from node.transport.port import TransportPort
from node.transport.traffic import Share
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
FILES = 4
"""Files of the run given out at once, to all peers together, one to each: each is in memory
meanwhile, and a peer may read slowly."""


class _No(Exception):
    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class StateService(state_pb2_grpc.StateServicer):
    """Serves what ``provider`` holds. Made before the transport starts: it adds itself to the
    transport's server.

    ``on_served(kind, version, name)`` is told of every tensor that has gone out whole to a peer.
    ``weights`` reads the parameters of any stage that the run begins from, where they are on the
    disk here; it may block. ``files`` reads a file of the run by its sha256, None where it is not
    here; it may block.
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
    ) -> None:
        self._transport, self._provider, self._on_served = transport, provider, on_served
        self._clock = clock or SystemClock()
        self.pins = Pins()
        self._weights = weights
        self._files = files
        self._taking: set[PeerId] = set()
        """Peers to which a file is being given out."""
        self._share = Share(settings.max_up)
        self._streams: Counter[PeerId] = Counter()
        self._hashing = asyncio.Lock()
        state_pb2_grpc.add_StateServicer_to_server(self, transport.server)

    async def Describe(
        self, request: state_pb2.DescribeRequest, context: Any
    ) -> state_pb2.StateManifest:
        """Heads and hashes of what is held, and from now on pinned: NOT_FOUND when it is not,
        RESOURCE_EXHAUSTED when busy."""
        async with self._stream(context):
            kind = StateKind.of(request.kind)
            if kind is None or len(request.names) > NAMES:
                raise _No(
                    grpc.StatusCode.INVALID_ARGUMENT, "unknown kind of state, or too many names"
                )
            pin = self._pin(request, kind, await self._given(request, kind))
            names = tuple(sorted(set(request.names) or pin.tensors))
            if not pin.tensors.keys() >= set(names):
                raise _No(grpc.StatusCode.NOT_FOUND, "not all of these tensors are held here")
            async with self._hashing:  # one core at most goes to joiners
                manifest = await asyncio.to_thread(pin.describe, names)
            pin.used = self._clock.now()
            return manifest

    async def Fetch(
        self, request: state_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[state_pb2.StateChunk]:
        """A byte range of one tensor of a pinned snapshot, in order."""
        async with self._stream(context) as peer:
            pin, view = self._range(request)
            pin.readers += 1
            try:
                for at in range(0, len(view), MESSAGE):
                    data = bytes(view[at : at + MESSAGE])
                    await self._share.take(peer, len(data))
                    yield state_pb2.StateChunk(offset=request.offset + at, data=data)
                    pin.used = self._clock.now()  # in use: does not expire under its reader
                    self._transport.count(peer, sent=len(data), plane="state")
                # The pieces of a tensor are asked for in any order.
                pin.given[peer, request.name] += request.length
                if pin.given[peer, request.name] >= len(pin.views[request.name]):
                    del pin.given[peer, request.name]
                    self._on_served(pin.key.kind, pin.key.version, request.name)
            finally:
                pin.readers -= 1

    async def List(self, request: state_pb2.ListRequest, context: Any) -> state_pb2.StateList:
        """Parts there is optimizer state of here, with the version each is of. Pins nothing."""
        async with self._stream(context):
            kind = StateKind.of(request.kind)
            if kind is None or kind not in (StateKind.OPTIMIZER, StateKind.SPARE):
                raise _No(
                    grpc.StatusCode.INVALID_ARGUMENT, "there are no parts of this kind of state"
                )
            held = sorted(self._provider.listing(request.stage, kind).items())[:NAMES]
            return state_pb2.StateList(
                parts=[
                    state_pb2.PartVersion(name=name, epoch=v.epoch, lineage=v.lineage)
                    for name, v in held
                ]
            )

    async def File(
        self, request: state_pb2.FileRequest, context: Any
    ) -> AsyncIterator[state_pb2.StateChunk]:
        """A file that the manifest names by its hash, from an offset to its end: NOT_FOUND when it
        is not here, RESOURCE_EXHAUSTED when busy."""
        async with self._stream(context) as peer:
            if peer in self._taking or len(self._taking) >= FILES:
                raise _No(grpc.StatusCode.RESOURCE_EXHAUSTED, "files are given out, ask again")
            self._taking.add(peer)
            try:
                data = await self._file(request.sha256)
                if request.offset > len(data):
                    raise _No(grpc.StatusCode.INVALID_ARGUMENT, f"it has {len(data)} bytes")
                for at in range(request.offset, len(data), MESSAGE):
                    piece = data[at : at + MESSAGE]
                    await self._share.take(peer, len(piece))
                    yield state_pb2.StateChunk(offset=at, data=piece)
                    self._transport.count(peer, sent=len(piece), plane="state")
            finally:
                self._taking.discard(peer)

    async def _file(self, sha256: str) -> bytes:
        """The bytes of a file of the run. Raises _No where it is not here."""
        data = None
        if self._files is not None and sha256:
            try:
                data = await asyncio.to_thread(self._files, sha256)
            except LocalFault as e:
                raise _No(grpc.StatusCode.NOT_FOUND, "cannot be read here") from e
        if data is None or len(data) > LARGEST_FILE:
            raise _No(grpc.StatusCode.NOT_FOUND, "not held here")
        return data

    def _range(self, request: state_pb2.FetchRequest) -> tuple[Pin, memoryview]:
        now, kind = self._clock.now(), StateKind.of(request.kind)
        pin = self.pins.find(request.stage, kind, request.epoch, request.lineage, now)
        if pin is None or request.name not in pin.views:
            raise _No(
                grpc.StatusCode.NOT_FOUND, "no such tensor is held still here: describe first"
            )
        view, end = pin.views[request.name], request.offset + request.length
        if not 0 < request.length <= LARGEST or end > len(view):
            raise _No(grpc.StatusCode.INVALID_ARGUMENT, f"no such range in {len(view)} bytes")
        return pin, view[request.offset : end]

    async def _given(
        self, request: state_pb2.DescribeRequest, kind: StateKind
    ) -> tuple[Version, Mapping[str, torch.Tensor]] | None:
        """What the run begins from, where that is asked for, is on the disk here and not held
        already. Raises _No when it cannot be read."""
        if self._weights is None or kind is not StateKind.BASE:
            return None
        stage = request.stage
        async with self._hashing:  # a request that waited finds what the one before has read
            here = self.pins.find(stage, kind, 0, "", self._clock.now())
            if here or self._provider.describe(stage, kind, 0, ""):
                return None
            # Each is a stage in memory: they go out one after the other.
            if self.pins.others(stage, kind, self._clock.now()):
                raise _No(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "another stage is given out, ask again later",
                )
            try:
                return Version(0), await asyncio.to_thread(self._weights, stage)
            except (LocalFault, IndexError) as e:
                raise _No(grpc.StatusCode.NOT_FOUND, "cannot be read here") from e

    def _pin(
        self,
        request: state_pb2.DescribeRequest,
        kind: StateKind,
        given: tuple[Version, Mapping[str, torch.Tensor]] | None,
    ) -> Pin:
        now, stage, lineage = self._clock.now(), request.stage, request.lineage
        epoch = None if request.any_epoch else request.epoch
        pin = None if epoch is None else self.pins.find(stage, kind, epoch, lineage, now)
        # Spares of one version come one after the other, so an older snapshot of them may lack
        # some.
        if pin is not None and kind is not StateKind.SPARE:
            return pin
        held = given or self._provider.describe(stage, kind, epoch, lineage)
        if held is None:
            raise _No(grpc.StatusCode.NOT_FOUND, "not held here")
        if not len(self.pins):
            asyncio.get_running_loop().call_later(IDLE_S, self._tidy)
        pin = self.pins.hold(PinKey(stage, kind, held[0]), held[1], now)
        if pin is None:
            raise _No(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "all snapshots are in use, try again later"
            )
        return pin

    def _tidy(self) -> None:
        """An epoch's memory is given back although no joiner asks again."""
        self.pins.expire(self._clock.now())
        if len(self.pins):
            asyncio.get_running_loop().call_later(IDLE_S, self._tidy)

    @asynccontextmanager
    async def _stream(self, context: Any) -> AsyncIterator[PeerId]:
        """Around the answer to a request, with who asks; ends the call for who has too many open
        here, and with the _No that is raised within."""
        peer = self._transport.caller(context)
        try:
            if self._streams[peer] >= STREAMS:
                raise _No(grpc.StatusCode.RESOURCE_EXHAUSTED, "you have enough requests open here")
            self._streams[peer] += 1
            try:
                yield peer
            finally:
                self._streams[peer] -= 1
                if not self._streams[peer]:
                    del self._streams[peer]
        except _No as no:
            await context.abort(no.code, no.reason)
            raise
