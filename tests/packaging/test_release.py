"""The files of a release: what the wheel holds, how notes are cut, and one list of steps."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from node.core.version import VERSION
from tools import release
from tools.release import IMAGE, STEPS, Release, ReleaseError, committed, missing_in, notes_of

CHANGES = """# Changelog

About it.

## Unreleased

### A part

* `## no heading`, a thing.

#### A smaller part

## 0.2.0

* Second.

## 0.1.0 (2026-01-01)

First.

## 0.0.1
"""


@pytest.mark.parametrize(
    ("heading", "notes"),
    [
        ("Unreleased", "## A part\n\n* `## no heading`, a thing.\n\n### A smaller part\n"),
        ("0.2.0", "* Second.\n"),
        ("0.1.0", "First.\n"),
    ],
)
def test_notes_are_the_section_of_the_version(heading: str, notes: str) -> None:
    assert notes_of(CHANGES, heading) == notes


@pytest.mark.parametrize("heading", ["0.2", "0.0.1", "2.0", "Changelog"])
def test_a_version_without_notes_is_not_released(heading: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape(heading)):
        notes_of(CHANGES, heading)


def test_the_changelog_has_notes_for_every_heading(root: Path) -> None:
    text = (root / "CHANGELOG.md").read_text()
    headings = re.findall(r"(?m)^## (\S+)", text)
    assert headings[0] == "Unreleased"
    assert VERSION in headings
    bodies = [notes_of(text, heading) for heading in headings]
    kept = [line for body in bodies for line in body.splitlines() if line.startswith("* ")]
    assert kept == [line for line in text.splitlines() if line.startswith("* ")]


def test_a_tag_names_the_version(root: Path, tmp_path: Path) -> None:
    made = Release(root, tmp_path, f"v{VERSION}")
    assert made.version == VERSION
    release.check_version(made)
    with pytest.raises(ReleaseError, match="is not v"):
        release.check_version(Release(root, tmp_path, "v99.0.0"))


@pytest.fixture(scope="module")
def workflow(root: Path) -> list[dict[str, Any]]:
    """Steps of the workflow."""
    document = yaml.safe_load((root / ".github/workflows/release.yml").read_text())
    assert document[True] == {"push": {"tags": ["v*"]}}  # "on" is a truth value in YAML 1.1
    [job] = document["jobs"].values()
    assert job["env"]["RELEASE"].startswith(".venv-release/bin/python -m tools.release --tag ")
    return job["steps"]


def test_workflow_and_script_have_the_same_steps(workflow: list[dict[str, Any]]) -> None:
    made = [step["run"].split()[1] for step in workflow if "$RELEASE " in step.get("run", "")]
    assert made == [*STEPS]
    assert made == [step["name"] for step in workflow if "$RELEASE " in step.get("run", "")]
    names = [step.get("name", "") for step in workflow if "run" in step]
    assert names == ["tools", *STEPS, "publish"]


def test_the_last_step_alone_publishes(workflow: list[dict[str, Any]], root: Path) -> None:
    assert [step["name"] for step in workflow if "github.token" in str(step)] == ["publish"]
    assert "gh release create" in workflow[-1]["run"]
    uses = [step["uses"] for step in workflow if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", use) for use in uses)
    assert workflow[0]["with"]["persist-credentials"] is False
    source = (root / "tools/release.py").read_text()
    makefile = (root / "Makefile").read_text()
    for word in ("twine", "gh release", "docker push", "docker login", "uv publish"):
        assert word not in source + makefile


def test_make_release_runs_the_script(root: Path) -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "release", "RELEASE=--without-image"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ".venv-release/bin/python -m tools.release --without-image" in shown


def test_a_step_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        release.main(["upload", "--out", str(tmp_path / "out")])
    assert f"no step upload: there are {', '.join(STEPS)}" in capsys.readouterr().err


def test_steps_without_tools_make_their_files(root: Path, tmp_path: Path) -> None:
    """Pins, notes and checksums, as a trial; `sha256sum` agrees."""
    assert (
        release.main(
            ["pins", "notes", "checksums", IMAGE, "--without-image", "--out", str(tmp_path)]
        )
        == 0
    )
    files = {f.name for f in tmp_path.iterdir()}
    assert files == {"constraints.txt", "hashes.txt", "overrides.txt", "NOTES.md", "SHA256SUMS"}
    checked = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True
    )
    assert (checked.returncode, checked.stdout.count(b": OK")) == (0, 4)
    (tmp_path / "NOTES.md").write_text("other\n")
    checked = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True
    )
    assert checked.returncode == 1


def test_files_of_an_earlier_release_are_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    stale = out / "tutti-0.0.9-py3-none-any.whl"
    stale.touch()
    assert release.main(["version", "--out", str(out)]) == 1
    assert "tutti-0.0.9-py3-none-any.whl already" in capsys.readouterr().err
    assert release.main(["pins", "notes", "checksums", "--out", str(out)]) == 1
    assert f"is no file of {VERSION}" in capsys.readouterr().err
    assert stale.exists(), "nothing of a person is removed"
    stale.unlink()
    assert release.main(["checksums", "--out", str(out)]) == 0
    for file in out.iterdir():
        file.unlink()
    assert release.main(["version", "--out", str(out)]) == 0


def test_overrides_name_what_is_pinned_against_a_package(root: Path) -> None:
    """Each override is a pin of constraints.txt that the resolver would refuse."""
    pins = {
        canonicalize_name(name): version
        for name, _, version in (
            line.partition("==") for line in (root / "constraints.txt").read_text().splitlines()
        )
    }
    text = (root / "deploy/overrides.txt").read_text()
    overrides = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    assert overrides
    for one in overrides:
        assert str(one.specifier) == f"=={pins[canonicalize_name(one.name)]}"


@pytest.fixture(scope="module")
def source(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this tree that git has, with the changes of this tree."""
    where = tmp_path_factory.mktemp("source")
    committed(root, where)
    changed = subprocess.check_output(
        ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"], cwd=root
    )
    for name in filter(None, changed.decode().split("\0")):
        place = where / name
        if (root / name).is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((root / name).read_bytes())
        else:
            place.unlink(missing_ok=True)
    return where


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A wheel of this tree, made by the build backend as pip calls it."""
    where = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(where)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    [made] = where.iterdir()
    return made


def test_the_wheel_holds_everything_that_the_program_reads(wheel: Path, source: Path) -> None:
    assert wheel.name == f"tutti-{VERSION}-py3-none-any.whl"
    assert missing_in(wheel, source) == []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(f"tutti-{VERSION}.dist-info/METADATA").decode())
        entry = archive.read(f"tutti-{VERSION}.dist-info/entry_points.txt").decode()
    for name in (
        "node/web/static/index.html",
        "node/web/static/uPlot.iife.min.js",
        "node/tui/monitor.tcss",
        "protos/control.proto",
        "protos/control_pb2.py",
    ):
        assert name in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cli.py", "tutti.py", "node", "protos", f"tutti-{VERSION}.dist-info"}
    assert "tutti = tutti:main" in entry
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_a_file_that_the_wheel_lacks_is_found(wheel: Path, source: Path, tmp_path: Path) -> None:
    cut = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(cut, "w") as copy:
        for name in archive.namelist():
            if name != "node/web/static/page.js":
                copy.writestr(name, archive.read(name) + (b"#" if name == "cli.py" else b""))
    assert missing_in(cut, source) == ["cli.py", "node/web/static/page.js"]
