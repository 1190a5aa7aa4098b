"""Changes of the stage: the daemons that may be asked, refusals and their reasons, and the
arguments of the next image."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.app import daemon as running
from node.app import launch, peer
from node.app.assembly import check_room
from node.app.capacity import check_memory, main_memory
from node.app.daemon import Daemon
from node.app.node import Node
from node.app.peer import Peer
from node.availability.keeper import AvailabilityKeeper
from node.availability.machine import By
from node.averaging.strategies.outer import OuterSettings
from node.config import MOVED, NodeConfig
from node.consensus.rules import ChangeStatus, Rules
from node.core.errors import TimedOut, UsageFault
from node.core.ids import CellId
from node.core.journey import Version
from node.manifest import Manifest, amended
from node.telemetry.events import Journal
from testbed.fakes.clock import VirtualClock
from tests.config.conftest import MIXED, WIDE

MANIFEST = Manifest.default_demo()
CELL = CellId("b" * 16)


def config(tmp_path: Path, environ: dict[str, str] | None = None, **flags: Any) -> NodeConfig:
    return NodeConfig.load({"home": str(tmp_path), **flags}, environ or {})


def hosting(stage: int, memory: int = 1 << 40, main: int = 0) -> Any:
    return SimpleNamespace(
        stage=SimpleNamespace(stage=stage, version=Version(0)),
        memory=SimpleNamespace(casts=True, older=False),
        memory_limit=memory,
        main_memory=main,
    )


@pytest.mark.parametrize(
    ("mark", "flags", "stage", "ports", "moved"),
    [
        ("2", {"p2p_port": 0, "grpc_port": 5000}, 2, (0, 5000), True),
        ("3", {"stage": "1", "may_move": True, "p2p_port": 77}, 3, (77, 0), True),
        (f"2 {MANIFEST.run_id}", {}, 2, (0, 0), True),
        (f"- {MANIFEST.run_id}", {}, None, (0, 0), True),
        ("-", {"stage": "2"}, 2, (0, 0), True),
        ("-", {}, None, (0, 0), True),
        ("", {}, None, (0, 0), False),
    ],
)
def test_a_moved_daemon_hosts_the_new_stage_on_ports_as_set(
    tmp_path: Path, mark: str, flags: dict[str, Any], stage: int | None, ports, moved: bool
) -> None:
    ours = config(tmp_path, {MOVED: mark}, **flags)
    found = ours.transport.p2p_port, ours.transport.grpc_port
    assert (ours.stage, found, bool(ours.moved)) == (stage, ports, moved)


@pytest.mark.parametrize(
    ("environ", "flags", "stage", "open_to"),
    [
        ({}, {}, None, "auto"),
        ({}, {"role": "stage"}, None, "stage"),
        ({}, {"stage": "1"}, 1, ""),
        ({}, {"stage": "1", "may_move": True}, 1, "stage"),
        ({}, {"role": "ends"}, None, ""),
        ({}, {"role": "rendezvous"}, None, ""),
        ({}, {"may_move": False}, None, ""),
        ({MOVED: "0"}, {}, 0, "auto"),
        ({MOVED: "2"}, {}, 2, "auto"),
        ({"TUTTI_STAGE": "1"}, {}, 1, ""),
        ({"TUTTI_STAGE": "1", "TUTTI_MAY_MOVE": "yes"}, {}, 1, "stage"),
    ],
)
def test_what_an_image_may_host_is_its_operators_word(
    tmp_path: Path, environ, flags, stage: int | None, open_to: str
) -> None:
    ours = config(tmp_path, environ, **flags)
    assert (ours.stage, ours.open_to) == (stage, open_to)


@pytest.mark.parametrize("text", ["x", "2:4001", "-1", "2-", "20000", "2 ../..", "2 abc"])
def test_a_mark_that_tutti_did_not_leave_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageFault, match=MOVED):
        config(tmp_path, {MOVED: text})


LAST = MANIFEST.pipeline.stages
NAMELESS = amended(MANIFEST, {"data.source": "file:/no/such.txt"})
ELSEWHERE = amended(NAMELESS, {"data.sha256": "0" * 64})
DILOCO = replace(MANIFEST, outer=OuterSettings("butterfly", "deltas", "nesterov", window_s=20.0))


@pytest.mark.parametrize(
    ("manifest", "here", "there", "open_to", "says"),
    [
        (MANIFEST, hosting(1), 2, "stage", ""),
        (MANIFEST, hosting(1), 2, "", "operator"),
        (MANIFEST, hosting(0), 1, "auto", ""),
        (MANIFEST, hosting(1), 0, "auto", ""),
        (MANIFEST, hosting(0), 1, "stage", "the ends"),
        (MANIFEST, hosting(1), 0, "stage", "the ends"),
        (MANIFEST, hosting(0), 0, "auto", "does not change from"),
        (MANIFEST, hosting(1), 1, "auto", "does not change from"),
        (MANIFEST, hosting(1), LAST + 1, "auto", "does not change from"),
        (MANIFEST, hosting(0), LAST + 1, "auto", "does not change from"),
        (MANIFEST, hosting(1, memory=1 << 16), 2, "stage", "does not fit"),
        (DILOCO, hosting(1, main=1 << 16), 2, "stage", "main memory"),
        (NAMELESS, hosting(1), 0, "auto", "no hash of it"),
        (ELSEWHERE, hosting(1), 0, "auto", "is not here"),
        (ELSEWHERE, hosting(1), 2, "auto", ""),
    ],
)
def test_a_move_that_cannot_be_made_is_refused_with_the_reason(
    tmp_path: Path, manifest: Manifest, here: Any, there: int, open_to: str, says: str
) -> None:
    d = FakeDaemon(config(tmp_path))
    d.assembled = here
    d.open_to = open_to
    found = d.refuses(manifest, there)
    assert says in found if says else not found


class FakeDaemon(Node):
    """A daemon that builds and runs nothing, and logs its actions."""

    def __init__(self, ours: NodeConfig, stage: int = 1) -> None:
        clock = VirtualClock()
        journal = Journal()
        Peer.__init__(self, ours.open_to, clock, journal, MANIFEST, lambda *_: None)
        self.config = ours
        ours.remember(MANIFEST)
        self.log = list[str]()
        self.calm = asyncio.Event()
        self.assembled = hosting(stage)
        self.assembled.training = SimpleNamespace(
            leave=self.leave,
            admission=SimpleNamespace(changes=ChangeStatus(Rules())),
            member=SimpleNamespace(busy=False, plan=None),
        )
        self.assembled.work = SimpleNamespace(local_checkpoints=SimpleNamespace(saved=self.saved))

    async def leave(self, reason: str, *, hands_over: bool) -> None:
        assert hands_over, "others take over what a peer that moves owns"
        self.log.append(f"leave: {reason}")
        await self.calm.wait()

    async def saved(self) -> None:
        self.log.append("saved")

    def stop(self, why: str) -> None:
        self.log.append(f"stop: {why}")

    async def idle(self) -> None:
        if self.tasks._tasks:
            await asyncio.wait(list(self.tasks._tasks))


@pytest.fixture
def d(tmp_path: Path) -> FakeDaemon:
    return FakeDaemon(config(tmp_path))


def test_a_change_exceeding_memory_is_reported(d: FakeDaemon) -> None:
    journal = Journal()
    verdict = d.assembled.memory
    d.assembled.main_memory = int(main_memory(MANIFEST, 1, verdict, gpu=True) / 0.9) + (1 << 10)
    check_room(d.config, MANIFEST, d.assembled, journal)
    assert not list(journal.recent()), "by the manifest's own settings nothing is kept"
    d.assembled.training.admission.changes.learns(Rules(1, DILOCO.outer, 3, "signed"))
    check_room(d.config, MANIFEST, d.assembled, journal)
    (said,) = journal.recent()
    assert (said.kind, said.fields["revision"]) == ("change-out-of-memory", 3)
    assert "main memory" in said.text
    assert "a machine with more" in said.text
    assert "main memory" in d.asked(2)


def test_a_change_that_leaves_no_room_for_16_bits_is_reported(
    d: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon goes on in the format it began in, and the next start finds another one."""
    monkeypatch.setattr("node.app.capacity.bf16_units", lambda: True)
    manifest = amended(MANIFEST, WIDE | MIXED)
    found = ((size << 20, check_memory(d.config, manifest, 1, size << 20)) for size in range(1000))
    least = next(size for size, verdict in found if verdict.ok)
    d.assembled.memory_limit = least
    for began, kinds in (False, []), (True, ["change-out-of-memory"]):
        journal = Journal()
        d.assembled.memory.casts = began
        check_room(d.config, manifest, d.assembled, journal)
        assert [said.kind for said in journal.recent()] == kinds
    d.assembled.memory_limit = 1 << 40
    check_room(d.config, manifest, d.assembled, journal)
    assert len(list(journal.recent())) == 1, "with room for copies there is nothing to say"


async def test_a_move_leaves_first_and_stops_last(d: FakeDaemon) -> None:
    assert d.asked(2) == ""
    assert d.to_stage == 2
    assert "on its way to stage 2" in d.asked(3)
    await asyncio.sleep(0)
    assert d.log == ["leave: moves to stage 2"]
    assert not d.moved, "nothing is over before the epoch is"
    d.calm.set()
    await d.idle()
    assert d.log == ["leave: moves to stage 2", "stop: moving to stage 2"]
    assert (d.moved, d.to_stage) == (True, 2)


async def test_an_epoch_that_hangs_does_not_keep_it(
    d: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MOVE_S", 0.01)
    d.asked(2)
    await d.idle()
    assert (d.moved, d.to_stage) == (True, 2)
    assert [e.kind for e in d.journal.recent()] == ["moving", "move-hasty"]


async def test_a_long_epoch_is_finished_first(
    d: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MOVE_S", 0.01)
    d.assembled.training.member = SimpleNamespace(busy=True, plan=SimpleNamespace(deadline_s=600.0))
    d.asked(2)
    await asyncio.sleep(0.05)
    assert not d.moved
    d.calm.set()
    await d.idle()
    assert (d.moved, d.to_stage) == (True, 2)
    assert [e.kind for e in d.journal.recent()] == ["moving"]


@pytest.mark.parametrize(("ends", "alone"), [([], True), (["somebody"], False)])
async def test_only_a_leader_sends_a_peer_to_the_ends_beside_somebody_there(
    d: FakeDaemon, ends: list[str], alone: bool
) -> None:
    d.presence = SimpleNamespace(
        view=SimpleNamespace(ends={"somebody": None}), changed=lambda: None
    )
    assert "somebody else" in d.asked(0, alone=True)
    d.presence.view.ends = dict.fromkeys(ends)
    d.calm.set()
    assert d.asked(0, alone=alone) == ""
    await d.idle()
    assert (d.moved, d.to_stage) == (True, 0)
    assert d.log[0] == "leave: moves to the ends"


async def test_a_drain_meanwhile_wins(d: FakeDaemon) -> None:
    d.asked(2)
    d.draining = True
    d.calm.set()
    await d.idle()
    assert not d.moved
    assert not any(line.startswith("stop") for line in d.log)


async def test_a_drain_that_fails_beside_a_move_leaves_the_peer_where_it_was(
    d: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MOVE_S", 0.01)
    d.asked(2)
    d.assembled.training.stay = lambda: d.log.append("stay")
    with pytest.raises(TimedOut):
        await d.drain(0.1)
    await d.idle()
    assert (d.going, d.to_stage, d.moved) == (False, None, False)
    assert d.log[-1] == "stay"


async def test_a_drain_that_fails_before_a_move_does_not_end_the_leaving_of_the_move(
    d: FakeDaemon,
) -> None:
    d.asked(2)
    d.assembled.training.stay = lambda: d.log.append("stay")
    with pytest.raises(TimedOut):
        await d.drain(0.01)
    assert "stay" not in d.log
    d.calm.set()
    await d.idle()
    assert d.moved


async def test_a_peer_that_is_asked_to_end_does_not_move(d: FakeDaemon) -> None:
    d.asked(2)
    d.ending = True
    d.calm.set()
    await d.idle()
    assert not d.moved


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stage", [2, None])
async def test_a_signal_ends_a_daemon_that_was_about_to_begin_elsewhere(
    d: FakeDaemon, stage: int | None, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d, "stop", partial(Node.stop, d))
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended without clean-up"))
    d._end = asyncio.Event()
    d._why = ""
    if stage is None:
        d.joins(CELL)
    else:
        d.calm.set()
        d.asked(stage)
        await d.idle()
    assert d.moved
    assert d._end.is_set()
    Daemon.signalled(cast(Daemon, d), number)
    assert not d.moved
    assert d._why == f"signal {number.name}"
    Daemon.signalled(cast(Daemon, d), signal.SIGHUP)
    assert d._why == f"signal {number.name}", "every process of a group is signalled, some twice"


async def test_a_peer_that_changes_its_cell_stops_at_once(d: FakeDaemon) -> None:
    d.joins(CELL)
    assert (d.to_cell, d.to_stage, d.moved) == (CELL, None, True)
    assert [line.split(":")[0] for line in d.log] == ["stop"]
    assert [e.kind for e in d.journal.recent()] == ["cell-left"]
    assert "coming or going" in d.asked(2)
    d.joins(CellId("c" * 16))
    assert d.to_cell == CELL


async def test_a_peer_that_drains_or_changes_its_stage_stays_in_its_cell(tmp_path: Path) -> None:
    for name in ("draining", "ending"):
        d = FakeDaemon(config(tmp_path))
        setattr(d, name, True)
        d.joins(CELL)
        assert (d.to_cell, d.log) == (None, [])
    d = FakeDaemon(config(tmp_path))
    assert d.asked(2) == ""
    d.joins(CELL)
    assert (d.to_cell, d.to_stage) == (None, 2)
    d.calm.set()
    await d.idle()


def test_checkpoints_of_the_cell_that_was_left_are_set_aside(tmp_path: Path) -> None:
    ours = config(tmp_path)
    run = "f" * 64
    assert ours.cell(run) == ""
    ours.change_cell(run, CELL)
    assert ours.cell(run) == CELL
    for word in ("first", "second"):
        kept = ours.checkpoint_dir(run) / "stage-1"
        kept.mkdir(parents=True)
        (kept / word).write_text(word)
        ours.change_cell(run, "c" * 16)
        assert not ours.checkpoint_dir(run).exists()
        assert [p.name for p in (ours.swarm_dir(run) / "ckpt.left" / "stage-1").iterdir()] == [word]
    assert ours.cell(run) == "c" * 16


async def test_a_peer_that_comes_or_goes_is_not_moved(tmp_path: Path) -> None:
    for change in ({"draining": True}, {"ending": True}, {"assembled": None}, {"manifest": None}):
        d = FakeDaemon(config(tmp_path))
        for name, value in change.items():
            setattr(d, name, value)
        assert "coming or going" in d.asked(2)
        assert d.to_stage is None
    d = FakeDaemon(config(tmp_path, may_move=False))
    assert "operator" in d.asked(2)
    assert d.to_stage is None
    assert [e.kind for e in d.journal.recent()] == ["move-refused"]


async def test_a_peer_that_would_not_start_again_stays_where_it_is(tmp_path: Path) -> None:
    """The daemon that runs has read its settings; the next image would end with their fault."""
    text = tmp_path / "text.txt"
    text.touch()
    d = FakeDaemon(config(tmp_path, data=str(text)))
    settings = tmp_path / "config.toml"
    settings.write_text("[")

    def why() -> str:
        assert "could not begin anew" in d.asked(2)
        return d.journal.recent()[-1].text

    assert "config.toml is not TOML" in why()
    for _ in range(2):
        d.joins(CELL)
    settings.unlink()
    text.unlink()
    assert "text.txt does not exist" in why()
    text.touch()
    file = d.config.manifest_path(MANIFEST.run_id)
    file.write_text("[")
    assert "swarm.toml is damaged" in why()
    shutil.rmtree(file.parent)
    assert "was removed" in why()
    assert (d.moving, d.log) == (False, [])
    kinds = [e.kind for e in d.journal.recent() if e.level == "warning"]
    assert sorted(kinds) == ["cell-not-left", *["move-refused"] * 4]
    d.config.remember(MANIFEST)
    assert d.asked(2) == ""
    d.calm.set()
    await d.idle()
    assert d.moved


def test_the_image_takes_over_what_the_operator_has_overruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = config(tmp_path)
    d: Any = FakeDaemon(ours)
    d.to_stage = 2
    d.availability = AvailabilityKeeper(ours.availability, ours.pause_path, d.journal)
    d.availability.machine.overruled.add(By.HOURS)
    begun: list[Any] = []
    monkeypatch.setattr(running, "again", lambda *place: begun.append(place))
    running.begin_anew(d, MANIFEST.run_id)
    assert begun == [(2, MANIFEST.run_id)]
    fresh = AvailabilityKeeper(ours.availability, ours.pause_path, d.journal)
    assert fresh.machine.overruled == {By.HOURS}


def test_the_image_is_started_as_this_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        launch.sys, "orig_argv", ["/usr/bin/python3", "-m", "cli", "start", "--name", "x"]
    )
    monkeypatch.setattr(launch.os, "execv", lambda *a: called.append(a))
    # This process goes on, and with it its Ctrl-C.
    monkeypatch.setattr(launch.interrupts, "block", lambda *numbers: None)
    monkeypatch.setenv(MOVED, "")
    launch.again(2, MANIFEST.run_id)
    assert called == [
        (launch.sys.executable, [launch.sys.executable, "-m", "cli", "start", "--name", "x"])
    ]
    assert launch.os.environ[MOVED] == f"2 {MANIFEST.run_id}"
    launch.again(None, MANIFEST.run_id)
    assert launch.os.environ[MOVED] == f"- {MANIFEST.run_id}"
