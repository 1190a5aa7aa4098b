"""Carries the frames that the machine sends, with their two receipts, questions for an input, and
notes to and from an origin."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.journey import Hop
from node.pipeline import events as ev
from node.pipeline.events import Claim, Direction, Key, Trouble
from node.pipeline.frames import FrameReader, frames
from node.pipeline.hops.base import PipelineBase
from node.pipeline.route import beside
from node.transport.port import EOF, answers, printable
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import PipelineStub

WAITED = 0.5
"""Share of the time to ACCEPTED. If the receiver waited longer than that, much of the tensor had
arrived meanwhile, and the rest of the time says little about the connection."""
PATIENT = 32
"""Number of attempts under way up to which an attempt waits for room: each is a call that stays
open, and a peer takes ``transport.peer_streams`` calls from another, of which its leader needs
some."""
NOTE_TRIES = 3
"""Tries to tell a hop that its share counts: if the note does not arrive the share is lost, which
is worth a retry and not a long wait."""
NOTE_PAUSE_S = 0.2
"""Seconds between two of these tries."""


Ended = tuple[Trouble | None, str]
"""End of a stream: (None, "") for DONE, else the trouble and its reason."""


class AlreadyThere(PeerFault):
    """The peer has the gradient of the activation we asked for."""


class Sender:
    """The sending half of the service. One attempt for each visit and direction is under way at a
    time. Every call ends within ``hop_s``."""

    def __init__(self, pipeline: PipelineBase) -> None:
        self._pipeline = pipeline
        self._sending: dict[tuple[Key, Direction], asyncio.Task[None] | asyncio.TimerHandle] = {}
        self._names: dict[PeerId, list[int]] = {}
        self._naming: set[PeerId] = set()
        self._asking: dict[PeerId, set[asyncio.Timeout]] = {}

    def forget(self) -> None:
        """Another plan is in force."""
        self._names.clear()

    def gone(self, peer: PeerId) -> None:
        """``peer`` is dead: inputs that were asked of it are asked of another peer. (The machine
        sends frames anew.)"""
        for patience in self._asking.pop(peer, ()):
            patience.reschedule(asyncio.get_running_loop().time())

    def send(self, action: ev.Send) -> None:
        """Start an attempt in place of the one that may be under way."""
        attempt = self._pipeline.tasks.spawn(self._send(action), "send")
        self.cancel(action.key, action.way)
        self._sending[action.key, action.way] = attempt

    def later(self, key: Key, way: Direction, seconds: float) -> None:
        """Ask the machine again after a pause."""
        self.cancel(key, way)
        self._sending[key, way] = asyncio.get_running_loop().call_later(
            seconds, self._retry, key, way
        )

    def cancel(self, key: Key, way: Direction) -> None:
        """End the attempt under way."""
        if (task := self._sending.pop((key, way), None)) is not None:
            task.cancel()

    def _retry(self, key: Key, way: Direction) -> None:
        pipeline = self._pipeline
        self._sending.pop((key, way), None)
        work = pipeline.stash.get(key)
        if work is not None:
            pipeline.driver.handle(
                ev.Expired(key) if work.deadline < pipeline.clock.now() else ev.Retry(key, way)
            )

    async def _send(self, action: ev.Send) -> None:
        pipeline = self._pipeline
        key = action.key
        way = action.way
        peer = action.peer
        work = pipeline.stash.get(key)
        plan = pipeline.machine.plan
        if work is None or plan is None:
            return
        buffer = work.output if way is Direction.FORWARD else work.upstream
        if buffer is None:
            return
        claim = Claim(key.epoch, plan.hash, key.index, action.journey, action.position)
        began = pipeline.clock.now()
        messages = frames(
            claim,
            pb.TRAIN,
            work.deadline - began,
            work.shape,
            buffer,
            pipeline.shape,
            work.document_ends if way is Direction.FORWARD else (),
            action.patient and len(self._sending) <= PATIENT,
            untrained=work.untrained if way is Direction.FORWARD else 0,
            wire=work.wires.get(way, ""),
        )
        whole = pipeline.shape.nbytes(work.shape[0], work.shape[1]) / max(1, len(buffer))

        def accepted(seconds: float | None) -> None:
            pipeline.timing.sent(peer, seconds, pipeline.clock.now(), whole)
            wire = work.wires.get(way, pipeline.shape.wire)
            pipeline.rounding.sent(peer, wire, work.errors.pop(way, None))
            if pipeline.machine.plan is plan:
                pipeline.driver.handle(ev.Passed(key, way, peer))

        trouble, reason = await self.stream(peer, way, messages, len(buffer), accepted)
        if pipeline.machine.plan is not plan:
            return
        # this task is at its end; the next attempt must not cancel it
        self._sending.pop((key, way), None)
        if trouble is None:
            self._measure(claim.journey[action.position], began)
            pipeline.driver.handle(ev.Settled(key, way, peer))
            return
        pipeline.telemetry.emit(
            "hop-turned",
            f"{way.value} not done: {reason}",
            "debug",
            peer=peer,
            index=key.index,
            trouble=trouble.value,
        )
        pipeline.driver.handle(ev.Turned(key, way, peer, trouble))

    def _measure(self, hop: Hop, began: float) -> None:
        timing = self._pipeline.timing
        machine = self._pipeline.machine
        timing.observe(hop.peer, began, self._pipeline.clock.now())
        siblings = machine.replicas(hop.stage)
        machine.suspects.slow = machine.suspects.slow - set(siblings) | timing.slow(siblings)

    async def stream(
        self,
        peer: PeerId,
        way: Direction,
        messages: Iterable[pb.Frame],
        nbytes: int,
        accepted: Callable[[float | None], None],
    ) -> Ended:
        """Stream one frame and wait for DONE; ``accepted`` is called at ACCEPTED with the seconds
        that the transfer took, None where that is not known. Never raises for the peer's
        failures."""
        name = "Forward" if way is Direction.FORWARD else "Backward"
        try:
            async with self._call(peer, name, messages) as call:
                return await self._receipts(peer, call, nbytes, accepted)
        except PeerFault as e:
            return Trouble.FAILED, e.reason

    @asynccontextmanager
    async def _call(self, peer: PeerId, name: str, request: object) -> AsyncIterator[Any]:
        """A context manager around one call, which ends with the block. Raises AlreadyThere and
        PeerFault."""
        transport = self._pipeline.transport
        call = None
        async with answers(peer, self._pipeline.deadlines.hop_s):
            try:
                stub = PipelineStub(await transport.channel(peer))
                call = getattr(stub, name)(request)
                yield call
            except grpc.aio.AioRpcError as e:
                if e.code() is grpc.StatusCode.UNAVAILABLE:
                    transport.forget(peer)
                if e.code() is grpc.StatusCode.ALREADY_EXISTS:
                    raise AlreadyThere(peer, "the gradient is there") from e
                raise
            finally:
                if call is not None and not call.done():
                    call.cancel()

    async def _receipts(
        self, peer: PeerId, call: Any, nbytes: int, accepted: Callable[[float | None], None]
    ) -> Ended:
        pipeline = self._pipeline
        held = False
        began = pipeline.clock.now()
        while True:
            receipt = await call.read()
            if receipt is EOF:
                # A receiver ends its stream in good order only after DONE; that receipt may be lost
                # when both come at once.
                return (None, "") if held else (Trouble.FAILED, "no receipt")
            match receipt.verdict:
                case pb.ACCEPTED:
                    held = True
                    took = pipeline.clock.now() - began
                    pipeline.telemetry.spent("wire", took)
                    pipeline.transport.count(peer, sent=nbytes, plane="pipeline")
                    waited = receipt.waited_s > WAITED * took
                    accepted(None if waited else took - max(0.0, receipt.waited_s))
                case pb.DONE:
                    return None, ""
                case pb.BUSY:
                    return Trouble.BUSY, printable(receipt.reason)
                case pb.REFUSED:
                    return Trouble.REFUSED, printable(receipt.reason)
                case _:
                    pipeline.transport.fault(peer, "unknown verdict", 1.0)
                    return Trouble.REFUSED, "unknown verdict"

    async def fetch(self, action: ev.Fetch) -> None:
        """Get the input of a visit that takes a dead replica's place."""
        pipeline = self._pipeline
        key = action.key
        work = pipeline.stash.get(key)
        plan = pipeline.machine.plan
        settled = False
        for peer in action.peers:
            if work is None or plan is None or pipeline.stash.get(key) is not work:
                return
            try:
                reader = await self._ask(peer, key, action.skipped, plan.hash)
            except AlreadyThere:
                settled = True
                break
            except WireError as e:
                pipeline.transport.fault(peer, str(e), 1.0)
            except PeerFault as e:
                pipeline.telemetry.emit("fetch-failed", str(e), "debug", peer=peer, index=key.index)
            else:
                if pipeline.stash.get(key) is not work:
                    return
                journey = pipeline.machine.visits[key].journey
                stage = journey[beside(journey, key.position, Direction.BACKWARD)].stage
                if pipeline.guard.objection(Direction.FORWARD, stage, peer, key.index, reader):
                    continue
                work.input = reader if work.y is None and work.x is None else work.input
                pipeline.driver.handle(ev.Fetched(key, peer))
                return
        if pipeline.stash.get(key) is work:
            pipeline.driver.handle(ev.NotFetched(key, settled))

    async def _ask(
        self, peer: PeerId, key: Key, skipped: tuple[int, ...], plan_hash: str
    ) -> FrameReader:
        """The input of ``key`` from the hop before it. Raises AlreadyThere, PeerFault, or WireError
        for a bad tensor."""
        pipeline = self._pipeline
        if peer in pipeline.machine.suspects.gone:
            raise PeerFault(peer, "it is dead")
        shape = pipeline.planned.shape_of(key.index)
        masked = pipeline.shape.masked
        loss_mask = pipeline.shape.loss_mask
        giver = max(at for at in range(key.position) if at not in skipped)
        wire = pipeline.planned.wire_of(key.index, giver, Direction.FORWARD)
        request = pb.FetchInput(
            epoch=key.epoch,
            plan_hash=plan_hash,
            index=key.index,
            position=key.position,
            skipped=skipped,
        )
        asking = self._asking.setdefault(peer, set())
        patience = asyncio.timeout(None)
        asking.add(patience)
        try:
            async with patience, self._call(peer, "Fetch", request) as call:
                first = await call.read()
                if first is EOF or first.WhichOneof("part") != "head":
                    raise WireError("no head")
                return await pipeline.intake.read(
                    peer, first.head, shape, masked, call.read, loss_mask=loss_mask, wire=wire
                )
        except TimeoutError as e:
            raise PeerFault(peer, "it has died") from e
        finally:
            asking.discard(patience)

    async def tell_origin(self, key: Key, origin: PeerId, reason: str) -> None:
        """Tell the origin that nobody can finish this micro-batch. An origin that does not hear it
        finds out by its own time-out."""
        pipeline = self._pipeline
        plan = self._pipeline.machine.plan
        pipeline.telemetry.emit("micro-batch-lost", reason, "warning", index=key.index)
        if plan is not None:
            note = pb.LostNote(
                epoch=key.epoch, plan_hash=plan.hash, index=key.index, reason=reason[:200]
            )
            try:
                await self._tell(origin, "Lost", note)
            except PeerFault as e:
                pipeline.telemetry.emit("origin-silent", str(e), "debug", index=key.index)

    async def tell_text_lost(self, origin: PeerId, index: int, reason: str) -> None:
        """Tell the origin of a text that it cannot go on here. An origin that does not hear it
        finds out by its own time-out."""
        note = pb.LostNote(index=index, reason=reason[:200], purpose=pb.GENERATE)
        try:
            await self._tell(origin, "Lost", note)
        except PeerFault as e:
            self._pipeline.telemetry.emit("origin-silent", str(e), "debug", index=index)

    def tell_counted(self, index: int, peers: tuple[PeerId, ...]) -> None:
        """Tell the hops that their shares of a micro-batch count. One note to a peer is under way
        at a time; further names for it travel together in the next note."""
        for peer in peers:
            self._names.setdefault(peer, []).append(index)
            if peer not in self._naming:
                self._naming.add(peer)
                self._pipeline.tasks.spawn(self._name(peer), "counted")

    async def _name(self, peer: PeerId) -> None:
        pipeline = self._pipeline
        try:
            while (plan := pipeline.machine.plan) is not None and (
                indices := self._names.pop(peer, None)
            ):
                note = pb.CountedNote(epoch=plan.epoch, plan_hash=plan.hash, indices=indices)
                for attempt in range(1, NOTE_TRIES + 1):
                    patience = pipeline.transport.patience
                    began = patience.running(pipeline.clock.now())
                    try:
                        await self._tell(peer, "Counted", note)
                        took = patience.running(pipeline.clock.now()) - began
                        patience.took("named", took)
                        break
                    except PeerFault as e:
                        pipeline.telemetry.emit(
                            "hop-not-told",
                            str(e),
                            "debug",
                            peer=peer,
                            count=len(indices),
                            attempt=attempt,
                        )
                    if attempt < NOTE_TRIES:
                        await asyncio.sleep(NOTE_PAUSE_S * attempt)
                    if pipeline.machine.plan is not plan:
                        break
        finally:
            self._naming.discard(peer)

    async def _tell(self, peer: PeerId, name: str, note: pb.LostNote | pb.CountedNote) -> None:
        """Raises PeerFault when the peer cannot be told."""
        async with self._call(peer, name, note) as call:
            await call
