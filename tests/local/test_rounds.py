"""Sums of gradients at ranks when an epoch begins anew: two rounds never meet. And the loss of a
rank."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from node.core.errors import DeviceLost
from node.local import rank
from node.local.rank import Rank
from node.local.ranks import Handle, Ranks
from node.local.stage import CutShare, CutSum
from node.model.device import Device

NAME = "norm.weight"


class Other:
    """A further rank, as far as its sums go."""

    def __init__(self) -> None:
        self.stdin = self
        self.round = 0
        self.taken: list[int] = []

    def write(self, line: bytes) -> None:
        words: Mapping[str, Any] = json.loads(line)
        if words["do"] == "add":
            self.round = words["round"]
        elif words["round"] == self.round:
            self.taken.append(self.round)
        else:
            raise OSError("it has ended: sums of another round are asked for")

    def flush(self) -> None:
        """All is written."""

    def kill(self) -> None:
        """It has ended."""

    def wait(self, timeout: float = 0.0) -> int:
        return 1


class Scene:
    """The sums of rank 0, and the other rank."""

    def __init__(self, folder: Path) -> None:
        self.lost: list[DeviceLost] = []
        self.ranks = Ranks(folder, self.lost.append)
        self.other: Any = Other()
        self.ranks._processes.append(self.other)
        program: Any = SimpleNamespace()
        self.sums = CutSum(self.ranks, program)

    def add(self, number: float) -> None:
        """Add the share of a micro-batch of one token."""
        share = CutShare({NAME: torch.full((3,), number)}, self.ranks.handle())
        self.sums.offer([share], 1)
        self.sums.drain()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_sums_of_a_round_are_taken_where_they_are(scene: Scene) -> None:
    scene.add(1.0)
    scene.add(2.0)
    sums, tokens = scene.sums.whole()
    assert (list(sums[NAME]), tokens) == ([3.0] * 3, 2)
    assert scene.other.taken == [1]


@pytest.mark.parametrize("added", [False, True])
def test_a_round_that_ends_while_its_sums_are_taken_gives_none(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, added: bool
) -> None:
    """The event loop begins the epoch anew, and the device thread adds the first share of it."""
    scene.add(1.0)
    handle = scene.ranks.handle

    def anew() -> Handle:
        monkeypatch.undo()
        scene.sums.reset()
        if added:
            scene.add(5.0)
        return handle()

    monkeypatch.setattr(scene.ranks, "handle", anew)
    sums, tokens = scene.sums.whole()
    if added:
        assert (dict(sums), tokens) == ({}, 0)
    assert scene.lost == []
    scene.add(7.0)
    sums, tokens = scene.sums.whole()
    assert (list(sums[NAME]), tokens) == ([12.0 if added else 7.0] * 3, 1 + added)


def test_a_command_during_which_a_rank_is_lost_fails(scene: Scene) -> None:
    """A collective that was given up leaves numbers that nobody made."""
    with pytest.raises(DeviceLost, match="gone"), scene.ranks.command("add", round=1):
        scene.ranks._broken("gone")
    assert [fault.what for fault in scene.lost] == ["gone"]


@pytest.mark.parametrize(("backend", "given_up"), [("gloo", 0), ("nccl", 1)])
def test_collectives_that_would_wait_for_a_lost_rank_are_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, backend: str, given_up: int
) -> None:
    calls: list[int] = []
    world = SimpleNamespace(abort=lambda: calls.append(1))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    scene.ranks._broken("gone")
    scene.ranks._broken("gone too")
    assert len(calls) == given_up


def test_ranks_meet_on_loopback_and_end_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(rank, "init_device_mesh", lambda *args: None)
    Rank.meet(0, 2, Device(torch.device("cuda", 0)), tmp_path / "store")
    names = {os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]}
    assert names <= {"lo", "lo0"}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
