"""Signs of use of a machine, from files and from programs' output."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from node.availability.usage import UsageMeter, busy_s, idle_seconds, own_cpu_s

SESSIONS = """Type=tty
IdleHint=no
IdleSinceHint=0

Type=wayland
IdleHint=yes
IdleSinceHint=1700000000000000

Type=x11
IdleHint=no
IdleSinceHint=1700000000000000
"""


def test_a_desktop_counts_as_used_until_it_says_that_it_is_idle():
    assert idle_seconds(SESSIONS, 1_700_000_090.0) == [90.0, 0.0]
    assert idle_seconds("", 0.0) == []
    assert idle_seconds("Type=x11\nIdleHint=yes\nIdleSinceHint=no", 5.0) == [0.0]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("Class=user\nState=active", [0.0]),
        ("Class=user-early\nState=online", [0.0]),
        ("Class=greeter\nState=active", []),
        ("Class=user\nState=closing", []),
    ],
)
def test_a_login_screen_and_a_closed_session_are_nobody(lines: str, found: list[float]) -> None:
    assert idle_seconds(f"Type=x11\nIdleHint=no\n{lines}", 5.0) == found


def test_the_newest_terminal_counts_and_other_devices_do_not(tmp_path):
    (tmp_path / "pts").mkdir()
    now = time.time()
    ages = {"tty1": 500.0, "pts/3": 40.0, "pts/ptmx": 1.0, "ttyS0": 2.0, "tty": 0.0, "sda1": 0.0}
    for name, age in ages.items():
        path = tmp_path / name
        path.touch()
        os.utime(
            path, (now - age, now)
        )  # output, which sets the other time, is no sign of a person
    meter = UsageMeter(idle=True, load=False, devices=tmp_path, ask=lambda words: "")
    found = meter.read()
    assert found.input_s == pytest.approx(40.0, abs=5.0)
    assert found.load is None
    assert "terminals" in meter.sources()


def test_a_machine_without_terminals_tells_nothing(tmp_path):
    meter = UsageMeter(idle=True, load=False, devices=tmp_path / "none", ask=lambda words: "")
    assert meter.read().input_s is None


def test_sessions_are_asked_for_by_name(tmp_path, monkeypatch):
    asked: list[tuple[str, ...]] = []

    def ask(words) -> str:
        asked.append(tuple(words))
        if words[1] == "list-sessions":
            return "  2 1000 anna seat0 tty2\n c1 1001 ben\n"
        return SESSIONS

    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    meter = UsageMeter(idle=True, load=False, devices=tmp_path, ask=ask)
    assert meter.read().input_s == 0.0
    assert asked[1][:4] == ("loginctl", "show-session", "2", "c1")


def test_the_load_of_others_is_counted_without_the_own_one(monkeypatch):
    times = iter([(100.0, 10.0), (103.0, 12.0)])
    now: list[float] = []

    def busy() -> float:
        now[:] = next(times)
        return now[0]

    clock = iter([0.0, 10.0])
    monkeypatch.setattr("node.availability.usage.busy_s", busy)
    monkeypatch.setattr("node.availability.usage.own_cpu_s", lambda: now[1])
    there = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("node.availability.usage.time", there)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    meter = UsageMeter(idle=False, load=True)
    assert meter.read().load is None
    assert meter.read().load == pytest.approx(0.05)


def test_programs_that_give_way_are_not_counted_and_children_are_the_own():
    assert 0 < own_cpu_s() <= busy_s()
    before = own_cpu_s()
    spin = "import os,time\nend=time.process_time()+0.3\nwhile time.process_time()<end: os.getpid()"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{spin}\nprint()\ninput()"], stdin=-1, stdout=-1
    )
    assert child.stdout is not None
    child.stdout.readline()
    own = own_cpu_s() - before
    niced = psutil.Process().nice() > 0
    child.communicate(b"\n")
    # A child of a program with a raised niceness has it too, and only its system time counts.
    assert own >= 0.25 or niced
