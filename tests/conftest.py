"""The same examples on every machine and in every run, and the order of files with whole daemons.

`pytest --hypothesis-profile search` draws new ones, ten times as many where a test names no number.
"""

import gc
import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is loaded; it tells of every end
import grpc.aio
import pytest
from hypothesis import settings

# Else gRPC ends its thread each time that a test leaves no server and no channel, and that waits
# for ever where the test's loop no longer takes what the thread writes.
grpc.aio.init_grpc_aio()

# A busy machine makes single examples slow; the tests say nothing about time.
settings.register_profile("tutti", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("tutti")

LONGEST = ("routers", "losses", "whole_run", "broken_networks", "chaos", "cells", "demo", "solo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin first: else one worker waits for another at the end. Tests
    with whole daemons are in tests/swarm, where `make test` looks for them."""
    daemons = [item for item in items if item.get_closest_marker("swarm")]
    assert {item.path.parent.name for item in daemons} <= {"swarm"}
    order = {f"test_{name}": n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)) if daemons else 0)


def pytest_collection_finish() -> None:
    """What all tests share is not looked through when garbage is collected: the simulator's tests
    do so after each."""
    gc.freeze()
