"""A private swarm of real daemons: invited peers train, strangers see nothing, whatever door they
try."""

import time

import pytest

from node.identity.admission import admission_token
from node.identity.invites import Invite
from node.identity.keys import Identity

pytestmark = pytest.mark.swarm


def test_the_invited_train_and_a_stranger_gets_in_by_no_door(box, fault) -> None:
    owner, first, second = box.swarm(
        (1, 1, 1), swarm__admission="invite", training__min_replicas=1, training__epochs=100_000
    )
    key = Identity.load(box.root / "ends-0" / "identity.key")
    run = box.manifest.run_id

    def invite(peer: str | None) -> str:
        token = admission_token(key, run, peer, time.time() + 3600)
        return Invite(run, key.peer_id, (box.door,), token).encode()

    named = Identity.load_or_create(second.home / "identity.key").peer_id
    for peer, text in ((first, invite(None)), (second, invite(named))):
        words = list(peer.child.arguments)
        words[words.index("--join") + 1] = text
        peer.child.arguments = tuple(words)
    box.start(owner, first, second)
    box.goes_on(2)
    assert "Invite another machine" not in owner.said(), "it would have no token"

    intruder = box.member(1, "stranger").start()
    seen = box.tutti("peers", "--join", invite(None), "--json")
    assert seen.returncode == 0, seen.stderr
    assert named in seen.stdout
    for words in (
        ("peers", "--join", box.door),
        ("join", box.door, "--yes", "--no-start"),
        ("peers", "--join", invite(named)),
    ):
        done = box.tutti(*words)
        assert done.returncode == 5, done
        what, _ = fault(done)
        for secret in (named, first.label, second.label):
            assert secret not in done.stdout + what
    assert box.tutti("ping", box.door).returncode == 0

    box.wait(
        "the stranger to be turned away",
        lambda: any(e["kind"] == "not-admitted" for e in owner.events()),
    )
    box.goes_on(2)
    for peer in (owner, first, second):
        assert intruder.key not in {line.peer for line in peer.peers().peers}
    assert {line.peer for line in intruder.peers().peers} == {intruder.key}
