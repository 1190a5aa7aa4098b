from collections.abc import Iterator

import pytest

from node.sim.world.loop import bury
from tests.cells.leaders import World


@pytest.fixture(autouse=True)
def worlds() -> Iterator[None]:
    yield
    bury()


@pytest.fixture
def world() -> World:
    return World()
