"""Swarms of one test are released before the next one begins."""

from collections.abc import Iterator

import pytest

from node.sim.world.loop import bury, quiet


@pytest.fixture(autouse=True)
def _buried() -> Iterator[None]:
    yield
    bury()


@pytest.fixture
def silence() -> Iterator[None]:
    with quiet():
        yield
