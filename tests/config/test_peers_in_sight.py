"""The list of peers shows the dead as dead, before their records expire, and covers only the
living."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.app.snapshot import SnapshotBuilder, full_disk
from node.control.text import cover
from node.coordinator.presence import View
from node.coordinator.vitals import Life, Vitals
from node.core.ids import PeerId
from node.dht.record import DirectoryEntry, PeerBody, PeerEntry
from node.pipeline.rounding import SentRounding
from node.telemetry.events import Journal
from node.transport.port import PeerLink
from testbed.fakes.clock import VirtualClock

ME, A, B, C = (PeerId(f"12D3KooWxxxx{c * 6}") for c in "MABC")
NOW = 1_800_000_000.0


def entry(peer: PeerId, stage: int, state: str = "training", left_s: float = 15.0) -> PeerEntry:
    body = PeerBody(
        stage, "stage" if stage else "ends", state, 7, f"peer-{stage}", "0", started=5.0
    )
    return DirectoryEntry(peer, body, int(1000 * (NOW - 5.0)), NOW + left_s)


class Daemon:
    """A peer of stage 1 that sees A and B at stages 1 and 2, and leads if ``silent`` is given."""

    def __init__(self, silent: dict[PeerId, float] | None = None) -> None:
        self.vitals = Vitals()
        self.links = dict[PeerId, PeerLink]()
        self.presence = SimpleNamespace(
            view=View({p: entry(p, s) for p, s in ((A, 1), (B, 2))}),
            sightings=SimpleNamespace(lost={}, vitals=self.vitals),
        )
        leader = None if silent is None else object()
        self.made_up = set[PeerId]()
        training = SimpleNamespace(
            leader=leader,
            standing_of=self.standing_of,
            peers=SimpleNamespace(has_met=lambda peer: peer not in self.made_up),
        )
        self.silent = silent or {}
        self.assembled = SimpleNamespace(
            training=training,
            work=SimpleNamespace(fetching=1.0),
            stage=SimpleNamespace(version=SimpleNamespace(epoch=7)),
            pipeline=SimpleNamespace(rounding=SentRounding()),
        )
        self.manifest = None
        self.paused = ""
        self.pausing = False
        self.children = set[PeerId]()
        self.availability = SimpleNamespace(run_paused_at=0.0, public_reason="")
        self.journal = Journal()
        self.identity = SimpleNamespace(peer_id=ME)
        self.clock = VirtualClock(NOW)
        self.started = time.monotonic()
        self.transport = SimpleNamespace(peers=lambda: self.links)

    def standing_of(self, peer: PeerId) -> tuple[Life, float]:
        return self.vitals.look(peer, time.monotonic())

    def own_children(self) -> set[PeerId]:
        return self.children

    def body(self) -> PeerBody:
        return entry(ME, 1).body


def shown(daemon: Daemon) -> dict[str, Any]:
    builder: Any = SnapshotBuilder(daemon)  # type: ignore[arg-type]
    return {line.peer: line for line in builder.peers_in_sight().peers}


def test_a_peer_that_fell_silent_is_shown_so_and_covers_nothing():
    daemon = Daemon()
    builder: Any = SnapshotBuilder(daemon)  # type: ignore[arg-type]
    assert cover(builder.peers_in_sight()) == {0: 0, 1: 2, 2: 1}
    daemon.vitals.alive(B, time.monotonic() - 4.0)
    daemon.vitals.doubt(B, time.monotonic())
    line = shown(daemon)[B]
    assert (line.state, round(line.silent_s)) == ("silent", 4)
    assert cover(builder.peers_in_sight()) == {0: 0, 1: 2}, "nobody at stage 2"


def test_a_peer_that_the_leader_found_dead_is_lost_and_one_that_said_so_has_left():
    daemon = Daemon()
    daemon.vitals.dead(A, time.monotonic() - 3.0)
    daemon.vitals.leaves(B, True)
    daemon.vitals.dead(B, time.monotonic())
    lines = shown(daemon)
    assert (lines[A].state, round(lines[A].seen_s)) == ("lost", 3)
    assert lines[B].state == "left"


def test_a_connection_that_was_made_since_is_a_sign_of_life():
    daemon = Daemon()
    daemon.vitals.doubt(A, time.monotonic() - 5.0)
    daemon.links[A] = PeerLink(path="direct", since=NOW - 60.0)
    assert shown(daemon)[A].state == "silent"
    daemon.links[A] = PeerLink(path="direct", since=NOW - 1.0)
    assert shown(daemon)[A].state == "training"


def test_a_peer_is_shown_with_the_format_of_what_it_got_and_its_error():
    daemon = Daemon()
    daemon.assembled.pipeline.rounding.sent(B, "int4", 0.1)
    lines = shown(daemon)
    assert (lines[B].wire, lines[B].wire_error) == ("int4", 0.1)
    assert (lines[A].wire, lines[A].wire_error) == ("", 0.0)


@pytest.mark.parametrize(
    ("state", "left_s", "says"),
    [("training", -1.0, "lost"), ("training", 10.0, "left"), ("draining", -1.0, "left")],
)
def test_a_record_that_was_taken_down_is_of_a_peer_that_left(state: str, left_s: float, says: str):
    daemon = Daemon()
    daemon.presence.sightings.lost = {C: (entry(C, 2, state, left_s), NOW)}
    assert shown(daemon)[C].state == says


def silence(daemon: Daemon, builder: Any) -> list[str]:
    before = len(daemon.journal.recent())
    builder._tell_silence()
    return [event.text for event in daemon.journal.recent()[before:]]


def test_the_log_says_who_falls_silent_and_is_heard_again():
    daemon = Daemon()
    builder: Any = SnapshotBuilder(daemon)  # type: ignore[arg-type]
    daemon.journal.names.learn(A, "brisk-otter")
    now = time.monotonic()
    daemon.vitals.doubt(A, now - 2.0)
    assert silence(daemon, builder) == [], "it may be a moment"
    daemon.vitals = Vitals()
    daemon.vitals.doubt(A, now - 8.0)
    assert silence(daemon, builder) == ["brisk-otter (AAAAAA) has been silent for 8 s"]
    assert silence(daemon, builder) == []
    daemon.vitals.alive(A, now)
    assert silence(daemon, builder) == ["brisk-otter (AAAAAA) is heard again"]


def test_the_log_says_nothing_of_peers_that_only_the_directory_names():
    daemon = Daemon()
    daemon.made_up = {B}
    for peer in (A, B):
        daemon.vitals.doubt(peer, time.monotonic() - 8.0)
    builder: Any = SnapshotBuilder(daemon)  # type: ignore[arg-type]
    assert silence(daemon, builder) == ["AAAAAA has been silent for 8 s"]


def test_a_leader_says_what_it_decides_instead():
    daemon = Daemon(silent={A: 8.0})
    daemon.vitals.doubt(A, time.monotonic() - 8.0)
    assert silence(daemon, SnapshotBuilder(daemon)) == []  # type: ignore[arg-type]


def test_a_disk_that_is_full_or_gone_is_said(tmp_path, monkeypatch):
    assert full_disk(tmp_path) == ""
    assert "does not answer" in full_disk(tmp_path / "gone")
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1 << 20))
    assert full_disk(tmp_path) == f"the disk of {tmp_path} is full: 1.0 MiB are free"


def pause(daemon: Daemon, run_paused_at: float) -> None:
    daemon.paused = "by its operator"
    daemon.availability.run_paused_at = run_paused_at
    daemon.availability.public_reason = "by its operator"


def test_peers_that_the_owner_has_paused_have_not_left():
    daemon = Daemon()
    daemon.vitals.leaves(A, True)
    daemon.vitals.dead(A, time.monotonic())
    daemon.presence.sightings.lost = {C: (entry(C, 2, left_s=10.0), NOW)}
    assert {shown(daemon)[p].state for p in (A, C)} == {"left"}
    pause(daemon, NOW - 5.0)
    for peer in (A, C):
        assert shown(daemon)[peer].state == "paused"
        assert shown(daemon)[peer].paused == "by the run's owner"
    gone = entry(C, 2, "paused", left_s=10.0)
    gone = replace(gone, body=replace(gone.body, paused="by the run's owner"))
    daemon.presence.sightings.lost = {C: (gone, NOW)}
    assert shown(daemon)[C].state == "paused", "it has said so before it went"
    pause(daemon, NOW + 600.0)
    assert shown(daemon)[C].state == "left", "long before the order"


def test_the_children_of_a_paused_solo_run_are_paused():
    daemon = Daemon()
    daemon.presence.sightings.lost = {p: (entry(p, 2, left_s=10.0), NOW) for p in (A, C)}
    daemon.children = {C}
    assert shown(daemon)[C].state == "left"
    pause(daemon, 0.0)
    assert (shown(daemon)[C].state, shown(daemon)[A].state) == ("paused", "left")


def manifest(epochs: int = 90) -> Any:
    return SimpleNamespace(
        swarm=SimpleNamespace(name="run"),
        run_id="1" * 64,
        training=SimpleNamespace(epochs=epochs),
        pipeline=SimpleNamespace(stages=2),
    )


def held(daemon: Daemon, epochs: dict[PeerId, int]) -> None:
    entries = dict[PeerId, PeerEntry]()
    for peer, epoch in epochs.items():
        one = entry(peer, 1)
        entries[peer] = replace(one, body=replace(one.body, epoch=epoch))
    daemon.presence.view = View(entries)


def test_a_peer_without_parameters_shows_the_epoch_of_the_others():
    daemon = Daemon()
    daemon.manifest = manifest()
    builder: Any = SnapshotBuilder(daemon)  # type: ignore[arg-type]
    held(daemon, {A: 40, B: 41, C: 10**9})
    assert builder.peers_in_sight().swarm.epoch == 7, "its own while it holds one"
    daemon.assembled.stage.version.epoch = 0
    assert builder.peers_in_sight().swarm.epoch == 41
    daemon.assembled = None
    assert builder.peers_in_sight().swarm.epoch == 41, "the middle one"
    held(daemon, {A: 0, C: 10**9})
    assert builder.peers_in_sight().swarm.epoch == 90, "no more than the run has"


def test_a_peer_that_starts_paused_shows_the_epoch_of_its_checkpoints(tmp_path):
    daemon = Daemon()
    daemon.manifest = manifest()
    daemon.assembled = None
    daemon.config = SimpleNamespace(checkpoint_dir=lambda run_id: tmp_path)
    held(daemon, {A: 0})
    builder: Any = SnapshotBuilder(daemon)  # type: ignore[arg-type]
    for name in ("epoch-30", "epoch-60", "epoch-x"):
        (tmp_path / "stage-0" / name).mkdir(parents=True)
    builder.recall_epoch()
    assert builder.peers_in_sight().swarm.epoch == 60
    held(daemon, {A: 75})
    assert builder.peers_in_sight().swarm.epoch == 75


def test_a_peer_that_gave_its_stage_up_keeps_its_counts_and_measures_the_speed_anew():
    daemon = Daemon()
    daemon.manifest = manifest()
    builder: Any = SnapshotBuilder(daemon)  # type: ignore[arg-type]
    for epoch in range(5):
        builder.tally.progress.reached(epoch, float(epoch))
    assert builder.tally.progress.left(90, 5.0) != (0.0, 0.0)
    for _ in range(2):
        builder.tally.gave_up(
            SimpleNamespace(
                stage=SimpleNamespace(version=SimpleNamespace(epoch=40)),
                meter=SimpleNamespace(micro_batches=6, last_work=3.0),
            )
        )
    held(daemon, {A: 0})
    daemon.assembled = None
    assert builder.peers_in_sight().swarm.epoch == 40, "the others hold nothing either"
    assert (builder.tally.worked, builder.tally.last_work) == (12, 3.0)
    assert builder.tally.progress.left(90, 6.0) == (0.0, 0.0)
