"""How much of a device a stage may take: what is there, what is free, what is left to others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from node.app.assembly import split_between
from node.app.capacity import check_memory, room_on, shares
from node.config import NodeConfig
from node.core.errors import OutOfResources, UsageFault
from node.manifest import Manifest

GIB = 1 << 30
DEMO = Manifest.default_demo()


@dataclass
class Card:
    free: int
    total: int = 24 * GIB
    is_cuda: bool = True

    def memory_free(self) -> int:
        return self.free

    def memory_limit(self) -> int:
        return self.total


def config(home: Path, **flags: str) -> NodeConfig:
    return NodeConfig.load({"home": home, **flags}, {})


def test_a_gpu_gives_what_is_free_at_the_start(tmp_path: Path) -> None:
    ours = config(tmp_path, memory="100%")
    assert room_on(ours, [Card(20 * GIB)]).limit == 20 * GIB
    assert room_on(ours, [Card(20 * GIB)]).said == "20.0 GiB of 24.0 GiB were free"
    assert room_on(ours, [Card(14 * GIB)], held=6 * GIB).limit == 20 * GIB, "its own is free"
    assert room_on(config(tmp_path, memory="8GiB"), [Card(20 * GIB)]).limit == 8 * GIB


def test_a_reserve_is_left_to_others(tmp_path: Path) -> None:
    ours = config(tmp_path, memory="100%", reserve="2GiB")
    assert room_on(ours, [Card(20 * GIB)]).limit == 18 * GIB
    assert room_on(ours, [Card(20 * GIB)]).said.endswith("and 2.0 GiB are reserved for others")
    assert room_on(ours, [Card(GIB)]).limit == 0
    cpu = room_on(ours, [Card(GIB, is_cuda=False)])
    assert (cpu.limit, cpu.said) == (22 * GIB, "2.0 GiB are reserved for others")
    with pytest.raises(UsageFault, match="reserve = "):
        config(tmp_path, reserve="10%")


def test_several_devices_give_as_much_as_the_fullest(tmp_path: Path) -> None:
    ours = config(tmp_path, memory="100%", reserve="1GiB")
    assert room_on(ours, [Card(20 * GIB), Card(11 * GIB)]).limit == 2 * 10 * GIB


def test_a_refusal_says_what_was_free(tmp_path: Path) -> None:
    ours = config(tmp_path, reserve="20GiB")
    room = room_on(ours, [Card(20 * GIB + 9)])
    verdict = check_memory(ours, DEMO, 1, room.limit, said=room.said)
    with pytest.raises(
        OutOfResources, match=r"20.0 GiB of 24.0 GiB were free and 20.0 GiB are res"
    ):
        verdict.require()


def test_stages_on_one_card_share_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = config(tmp_path)
    assert split_between(config(tmp_path, device="cpu"), DEMO) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 4 * GIB))
    split = {stage: int(said[:-1]) for stage, said in split_between(ours, DEMO).items()}
    assert split == shares(ours, DEMO, GIB)
    assert GIB - 4 <= sum(split.values()) <= GIB
    assert sum(shares(ours, DEMO, GIB // 100).values()) <= GIB // 100
    for stage, size in split.items():
        alone = config(tmp_path, memory=f"{size}B")
        assert check_memory(alone, DEMO, stage, alone.memory_limit(4 * GIB)).ok
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert split_between(ours, DEMO) == {}, "each picks a card"
    assert split_between(config(tmp_path, device="cuda:0"), DEMO).keys() == split.keys()
