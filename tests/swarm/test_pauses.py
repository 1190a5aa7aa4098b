"""One of three daemons pauses: it says goodbye, gives its memory back and keeps its place. The
others go on; then it is in a plan again."""

import json

import pytest

from node.core.memory import resident
from testbed.daemons.books import PLANNED
from testbed.daemons.told import without_home

pytestmark = pytest.mark.swarm

WIDE = dict(
    pipeline__stages=1,
    pipeline__micro_batch=2,
    training__min_replicas=1,
    training__epochs=100_000,
    training__target_batch=4,
    training__eval_every=0,
    model__d_model=512,
    model__heads=8,
    model__kv_heads=2,
    model__d_ff=1536,
)
PARAMETERS = 4 * 2 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1536)
"""Bytes of the matrices of the block stage."""


def members(peer) -> int:
    """Members of the newest plan that this leader has made."""
    return peer.events(PLANNED)[-1]["fields"]["members"]


def test_one_of_three_pauses_and_comes_back(box) -> None:
    peers = box.swarm((1, 2), **WIDE)
    ends, stays, pauses = peers
    box.start(*peers)
    box.wait("all in one plan", lambda: members(ends) == 3, must_run=tuple(peers))
    box.goes_on(3)
    before = pauses.status()
    used = resident(pauses.pid)

    said = pauses.client().pause(None, "a film", now=False)
    assert without_home(said).startswith("paused by its operator (a film), until  tutti resume: ")
    given_back = used - resident(pauses.pid)
    now = pauses.status()
    assert (now.state, now.healthy, now.cause) == ("paused", True, "paused")
    assert without_home(now.reason) == "paused by its operator (a film), until  tutti resume"
    assert (now.peer, now.addresses, now.stage) == (before.peer, before.addresses, 1)
    # The stage, its gradients and the state of its optimizer are gone.
    assert given_back > 3 * PARAMETERS, given_back
    assert not pauses.events("pause-hasty")
    assert not pauses.events("not-handed-over")

    # The others go on, and see a reason instead of a death.
    box.goes_on(3)
    box.wait("a plan without it", lambda: members(ends) == 2)
    line = box.wait(
        "its reason at another peer",
        lambda: next((p for p in stays.peers().peers if p.peer == pauses.key and p.paused), None),
    )
    assert (line.state, line.paused, line.role) == ("paused", "by its operator", "rendezvous")
    box.wait("the end of its goodbye", lambda: ends.events("peer-left"))
    assert not [e for e in ends.events("peer-lost") if e["fields"]["peer"] == pauses.key]
    assert box.tutti("status", home=pauses.label).returncode == 0

    # The pause survives the process; it has a duration now.
    pauses.client().pause(3600.0, "", now=True)
    assert json.loads((pauses.home / "pause.json").read_text())["seconds"] == 3600.0
    assert pauses.end() == 0
    pauses.start()
    box.wait("it to be paused again", lambda: pauses.status().state == "paused")
    assert pauses.status().paused.startswith("by its operator, until ")
    assert not pauses.events("hosting")[1:]

    done = box.tutti("resume", home=pauses.label)
    assert (done.returncode, without_home(done.stdout)) == (
        0,
        "goes on: it takes a stage again; see  tutti status\n",
    )
    box.until_training(pauses)
    box.wait("all in one plan again", lambda: members(ends) == 3, must_run=tuple(peers))
    box.goes_on(2)
    box.digests_equal()

    # Once more, without a new process.
    pauses.client().pause(None, "", now=True)
    assert resident(pauses.pid) < used
    pauses.client().resume()
    box.wait("all in one plan at last", lambda: members(ends) == 3, must_run=tuple(peers))
    box.until_training(pauses)
    box.goes_on(2)
    box.digests_equal()
    assert pauses.status().stage == 1
    for peer in peers:
        assert not peer.events("digest-mismatch")
        assert not peer.events("task-failed")
    assert set(box.stop_all().values()) == {0}
