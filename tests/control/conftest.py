import pytest

from benchmarks.lab.canned_window import CannedWindow
from node.control.service import ControlService


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
