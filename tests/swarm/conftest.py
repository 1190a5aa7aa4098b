"""Whole daemons as processes on this machine: real p2pd, real TLS, a model so small that an epoch
takes a fraction of a second."""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from node.identity.keys import Identity
from testbed.daemons.fleet import Box, signed
from testbed.daemons.forks import Forks


def fault_block(done: subprocess.CompletedProcess) -> tuple[str, list[str]]:
    """The error with which a command ended: the failure, and the lines below it. Fails unless
    stderr is one clear block."""
    lines = done.stderr.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("tutti: ")]
    assert len(heads) == 1, f"not one block:\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    block = lines[heads[0] :]
    rest = [line for line in block[1:] if line.startswith("  ")]
    assert rest, f"no next step:\n{done.stderr}"
    return block[0].removeprefix("tutti: "), [line.strip() for line in rest]


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Process that loads a daemon's modules once and forks every daemon. A daemon's own children
    are started as a person starts them."""
    return Forks()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Box]:
    """An empty box; its processes end with the module."""
    made = Box(tmp_path_factory.mktemp("swarm"), forks=forks)
    yield made
    made.clean_up()


@pytest.fixture(scope="module")
def fault() -> Callable[[subprocess.CompletedProcess], tuple[str, list[str]]]:
    return fault_block


@pytest.fixture(scope="module")
def sign() -> Callable[[Identity, Mapping[str, Any]], bytes]:
    return signed


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Print the daemons' output if the test failed."""
    outcome = yield
    report = outcome.get_result()
    found = getattr(item, "funcargs", {}).get("box")
    if report.failed and isinstance(found, Box):
        report.sections.append(("daemons", found.story()))
