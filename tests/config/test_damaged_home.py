"""A home's memory of its runs, with its files altered, cut, emptied or gone: the runs are found
again, or there is one clear refusal."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from node.app.assembly import inherit
from node.app.joining import choose
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore
from node.config import MOVED, NodeConfig
from node.core.errors import LocalFault, OutOfResources, Refused, UsageFault
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.telemetry.events import Journal

OWNER = Identity.ephemeral()
DAMAGE = {
    "altered": lambda p: p.write_bytes(
        bytes(
            b ^ 0xA5 if len(p.read_bytes()) // 2 <= i else b for i, b in enumerate(p.read_bytes())
        )
    ),
    "cut": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "emptied": lambda p: p.write_bytes(b""),
    "removed": lambda p: p.unlink(),
}


def a_run(name: str = "demo", **changes: object) -> Manifest:
    base = amended(Manifest.default_demo().owned_by(OWNER.peer_id), {"swarm.name": name, **changes})
    return Manifest.parse(base.sign(OWNER))


def invite_to(manifest: Manifest) -> Invite:
    return Invite(manifest.run_id, OWNER.peer_id, (f"/ip4/127.0.0.1/tcp/1/p2p/{OWNER.peer_id}",))


@pytest.fixture
def ours(tmp_path: Path) -> NodeConfig:
    config = NodeConfig.load({"home": tmp_path / "home"}, {})
    Identity.create(config.identity_path)
    return config


@pytest.fixture
def one(ours: NodeConfig) -> Manifest:
    """A run that this home was invited to, and remembers."""
    made = a_run()
    ours.remember(made, invite_to(made))
    return made


def others(home: Path, but: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in home.rglob("*") if p.is_file() and p != but}


@pytest.mark.parametrize("how", DAMAGE)
def test_the_run_used_last_is_found_without_its_pointer(
    ours: NodeConfig, one: Manifest, how: str
) -> None:
    pointer = ours.home / "swarms" / "current"
    DAMAGE[how](pointer)
    assert choose(ours, None) == (one, invite_to(one))
    ours.remember(a_run("two"))
    DAMAGE[how](pointer)
    before = others(ours.home, pointer)
    with pytest.raises(UsageFault, match="2 runs are remembered") as caught:
        choose(ours, None)
    assert str(ours.manifest_path(one.run_id)) in caught.value.next_step
    assert others(ours.home, pointer) == before, "no new run was begun"


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_manifest_is_asked_for_again_by_the_invite(
    ours: NodeConfig, one: Manifest, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ours.manifest_path(one.run_id)
    DAMAGE[how](path)
    assert choose(ours, None) == (None, invite_to(one))
    assert str(path) in capsys.readouterr().err
    assert choose(ours, invite_to(one).encode()) == (None, invite_to(one))
    ours.remember(one)
    assert choose(ours, None) == (one, invite_to(one))


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_manifest_is_refused_until_a_copy_is_given(
    ours: NodeConfig, how: str, tmp_path: Path
) -> None:
    one = a_run()
    ours.remember(one)
    path = ours.manifest_path(one.run_id)
    copy = tmp_path / "copy.toml"
    copy.write_bytes(path.read_bytes())
    DAMAGE[how](path)
    before = others(ours.home, path)
    with pytest.raises(Refused, match="swarm.toml is (damaged|missing)") as caught:
        choose(ours, None)
    assert "tutti start FILE" in caught.value.next_step
    assert others(ours.home, path) == before
    assert choose(ours, str(copy)) == (one, None)
    assert choose(ours, None) == (one, None)


@pytest.mark.parametrize("how", ["altered", "cut", "emptied"])
def test_a_damaged_invite_is_replaced_by_remembered_peers(
    ours: NodeConfig, one: Manifest, how: str
) -> None:
    path = ours.manifest_path(one.run_id).parent / "invite"
    DAMAGE[how](path)
    with pytest.raises(Refused, match="invite is damaged") as caught:
        choose(ours, None)
    assert "tutti join INVITE" in caught.value.next_step
    ours.keep_acquaintances(one.run_id, invite_to(one).addresses)
    assert choose(ours, None) == (one, invite_to(one))
    assert choose(ours, str(ours.manifest_path(one.run_id))) == (one, None), (
        "named by hand it needs none"
    )


def test_a_manifest_of_another_run_in_its_place_is_damage(ours: NodeConfig) -> None:
    one = a_run()
    two = a_run("two")
    ours.remember(one)
    ours.manifest_path(one.run_id).write_bytes(two.to_toml())
    with pytest.raises(Refused, match=f"describes run {two.run_id[:12]}"):
        ours.remembered()


def test_on_a_full_disk_what_is_remembered_is_remembered_again(
    ours: NodeConfig, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("node.config.write_atomically", full)
    ours.remember(one, invite_to(one))
    ours.keep_reference(one.run_id, 5.5)
    with pytest.raises(OutOfResources, match="no space to write"):
        ours.remember(a_run("two"))
    assert ours.remembered() == (one, invite_to(one))


def test_the_first_loss_survives_a_restart(ours: NodeConfig) -> None:
    one = a_run()
    assert ours.reference(one.run_id) == 0.0
    ours.remember(one)
    ours.keep_reference(one.run_id, 5.5640625)
    assert ours.reference(one.run_id) == 5.5640625
    for text in ("", "nan", "-1", "inf", "5.56.1", "\xff", "1e99"):
        (ours.swarm_dir(one.run_id) / "reference").write_bytes(text.encode("latin-1"))
        assert ours.reference(one.run_id) == 0.0


@pytest.mark.parametrize("place", ["2", "-"])
def test_a_daemon_that_has_moved_goes_on_in_its_run_though_the_user_joined_another(
    ours: NodeConfig, one: Manifest, place: str
) -> None:
    two = a_run("two")
    ours.remember(two)
    assert choose(ours, None) == (two, None), "the next start of the user"
    moved = NodeConfig.load({"home": ours.home}, {MOVED: f"{place} {one.run_id}"})
    assert choose(moved, None) == (one, invite_to(one))
    assert choose(ours, None) == (two, None), "and it stays that"
    for words in (str(ours.manifest_path(one.run_id)), invite_to(one).encode()):
        assert choose(moved, words) == (one, invite_to(one))
        assert choose(ours, None) == (two, None), "the words of its start are no new wish"
    moved.manifest_path(one.run_id).write_text("damaged")
    assert choose(moved, None) == (None, invite_to(one)), "asked from its own swarm"
    shutil.rmtree(ours.swarm_dir(one.run_id))
    with pytest.raises(Refused, match="was removed"):
        choose(moved, None)


def test_a_daemon_that_has_moved_goes_on_in_its_run_though_its_words_name_it_no_more(
    ours: NodeConfig, one: Manifest, tmp_path: Path
) -> None:
    two = a_run("two")
    moved = NodeConfig.load({"home": ours.home}, {MOVED: f"2 {one.run_id}"})
    file = tmp_path / "swarm.toml"
    assert choose(moved, str(file)) == (one, invite_to(one)), "the file is gone"
    file.write_bytes(two.to_toml())
    assert choose(moved, str(file)) == (one, invite_to(one)), "it is another run's by now"
    file.write_text("[")
    assert choose(moved, str(file)) == (one, invite_to(one))
    joins = NodeConfig.load(
        {"home": ours.home, "join": [invite_to(two).encode()]}, {MOVED: f"2 {one.run_id}"}
    )
    assert choose(joins, None) == (one, invite_to(one)), "a setting for the next start"
    with pytest.raises(UsageFault):
        choose(ours, str(file))
    file.write_bytes(one.to_toml())
    shutil.rmtree(ours.swarm_dir(one.run_id))
    assert choose(moved, str(file)) == (one, None)


def test_a_continued_run_inherits_its_own_checkpoints(
    ours: NodeConfig,
) -> None:
    one = a_run()
    two = a_run(**{"swarm.continues": one.run_id, "training.epochs": one.training.epochs + 5})
    assert two.run_id != one.run_id
    settings = CheckpointSettings(keep=9)
    journal = Journal()
    old = CheckpointStore(ours.checkpoint_dir(one.run_id), settings, one.run_id)
    beyond = two.training.epochs
    for epoch, lineage in ((20, "ab" * 16), (30, ""), (40, "ab" * 16), (beyond, "ab" * 16)):
        old.save(
            1,
            epoch,
            {"w": torch.full((3,), float(epoch))},
            {"w": {"momentum": torch.ones(3)}},
            {"lineage": lineage},
        )
    spoilt = old.path(1, 40) / "parameters.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"\x01")
    new = CheckpointStore(ours.checkpoint_dir(two.run_id), settings, two.run_id)
    inherit(ours, two, 1, new, journal)
    assert new.epochs(1) == [20]
    found = new.load(1, 20)
    assert (found.meta, found.parameters["w"].tolist()) == ({"lineage": "ab" * 16}, [20.0] * 3)
    assert [e.kind for e in journal.recent()] == [*["not-inherited"] * 3, "inherited"]
    assert "does not name its history" in journal.recent()[0].text
    assert f"the run has {beyond - 1}" in journal.recent()[2].text
    assert old.epochs(1) == [20, 30, 40, beyond], "the old run keeps what it has"
    new.save(1, 60, {"w": torch.zeros(3)}, {}, {})
    inherit(ours, two, 1, new, journal)
    assert new.epochs(1) == [20, 60], "once only"
    for spoilt in (new.path(1, 20), new.path(1, 60)):
        (spoilt / "parameters.safetensors").write_bytes(b"")
    inherit(ours, two, 1, new, journal)
    assert new.epochs(1) == [20], "again if nothing that is here can be used"
    inherit(ours, two, 2, new, journal)
    assert new.epochs(2) == []
    assert "nothing of it is here" in journal.recent()[-1].text


CONTINUED = (512, 768, 1000)


def continued(ours: NodeConfig) -> tuple[Manifest, CheckpointStore, CheckpointStore]:
    """A run that continues another one, with the checkpoints of that one and none of its own."""
    one = a_run("one", **{"training.epochs": 1000})
    two = a_run("two", **{"swarm.continues": one.run_id, "training.epochs": 2000})
    settings = CheckpointSettings(keep=9)
    old = CheckpointStore(ours.checkpoint_dir(one.run_id), settings, one.run_id)
    for epoch in CONTINUED:
        old.save(1, epoch, *content(epoch, "ab" * 16))
    return two, old, CheckpointStore(ours.checkpoint_dir(two.run_id), settings, two.run_id)


def content(epoch: int, lineage: str) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
    return {"w": torch.full((3,), float(epoch))}, {}, {"epoch": epoch, "lineage": lineage}


class Killed(BaseException):
    """The process ends here, and cleans nothing up."""


@pytest.mark.parametrize("copied", range(len(CONTINUED)))
@pytest.mark.parametrize("end", [Killed(), OutOfResources("the disk is full", "free some space")])
def test_a_continued_run_whose_first_start_was_cut_short_copies_the_rest_at_the_next(
    ours: NodeConfig, monkeypatch: pytest.MonkeyPatch, copied: int, end: BaseException
) -> None:
    two, _, new = continued(ours)
    save = new.save

    def cut_short(stage: int, epoch: int, *what: Any) -> Path:
        if epoch >= CONTINUED[copied]:
            raise end
        return save(stage, epoch, *what)

    with monkeypatch.context() as disk, suppress(Killed):
        disk.setattr(new, "save", cut_short)
        inherit(ours, two, 1, new, Journal())
    assert new.epochs(1) == [*CONTINUED[:copied]]
    journal = Journal()
    inherit(ours, two, 1, new, journal)
    assert new.epochs(1) == [*CONTINUED]
    assert [e.kind for e in journal.recent()] == ["inherited"]
    inherit(ours, two, 1, new, journal)
    assert len(list(journal.recent())) == 1, "once only"


@pytest.mark.parametrize("trained", [776, 1001])
def test_a_run_that_has_trained_on_copies_nothing_more_of_the_run_before(
    ours: NodeConfig, trained: int
) -> None:
    two, old, new = continued(ours)
    for epoch in CONTINUED[:2]:
        new.save(1, epoch, *content(epoch, "ab" * 16))
    new.save(1, trained, *content(trained, "cd" * 16))
    journal = Journal()
    inherit(ours, two, 1, new, journal)
    assert new.epochs(1) == [*CONTINUED[:2], trained]
    assert not list(journal.recent())
    assert old.epochs(1) == [*CONTINUED]


def test_a_run_with_checkpoints_starts_where_the_run_before_cannot_be_read(
    ours: NodeConfig,
) -> None:
    two, old, new = continued(ours)
    shutil.rmtree(old.root / "stage-1")
    (old.root / "stage-1").write_text("no directory")
    with pytest.raises(LocalFault):
        inherit(ours, two, 1, new, Journal())
    new.save(1, 512, *content(512, "ab" * 16))
    journal = Journal()
    inherit(ours, two, 1, new, journal)
    assert [e.kind for e in journal.recent()] == ["not-inherited"]
    assert new.epochs(1) == [512]


def test_a_damaged_last_checkpoint_of_the_run_before_is_named_until_the_run_trains(
    ours: NodeConfig,
) -> None:
    two, old, new = continued(ours)
    spoilt = old.path(1, CONTINUED[-1]) / "parameters.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"\x01")
    for _ in range(2):
        journal = Journal()
        inherit(ours, two, 1, new, journal)
        assert new.epochs(1) == [*CONTINUED[:2]]
        assert [e.kind for e in journal.recent()] == ["not-inherited", "inherited"]
    new.save(1, 800, *content(800, "cd" * 16))
    journal = Journal()
    inherit(ours, two, 1, new, journal)
    assert not list(journal.recent())
