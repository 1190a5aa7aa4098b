import asyncio
from pathlib import Path

from node.control import daemons
from node.core.home import control_socket

TABLE = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 21 /run/other.sock
0000000000000000: 00000002 00000000 00010000 0001 01 22 /home/a b/,x/ctl.sock
0000000000000000: 00000003 00000000 00000000 0001 03 23 /home/c/ctl.sock
0000000000000000: 00000003 00000000 00000000 0001 03 24
torn
0000000000000000: 00000002 00000000 00010000 0001 01 25 /tmp/tutti-0-ab/ctl.sock
"""


def test_control_sockets_are_those_that_are_listened_on(tmp_path, monkeypatch):
    monkeypatch.setattr(daemons.sys, "platform", "linux")
    (tmp_path / "unix").write_text(TABLE)
    assert [str(path) for path in daemons.sockets(tmp_path / "unix")] == [
        "/home/a b/,x/ctl.sock",
        "/tmp/tutti-0-ab/ctl.sock",
    ]
    assert not list(daemons.sockets(tmp_path / "none"))


async def test_a_daemon_that_does_not_answer_is_listed(socket, window, monkeypatch):
    async def never() -> None:
        raise AssertionError("fails")

    window.snapshot = never
    monkeypatch.setattr(daemons, "ANSWER_S", 30.0)
    found = await asyncio.to_thread(daemons.found, [socket.parent])
    (one,) = [one for one in found if one.home == str(socket.parent)]
    assert one.state == daemons.SILENT


def test_a_line_has_no_escape_sequences():
    found = daemons.FoundDaemon("/home/a", 7, "training", "\x1b[2J\x1b[H", "\x1b[31m", "ends")
    assert not any("\x1b" in line for line in daemons.lines([found]))


def test_the_children_of_a_home_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(daemons, "sockets", lambda: iter(()))
    (tmp_path / "local" / "stage-1").mkdir(parents=True)
    asked: list[Path] = []
    monkeypatch.setattr(
        daemons,
        "_asked",
        lambda path, home: asked.append(path) or daemons.FoundDaemon(str(home), 0, daemons.STOPPED),
    )
    found = daemons.found([tmp_path, tmp_path / "elsewhere"])
    assert sorted(asked) == sorted(
        [
            control_socket(tmp_path),
            control_socket(tmp_path / "elsewhere"),
            control_socket(tmp_path / "local" / "stage-1"),
        ]
    )
    assert [one.home for one in found] == [str(tmp_path)], "others without a daemon are no news"
