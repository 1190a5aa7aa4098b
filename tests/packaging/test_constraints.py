"""constraints.txt pins everything, satisfies pyproject.toml, and matches the packages installed
here; hashes.txt has the digests of the same releases, and everything is installed by them."""

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ENTRY = re.compile(r"(\S+)==(\S+)((?: \\\n {4}--hash=sha256:[0-9a-f]{64})*)\n")


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


def installs(path: Path) -> list[str]:
    """Arguments of each `pip install` in this file, up to the one that installs the project."""
    found = re.findall(
        r"(?m)^(?!INSTALL :=).*(?:pip install|\(INSTALL\)) (.*?)(?: \\)?$", path.read_text()
    )
    own = next(at for at, words in enumerate(found) if words.endswith(" ."))
    return found[: own + 1]


def test_every_requirement_is_pinned_to_something_it_allows(
    root: Path, pins: dict[str, Version]
) -> None:
    for requirement in requirements(root):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(
            requirement
        )


def test_every_pinned_release_has_digests(root: Path, pins: dict[str, Version]) -> None:
    text = re.sub(r"(?m)^#.*\n", "", (root / "hashes.txt").read_text())
    assert ENTRY.sub("", text) == ""
    entries = ENTRY.findall(text)
    expected = {name: str(pin) for name, pin in pins.items() if name != "torch"}
    assert {canonicalize_name(name): text for name, text, _ in entries} == expected, (
        "after a change of constraints.txt run  make hashes"
    )
    for name, _, hashes in entries:
        assert hashes, name
        listed = hashes.split("sha256:")[1:]
        assert len(listed) == len(set(listed))


@pytest.mark.parametrize(("file", "own"), [("Makefile", "-e ."), ("Dockerfile", ".")])
def test_everything_but_torch_is_installed_by_its_digest(
    root: Path, pins: dict[str, Version], file: str, own: str
) -> None:
    """Without isolation, packages are built by the setuptools that was checked first."""
    first, rest, torch, project = installs(root / file)
    assert re.fullmatch(r"--no-deps --require-hashes -r (\S+/)?setuptools\.txt", first)
    assert rest == "--no-deps --require-hashes --no-build-isolation -r hashes.txt"
    assert torch.endswith(f'"torch=={pins["torch"]}"')
    assert "-r" not in torch.split()
    assert project == f"--no-deps --no-build-isolation {own}"


@pytest.mark.parametrize("file", ["Makefile", "Dockerfile"])
def test_setuptools_is_cut_from_the_list(root: Path, pins: dict[str, Version], file: str) -> None:
    command = re.findall(r"sed -n '(.*setuptools.*)' hashes\.txt > ", (root / file).read_text())
    script = command[0].replace("$$", "$")
    cut = subprocess.run(
        ["sed", "-n", script, str(root / "hashes.txt")], capture_output=True, text=True, check=True
    ).stdout
    assert ENTRY.fullmatch(cut)
    assert cut.startswith(f"setuptools=={pins['setuptools']} \\\n")


def test_what_is_installed_is_what_is_pinned(pins: dict[str, Version]) -> None:
    found: dict[str, str] = {}
    for name in pins:
        try:
            found[name] = Version(version(name)).public
        except PackageNotFoundError:
            continue  # of an extra that is not installed, or of another platform
    assert "torch" in found
    assert found == {name: str(pins[name]) for name in found}
