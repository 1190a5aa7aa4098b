"""Driver of the pipeline's state machine: hands it events, has its actions carried out, and
resolves the futures of waiting calls."""

import asyncio
from collections.abc import Callable, Iterable

from node.core.clock import Clock
from node.pipeline.events import Action, Answer, Direction, Event, Key, Say
from node.pipeline.machine import PipelineMachine

Waiter = asyncio.Future[tuple[bool, str]]


class MachineDriver:
    """Hands events to the state machine. ``act`` carries out one action."""

    def __init__(
        self, machine: PipelineMachine, clock: Clock, act: Callable[[Action], None]
    ) -> None:
        self.machine = machine
        self._clock = clock
        self._act = act
        self._handled = asyncio.Event()
        self._waiters: dict[tuple[Key, Direction], list[Waiter]] = {}

    def handle(self, event: Event) -> Answer:
        """Hand an event to the machine, carry out its actions, and return its answer. If the
        machine gives no answer, return a refusal."""
        actions = self.machine.handle(event, self._clock.now())
        self._handled.set()
        self.carry_out(action for action in actions if not isinstance(action, Answer))
        return next(
            (action for action in actions if isinstance(action, Answer)),
            Answer(Say.REFUSED, "no answer"),
        )

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out actions of the machine. There must be no answer among them: an answer goes to
        the caller of :meth:`handle`."""
        for action in actions:
            self._act(action)

    async def handled(self) -> None:
        """Wait until :meth:`handle` has given the machine another event."""
        self._handled.clear()
        await self._handled.wait()

    def outcome(self, key: Key, way: Direction) -> Waiter:
        """A future of (True for DONE, reason) for the peer that sent this tensor."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        if self.machine.told(key, way):
            waiter.set_result((True, ""))
        elif key not in self.machine.visits:
            waiter.set_result((False, "freed"))
        else:
            self._waiters.setdefault((key, way), []).append(waiter)
        return waiter

    def resolve(self, key: Key, way: Direction, done: bool, reason: str) -> None:
        """Resolve the futures that :meth:`outcome` returned for a tensor."""
        for waiter in self._waiters.pop((key, way), ()):
            if not waiter.done():
                waiter.set_result((done, reason))
