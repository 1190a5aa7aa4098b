"""What outer rounds keep in memory: counted before a stage is loaded, and never less than what is
there afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.app.capacity import check_memory
from node.averaging.strategies.outer import OuterSettings
from node.config import NodeConfig
from node.core.errors import OutOfResources
from node.manifest import Manifest
from node.training.rounds.memory import OuterBytes, outer_bytes
from tests.training.conftest import SHAPES, Peer, Rig
from tests.training.test_outer_rounds import four, inner, meeting

SIZES = {name: 4 * math.prod(shape) for name, shape in SHAPES.items()}
STAGE = sum(SIZES.values())
CONFIGS = Path(__file__).parents[2] / "configs"
DILOCO = OuterSettings("butterfly", "deltas", 4, "nesterov")


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def kept(p: Peer) -> tuple[int, int]:
    """Bytes of (anchor and momentum, with those that a roll-back would bring back; what is
    owed)."""
    states = [s for s in (p.work.anchor.state, p.work.anchor._before) if s is not None]
    residual = p.work.anchor.residual
    debts = (*residual.words.values(), *residual.means.values(), *residual.late.values())
    return nbytes(
        t for s in states for side in (s.anchor, s.momentum) for t in side.values()
    ), nbytes(debts)


async def test_what_a_peer_keeps_is_what_was_counted(rig: Rig) -> None:
    rig.outer = settings = replace(DILOCO, every=1, codec="top-k", feedback=True)
    counted = outer_bytes(settings, SIZES, 2)
    cells = await four(rig)
    (a, b), (c, d) = cells
    plan = None
    for _ in range(3):
        plan = await rig.epoch(inner(rig, cells, plan), a, b, c, d)
        assert kept(a)[0] == counted.anchor
        plan = meeting(rig, cells, plan)
        await rig.epoch(plan, a, b, c, d)
        assert kept(a)[0] == counted.anchor + counted.undone, (
            "the state before the round stays until nobody can undo it"
        )
    assert [kept(p)[1] <= counted.residual for p in (a, b, c, d)] == [True] * 4
    assert max(kept(p)[1] for p in (a, b, c, d)) > STAGE, (
        "who has spoken owes a stage, and more of the parts it averages"
    )


def test_every_setting_that_keeps_something_is_counted() -> None:
    assert outer_bytes(OuterSettings("gossip", "parameters", 1), SIZES, 8) == OuterBytes()
    assert outer_bytes(OuterSettings(), SIZES, 8) == OuterBytes()
    plain = outer_bytes(DILOCO, SIZES, 8)
    assert plain == OuterBytes(anchor=2 * STAGE, undone=2 * STAGE)
    assert plain.main == 4 * STAGE
    assert outer_bytes(replace(DILOCO, codec="int8", feedback=True), SIZES, 8).residual == 2 * STAGE
    assert outer_bytes(replace(DILOCO, quorum=2), SIZES, 8).residual == STAGE
    streams = outer_bytes(replace(DILOCO, fragments=2, overlap=1), SIZES, 8)
    assert STAGE / 2 <= streams.sent == streams.device < STAGE
    assert outer_bytes(replace(DILOCO, fragments=2), SIZES, 8) == plain, (
        "nothing of it is kept while epochs run"
    )
    hogwild = OuterSettings("hogwild", "deltas", 2, "sgd", momentum=0.0)
    assert outer_bytes(hogwild, SIZES, 8).served == 9 * STAGE
    assert outer_bytes(replace(hogwild, shards=2), SIZES, 8).served == 9 * STAGE // 2
    assert outer_bytes(replace(hogwild, shards=100), SIZES, 8).served == 9 * max(SIZES.values()), (
        "a part is served whole"
    )


@pytest.mark.parametrize("name", ["diloco-top-k", "hogwild", "diloco-streaming"])
def test_a_stage_without_memory_for_anchors_is_refused_early(name: str, tmp_path: Path) -> None:
    config, manifest = NodeConfig(tmp_path), Manifest.parse((CONFIGS / f"{name}.toml").read_bytes())
    plain = replace(manifest, outer=OuterSettings())
    ample = 1 << 40
    whole, without = (check_memory(config, m, 1, ample) for m in (manifest, plain))
    tight = int(without.needed / 0.9) + 1
    assert check_memory(config, plain, 1, tight).ok
    refused = check_memory(config, manifest, 1, tight)
    assert "rounds between cells" in refused.text
    with pytest.raises(OutOfResources):
        refused.require()
    assert check_memory(config, manifest, 1, int(whole.needed / 0.9) + 1).ok
    assert whole.spare == without.spare - (whole.needed - without.needed), (
        "the leader hears of what is left for optimizer state"
    )


def test_anchors_of_a_device_with_own_memory_use_main_memory(tmp_path: Path) -> None:
    config, manifest = NodeConfig(tmp_path), Manifest.parse((CONFIGS / "diloco.toml").read_bytes())
    plain, ample = replace(manifest, outer=OuterSettings()), 1 << 40
    main = (
        check_memory(config, manifest, 1, ample).needed
        - check_memory(config, plain, 1, ample).needed
    )
    assert main > 0
    beside = check_memory(config, manifest, 1, ample, ample)
    assert beside.needed == check_memory(config, plain, 1, ample).needed, (
        "nothing of it is on the device"
    )
    assert check_memory(config, manifest, 1, ample, int(main / 0.9) + 1).ok
    short = check_memory(config, manifest, 1, ample, main)
    assert "main memory" in short.text
    with pytest.raises(OutOfResources) as caught:
        short.require()
    assert "a machine" in caught.value.next_step
    assert not check_memory(config, manifest, 1, 1 << 10, ample).ok, (
        "the device's own counts as before"
    )
