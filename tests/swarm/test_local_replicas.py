"""Replicas on one and on two devices average with each other, and go on from each other's kind of
checkpoint."""

import pytest

from testbed.reference.swarm import Reference

pytestmark = pytest.mark.swarm
EPOCHS = 10
LOST = ("state-lost", "state-unusable", "momentum-old", "state-not-moved", "checkpoint-failed")


def test_boxes_of_one_and_two_devices_take_each_others_place(box, tmp_path):
    peers = box.swarm(
        (2, 2),
        model__kv_heads=2,
        pipeline__stages=1,
        training__min_replicas=2,
        training__epochs=EPOCHS,
    )
    with_two = (peers[0], peers[2])
    for peer in peers:
        peer.child.arguments += ("--local-devices", str(1 + (peer in with_two)))
        peer.start()
    box.wait("four epochs", lambda: peers[0].status().epoch >= 4, 240.0, tuple(peers))
    box.digests_equal()
    assert set(box.stop_all(60.0).values()) == {0}
    for peer in peers:
        *words, _ = peer.child.arguments
        peer.child.arguments = (*words, str(2 - (peer in with_two)))
        peer.start()

    def complete():
        now = peers[0].status()
        return now.epoch >= EPOCHS and now.state == "finished" and now

    status = box.wait("the last epoch", complete, 240.0, tuple(peers))
    losses = [e.loss for e in Reference(box.manifest, tmp_path).train(EPOCHS)]
    assert status.loss == pytest.approx(losses[-1], rel=1e-3)
    for peer in peers:
        assert [e for e in peer.events() if e["kind"] in LOST] == []
    assert [p.status().device.startswith("2 x cpu") for p in peers] == [False, True, False, True]
    assert set(box.stop_all(60.0).values()) == {0}
