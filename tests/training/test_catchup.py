"""State that a peer puts in place before it takes part."""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.app.catchup import DONORS, LOOKS, TRIES, WITHOUT_LEADER, catch_up, donors_of, keep_base
from node.checkpoint.service import StateService
from node.core.ids import PeerId
from node.core.journey import Version
from node.wire.tensors import digest
from protos import state_pb2


class Board:
    """A directory: the epoch and the state of each peer."""

    def __init__(self, **records: tuple[int, str]) -> None:
        self.records = records
        self.looks = 0
        self.view = self
        self.me = "me"
        self.leaders = frozenset[str]()

    @property
    def everybody(self) -> dict[str, Any]:
        return {p: SimpleNamespace(body=SimpleNamespace(stage=1)) for p in self.records}

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
    a, _, _ = await rig.trained("ab", 4, every=1)
    two, three = a.work.local_checkpoints.versions()[-2:]
    spoilt = a.store.path(1, three.epoch) / "parameters.safetensors"
    raw = bytearray(spoilt.read_bytes())
    raw[-1] ^= 1
    spoilt.write_bytes(raw)
    (c,) = await rig.add("c", every=1)
    c.store.root = a.store.root
    assert three in c.work.local_checkpoints.versions(), (
        "its manifest is whole, and nobody has read the rest"
    )
    await catch_up(c.work, Board(), tmp_path / "in", c.journal, 0.0)  # type: ignore[arg-type]
    assert c.work.stage.version == two
    assert len(c.events("restore-failed")) == 1
    assert [e.fields["epoch"] for e in c.events("restored")] == [two.epoch]
    assert three not in c.work.local_checkpoints.versions(), (
        "no leader is told that it could go there"
    )
    (ignored,) = c.events("checkpoint-ignored")
    assert f"epoch-{three.epoch}" in ignored.text
    assert any(f"epoch-{three.epoch}: " in said for said in c.work.local_checkpoints.troubles())


async def test_a_peer_that_goes_back_has_its_newest_checkpoint_where_it_wrote_last(
    rig: Any, tmp_path: Path
) -> None:
    a, _, _ = await rig.trained("ab", 4, every=1)
    saved = a.work.local_checkpoints
    before, newest = saved.versions()[-2:]
    assert saved.newest == newest
    (c,) = await rig.add("c", every=1)
    c.store.root = a.store.root
    assert c.work.local_checkpoints.newest is None, "it has written none"
    await c.work.restore(before)
    context = saved.recall(before)
    assert context is not None
    snapshot = c.work._snapshot(before, context)
    assert await c.work.local_checkpoints.keep([snapshot], 20.0)
    assert c.work.local_checkpoints.newest == before
    assert newest in c.work.local_checkpoints.versions(), "the disk has the later one still"


@pytest.mark.parametrize("begins", ["", "ab" * 32], ids=["drawn", "pretrained"])
async def test_what_the_swarm_has_is_newer(rig: Any, tmp_path: Path, begins: str) -> None:
    """Once the swarm trains, no joiner asks for the parameters that the run begins from."""
    a, _, _ = await rig.trained("ab", 3)
    (c,) = await rig.add("c")
    c.work.stage.empty = bool(begins)
    board = Board(a=(3, "training"), b=(3, "ready"), old=(1, "training"), leaving=(9, "draining"))
    await catch_up(c.work, board, tmp_path / "in", c.journal, 0.0, begins)  # type: ignore[arg-type]
    assert (c.work.stage.version, c.work.stage.empty) == (a.work.stage.version, False)
    assert not c.events("fetch-failed")


@pytest.mark.parametrize(
    ("own", "lost"),
    [
        ({}, True),
        ({"dead": (3, "training")}, True),
        ({"a": (3, "training")}, False),
    ],
)
async def test_a_stage_that_its_cell_has_lost_comes_from_another_cell(
    rig: Any, tmp_path: Path, own: dict[str, tuple[int, str]], lost: bool
) -> None:
    """Also while the directory still shows a peer that died, and where the first sample of the
    cells shows none."""
    a, _, _ = await rig.trained("ab", 3)
    (c,) = await rig.add("c")
    asked: list[int] = []

    async def elsewhere(looks: int) -> dict[str, Any]:
        asked.append(looks)
        if not looks and not own:
            return {}
        return Board(a=(3, "training"), b=(3, "ready")).replicas(1)

    incoming = tmp_path / "in"
    how: Any = {"given": "", "elsewhere": elsewhere}
    await catch_up(c.work, Board(**own), incoming, c.journal, 0.0, **how)  # type: ignore[arg-type]
    assert c.work.stage.version == a.work.stage.version
    assert bool(asked) == lost
    assert bool(c.events("from-another-cell")) == lost


@pytest.mark.parametrize("seen_after", [1, LOOKS + 2])
async def test_a_stage_that_nobody_has_is_looked_for_until_somebody_does(
    rig: Any, tmp_path: Path, seen_after: int
) -> None:
    """Also where the peer that was found cannot be reached."""
    a, _, _ = await rig.trained("ab", 3)
    (c,) = await rig.add("c")
    asked: list[int] = []

    async def elsewhere(looks: int) -> dict[str, Any]:
        asked.append(looks)
        if looks < seen_after:
            return {}
        if looks < seen_after + TRIES + 1:
            return Board(dead=(3, "training")).replicas(1)
        return Board(a=(3, "training")).replicas(1)

    board: Any = Board()
    how: Any = {"given": "", "elsewhere": elsewhere}
    await catch_up(c.work, board, tmp_path / "in", c.journal, 0.0, **how)
    assert asked == list(range(seen_after + TRIES + 2))
    assert c.work.stage.version == a.work.stage.version
    assert c.events("looks-elsewhere")


async def test_a_peer_of_a_run_that_nobody_has_trained_does_not_look_elsewhere(
    rig: Any, tmp_path: Path
) -> None:
    (c,) = await rig.add("c")

    async def elsewhere(looks: int) -> None:
        assert not looks

    board: Any = Board()
    how: Any = {"given": "", "elsewhere": elsewhere}
    await catch_up(c.work, board, tmp_path / "in", c.journal, 0.0, **how)
    assert not c.work.stage.version.epoch


@pytest.mark.parametrize("holds", [True, False])
async def test_the_own_cell_is_read_before_a_stage_counts_as_lost(
    rig: Any, tmp_path: Path, holds: bool
) -> None:
    """A peer that has just entered its cell has not seen anybody in it yet."""
    a, _, _ = await rig.trained("ab", 3)
    (c,) = await rig.add("c")
    board = Board()

    async def elsewhere(looks: int) -> dict[str, Any]:
        if holds:
            board.records = {"a": (3, "training")}
        return Board(b=(3, "training")).replicas(1)

    how: Any = {"given": "", "elsewhere": elsewhere}
    await catch_up(c.work, board, tmp_path / "in", c.journal, 0.0, **how)  # type: ignore[arg-type]
    assert c.work.stage.version == a.work.stage.version
    assert bool(c.events("from-another-cell")) != holds


async def test_a_checkpoint_is_kept_over_older_parameters_of_donors(
    rig: Any, tmp_path: Path
) -> None:
    a, _, _ = await rig.trained("ab", 3, every=1)
    at = a.work.local_checkpoints.versions()[-1]
    c, d = await rig.add("c", "d", every=1)
    c.store.root = a.store.root
    record_store = Board(d=(9, "training"))
    await catch_up(c.work, record_store, tmp_path / "in", c.journal, 0.0)  # type: ignore[arg-type]
    assert c.work.stage.version == at
    assert at.epoch > d.work.stage.version.epoch
    assert c.events("fetch-older")
    assert record_store.looks == 1


async def test_donors_that_fail_are_tried_again_and_then_it_listens(
    rig: Any, tmp_path: Path
) -> None:
    (c,) = await rig.add("c")
    record_store = Board(nobody=(3, "training"))
    incoming = tmp_path / "in"
    await catch_up(c.work, Board(), incoming, c.journal, 0.0)  # type: ignore[arg-type]
    assert not c.events("fetch-failed"), "alone there is nothing to fetch"
    incoming.mkdir()
    (incoming / f"{'a' * 64}.tensor").write_bytes(b"old")
    await catch_up(c.work, record_store, incoming, c.journal, 0.0)  # type: ignore[arg-type]
    assert len(c.events("fetch-failed")) == TRIES
    assert c.work.stage.version.epoch == 0
    assert not incoming.exists(), "pieces of nothing are not kept for ever"


class Counts(StateService):
    """Service that counts the requests for each tensor."""

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[state_pb2.StateChunk, None]:
        self.asked[request.name] += 1
        async for chunk in super().pieces(request, peer):
            yield chunk

    asked = Counter[str]()


async def test_a_disk_that_fills_up_costs_no_piece_that_has_come(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counts.asked.clear()
    a, _ = await rig.trained("a", 3, service=Counts)
    (c,) = await rig.add("c")
    incoming = tmp_path / "in"
    kept = list[bytes]()
    write = Path.write_bytes

    def fills_up(path: Path, content: Any) -> int:
        if path.suffix == ".piece" and kept:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if path.suffix == ".piece":
            kept.append(bytes(content))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", fills_up)
    c.store.settings = replace(c.store.settings, fetch_parallel=1)
    board: Any = Board(a=(3, "training"))
    await catch_up(c.work, board, incoming, c.journal, 0.0)
    assert c.work.stage.version == a.work.stage.version
    (said,) = c.events("fetch-failed")
    assert "no room to keep fetched state" in said.text
    assert Counts.asked == dict.fromkeys(rig.shapes, 1), "nothing comes twice"
    assert not incoming.exists(), "and what had been written leaves the full disk"


async def test_pieces_of_a_stage_that_is_not_hosted_any_more_are_removed(
    rig: Any, tmp_path: Path
) -> None:
    """A daemon may be killed while it fetches one stage, and then take another one."""
    (c,) = await rig.add("c")
    before = tmp_path / "incoming" / "stage-3"
    before.mkdir(parents=True)
    (before / f"{'a' * 64}.piece").write_bytes(b"old")
    (before / "version").write_text("3 ")
    somebodys = tmp_path / "incoming" / "stage-4" / "notes.txt"
    somebodys.parent.mkdir()
    somebodys.write_text("mine")
    board: Any = Board()
    await catch_up(c.work, board, tmp_path / "incoming" / "stage-2", c.journal, 0.0)
    assert not before.exists()
    assert somebodys.exists()


async def test_what_the_run_begins_from_is_waited_for(rig: Any, tmp_path: Path) -> None:
    a, b, c = await rig.add("a", "b", "c")
    given = a.work.stage.digest
    board = Board(b=(0, "training"))
    for empty in (b, c):
        empty.work.stage.adopt({n: t + 1 for n, t in empty.parameters().items()}, Version(0))
        empty.work.stage.empty = True
    task = asyncio.create_task(
        catch_up(c.work, board, tmp_path / "in", c.journal, 0.01, given)  # type: ignore[arg-type]
    )
    while not c.events("weights-awaited"):  # noqa: ASYNC110 - said after some tries
        await asyncio.sleep(0.01)
    assert not c.transport.faults, "b has none either, and does not pretend to"
    board.records["a"] = (0, "training")
    await task
    assert (c.work.stage.digest, c.work.stage.empty) == (given, False)
    assert not c.events("fetch-failed")


async def test_a_late_joiner_of_adapters_fetches_the_weights_too(rig: Any, tmp_path: Path) -> None:
    a, _, _ = await rig.trained("ab", 3)
    (c,) = await rig.add("c")
    base = {"w": torch.arange(6.0), "v": torch.ones(2, 2)}
    a.work.stage.frozen = base
    c.work.stage.frozen = {n: t * 0 for n, t in base.items()}
    c.work.stage.empty = True
    board = Board(a=(3, "training"))
    keep = tmp_path / "base"
    given = digest(base)
    await catch_up(c.work, board, None, c.journal, 0.0, given)  # type: ignore[arg-type]
    await keep_base(c.work, keep, c.journal)
    assert (c.work.stage.version, c.work.stage.empty) == (a.work.stage.version, False)
    assert digest(c.work.stage.frozen) == digest(load_file(keep / "model.safetensors")) == given


def test_a_crowd_asks_many_peers_and_the_leader_last() -> None:
    def asked(board: Any, held: dict[str, int]) -> list[str]:
        return list(donors_of(board, held, 7))  # type: ignore[arg-type]

    board = Board(leader=(7, "training"), one=(7, "training"), old=(5, "training"))
    board.leaders = frozenset({"leader"})
    held = {p: epoch for p, (epoch, _) in board.records.items()}
    assert set(asked(board, held)) == {"leader", "one"}, "its word is one of two"
    for i in range(WITHOUT_LEADER):
        board.records[f"peer-{i}"] = (7 - i % 2, "ready")
    held = {p: epoch for p, (epoch, _) in board.records.items()}
    assert set(asked(board, held)) == {"one", *(f"peer-{i}" for i in range(WITHOUT_LEADER))}
    held |= {f"more-{i}": 7 for i in range(40)}
    asks = dict[str, int]()
    for joiner in range(60):
        board.me = f"joiner-{joiner}"
        chosen = asked(board, held)
        assert len(set(chosen)) == DONORS
        assert "leader" not in chosen
        asks |= {p: asks.get(p, 0) + 1 for p in chosen}
    assert len(asks) == 40 + 1 + WITHOUT_LEADER
    assert max(asks.values()) < 40
