"""Arrival of training frames: the machine decides about each, its tensor is read into the stash,
its sender gets receipts."""

from typing import Any

from node.core.clock import Clock
from node.core.ids import PeerId
from node.pipeline.events import Action, Claim, Direction, Say, TensorReceived
from node.pipeline.frames import Incoming
from node.pipeline.hops.admission import FrameAdmission
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.intake import FrameIntake
from node.pipeline.hops.keeper import StashKeeper
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.hops.receipts import say
from node.pipeline.hops.stash import Stash
from node.pipeline.hops.streams import OpenStreams
from node.pipeline.route import beside
from protos import pipeline_pb2 as pb


class Arrivals:
    """Receives the frames of the plan's micro-batches."""

    def __init__(
        self,
        clock: Clock,
        driver: MachineDriver,
        planned: PlannedWork,
        admission: FrameAdmission,
        intake: FrameIntake,
        *,
        stash: Stash,
        keeper: StashKeeper,
        streams: OpenStreams,
    ) -> None:
        self._clock = clock
        self._driver = driver
        self._planned = planned
        self._admission = admission
        self._intake = intake
        self._stash = stash
        self._keeper = keeper
        self._streams = streams

    async def take(self, way: Direction, caller: PeerId, incoming: Incoming, context: Any) -> None:
        """Receive one frame of ``caller``, and send its receipts. Raises WireError for a bad
        tensor, and TimeoutError if the tensor does not arrive within a hop's time."""
        planned = self._planned
        driver = self._driver
        claim = incoming.claim
        came = self._clock.now()
        rest = list[Action]()
        answer, cost = await self._admission.ask(way, caller, incoming)
        waited = self._clock.now() - came
        if answer.say is Say.TAKE:
            shape = planned.shape_of(claim.index)
            forward = way is Direction.FORWARD
            masked = planned.shape.masked and forward
            origin = claim.journey[0].peer
            loss_mask = planned.shape.loss_mask and forward
            if planned.at_origin(claim.key):
                charge = 0
            elif claim.key in driver.machine.visits:  # a gradient alone, or what came twice
                charge = planned.shape.nbytes(shape[0], shape[1])
            else:
                charge = cost
            before = _sender(way, claim)
            wire = planned.wire_of(claim.index, before, way)
            self._stash.charge(charge, origin)
            try:
                async with self._streams.newest((claim.key, way, caller)):
                    reader = await self._intake.read(
                        caller,
                        incoming.head,
                        shape,
                        masked,
                        context.read,
                        loss_mask=loss_mask,
                        wire=wire,
                        shared=True,
                    )
            finally:
                self._stash.charge(-charge, origin)
            received = TensorReceived(way, claim, caller)
            stage = claim.journey[before].stage
            answer, rest = self._keeper.take(received, stage, reader, incoming.head.deadline_s)
        match answer.say:
            case Say.TAKE | Say.AGAIN:
                outcome = driver.outcome(claim.key, way)
                try:
                    # Sent before the work begins: the sender counts its share at ACCEPTED, and the
                    # end of this work may close the epoch.
                    await say(context, pb.ACCEPTED, waited_s=waited)
                finally:
                    driver.carry_out(rest)
                done, reason = await outcome
                await say(context, pb.DONE if done else pb.REFUSED, reason)
            case other:
                verdict = {Say.SETTLED: pb.DONE, Say.BUSY: pb.BUSY}.get(other, pb.REFUSED)
                await say(context, verdict, answer.reason)


def _sender(way: Direction, claim: Claim) -> int:
    """Position of the hop that sent this tensor."""
    if way is Direction.FORWARD:
        return beside(claim.journey, claim.position, Direction.BACKWARD)
    return beside(claim.journey, claim.position, Direction.FORWARD)
