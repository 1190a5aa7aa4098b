"""The installed program. Other tests run from the checkout, where any import path leads to it."""

import os
import subprocess
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import pytest

from node.data.confined.process import ROOT
from node.manifest import read_manifest

PROGRAM = Path(sysconfig.get_path("scripts")) / "tutti"


@pytest.fixture(autouse=True)
def installed() -> None:
    where = distribution("tutti").read_text("direct_url.json") or ""
    if f'"file://{ROOT}"' not in where or not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not an installation of {ROOT}")


def test_data_is_parsed_by_the_installed_program_from_any_directory(tmp_path: Path) -> None:
    """A process of its own parses the rows. It must find the program without the working directory
    and without the hook of an editable installation."""
    rows = "".join(f'{{"text": "row {i} of a text"}}\n' for i in range(200))
    (tmp_path / "rows.jsonl").write_text(rows)
    words = ("swarm", "init", "--data", "rows.jsonl", "--set", "model.seq_len=32")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [PROGRAM, "--home", tmp_path / "home", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "swarm.toml").data.sha256
