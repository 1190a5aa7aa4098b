"""Files that rotate, disks that fill up, pipes that close."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from node.telemetry import sinks
from node.telemetry.events import Event
from node.telemetry.sinks import JsonlSink, StreamSink, as_text


def event(kind: str, level: str = "info", text: str = "text") -> Event:
    return Event(1_700_000_000.0, level, "component", kind, text, {"n": 1})


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def through(sink: JsonlSink | StreamSink, *events: Event) -> None:
    """Give the events to the sink, and close it."""
    for one in events:
        sink.accept(one)
    sink.close()


class Moody(JsonlSink):
    """A disk that is full when told so; ``seen`` is set after every attempt."""

    def __init__(self, path: Path) -> None:
        self.full = True
        self.seen = threading.Event()
        super().__init__(path)

    def _write(self, batch: list[Event]) -> int:
        try:
            return super()._write(batch)
        finally:
            self.seen.set()

    def _append(self, fd: int, line: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._append(fd, line)


class Stuck(io.StringIO):
    """A terminal that takes nothing until let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.go.wait(20)
        return super().write(text)


def test_lines_are_whole_in_order_and_private(tmp_path: Path) -> None:
    path = tmp_path / "log" / "events.jsonl"
    sink = JsonlSink(path)
    through(sink, *(event(str(i)) for i in range(100)))
    sink.close()
    sink.accept(event("late"))
    assert [line["kind"] for line in read(path)] == [str(i) for i in range(100)]
    assert (path.stat().st_mode & 0o777, sink.dropped) == (0o600, 0)


def test_a_restart_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for kind in ("first", "second"):
        through(JsonlSink(path), event(kind))
    assert [line["kind"] for line in read(path)] == ["first", "second"]


@pytest.mark.parametrize("keep", [1, 3])
def test_rotation_bounds_the_disk_and_loses_only_the_oldest(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "events.jsonl"
    size = len(event("000").to_json()) + 1
    through(JsonlSink(path, max_bytes=size * 10, keep=keep), *(event(f"{i:03}") for i in range(95)))
    files = [path.with_name(f"{path.name}.{n}") for n in range(keep, 0, -1)] + [path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(f.stat().st_size <= size * 10 for f in files)
    assert [line["kind"] for f in files for line in read(f)] == [
        f"{i:03}" for i in range(90 - 10 * keep, 95)
    ]


def test_a_full_disk_drops_counts_and_reports_events(tmp_path: Path) -> None:
    sink = Moody(tmp_path / "events.jsonl")
    for kind in ("a", "b"):
        sink.seen.clear()
        sink.accept(event(kind))
        assert sink.seen.wait(20)
    sink.full = False
    sink.accept(event("c"))
    sink.close()
    lines = read(tmp_path / "events.jsonl")
    assert [line["kind"] for line in lines] == ["events-dropped", "c"]
    assert (lines[0]["fields"], sink.dropped) == ({"count": 2}, 0)


def test_a_torn_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.close()  # its thread is gone: the file is driven from here
    assert sink._write([event("a")]) == 0
    real = os.write

    def half(fd: int, data: memoryview) -> int:
        patch.setattr(sinks.os, "write", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
        return real(fd, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(sinks.os, "write", half)
        assert sink._write([event("b"), event("c")]) == 2
    assert (sink._write([event("d")]), [line["kind"] for line in read(path)]) == (0, ["a", "d"])


def test_impossible_paths_and_closed_terminals_are_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = io.StringIO()
    stream.close()
    for sink in (JsonlSink(tmp_path / "file" / "events.jsonl"), StreamSink(stream, "text")):
        through(sink, event("a"))
        assert sink.dropped == 1


def test_a_reader_that_stalls_never_blocks_the_speaker() -> None:
    stream = Stuck()
    sink = StreamSink(stream, "json", limit=3)
    sink.accept(event("first"))
    assert stream.entered.wait(20)
    for i in range(10):
        sink.accept(event(str(i)))
    assert sink.dropped == 7
    stream.go.set()
    sink.close(20)
    assert [json.loads(line)["kind"] for line in stream.getvalue().splitlines()] == [
        "first",
        "events-dropped",
        "7",
        "8",
        "9",
    ]


def test_text_is_for_people_and_cannot_repaint_the_terminal() -> None:
    stream = io.StringIO()
    bad = event("b", "error", "bad \x1b[2J name\nroom  info: all fine")
    through(StreamSink(stream, "text"), event("a", "debug"), bad)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("component  error: bad \\x1b[2J name\\nroom  info: all fine")
    assert as_text(event("a", text="é 漢")).endswith("é 漢")


@pytest.mark.parametrize("form", ["auto", "text", "json"])
def test_away_from_a_terminal_the_format_is_the_one_that_was_asked_for(form: str) -> None:
    stream = io.StringIO()
    through(StreamSink(stream, form), event("a"))
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("{") is (form == "json")
    assert form != "json" or json.loads(line)["kind"] == "a"


def test_the_output_of_a_daemon_is_bounded_and_its_newest_part_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "daemon.out"
    path.write_text("of an older version, which had no bound\n" * 1_000)
    size = len(event("000").to_json()) + 1
    most = 10 * size
    with path.open("a") as stream:
        sink = StreamSink(stream, "json", output=path, max_bytes=most)
        through(sink, *(event(f"{i:03}") for i in range(96)))
        earlier = path.with_name("daemon.out.1")
        assert (path.stat().st_size, earlier.stat().st_size) == (8 * size, most)
        assert earlier.stat().st_mode & 0o777 == 0o600
        print("a line of another kind", file=stream, flush=True)
    said = earlier.read_text() + path.read_text()
    numbers = re.findall('"kind": "([0-9]{3})"', said)
    assert numbers == [f"{i:03}" for i in range(78, 96)]
    assert said.endswith("}\na line of another kind\n")
    assert sorted(tmp_path.iterdir()) == [path, earlier]


def test_without_room_for_its_newest_part_the_output_is_bounded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "no space left"))
    monkeypatch.setattr(sinks.shutil, "copyfileobj", full)
    path = tmp_path / "daemon.out"
    path.write_text("line\n" * 100)
    with path.open("a") as stream:
        through(StreamSink(stream, "json", output=path, max_bytes=400), event("a"))
    assert full.called
    assert [line["kind"] for line in read(path)] == ["a"]


@pytest.mark.parametrize(("name", "mode"), [("my.log", "a"), ("daemon.out", "r+")])
def test_a_file_that_the_operator_has_chosen_is_not_cut(
    tmp_path: Path, name: str, mode: str
) -> None:
    output = tmp_path / "daemon.out"
    output.touch()
    path = tmp_path / name
    path.write_text("x" * 500 + "\n")
    with path.open(mode) as stream:
        stream.seek(0, os.SEEK_END)
        through(StreamSink(stream, "json", output=output, max_bytes=400), event("a"), event("b"))
    assert path.stat().st_size > 600
    assert not output.with_name("daemon.out.1").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_words_for_a_full_disk_end_no_process():
    code = "from node.telemetry.sinks import say; say('banner'); say('more'); raise SystemExit(7)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (7, b"")
