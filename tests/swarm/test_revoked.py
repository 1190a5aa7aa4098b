"""A private swarm of real daemons, of which the owner puts a peer out: it comes back by no door,
also not with a new key."""

import time

import pytest

from node.identity.admission import admission_token
from node.identity.invites import Invite
from node.identity.keys import Identity

pytestmark = pytest.mark.swarm


def test_a_revoked_peer_gets_in_by_no_door_also_not_with_a_new_key(box, fault) -> None:
    owner, first, second = box.swarm(
        (1, 1, 1), swarm__admission="invite", training__min_replicas=1, training__epochs=100_000
    )
    key = Identity.load(box.root / owner.label / "identity.key")
    run = box.manifest.run_id
    token = admission_token(key, run, None, time.time() + 3600)
    anybody = Invite(run, key.peer_id, (box.door,), token).encode()
    for peer in (first, second):
        words = list(peer.child.arguments)
        words[words.index("--join") + 1] = anybody
        peer.child.arguments = tuple(words)
    box.start(owner, first, second)
    box.goes_on(2)
    seen = box.tutti("peers", "--join", anybody, "--json", home="again")
    assert first.key in seen.stdout, seen.stderr

    done = box.tutti("swarm", "revoke", first.key, home=owner.label)
    assert done.returncode == 2, "another peer would be out too"
    assert second.key in fault(done)[0]
    done = box.tutti("swarm", "revoke", first.key, "--invite", "end", home=owner.label)
    assert done.returncode == 0, done.stderr
    assert "its key is" in done.stderr
    box.wait(
        "the sessions to end of all who came with the invite",
        lambda: not any(line.path for line in owner.peers().peers if line.path != "self"),
    )
    for asks in (("peers", "--join", anybody), ("join", anybody, "--yes", "--no-start")):
        done = box.tutti(*asks, home="again")
        assert done.returncode == 5, done
        what, _ = fault(done)
        assert "has revoked the invite" in what
    for peer in (first, second):
        told = (peer.key[-6:], "may not use the directory", "has revoked this peer")
        box.wait(
            "the directory to be closed to the old keys",
            lambda told=told: any(
                all(part in e["text"] for part in told) for e in owner.events("not-admitted")
            ),
        )
