from pathlib import Path

import pytest

from node.core.contention import Contention

SECOND = 1_000_000_000


def thread(tasks: Path, number: int, ran_s: float, waited_s: float) -> None:
    folder = tasks / str(number)
    folder.mkdir(exist_ok=True)
    (folder / "schedstat").write_text(f"{round(ran_s * SECOND)} {round(waited_s * SECOND)} 7\n")


def test_the_share_is_of_what_passed_since_the_last_call(tmp_path: Path) -> None:
    contention = Contention(str(tmp_path))
    thread(tmp_path, 1, 10.0, 90.0)
    assert contention.share() == 0.0, "nothing to compare with"
    thread(tmp_path, 1, 10.6, 90.2)
    thread(tmp_path, 2, 5.0, 0.0)
    assert contention.share() == pytest.approx(0.25), "a new thread has no before"
    assert contention.rest() == 0.0
    assert contention.share() == 0.0, "the time of rest counts for nothing"
    thread(tmp_path, 1, 10.7, 90.7)
    thread(tmp_path, 2, 5.1, 0.1)
    assert contention.share() == pytest.approx(0.75)


def test_next_to_nothing_says_nothing(tmp_path: Path) -> None:
    contention = Contention(str(tmp_path))
    thread(tmp_path, 1, 0.0, 0.0)
    contention.share()
    thread(tmp_path, 1, 0.0, 0.01)
    assert contention.share() == 0.0


def test_a_system_that_does_not_tell_is_never_contended(tmp_path: Path) -> None:
    contention = Contention(str(tmp_path / "none"))
    assert [contention.share() for _ in range(2)] == [0.0, 0.0]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("not a number\n")
    other = Contention(str(tmp_path))
    assert [other.share() for _ in range(2)] == [0.0, 0.0]
