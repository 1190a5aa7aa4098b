"""Daemons of one machine see each other's memory, also across processes and after a crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.control.pledges import LOCK, Pledges
from node.core.memory import of_files, resident

GIB = 1 << 30
HOLDS = """
import sys
from pathlib import Path
from node.control.pledges import Pledges

pledges = Pledges(Path("other"), Path(sys.argv[1]))
pledges.pledge(int(sys.argv[2]))
print("there", flush=True)
sys.stdin.read()
"""


def made(folder: Path, home: str) -> Pledges:
    return Pledges(Path(home), folder)


def test_others_are_counted_and_the_own_pledge_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    one, two, three = (made(folder, home) for home in ("a", "b", "c"))
    assert one.others() == 0
    one.pledge(3 * GIB)
    two.pledge(GIB)
    two.pledge(2 * GIB)
    assert (one.others(), two.others(), three.others()) == (2 * GIB, 3 * GIB, 5 * GIB)
    one.close()
    one.close()
    assert three.others() == 2 * GIB
    two.close()
    assert [path.name for path in folder.iterdir()] in ([], [LOCK])


def test_a_renewed_pledge_looks_new_to_cleaners_of_temporary_files(tmp_path: Path) -> None:
    one = made(tmp_path, "a")
    one.renew()
    assert list(tmp_path.iterdir()) == [], "there is none yet"
    one.pledge(GIB)
    (file,) = (path for path in tmp_path.iterdir() if path.name != LOCK)
    os.utime(file, (0, 0))
    one.renew()
    assert file.stat().st_atime > 0
    assert file.stat().st_mtime > 0


def test_a_pledge_counts_at_least_what_is_resident(tmp_path: Path) -> None:
    one = made(tmp_path / "memory", "a")
    two = made(tmp_path / "memory", "b")
    one.pledge(1)
    ours = resident(os.getpid())
    libraries = of_files(os.getpid())
    assert 0 < libraries < ours
    assert two.others() == pytest.approx(ours - libraries, rel=0.1)


def test_the_pledge_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    words = [sys.executable, "-c", HOLDS, str(folder), str(7 * GIB)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"there\n"
        ours = made(folder, "a")
        with ours.alone():
            assert ours.others() == 7 * GIB
        assert ours.count() == 2
        ours.pledge(GIB)
        assert ours.count() == 2
        other.kill()
        other.wait()
        assert ours.count() == 1, "though the file is still there"
        assert ours.others() == 0


@pytest.mark.parametrize("text", ["9" * 18 + " 1", "", "-1 1", "no number"])
def test_a_damaged_pledge_counts_no_daemon(tmp_path: Path, text: str) -> None:
    one = made(tmp_path / "memory", "a")
    one.pledge(GIB)
    (tmp_path / "memory" / "0123").write_text(text)
    (tmp_path / "memory" / "a folder").mkdir()
    assert one.count() == 1


def test_a_count_of_daemons_holds_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path / "memory", "a")
    found = iter([3, 4])
    monkeypatch.setattr(one, "count", lambda: next(found))
    assert [one.lately(), one.lately()] == [3, 3]
    monkeypatch.setattr("node.control.pledges.COUNTED_S", -1.0)
    assert one.lately() == 4


def test_a_foreign_directory_is_not_used(tmp_path: Path) -> None:
    """Any user may make a directory in /tmp: a file that others can write proves nothing."""
    folder = tmp_path / "memory"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "0123").write_text(f"1 {GIB}")
    ours = made(folder, "a")
    with ours.alone():
        ours.pledge(GIB)
    assert ours.others() == 0
    assert ours.count() == 1
    assert [path.name for path in folder.iterdir()] == ["0123"]


def test_one_decides_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    one = made(tmp_path / "memory", "a")
    two = made(tmp_path / "memory", "b")
    with one.alone():
        monkeypatch.setattr("node.control.pledges.time.sleep", waited.append)
        monkeypatch.setattr("node.control.pledges.WAIT_S", 0.01)
        with two.alone():
            assert waited
        waited.clear()
        two.others()
        assert waited
        waited.clear()
        two.pledge(GIB)
        assert waited
        waited.clear()
        one.others()
        one.pledge(GIB)
        two.pledge(GIB)
    with two.alone():
        two.others()
    assert not waited
