import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from node.control.client import ControlClient
from node.control.service import ControlService
from testbed.fakes.canned_window import CannedWindow


async def ask(path: Any, question: Callable[[ControlClient], Any]) -> Any:
    """The synchronous client in a thread, since the command line is a process of its own."""

    def run() -> Any:
        with ControlClient(path, timeout_s=60.0) as client:
            return question(client)

    return await asyncio.to_thread(run)


@pytest.fixture
async def window():
    return CannedWindow()


@pytest.fixture
async def socket(tmp_path, window):
    """A real control service on a unix socket, answering from ``window``."""
    service = ControlService(window, tmp_path / "ctl.sock")
    await service.start()
    yield service.path
    await service.close(0.1)
