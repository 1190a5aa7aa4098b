"""Fixtures of the named regressions: real peers on loopback, a process of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transport.conftest import swarm as peers  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]


@pytest.fixture
def apart() -> Callable[[str], str]:
    """Run code in a process of its own and return its stdout; fails if the process does not end by
    itself with 0."""

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, f"ended with {done.returncode}\n{done.stderr[-2000:]}"
        return done.stdout

    return run
