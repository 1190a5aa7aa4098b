"""Several joiners at one door at the same moment: each waits for its turn and gets in."""

import pytest

pytestmark = pytest.mark.swarm

CROWD = 8


def test_a_crowd_waits_in_the_founders_queue_and_gets_into_a_plan(box):
    members = box.swarm(
        (1, 1, 1), training__min_replicas=1, training__epochs=100_000, training__target_batch=64
    )
    box.start(*members)
    crowd = box.newcomers([f"crowd-{number}" for number in range(CROWD)], members[0])
    for peer in crowd:
        peer.start()
    box.until_training(*crowd)
    waited = [peer for peer in crowd if "in its queue" in peer.said()]
    assert waited, "the founder lets four in at once"
    for peer in waited:
        assert "answered after" in peer.said()
        assert len([line for line in peer.said().splitlines() if "waiting since" in line]) < 10
    assert box.goes_on(3)
    assert all(peer.running for peer in (*members, *crowd))
    assert [e for e in members[0].events("newcomers-wait")], "the founder's operator sees it"
