"""Signal to waiting frames: there is another plan, or more room in the stash."""

import asyncio


class Changes:
    """One event for all waiting frames. Each change sets the event and puts a new one in its place.
    A waiter takes the event before it looks at the plan and the room, so that it misses no
    change."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def notify(self) -> None:
        """Wake the frames that wait for a plan or for room."""
        self.event.set()
        self.event = asyncio.Event()
