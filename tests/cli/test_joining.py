import itertools
import time
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.app import daemon
from node.app.joining import ask_peers, check, choose, examined, invite_text, look
from node.config import NodeConfig
from node.control.diagnose import Diagnosis, identity_in_use, silent
from node.core.errors import ExitCode, PeerFault, Refused, UsageFault
from node.core.ids import RunId
from node.core.version import PROTOCOL
from node.identity.admission import check_admission
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from protos.ask_pb2 import Answer, ManifestAnswer, PeersAnswer

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/"
OWNER = Identity.ephemeral()


def test_the_swarm_to_start_is_chosen_as_documented(home, ours):
    solo, _ = choose(ours, None)
    assert solo.swarm.owner == Identity.load(home / "identity.key").peer_id
    assert choose(ours, None) == (solo, None)  # the same one the next time

    file = home / "other.toml"
    file.write_bytes(Manifest.default_demo().sign(OWNER))
    place = ADDRESS + OWNER.peer_id
    manifest = Manifest.parse(file.read_bytes())
    invite = Invite(manifest.run_id, OWNER.peer_id, (place,))
    for join in (place, invite.encode()):
        with_join = NodeConfig.load({"home": home, "join": [join]}, {})
        assert choose(with_join, str(file)) == (manifest, invite)

    stranger = Invite(
        solo.run_id.replace(solo.run_id[0], "f" if solo.run_id[0] != "f" else "0"),
        OWNER.peer_id,
        (place,),
    )
    assert choose(ours, stranger.encode()) == (None, stranger), "the daemon must fetch it"

    by_environment = NodeConfig.load(
        {"home": home}, {"TUTTI_SWARM": str(file), "TUTTI_JOIN": place}
    )
    assert choose(by_environment, None) == (manifest, invite)

    rendezvous = NodeConfig.load({"home": home / "r", "role": "rendezvous", "join": [place]}, {})
    assert choose(rendezvous, None) == (None, None)


def test_a_manifest_from_a_stranger_must_be_the_invited_one(ours, monkeypatch):
    thief = Identity.ephemeral()
    real, fake = (Manifest.default_demo().sign(who) for who in (OWNER, thief))
    invite = Invite(Manifest.parse(real).run_id, OWNER.peer_id, (ADDRESS + thief.peer_id,)).encode()

    def answers(raw: bytes) -> None:
        monkeypatch.setattr(
            "node.app.joining.observe", lambda *_: Answer(manifest=ManifestAnswer(toml=raw))
        )

    answers(real)
    assert look(ours, invite) == (Manifest.parse(real), Invite.decode(invite))
    for wrong in (
        fake,
        real.replace(b"# epochs = 120", b"epochs = 121"),
        Manifest.parse(real).owned_by(OWNER.peer_id).to_toml(),
    ):
        answers(wrong)
        with pytest.raises(Refused):
            look(ours, invite)


def test_only_the_owner_invites_into_a_private_swarm():
    guest = Identity.ephemeral()
    private = Manifest.parse(
        amended(Manifest.default_demo(), {"swarm.admission": "invite"}).sign(OWNER)
    )
    places = (ADDRESS + OWNER.peer_id,)
    assert Invite.decode(invite_text(private, places, OWNER)).admission
    with pytest.raises(Refused, match="not its owner"):
        invite_text(private, places, guest)
    open_one = Manifest.parse(Manifest.default_demo().sign(OWNER))
    assert not Invite.decode(invite_text(open_one, places, guest)).admission


def test_a_private_swarm_is_asked_as_the_admitted_peer(ours, monkeypatch):
    me = Identity.load_or_create(ours.identity_path)
    private = Manifest.parse(
        amended(
            Manifest.default_demo().owned_by(OWNER.peer_id), {"swarm.admission": "invite"}
        ).sign(OWNER)
    )
    places, asked = (ADDRESS + OWNER.peer_id,), []
    answers = {
        "manifest": Answer(manifest=ManifestAnswer(toml=private.to_toml())),
        "peers": Answer(peers=PeersAnswer()),
    }

    def observed(places, question, seed=None):
        asked.append((question, Identity(Ed25519PrivateKey.from_private_bytes(seed), None)))
        return answers[question.WhichOneof("question")]

    monkeypatch.setattr("node.app.joining.observe", observed)
    for guest in (None, me.peer_id):
        text = invite_text(private, places, OWNER, guest)
        look(ours, text)
        ask_peers(ours, text)
        for question, asker in asked:
            token = question.manifest.admission or question.peers.admission
            check_admission(
                token,
                run_id=private.run_id,
                owner=OWNER.peer_id,
                peer=asker.peer_id,
                now_wall=time.time(),
            )
            assert (asker.peer_id == me.peer_id) is (guest is not None)
        assert len(asked) == 2
        asked.clear()


def test_before_the_start_clock_and_identity_are_looked_at(network, ours):
    place = ADDRESS + OWNER.peer_id
    invite = Invite(RunId("ab" * 32), OWNER.peer_id, (place,))
    asked = network(Diagnosis(place, "answer", True, "answered", clock_s=-3600.0))
    with pytest.raises(Refused, match="1h00m behind") as caught:
        check(ours, invite, 3.0)
    assert caught.value.code is ExitCode.CLOCK_WRONG
    # this home has no key yet
    how = {"me": None, "first": True, "seconds": 3.0, "admission": b"", "seed": None}
    assert asked == [((place,), how)]

    me = Identity.load_or_create(ours.identity_path).peer_id
    asked = network(Diagnosis(place, "answer", True, "answered"), identity_in_use(me, "it answers"))
    with pytest.raises(Refused, match="in use elsewhere") as caught:
        check(ours, invite)
    assert caught.value.code is ExitCode.IDENTITY_IN_USE
    assert asked[0][1]["me"] == me

    network(silent(place, 3.0))
    check(ours, invite)  # nobody there: the daemon goes on looking


def test_join_does_not_ask_about_the_key_of_a_local_daemon(ours, daemon, network):
    asked = network()
    Identity.load_or_create(ours.identity_path)
    check(ours, Invite(RunId("ab" * 32), OWNER.peer_id, (ADDRESS + OWNER.peer_id,)))
    assert [how["me"] for _, how in asked] == [None]


def test_the_addresses_to_examine_are_those_given_or_remembered(ours, network):
    asked, manifest = network(), Manifest.parse(Manifest.default_demo().sign(OWNER))
    one, two, three = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{OWNER.peer_id}" for port in (1, 2, 3))
    examined(ours, ())
    ours.remember(manifest, Invite(manifest.run_id, OWNER.peer_id, (one,)))
    examined(ours, ())
    examined(ours, (Invite(manifest.run_id, OWNER.peer_id, (two,)).encode().upper(), three))
    assert [addresses for addresses, _ in asked] == [[], [one], [two, three]]
    with pytest.raises(UsageFault, match="neither"):
        examined(ours, ("swarm.toml",))


async def test_one_bad_answer_does_not_end_the_search(ours, monkeypatch):
    good, fake = (Manifest.default_demo().sign(who) for who in (OWNER, Identity.ephemeral()))

    def gives(toml, oldest=PROTOCOL):
        return Answer(
            manifest=ManifestAnswer(toml=toml), oldest_protocol=oldest, newest_protocol=PROTOCOL
        )

    bad = gives(b"["), gives(fake), gives(good, PROTOCOL + 1)
    said = {Identity.ephemeral().peer_id: itertools.repeat(answer) for answer in bad}
    said[OWNER.peer_id] = iter((None, gives(good)))

    async def ask(peer, question):
        if answer := next(said[peer]):
            return answer
        raise PeerFault(peer, "no answer")

    monkeypatch.setattr(daemon, "RETRY_S", 0.0)
    seeker = daemon.Daemon.__new__(daemon.Daemon)
    transport = SimpleNamespace(learn=lambda *_: None, ask=ask)
    vars(seeker).update(config=ours, transport=transport, admission=lambda _: b"")
    manifest = Manifest.parse(good)
    invite = Invite(manifest.run_id, OWNER.peer_id, tuple(ADDRESS + peer for peer in said))
    assert await seeker._find_manifest(invite) == manifest
    assert ours.remembered() == (manifest, invite)
    said[OWNER.peer_id] = itertools.repeat(bad[0])
    with pytest.raises(Refused, match="is of run"):
        await seeker._find_manifest(invite)
