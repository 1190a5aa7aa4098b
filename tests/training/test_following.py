"""The driver of a member: events one after the other."""

import asyncio
from types import SimpleNamespace
from typing import Any

from node.coordinator.following import Following
from testbed.fakes.clock import VirtualClock


def following(member: Any) -> Following:
    kit: Any = SimpleNamespace(clock=VirtualClock(), on_error=None)
    none: Any = None
    return Following(kit, member, none, none, none, none)


async def test_an_event_is_judged_by_what_holds_when_its_turn_comes() -> None:
    """A plan waits while the work of another one is carried out, and may undo it then."""
    handled: list[object] = []
    begun = asyncio.Event()
    goes_on = asyncio.Event()

    class Slow:
        """A member whose first event orders something that takes a while."""

        def handle(self, event: object, now: float) -> list[object]:
            handled.append(event)
            return ["work"] if event == "first" else []

    driver = following(Slow())

    async def act(action: object) -> None:
        begun.set()
        await goes_on.wait()

    driver._act = act  # type: ignore[method-assign]
    why = ""
    first = asyncio.create_task(driver.told("first"))
    await begun.wait()
    second = asyncio.create_task(driver.told("second", lambda: why))
    third = asyncio.create_task(driver.told("third", lambda: ""))
    await asyncio.sleep(0)
    why = "committed meanwhile"
    goes_on.set()
    assert await asyncio.gather(first, second, third) == [None, "committed meanwhile", None]
    assert handled == ["first", "third"]
