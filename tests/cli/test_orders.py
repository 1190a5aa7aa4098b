"""``swarm pause``, ``swarm resume``, ``swarm end``; and what joins and screens show of them."""

import json
import time

import pytest

from node.app.joining import look
from node.control.causes import Situation, cause
from node.control.text import status_lines
from node.core.errors import UsageFault
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest
from node.orders.order import RunEnded, Verb, read, signed
from protos.ask_pb2 import Answer, ManifestAnswer
from protos.control_pb2 import ArchiveLine, OrderLine
from testbed.fakes.canned_window import training_snapshot
from tests.cli.conftest import refused


@pytest.fixture
def owned(ours, daemon) -> Manifest:
    me = Identity.load_or_create(ours.identity_path)
    manifest = Manifest.parse(Manifest.default_demo().sign(me))
    ours.remember(manifest)
    daemon.said.swarm.run_id = manifest.run_id
    return manifest


def given(manifest: Manifest, daemon):
    return read(manifest.run_id, manifest.swarm.owner, daemon.ordered)


def test_the_owner_signs_an_order_and_the_daemon_gets_it(tutti, daemon, owned):
    before = time.time()
    said = tutti("swarm", "pause", "--reason", "moving disks", "--in", "2h").good()
    assert said.startswith(f"signed   pause of run {owned.run_id[:12]}, from ")
    order = given(owned, daemon)
    assert (order.verb, order.reason) == (Verb.PAUSE, "moving disks")
    assert 7200 <= order.begins - before < 7260
    assert order.number >= int(1000 * before)

    daemon.said.order.number = order.number + 10**9
    document = json.loads(tutti("swarm", "resume", "--json").good())
    assert document["number"] == order.number + 10**9 + 1, "above the number that is known"
    assert document["verb"] == "resume"
    assert given(owned, daemon).verb is Verb.RESUME

    assert tutti("swarm", "end", "--yes", "--in", "0").returncode == 0
    assert given(owned, daemon).verb is Verb.END


def test_an_end_asks_first(tutti, daemon, owned):
    refused(tutti("swarm", "end"), 2, "final", "--yes", "tutti export DIR")
    assert daemon.ordered == ""


def test_orders_and_changes_are_for_the_run_of_the_daemon(tutti, ours, daemon, owned, tmp_path):
    file = tmp_path / "changed.toml"
    file.write_text("[averaging]\ncell = 2\n")
    for run_id in ("", "cd" * 32):
        daemon.said.swarm.run_id = run_id
        for words in (["pause"], ["switch", str(file)]):
            refused(tutti("swarm", *words), 2, "no part in a run", "tutti status")
    assert daemon.ordered == ""


def test_who_does_not_own_the_run_is_told_so(tutti, ours, daemon):
    refused(tutti("swarm", "pause"), 2, "no part in a run")
    other = Manifest.parse(Manifest.default_demo().sign(Identity.ephemeral()))
    Identity.load_or_create(ours.identity_path)
    ours.remember(other)
    daemon.said.swarm.run_id = other.run_id
    refused(tutti("swarm", "pause"), 5, "belongs to", "only the owner")
    refused(tutti("swarm", "pause", "--in", "soon"), 2, "2h")
    refused(tutti("swarm", "pause", "--reason", "x" * 121), 5, "belongs to")
    assert daemon.ordered == ""


def test_a_reason_that_is_too_long_is_refused(tutti, daemon, owned):
    refused(tutti("swarm", "pause", "--reason", "x" * 121), 2, "120")
    assert daemon.ordered == ""


@pytest.mark.parametrize("mine", [True, False])
def test_an_export_of_an_ended_run_says_how_it_is_exported(tutti, ours, mine):
    owner = Identity.ephemeral()
    if mine:
        owner = Identity.load_or_create(ours.identity_path)
    manifest = Manifest.parse(Manifest.default_demo().sign(owner))
    ours.remember(manifest)
    (ours.checkpoint_dir(manifest.run_id) / "stage-1" / "epoch-40").mkdir(parents=True)
    refused(tutti("export", "out"), 3, "epoch 40", "tutti start")
    end = signed(manifest.run_id, owner.peer_id, owner, Verb.END, number=1, begins=1.0)
    ours.keep_order(manifest.run_id, end)
    step = "ask for an invite"
    if mine:
        step = "tutti swarm init --continue"
    shown = tutti("export", "out")
    refused(shown, 3, "epoch 40", "was ended by the run's owner", step, "the same home")


def joins(monkeypatch, manifest: Manifest, order: str) -> str:
    answer = Answer(manifest=ManifestAnswer(toml=manifest.to_toml(), order=order))
    monkeypatch.setattr("node.app.joining.observe", lambda *_: answer)
    peer = Identity.ephemeral().peer_id
    place = f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"
    return Invite(manifest.run_id, manifest.swarm.owner, (place,)).encode()


def test_who_joins_is_told_of_a_pause_and_of_an_end(ours, monkeypatch, capsys):
    owner = Identity.ephemeral()
    manifest = Manifest.parse(Manifest.default_demo().sign(owner))

    def order(verb: Verb, reason: str, signer: Identity = owner, in_s: float = -725.0) -> str:
        return signed(
            manifest.run_id,
            signer.peer_id,
            signer,
            verb,
            number=1,
            begins=time.time() + in_s,
            reason=reason,
        )

    invite = joins(monkeypatch, manifest, order(Verb.PAUSE, "moving disks"))
    assert look(ours, invite, joins=True)[0] == manifest
    said = capsys.readouterr().err
    assert "the run was paused by the run's owner 12 min ago: 'moving disks'" in said
    assert "waits" in said

    invite = joins(monkeypatch, manifest, order(Verb.END, "all done"))
    with pytest.raises(RunEnded, match="12 min ago: 'all done'") as e:
        look(ours, invite, joins=True)
    assert "an invite to that one" in e.value.next_step
    assert look(ours, invite)[0] == manifest, "it can still be looked at"
    assert "the run was ended" in capsys.readouterr().err

    later = order(Verb.PAUSE, "") + "\n" + order(Verb.END, "", in_s=7300.0)
    invite = joins(monkeypatch, manifest, later)
    assert look(ours, invite, joins=True)[0] == manifest, "until then it can be joined"
    said = capsys.readouterr().err
    assert "the run was paused by the run's owner" in said
    assert "the run will be ended by the run's owner in 2 h" in said

    for harmless in (order(Verb.RESUME, ""), order(Verb.END, "", Identity.ephemeral()), "rubbish"):
        invite = joins(monkeypatch, manifest, harmless)
        look(ours, invite, joins=True)
        assert capsys.readouterr().err == ""


def test_a_pause_of_the_owner_is_shown_with_the_step_that_ends_it():
    reason = "by the run's owner 12 min ago: 'moving disks'"
    found = cause(Situation(state="paused", paused=reason, paused_by_run=True, owns=True))
    assert found.what == f"paused {reason}"
    assert "tutti swarm resume" in found.step
    assert found.usual
    assert "tutti resume" in cause(Situation(state="paused", paused="by its operator")).step


def test_an_order_that_is_not_in_force_yet_is_a_line_of_status():
    line = OrderLine(number=4, verb="pause", reason="moving disks", begins=time.time() + 60)
    snapshot = training_snapshot()
    snapshot.order.CopyFrom(line)
    shown = "\n".join(map(str, status_lines(snapshot)))
    assert "the run's owner says pause, from " in shown
    assert "moving disks" in shown
    snapshot.order.in_force = True
    shown = "\n".join(map(str, status_lines(snapshot)))
    assert "run's owner" not in shown, "its reason is shown in the line of the state"


def test_a_run_without_an_owner_has_a_fault_of_its_own(ours, daemon, tutti, monkeypatch):
    monkeypatch.setattr(
        "node.config.NodeConfig.remembered", lambda self, run_id=None: (Manifest(), None)
    )
    Identity.load_or_create(ours.identity_path)
    daemon.said.swarm.run_id = "ab" * 32
    refused(tutti("swarm", "pause"), 2, "no owner", "tutti pause")
    with pytest.raises(UsageFault):
        signed(Manifest().run_id, "", Identity.ephemeral(), Verb.END, number=1, begins=0.0)


def test_status_shows_the_newest_copy_of_checkpoints():
    snapshot = training_snapshot()
    snapshot.archive.CopyFrom(ArchiveLine(to="s3://***@bucket/run"))
    assert "none of the checkpoints yet, to s3://***@bucket/run" in "\n".join(
        map(str, status_lines(snapshot))
    )
    snapshot.archive.MergeFrom(ArchiveLine(epoch=416, known=True, at=time.time()))
    assert "epoch 416 at s3://***@bucket/run, since " in "\n".join(map(str, status_lines(snapshot)))


def ended_run(ours, owner: Identity) -> Manifest:
    """The run that this home has used last; its owner has ended it."""
    manifest = Manifest.parse(Manifest.default_demo().owned_by(owner.peer_id).sign(owner))
    ours.remember(manifest)
    end = signed(manifest.run_id, owner.peer_id, owner, Verb.END, number=1, begins=time.time() - 60)
    ours.keep_order(manifest.run_id, end)
    return manifest


def test_status_of_an_ended_run_says_how_it_goes_on(tutti, ours):
    mine = Identity.load_or_create(ours.identity_path)
    manifest = ended_run(ours, mine)
    file = ours.manifest_path(manifest.run_id)
    more = f"tutti swarm init --continue {file} more.toml --epochs {2 * manifest.training.epochs} "
    refused(tutti("status"), 3, more, "tutti export DIR")
    ended_run(ours, Identity.ephemeral())
    refused(tutti("status"), 3, "ask for an invite")
