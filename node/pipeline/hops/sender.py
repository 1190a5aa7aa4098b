"""Sender of frames to the next hop, as the state machine orders."""

import asyncio

from node.core.journey import Hop
from node.pipeline import events as ev
from node.pipeline.events import Claim, Direction, Key, Trouble
from node.pipeline.frames import FrameShape, frames
from node.pipeline.hops.calls import PeerCalls
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.hops.stash import Stash
from node.pipeline.rounding import SentRounding
from node.pipeline.timing import Timing
from protos import pipeline_pb2 as pb

PATIENT = 32
"""Number of attempts under way up to which a further attempt asks its receiver to wait for room.
Each one is a call that stays open; a peer takes only ``transport.peer_streams`` calls from another
peer, and its leader needs some of them."""


class Sender:
    """Attempts to send, at most one at a time for each visit and direction. They measure the
    links."""

    def __init__(
        self,
        host: PipelineHost,
        calls: PeerCalls,
        driver: MachineDriver,
        stash: Stash,
        shape: FrameShape,
    ) -> None:
        self._host = host
        self._calls = calls
        self._driver = driver
        self._stash = stash
        self._shape = shape
        self.timing = Timing()
        """Measured times of device work and of connections."""
        self.rounding = SentRounding()
        """Measured errors of the tensors that were sent, by peer."""
        self._sending: dict[tuple[Key, Direction], asyncio.Task[None] | asyncio.TimerHandle] = {}

    def send(self, action: ev.Send) -> None:
        """Start an attempt, and cancel the former one if it is under way."""
        attempt = self._host.tasks.spawn(self._send(action), "send")
        self.cancel(action.key, action.way)
        self._sending[action.key, action.way] = attempt

    def later(self, key: Key, way: Direction, seconds: float) -> None:
        """Ask the machine again after ``seconds``."""
        self.cancel(key, way)
        self._sending[key, way] = asyncio.get_running_loop().call_later(
            seconds, self._retry, key, way
        )

    def cancel(self, key: Key, way: Direction) -> None:
        """Cancel the attempt under way."""
        if (task := self._sending.pop((key, way), None)) is not None:
            task.cancel()

    def _retry(self, key: Key, way: Direction) -> None:
        self._sending.pop((key, way), None)
        work = self._stash.get(key)
        if work is not None:
            late = work.deadline < self._host.clock.now()
            self._driver.handle(ev.Expired(key) if late else ev.Retry(key, way))

    async def _send(self, action: ev.Send) -> None:
        driver = self._driver
        machine = driver.machine
        clock = self._host.clock
        key = action.key
        way = action.way
        peer = action.peer
        work = self._stash.get(key)
        plan = machine.plan
        if work is None or plan is None:
            return
        buffer = work.output if way is Direction.FORWARD else work.upstream
        if buffer is None:
            return
        claim = Claim(key.epoch, plan.hash, key.index, action.journey, action.position)
        began = clock.now()
        places: list[bytes] = []

        def leave(data: memoryview) -> bytes | None:
            place = self._host.transport.leave(peer, data)
            if place is not None:
                places.append(place)
            return place

        messages = frames(
            claim,
            pb.TRAIN,
            work.deadline - began,
            work.shape,
            buffer,
            self._shape,
            work.document_ends if way is Direction.FORWARD else (),
            action.patient and len(self._sending) <= PATIENT,
            untrained=work.untrained if way is Direction.FORWARD else 0,
            wire=work.wires.get(way, ""),
            leave=leave,
        )
        whole = self._shape.nbytes(work.shape[0], work.shape[1]) / max(1, len(buffer))

        def accepted(seconds: float | None) -> None:
            self.timing.sent(peer, seconds, self._host.clock.now(), whole)
            wire = work.wires.get(way, self._shape.wire)
            self.rounding.sent(peer, wire, work.errors.pop(way, None))
            if self._driver.machine.plan is plan:
                self._driver.handle(ev.Passed(key, way, peer))

        trouble, reason = await self._calls.stream(peer, way, messages, len(buffer), accepted)
        if trouble in (Trouble.BUSY, Trouble.REFUSED):
            self._host.transport.withdraw(peer, places)
        if machine.plan is not plan:
            return
        # This task is about to end; the next attempt must not cancel it.
        self._sending.pop((key, way), None)
        if trouble is None:
            self._measure(claim.journey[action.position], began)
            driver.handle(ev.Settled(key, way, peer))
            return
        self._host.telemetry.emit(
            "hop-turned",
            f"{way.value} not done: {reason}",
            "debug",
            peer=peer,
            index=key.index,
            trouble=trouble.value,
        )
        driver.handle(ev.Turned(key, way, peer, trouble))

    def _measure(self, hop: Hop, began: float) -> None:
        timing = self.timing
        machine = self._driver.machine
        timing.observe(hop.peer, began, self._host.clock.now())
        siblings = machine.replicas(hop.stage)
        machine.suspects.slow = machine.suspects.slow - set(siblings) | timing.slow(siblings)
