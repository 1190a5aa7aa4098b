"""Sums of gradients at ranks when an epoch begins anew: two rounds never meet."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.core.errors import DeviceLost
from node.local.ranks import Handle, Ranks
from node.local.stage import CutShare, CutSum

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
