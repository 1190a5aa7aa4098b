"""Passes forward-only work on to its next hop."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from node.core.clock import Clock
from node.core.errors import PeerFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop
from node.pipeline.events import Claim, Direction, Trouble
from node.pipeline.frames import FrameShape, frames
from node.pipeline.hops.calls import PeerCalls
from node.pipeline.machine import PipelineMachine
from node.pipeline.route import Delivery, RoutePause
from node.pipeline.timing import Timing
from node.wire.tensors import Buffer
from protos import pipeline_pb2 as pb

NOBODY_WAITS = "nobody waits for this"
"""Reason of an origin that refuses its own work on its way home: whoever asked has hung up."""


class Onward:
    """Delivers a tensor to a hop or to a replica of its stage. ``timing``: gets the time of each
    tensor of a whole micro-batch."""

    def __init__(
        self,
        clock: Clock,
        calls: PeerCalls,
        machine: PipelineMachine,
        shape: FrameShape,
        timing: Timing,
    ) -> None:
        self._clock = clock
        self._calls = calls
        self._machine = machine
        self._shape = shape
        self._timing = timing

    async def pass_on(
        self,
        claim: Claim,
        purpose: int,
        deadline_s: float,
        shape: tuple[int, ...],
        buffer: Buffer,
        document_ends: Sequence[int],
        accepted: asyncio.Future[None] | None = None,
        *,
        text: pb.TextTurn | None = None,
    ) -> None:
        """Deliver to ``claim.position``, or to another replica of its stage, which has no ``text``
        however; ``accepted`` is done when one has it. Raises PeerFault when nobody takes it, with
        the reason of the last one that refused it."""
        clock = self._clock
        machine = self._machine
        delivery = Delivery(claim.index)
        target = claim.journey[claim.position]
        alone = target.stage == ENDS or text is not None
        replicas = ()
        if not alone:
            replicas = machine.replicas(target.stage)
        until = clock.now() + deadline_s
        refusal = ""
        while True:
            choice = delivery.choose(target.peer, replicas, machine.suspects, clock.now())
            if choice is None:
                raise PeerFault(target.peer, refusal or f"no live replica of stage {target.stage}")
            if isinstance(choice, RoutePause):
                await asyncio.sleep(choice.seconds)
                continue
            journey = (
                *claim.journey[: claim.position],
                Hop(target.stage, choice),
                *claim.journey[claim.position + 1 :],
            )
            messages = frames(
                replace(claim, journey=journey),
                purpose,
                until - clock.now(),
                shape,
                buffer,
                self._shape,
                document_ends,
                text=text,
                wire=self._shape.forward_only,
            )

            def held(seconds: float | None, peer: PeerId = choice) -> None:
                if len(buffer) == self._shape.nbytes(self._shape.sequences, self._shape.length):
                    self._timing.sent(peer, seconds, self._clock.now())
                if accepted is not None and not accepted.done():
                    accepted.set_result(None)

            trouble, reason = await self._calls.stream(
                choice, Direction.FORWARD, messages, len(buffer), held
            )
            if trouble is None:
                return
            if trouble is Trouble.FAILED:
                machine.suspects.add(choice, clock.now())
            elif trouble is Trouble.REFUSED:
                refusal = reason
            delivery.turned(choice, trouble)
