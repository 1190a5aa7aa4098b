"""The machine of a pipeline among its effects: events in, actions carried out, waiters told."""

import asyncio
from collections.abc import Callable, Iterable

from node.core.clock import Clock
from node.pipeline.events import Action, Answer, Direction, Event, Key, Say
from node.pipeline.machine import PipelineMachine

Waiter = asyncio.Future[tuple[bool, str]]


class MachineDriver:
    """Gives the machine its events. ``act`` carries out one action."""

    def __init__(
        self, machine: PipelineMachine, clock: Clock, act: Callable[[Action], None]
    ) -> None:
        self.machine = machine
        self._clock = clock
        self._act = act
        self._handled = asyncio.Event()
        self._waiters: dict[tuple[Key, Direction], list[Waiter]] = {}

    def handle(self, event: Event) -> Answer:
        """Give the machine an event, carry out its actions, and return its answer; where the event
        has none, a refusal."""
        actions = self.machine.handle(event, self._clock.now())
        self._handled.set()
        self.carry_out(action for action in actions if not isinstance(action, Answer))
        return next(
            (action for action in actions if isinstance(action, Answer)),
            Answer(Say.REFUSED, "no answer"),
        )

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out the machine's decisions, except for answers, which are their caller's."""
        for action in actions:
            self._act(action)

    async def handled(self) -> None:
        """Wait until :meth:`handle` has given the machine another event."""
        self._handled.clear()
        await self._handled.wait()

    def outcome(self, key: Key, way: Direction) -> Waiter:
        """A future of (DONE or not, reason) for the peer that sent this tensor."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        if self.machine.told(key, way):
            waiter.set_result((True, ""))
        elif key not in self.machine.visits:
            waiter.set_result((False, "freed"))
        else:
            self._waiters.setdefault((key, way), []).append(waiter)
        return waiter

    def resolve(self, key: Key, way: Direction, done: bool, reason: str) -> None:
        """Tell those that wait for the :meth:`outcome` of a tensor."""
        for waiter in self._waiters.pop((key, way), ()):
            if not waiter.done():
                waiter.set_result((done, reason))
