import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static

from node.control.client import ControlClient
from node.control.service import ControlService
from node.core.errors import ExitCode
from node.tui.app import Monitor, Question
from protos.control_pb2 import CellLine
from testbed.fakes.canned_window import CannedWindow, training_snapshot


@pytest.fixture
async def window():
    return CannedWindow(training_snapshot(phase="run"))


@pytest.fixture
async def service(tmp_path, window):
    service = ControlService(window, tmp_path / "ctl.sock")
    await service.start()
    yield service
    await service.close(0.0)


@pytest.fixture
async def app(service: ControlService) -> Monitor:
    return Monitor(ControlClient(service.path), every_s=0.05)


@pytest.fixture
async def pilot(app: Monitor) -> AsyncIterator[Pilot[str]]:
    """Monitor screens that have just begun."""
    async with app.run_test(size=(80, 24)) as pilot:
        yield pilot


async def until(pilot, true: Callable[[], bool]) -> None:
    """Wait until the screen gets there; fails after a minute."""
    async with asyncio.timeout(60):
        while not true():
            await pilot.pause(0.02)


def words(app: Monitor, box: str) -> str:
    """Plain text of a Static."""
    content = app.query_one(box, Static).content
    return "\n".join(
        getattr(line, "plain", str(line)) for line in getattr(content, "renderables", [content])
    )


def title_and_subtitle(app: Monitor, box: str) -> tuple[str, str]:
    """Letters of a box's two titles on the screen."""
    # The public attributes give markup, which textual does not always read back.
    found: Any = app.query_one(box)
    return str(found._border_title), str(found._border_subtitle)


async def test_it_shows_node_swarm_curve_peers_and_events(window, app, pilot):
    window.journal.emit("training", "epoch-committed", "epoch 120 committed")
    await until(pilot, lambda: app.query_one("#peers", DataTable).row_count == 6)
    await until(pilot, lambda: len(app.query_one("#events", RichLog).lines) == 1)
    assert "TRAINING" in words(app, "#node")
    assert "epoch  120 of 150" in words(app, "#swarm")
    assert "3:0" in words(app, "#swarm")
    assert "█" in words(app, "#loss")
    assert "epoch 120 committed" in app.query_one("#events", RichLog).lines[0].text


async def test_a_crowd_shows_who_needs_a_look_and_counts_the_others(window, app, pilot):
    for i in range(9):
        window.seen.peers.add(peer=f"crowd{i}", name=f"peer-{i}", state="training", stage=1)
    window.seen.peers[-1].state = "silent"
    table = app.query_one("#peers", DataTable)
    await until(pilot, lambda: table.row_count == 15)
    names = [str(table.get_row_at(i)[1]) for i in range(3)]
    assert names == ["brisk-otter", "quiet-ferret", "peer-8"]
    hidden = 15 - (table.size.height - 1)
    assert 0 < hidden < 11, "more than four rows are there"
    await until(pilot, lambda: f"+{hidden} more" in str(table.border_title))


async def test_it_says_micro_batches_the_share_done_and_the_time_left(app, pilot):
    await until(pilot, lambda: "TRAINING, computing" in words(app, "#node"))
    assert "1,204 micro-batches" in words(app, "#node")
    assert "epoch  120 of 150  80 %, 3h10m left" in words(app, "#swarm")


async def test_a_ctrl_c_from_elsewhere_ends_it_in_order(app, monkeypatch):
    left = asyncio.Event()
    leave = app.exit

    def leave_and_tell(*words: object) -> None:
        leave(*words)
        left.set()

    monkeypatch.setattr(app, "exit", leave_and_tell)
    async with app.run_test(size=(80, 24)):
        signal.raise_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            await left.wait()
    assert app.return_code == ExitCode.INTERRUPTED


async def test_cells_that_lead_themselves_have_a_column_and_a_line(window, app, pilot):
    table = app.query_one("#peers", DataTable)
    await until(pilot, lambda: table.row_count == 6)
    assert "CELL" not in {str(c.label) for c in table.columns.values()}
    assert "cell" not in words(app, "#swarm")
    own = "c" * 16
    other = "a" * 16
    window.said.cell.CopyFrom(
        CellLine(cell=own, peers=4, cells=2, window=9, next_s=34.0, alone=True)
    )
    for i, line in enumerate(window.seen.peers):
        line.cell = other if i % 2 else own
    await until(pilot, lambda: len(table.columns) == 9)
    await until(pilot, lambda: "cell   cccccc of 2  alone  next 34s" in words(app, "#swarm"))
    assert [str(table.get_row_at(i)[2]) for i in range(6)] == ["cccccc"] * 3 + ["aaaaaa"] * 3


async def test_it_follows_the_daemon(window, app, pilot):
    await until(pilot, lambda: "TRAINING" in words(app, "#node"))
    window.said = training_snapshot(healthy=False, state="waiting", reason="no peer holds stage 3")
    await until(pilot, lambda: "no peer holds stage 3" in words(app, "#why"))
    assert app.query_one("#node").has_class("trouble")
    window.journal.emit("training", "x", "news")
    await until(
        pilot,
        lambda: any("news" in line.text for line in app.query_one("#events", RichLog).lines),
    )


@pytest.mark.parametrize("words", ["see [/home/a]", "[@click=app.detach]leave[/]"])
async def test_words_from_outside_are_no_markup(window, app, pilot, words):
    said = training_snapshot(name=words, device=words)
    said.digest_mismatches = 0
    said.warnings.insert(0, words)
    said.swarm.name = words
    window.said = said
    await until(pilot, lambda: title_and_subtitle(app, "#peers")[1] == words)
    title, subtitle = title_and_subtitle(app, "#node")
    assert words[:19] in title
    assert subtitle == words
    assert words[:13] in title_and_subtitle(app, "#swarm")[0]
    await pilot.press("d")
    question = app.screen.query_one(Static).content
    assert f"Drain {words[:23]}" in str(question)
    assert "[y] drain" in str(question)


async def test_an_answer_during_shutdown_is_dropped(app):
    calls = []
    async with app.run_test(size=(80, 24)):
        app.tell(calls.append, "shown")
    app.tell(calls.append, "late")
    assert calls == ["shown"]


async def test_q_leaves_the_daemon_running(window, app, pilot):
    await until(pilot, lambda: "TRAINING" in words(app, "#node"))
    await pilot.press("q")
    await until(pilot, lambda: app.return_value is not None)
    assert "the node goes on" in (app.return_value or "")
    assert not window.stopped.is_set()


async def test_d_asks_first_and_drains_only_after_a_yes(window, app, pilot):
    await until(pilot, lambda: "TRAINING" in words(app, "#node"))
    await pilot.press("d")
    await until(pilot, lambda: isinstance(app.screen, Question))
    await pilot.press("n")
    await until(pilot, lambda: not isinstance(app.screen, Question))
    assert window.drained is None
    await pilot.press("d")
    await until(pilot, lambda: isinstance(app.screen, Question))
    await pilot.press("y")
    await until(pilot, lambda: app.return_value is not None)
    assert window.drained == 600.0
    assert "drained" in (app.return_value or "")


async def test_p_pauses_after_a_yes_and_lets_a_paused_node_go_on_at_once(window, app, pilot):
    await until(pilot, lambda: "TRAINING" in words(app, "#node"))
    await pilot.press("p")
    await until(pilot, lambda: isinstance(app.screen, Question))
    await pilot.press("n")
    await until(pilot, lambda: not isinstance(app.screen, Question))
    assert window.paused is None
    await pilot.press("p")
    await until(pilot, lambda: isinstance(app.screen, Question))
    await pilot.press("y")
    await until(pilot, lambda: window.paused == (None, "", False))
    why = "by its operator, until  tutti resume"
    window.said = training_snapshot(
        state="paused", paused=why, reason=f"paused {why}", cause="paused"
    )
    await until(pilot, lambda: "PAUSED" in words(app, "#node") and why in words(app, "#why"))
    await pilot.press("p")
    await until(pilot, lambda: window.paused is None)


async def test_a_question_mark_helps(app, pilot):
    await pilot.press("question_mark")
    await until(pilot, lambda: isinstance(app.screen, Question))
    await pilot.press("x")
    await until(pilot, lambda: not isinstance(app.screen, Question))


async def test_a_terminal_that_is_too_small_shows_its_needed_size(app):
    async with app.run_test(size=(50, 12)) as pilot:
        await until(pilot, lambda: app.screen.has_class("small"))
        assert "50x12" in words(app, "#small")
        assert not app.query_one("#peers").display
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: not app.screen.has_class("small"))
        await until(pilot, lambda: app.query_one("#peers").display)


async def test_a_lost_daemon_is_reported_and_waited_for(service, window, tmp_path, app, pilot):
    await until(pilot, lambda: "TRAINING" in words(app, "#node"))
    await service.close(0.0)
    await until(pilot, lambda: "asking again" in words(app, "#node"))
    again = ControlService(window, tmp_path / "ctl.sock")
    await again.start()
    await until(pilot, lambda: "TRAINING" in words(app, "#node"))
    await pilot.press("q")
    await again.close(0.0)
