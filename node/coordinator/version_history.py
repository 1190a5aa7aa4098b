"""The versions from which this peer has begun epochs, the plan behind a version as other peers
remember it, and the loss when one side of a partition gives up its history."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

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


class VersionHistory:
    """History of one peer. ``given_up_epochs`` and ``given_up_tokens`` were committed here and
    undone because another history went on."""

    def __init__(self, transport: TransportPort, journal: Journal, bounds: Bounds) -> None:
        self._transport = transport
        self._journal = journal
        self._bounds = bounds
        self.versions: deque[tuple[Version, int]] = deque(maxlen=notes.PAST)
        """Versions with the tokens counted until then, the newest first."""
        self.given_up_epochs = self.given_up_tokens = 0

    def stood(self, version: Version, tokens: int) -> None:
        """This peer has begun an epoch from ``version``."""
        while self.versions and self.versions[0][0].epoch >= version.epoch:
            self.versions.popleft()  # undone since
        self.versions.appendleft((version, tokens))

    async def recall(
        self,
        version: Version,
        holders: Sequence[PeerId],
        proves: Callable[[ev.Recalled], bool],
    ) -> ev.Recalled:
        """Ask ``holders`` in turn for the plan behind ``version``. Returns the first answer with a
        plan for which ``proves`` is true, else the first one with a plan, else one without."""
        best = ev.Recalled(version)
        for peer in holders:
            try:
                found, _ = await self._ask(peer, version)
            except PeerFault:
                continue
            if found.plan is not None and proves(found):
                return found
            if best.plan is None:
                best = found
        return best

    async def give_up(self, at: Version, tokens: int, leader: PeerId) -> None:
        """The swarm goes on from another version than ``at``, which this peer held. Ask the leader
        where the histories parted, and report the lost epochs and tokens."""
        if at.epoch == 0:
            return
        try:
            _, theirs = await self._ask(leader, at)
        except PeerFault as e:
            self._journal.emit(
                "training",
                "history-unknown",
                f"cannot tell how much of the history up to epoch {at.epoch} is lost: {e}",
                "warning",
            )
            return
        known = {v for v, _ in theirs}
        if at in known:
            return  # only behind: nothing is lost
        common = next(((v, t) for v, t in self.versions if v in known), None)
        if common is None:
            # Older than all versions that the leader remembers: this peer is probably only behind.
            if not theirs or at.epoch > theirs[0][0].epoch + 1:
                self._journal.emit(
                    "training",
                    "history-unknown",
                    f"epoch {at.epoch} here belongs to no history that the leader remembers",
                    "warning",
                )
            return
        epochs = at.epoch - common[0].epoch
        lost = max(0, tokens - common[1])
        self.given_up_epochs += epochs
        self.given_up_tokens += lost
        self._journal.emit(
            "training",
            "history-given-up",
            f"{epochs} epochs ({lost} tokens) of this side are discarded: {short(leader)} leads "
            "another history, which goes on",
            "warning",
            epochs=epochs,
            tokens=lost,
            since=common[0].epoch,
        )

    async def _ask(
        self, peer: PeerId, version: Version
    ) -> tuple[ev.Recalled, list[tuple[Version, int]]]:
        async with answers(peer, RECALL_S):
            stub = rpc.TrainingStub(await self._transport.channel(peer))
            reply = await stub.History(
                pb.HistoryRequest(version=notes.version_note(version)), timeout=RECALL_S
            )
        try:
            # A plan of megabytes would hold up the event loop.
            found, past = await asyncio.to_thread(
                notes.parse_history, version, reply, self._bounds.paths
            )
            if found.plan is not None and (why := self._bounds.of_plan(found.plan)):
                raise WireError(f"invalid earlier plan: {why}")
            return found, past
        except WireError as e:
            self._transport.fault(peer, str(e), 1.0)
            raise PeerFault(peer, str(e)) from e
