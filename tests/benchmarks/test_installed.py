"""The steps of a Dockerfile without an engine, as far as they need no new root."""

from pathlib import Path

import pytest

from benchmarks.installed.image import Build, context

STEPS = [
    ("FROM", "python:3.11-slim AS build"),
    ("ENV", "PATH=/opt/it/bin:$PATH NAME='a b'"),
    ("ARG", "INDEX="),
    ("WORKDIR", "/src"),
    ("COPY", "cli.py tutti.py ./"),
    ("COPY", "node ./node"),
    ("FROM", "python:3.11-slim"),
    ("COPY", "--from=build /src /opt/it"),
    ("USER", "10001:10001"),
    ("WORKDIR", "/state"),
    ("ENTRYPOINT", '["tutti"]'),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with files, of which .dockerignore lets some through."""
    where = tmp_path / "source"
    (where / "node/web").mkdir(parents=True)
    for name in ("cli.py", "tutti.py", "secret", "node/a.py", "node/web/b.css"):
        (where / name).write_text(name)
    (where / ".dockerignore").write_text("*\n!cli.py\n!tutti.py\n!node\n**/__pycache__\n")
    return where


def test_steps_change_their_stage_alone(tmp_path: Path, source: Path) -> None:
    base = tmp_path / "base"
    (base / "etc").mkdir(parents=True)
    let_through = context(source, tmp_path / "context")
    assert {f.name for f in let_through.iterdir()} == {"cli.py", "tutti.py", "node"}
    build = Build(tmp_path, STEPS, let_through, base)
    stage = build.run()
    assert build.count == len(STEPS)
    first = tmp_path / "stage-0"
    assert (first / "src/node/web/b.css").read_text() == "node/web/b.css"
    assert not (first / "opt").exists()
    assert stage.root == tmp_path / "stage-1"
    assert sorted(f.name for f in (stage.root / "opt/it").iterdir()) == [
        "cli.py",
        "node",
        "tutti.py",
    ]
    assert not (stage.root / "src").exists()
    assert (stage.root / "state").is_dir()
    assert (stage.user, stage.directory) == ("10001:10001", "/state")
    assert stage.said["ENTRYPOINT"] == '["tutti"]'
    assert "NAME" not in stage.environment
    assert build.stages["build"].environment["NAME"] == "a b"
    assert build.stages["build"].environment["PATH"].startswith("/opt/it/bin:/usr/local/sbin")
    assert build.stages["build"].environment["INDEX"] == ""
    assert not (base / "src").exists()


def test_a_step_that_is_not_known_fails(tmp_path: Path, source: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    build = Build(tmp_path, [("FROM", "x"), ("ADD", "http://x /")], source, base)
    with pytest.raises(RuntimeError, match="no step for ADD"):
        build.run()
    (source / ".dockerignore").write_text("node\n")
    with pytest.raises(RuntimeError, match="does not begin"):
        context(source, tmp_path / "other")
