"""Files and directories that belong to whoever is still making them."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from node.core import home
from node.core.home import new_directory, new_file, remove_stale

Make = Callable[[Path], int]
MAKERS = pytest.mark.parametrize("make", [new_file, new_directory])


@MAKERS
def test_what_is_being_made_stays_and_what_was_left_goes(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "made"
    held = make(path)
    with pytest.raises(FileExistsError):
        make(path)
    if path.is_dir():
        (path / "part").write_text("part")
    remove_stale(path)
    assert path.exists()
    os.close(held)
    remove_stale(path)
    assert not path.exists()
    remove_stale(path)


@MAKERS
@pytest.mark.parametrize("at", ["open", "flock"])
def test_what_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, at: str
) -> None:
    path = tmp_path / "made"
    module = {"open": os, "flock": fcntl}[at]
    real = getattr(module, at)
    times: list[int] = []

    def meanwhile(*what: object) -> object:
        times.append(1)
        if len(times) == 1 and path.is_dir():
            path.rmdir()
        elif len(times) == 1:
            path.unlink(missing_ok=True)
        return real(*what)

    monkeypatch.setattr(module, at, meanwhile)
    held = make(path)
    monkeypatch.undo()
    assert os.path.samestat(os.fstat(held), path.stat())
    os.close(held)


@MAKERS
def test_where_nothing_can_be_locked_nothing_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    def refuses(fd: int, kind: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(home.fcntl, "flock", refuses)
    path = tmp_path / "made"
    os.close(make(path))
    remove_stale(path)
    assert path.exists()


def test_nothing_is_removed_behind_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    link = tmp_path / "link"
    link.symlink_to(precious)
    remove_stale(link)
    assert precious.exists()
    assert link.is_symlink()
    shutil.rmtree(precious)
