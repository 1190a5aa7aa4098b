"""Keeper of the stash: puts complete tensors into it, and frees entries past their deadline."""

import asyncio

from node.core.clock import Clock
from node.core.ids import PeerId
from node.pipeline.events import Action, Answer, Direction, Expired, Key, Say, TensorReceived
from node.pipeline.frames import FrameReader
from node.pipeline.guard import Guard
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.hops.stash import Stash
from node.pipeline.visit_buffers import VisitBuffers


class StashKeeper:
    """Puts the tensors of peers into the stash, and frees entries that nobody asks for any more."""

    def __init__(
        self,
        stash: Stash,
        driver: MachineDriver,
        planned: PlannedWork,
        deadlines: Deadlines,
        guard: Guard,
        *,
        clock: Clock,
    ) -> None:
        self._stash = stash
        self._driver = driver
        self._planned = planned
        self._deadlines = deadlines
        self._guard = guard
        self._clock = clock
        self._sweeping: asyncio.TimerHandle | None = None

    def take(
        self, event: TensorReceived, stage: int, reader: FrameReader, deadline_s: float
    ) -> tuple[Answer, list[Action]]:
        """Put a complete tensor into the stash, unless the guard objects to its numbers. ``stage``:
        the stage of its sender. Returns the answer, and the actions to carry out after the answer
        was sent."""
        key = event.claim.key
        if objection := self._guard.objection(event.way, stage, event.caller, key.index, reader):
            return Answer(Say.REFUSED, objection), []
        answer, *rest = self._driver.machine.handle(event, self._clock.now())
        if not isinstance(answer, Answer):
            answer = Answer(Say.REFUSED, "no answer")
        if answer.say is Say.TAKE:
            planned = self._planned
            stash = self._stash
            work = stash.get(key)
            if work is None:
                path = self._driver.machine.paths.get(key.index)
                work = VisitBuffers(
                    self._clock.now() + min(deadline_s, self._deadlines.longest(path)),
                    planned.shape_of(key.index),
                    origin=event.claim.journey[0].peer,
                    wires=planned.wires_of(key),
                )
                stash.put(key, work, planned.cost(key.index, graph=not planned.at_origin(key)))
                self._sweep_later()
            if event.way is Direction.BACKWARD:
                work.gradient = reader
                stash.recharge(key, work.nbytes + reader.nbytes)
            else:
                work.input = reader
                if planned.at_origin(
                    key
                ):  # the loss needs the targets, which were kept at its first hop
                    start = stash.get(Key(key.epoch, key.index, 0))
                    work.targets = None if start is None else start.targets
        return answer, rest

    def make_room(self, nbytes: int, origin: PeerId | None = None) -> bool:
        """Return True if the stash takes ``nbytes`` more bytes of ``origin``. Entries past their
        deadline are freed for them."""
        if self._stash.room(nbytes, origin):
            return True
        for key in self._stash.expired(self._clock.now()):
            self._driver.handle(Expired(key))
        return self._stash.room(nbytes, origin)

    def slots(self) -> int:
        """Number of the plan's micro-batches that the stash takes at once; 0 while the size of a
        micro-batch is not known."""
        cost = self._planned.first_cost()
        if not cost:
            return 0
        return max(1, self._stash.limit // cost)

    def _sweep_later(self) -> None:
        if self._sweeping is None and (first := self._stash.first_deadline()) is not None:
            wait_s = self._deadlines.hop_s + max(0.0, first - self._clock.now())
            self._sweeping = asyncio.get_running_loop().call_later(wait_s, self._sweep)

    def _sweep(self) -> None:
        """Expire stash entries one hop's time after their deadline."""
        self._sweeping = None
        for key in self._stash.expired(self._clock.now() - self._deadlines.hop_s):
            self._driver.handle(Expired(key))
        self._sweep_later()

    def stop(self) -> None:
        """Cancel the timer, which keeps this object alive."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
