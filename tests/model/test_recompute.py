"""What is computed again for a backward instead of kept: the same gradients, a smaller stash."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lab.visits import visit
from node.model.cost import RECOMPUTE, graph_bytes, stash_bytes
from node.model.settings import ModelSettings
from node.model.stages import build
from node.pipeline.visit_buffers import StageMath

SMALL = ModelSettings(layers=3, d_model=32, d_ff=48, seq_len=16, qk_norm=True)
SHAPE = (2, 16, 32)


def test_gradients_are_the_same_to_the_bit() -> None:
    x, dy = torch.randn(SHAPE), torch.randn(SHAPE)
    found = {}
    for mode in RECOMPUTE:
        math = StageMath(build(SMALL, 1, 1), "fp32", recompute=mode)
        found[mode] = [visit(math, x, dy) for _ in range(2)][1]
        tables = 2 * 4 * 16 * 8 if mode == "off" else 0  # of the rotary embedding, kept once
        kept = 0 if mode == "stage" else stash_bytes(SMALL, 1, 1, 2, mode) - x.nbytes
        assert math.graph_bytes[SHAPE] == kept + tables
    output, upstream, share = found["off"]
    for mode in ("layers", "stage"):
        assert found[mode][:2] == (output, upstream)
        assert found[mode][2].keys() == share.keys()
        assert all(torch.equal(found[mode][2][name], share[name]) for name in share)


@pytest.mark.parametrize("mode", RECOMPUTE)
def test_nothing_of_a_micro_batch_is_left_behind(mode: str) -> None:
    math = StageMath(build(SMALL, 1, 1), "fp32", recompute=mode)
    x = torch.randn(SHAPE)
    first, second = visit(math, x, x), visit(math, x, x)
    assert first[1] == second[1]
    assert all(p.grad is None for p in math.module.parameters())


def test_what_is_kept_is_the_input_of_the_stage_or_of_every_layer() -> None:
    entry = 4 * 2 * 16 * 32
    assert stash_bytes(SMALL, 1, 1, 2, "stage") == entry
    assert stash_bytes(SMALL, 1, 1, 2, "layers") == 3 * entry + entry  # and the output
    assert stash_bytes(SMALL, 1, 1, 2) == 3 * graph_bytes(SMALL, 32) + entry
