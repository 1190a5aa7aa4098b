"""Donors of one version of a stage, kept from letting go of it until it has been fetched.

A donor gives out its version in place. While training goes on, it keeps each version that it has
described for a minute after the last question (:mod:`node.checkpoint.pins`). So a peer that needs
several stages of one version asks for all of them at once, keeps asking, and fetches one after the
other.
"""

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import grpc.aio

from node.checkpoint.pins import IDLE_S
from node.checkpoint.state import StateKind
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.core.journey import Version
from node.core.patience import SPARE
from node.core.tasks import Tasks, together
from node.transport.port import TransportPort, answers
from protos import state_pb2, state_pb2_grpc

RENEW_S = IDLE_S / 3
"""Seconds between two questions that keep a version."""
DESCRIBE_S = 30.0
"""Seconds of the longest wait for an answer about one tensor."""
LATE_S = 2.0
"""Seconds after which a donor's answer is late, or :data:`SPARE` times the longest time that
another donor took."""
ENOUGH = 4
"""Donors that are asked to keep a stage: each has the parameters twice in memory meanwhile."""
OTHER_VERSION = "holds another version"


class DonorQuestion(NamedTuple):
    """A question that is under way, since when."""

    peer: PeerId
    since: float


class Donors:
    """Donors of the parameters of ``stage`` at ``version``. ``name`` is one of its tensors, the
    smallest by preference: donors hash it when they are asked."""

    def __init__(self, transport: TransportPort, stage: int, version: Version, name: str) -> None:
        self._transport = transport
        self.stage = stage
        self.version = version
        self._name = name
        self.found: list[PeerId] = []
        """Donors that kept the version when they were asked last."""
        self._keeping: list[PeerId] = []
        """These, and donors that have not answered since."""
        self.reasons: dict[PeerId, str] = {}
        """Reason for which each other peer that was asked is no donor."""

    async def find(self, candidates: Iterable[PeerId]) -> list[PeerId]:
        """Ask candidates, a few at a time, until :data:`ENOUGH` of them keep the version. Returns
        these peers; ``reasons`` then says why the others that were asked do not.

        For each one that is late with its answer another one is asked meanwhile.
        """
        self.reasons = {}
        # Each caller begins with other donors.
        ring = deque(
            sorted(
                set(candidates),
                key=lambda p: hashlib.sha256(f"{self._transport.peer_id}{p}".encode()).digest(),
            )
        )
        tasks = Tasks("donors")
        asked: dict[asyncio.Task[str], DonorQuestion] = {}
        found: list[PeerId] = []
        slowest_s = 0.0
        now = asyncio.get_running_loop().time
        try:
            while len(found) < ENOUGH:
                late_s = max(LATE_S, SPARE * slowest_s)
                fresh = [q for q in asked.values() if now() < q.since + late_s]
                while ring and len(found) + len(fresh) < ENOUGH:
                    question = DonorQuestion(ring.popleft(), now())
                    asked[tasks.spawn(self._ask(question.peer), "ask")] = question
                    fresh.append(question)
                if not asked or (found and not fresh):
                    break
                next_late = min((q.since + late_s for q in fresh), default=math.inf)
                timeout = None
                if fresh:
                    timeout = max(0.0, next_late - now())
                done, _ = await asyncio.wait(
                    asked, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                for task in [t for t in asked if t in done]:
                    question = asked.pop(task)
                    slowest_s = max(slowest_s, now() - question.since)
                    if why := task.result():
                        self.reasons[question.peer] = why
                    else:
                        found.append(question.peer)
        finally:
            await tasks.close()
        self.reasons |= {q.peer: "did not answer in time" for q in asked.values()}
        self.found = found
        self._keeping = list(found)
        return found

    async def renew(self) -> None:
        """Ask the donors again, so that they keep the version. One that has let go of it is left
        out, one that does not answer is asked the next time too."""
        asked = self._keeping
        keepers = await self._keepers(asked)
        if asked is self._keeping:  # others may have been found meanwhile
            self.found = keepers
            gone = {p for p in asked if p not in keepers and self.reasons[p] == OTHER_VERSION}
            self._keeping = [peer for peer in asked if peer not in gone]

    async def _keepers(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """Ask peers to keep the version. Returns the peers that do."""
        said = await together(*(self._ask(peer) for peer in peers))
        refusals = {peer: why for peer, why in zip(peers, said, strict=True) if why}
        self.reasons |= refusals
        return [peer for peer in peers if peer not in refusals]

    async def _ask(self, peer: PeerId) -> str:
        """Ask one peer to keep the version. Returns "" when it does, else the reason."""
        request = state_pb2.DescribeRequest(
            stage=self.stage,
            kind=StateKind.PARAMETERS.code,
            epoch=self.version.epoch,
            lineage=self.version.lineage,
            names=[self._name],
        )
        try:
            async with answers(peer, DESCRIBE_S):
                stub = state_pb2_grpc.StateStub(await self._transport.channel(peer))
                try:
                    await stub.Describe(request, timeout=DESCRIBE_S)
                except grpc.aio.AioRpcError as e:
                    if e.code() is grpc.StatusCode.NOT_FOUND:
                        return OTHER_VERSION
                    raise
        except PeerFault as e:
            return e.reason
        return ""
