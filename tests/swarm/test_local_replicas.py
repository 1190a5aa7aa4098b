"""Replicas on one and on two devices average with each other, and a stage goes on from a checkpoint
of the other kind or from the weights of a given model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.model.pretrained import Weights, model_of
from node.model.settings import ModelSettings
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Peer
from testbed.daemons.forks import Forks
from testbed.models.directories import made
from testbed.reference.swarm import Reference

pytestmark = pytest.mark.swarm
EPOCHS = 8
LOST = ("state-lost", "state-unusable", "momentum-old", "state-not-moved", "checkpoint-failed")


@pytest.fixture
def box(tmp_path: Path, forks: Forks) -> Iterator[Box]:
    made = Box(tmp_path / "swarm", forks=forks)
    yield made
    made.clean_up()


def start(peer: Peer, devices: int) -> None:
    words = peer.child.arguments
    if "--local-devices" in words:
        words = words[: words.index("--local-devices")]
    peer.child.arguments = (*words, "--local-devices", str(devices))
    peer.start()


def finished(box: Box, folder: Path, untold: int = 0) -> None:
    """Wait for the end of the run. The loss of every epoch is one process's, and no state was
    lost. ``untold``: epochs that may be on the disk without a line in the log, because their leader
    stopped at that moment."""

    def committed() -> dict[int, float]:
        told = [e for peer in box.made.values() for e in peer.told() if e.kind == COMMITTED]
        return {e.get("epoch"): e.get("loss") for e in told}

    peers = tuple(box.live)
    box.wait("the last epoch", lambda: EPOCHS in committed(), 240.0, peers)
    losses = [e.loss for e in Reference(box.manifest, folder).train(EPOCHS)]
    alone = dict(enumerate(losses, 1))
    told = committed()
    assert len(alone) - len(told) <= untold
    assert told == pytest.approx({epoch: alone[epoch] for epoch in told}, rel=1e-3)
    for peer in box.made.values():
        assert [e["text"] for e in peer.events() if e["kind"] in LOST] == []


def test_replicas_of_one_and_of_two_devices_average(box, tmp_path):
    peers = box.swarm(
        (2, 2),
        model__kv_heads=2,
        pipeline__stages=1,
        training__min_replicas=2,
        training__epochs=EPOCHS,
    )
    for peer, devices in zip(peers, (2, 1, 2, 1), strict=True):
        start(peer, devices)
    finished(box, tmp_path)
    box.digests_equal()
    assert set(box.stop_all(60.0).values()) == {0}


def test_a_stage_goes_on_with_another_number_of_devices(box, tmp_path):
    ends, blocks = box.swarm(
        (1, 1),
        model__kv_heads=2,
        pipeline__stages=1,
        training__min_replicas=1,
        training__epochs=EPOCHS,
    )
    start(ends, 2)
    start(blocks, 1)
    box.wait("three epochs", lambda: ends.status().epoch >= 3, 240.0, (ends, blocks))
    assert set(box.stop_all(60.0).values()) == {0}
    start(ends, 1)
    start(blocks, 2)
    finished(box, tmp_path, untold=1)
    assert blocks.status().device.startswith("2 x cpu")
    assert not ends.status().device.startswith("2 x cpu")
    for peer in (ends, blocks):
        assert [e for e in peer.events() if "is back from the disk" in e["text"]]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_several_devices_begin_from_the_weights_of_a_given_model(box, tmp_path, kind):
    weights = made(kind, tmp_path / "model")
    fields, _ = model_of(weights)
    peers = box.swarm(
        (1, 1),
        **{f"model__{name}": value for name, value in fields.items()},
        model__weights=[*Weights(weights).digests(ModelSettings(**fields), 1)],
        pipeline__stages=1,
        training__min_replicas=1,
        training__epochs=2,
    )
    for peer in peers:
        peer.child.arguments += ("--weights", str(weights))
        start(peer, 2)

    def complete():
        now = peers[0].status()
        return len(now.loss_history) == 2 and now.state == "finished" and now

    status = box.wait("the last epoch", complete, 240.0, tuple(peers))
    losses = [e.loss for e in Reference(box.manifest, tmp_path, weights).train(2)]
    assert status.loss_first == pytest.approx(losses[0], rel=1e-5)
    assert status.loss == pytest.approx(losses[-1], rel=1e-3)
