"""constraints.txt pins everything, satisfies pyproject.toml, and matches the packages installed
here."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


@pytest.fixture(scope="session")
def pins(root: Path) -> dict[str, Version]:
    lines = [
        line
        for line in (root / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), (
        "exact versions, none local"
    )
    return {
        canonicalize_name(name): Version(text)
        for name, text in (line.split("==") for line in lines)
    }


def requirements(root: Path) -> list[Requirement]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    parts = (project["dependencies"], *project["optional-dependencies"].values())
    return [Requirement(text) for part in parts for text in part]


def test_every_requirement_is_pinned_to_something_it_allows(
    root: Path, pins: dict[str, Version]
) -> None:
    for requirement in requirements(root):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(
            requirement
        )


def test_torch_is_installed_first_in_the_version_that_is_pinned(
    root: Path, pins: dict[str, Version]
) -> None:
    assert str(pins["torch"]) == "2.13.0"
    for file in ("Makefile", "Dockerfile"):
        text = (root / file).read_text()
        assert 0 < text.index('"torch==2.13.0"') < text.index("--no-deps -r constraints.txt")


def test_what_is_installed_is_what_is_pinned(pins: dict[str, Version]) -> None:
    found: dict[str, str] = {}
    for name in pins:
        try:
            found[name] = Version(version(name)).public
        except PackageNotFoundError:
            continue  # of an extra that is not installed, or of another platform
    assert "torch" in found
    assert found == {name: str(pins[name]) for name in found}
