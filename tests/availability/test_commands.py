"""Answers of a daemon to the operator's pause."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.app.operator_service import OperatorService
from node.availability import kept
from node.availability.keeper import AvailabilityKeeper
from node.availability.settings import AvailabilitySettings
from node.core.errors import NetworkFault
from node.telemetry.events import Journal
from testbed.fakes.clock import VirtualClock


@pytest.fixture
def daemon(tmp_path) -> Any:
    """A daemon that ends before its memory is given back."""
    journal = Journal()
    keeper = AvailabilityKeeper(AvailabilitySettings(), tmp_path / "pause.json", journal)
    return SimpleNamespace(
        role="auto",
        put_away=asyncio.Event(),
        availability=keeper,
        ending=True,
        state="stopping",
        journal=journal,
        clock=VirtualClock(),
    )


async def test_a_daemon_that_ends_says_that_it_will_start_paused(daemon, tmp_path):
    with pytest.raises(NetworkFault) as answer:
        await OperatorService(daemon).pause(None, "a film", now=False)
    assert "stopping, and will be paused when it starts again" in answer.value.what
    assert kept.read(tmp_path / "pause.json") is not None


async def test_a_pause_that_was_lifted_meanwhile_is_not_promised(daemon):
    daemon.ending = False
    answer = asyncio.ensure_future(OperatorService(daemon).pause(None, "a film", now=False))
    await asyncio.sleep(0)
    daemon.availability.resume()
    daemon.ending = True
    with pytest.raises(NetworkFault, match="not paused: this daemon is stopping"):
        await answer


async def test_a_daemon_that_ends_without_a_pause_on_the_disk_is_not_paused(daemon, monkeypatch):
    def full(path, pause) -> None:
        raise OSError("no space")

    monkeypatch.setattr(kept, "write", full)
    with pytest.raises(NetworkFault, match="not paused: this daemon is stopping"):
        await OperatorService(daemon).pause(None, "", now=False)
