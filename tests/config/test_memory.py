"""Memory of a device that a stage may take: total, free, and left to others."""

import asyncio
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from node.app import daemon
from node.app.assembly import split_between
from node.app.capacity import (
    KERNELS,
    LOGIT_BYTES,
    LOGITS_MOST,
    MainMemory,
    check_memory,
    logits_at_once,
    main_memory,
    room_on,
    share_places,
    shared_row,
    shares,
    stash_limit,
    text_limit,
    text_row,
)
from node.app.daemon import Daemon
from node.config import NodeConfig
from node.coordinator.presence import Presence
from node.core.errors import OutOfResources
from node.manifest import Manifest, amended
from node.model import device as devices
from node.model.cost import LOGITS_AT_ONCE, LOGITS_LEAST, Verdict
from node.model.device import CONTEXT
from node.model.shapes import count, parameter_shapes
from node.telemetry import resources
from node.transport.shared.region import MOST, SUPPORTED
from tests.config.conftest import MIXED, WIDE

GIB = 1 << 30
LARGE = {
    "model.layers": 24,
    "model.d_model": 2048,
    "model.d_ff": 8192,
    "model.heads": 16,
    "model.kv_heads": 16,
    "pipeline.stages": 1,
    "pipeline.micro_batch": 1,
    "training.min_replicas": 1,
    "optimizer.name": "adamw",
}
DEMO = Manifest.default_demo()


@dataclass
class Card:
    free: int
    total: int = 24 * GIB
    is_cuda: bool = True
    context: int = CONTEXT

    def memory_free(self) -> int:
        return self.free

    def memory_limit(self) -> int:
        return self.total


def config(home: Path, **flags: str) -> NodeConfig:
    return NodeConfig.load({"home": home, **flags}, {})


ALL = {"memory": "100%"}
SPARED = {**ALL, "reserve": "2GiB"}
FREE = "20.0 GiB of 24.0 GiB were free"
KEPT = "2.0 GiB are reserved for others"


@pytest.mark.parametrize(
    ("flags", "cards", "held", "limit", "said"),
    [
        pytest.param(ALL, [Card(20 * GIB)], 0, 20 * GIB, FREE, id="what is free at the start"),
        pytest.param(ALL, [Card(14 * GIB)], 6 * GIB, 20 * GIB, FREE, id="its own is free"),
        pytest.param(
            {"memory": "8GiB"}, [Card(20 * GIB)], 0, 8 * GIB, FREE, id="as much as is set"
        ),
        pytest.param(
            SPARED,
            [Card(20 * GIB)],
            0,
            18 * GIB,
            f"{FREE} and {KEPT}",
            id="a reserve is left to others",
        ),
        pytest.param(
            SPARED,
            [Card(GIB)],
            0,
            0,
            f"1.0 GiB of 24.0 GiB were free and {KEPT}",
            id="nothing but the reserve",
        ),
        pytest.param(SPARED, [Card(GIB, is_cuda=False)], 0, 22 * GIB, KEPT, id="a CPU"),
        pytest.param(
            {**ALL, "reserve": "1GiB"},
            [Card(20 * GIB), Card(11 * GIB)],
            0,
            2 * 10 * GIB,
            "11.0 GiB of 24.0 GiB were free and 1.0 GiB are reserved for others",
            id="several give as much as the fullest",
        ),
    ],
)
def test_a_device_gives_what_is_free_and_not_reserved(
    tmp_path: Path, flags, cards, held: int, limit: int, said: str
) -> None:
    assert room_on(config(tmp_path, **flags), cards, held) == (limit, said)


def test_main_memory_is_what_other_daemons_and_the_process_leave(tmp_path: Path) -> None:
    """A share is a share of the memory that others leave, and a process takes its part too."""
    cpu = [Card(0, total=10 * GIB, is_cuda=False, context=0)]
    taken = MainMemory(others=4 * GIB, process=GIB)
    limit, said = room_on(config(tmp_path, memory="50%"), cpu, taken=taken)
    assert limit == 3 * GIB
    assert said == "4.0 GiB of 10.0 GiB are other daemons' of this machine"
    assert room_on(config(tmp_path, **ALL), cpu, taken=taken)[0] == 5 * GIB
    assert room_on(config(tmp_path, **ALL), cpu, taken=taken, processes=4)[0] == 2 * GIB
    assert room_on(config(tmp_path), cpu, taken=MainMemory(others=11 * GIB))[0] == 0


def test_daemons_of_a_solo_start_share_main_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of five daemons on a machine of 4 GiB counted all of it."""
    monkeypatch.setattr(resources, "memory_total", lambda: 4 * GIB)
    ours = config(tmp_path, device="cpu")
    taken = MainMemory(process=GIB // 2, libraries=GIB // 8)
    split = parts(split_between(ours, DEMO, taken))
    processes = DEMO.pipeline.stages + 1
    room = 4 * GIB - taken.libraries - processes * (taken.process - taken.libraries)
    assert room - processes <= sum(split.values()) <= room
    for stage, size in split.items():
        assert check_memory(config(tmp_path, memory=f"{size}B"), DEMO, stage, size).ok


def test_an_older_gpu_is_planned_for_both_of_its_formats(tmp_path: Path) -> None:
    """One that had measured fp32 to be faster was planned for 16 bits."""
    ours = config(tmp_path)
    m = amended(DEMO, {"pipeline.micro_batch": 64})
    newer, older, cpu = (
        check_memory(ours, m, 1, 64 * GIB, beside, older=older)
        for beside, older in ((1 << 60, False), (1 << 60, True), (0, False))
    )
    assert older.needed > newer.needed
    assert older.needed >= cpu.needed
    assert stash_limit(ours, m, 1, replace(older, available=0), gpu=True) > stash_limit(
        ours, m, 1, replace(newer, available=0), gpu=True
    )
    every = shares(ours, m, GIB, gpu=True, older=True)
    assert every != shares(ours, m, GIB, gpu=True)


def test_main_memory_beside_a_gpu_holds_new_parameters_and_a_checkpoint(tmp_path: Path) -> None:
    """A stage of 6 GiB on a card was pledged as nothing, and ended a machine of 8 GiB."""
    m = amended(DEMO, LARGE)
    ours = config(tmp_path)
    bytes_of_parameters = 4 * count(parameter_shapes(m.model, 1, 1))
    ample = check_memory(ours, m, 1, 60 * GIB, 1 << 60)
    pledged = main_memory(m, 1, ample, gpu=True)
    # A round makes new ones; a checkpoint has them, and AdamW's two numbers for each.
    assert pledged >= 4 * bytes_of_parameters
    assert ample.ok
    short = check_memory(ours, m, 1, 60 * GIB, 8 * GIB)
    assert not short.ok
    assert "main memory" in short.text


@pytest.mark.parametrize("units", [True, False])
def test_a_run_in_two_formats_is_planned_for_the_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: bool
) -> None:
    """The faster format is measured after the stage is built."""
    monkeypatch.setattr("node.app.capacity.bf16_units", lambda: units)
    mixed = amended(DEMO, MIXED)
    for few_tokens in ({}, WIDE):
        plain, both = (
            check_memory(config(tmp_path), amended(m, few_tokens), 1, 64 * GIB).needed
            for m in (DEMO, mixed)
        )
        assert (both > plain) == (units and bool(few_tokens)), (
            "copies of parameters, or activations"
        )
        assert both >= plain


def test_a_refusal_says_what_was_free(tmp_path: Path) -> None:
    ours = config(tmp_path, reserve="20GiB")
    limit, said = room_on(ours, [Card(20 * GIB + 9)])
    with pytest.raises(
        OutOfResources, match=r"20.0 GiB of 24.0 GiB were free and 20.0 GiB are res"
    ):
        check_memory(ours, DEMO, 1, limit, said=said).require()


def test_stages_on_one_card_share_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = config(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    split = parts(split_between(ours, DEMO))
    given = 3 * GIB - DEMO.pipeline.stages * CONTEXT
    assert split == shares(ours, DEMO, given, gpu=True)
    assert given - 4 <= sum(split.values()) <= given, "each other daemon has a context"
    assert sum(shares(ours, DEMO, GIB // 100, gpu=True).values()) <= GIB // 100
    for stage, size in split.items():
        alone = config(tmp_path, memory=f"{size}B")
        assert check_memory(alone, DEMO, stage, alone.memory_limit(4 * GIB), 8 * GIB).ok
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parts(split_between(config(tmp_path, device="cuda:0"), DEMO)).keys() == split.keys()


def parts(split: dict[int, dict[str, str]]) -> dict[int, int]:
    """Bytes of each stage."""
    assert all(settings.keys() == {"memory"} for settings in split.values())
    return {stage: int(settings["memory"][:-1]) for stage, settings in split.items()}


def test_stages_of_a_solo_start_are_dealt_to_the_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them chose the emptiest card, because none was there yet when they looked."""
    free = {0: 3 * GIB, 1: 5 * GIB, 2: 4 * GIB, 3: CONTEXT}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(devices, "_entered", set())
    monkeypatch.setattr(devices, "driver_memory", lambda card: (free[card], 8 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: pytest.fail("a context"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    m = amended(DEMO, {"pipeline.stages": 3})
    ours = config(tmp_path, **ALL)
    split = split_between(ours, m)
    assert [split[s]["device"] for s in range(4)] == ["cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert [s for s in split if "memory" in split[s]] == [0, 3], "the others are alone"
    shared = shares(ours, m, 5 * GIB - CONTEXT, (0, 3), gpu=True)
    assert {s: f"{size}B" for s, size in shared.items()} == {s: split[s]["memory"] for s in (0, 3)}


@pytest.mark.parametrize(
    ("free", "dealt"),
    [
        pytest.param((20, 2), [(0, True), (0, True), (0, True)], id="all on the one with room"),
        pytest.param((20, 20), [(0, True), (1, False), (0, True)], id="equal ones in turns"),
        pytest.param((2, 20, 20), [(1, True), (2, False), (1, True)], id="without the fullest"),
        pytest.param((5, 2), [(0, True), (1, False), (0, True)], id="all where nothing is enough"),
    ],
)
def test_a_card_too_full_for_its_stage_is_dealt_to_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: tuple[int, ...],
    dealt: list[tuple[int, bool]],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(devices, "_entered", set())
    monkeypatch.setattr(devices, "driver_memory", lambda card: (free[card] * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    m = amended(DEMO, {**LARGE, "model.layers": 6, "pipeline.stages": 2})
    ours = config(tmp_path, **ALL)
    assert check_memory(ours, m, 1, 2 * GIB, 64 * GIB).needed > 2 * GIB
    split = split_between(ours, m)
    found = [(split[stage]["device"], "memory" in split[stage]) for stage in range(3)]
    assert found == [(f"cuda:{card}", shared) for card, shared in dealt]
    if dealt[1] == dealt[2]:
        assert sum(int(settings["memory"][:-1]) for settings in split.values()) <= 20 * GIB
        for stage, settings in split.items():
            size = int(settings["memory"][:-1])
            assert check_memory(ours, m, stage, size, 64 * GIB).ok


@dataclass
class Built:
    device: Card
    parameter_bytes: int = GIB
    memory: Verdict = field(default_factory=lambda: Verdict(True, 3 * GIB, 8 * GIB, ""))
    memory_limit: int = 8 * GIB


@pytest.mark.parametrize("gpu", [True, False], ids=["on a GPU", "in main memory"])
def test_the_pledge_of_a_built_stage_has_the_whole_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """Parameters on a GPU are no part of the process, and those in main memory are the stage's."""
    built = Built(Card(8 * GIB, is_cuda=gpu))
    pledged: list[int] = []

    async def done(*arguments: object, **more: object) -> Built:
        return built

    def pledge(size: int) -> None:
        pledged.append(size)
        raise InterruptedError

    monkeypatch.setattr(daemon, "assemble", done)
    monkeypatch.setattr(daemon, "resident", lambda pid: 2 * GIB)
    monkeypatch.setattr(daemon, "of_files", lambda pid: 0)
    me = SimpleNamespace(
        _first_work=done,
        memory_beside=lambda: (0, 0),
        config=config(tmp_path),
        pledges=SimpleNamespace(pledge=pledge),
        **dict.fromkeys(("identity", "transport", "clock", "journal", "metrics")),
        **dict.fromkeys(("_failed", "_does")),
    )
    with pytest.raises(InterruptedError):
        asyncio.run(Daemon._host(cast(Daemon, me), cast(Presence, None), DEMO, 1, False))
    whole = 2 * GIB
    if not gpu:
        whole -= built.parameter_bytes
    assert pledged == [whole + KERNELS + main_memory(DEMO, 1, built.memory, gpu)]


def test_children_of_a_solo_start_get_their_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[tuple[str, ...]] = []

    def child(label: str, home: Path, arguments: tuple[str, ...], **more: object) -> object:
        words.append(arguments)
        return SimpleNamespace(label=label, start=lambda: None)

    monkeypatch.setattr(daemon, "Child", child)
    me = SimpleNamespace(
        transport=SimpleNamespace(near="127.0.0.1", ports=(1,)),
        identity=SimpleNamespace(peer_id="x"),
        config=config(tmp_path),
        name="anna",
        _child_home=lambda stage: tmp_path / str(stage),
        _loading={},
        children=[],
        stage_tasks=SimpleNamespace(spawn=lambda *a, **k: None),
        _mind=lambda child, stage: None,
    )
    split = {1: {"device": "cuda:1"}, 2: {"device": "cuda:0", "memory": "9B"}}
    Daemon._host_the_rest(cast(Daemon, me), amended(DEMO, {"pipeline.stages": 2}), split)
    assert "device=cuda:1" in words[0]
    assert {"device=cuda:0", "memory=9B"} <= set(words[1])


def test_where_copies_of_weights_do_not_fit_a_stage_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with units for bf16 can do what the same machine without them can."""
    m = amended(DEMO, WIDE | MIXED)
    ours = config(tmp_path)

    def least(units: bool) -> int:
        monkeypatch.setattr("node.app.capacity.bf16_units", lambda: units)
        ok = [size << 20 for size in range(8, 1000) if check_memory(ours, m, 1, size << 20).ok]
        return ok[0]

    plain = least(False)
    assert least(True) == plain
    assert not check_memory(ours, m, 1, plain).casts
    assert check_memory(ours, m, 1, 64 * GIB).casts
    for size in range(plain, 2 * plain, 1 << 20):
        found = check_memory(ours, m, 1, size)
        if not found.casts:
            monkeypatch.setattr("node.app.capacity.bf16_units", lambda: False)
            assert found.recompute == check_memory(ours, m, 1, size).recompute, (
                "no more than it needs"
            )
            monkeypatch.setattr("node.app.capacity.bf16_units", lambda: True)


def test_memory_is_planned_for_no_more_micro_batches_than_an_epoch_has(tmp_path: Path) -> None:
    def planned(sequences: int, under_way: int) -> int:
        training = {"training.target_batch": sequences, "pipeline.micro_batch": 4}
        ours = config(tmp_path, **{"limits.in_flight": str(under_way)})
        return check_memory(ours, amended(DEMO, training), 1, 64 * GIB).needed

    assert planned(8, 8) == planned(8, 2) == planned(8, 100)
    assert planned(8, 1) < planned(8, 2) < planned(64, 8) < planned(64, 16) == planned(64, 17)


def test_shares_have_the_planned_places_and_more_where_there_is_memory(tmp_path: Path) -> None:
    config_ = config(tmp_path)
    stage = DEMO.pipeline.stages
    window = config_.limits.in_flight
    parameters = check_memory(config_, DEMO, stage, 0).table[0].nbytes

    def places(spare: int) -> tuple[int, int]:
        """Return the places, and the bytes of the stash, of a peer with `spare` bytes beyond the
        plan and shared memory."""
        needed = check_memory(config_, DEMO, stage, 64 * GIB).needed + shared_row(config_).nbytes
        verdict = check_memory(config_, DEMO, stage, math.ceil((needed + spare) / 0.9))
        found = share_places(config_, DEMO, stage, verdict)
        return found, stash_limit(config_, DEMO, stage, verdict)

    tight, stash = places(0)
    assert 1 + 5 * stage // 6 <= tight - 1 <= 2 + 5 * stage // 6, "those that are under way"
    assert places(GIB - stash) == (tight, GIB), "the stash comes first"
    few, _ = places(GIB - stash + 2 * parameters + 1000)
    assert few == tight + 2
    assert places(32 * GIB) == (tight + window, GIB), "a window more"


@pytest.mark.skipif(not SUPPORTED, reason="no memory is shared on this system")
def test_memory_shared_with_other_daemons_is_in_the_plan(tmp_path: Path) -> None:
    ours = config(tmp_path)
    alone = config(tmp_path, **{"transport.shared_memory": "off"})
    assert shared_row(ours).nbytes == MOST
    assert shared_row(alone).nbytes == 0
    needed = check_memory(ours, DEMO, 1, 64 * GIB).needed
    verdict = check_memory(ours, DEMO, 1, math.ceil((needed + GIB // 2) / 0.9))
    stash = stash_limit(alone, DEMO, 1, verdict)
    assert stash_limit(ours, DEMO, 1, verdict) == stash - MOST
    on_card = [stash_limit(c, DEMO, 1, verdict, gpu=True) for c in (ours, alone)]
    assert on_card[0] == on_card[1], "it is not on the card"


def test_ends_that_train_nothing_have_places_and_texts(tmp_path: Path) -> None:
    ours = config(tmp_path)
    adapters = amended(DEMO, {"model.adapter": 4})
    verdict = check_memory(ours, adapters, 0, 64 * GIB)
    assert share_places(ours, adapters, 0, verdict) > ours.limits.in_flight
    assert text_limit(ours, adapters, 0, verdict) == GIB


def test_pieces_of_the_loss_are_larger_where_a_gpu_has_memory_left(tmp_path: Path) -> None:
    ours = config(tmp_path)
    most = 64 * GIB

    def found(spare: int, stage: int = 0, gpu: bool = True) -> int:
        """Logits that a peer with `spare` bytes beyond the plan computes at once."""
        needed = check_memory(ours, DEMO, stage, most, most).needed
        verdict = check_memory(ours, DEMO, stage, math.ceil((needed + spare) / 0.9), most)
        return logits_at_once(ours, DEMO, stage, verdict, gpu)

    assert found(0) == LOGITS_AT_ONCE
    assert found(64 * GIB, stage=1) == found(64 * GIB, gpu=False) == LOGITS_AT_ONCE
    assert LOGITS_AT_ONCE < found(4 * GIB) < LOGITS_MOST
    assert LOGIT_BYTES * found(4 * GIB) < GIB, "a quarter of what the stash leaves"
    assert found(64 * GIB) == LOGITS_MOST


def test_pieces_of_the_loss_are_smaller_where_memory_is_short(tmp_path: Path) -> None:
    ours = config(tmp_path)
    wide = amended(DEMO, {"model.vocab": 100_000, "model.seq_len": 2048})
    ample = check_memory(ours, wide, 0, 64 * GIB)
    assert ample.logits == LOGITS_AT_ONCE
    scarce = check_memory(ours, wide, 0, ample.needed)
    assert scarce.ok
    assert scarce.logits == LOGITS_LEAST
    assert ample.needed - scarce.needed == 12 * (LOGITS_AT_ONCE - LOGITS_LEAST)
    assert logits_at_once(ours, wide, 0, scarce) == LOGITS_LEAST
    block = check_memory(ours, wide, 1, check_memory(ours, wide, 1, 64 * GIB).needed)
    assert block.logits == LOGITS_AT_ONCE, "a block stage has no head"


def test_keys_and_values_of_texts_have_the_memory_that_is_left(tmp_path: Path) -> None:
    ours = config(tmp_path)
    stage = 1
    needed = check_memory(ours, DEMO, stage, 64 * GIB).needed + shared_row(ours).nbytes

    def verdict(spare: int) -> Verdict:
        return check_memory(ours, DEMO, stage, math.ceil((needed + spare) / 0.9))

    def texts(spare: int, ours: NodeConfig = ours) -> int:
        """Bytes for texts of a peer with `spare` bytes beyond the plan and shared memory."""
        return text_limit(ours, DEMO, stage, verdict(spare))

    assert texts(0) == texts(-needed // 2) == 1, "room for none"
    assert text_row(texts(0)).nbytes == 0, "no row"
    assert text_row(texts(32 * GIB)).nbytes == GIB
    beside = 3 * GIB // 2 - texts(3 * GIB // 2)
    stash = GIB - stash_limit(ours, DEMO, stage, verdict(0))
    assert stash < beside < stash + GIB // 8, "the stash and the shares come first"
    assert texts(beside + 1000) == pytest.approx(1000, abs=8)
    assert texts(32 * GIB) == GIB
    asked = config(tmp_path, **{"limits.text_bytes": 5000})
    assert texts(0, asked) == texts(32 * GIB, asked) == 5000
