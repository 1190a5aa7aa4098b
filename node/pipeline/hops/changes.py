"""News for the frames that wait: another plan, or more room in the stash."""

import asyncio


class Changes:
    """One event for all that wait. Each change sets it and puts a new one in its place, so that a
    frame that waits takes the event before it looks at the plan and the room."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def notify(self) -> None:
        """Wake the frames that wait for a plan or for room."""
        self.event.set()
        self.event = asyncio.Event()
