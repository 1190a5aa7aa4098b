import gc
from collections.abc import Iterator

import pytest

from node.sim.world.loop import bury
from tests.cells.leaders import World


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Leave out of each search for garbage what was there before this file."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def worlds() -> Iterator[None]:
    yield
    bury()


@pytest.fixture
def world() -> World:
    return World()
