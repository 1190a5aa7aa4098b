"""The owner of a run pauses it, lets it go on, and ends it: three daemons, one of them away
meanwhile."""

import json

import pytest

from testbed.daemons.told import without_home

pytestmark = pytest.mark.swarm

SETTINGS = dict(
    pipeline__stages=1,
    training__min_replicas=1,
    training__epochs=100_000,
    training__target_batch=8,
    training__eval_every=0,
)
WHY = "moving disks"


def test_the_owner_pauses_resumes_and_ends_a_run(box) -> None:
    peers = box.swarm((1, 2), **SETTINGS)
    owner, stays, away = peers
    box.start(*peers)
    box.goes_on(2)

    # One is away while the order is given; it learns it when it returns.
    assert away.end() == 0
    done = box.tutti("swarm", "pause", "--reason", WHY, "--in", "20s", home=owner.label)
    assert (done.returncode, done.stderr) == (0, "")
    for peer in (owner, stays):
        box.wait(f"{peer.label} to be paused", lambda p=peer: p.status().state == "paused")
    now = stays.status()
    assert now.healthy
    assert now.paused_by_run
    assert now.reason.startswith("paused by the run's owner ")
    assert now.reason.endswith(f" ago: '{WHY}'")
    assert now.next_step.endswith("it goes on when the run's owner resumes it")
    assert "tutti swarm resume" in without_home(owner.status().next_step)
    kept = {p.label: kept_epochs(p) for p in (owner, stays)}
    assert max(kept[owner.label]) == max(kept[stays.label]), "all finish one epoch"
    assert not stays.events("pause-hasty")

    # Neither its operator's resume nor a replay of an older order lets it go on.
    refused = box.tutti("resume", home=stays.label)
    assert refused.returncode == 2
    assert "tutti swarm resume" in without_home(refused.stderr)
    away.start()
    box.wait("who was away to learn it", lambda: away.status().state == "paused")
    assert not away.events("hosting")[1:], "it takes no stage meanwhile"

    # A peer's own pause holds beside the owner's: it goes on only when neither does.
    away.client().pause(None, "a film", now=False)
    done = box.tutti("swarm", "resume", home=owner.label)
    assert done.returncode == 0, done.stderr
    box.until_training(owner, stays)
    box.wait("who was away to learn that too", lambda: not away.status().paused_by_run)
    own = "paused by its operator (a film), until  tutti resume"
    assert without_home(away.status().reason) == own
    assert away.status().state == "paused"
    reached = box.goes_on(2)
    assert reached > max(kept[owner.label]), "it goes on where it was"
    assert box.tutti("resume", home=away.label).returncode == 0
    box.until_training(away)
    box.digests_equal()

    # An end is told by a typed fault to who comes back, and all daemons that ran end with code 0.
    done = box.tutti("swarm", "end", "--yes", "--reason", "done", "--in", "20s", home=owner.label)
    assert done.returncode == 0, done.stderr
    assert {p.label: p.wait(90.0) for p in peers} == {p.label: 0 for p in peers}
    for peer in peers:
        [event] = peer.events("run-ended")
        assert ("tutti export DIR" in without_home(event["text"])) is (peer is owner)
        assert max(kept_epochs(peer)) >= reached
        assert not peer.events("task-failed")
        assert not peer.events("digest-mismatch")
    stays.start()
    assert stays.wait(60.0) == 5
    assert "this run was ended by the run's owner" in stays.said()


def kept_epochs(peer) -> list[int]:
    """Epochs of the checkpoints on a peer's disk."""
    found = peer.home.glob("swarms/*/ckpt/stage-*/epoch-*/manifest.json")
    return [json.loads(path.read_text())["checkpoint"]["epoch"] for path in found]
