"""Admission of training frames: asks the state machine about the head of a frame, and waits for a
plan or for room in the stash where that helps."""

import asyncio

from node.core.ids import PeerId
from node.pipeline.events import Answer, Arrived, Direction, Say
from node.pipeline.frames import Incoming
from node.pipeline.hops.changes import Changes
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.keeper import StashKeeper
from node.pipeline.hops.planned import PlannedWork

ROOM_WAIT = 0.25
"""Fraction of a hop's time that a patient frame may wait for room. The rest is for the tensor and
the computation."""


class FrameAdmission:
    """The check of a frame before its tensor is read. ``plan_wait_s``: seconds that a frame waits
    for its plan, if the plan has not arrived yet."""

    def __init__(
        self,
        driver: MachineDriver,
        planned: PlannedWork,
        keeper: StashKeeper,
        deadlines: Deadlines,
        changes: Changes,
        *,
        plan_wait_s: float,
    ) -> None:
        self._driver = driver
        self._planned = planned
        self._keeper = keeper
        self._deadlines = deadlines
        self._changes = changes
        self._plan_wait_s = plan_wait_s

    async def ask(self, way: Direction, caller: PeerId, incoming: Incoming) -> tuple[Answer, int]:
        """Return (the machine's answer to a head, bytes to reserve in the stash). A frame whose
        plan has not arrived waits for the plan, and a patient frame waits for room; both waits are
        bounded, and end with BUSY."""
        planned = self._planned
        claim = incoming.claim
        answer = Answer(Say.AWAIT_PLAN)
        until = asyncio.get_running_loop().time() + ROOM_WAIT * self._deadlines.hop_s
        try:
            async with asyncio.timeout(self._plan_wait_s) as patience:
                while True:
                    changed = self._changes.event
                    cost = planned.cost(claim.index, graph=not planned.at_origin(claim.key))
                    room = self._keeper.make_room(cost, claim.journey[0].peer)
                    answer = self._driver.handle(Arrived(way, claim, caller, room))
                    if answer.say is Say.BUSY and incoming.head.patient:
                        patience.reschedule(until)
                    elif answer.say is not Say.AWAIT_PLAN:
                        return answer, cost
                    await changed.wait()
        except TimeoutError:
            # An unknown plan may still be on its way. Its sender asks again until its own deadline.
            return Answer(Say.BUSY, answer.reason), 0
