"""Every kind of rotary embedding equals the one of transformers, wherever a config.json puts it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from node.core.errors import UsageFault
from node.manifest import Manifest, amended
from node.model.export import config_of
from node.model.pretrained import model_of
from node.model.rope import KINDS, frequencies, rope_fields
from node.model.settings import ModelSettings
from node.model.shapes import check_settings
from node.model.stages import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def drawn(kind: str, dice: random.Random) -> dict[str, Any]:
    """Settings of one embedding of this kind, some left to their defaults."""
    width = dice.choice([16, 64, 128])
    before = dice.choice([32, 64, 256])
    most = before * dice.choice([1, 4])
    factor = dice.choice([1.5, 4.0, 8])
    pairs = width // 2
    context = {"original_max_position_embeddings": before}
    optional: dict[str, Any] = {
        "yarn": dice.choice(
            [
                {},
                {"attention_factor": 0.7},
                {"mscale": 1.0, "mscale_all_dim": 0.8},
                {"beta_fast": 16, "beta_slow": 2, "truncate": False},
            ]
        ),
        "longrope": dice.choice([{}, {"factor": factor}, {"attention_factor": 1.3}]),
    }.get(kind, {})
    numbers: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {"factor": factor, **context},
        "llama3": {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **context},
        "longrope": {
            "short_factor": [1 + dice.random() for _ in range(pairs)],
            "long_factor": [2 + dice.random() for _ in range(pairs)],
            **context,
        },
    }
    rope = {"rope_type": kind, **numbers[kind], **optional}
    config = {
        "hidden_size": 4 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width,
        "num_hidden_layers": 3,
        "intermediate_size": 8,
        "vocab_size": 300,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": most,
        "sliding_window": None,
        "architectures": ["LlamaForCausalLM"],
    }
    base = dice.choice([1e4, 5e5])
    place = dice.choice(["parameters", "parameters, base outside", "scaling", "both", "legacy"])
    if place == "parameters":
        return config | {"rope_parameters": rope | {"rope_theta": base}}
    if place == "parameters, base outside":
        return config | {"rope_parameters": rope, "rope_theta": base}
    if place == "both" and kind != "default":
        other = {"rope_type": "default", "rope_theta": 777.0}
        return config | {"rope_parameters": other, "rope_scaling": rope, "rope_theta": base}
    if place == "legacy":
        rope["type"] = rope.pop("rope_type")
    return config | {"rope_scaling": rope, "rope_theta": base}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    # Takes its time to load.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    dice = random.Random(kind)
    for number in range(12):
        config = drawn(kind, dice) | {"model_type": FAMILIES[number % 4]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        fields, most = model_of(tmp_path)
        settings = ModelSettings(**fields)
        check_settings(settings)
        made = amended(Manifest.default_demo(), {f"model.{k}": v for k, v in fields.items()})
        assert Manifest.parse(made.to_toml()) == made
        theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
        written = config_of(settings) | {"model_type": "llama"}
        (tmp_path / "config.json").write_text(json.dumps(written))
        again = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
        ours = Rope(settings)
        lengths = (16, most, 2 * most, 16) if kind in ("dynamic", "longrope") else (16, most)
        for length in lengths:
            cos, sin = ours.tables(length, torch.zeros(1))
            half = sin.shape[-1] // 2
            for library in (theirs, again):
                wanted = library(torch.zeros(1), torch.arange(length)[None])
                torch.testing.assert_close(cos[:, 0], wanted[0][0], rtol=1e-5, atol=2e-4)
                torch.testing.assert_close(
                    sin[:, 0, half:], wanted[1][0][:, half:], rtol=1e-5, atol=2e-4
                )
                close = frequencies(settings, length)
                torch.testing.assert_close(close, library.inv_freq, rtol=1e-6, atol=0)


def test_a_list_of_the_wrong_length_is_named() -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    fields = rope_fields({"rope_scaling": rope}, 64)
    with pytest.raises(UsageFault, match=r"model\.rope_factors has 2 numbers"):
        check_settings(ModelSettings(**fields))
