"""Signal of a change: another plan, more room in the stash, the end of a micro-batch."""

import asyncio


class Changes:
    """One event for all waiters. Each change sets the event and puts a new one in its place. A
    waiter takes the event before it looks at what it waits for, so that it misses no change."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def notify(self) -> None:
        """Wake all that wait."""
        self.event.set()
        self.event = asyncio.Event()
