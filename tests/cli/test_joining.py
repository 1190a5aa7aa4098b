import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.config import NodeConfig
from node.core.errors import Refused
from node.identity.admission import check_admission
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.joining import ask_peers, choose, invite_text, look
from node.manifest import Manifest, amended
from protos.ask_pb2 import Answer, ManifestAnswer, PeersAnswer

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/"


def test_the_swarm_to_start_is_chosen_as_documented(home):
    owner = Identity.ephemeral()
    ours = NodeConfig.load({"home": home}, {})
    solo, none = choose(ours, None)
    assert none is None
    assert solo is not None
    assert solo.swarm.owner == Identity.load(home / "identity.key").peer_id
    assert choose(ours, None)[0] == solo  # the same one the next time

    file = home / "other.toml"
    file.write_bytes(Manifest.default_demo().sign(owner))
    place = ADDRESS + owner.peer_id
    with_join = NodeConfig.load({"home": home, "join": [place]}, {})
    manifest, invite = choose(with_join, str(file))
    assert manifest is not None
    assert invite is not None
    assert (invite.run_id, invite.owner, invite.addresses) == (manifest.run_id, owner.peer_id, (place,))

    with_both = NodeConfig.load({"home": home, "join": [Invite(manifest.run_id, owner.peer_id, (place,)).encode()]}, {})
    chosen, invite = choose(with_both, str(file))
    assert chosen == manifest
    assert invite is not None

    stranger = Invite(solo.run_id.replace(solo.run_id[0], "f" if solo.run_id[0] != "f" else "0"), owner.peer_id, (place,))
    manifest, invite = choose(ours, stranger.encode())
    assert manifest is None  # the daemon must fetch it
    assert invite == stranger

    by_environment = NodeConfig.load({"home": home}, {"TUTTI_SWARM": str(file), "TUTTI_JOIN": place})
    manifest, invite = choose(by_environment, None)
    assert manifest is not None
    assert manifest.swarm.owner == owner.peer_id
    assert invite is not None

    rendezvous = NodeConfig.load({"home": home / "r", "role": "rendezvous", "join": [place]}, {})
    assert choose(rendezvous, None) == (None, None)


def test_a_manifest_from_a_stranger_must_be_the_invited_one(home, monkeypatch):
    owner, thief = Identity.ephemeral(), Identity.ephemeral()
    ours = NodeConfig.load({"home": home}, {})
    real, fake = (Manifest.default_demo().sign(who) for who in (owner, thief))
    invite = Invite(Manifest.parse(real).run_id, owner.peer_id, (ADDRESS + thief.peer_id,)).encode()

    def answers(raw: bytes) -> None:
        monkeypatch.setattr("node.joining.observe", lambda *_: Answer(manifest=ManifestAnswer(toml=raw)))

    answers(real)
    assert look(ours, invite) == (Manifest.parse(real), invite)
    for wrong in (fake, real.replace(b"epochs = 120", b"epochs = 121"), Manifest.parse(real).owned_by(owner.peer_id).to_toml()):
        answers(wrong)
        with pytest.raises(Refused):
            look(ours, invite)


def test_only_the_owner_invites_into_a_private_swarm():
    owner, guest = Identity.ephemeral(), Identity.ephemeral()
    private = Manifest.parse(amended(Manifest.default_demo(), {"swarm.admission": "invite"}).sign(owner))
    places = (ADDRESS + owner.peer_id,)
    assert Invite.decode(invite_text(private, places, owner)).admission
    with pytest.raises(Refused, match="not its owner"):
        invite_text(private, places, guest)
    open_one = Manifest.parse(Manifest.default_demo().sign(owner))
    assert not Invite.decode(invite_text(open_one, places, guest)).admission


def test_of_a_private_swarm_is_asked_as_the_peer_that_its_token_admits(home, monkeypatch):
    owner = Identity.ephemeral()
    ours = NodeConfig.load({"home": home}, {})
    me = Identity.load_or_create(ours.identity_path)
    private = Manifest.parse(
        amended(Manifest.default_demo().owned_by(owner.peer_id), {"swarm.admission": "invite"}).sign(owner)
    )
    places, asked = (ADDRESS + owner.peer_id,), []

    def observed(places, question, kind, seed=None):
        asked.append((question, Identity(Ed25519PrivateKey.from_private_bytes(seed), None)))
        manifest = ManifestAnswer(toml=private.to_toml())
        return Answer(manifest=manifest) if kind == "manifest" else Answer(peers=PeersAnswer())

    monkeypatch.setattr("node.joining.observe", observed)
    for guest in (None, me.peer_id):
        text = invite_text(private, places, owner, guest)
        look(ours, text)
        ask_peers(ours, text)
        for question, asker in asked:
            token = question.manifest.admission or question.peers.admission
            check_admission(token, run_id=private.run_id, owner=owner.peer_id, peer=asker.peer_id, now_wall=time.time())
            assert (asker.peer_id == me.peer_id) is (guest is not None)
        assert len(asked) == 2
        asked.clear()
