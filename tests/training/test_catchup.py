"""What a peer has in place before it takes part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from node.app.catchup import catch_up


class Board:
    """A directory: who is at which epoch."""

    def __init__(self, **records: tuple[int, str]) -> None:
        self.records, self.looks = records, 0

    def replicas(self, stage: int) -> dict[str, Any]:
        self.looks += 1
        assert stage == 1
        return {
            p: SimpleNamespace(body=SimpleNamespace(epoch=e, state=s))
            for p, (e, s) in self.records.items()
        }


async def test_the_newest_checkpoint_that_can_be_read_is_put_in_place(
    rig: Any, tmp_path: Path
) -> None:
    a, b = await rig.add("a", "b", every=1)
    owners = {n: a for n in rig.shapes}
    await rig.train((a, b), owners, 4)
    await a.work.local_checkpoints.saved()
    two, three = a.work.checkpoints()[-2:]
    spoilt = a.store.path(1, three.epoch) / "parameters.safetensors"
    raw = bytearray(spoilt.read_bytes())
    raw[-1] ^= 1
    spoilt.write_bytes(raw)
    (c,) = await rig.add("c", every=1)
    c.store.root = a.store.root
    assert three in c.work.checkpoints(), "its manifest is whole, and nobody has read the rest"
    await catch_up(c.work, Board(), tmp_path / "in", c.journal, 0.0)  # type: ignore[arg-type]
    assert c.work.version == two
    assert len(c.events("restore-failed")) == 1
    assert [e.fields["epoch"] for e in c.events("restored")] == [two.epoch]
    assert three not in c.work.checkpoints(), "no leader is told that it could go there"
    (ignored,) = c.events("checkpoint-ignored")
    assert f"epoch-{three.epoch}" in ignored.text
    assert any(f"epoch-{three.epoch}: " in said for said in c.work.local_checkpoints.troubles())


async def test_what_the_swarm_has_is_newer(rig: Any, tmp_path: Path) -> None:
    a, b = await rig.add("a", "b")
    await rig.train((a, b), {n: a for n in rig.shapes}, 3)
    (c,) = await rig.add("c")
    record_store = Board(
        a=(3, "training"), b=(3, "ready"), old=(1, "training"), leaving=(9, "draining")
    )
    await catch_up(c.work, record_store, tmp_path / "in", c.journal, 0.0)  # type: ignore[arg-type]
    assert c.work.version == a.work.version
    assert not c.events("fetch-failed")


async def test_a_checkpoint_is_kept_over_older_parameters_of_donors(
    rig: Any, tmp_path: Path
) -> None:
    a, b = await rig.add("a", "b", every=1)
    await rig.train((a, b), {n: a for n in rig.shapes}, 3)
    await a.work.local_checkpoints.saved()
    at = a.work.checkpoints()[-1]
    c, d = await rig.add("c", "d", every=1)
    c.store.root = a.store.root
    record_store = Board(d=(9, "training"))
    await catch_up(c.work, record_store, tmp_path / "in", c.journal, 0.0)  # type: ignore[arg-type]
    assert c.work.version == at
    assert at.epoch > d.work.version.epoch
    assert at in (c.work.version, *c.work.checkpoints())
    assert c.events("fetch-older")
    assert record_store.looks == 1


async def test_donors_that_fail_are_tried_again_and_then_it_listens(
    rig: Any, tmp_path: Path
) -> None:
    (c,) = await rig.add("c")
    record_store = Board(nobody=(3, "training"))
    incoming = tmp_path / "in"
    incoming.mkdir()
    (incoming / f"{'a' * 64}.tensor").write_bytes(b"old")
    await catch_up(c.work, record_store, incoming, c.journal, 0.0)  # type: ignore[arg-type]
    assert len(c.events("fetch-failed")) == record_store.looks == 5
    assert c.work.version.epoch == 0
    assert not incoming.exists(), "pieces of nothing are not kept for ever"


async def test_alone_there_is_nothing_to_fetch(rig: Any, tmp_path: Path) -> None:
    (c,) = await rig.add("c")
    await catch_up(c.work, Board(), tmp_path / "in", c.journal, 0.0)  # type: ignore[arg-type]
    assert not c.events("fetch-failed")
