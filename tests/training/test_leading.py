"""The driver of a leader: what the answers of members mean."""

from types import SimpleNamespace
from typing import Any

import pytest

from node.coordinator.leading import Leading
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.epoch import events as ev
from node.epoch.plan_context import GENESIS
from node.telemetry.events import Journal
from testbed.fakes.clock import VirtualClock
from tests.training.test_member import LEADER, ME, opened, plan_from

PLAN = plan_from(GENESIS, 1)


def leading(answer: Any) -> tuple[Leading, list[Any]]:
    """A driver whose messages are answered by ``answer()``, and the events of its leader."""
    kit: Any = SimpleNamespace(clock=VirtualClock(), me=LEADER, journal=Journal())

    async def send(peer: PeerId, note: Any, *seconds: float) -> Any:
        return answer()

    messenger: Any = SimpleNamespace(send_with_retry=send)
    none: Any = None
    router: Any = SimpleNamespace(search=None)
    driver = Leading(kit, none, none, none, messenger, none, router)
    heard: list[Any] = []
    driver.lead = heard.append  # type: ignore[method-assign]
    return driver, heard


@pytest.mark.parametrize("event", [ev.PlanArrived(PLAN), opened(PLAN)])
async def test_a_refusal_names_the_plan_that_it_belongs_to(event: Any) -> None:
    driver, heard = leading(lambda: "not now")
    assert await driver._deliver(ME, None, event) is None  # type: ignore[arg-type]
    assert heard == [ev.Unreachable(ME, plan_hash=PLAN.hash)]


async def test_a_peer_that_does_not_answer_is_gone_whatever_the_plan() -> None:
    def answer() -> None:
        raise PeerFault(ME, "no answer")

    driver, heard = leading(answer)
    assert await driver._deliver(ME, None, ev.PlanArrived(PLAN)) is None  # type: ignore[arg-type]
    assert heard == [ev.Unreachable(ME)]


async def test_a_peer_that_accepts_is_told_of_to_nobody() -> None:
    driver, heard = leading(lambda: None)
    assert await driver._deliver(ME, None, ev.PlanArrived(PLAN)) == ME  # type: ignore[arg-type]
    assert heard == []
