"""Carries what the machine wants sent: frames, questions for an input, notes to and from an
origin."""

from __future__ import annotations

import asyncio

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.journey import Hop
from node.pipeline import events as ev
from node.pipeline.events import Claim, Direction, Key
from node.pipeline.hops.base import PipelineBase
from node.pipeline.hops.frames import frames
from node.pipeline.hops.outbound import AlreadyThere, Outbound
from node.pipeline.received import FrameReader
from node.pipeline.route import beside
from protos import pipeline_pb2 as pb

PATIENT = 32
"""Attempts under way up to which they wait for room: each is a call that stays open, and a peer
takes ``transport.peer_streams`` from another, of which its leader needs some."""
NOTE_TRIES, NOTE_PAUSE_S = 3, 0.2
"""A hop that cannot be told that it counts loses that count: worth asking again, not worth waiting
long."""


class Sender:
    """The sending half of the service. One attempt for each visit and direction is under way at a
    time."""

    def __init__(self, pipeline: PipelineBase) -> None:
        self._pipeline = pipeline
        self.outbound = Outbound(pipeline.transport, pipeline.clock, pipeline.telemetry)
        self._sending: dict[tuple[Key, Direction], asyncio.Task[None] | asyncio.TimerHandle] = {}
        self._names: dict[PeerId, list[int]] = {}
        self._naming: set[PeerId] = set()
        self._asking: dict[PeerId, set[asyncio.Timeout]] = {}

    def forget(self) -> None:
        """Another plan is in force."""
        self._names.clear()

    def gone(self, peer: PeerId) -> None:
        """It is dead: an input is asked for elsewhere. (Frames to it have been sent anew by the
        machine.)"""
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
        loop = asyncio.get_running_loop()
        self._sending[key, way] = loop.call_later(seconds, self._retry, key, way)

    def cancel(self, key: Key, way: Direction) -> None:
        """End the attempt under way."""
        if (task := self._sending.pop((key, way), None)) is not None:
            task.cancel()

    def _retry(self, key: Key, way: Direction) -> None:
        pipeline = self._pipeline
        self._sending.pop((key, way), None)
        work = pipeline.stash.get(key)
        if work is not None:
            pipeline.do(
                ev.Expired(key) if work.deadline < pipeline.clock.now() else ev.Retry(key, way)
            )

    async def _send(self, action: ev.Send) -> None:
        pipeline, key, way, peer = self._pipeline, action.key, action.way, action.peer
        work, plan = pipeline.stash.get(key), pipeline.machine.plan
        buffer = (
            None if work is None else work.output if way is Direction.FORWARD else work.upstream
        )
        if work is None or buffer is None or plan is None:
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
        )

        def accepted(seconds: float | None) -> None:
            pipeline.timing.sent(peer, seconds, pipeline.clock.now())
            if pipeline.machine.plan is plan:
                pipeline.do(ev.Passed(key, way, peer))

        outcome = await self.outbound.send(
            peer, way, messages, len(buffer), pipeline.hop_s, accepted
        )
        if pipeline.machine.plan is not plan:
            return
        # this task is at its end; what comes next must not cancel it
        self._sending.pop((key, way), None)
        if outcome.trouble is None:
            self._measure(claim.journey[action.position], began)
            pipeline.do(ev.Settled(key, way, peer))
            return
        pipeline.telemetry.emit(
            "hop-turned",
            f"{way.value} not done: {outcome.reason}",
            "debug",
            peer=peer,
            index=key.index,
            trouble=outcome.trouble.value,
        )
        pipeline.do(ev.Turned(key, way, peer, outcome.trouble))

    def _measure(self, hop: Hop, began: float) -> None:
        timing, machine = self._pipeline.timing, self._pipeline.machine
        timing.observe(hop.peer, began, self._pipeline.clock.now())
        siblings = machine.replicas(hop.stage)
        machine.suspects.slow = machine.suspects.slow - set(siblings) | timing.slow(siblings)

    async def fetch(self, action: ev.Fetch) -> None:
        """Get the input of a visit that takes a dead replica's place."""
        pipeline, key = self._pipeline, action.key
        work, plan = pipeline.stash.get(key), pipeline.machine.plan
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
                pipeline.do(ev.Fetched(key, peer))
                return
        if pipeline.stash.get(key) is work:
            pipeline.do(ev.NotFetched(key, settled))

    async def _ask(
        self, peer: PeerId, key: Key, skipped: tuple[int, ...], plan_hash: str
    ) -> FrameReader:
        pipeline = self._pipeline
        if peer in pipeline.machine.suspects.gone:
            raise PeerFault(peer, "it is dead")
        shape, frame = pipeline.shape_of(key.index), pipeline.shape
        asking, patience = self._asking.setdefault(peer, set()), asyncio.timeout(None)
        asking.add(patience)
        try:
            async with patience:
                return await self.outbound.fetch(
                    peer,
                    key,
                    skipped,
                    plan_hash,
                    lambda head: FrameReader(head, shape, frame.wire, frame.masked),
                    pipeline.hop_s,
                )
        except TimeoutError as e:
            raise PeerFault(peer, "it has died") from e
        finally:
            asking.discard(patience)

    async def tell_origin(self, key: Key, origin: PeerId, reason: str) -> None:
        """Nobody can finish this micro-batch."""
        pipeline, plan = self._pipeline, self._pipeline.machine.plan
        pipeline.telemetry.emit("micro-batch-lost", reason, "warning", index=key.index)
        if plan is not None:
            try:
                await self.outbound.lost(origin, key, plan.hash, reason, pipeline.hop_s)
            except PeerFault as e:
                pipeline.telemetry.emit("origin-silent", str(e), "debug", index=key.index)

    def tell_counted(self, index: int, peers: tuple[PeerId, ...]) -> None:
        """Name the hops whose shares count. One note to a peer is under way at a time; what comes
        meanwhile goes together."""
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
                for attempt in range(1, NOTE_TRIES + 1):
                    began = pipeline.clock.now()
                    try:
                        await self.outbound.counted(
                            peer, plan.epoch, plan.hash, indices, pipeline.hop_s
                        )
                        pipeline.transport.patience.took("named", pipeline.clock.now() - began)
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
