"""Questions to other peers about versions: the plan behind a version, and the history that a leader
goes on with. Enters: versions, the peers that may know. Leaves: recalled plans, journal events.
Never: a decision about the version."""

import asyncio
from collections.abc import Callable, Sequence

from node.consensus.version_history import VersionHistory
from node.consensus.votes import Certificate
from node.coordinator import notes
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId, short
from node.core.journey import Version
from node.epoch import events as ev
from node.epoch.bounds import Bounds
from node.epoch.pace import RECALL_S
from node.telemetry.events import Journal
from node.transport.port import TransportPort, answers
from protos import training_pb2 as pb
from protos import training_pb2_grpc as rpc


class Recalling:
    """Asks for versions. ``history``: the own one."""

    def __init__(
        self, transport: TransportPort, journal: Journal, bounds: Bounds, history: VersionHistory
    ) -> None:
        self._transport = transport
        self._journal = journal
        self._bounds = bounds
        self.history = history

    async def recall(
        self,
        version: Version,
        holders: Sequence[PeerId],
        proves: Callable[[Certificate | None], bool],
    ) -> tuple[ev.Recalled, Certificate | None]:
        """Ask ``holders`` in turn for the plan behind ``version``. Returns the first answer with a
        plan for whose quorum certificate ``proves`` is true, else the first one with a plan, else
        one without; and the certificate that came with it."""
        best: tuple[ev.Recalled, Certificate | None] = ev.Recalled(version), None
        for peer in holders:
            try:
                found, certificate, _ = await self._ask(peer, version)
            except PeerFault:
                continue
            if found.plan is not None and proves(certificate):
                return found, certificate
            if best[0].plan is None:
                best = found, certificate
        return best

    async def give_up(self, at: Version, tokens: int, leader: PeerId) -> None:
        """The swarm goes on from another version than ``at``, which this peer held. Ask the leader
        where the histories parted, and report the lost epochs and tokens."""
        if at.epoch == 0:
            return
        try:
            _, _, theirs = await self._ask(leader, at)
        except PeerFault as e:
            self._unknown(
                f"cannot tell how much of the history up to epoch {at.epoch} is lost: {e}"
            )
            return
        try:
            lost = self.history.give_up(at, tokens, theirs)
        except LookupError as e:
            self._unknown(str(e))
            return
        if lost is None:
            return
        self._journal.emit(
            "training",
            "history-given-up",
            f"{lost.epochs} epochs ({lost.tokens} tokens) of this side are discarded: "
            f"{short(leader)} leads another history, which goes on",
            "warning",
            epochs=lost.epochs,
            tokens=lost.tokens,
            since=lost.since,
        )

    def _unknown(self, text: str) -> None:
        self._journal.emit("training", "history-unknown", text, "warning")

    async def _ask(
        self, peer: PeerId, version: Version
    ) -> tuple[ev.Recalled, Certificate | None, list[tuple[Version, int]]]:
        async with answers(peer, RECALL_S):
            stub = rpc.TrainingStub(await self._transport.channel(peer))
            reply = await stub.History(
                pb.HistoryRequest(version=notes.version_note(version)), timeout=RECALL_S
            )
        try:
            # A plan of megabytes would hold up the event loop.
            found, certificate, past = await asyncio.to_thread(
                notes.parse_history, version, reply, self._bounds.paths
            )
            if found.plan is not None and (why := self._bounds.of_plan(found.plan)):
                raise WireError(f"invalid earlier plan: {why}")
            return found, certificate, past
        except WireError as e:
            self._transport.fault(peer, str(e), 1.0)
            raise PeerFault(peer, str(e)) from e
