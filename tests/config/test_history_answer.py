"""The history that a daemon tells, with names and the memory of stages."""

from types import SimpleNamespace
from typing import Any

from node.app.capacity import PROCESS, stage_demands
from node.app.snapshot import SnapshotBuilder
from node.config import NodeConfig
from node.core.clock import SystemClock
from node.core.journey import UNKNOWN, Hop, Path
from node.manifest import Manifest
from node.telemetry.events import EPOCH, Journal
from node.telemetry.scalars import TAGS


def builder(tmp_path, manifest: Manifest | None) -> SnapshotBuilder:
    daemon: Any = SimpleNamespace(
        journal=Journal(),
        manifest=manifest,
        config=NodeConfig.load({"home": tmp_path}, {}),
        assembled=None,
        identity=SimpleNamespace(peer_id="B" * 6),
        clock=SystemClock(),
        metrics=SimpleNamespace(epoch_seconds=SimpleNamespace(observe=lambda seconds: None)),
    )
    daemon.journal.names.learn("A" * 6, "brisk-otter")
    return SnapshotBuilder(daemon)


def plan(epoch: int) -> Any:
    return SimpleNamespace(
        epoch=epoch,
        tokens=100 * epoch,
        loss=2.0,
        loss_val=0.0,
        cell_id="",
        forecast=(0.0, 0.0),
        reference=UNKNOWN,
        paths=(Path(0, "A" * 6, (0,), (Hop(1, "B" * 6),)),),  # pyright: ignore
    )


async def test_a_daemon_tells_its_epochs_and_whose_work_is_in_them(tmp_path):
    made = builder(tmp_path, None)
    for epoch in range(4):
        made.planned(plan(epoch))
    answer = await made.history(0, 0)
    assert [(line.epoch, line.tokens, line.epochs) for line in answer.epochs] == [
        (1, 100, 1),
        (2, 200, 1),
        (3, 300, 1),
    ]
    assert {(w.name, w.stage, w.micro_batches, w.epochs, w.of_stage) for w in answer.work} == {
        ("brisk-otter", 0, 3, 3, 3),
        ("", 1, 3, 3, 3),
    }
    assert list(answer.stage_bytes) == []
    more = await made.history(2, answer.edition)
    assert [line.epoch for line in more.epochs] == [3]


async def test_a_daemon_tells_what_each_stage_of_its_run_needs(tmp_path):
    manifest = Manifest.default_demo()
    made = builder(tmp_path, manifest)
    found = list((await made.history(0, 0)).stage_bytes)
    demands = stage_demands(NodeConfig.load({"home": tmp_path}, {}), manifest)
    assert found == [nbytes + PROCESS for nbytes in demands.values()]
    assert len(found) == manifest.pipeline.stages + 1


def test_a_daemon_reports_each_epoch_to_its_sinks_once(tmp_path):
    manifest = Manifest.default_demo()
    made = builder(tmp_path, manifest)
    made.tally.shown.loss_first = 2.0
    for epoch in (0, 1, 1, 2):
        made.planned(plan(epoch))
    told = [event for event in made._d.journal.recent() if event.kind == EPOCH]
    assert [(e.fields["epoch"], e.fields["tokens"]) for e in told] == [(1, 100), (2, 200)]
    assert {e.fields["run"] for e in told} == {manifest.run_id}
    assert {e.level for e in told} == {"debug"}
    fields = told[-1].fields
    assert fields.keys() >= TAGS.keys()
    assert fields["loss"] == 2.0
    assert fields["seconds"] > 0
    assert fields["tokens_per_s"] > 0
