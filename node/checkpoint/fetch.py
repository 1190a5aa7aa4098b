"""The joiner: state of one epoch from several donors at once, believed only as far as it can be
checked.

What a donor says is compared, in this order, with what this peer already knows: names and shapes
(from the manifest of the run) before a byte is allocated, the hash of each tensor when it is there,
the digest of the stage (from the plan) when all are. Donors that describe the same bytes work
together; one that is caught is left out and counted against. A whole tensor comes from one donor if
possible, so that a wrong hash has one author.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc.aio
import torch

from node.checkpoint.partial import Partial
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.state import WIRE, NoDonor, StateKind, StateSnapshot
from node.core.clock import Clock, SystemClock
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.journey import Version, lineage
from node.core.tasks import Tasks
from node.transport.port import TransportPort, translate
from node.wire.tensors import compare, digest, encode, expected_head, nbytes_of
from protos import state_pb2, state_pb2_grpc

Progress = Callable[[int, int, float, PeerId], None]
"""``(bytes_done, bytes_total, bytes per second since the start, donor of the last bytes)``."""

Shapes = Mapping[str, Sequence[int]]
_HEX = re.compile(r"[0-9a-f]{64}")
_GONE = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
}


@dataclass(frozen=True)
class FetchTimeouts:
    """Seconds. ``describe_s``: a donor hashes its whole state for the first who asks. ``stall_s``:
    between two messages. ``request_s``: one request, slow lines included. ``tries``: failures in a
    row that end a donor's turn."""

    describe_s: float = 120.0
    stall_s: float = 15.0
    request_s: float = 300.0
    tries: int = 3
    pause_s: float = 0.2


async def fetch(
    transport: TransportPort,
    donors: Sequence[PeerId],
    stage: int,
    kind: StateKind | str,
    epoch: int | None,
    shapes: Shapes,
    progress: Progress | None = None,
    *,
    lineage: str = "",
    expected_digest: str | None = None,
    settings: CheckpointSettings | None = None,
    partial: Partial | None = None,
    clock: Clock | None = None,
    patience: FetchTimeouts | None = None,
    gate: asyncio.Event | None = None,
) -> StateSnapshot:
    """The state of ``stage`` at ``epoch`` (None: one that most donors agree on, the newest of
    these), exactly ``shapes``.

    ``lineage`` names the history of ``epoch``, "" stands for any. With ``expected_digest`` only
    that state is accepted. Without, the word of the largest group of donors that agree is taken, so
    give it whenever it is known. ``partial`` keeps what is verified across calls, and while
    ``epoch`` is None the version that was under way is asked for before any other; it is cleared on
    success. No request begins while ``gate`` is not set. Raises NoDonor when the state could not be
    had from anybody, OutOfResources when the disk of ``partial`` is full. Donors that lied were
    reported to ``transport.fault`` with weight 1.
    """
    job = _Fetch(
        transport,
        stage,
        StateKind(kind),
        shapes,
        settings or CheckpointSettings(),
        partial or Partial(),
    )
    job.progress, job.clock, job.patience, job.gate = (
        progress,
        clock or SystemClock(),
        patience or FetchTimeouts(),
        gate,
    )
    job.lineage = lineage
    return await job.run(dict.fromkeys(donors), epoch, expected_digest)


@dataclass
class _Wanted:
    """One tensor under way. ``sources`` gave the first ``filled`` bytes of ``view``."""

    name: str
    sha256: str
    shape: tuple[int, ...]
    nbytes: int
    tensor: torch.Tensor | None = None
    view: memoryview = field(default_factory=lambda: memoryview(b""))
    filled: int = 0
    sources: set[PeerId] = field(default_factory=set)
    alone: bool = False  # mixed bytes did not hash: take it from one donor only

    def open(self) -> memoryview:
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=torch.float32)
            self.view = encode(self.tensor, WIRE)  # the tensor's own memory
        return self.view

    def restart(self) -> None:
        self.filled = 0
        self.sources.clear()


@dataclass
class _Donor:
    peer: PeerId
    active: int = 0
    failed: int = 0  # in a row
    out: bool = False


@dataclass(frozen=True)
class _Offer:
    """What a donor says it holds; donors with equal offers are one group."""

    version: Version
    digest: str
    hashes: tuple[tuple[str, str], ...]


class _Fetch:
    def __init__(
        self,
        transport: TransportPort,
        stage: int,
        kind: StateKind,
        shapes: Shapes,
        settings: CheckpointSettings,
        partial: Partial,
    ) -> None:
        self.transport, self.stage, self.kind, self.settings, self.partial = (
            transport,
            stage,
            kind,
            settings,
            partial,
        )
        self.shapes = {name: tuple(int(d) for d in shape) for name, shape in shapes.items()}
        self.total = sum(nbytes_of(shape, WIRE) for shape in self.shapes.values())
        self.progress: Progress | None = None
        self.gate: asyncio.Event | None = None
        self.lineage = ""
        self.clock: Clock = SystemClock()
        self.patience = FetchTimeouts()
        self.reasons: dict[PeerId, str] = {}
        self.sources: Counter[PeerId] = Counter()
        self.done_bytes = 0
        self.began = 0.0
        self.came = 0

    async def run(
        self, donors: Mapping[PeerId, None], epoch: int | None, expected: str | None
    ) -> StateSnapshot:
        what = f"{self.kind} of stage {self.stage}" + (
            "" if epoch is None else f" at epoch {epoch}"
        )
        self.began = self.clock.now()
        groups = await self._offers(list(donors), epoch, expected)
        begun = self.partial.version
        order = sorted(
            groups,
            key=lambda o: (o.version == begun, len(groups[o]), o.version, o.digest),
            reverse=True,
        )
        for offer in order:
            self.partial.version = offer.version
            await asyncio.to_thread(self.partial.only, {sha256 for _, sha256 in offer.hashes})
            tensors = await self._gather(offer, groups[offer])
            if tensors is None:
                continue
            if await asyncio.to_thread(digest, tensors) == offer.digest:
                await asyncio.to_thread(self.partial.clear)
                version = offer.version
                return StateSnapshot(
                    version.epoch, tensors, offer.digest, dict(self.sources), version.lineage
                )
            # Every tensor had the hash that was claimed for it: the claim itself is false, and all
            # of the group made it.
            others = {pair for other in groups if other != offer for pair in other.hashes}
            for _, sha256 in set(offer.hashes) - others:
                self.partial.forget(sha256)
            for peer in groups[offer]:
                self._lied(peer, "its tensors do not have the digest it names")
        raise NoDonor(what, self.reasons)

    # Phase 1: who holds what.

    async def _offers(
        self, donors: list[PeerId], epoch: int | None, expected: str | None
    ) -> dict[_Offer, list[PeerId]]:
        tasks, groups = Tasks("fetch"), defaultdict[_Offer, list[PeerId]](list)
        try:
            asked = [
                (peer, tasks.spawn(self._ask(peer, epoch, expected), f"describe {peer[-6:]}"))
                for peer in donors
            ]
            for peer, task in asked:
                if (offer := await task) is not None:
                    groups[offer].append(peer)
        finally:
            await tasks.close()
        return groups

    async def _ask(self, peer: PeerId, epoch: int | None, expected: str | None) -> _Offer | None:
        begun = self.partial.version if epoch is None else None
        try:
            async with asyncio.timeout(self.patience.describe_s):
                offer = (
                    None
                    if begun is None
                    else await self._described(peer, begun.epoch, begun.lineage)
                )
                if offer is None or expected not in (None, offer.digest):
                    offer = await self._described(peer, epoch, self.lineage, must=True)
        except grpc.aio.AioRpcError as e:
            self._failed(translate(peer, e))
        except TimeoutError:
            self._failed(PeerFault(peer, "no answer in time"))
        except PeerFault as e:
            self._failed(e)
        except WireError as e:
            self._lied(peer, str(e))
        else:
            if offer is None or expected is None or offer.digest == expected:
                return offer
            said = (
                f"offers digest {offer.digest[:12]} at epoch {offer.version.epoch}, the swarm "
                f"has {expected[:12]}"
            )
            self._lied(peer, said)
        return None

    async def _described(
        self, peer: PeerId, epoch: int | None, history: str, must: bool = False
    ) -> _Offer | None:
        """One donor's offer; None when it has no such state and ``must`` it not. Raises
        AioRpcError, PeerFault, WireError."""
        names = [] if self.kind is StateKind.PARAMETERS else sorted(self.shapes)
        request = state_pb2.DescribeRequest(
            stage=self.stage,
            kind=self.kind.code,
            epoch=epoch or 0,
            any_epoch=epoch is None,
            names=names,
            lineage=history,
        )
        stub = state_pb2_grpc.StateStub(await self.transport.channel(peer))
        try:
            manifest = await stub.Describe(request, timeout=self.patience.describe_s)
        except grpc.aio.AioRpcError as e:
            if must or e.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return None
        return self._check(manifest, epoch, history)

    def _check(self, manifest: state_pb2.StateManifest, epoch: int | None, history: str) -> _Offer:
        """Raises WireError for an answer to another question, or for tensors this peer did not
        expect."""
        same = (manifest.stage, manifest.kind) == (self.stage, self.kind.code) and epoch in (
            None,
            manifest.epoch,
        )
        if not same or history not in ("", manifest.lineage):
            raise WireError("the answer is about other state than was asked for")
        entries = {t.head.name: t for t in manifest.tensors}
        if len(entries) != len(manifest.tensors) or entries.keys() != self.shapes.keys():
            raise WireError(
                f"{len(manifest.tensors)} tensors described, expected {len(self.shapes)} by their "
                "names"
            )
        for name, shape in self.shapes.items():
            compare(entries[name].head, expected_head(name, shape, WIRE), WIRE)
        hashes = tuple((name, entries[name].sha256) for name in sorted(entries))
        if any(
            _HEX.fullmatch(text) is None
            for text in (manifest.digest, *(sha256 for _, sha256 in hashes))
        ):
            raise WireError("a hash is not a hex sha256")
        try:
            return _Offer(
                Version(manifest.epoch, lineage(manifest.lineage)), manifest.digest, hashes
            )
        except ValueError as e:
            raise WireError(str(e)) from e

    # Phase 2: the bytes, from all who made the same offer.

    async def _gather(self, offer: _Offer, peers: list[PeerId]) -> dict[str, torch.Tensor] | None:
        """Every tensor of the offer, each with its hash; None when the donors gave out."""
        have: dict[str, torch.Tensor] = {}
        wanted: list[_Wanted] = []
        for name, sha256 in offer.hashes:
            shape = self.shapes[name]
            if (found := await asyncio.to_thread(self.partial.find, sha256, shape)) is not None:
                have[name] = found
            else:
                wanted.append(_Wanted(name, sha256, shape, nbytes_of(shape, WIRE)))
        self.done_bytes = self.total - sum(w.nbytes for w in wanted)
        wanted.sort(key=lambda w: w.nbytes)  # taken from the end: largest first
        # Every joiner has its own order of donors, so that they do not all begin with the same one.
        ring = sorted(
            peers, key=lambda p: hashlib.sha256(f"{self.transport.peer_id}{p}".encode()).digest()
        )
        donors = [_Donor(peer) for peer in ring]
        tasks = Tasks("fetch")
        try:
            workers = [
                tasks.spawn(self._worker(offer, wanted, have, donors), f"worker {i}")
                for i in range(max(1, self.settings.fetch_parallel))
            ]
            for worker in workers:
                await worker
        finally:
            await tasks.close()
        return have if len(have) == len(self.shapes) else None

    async def _worker(
        self,
        offer: _Offer,
        wanted: list[_Wanted],
        have: dict[str, torch.Tensor],
        donors: list[_Donor],
    ) -> None:
        while wanted and (
            donor := min((d for d in donors if not d.out), key=lambda d: d.active, default=None)
        ):
            want = wanted.pop()
            donor.active += 1
            try:
                finished = await self._take(offer, want, donor)
            finally:
                donor.active -= 1
            if finished and want.tensor is not None:
                await asyncio.to_thread(self.partial.keep, want.sha256, want.tensor)
                have[want.name] = want.tensor
            else:
                wanted.append(want)
                await asyncio.sleep(0 if donor.out else self.patience.pause_s * donor.failed)

    async def _take(self, offer: _Offer, want: _Wanted, donor: _Donor) -> bool:
        """Go on with one tensor at one donor, until it is whole and right (True) or the donor
        failed (False)."""
        if want.alone and want.sources - {donor.peer}:
            self._drop(want)
        try:
            view = want.open()
            while want.filled < want.nbytes:
                await self._request(offer, want, view, donor)
                donor.failed = 0
        except grpc.aio.AioRpcError as e:
            self._failed(translate(donor.peer, e))
            donor.failed += 1
            donor.out = e.code() in _GONE or donor.failed >= self.patience.tries
            return False
        except (PeerFault, TimeoutError) as e:
            self._failed(e if isinstance(e, PeerFault) else PeerFault(donor.peer, "sends nothing"))
            donor.failed += 1
            donor.out = donor.failed >= self.patience.tries
            return False
        except WireError as e:
            self._lied(donor.peer, str(e))
            donor.out = True
            return False
        return await self._verify(want, donor)

    async def _request(self, offer: _Offer, want: _Wanted, view: memoryview, donor: _Donor) -> None:
        """One range. What arrived before an error stays. Raises AioRpcError, PeerFault,
        TimeoutError, WireError."""
        if self.gate is not None:
            await self.gate.wait()
        end = min(want.filled + max(1, self.settings.fetch_chunk), want.nbytes)
        async with asyncio.timeout(self.patience.stall_s):
            stub = state_pb2_grpc.StateStub(await self.transport.channel(donor.peer))
        call = stub.Fetch(
            state_pb2.FetchRequest(
                stage=self.stage,
                kind=self.kind.code,
                epoch=offer.version.epoch,
                lineage=offer.version.lineage,
                name=want.name,
                offset=want.filled,
                length=end - want.filled,
            ),
            timeout=self.patience.request_s,
        )
        try:
            while True:
                async with asyncio.timeout(self.patience.stall_s):
                    chunk = await call.read()
                if not isinstance(chunk, state_pb2.StateChunk):  # the end of the stream
                    break
                self._accept(want, view, chunk, end, donor)
        finally:
            call.cancel()
        if want.filled < end:
            raise WireError(
                f"{want.name} ended {end - want.filled} bytes short of what was asked for"
            )

    def _accept(
        self, want: _Wanted, view: memoryview, chunk: state_pb2.StateChunk, end: int, donor: _Donor
    ) -> None:
        size = len(chunk.data)
        if chunk.offset != want.filled or not 0 < size <= end - want.filled:
            raise WireError(
                f"{size} bytes at {chunk.offset} of {want.name}, expected at most "
                f"{end - want.filled} at {want.filled}"
            )
        view[want.filled : want.filled + size] = chunk.data
        want.filled += size
        want.sources.add(donor.peer)
        self.sources[donor.peer] += size
        self.done_bytes += size
        self.came += size
        self.transport.count(donor.peer, received=size, plane="state")
        if self.progress is not None:
            rate = self.came / max(self.clock.now() - self.began, 1e-3)
            self.progress(self.done_bytes, self.total, rate, donor.peer)

    async def _verify(self, want: _Wanted, donor: _Donor) -> bool:
        found = await asyncio.to_thread(lambda: hashlib.sha256(want.view).hexdigest())
        if found == want.sha256:
            return True
        if len(want.sources) <= 1:
            self._lied(donor.peer, f"{want.name} does not have the hash it named")
            donor.out = True
        want.alone = True  # several authors: nobody can be blamed, the next attempt has one
        self._drop(want)
        return False

    def _drop(self, want: _Wanted) -> None:
        self.done_bytes -= want.filled
        want.restart()

    def _failed(self, fault: PeerFault) -> None:
        self.reasons[fault.peer] = fault.reason

    def _lied(self, peer: PeerId, reason: str) -> None:
        self.reasons[peer] = reason
        self.transport.fault(peer, reason, 1.0)
