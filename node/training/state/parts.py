"""Optimizer state of whole parts over the wire: who has what, and the bytes of it, a part whole or
not at all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence

from node.checkpoint.fetch import FetchTimeouts, fetch
from node.checkpoint.state import NoDonor, StateKind, StateSnapshot
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.journey import Version, lineage
from node.optim.parts import state_shapes
from node.optim.settings import OptimSettings
from node.training.state.engines import Engines
from node.training.state.stage import StageState
from node.transport.port import answers
from protos import state_pb2, state_pb2_grpc

PAUSE_S = 0.2
"""Before a donor is asked again: it may not have adopted the plan's version yet."""
SEARCH_S = 2.0
"""For a member of the cell to say what it keeps."""
BATCH = 32 << 20
"""Bytes of parts fetched together: a donor that dies takes only what was under way with it."""
PATIENCE = FetchTimeouts(describe_s=20.0, stall_s=5.0, request_s=120.0, tries=2)
"""For fetches from replicas while an epoch or a window goes on: less than a newcomer has for a
whole stage."""


class Parts:
    """The parts of one stage, as other peers hold state of them."""

    def __init__(self, stage: StageState, engines: Engines, optimizer: OptimSettings) -> None:
        self._stage, self._engines, self._optimizer = stage.stage, engines, optimizer
        self.shapes = stage.shapes

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        """The names in order, cut so that a batch has about ``BATCH`` bytes of state, a part at
        least."""
        batches: list[list[str]] = []
        room = 0
        for name in names:
            size = sum(4 * math.prod(shape) for shape in self._shapes([name]).values())
            if size > room:
                batches.append([])
                room = BATCH
            batches[-1].append(name)
            room -= size
        return batches

    async def fetch(
        self,
        donor: PeerId,
        kind: StateKind,
        version: Version | None,
        names: Sequence[str],
        tries: int = 1,
        gate: asyncio.Event | None = None,
    ) -> StateSnapshot:
        """State of these parts at exactly ``version``; None: at the newest that is final. With a
        ``gate`` a request at a time, while it is set. Raises PeerFault."""
        e = self._engines
        for left in reversed(range(tries)):
            try:
                return await fetch(
                    e.transport,
                    [donor],
                    self._stage,
                    kind,
                    version,
                    self._shapes(names),
                    settings=e.store.settings,
                    patience=PATIENCE,
                    gate=gate,
                )
            except NoDonor as error:
                if not left:
                    raise PeerFault(donor, error.reasons.get(donor, error.reason)) from error
                await asyncio.sleep(PAUSE_S)
        raise PeerFault(donor, "was not asked")

    async def listing(self, peer: PeerId, kind: StateKind) -> dict[str, Version]:
        """What a member says it keeps; empty when it does not answer in time."""
        transport = self._engines.transport
        request = state_pb2.ListRequest(stage=self._stage, kind=kind.code)
        try:
            async with answers(peer, SEARCH_S):
                answer = await state_pb2_grpc.StateStub(await transport.channel(peer)).List(
                    request, timeout=SEARCH_S
                )
            return listed(answer, self.shapes)
        except WireError as error:
            transport.fault(peer, str(error), 1.0)
        except PeerFault:
            pass  # whoever does not answer has nothing to give now
        return {}

    def _shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {
            f"{n}/{k}": s
            for n in names
            for k, s in state_shapes(n, self.shapes[n], self._optimizer).items()
        }


def listed(answer: state_pb2.StateList, names: Collection[str]) -> dict[str, Version]:
    """Versions of those parts that are among ``names``. Raises WireError for a list that no honest
    peer makes."""
    if len(answer.parts) > len(names):
        raise WireError("a list of more parts than the stage has")
    return {p.name: Version(p.epoch, lineage(p.lineage)) for p in answer.parts if p.name in names}
