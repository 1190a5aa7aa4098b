"""The licence and the version that every place states."""

import re
import tomllib
from pathlib import Path

from node.core.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_place_states_the_same_version() -> None:
    assert PROJECT["version"] == VERSION
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION


def test_the_licence_is_in_the_package_and_the_image() -> None:
    (name,) = PROJECT["license-files"]
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / name).read_text()
    assert f"!{name}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert re.search(rf"^COPY .*\b{name}\b", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
