"""The joiner: fetches the state of one epoch from several donors at once, and checks every part of
it.

A donor's answers are compared, in this order, with facts that this peer already has: names and
shapes (from the manifest of the run) before a byte is allocated, the digest of the stage (from the
plan) with the hashes it is made of, the hash of each piece when it is there. Donors that describe
the same bytes work together, each piece comes from one of them, and a donor that is caught lying is
left out and counted against.

Verified pieces are kept, so that a broken donor, or a restart, costs only the pieces under way.
Pieces of tensors are kept by their hash: a name from another peer is never part of a path, and a
piece on the disk is known to be right because it hashes to its own name.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import torch

from node.checkpoint.description_wait import DescriptionWait, alone_s
from node.checkpoint.errors import NoDonor
from node.checkpoint.files import directory, local_fault, reading
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.state import WIRE, StateKind, StateSnapshot
from node.core.errors import PeerFault, Refused, WireError
from node.core.ids import PeerId
from node.core.journey import Version, lineage
from node.core.numbers import whole
from node.core.tasks import Tasks
from node.transport.port import TransportPort, answers, translate
from node.wire.tensors import (
    HASH,
    compare,
    digest_of,
    encode,
    expected_head,
    hash_of,
    nbytes_of,
    pieces,
)
from protos import state_pb2, state_pb2_grpc

Shapes = Mapping[str, Sequence[int]]
_GONE = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
}
_PIECE = re.compile(r"[0-9a-f]{64}\.(piece|tensor)(\.writing)?")
"""Former versions kept whole tensors, or wrote under another name first."""
_VERSION = "version"
"""File with the epoch and lineage of the pieces beside it."""


@dataclass(frozen=True)
class FetchTimeouts:
    """Seconds, but for ``tries``. ``describe_s``: most for a donor's description; for the first one
    it hashes its whole state, so a small state has less time. ``stall_s``: most without a message
    of any donor; the requests under way share lines, so one alone may wait for long. ``request_s``:
    most for one request, slow lines included. ``tries``: failed requests in a row after which a
    donor is asked for nothing more; each of its parallel requests counts for itself. ``pause_s``:
    pause after a failed request, times the failures in a row. ``again_s``: when nothing else is
    left, time after which a piece is asked of a second donor too.
    """

    describe_s: float = 120.0
    stall_s: float = 15.0
    request_s: float = 300.0
    tries: int = 3
    pause_s: float = 0.2
    again_s: float = 2.0


class Partial:
    """Verified pieces of a state: in memory, and if a ``directory`` is given also there, where they
    survive a restart.

    ``version`` was under way when the last fetch ended early: the next fetch asks for it first. A
    ``lasting`` Partial keeps its pieces on the disk after a fetch too, for a caller that may need
    the same state again. ``writes``: set to False on a full disk, and pieces that come from then on
    are in memory alone; those on the disk are still read, and removed in the end.
    """

    def __init__(self, directory: Path | None = None, *, lasting: bool = False) -> None:
        self.directory = directory
        self.lasting = lasting
        self.writes = True
        self._held: dict[bytes, memoryview] = {}
        self.version = None
        if directory is not None:
            self.version = _version(directory)

    def find(self, hashed: bytes, into: memoryview) -> bool:
        """Put the piece of this hash, exactly as long as ``into``, there; whether it is here.
        ``into`` stays as it is from then on. Blocks on the disk when the piece is not in memory."""
        held = self._held.get(hashed)
        if held is not None and len(held) == len(into):
            into[:] = held
        elif held is not None or self.directory is None or not _read(self.directory, hashed, into):
            return False
        self._held[hashed] = into  # its former buffer is not kept in memory beside this one
        return True

    def keep(self, hashed: bytes, piece: memoryview) -> None:
        """Remember a verified piece, which stays as it is. Blocks on the disk; raises
        OutOfResources when it is full. A file that is torn has another hash than its name says."""
        # Two tensors may have the same piece, and arrive at the same time.
        if self._held.setdefault(hashed, piece) is not piece:
            return
        if self.directory is None or not self.writes:
            return
        path = self.directory / _named(hashed)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # torn, or a link that leads elsewhere
            path.touch(0o600)
            path.write_bytes(piece)
        except OSError as e:
            with contextlib.suppress(OSError):
                path.unlink()
            raise local_fault("keep fetched state", self.directory, e) from e

    def begin(self, version: Version, hashes: Collection[bytes]) -> None:
        """These pieces of a version are wanted now. Blocks on the disk."""
        self.version = version
        self._only(hashes)
        if self.directory is not None and self.writes:
            with contextlib.suppress(OSError):  # without it a restart asks for the newest version
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self.directory / _VERSION
                path.unlink(missing_ok=True)  # a link that leads elsewhere
                path.write_text(f"{version.epoch} {version.lineage}", encoding="utf-8")

    def _only(self, hashes: Collection[bytes]) -> None:
        """Drop all pieces but the wanted state's: pieces of versions that are gone would add up."""
        for hashed in self._held.keys() - hashes:
            del self._held[hashed]
        if self.directory is not None:
            wanted = {_named(hashed) for hashed in hashes}
            with contextlib.suppress(OSError):
                for name in os.listdir(self.directory):
                    if _PIECE.fullmatch(name) and name not in wanted:
                        (self.directory / name).unlink(missing_ok=True)

    def finish(self) -> None:
        """Forget the pieces, as the state is whole; a lasting one keeps its files and forgets only
        memory. Blocks on the disk."""
        if self.lasting:
            self._held.clear()
        else:
            self.clear()

    def clear(self) -> None:
        """Forget everything: the state is whole, or no longer wanted. Files of other makers in the
        directory stay."""
        self._only(())
        self.version = None
        if self.directory is not None:
            with contextlib.suppress(OSError):  # not empty: somebody else keeps files there
                (self.directory / _VERSION).unlink(missing_ok=True)
                self.directory.rmdir()


async def fetch(
    transport: TransportPort,
    donors: Sequence[PeerId],
    stage: int,
    kind: StateKind | str,
    version: Version | None,
    shapes: Shapes,
    *,
    progress: Callable[[int, int], None] | None = None,
    expected_digest: str | None = None,
    settings: CheckpointSettings | None = None,
    partial: Partial | None = None,
    patience: FetchTimeouts | None = None,
    gate: asyncio.Event | None = None,
    most_epoch: int = 1 << 53,
) -> StateSnapshot:
    """Fetch the state of ``stage`` at ``version``, exactly ``shapes``. A version without a lineage
    may be of any history. None: a version that most donors agree on, the newest of these.

    With ``expected_digest`` only that state is accepted. Without it, the state of the largest group
    of donors that agree is taken, so give the digest whenever it is known. ``partial`` keeps
    verified pieces across calls. While ``version`` is None, the version that was under way is asked
    for before any other; on success ``partial`` is cleared, unless it is lasting. With a ``gate``
    each donor gets a request at a time, begun while the gate is set. State of an epoch beyond
    ``most_epoch`` is a fault of its donor. ``progress`` gets the bytes that are here and the bytes
    of the whole state. Raises NoDonor when no donor could give the state, OutOfResources when the
    disk of ``partial`` is full. Donors that lied were reported to ``transport.fault`` with
    weight 1.
    """
    job = _Fetch(
        transport,
        stage,
        StateKind(kind),
        version,
        shapes,
        progress,
        expected_digest,
        settings or CheckpointSettings(),
        partial or Partial(),
        patience or FetchTimeouts(),
        gate,
        most_epoch,
    )
    return await job.run(dict.fromkeys(donors))


@dataclass(eq=False)
class _Piece:
    """One piece under way, and where it belongs. ``asked``: the donor that sends it now, ``since``:
    the time since when it is asked for."""

    name: str
    offset: int
    hashed: bytes
    into: memoryview
    asked: set[PeerId] = field(default_factory=set)
    since: float = 0.0
    there: bool = False


@dataclass(frozen=True)
class _Offer:
    """A donor's description of its state; donors with equal offers are one group."""

    version: Version
    digest: str
    hashes: tuple[tuple[str, bytes], ...]
    """Name and piece hashes of each tensor."""

    def pieces(self) -> set[bytes]:
        """The hash of every piece."""
        each = (hashes for _, hashes in self.hashes)
        return {hashes[at : at + HASH] for hashes in each for at in range(0, len(hashes), HASH)}


_Groups = dict[_Offer, list[PeerId]]


class _Fetch:
    def __init__(
        self,
        transport: TransportPort,
        stage: int,
        kind: StateKind,
        version: Version | None,
        shapes: Shapes,
        progress: Callable[[int, int], None] | None,
        expected: str | None,
        settings: CheckpointSettings,
        partial: Partial,
        patience: FetchTimeouts,
        gate: asyncio.Event | None,
        most_epoch: int,
    ) -> None:
        self.transport = transport
        self.stage = stage
        self.kind = kind
        self.version = version
        self.progress = progress
        self.expected = expected
        self.settings = settings
        self.partial = partial
        self.patience = patience
        self.gate = gate
        self.most_epoch = most_epoch
        self.shapes = {name: tuple(int(d) for d in shape) for name, shape in shapes.items()}
        self.total = sum(nbytes_of(shape, WIRE) for shape in self.shapes.values())
        self.now = asyncio.get_running_loop().time
        self.reasons: dict[PeerId, str] = {}
        self.sources: Counter[PeerId] = Counter()
        self.out: set[PeerId] = set()
        """Donors that are asked for nothing more."""
        self.done_bytes = 0
        self.left: set[_Piece] = set()
        """Pieces of the offer at hand that are not here yet; no donor is asked for the ones in
        ``queue``."""
        self.queue: deque[_Piece] = deque()
        self.changed = asyncio.Event()
        self.reads = dict[asyncio.Timeout, None]()
        """Time limits of the requests that wait for their next message, in the requests' order."""
        self.asks = Tasks("fetch")
        self.asked = dict[asyncio.Task[_Offer | None], PeerId]()

    async def run(self, donors: Iterable[PeerId]) -> StateSnapshot:
        begun = self.partial.version
        try:
            groups = await self._offers(donors)
            while groups:
                offer = max(
                    groups, key=lambda o: (o.version == begun, len(groups[o]), o.version, o.digest)
                )
                await asyncio.to_thread(self.partial.begin, offer.version, offer.pieces())
                tensors = await self._gather(offer, groups)
                if tensors is not None:
                    await asyncio.to_thread(self.partial.finish)
                    return StateSnapshot(offer.version, tensors, dict(self.sources))
        finally:
            await self.asks.close()
        at = ""
        if self.version is not None:
            at = f" at epoch {self.version.epoch}"
        what = f"{self.kind} of stage {self.stage}{at}"
        raise NoDonor(what, self.reasons)

    # Phase 1: who holds what.

    async def _offers(self, donors: Iterable[PeerId]) -> _Groups:
        """Offers of the donors, each with the donors that made it. With an expected digest one
        offer is enough to begin. Without one, waits for an offer that most donors make, or until
        the other donors are late. Donors that answer later are in ``self.asked``."""
        self.asked = {
            self.asks.spawn(self._ask(peer), f"describe {peer[-6:]}"): peer for peer in donors
        }
        groups: _Groups = {}
        began = self.now()
        wait = DescriptionWait(len(self.asked), self.total)
        while self.asked and not (groups and self.expected):
            most_alike = max(map(len, groups.values()), default=0)
            seconds = self.now() - began
            if wait.over(most_alike, seconds):
                break
            left = None
            if groups:
                left = max(0.0, wait.until_s() - seconds)
            done, _ = await asyncio.wait(
                self.asked, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            for task in [t for t in self.asked if t in done]:
                peer = self.asked.pop(task)
                offer = task.result()
                wait.answered(self.now() - began, offer is not None)
                if offer is not None:
                    groups.setdefault(offer, []).append(peer)
        return groups

    async def _ask(self, peer: PeerId) -> _Offer | None:
        begun = None
        if self.version is None:
            begun = self.partial.version
        expected = self.expected
        limit = min(self.patience.describe_s, alone_s(self.total))
        try:
            async with answers(peer, limit):
                offer = None
                if begun is not None:
                    offer = await self._described(peer, begun)
                if offer is None or expected not in (None, offer.digest):
                    offer = await self._described(peer, self.version, must=True)
            if offer is None or expected is None or offer.digest == expected:
                return offer
            raise WireError(
                f"offers digest {offer.digest[:12]} at epoch {offer.version.epoch}, the swarm "
                f"has {expected[:12]}"
            )
        except PeerFault as e:
            self.reasons[peer] = e.reason
        except WireError as e:
            self._lied(peer, str(e))
        return None

    async def _described(
        self, peer: PeerId, version: Version | None, must: bool = False
    ) -> _Offer | None:
        """One donor's offer; None when it has no such state and ``must`` is false. Raises
        AioRpcError, PeerFault, WireError."""
        names = []
        if self.kind is not StateKind.PARAMETERS:
            names = sorted(self.shapes)
        epoch = 0
        lineage = ""
        if version is not None:
            epoch = version.epoch
            lineage = version.lineage
        request = state_pb2.DescribeRequest(
            stage=self.stage,
            kind=self.kind.code,
            epoch=epoch,
            any_epoch=version is None,
            names=names,
            lineage=lineage,
        )
        stub = state_pb2_grpc.StateStub(await self.transport.channel(peer))
        try:
            manifest = await stub.Describe(request, timeout=self.patience.describe_s)
        except grpc.aio.AioRpcError as e:
            if must or e.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return None
        return self._check(manifest, version)

    def _check(self, manifest: state_pb2.StateManifest, asked: Version | None) -> _Offer:
        """Raises WireError for an answer to another question, or for tensors this peer did not
        expect."""
        if manifest.epoch > self.most_epoch:
            raise WireError(f"epoch {manifest.epoch}, and there are {self.most_epoch} at most")
        other = asked is not None and (
            manifest.epoch != asked.epoch or asked.lineage not in ("", manifest.lineage)
        )
        if other or (manifest.stage, manifest.kind) != (self.stage, self.kind.code):
            raise WireError("the answer is about other state than was asked for")
        entries = {t.head.name: t for t in manifest.tensors}
        if len(entries) != len(manifest.tensors) or entries.keys() != self.shapes.keys():
            raise WireError(
                f"{len(manifest.tensors)} tensors described, expected {len(self.shapes)} by their "
                "names"
            )
        for name, shape in self.shapes.items():
            compare(entries[name].head, expected_head(name, shape, WIRE), WIRE)
            if len(entries[name].hashes) != HASH * len(pieces(nbytes_of(shape, WIRE))):
                raise WireError(f"{name} does not have one hash for each piece")
        hashes = tuple((name, entries[name].hashes) for name in sorted(entries))
        if digest_of({n: (self.shapes[n], each) for n, each in hashes}) != manifest.digest:
            raise WireError("its tensors do not have the digest it names")
        return _Offer(Version(manifest.epoch, lineage(manifest.lineage)), manifest.digest, hashes)

    # Phase 2: the bytes, from all who made the same offer.

    async def _gather(self, offer: _Offer, groups: _Groups) -> dict[str, torch.Tensor] | None:
        """Fetch every tensor of the offer and check each piece by its hash; None when the donors
        gave out. Takes the offer out of ``groups``, and adds others that come meanwhile."""
        tensors = {n: torch.empty(self.shapes[n], dtype=torch.float32) for n, _ in offer.hashes}
        found = [
            _Piece(name, at, hashes[HASH * i : HASH * (i + 1)], view[at : at + size])
            for name, hashes in offer.hashes
            for view in [encode(tensors[name], WIRE)]  # the tensor's own memory
            for i, (at, size) in enumerate(pieces(len(view)))
        ]
        find = self.partial.find
        missing = await asyncio.to_thread(lambda: [p for p in found if not find(p.hashed, p.into)])
        self.left = set(missing)
        self.queue = deque(missing)
        self.done_bytes = self.total - sum(len(p.into) for p in missing)
        # Every joiner has its own order of donors, so that they do not all begin with the same one.
        ring = sorted(
            groups.pop(offer),
            key=lambda p: hashlib.sha256(f"{self.transport.peer_id}{p}".encode()).digest(),
        )
        tasks = Tasks("fetch")
        working = set[asyncio.Task[None]]()

        def employ(peers: Sequence[PeerId]) -> None:
            workers = self.settings.fetch_parallel
            if self.gate:
                workers = 1
            for i in range(workers):
                for donor in peers:
                    name = f"worker {i} of {donor[-6:]}"
                    working.add(tasks.spawn(self._worker(offer, donor), name))

        async def awaited(ask: asyncio.Task[_Offer | None], peer: PeerId) -> None:
            if (said := await ask) == offer:
                employ([peer])
            elif said is not None:
                groups.setdefault(said, []).append(peer)

        try:
            employ(ring)
            for ask, peer in self.asked.items():
                working.add(tasks.spawn(awaited(ask, peer), f"answer of {peer[-6:]}"))
            self.asked = {}
            while self.left and working:  # a donor that still sends a piece held by now is cut off
                done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
                working -= done
                for worker in done:
                    worker.result()
        finally:
            await tasks.close()
        if self.left:
            return None
        return tensors

    async def _worker(self, offer: _Offer, donor: PeerId) -> None:
        """One request at a time to one donor, until there is nothing to ask it for."""
        failed = 0  # in a row
        while donor not in self.out and (piece := await self._next(donor)) is not None:
            piece.asked.add(donor)
            piece.since = self.now()
            came = await self._take(offer, piece, donor)
            piece.asked.discard(donor)
            if came:
                failed = 0
            else:
                failed += 1
            if failed >= self.patience.tries:
                self.out.add(donor)
            if not came and not piece.asked and not piece.there:
                self.queue.appendleft(piece)
            self.changed.set()
            self.changed = asyncio.Event()
            if not came and donor not in self.out:
                await asyncio.sleep(self.patience.pause_s * failed)

    async def _next(self, donor: PeerId) -> _Piece | None:
        """A piece that nobody is asked for, else one that keeps another donor busy for long; None
        when all are here."""
        while self.left and donor not in self.out:
            if self.queue:
                return self.queue.popleft()
            slow = [p for p in self.left if len(p.asked) == 1 and donor not in p.asked]
            oldest = min(slow, key=lambda p: (p.since, p.name, p.offset), default=None)
            wait = self.patience.again_s
            if oldest is not None:
                wait -= self.now() - oldest.since
                if wait <= 0:
                    return oldest
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self.changed.wait()
        return None

    async def _take(self, offer: _Offer, piece: _Piece, donor: PeerId) -> bool:
        """Ask one donor for one piece; whether it is here."""
        data = bytearray()
        try:
            await self._request(offer, piece, data, donor)
            if await asyncio.to_thread(hash_of, data) != piece.hashed:
                raise WireError(f"{piece.name} does not have the hash it named")
        except grpc.aio.AioRpcError as e:
            self.reasons[donor] = translate(donor, e).reason
            if e.code() in _GONE:
                self.out.add(donor)
        except (PeerFault, TimeoutError) as e:
            self.reasons[donor] = e.reason if isinstance(e, PeerFault) else "sends nothing"
        except WireError as e:
            self._lied(donor, str(e))
            self.out.add(donor)
        else:
            if not piece.there:
                piece.there = True
                piece.into[:] = data
                await asyncio.to_thread(self.partial.keep, piece.hashed, piece.into)
                self.left.discard(piece)
                self.sources[donor] += len(data)
                return True
        self.done_bytes -= len(data)
        return piece.there

    async def _request(self, offer: _Offer, piece: _Piece, data: bytearray, donor: PeerId) -> None:
        """One piece, appended to ``data``. Raises AioRpcError, PeerFault, TimeoutError,
        WireError."""
        if self.gate is not None:
            await self.gate.wait()
        async with asyncio.timeout(self.patience.stall_s):
            stub = state_pb2_grpc.StateStub(await self.transport.channel(donor))
        call = stub.Fetch(
            state_pb2.FetchRequest(
                stage=self.stage,
                kind=self.kind.code,
                epoch=offer.version.epoch,
                lineage=offer.version.lineage,
                name=piece.name,
                offset=piece.offset,
                length=len(piece.into),
            ),
            timeout=self.patience.request_s,
        )
        try:
            while True:
                async with asyncio.timeout(self.patience.stall_s) as silent:
                    self.reads[silent] = None
                    try:
                        chunk = await call.read()
                    finally:
                        del self.reads[silent]
                if not isinstance(chunk, state_pb2.StateChunk):  # the end of the stream
                    break
                self._accept(piece, data, chunk, donor)
        finally:
            call.cancel()
        if missing := len(piece.into) - len(data):
            raise WireError(f"{piece.name} ended {missing} bytes short of what was asked for")

    def _accept(
        self, piece: _Piece, data: bytearray, chunk: state_pb2.StateChunk, donor: PeerId
    ) -> None:
        size = len(chunk.data)
        at = piece.offset + len(data)
        left = len(piece.into) - len(data)
        if chunk.offset != at or not 0 < size <= left:
            raise WireError(
                f"{size} bytes at {chunk.offset} of {piece.name}, expected at most {left} at {at}"
            )
        data += chunk.data
        # Not at every message: with 192 requests to 48 donors that takes half a millisecond.
        until = self.now() + self.patience.stall_s
        due = until - self.patience.stall_s / 4
        for silent in self.reads:
            if not silent.expired() and (silent.when() or math.inf) < due:
                silent.reschedule(until)
        self.done_bytes += size
        self.transport.count(donor, received=size, plane="state")
        if self.progress is not None:
            self.progress(min(self.done_bytes, self.total), self.total)

    def _lied(self, peer: PeerId, reason: str) -> None:
        self.reasons[peer] = reason
        self.transport.fault(peer, reason, 1.0)


def _named(hashed: bytes) -> str:
    return f"{hashed.hex()}.piece"


def _version(where: Path) -> Version | None:
    """Version of the pieces kept in the directory ``where``, None if it cannot be read."""
    try:
        epoch, _, line = (where / _VERSION).read_text(encoding="utf-8").partition(" ")
        return Version(whole(int(epoch)), lineage(line))
    except (OSError, ValueError):
        return None


def _read(where: Path, hashed: bytes, into: memoryview) -> bool:
    filled = 0
    try:
        with directory(where) as at, reading(_named(hashed), at) as (fd, size):
            if size != len(into):
                return False
            while filled < size and (got := os.preadv(fd, [into[filled:]], filled)):
                filled += got
    except (OSError, Refused):
        return False
    return hash_of(into) == hashed
