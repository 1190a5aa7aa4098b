import gc
from collections.abc import Iterator

import pytest

from node.sim.world.loop import bury
from tests.cells.leaders import World


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exempt all objects older than this file from the searches for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def worlds() -> Iterator[None]:
    yield
    bury()


@pytest.fixture
def world() -> World:
    return World()
