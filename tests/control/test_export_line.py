"""Progress of an export, as its operator sees it."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from node.control import commands
from node.control.commands import _export_progress
from node.control.text import export_line
from protos.control_pb2 import Event

FIGURES = {
    "stages": 9,
    "stages_done": 3,
    "bytes": 1 << 30,
    "bytes_total": 4 << 30,
    "bytes_per_s": 8 << 20,
}


def progress(text: str = "gathering epoch 7", at: float = 100.0, **figures: Any) -> Event:
    fields = json.dumps({**FIGURES, **figures})
    return Event(at=at, level="info", kind="export-progress", text=text, fields=fields)


DONE = Event(at=200.0, level="info", kind="exported", text="wrote it", fields="{}")


def test_the_line_has_stages_bytes_rate_and_the_time_left() -> None:
    assert export_line(progress()) == (
        "gathering epoch 7   3 of 9 stages   1.0 GiB of 4.0 GiB   8.0 MiB/s   6m left"
    )
    assert "left" not in export_line(progress(bytes_per_s=0.0))
    assert "left" not in export_line(progress(bytes=4 << 30))
    assert export_line(progress("waiting for stage 2", bytes_total=0)) == "waiting for stage 2"


@pytest.mark.parametrize("fields", ["", "{}", "[]", "no json", '{"stages": "many"}'])
def test_figures_that_cannot_be_read_leave_the_words(fields: str) -> None:
    event = Event(kind="export-progress", text="gathering\x1b[2J", fields=fields)
    assert export_line(event) == "gathering [2J"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Text that a console shows of the events."""

    def show(*events: Event, **console: Any) -> str:
        out = io.StringIO()
        made = Console(file=out, width=40, color_system=None, **console)
        monkeypatch.setattr(commands, "Console", lambda **_: made)
        assert list(_export_progress(events)) == list(events)
        return out.getvalue()

    return show


def test_a_terminal_has_one_line_that_is_written_over(shown) -> None:
    events = [progress(at=100.0 + second, bytes=second << 20) for second in range(8)]
    text = shown(*events, DONE, force_terminal=True, _environ={"TERM": "xterm"})
    before, after = text.split("wrote it")
    lines = before.removeprefix("\x1b[?25l").split("\r\x1b[2K")[: len(events)]
    assert all(line.startswith("gathering epoch 7   3 of 9 stages") for line in lines)
    assert {len(line) for line in lines} == {40}
    assert "\n" not in before
    assert after.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is back, the line is gone"


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_elsewhere_there_is_a_line_now_and_then(shown, term: str) -> None:
    events = [progress(at=100.0 + second) for second in range(11)]
    news = progress("writing /out", at=111.0)
    text = shown(*events, news, DONE, force_terminal=term == "dumb", _environ={"TERM": term})
    lines = text.splitlines()
    assert [line.split("   ")[0] for line in lines[:-1]] == [
        "gathering epoch 7",
        "gathering epoch 7",
        "gathering epoch 7",
        "writing /out",
    ]
    assert lines[-1].endswith("wrote it")
    assert "\x1b" not in text
