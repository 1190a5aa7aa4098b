"""Plans from other peers on their way to the member: read, checked, admitted. Enters: a message and
its sender. Leaves: an admitted plan, or the reason of a refusal. Never: a decision; that is
:mod:`node.consensus.admission`."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from node.consensus.admission import LARGE_PLAN, Admission, Ground, Here, Received, Refusal
from node.consensus.rules import Rules
from node.coordinator import notes
from node.coordinator.statements import Statements
from node.core.clock import Clock
from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch.bounds import Bounds
from node.telemetry.events import Journal
from protos import training_pb2 as pb

SAY_AGAIN_S = 60.0
"""Seconds between two reports of plans that are not followed."""


class WorkPort(Protocol):
    """The stage, as far as it checks plans: :class:`node.stage.runtime.StageRuntime`, by
    :mod:`node.epoch.plan_validation`."""

    @property
    def read(self) -> Callable[[str], Rules]:
        """Reads the change in a plan."""
        ...

    def objection(self, plan: Plan) -> str:
        """The reason why nobody could work by a plan, "" for none."""
        ...


class PlanInbox:
    """Reads the plans that come to one peer. ``bounds``: of the run."""

    def __init__(
        self,
        admission: Admission,
        statements: Statements,
        bounds: Bounds,
        work: WorkPort,
        clock: Clock,
        journal: Journal,
    ) -> None:
        self._admission = admission
        self._statements = statements
        self._bounds = bounds
        self._work = work
        self._clock = clock
        self._journal = journal
        self._reading = asyncio.Lock()
        self._said_refused = float("-inf")

    async def receive(
        self, peer: PeerId, note: pb.PlanNote, heeded: bool, here: Callable[[], Here]
    ) -> Plan | Refusal:
        """The plan of a note if the member may take it, else the refusal. ``heeded``: this peer
        took the sender for its leader, and reported to it; ``here()``: this peer by the time that
        the plan is read. Raises WireError for what no honest peer sends."""

        def signed() -> bool:
            return self._statements.is_plan_of(peer, note.plan, note.signature)

        refusal = self._admission.admit_sender(peer, heeded, len(note.plan), signed)
        if refusal is not None:
            return self._refuse(peer, refusal, 0)
        plan, came = await self._read(peer, note, heeded)
        refusal = self._admission.admit(plan, came, here())
        if refusal is not None:
            return self._refuse(peer, refusal, plan.term)
        return plan

    async def _read(self, peer: PeerId, note: pb.PlanNote, heeded: bool) -> tuple[Plan, Received]:
        """The plan of a note, with the epoch's checks of it. A large plan is worked on in a thread,
        one at a time, because the event loop would stand still meanwhile."""
        if len(note.plan) <= LARGE_PLAN:
            return self._parsed(peer, note, heeded)
        async with self._reading:
            return await asyncio.to_thread(self._parsed, peer, note, heeded)

    def _parsed(self, peer: PeerId, note: pb.PlanNote, heeded: bool) -> tuple[Plan, Received]:
        plan = notes.parse_plan(note, self._bounds.paths)
        _ = plan.hash
        numbers = self._bounds.of_plan(plan)
        if numbers or not heeded or plan.leader != peer:
            return plan, Received(peer, heeded, numbers)
        work = self._work.objection(plan)
        if work:
            return plan, Received(peer, heeded, work=work)
        rules = self._work.read(plan.change)
        return plan, Received(peer, heeded, rules=rules, warrant=notes.parse_warrant(note))

    def _refuse(self, peer: PeerId, refusal: Refusal, term: int) -> Refusal:
        """Report a refusal. Raises WireError if it is the sender's fault."""
        if refusal.ground is Ground.FAULT:
            raise WireError(refusal.reason)
        now = self._clock.now()
        if refusal.ground is Ground.UNSUPPORTED and now - self._said_refused >= SAY_AGAIN_S:
            self._said_refused = now
            self._journal.emit(
                "training",
                "plan-refused",
                f"a plan of {peer} is not followed: {refusal.reason}",
                "warning",
                term=term,
            )
        return refusal
