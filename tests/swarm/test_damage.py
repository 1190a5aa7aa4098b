"""A swarm whose peers were all stopped, and of whose newest checkpoints eight bytes were changed
meanwhile."""

from pathlib import Path

import pytest

from benchmarks.hour.damage import altered, epoch_in
from benchmarks.lab.fleet import START_S

pytestmark = pytest.mark.swarm


def checkpoints(home: Path) -> dict[int, Path]:
    return {epoch_in(str(p)): p for p in home.rglob("parameters.safetensors")}


def test_older_checkpoints_are_used_with_a_report(box):
    box.settings = ("checkpoint.every=2",)
    peers = box.swarm((1, 1), pipeline__stages=1, training__epochs=10**6, training__min_replicas=1)
    box.start(*peers)
    box.wait(
        "two checkpoints",
        lambda: all(len(checkpoints(p.home)) >= 2 for p in peers),
        START_S,
        tuple(peers),
    )
    first_loss = peers[0].status().loss_first
    assert set(box.stop_all().values()) == {0}
    assert not [e for p in peers for e in p.events("micro-batch-dropped")]

    spoilt = {p.label: max(checkpoints(p.home)) for p in peers}
    left = {p.label: max(set(checkpoints(p.home)) - {spoilt[p.label]}) for p in peers}
    for peer in peers:
        altered(checkpoints(peer.home)[spoilt[peer.label]])
    box.start(*peers)
    box.wait(
        "more epochs", lambda: peers[0].status().epoch > max(left.values()), START_S, tuple(peers)
    )
    for peer in peers:
        assert peer.running
        (restored,) = [e["fields"]["epoch"] for e in peer.events("restored")]
        assert restored == left[peer.label]
        assert peer.events("restore-failed")
        # The warning in the status ends when a new checkpoint has taken the name, which may be at
        # once.
        assert any(
            f"epoch-{spoilt[peer.label]} " in e["text"] for e in peer.events("checkpoint-ignored")
        )
        spoilt_home = peer.home / "swarms" / box.manifest.run_id[:12] / "ckpt"
        assert list(spoilt_home.glob(f"stage-*/epoch-{spoilt[peer.label]}*")), "never deleted"
    assert peers[0].status().loss_first == first_loss
