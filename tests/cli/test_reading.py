"""Files of a user that a run may read: the text that asks for consent, and the files that --yes
does not cover."""

import dataclasses

import pytest

from node.app import joining
from node.app.joining import reading_lines, sheet
from node.config import NodeConfig
from node.core.errors import UsageFault
from node.data.settings import Places
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest, amended

OWNER = Identity.ephemeral()
NAMED = {"data.source": "file:~/passwords.txt", "data.sha256": ""}


def of(owner: Identity, **fields: str) -> Manifest:
    changes = NAMED | {f"data.{key}": value for key, value in fields.items()}
    base = Manifest.default_demo().owned_by(owner.peer_id)
    return Manifest.parse(amended(base, changes).sign(owner))


@pytest.fixture
def diary(tmp_path):
    path = tmp_path / "diary.txt"
    path.write_text("my diary\n" * 100)
    return path


def loaded(home, flags=(), environment=()) -> NodeConfig:
    return NodeConfig.load({"home": home, **dict(flags)}, dict(environment))


def test_only_a_manifest_signed_with_the_key_of_this_home_is_ones_own(home, ours):
    assert not ours.places_of(of(OWNER)).own, "there is no key here yet"
    me = Identity.load_or_create(ours.identity_path)
    mine = of(me)
    assert ours.places_of(mine).own
    for foreign in (
        of(OWNER),
        Manifest.default_demo(),
        Manifest.default_demo().owned_by(me.peer_id),
        dataclasses.replace(mine, signature=None),
        dataclasses.replace(of(OWNER).owned_by(me.peer_id), signature=of(OWNER).signature),
        dataclasses.replace(mine, data=dataclasses.replace(mine.data, source="file:other.txt")),
    ):
        assert not ours.places_of(foreign).own


def test_places_are_remembered_with_their_hosts_but_nobodys_word(home, ours, diary):
    ours.keep_places("f" * 64, Places(str(diary), hosts=("nas.lan",), own=True))
    assert ours.places("f" * 64) == Places(str(diary), hosts=("nas.lan",))
    here = loaded(home, {"data_hosts": ["10.0.0.0/8"]})
    assert here.places("f" * 64).hosts == ("10.0.0.0/8",)
    (ours.swarm_dir("f" * 64) / "places.json").write_text('{"hosts": [3, {}, "x"], "own": true}')
    assert ours.places("f" * 64) == Places(hosts=("x",))


def test_consent_says_what_is_read_and_what_leaves(home, ours, diary):
    no_file = " ".join(reading_lines(ours, of(OWNER)))
    assert "no data: the manifest names no hash of ~/passwords.txt" in no_file
    assert "--data FILE" in no_file
    proven = " ".join(reading_lines(ours, of(OWNER, sha256="a" * 64)))
    assert "~/passwords.txt, if a file there has the hash" in proven
    here = loaded(home, {"data": str(diary)})
    assert f"{diary}, which you set as the data" in reading_lines(here, of(OWNER))[0]
    folder = loaded(home, {"data": str(diary.parent)})
    assert "no data" in reading_lines(folder, of(OWNER))[0]
    both = reading_lines(ours, of(OWNER, tokenizer="~/t.json", tokenizer_sha256="a" * 64))
    assert "~/t.json, if a file there has the hash of the run's tokenizer" in both[1]
    own = of(Identity.load_or_create(ours.identity_path))
    assert "in your own manifest" in reading_lines(ours, own)[0]
    for lines in (proven, *reading_lines(here, of(OWNER))[1:], *reading_lines(ours, own)[1:]):
        assert "leaves as activations, from which peers of stage 1 can tell it" in lines
    assert reading_lines(ours, Manifest.default_demo()) == ["no file of yours"]
    text = " ".join(" ".join(sheet(here, of(OWNER), signed=True)).split())
    assert f"reads {diary}"[:30] in text
    assert "peers of stage 1 can tell it" in text


@pytest.fixture
def join(tutti, monkeypatch):
    """``tutti join`` of a manifest that an invite leads to, which is not started."""

    def joined(manifest: Manifest, *words: str):
        invite = Invite(
            manifest.run_id, OWNER.peer_id, (f"/ip4/127.0.0.1/tcp/1/p2p/{OWNER.peer_id}",)
        )
        monkeypatch.setattr(joining, "look", lambda *_, joins: (manifest, invite))
        monkeypatch.setattr(joining, "check", lambda *_: None)
        return tutti("join", "tutti2x", "--no-start", *words)

    return joined


def test_yes_agrees_to_no_file_that_was_set_for_all_runs(join, home, diary):
    home.mkdir()
    (home / "config.toml").write_text(f'data = "{diary}"\n')
    shown = join(of(OWNER), "--yes")
    assert shown.returncode == 2
    assert "--yes  does not agree to reading a file of yours" in shown.stderr
    assert f"--data {diary}" in shown.stderr
    assert not (home / "swarms").exists()
    # Named for this run, not read at all, or proven by a hash.
    for words, manifest in (
        (("--data", str(diary)), of(OWNER)),
        (("--role", "stage"), of(OWNER)),
        ((), of(OWNER, sha256="a" * 64)),
        ((), Manifest.parse(Manifest.default_demo().sign(OWNER))),
    ):
        said = join(manifest, "--yes", *words)
        assert said.returncode == 0, said.stderr


def test_the_environment_is_for_all_runs_too(home, diary):
    ours = loaded(home, environment={"TUTTI_DATA": str(diary)})
    with pytest.raises(UsageFault, match="TUTTI_DATA"):
        joining.check_reading(ours, of(OWNER))
    # A daemon that is started without a question reads it no more than one that is.
    with pytest.raises(UsageFault, match="is not opened"):
        joining.opened(ours, of(OWNER), ours.places_of(of(OWNER)))
    flagged = loaded(home, {"data": str(diary)})
    assert joining.opened(flagged, of(OWNER), flagged.places_of(of(OWNER)))[0].tokens == 900


def test_what_a_person_agrees_to_is_named_for_this_run(join, home, diary, monkeypatch):
    home.mkdir()
    (home / "config.toml").write_text(f'data = "{diary}"\n')
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda *_, **__: True)
    ours = NodeConfig.load({"home": home}, {})
    ours.keep_places(of(OWNER).run_id, ours.places(of(OWNER).run_id))
    assert ours.places(of(OWNER).run_id).for_all_runs == ("data",), "a start agrees to nothing"
    join(of(OWNER)).good()
    assert ours.places(of(OWNER).run_id).for_all_runs == ()
    assert ours.places(of(OWNER, column="x").run_id).for_all_runs == ("data",)
