"""Forward-only work at a hop between its origin and its way home."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.pipeline.forward_only.jobs import ForwardJobs, TextPass
from node.pipeline.forward_only.onward import NOBODY_WAITS, Onward
from node.pipeline.forward_only.quota import ForwardQuota
from node.pipeline.forward_only.reading import ForwardReading
from node.pipeline.frames import FrameReader, FrameShape, Incoming, loose_shape
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.notes import Notes
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.hops.receipts import say
from node.pipeline.visit_buffers import COMPUTE_ERRORS
from protos import pipeline_pb2 as pb


class ForwardVisits:
    """Computes the work of others and passes it on. Work that is lost is an error for the peer that
    asked; nothing is resumed."""

    def __init__(
        self,
        host: PipelineHost,
        shape: FrameShape,
        deadlines: Deadlines,
        jobs: ForwardJobs,
        quota: ForwardQuota,
        *,
        reading: ForwardReading,
        onward: Onward,
        notes: Notes,
    ) -> None:
        self._host = host
        self._shape = shape
        self._deadlines = deadlines
        self._jobs = jobs
        self._quota = quota
        self._reading = reading
        self._onward = onward
        self._notes = notes

    async def visit(self, caller: PeerId, incoming: Incoming, context: Any) -> None:
        """Take a frame for this stage. Raises WireError for a malformed frame."""
        shape = loose_shape(incoming, self._shape)
        if incoming.head.HasField("text") and shape[0] != 1:
            raise WireError(f"a text of {shape[0]} sequences")
        cost = self._shape.kept(shape[0], shape[1])
        guest = self._quota.guest(caller, incoming.claim.journey[0].peer)
        if objection := self._quota.objection(cost, guest):
            return await say(context, pb.BUSY, objection)
        self._quota.charge(cost, guest)
        free = partial(self._quota.charge, -cost, guest)
        turn = self._jobs.turn(caller, incoming, shape[1], guest=guest is not None)
        if turn is None and incoming.head.text.past:
            free()
            return await say(context, pb.REFUSED, "the text is no longer here")
        try:
            reader = await self._reading.read(incoming, shape, context)
        except BaseException:  # also cancelled: the sender's stream has ended
            free()
            if turn is not None:
                self._jobs.done(turn.key, turn.cache)
            raise
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A task of its own: after ACCEPTED the frame is ours, also when the sender's stream ends.
        self._host.tasks.spawn(self._work(incoming, reader, free, accepted, turn), "errand")
        await say(context, pb.ACCEPTED)
        try:
            await accepted
            await say(context, pb.DONE)
        except PeerFault as e:
            await say(context, pb.REFUSED, e.reason)

    async def _work(
        self,
        incoming: Incoming,
        reader: FrameReader,
        free: Callable[[], None],
        accepted: asyncio.Future[None],
        turn: TextPass | None,
    ) -> None:
        claim = incoming.claim
        purpose = incoming.head.purpose
        positions = 0
        if purpose == pb.GENERATE and claim.position == len(claim.journey) - 2:
            positions = max(1, incoming.head.text.positions)
        onward = replace(claim, position=claim.position + 1)
        # The origin waits no longer than this, whatever deadline the sender states.
        most_s = self._deadlines.hop_s * (len(claim.journey) - claim.position)
        within_s = min(incoming.head.deadline_s, most_s)
        try:
            async with asyncio.timeout(within_s):
                text = incoming.head.text if incoming.head.HasField("text") else None
                if turn is None:
                    output, shape = await self._jobs.forward(reader, positions)
                else:
                    output = await self._jobs.extend(turn, reader, positions)
                    left = min(turn.count, positions or turn.count)
                    shape = (1, left, self._shape.width)
                    incoming.head.text.kept += 1
                await self._onward.pass_on(
                    onward,
                    purpose,
                    within_s,
                    shape,
                    output,
                    reader.document_ends,
                    accepted,
                    text=text,
                )
        except (PeerFault, TimeoutError, *COMPUTE_ERRORS) as e:
            # Whoever asked has hung up: that is nobody's trouble.
            unwanted = isinstance(e, PeerFault) and e.reason == NOBODY_WAITS
            self._host.telemetry.emit(
                "errand-lost",
                f"forward-only work was lost: {e}",
                "debug" if unwanted else "warning",
                index=claim.index,
            )
            if not accepted.done():
                reason = NOBODY_WAITS if unwanted else str(e)
                accepted.set_exception(PeerFault(self._host.me, reason))
                accepted.exception()  # the sender may be gone: then nobody else looks at it
            told = unwanted and onward.position == len(claim.journey) - 1  # by the origin itself
            if incoming.head.HasField("text") and not told:
                origin = claim.journey[0].peer
                await self._notes.tell_text_lost(origin, claim.index, str(e))
        finally:
            free()
