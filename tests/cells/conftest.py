from collections.abc import Iterator

import pytest

from node.sim.world.loop import bury


@pytest.fixture(autouse=True)
def worlds() -> Iterator[None]:
    yield
    bury()
