"""Settings of all tests: the same examples on every machine and in every run, and the tests' order.

`pytest --hypothesis-profile search` draws new examples: 1,000 where a test names no number.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from node.core import libraries

libraries.prepare()  # before these are loaded
import grpc.aio  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# Otherwise gRPC ends its thread whenever a test leaves no server and no channel. Its end waits for
# ever if the test's loop no longer reads the thread's messages.
grpc.aio.init_grpc_aio()

# A busy machine makes single examples slow; the tests say nothing about time.
settings.register_profile("tutti", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("tutti")

T = TypeVar("T")
LONGEST = (
    "chaos",
    "broken_networks",
    "routers",
    "losses",
    "whole_run",
    "cells",
    "frozen",
    "demo",
    "solo",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests with whole daemons are in tests/swarm, where `make test` looks for them."""
    if item.get_closest_marker("swarm"):
        assert item.path.parent.name == "swarm", f"{item.nodeid} belongs into tests/swarm"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest begin first: else workers wait for one of them at the end. Of tests that start
    whole daemons these are files, of the others the tests in tests/sim."""
    if any(item.get_closest_marker("swarm") for item in items):
        order = {f"test_{name}": n for n, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
        return
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    found = dealt(items, lambda item: item.path.parent.name == "sim", workers)
    assert len(found) == len(items)
    items[:] = found


def dealt(items: Sequence[T], long: Callable[[T], bool], workers: int) -> list[T]:
    """Return the items in another order. ``workers`` take it in pieces of equal size, and each
    piece begins with its share of the long ones; the others stay beside their neighbours."""
    first = [item for item in items if long(item)]
    rest = (item for item in items if not long(item))
    found: list[T] = []
    for worker in range(workers):
        size = (len(items) - len(found)) // (workers - worker)
        share = first[workers - 1 - worker :: workers]
        found += [*share, *islice(rest, size - len(share))]
    return found


def pytest_collection_finish() -> None:
    """Exempt objects that all tests share from the search for garbage, which the simulator's tests
    start after each test."""
    gc.freeze()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Give torch two threads for one operation."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
