import json
import os
import sys
import time
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

import cli
from node.commands.line import launching, shared
from node.config import NodeConfig
from node.control.diagnose import NobodyAnswers, failed
from node.core.errors import ExitCode, Refused
from node.core.ids import RunId
from node.core.version import VERSION
from node.identity.admission import check_admission
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest, amended, read_manifest
from protos.ask_pb2 import Answer, ManifestAnswer
from protos.control_pb2 import InviteReply
from tests.cli.conftest import in_a_process, refused

ROOT = Path(cli.__file__).parent
ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/"
PEER = Identity.ephemeral().peer_id
PLACE = ADDRESS + PEER
CLOSED = failed(PLACE, "connect", ExitCode.PORT_CLOSED, "connection refused")


@pytest.mark.parametrize(
    ("words", "unloaded"),
    [
        (
            ["version"],
            {"torch", "hivemind", "libp2p", "textual", "numpy", "grpc", "matplotlib", "zeroconf"},
        ),
        (["status"], {"torch", "hivemind", "libp2p", "textual"}),
        (["swarm", "init", "{home}/m.toml"], {"torch", "hivemind", "libp2p", "textual"}),
    ],
    ids=["version", "status", "swarm init"],
)
@pytest.mark.usefixtures("daemon")
def test_a_command_loads_nothing_heavy(home, words, unloaded):
    words = [word.format(home=home) for word in words]
    done = in_a_process(
        f"import sys, cli; code = cli.main(['--home', {str(home)!r}, *{words!r}]); "
        f"heavy = {unloaded!r} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    assert done.returncode == 0, done.stderr


def test_version_prints_the_version_of_pyproject(tutti):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert json.loads(tutti("version", "--json").stdout)["tutti"] == VERSION
    assert tutti("version").stdout.startswith(f"tutti {VERSION}")


def test_home_may_stand_anywhere(tutti, home, tmp_path):
    other = tmp_path / "other"
    assert str(other) in tutti("status", f"--home={other}").stderr
    assert str(home) in tutti("status").stderr
    assert tutti("generate", "--home").returncode == 2


def test_swarm_init_writes_a_signed_manifest_and_the_next_step(tutti, home):
    out = home.parent / "swarm.toml"
    said = tutti(
        "swarm",
        "init",
        "--name",
        "mine",
        "--set",
        "model.layers=4",
        "--stages",
        "2",
        "--epochs",
        "9",
    ).good()
    assert f"tutti start {out.name}" in said
    assert "tutti swarm invite" in said
    manifest = Manifest.parse(out.read_bytes())
    manifest.verify(None, Identity.load(home / "identity.key").peer_id)
    assert (
        manifest.swarm.name,
        manifest.model.layers,
        manifest.pipeline.stages,
        manifest.training.epochs,
    ) == ("mine", 4, 2, 9)
    refused(tutti("swarm", "init"), 2, "--force")


def test_swarm_init_warns_of_an_epoch_of_one_micro_batch(tutti):
    few = ("--set", "training.target_batch=4", "--set", "pipeline.micro_batch=4")
    said = tutti("swarm", "init", "few.toml", *few).good()
    assert "note     an epoch is one micro-batch (4 sequences, 4 at a time)" in said
    assert "training.target_batch=32" in said
    enough = ("--set", "training.target_batch=8", "--set", "pipeline.micro_batch=4")
    assert "note " not in tutti("swarm", "init", "enough.toml", *enough).good()
    shown = json.loads(tutti("swarm", "init", "json.toml", *few, "--json").stdout)
    assert len(shown["notes"]) == 1


def test_commands_that_are_advised_name_the_home_of_the_line(tutti, home):
    other = home.parent / "an other"
    said = tutti("status", "--home", str(other)).stderr
    assert f"start one with  tutti --home '{other}' start" in said
    assert "tutti start" in tutti("status").stderr
    out = ("swarm", "init", "pasted.toml", "--home", str(other))
    assert f"tutti --home '{other}' start pasted.toml" in tutti(*out).good()


def test_swarm_init_with_an_address_prints_an_invite_that_works(tutti, home):
    shown = json.loads(
        tutti("swarm", "init", "x.toml", "--private", "--address", PLACE, "--json").stdout
    )
    invite = Invite.decode(shown["invite"])
    assert invite.run_id == shown["run_id"]
    assert invite.addresses == (PLACE,)
    assert invite.admission  # private: it carries the owner's word


def test_init_with_a_wrong_address_writes_no_file(tutti, home):
    refused(tutti("swarm", "init", "mine.toml", "--address", "here", "--no-open"), 2, "multiaddr")
    assert not (home.parent / "mine.toml").exists()


def test_init_keeps_layers_at_the_ends(tutti, home):
    said = ("swarm", "init", "deep.toml", "--ends-layers", "2", "--no-open")
    refused(tutti(*said, "--stages", "5"), 2, "model.layers - model.ends_layers = 4")
    refused(tutti(*said[:-2], "6", "--stages", "1"), 2, "at most 5")
    tutti(*said).good()
    shown = tutti("swarm", "inspect", "deep.toml").stdout
    assert "the first 2 at the ends" in " ".join(shown.split())
    assert "ends (embedding, 0-1, head) and 3 block stages" in " ".join(shown.split())
    # Digests of weights belong to stages: another cut has others.
    file = home.parent / "deep.toml"
    given = amended(
        Manifest.parse(file.read_bytes()), {"model.weights": ["blake3:" + "ab" * 32] * 4}
    )
    file.write_bytes(given.to_toml())
    again = ("swarm", "init", "again.toml", "--from", "deep.toml", "--no-open")
    refused(tutti(*again, "--ends-layers", "1"), 2, "--from DIR")
    tutti(*again).good()


def test_inspect_shows_a_file(tutti):
    tutti("swarm", "init", "s.toml")
    shown = tutti("swarm", "inspect", "s.toml", "--json")
    assert json.loads(shown.stdout)["model"]["layers"] == 6
    assert "signed by its owner" in tutti("swarm", "inspect", "s.toml").stdout


def test_inspect_shows_what_a_long_invite_leads_to(tutti, ours):
    owner = Identity.ephemeral()
    manifest = Manifest.parse(Manifest.default_demo().sign(owner))
    ours.remember(manifest)  # so that no peer must be asked over the network
    text = Invite(manifest.run_id, owner.peer_id, (ADDRESS + owner.peer_id,), bytes(128)).encode()
    assert len(text) > 255, "longer than the name of a file may be"
    assert json.loads(tutti("swarm", "inspect", text, "--json").good())["swarm"]["name"] == (
        manifest.swarm.name
    )


def test_joining_needs_a_yes(tutti, ours):
    owner = Identity.ephemeral()
    manifest = Manifest.parse(Manifest.default_demo().sign(owner))
    invite = Invite(manifest.run_id, owner.peer_id, (ADDRESS + owner.peer_id,))
    text = invite.encode()
    ours.remember(manifest)  # so that no peer must be asked over the network
    asked = tutti("join", text, "--no-start")
    assert asked.returncode == 2
    assert "--yes" in asked.stderr
    assert owner.peer_id in asked.stderr  # the refusal names the swarm's owner
    assert tutti("join", text, "--no-start", "--yes").returncode == 0
    assert ours.remembered() == (manifest, invite)


@pytest.mark.parametrize(
    ("set_as", "flags", "port"),
    [("", (), 31337), ("9", (), 9), ("9", ("--port", "8"), 8), ("", ("--set", "p2p_port=0"), 0)],
)
def test_a_rendezvous_listens_where_it_is_set(tutti, monkeypatch, set_as, flags, port):
    ran = []
    monkeypatch.setattr(launching, "run_daemon", lambda ours, *_: ran.append(ours))
    monkeypatch.setenv("TUTTI_P2P_PORT", set_as)
    tutti("bootstrap", *flags).good()
    assert [ours.transport.p2p_port for ours in ran] == [port]


@pytest.fixture
def me(ours):
    return Identity.load_or_create(ours.identity_path)


@pytest.fixture
def private(ours, daemon, me):
    """The private run of the daemon here, which this home owns."""
    base = Manifest.default_demo().owned_by(me.peer_id)
    made = Manifest.parse(amended(base, {"swarm.admission": "invite"}).sign(me))
    ours.remember(made)
    reply = InviteReply(invite=Invite(made.run_id, me.peer_id, (PLACE,)).encode())
    daemon.invite = lambda: reply
    return made


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize(("only_on", "says"), [("", ""), ("network", "own network only")])
def test_an_invite_that_nobody_outside_can_use_is_said_to_be_one(tutti, daemon, only_on, says):
    daemon.invite().only_on = only_on
    shown = tutti("swarm", "invite")
    assert shown.good().startswith("tutti2")
    assert says in shown.stderr
    assert bool(shown.stderr) is bool(says)
    assert json.loads(tutti("swarm", "invite", "--json").good())["only_on"] == only_on


@pytest.mark.usefixtures("private")
def test_an_invite_for_no_peer_is_a_usage_error(tutti):
    refused(tutti("swarm", "invite", "--for", "anna"), 2, "called 'anna'", "tutti id show")


def test_the_invite_is_to_the_run_of_the_daemon(tutti, ours, private, me):
    other = Manifest.parse(Manifest.default_demo().sign(me))
    ours.remember(other)  # used last, by another command
    invite = Invite.decode(tutti("swarm", "invite", "--for", PEER, "--days", "7").good().strip())
    about = {"run_id": private.run_id, "owner": me.peer_id, "peer": PEER}
    check_admission(invite.admission, **about, now_wall=time.time())
    with pytest.raises(Refused, match="expired"):
        check_admission(invite.admission, **about, now_wall=time.time() + 8 * 86400)


@pytest.mark.parametrize("verb", ["start", "join"])
def test_the_swarm_that_was_looked_at_is_started(tutti, home, monkeypatch, verb):
    raw = Manifest.default_demo().sign(Identity.ephemeral())
    started = []
    answer = Answer(manifest=ManifestAnswer(toml=raw))
    monkeypatch.setattr("node.app.joining.observe", lambda *_: answer)
    monkeypatch.setattr(launching, "run_daemon", lambda *swarm: started.append(swarm))

    def execv(_: str, words: list[str]) -> None:
        monkeypatch.delitem(sys.modules, "libp2p")
        sys.exit(cli.main(words[2:]))

    monkeypatch.setattr(os, "execv", execv)
    # This process goes on, and with it its Ctrl-C.
    monkeypatch.setattr("node.core.interrupts.block", lambda *numbers: None)
    monkeypatch.setitem(sys.modules, "libp2p", None)
    home.mkdir()
    former = f'swarm = "former.toml"\njoin = ["{PLACE}"]\n' if verb == "join" else ""
    (home / "config.toml").write_text(former)
    place = f"/ip4/10.0.0.1/tcp/2/p2p/{PEER}"
    with pytest.raises(SystemExit):
        tutti(verb, place, "--name", "anna", *(["--yes"] if verb == "join" else []))
    ((ours, manifest, invite),) = started
    assert (manifest, ours.node.name) == (Manifest.parse(raw), "anna")
    assert (invite.run_id, invite.addresses) == (manifest.run_id, (place,))


def test_an_invite_for_another_run_than_its_manifest_is_refused(tutti, home):
    owner = Identity.ephemeral()
    other = Identity.ephemeral()
    manifest = Manifest.parse(Manifest.default_demo().sign(owner))
    NodeConfig.load({"home": home}, {}).remember(manifest)
    text = Invite(manifest.run_id, other.peer_id, (ADDRESS + owner.peer_id,)).encode()
    refused(tutti("join", text, "--yes", "--no-start"), 5, "belongs to")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("start", "nowhere.toml"), 2, ("nowhere.toml", "swarm init")),
        (("start", "tutti2abcdefgh234567"), 2, ("invite",)),
        (("join", "tutti2abcdefgh234567"), 2, ("invite",)),
        (("start", "tutti1abcdef"), 2, ("version 1, this tutti reads version 2",)),
        (("start", "TUTTI3ABCDEF"), 6, ("version 3, this tutti reads version 2",)),
    ],
)
def test_what_names_no_swarm_is_refused(tutti, words, code, says):
    refused(tutti(*words), code, *says)


def test_what_was_not_expected_leaves_its_story_in_a_file(home):
    done = in_a_process(
        "import sys; sys.argv[1:] = []; from node.commands.line import running; "
        f"running.HOME['home'] = {str(home)!r}; sys.excepthook = running.crashed; 1 / 0"
    )
    refused(done, 1, "unexpected ZeroDivisionError")
    assert "ZeroDivisionError" in (home / "log" / "crash.log").read_text()


def test_ctrl_c_ends_a_command_with_code_130(tutti, monkeypatch):
    monkeypatch.setattr(shared, "client", Mock(side_effect=KeyboardInterrupt))
    shown = tutti("status")
    assert shown.returncode == 130
    assert "interrupted" in shown.stderr


def test_doctor_net_exits_with_the_code_of_the_cause(tutti, network):
    network(CLOSED)
    shown = tutti("doctor", "net", PLACE)
    assert shown.returncode == 21
    assert "this machine" in shown.stdout
    assert "connection refused" in shown.stdout
    shown = tutti("doctor", "net", PLACE, "--json")
    said = json.loads(shown.stdout)
    assert (shown.returncode, said["verdict"]["code"], said["seconds"]) == (21, 21, 0.5)
    assert tutti("doctor", "net", "neither").returncode == 2


def test_an_unreachable_swarm_is_reported_with_every_address(tutti, monkeypatch, waits):
    monkeypatch.setattr("node.app.joining.observe", Mock(side_effect=NobodyAnswers([CLOSED])))
    invite = Invite(RunId("ab" * 32), PEER, (PLACE,)).encode()
    refused(tutti("join", invite, "--yes", "--no-start"), 21, f"  {PLACE}: connection refused")
    shown = tutti("peers", "--join", invite, "--json")
    document = json.loads(shown.stdout)
    assert (shown.returncode, document["exit_code"]) == (21, 21)
    assert [f["address"] for f in document["findings"]] == [PLACE]


def test_init_under_a_name_that_is_too_long_says_so(tutti, home):
    refused(tutti("swarm", "init", "a" * 300, "--no-open"), 1, "File name too long")
    refused(tutti("swarm", "init", "--from", "a" * 300), 2, "File name too long")


def test_every_init_makes_another_run(tutti, home):
    for words in (("0.toml",), ("1.toml",), ("2.toml", "--from", "0.toml")):
        tutti("swarm", "init", *words).good()
    zero, one, two = (read_manifest(home.parent / f"{i}.toml") for i in range(3))
    assert len({zero.run_id, one.run_id, two.run_id}) == 3
    assert two.model == zero.model


def test_a_finished_run_is_continued_on_purpose(tutti, home):
    first = json.loads(tutti("swarm", "init", "a.toml", "--epochs", "40", "--json").stdout)[
        "run_id"
    ]
    refused(tutti("swarm", "init", "b.toml", "--continue", "a.toml"), 2, "--epochs 80")
    assert (
        tutti("swarm", "init", "b.toml", "--continue", "a.toml", "--from", "a.toml").returncode == 2
    )
    assert not (home.parent / "b.toml").exists()
    assert (
        tutti("swarm", "init", "b.toml", "--continue", "a.toml", "--epochs", "90").returncode == 0
    )
    made = read_manifest(home.parent / "b.toml")
    made.verify()
    assert (made.swarm.continues, made.training.epochs) == (first, 90)
    assert made.run_id != first
