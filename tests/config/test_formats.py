"""Manifests of every format: the hashed settings, the values kept as recorded, the refusals.

`format1/` was written by the code that knew no other format: manifests, and in `runs.json` their
run ids, invites, and a change of the owner. `defaults2.json` has the defaults of format 2.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from node.app import change
from node.checkpoint.store import CheckpointStore
from node.config import NodeConfig
from node.core.errors import ExitCode, TooNew, UsageFault
from node.core.tables import setting
from node.identity.admission import check_admission
from node.identity.invites import Invite
from node.identity.keys import Identity, peer_id_of
from node.manifest import FORMAT, GONE, SECTIONS, Manifest, amended, read_manifest

HERE = Path(__file__).parent
RUNS: dict[str, dict[str, Any]] = json.loads((HERE / "format1" / "runs.json").read_text())
OLD_CELLS = ("draft.toml", "private.toml")
"""Runs with cells that one leader planned for, which no software plays any more."""
PLAYED = [name for name in RUNS if name not in OLD_CELLS]
SIGNED = [name for name, run in RUNS.items() if "invite" in run and name in PLAYED]
DEMO = Manifest.default_demo()


@dataclasses.dataclass(frozen=True)
class Wider(SECTIONS["model"]):
    """A later software's section: one setting more."""

    experts: int = setting(1, "Experts of a layer.", least=1)


def _bare(raw: bytes) -> bytes:
    """The manifest without the comments behind its sections, which nothing depends on."""
    return re.sub(rb"^(\[\w+\]) #.*$", rb"\1", raw, flags=re.MULTILINE)


def old(name: str) -> Manifest:
    return read_manifest(HERE / "format1" / name)


@pytest.mark.parametrize("name", OLD_CELLS)
def test_a_run_with_cells_under_one_leader_is_refused(name: str) -> None:
    with pytest.raises(UsageFault, match=r"outer\.every is not a setting any more") as refusal:
        old(name)
    assert "outer.window_s" in refusal.value.next_step


@pytest.mark.parametrize("name", PLAYED)
def test_a_run_of_format_1_keeps_its_id(name: str) -> None:
    manifest = old(name)
    assert (manifest.format, manifest.run_id) == (1, RUNS[name]["run"])
    assert len(manifest.immutable()) == RUNS[name]["hashed"]
    assert Manifest.parse(manifest.to_toml()) == manifest


@pytest.mark.parametrize("name", SIGNED)
def test_a_format_1_run_verifies_and_is_rewritten_unchanged(name: str) -> None:
    manifest = old(name)
    invite = Invite.decode(RUNS[name]["invite"])
    manifest.verify(invite.run_id, invite.owner)
    assert _bare(manifest.to_toml()) == _bare((HERE / "format1" / name).read_bytes())
    assert (
        Invite(invite.run_id, invite.owner, invite.addresses, invite.admission).encode()
        == (RUNS[name]["invite"])
    )


def test_an_admission_to_a_run_of_format_1_is_good() -> None:
    invite = Invite.decode(RUNS["private.toml"]["invite"])
    permission = check_admission(
        invite.admission,
        run_id=invite.run_id,
        owner=invite.owner,
        peer=peer_id_of(invite.admission[9:41]),
        now_wall=1_900_000_000.0,
    )
    assert permission.until == 2_000_000_000.0


@pytest.mark.parametrize("name", SIGNED)
def test_a_home_and_its_checkpoints_work_for_both_formats(name: str, tmp_path: Path) -> None:
    before = old(name)
    owner = Identity.ephemeral()
    after = Manifest.parse(before.owned_by(owner.peer_id).sign(owner))
    assert (before.format, after.format) == (1, FORMAT)
    ours = NodeConfig(home=tmp_path)
    for manifest in (before, after):
        ours.remember(manifest)
        assert ours.remembered() == (manifest, None)
        _store(ours, manifest).save(1, 20, {"w": torch.ones(2)}, {}, {"of": manifest.format})
    for manifest in (before, after):
        assert ours.remembered(manifest.run_id) == (manifest, None)
        assert _store(ours, manifest).load(1, 20).meta == {"of": manifest.format}


def _store(ours: NodeConfig, manifest: Manifest) -> CheckpointStore:
    return CheckpointStore(ours.checkpoint_dir(manifest.run_id), ours.checkpoint, manifest.run_id)


def test_new_manifests_are_of_the_newest_format() -> None:
    assert FORMAT == DEMO.format == 2
    assert b"\nformat = 2\n" in DEMO.sign(Identity.ephemeral())
    signed = Manifest.parse(old("demo.toml").sign(Identity.ephemeral()))
    signed.verify()
    assert signed.format == 2
    same = dataclasses.replace(old("demo.toml"), format=2).owned_by(signed.swarm.owner)
    assert dataclasses.replace(signed, signature=None) == same


def test_format_2_hashes_its_number_and_changed_settings() -> None:
    assert DEMO.immutable() == b'{"format":2}'
    assert DEMO.run_id == "0b0a51ca69f81b9b374767da7a28f0721a61251140339f82e3f9da3c55bb871b"
    changed = amended(DEMO, {"model.layers": 12, "averaging.cell": 2, "outer.window_s": 4.0})
    assert json.loads(changed.immutable()) == {
        "format": 2,
        "averaging": {"cell": 2},
        "model": {"layers": 12},
        "outer": {"window_s": 4.0},
    }


def test_a_new_setting_with_its_default_changes_no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: old(name) for name in PLAYED} | {
        "new": amended(DEMO, {"model.layers": 12}),
    }
    monkeypatch.setitem(SECTIONS, "model", Wider)
    for name, manifest in before.items():
        after = Manifest.parse(manifest.to_toml())
        assert isinstance(after.model, Wider)
        assert after.run_id == manifest.run_id, name
    used = Manifest.parse(before["new"].to_toml().replace(b"[model]", b"[model]\nexperts = 2"))
    assert used.run_id != before["new"].run_id


def test_a_new_setting_at_its_default_is_read_by_older_software(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as newer:
        newer.setitem(SECTIONS, "model", Wider)
        made = dataclasses.replace(DEMO, model=Wider(layers=12))
        raw = made.to_toml()
        run_id = made.run_id
        used = dataclasses.replace(DEMO, model=Wider(experts=2)).to_toml()
    assert b"# experts = 1" in raw
    assert Manifest.parse(raw).run_id == run_id
    with pytest.raises(UsageFault, match=r"model\.experts is not a setting"):
        Manifest.parse(used)


def test_no_default_of_format_2_has_changed() -> None:
    """A run id stands for the defaults too: a change of a default needs a new format."""
    recorded: dict[str, dict[str, Any]] = json.loads((HERE / "defaults2.json").read_text())
    for section, values in recorded.items():
        today = json.loads(json.dumps(dataclasses.asdict(SECTIONS[section]())))
        if section == "outer":
            today |= {name.partition(".")[2]: usual for name, (usual, *_) in GONE.items()}
        assert {key: today.get(key, "gone") for key in values} == values, section


@pytest.mark.parametrize("raw", [b"format = 3", b"format = 3\n[unheard]\nof = 1"])
def test_a_future_format_is_refused_with_advice_to_update(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(TooNew) as fault:
        Manifest.parse(raw)
    assert fault.value.what == "the manifest is of format 3, and this tutti reads formats 1 to 2"
    assert "update this tutti" in fault.value.next_step
    assert fault.value.code is ExitCode.PROTOCOL
    ours = NodeConfig(home=tmp_path)
    ours.remember(DEMO).write_bytes(raw)
    with pytest.raises(TooNew, match="format 3"):
        ours.remembered()


@pytest.mark.parametrize("said", ["0", "-1", '"2"', "true", "1.5", "{}"])
def test_a_format_that_is_none_is_refused(said: str) -> None:
    with pytest.raises(UsageFault, match="^format = "):
        Manifest.parse(f"format = {said}\n".encode())


def test_a_run_of_a_newer_protocol_is_refused_with_advice() -> None:
    with pytest.raises(TooNew, match=r"swarm\.protocol = 99") as fault:
        amended(DEMO, {"swarm.protocol": 99})
    assert "update this tutti" in fault.value.next_step


def test_a_change_may_be_asked_for_with_a_file_of_format_1() -> None:
    manifest = amended(DEMO, {"model.layers": 7})
    with pytest.raises(UsageFault, match=r"not model\.layers"):
        change.wanted(manifest, b"[model]\nlayers = 8\n")
    assert change.wanted(manifest, b"[model]\nlayers = 7\n[swarm]\nowner = ''\n") == manifest
