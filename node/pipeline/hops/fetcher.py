"""Fetch of the input for a visit that replaces the visit of a dead replica."""

import asyncio

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.pipeline import events as ev
from node.pipeline.events import Direction, Key
from node.pipeline.frames import FrameReader
from node.pipeline.guard import Guard
from node.pipeline.hops.calls import AlreadyThere, PeerCalls
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.intake import FrameIntake
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.hops.stash import Stash
from node.pipeline.route import beside
from node.transport.port import EOF
from protos import pipeline_pb2 as pb


class Fetcher:
    """Asks the hops before a visit for its input, one after the other."""

    def __init__(
        self,
        host: PipelineHost,
        calls: PeerCalls,
        driver: MachineDriver,
        stash: Stash,
        planned: PlannedWork,
        *,
        intake: FrameIntake,
        guard: Guard,
    ) -> None:
        self._host = host
        self._calls = calls
        self._driver = driver
        self._stash = stash
        self._planned = planned
        self._intake = intake
        self._guard = guard
        self._asking: dict[PeerId, set[asyncio.Timeout]] = {}

    def gone(self, peer: PeerId) -> None:
        """End the requests to a dead peer; their inputs are then requested from another peer. (The
        machine itself sends frames anew.)"""
        for patience in self._asking.pop(peer, ()):
            patience.reschedule(asyncio.get_running_loop().time())

    async def fetch(self, action: ev.Fetch) -> None:
        """Get the input of a visit from the first peer of ``action.peers`` that has it."""
        machine = self._driver.machine
        stash = self._stash
        key = action.key
        work = stash.get(key)
        plan = machine.plan
        settled = False
        for peer in action.peers:
            if work is None or plan is None or stash.get(key) is not work:
                return
            try:
                reader = await self._ask(peer, key, action.skipped, plan.hash)
            except AlreadyThere:
                settled = True
                break
            except WireError as e:
                self._host.transport.fault(peer, str(e), 1.0)
            except PeerFault as e:
                self._host.telemetry.emit(
                    "fetch-failed", str(e), "debug", peer=peer, index=key.index
                )
            else:
                if stash.get(key) is not work:
                    return
                journey = machine.visits[key].journey
                stage = journey[beside(journey, key.position, Direction.BACKWARD)].stage
                if self._guard.objection(Direction.FORWARD, stage, peer, key.index, reader):
                    continue
                work.input = reader if work.y is None and work.x is None else work.input
                self._driver.handle(ev.Fetched(key, peer))
                return
        if stash.get(key) is work:
            self._driver.handle(ev.NotFetched(key, settled))

    async def _ask(
        self, peer: PeerId, key: Key, skipped: tuple[int, ...], plan_hash: str
    ) -> FrameReader:
        """Request the input of ``key`` from the hop before it. Raises AlreadyThere if that hop has
        the gradient already, PeerFault if it does not answer, and WireError for a bad tensor."""
        if peer in self._driver.machine.suspects.gone:
            raise PeerFault(peer, "it is dead")
        shape = self._planned.shape_of(key.index)
        masked = self._planned.shape.masked
        loss_mask = self._planned.shape.loss_mask
        giver = max(at for at in range(key.position) if at not in skipped)
        wire = self._planned.wire_of(key.index, giver, Direction.FORWARD)
        request = pb.FetchInput(
            epoch=key.epoch,
            plan_hash=plan_hash,
            index=key.index,
            position=key.position,
            skipped=skipped,
        )
        asking = self._asking.setdefault(peer, set())
        patience = asyncio.timeout(None)
        asking.add(patience)
        try:
            async with patience, self._calls.call(peer, "Fetch", request) as call:
                first = await call.read()
                if first is EOF or first.WhichOneof("part") != "head":
                    raise WireError("no head")
                return await self._intake.read(
                    peer,
                    first.head,
                    shape,
                    masked,
                    call.read,
                    loss_mask=loss_mask,
                    wire=wire,
                    shared=True,
                )
        except TimeoutError as e:
            raise PeerFault(peer, "it has died") from e
        finally:
            asking.discard(patience)
