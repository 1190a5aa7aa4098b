"""Notes to an origin about lost micro-batches, and notes of an origin about the gradient shares
that count."""

import asyncio

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.pipeline.events import Key
from node.pipeline.hops.calls import PeerCalls
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.machine import PipelineMachine
from protos import pipeline_pb2 as pb

NOTE_TRIES = 3
"""Number of attempts to send a hop the note that its share counts. Without the note the share is
lost, so a retry pays; a long wait does not."""
NOTE_PAUSE_S = 0.2
"""Pause after the first attempt, in seconds. Each later pause is longer by the same time."""


class Notes:
    """Sends the notes, and keeps the micro-batches that the next note to each peer will name."""

    def __init__(self, host: PipelineHost, calls: PeerCalls, machine: PipelineMachine) -> None:
        self._host = host
        self._calls = calls
        self._machine = machine
        self._names: dict[PeerId, list[int]] = {}
        self._naming: set[PeerId] = set()

    def forget(self) -> None:
        """Forget the micro-batches of the former plan."""
        self._names.clear()

    async def tell_origin(self, key: Key, origin: PeerId, reason: str) -> None:
        """Tell the origin that nobody can finish this micro-batch. If the note is lost, the origin
        finds out by its own time-out."""
        telemetry = self._host.telemetry
        plan = self._machine.plan
        telemetry.emit("micro-batch-lost", reason, "warning", index=key.index)
        if plan is not None:
            note = pb.LostNote(
                epoch=key.epoch, plan_hash=plan.hash, index=key.index, reason=reason[:200]
            )
            try:
                await self._calls.tell(origin, "Lost", note)
            except PeerFault as e:
                telemetry.emit("origin-silent", str(e), "debug", index=key.index)

    async def tell_text_lost(self, origin: PeerId, index: int, reason: str) -> None:
        """Tell the origin of a text that the text cannot go on here. If the note is lost, the
        origin finds out by its own time-out."""
        note = pb.LostNote(index=index, reason=reason[:200], purpose=pb.GENERATE)
        try:
            await self._calls.tell(origin, "Lost", note)
        except PeerFault as e:
            self._host.telemetry.emit("origin-silent", str(e), "debug", index=index)

    def tell_counted(self, index: int, peers: tuple[PeerId, ...]) -> None:
        """Tell the hops that their shares of a micro-batch count. One note to a peer is under way
        at a time; the micro-batches that finish meanwhile are named together in the next note."""
        for peer in peers:
            self._names.setdefault(peer, []).append(index)
            if peer not in self._naming:
                self._naming.add(peer)
                self._host.tasks.spawn(self._name(peer), "counted")

    async def _name(self, peer: PeerId) -> None:
        clock = self._host.clock
        patience = self._host.transport.patience
        try:
            while (plan := self._machine.plan) is not None and (
                indices := self._names.pop(peer, None)
            ):
                note = pb.CountedNote(epoch=plan.epoch, plan_hash=plan.hash, indices=indices)
                for attempt in range(1, NOTE_TRIES + 1):
                    began = patience.running(clock.now())
                    try:
                        await self._calls.tell(peer, "Counted", note)
                        took = patience.running(clock.now()) - began
                        patience.took("named", took)
                        break
                    except PeerFault as e:
                        self._host.telemetry.emit(
                            "hop-not-told",
                            str(e),
                            "debug",
                            peer=peer,
                            count=len(indices),
                            attempt=attempt,
                        )
                    if attempt < NOTE_TRIES:
                        await asyncio.sleep(NOTE_PAUSE_S * attempt)
                    if self._machine.plan is not plan:
                        break
        finally:
            self._naming.discard(peer)
