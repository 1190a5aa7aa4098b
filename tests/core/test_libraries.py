"""Environment variables of libraries: set before these are loaded, and the user's own are kept."""

import os
import subprocess
import sys

import pytest

from node.core import libraries

ASKED = """
import os
import sys

import cli

assert "torch" not in sys.modules
cli.main(["--version"])
print(os.environ.get("GOMP_SPINCOUNT", "none"))
"""


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, str(libraries.SPINS)),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "none"),
    ],
)
def test_threads_that_wait_give_their_core_away(given: dict[str, str], then: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(
        command, env=environment | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == then
