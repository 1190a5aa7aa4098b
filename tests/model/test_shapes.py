import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import UsageFault
from node.model.export import config_of
from node.model.settings import ModelSettings
from node.model.shapes import (
    SHAPES,
    all_shapes,
    check_settings,
    count,
    layer_cut,
    layers_of,
    layers_said,
    parameter_shapes,
    shape_named,
)

PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
}
"""Number of parameters, as the models' cards count them."""


@given(st.integers(1, 40), st.data())
def test_cut_is_contiguous_even_and_complete(layers, data):
    first = data.draw(st.integers(0, layers - 1))
    stages = data.draw(st.integers(1, layers - first))
    settings = ModelSettings(layers=layers, ends_layers=first)
    cut = layer_cut(settings, stages)
    held = [layers_of(settings, stages, stage) for stage in range(stages + 1)]
    assert held == [range(first), *cut]
    assert [i for r in held for i in r] == list(range(layers))
    sizes = [len(r) for r in cut]
    assert len(cut) == stages
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_match_those_of_transformers(name):
    settings = ModelSettings(**shape_named(name))
    config = transformers.AutoConfig.for_model(**config_of(settings))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert {n: tuple(p.shape) for n, p in theirs.named_parameters()} == all_shapes(settings)
    assert count(all_shapes(settings)) == PUBLISHED[name]


def test_an_unknown_shape_names_those_there_are():
    with pytest.raises(UsageFault, match="llama-9") as caught:
        shape_named("llama-9")
    assert "qwen3-0.6b" in caught.value.next_step


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 130},
        {"d_model": 4},
        {"heads": 4, "kv_heads": 3},
        {"head_width": 31},
        {"rope_low": 4.0},
        {"qk_norm": True, "qkv_bias": True},
        {"layers": 6, "ends_layers": 6},
    ],
)
def test_impossible_shapes_are_refused_with_a_next_step(change):
    with pytest.raises(UsageFault) as caught:
        check_settings(replace(ModelSettings(), **change))
    assert caught.value.what.startswith("model.")
    assert caught.value.next_step


@pytest.mark.parametrize(("stages", "stage"), [(0, 0), (7, 1), (3, 4), (3, -1)])
def test_stages_that_do_not_exist_are_refused(stages, stage):
    with pytest.raises(UsageFault):
        parameter_shapes(ModelSettings(), stages, stage)


def test_layers_of_the_ends_are_not_shared_by_block_stages():
    settings = ModelSettings(layers=6, ends_layers=2)
    with pytest.raises(UsageFault, match="4 layers cannot be cut into 5 stages"):
        layer_cut(settings, 5)
    said = [layers_said(settings, 3, stage) for stage in range(4)]
    assert said == ["embedding, 0-1, head", "2-3", "4-4", "5-5"]
    assert layers_said(ModelSettings(), 3, 0) == "embedding, head"


def test_shapes_need_no_torch():
    code = (
        "import sys, node.model.shapes, node.model.cost; sys.exit('torch' in sys.modules or "
        "'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
