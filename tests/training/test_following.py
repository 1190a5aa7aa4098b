"""The driver of a member: events one after the other."""

import asyncio
from types import SimpleNamespace
from typing import Any

from node.consensus.admission import Admission
from node.consensus.rules import ChangeStatus, Rules
from node.consensus.terms import Terms
from node.consensus.trust import Trust
from node.consensus.version_history import VersionHistory
from node.coordinator.following import Following
from node.core.ids import PeerId
from node.core.journey import Plan
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


async def test_the_plan_in_force_says_for_how_long_voters_are_needed() -> None:
    colleagues = SimpleNamespace(meet=lambda peers, now: None)
    work = SimpleNamespace(colleagues=colleagues, plan=None)
    kit: Any = SimpleNamespace(clock=VirtualClock(), on_error=None, work=work)
    port: Any = SimpleNamespace(follows=lambda plan: None, leader_changed=lambda: None)
    trust = Trust("run", lambda *about: True)
    admission = Admission(Terms(), trust, ChangeStatus(Rules()), lambda peer: True)
    recalling: Any = SimpleNamespace(history=VersionHistory())
    none: Any = None
    driver = Following(kit, none, admission, none, recalling, port)
    await driver._follow(Plan(0, 1, PeerId("A"), (), (), {}, forecast=(100.0, 20.0)))
    assert trust.quorum.epoch_s == 120.0
