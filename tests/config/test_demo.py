"""The demo's reactions to daemons that come and go; none is started."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.app.demo import picture, play
from node.app.demo.daemons import DemoOptions, DemoSwarm
from node.app.demo.page import DemoPage
from node.app.demo.picture import PlainProgress, Scene, drawing
from node.app.demo.play import Demo, DemoOutcome, shares
from node.app.demo.writing import Written
from node.app.launch import Child
from node.core.errors import LocalFault
from protos.control_pb2 import Snapshot

Watched = Callable[..., Demo]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Watch a swarm with an ends peer that shows one of these snapshots at each poll."""
    for name in ("start", "kill"):
        monkeypatch.setattr(Child, name, lambda child: None)
    monkeypatch.setattr(Child, "running", True)
    monkeypatch.setattr(play, "POLL_S", 0.0)
    monkeypatch.setattr(play, "REPLACE_AFTER_S", -1.0)

    def watch(options: DemoOptions, *said: Snapshot) -> Demo:
        swarm = DemoSwarm(tmp_path, options)
        left = list(said)
        monkeypatch.setattr(swarm, "poll", lambda: [left.pop(0)])
        demo = Demo(swarm, DemoOutcome(1), time.monotonic(), DemoPage("never"))
        demo.watch(lambda scene: None)
        return demo

    return watch


def ends(state: str, epoch: int) -> Snapshot:
    return Snapshot(role="ends", state=state, epoch=epoch)


@pytest.mark.parametrize("replicas", [2, 12])
def test_the_replacement_gets_a_home_of_its_own(watched: Watched, replicas: int) -> None:
    options = DemoOptions((1, replicas), kill=True, sample=False)
    said = (ends("training", 100), ends("training", 110), ends("finished", 120))
    homes = [child.home for child in watched(options, *said).swarm.children]
    assert len(homes) == len(set(homes)) == 1 + replicas + 1


def test_the_demo_says_so_when_its_ends_have_died(watched: Watched, monkeypatch) -> None:
    monkeypatch.setattr(Child, "running", False)
    options = DemoOptions((1, 1), seconds=1e-9, sample=False)
    with pytest.raises(LocalFault, match="at the ends has ended"):
        watched(options, ends("lost", 3), ends("lost", 3))


def test_the_first_epoch_is_timed_from_the_start_of_the_demo(watched: Watched) -> None:
    said = (ends("training", 0), ends("training", 1), ends("finished", 2))
    outcome = watched(DemoOptions((1, 1), sample=False), *said).outcome
    assert outcome.first_epoch_seconds >= 0
    assert outcome.seconds >= 0


def test_shares_of_the_work_add_up_to_one():
    found = shares([Snapshot(name="a", micro_batches=3), Snapshot(name="b", micro_batches=1)])
    assert found == {"a": 0.75, "b": 0.25}
    assert shares([Snapshot(name="a")]) == {}


def test_the_picture_shows_each_daemon_before_the_first_plan(capsys) -> None:
    starting = [("ends-0", "loads torch and hivemind"), ("stage-1-0", "looks for the swarm")]
    text = rendered(Scene([], "3 s", starting=starting))
    assert "ends-0" in text
    assert "looks for the swarm" in text
    lines = PlainProgress(10)
    for _ in range(2):
        lines(Scene([], "3 s", starting=starting))
    said = capsys.readouterr().err.splitlines()
    assert said == [f"{label}: {does}" for label, does in starting], "each once"


def test_the_picture_keeps_the_first_text_and_the_newest(capsys) -> None:
    texts = [Written(epoch, f"text {epoch}\x1b[2J") for epoch in range(1, 7)]
    text = rendered(Scene([Snapshot(epoch=7)], "", written=texts, page="http://127.0.0.1:1/"))
    assert [n for n in range(1, 7) if f"text {n}" in text] == [1, 5, 6]
    assert "\x1b" not in text
    assert "http://127.0.0.1:1/" in text
    lines = PlainProgress(10)
    lines(Scene([], "", written=texts[:1]))
    lines(Scene([], "", written=texts[:2]))
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_picture_fits_a_small_terminal() -> None:
    texts = [Written(epoch, "long " * 50) for epoch in range(5)]
    many = [Snapshot(epoch=7, name=f"peer {i}", stage=i % 3) for i in range(20)]
    text = rendered(Scene(many, "note", written=texts, page="http://127.0.0.1:1/"), 60, 14)
    assert len(text.splitlines()) <= 14
    assert max(map(len, text.splitlines())) <= 60


def rendered(scene: Scene, width: int = 80, height: int = 30) -> str:
    console = picture.Console(width=width, record=True, color_system=None)
    with console.capture() as got:
        console.print(drawing(scene, width, height))
    return got.get()
