import errno
import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors import safe_open

from benchmarks.reference.unsplit import Unsplit
from node.core.errors import OutOfResources, Refused, UsageFault
from node.model import export
from node.model.export import write_hf
from node.model.settings import ModelSettings
from node.model.stages import build

SMALL = ModelSettings(
    layers=3, d_model=32, heads=4, kv_heads=2, d_ff=48, vocab=259, seq_len=16, init_std=0.1
)
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "added_tokens": [
            {
                "id": i,
                "content": w,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, w in ((256, "<|bos|>"), (257, "<|eos|>"), (258, "<|pad|>"))
        ],
        "model": {
            "type": "WordLevel",
            "vocab": {"a": 0, "<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258},
            "unk_token": "a",
        },
    }
).encode()


def merged(settings, stages=2):
    every = [build(settings, stages, stage).state_dict() for stage in range(stages + 1)]
    return {name: tensor for part in every for name, tensor in part.items()}


KINDS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama 3": ("LlamaForCausalLM", {"rope_factor": 8.0, "rope_context": 16}),
    "wide heads": ("LlamaForCausalLM", {"head_width": 24}),
    "qwen 2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen 3": ("Qwen3ForCausalLM", {"qk_norm": True, "head_width": 48}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it_with_equal_logits(tmp_path, kind, tied):
    name, changes = KINDS[kind]
    settings = replace(SMALL, tied=tied, rope_theta=777.0, norm_eps=1e-6, **changes)
    ours = Unsplit(settings)
    for parameter in ours.parameters():
        if parameter.dim() == 1:  # away from what it begins with, so that one left out would show
            parameter.data.uniform_(0.5, 1.5)
    tensors = ours.ends.state_dict() | ours.blocks.state_dict()
    where = write_hf(tmp_path / "out", settings, tensors, TOKENIZER)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        where, output_loading_info=True
    )
    assert type(theirs).__name__ == name
    assert not any(info.values()), info
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 259, (2, 16))
    with torch.no_grad():
        logits = ours.logits(tokens)
        assert logits.std() > 0.1
        torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert theirs.generation_config.eos_token_id == 257
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        256,
        257,
        258,
    )


def test_the_export_carries_the_torch_format_and_no_extra_files(tmp_path):
    where = write_hf(tmp_path / "a" / "out", SMALL, merged(SMALL))
    with safe_open(where / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(merged(SMALL))
    assert sorted(p.name for p in where.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [p.name for p in where.parent.iterdir()] == ["out"]


def test_an_earlier_export_is_replaced_and_strangers_are_not(tmp_path):
    where = tmp_path / "out"
    where.mkdir()
    write_hf(where, SMALL, merged(SMALL), TOKENIZER)
    other = replace(SMALL, init_seed=2)
    write_hf(where, other, merged(other))
    assert not (where / "tokenizer.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

    for name, content in (
        ("config.json", '{"model_type": "llama"}'),
        ("config.json", "[]"),
        ("notes.txt", "mine"),
    ):
        stranger = tmp_path / f"stranger-{len(list(tmp_path.iterdir()))}"
        stranger.mkdir()
        (stranger / name).write_text(content)
        with pytest.raises(Refused):
            write_hf(stranger, SMALL, merged(SMALL))
        assert (stranger / name).read_text() == content
    with pytest.raises(Refused):
        write_hf(stranger / "notes.txt", SMALL, merged(SMALL))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lm_head.weight": None}, "1 tensors missing"),
        ({"x": torch.zeros(1)}, "1 unknown"),
        ({"lm_head.weight": torch.zeros(1, 2)}, "shape"),
    ],
)
def test_half_a_model_is_refused(tmp_path, changes, why):
    tensors = {n: t for n, t in (merged(SMALL) | changes).items() if t is not None}
    with pytest.raises(UsageFault, match=why):
        write_hf(tmp_path / "out", SMALL, tensors)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_looked_at_is_named(tmp_path):
    with pytest.raises(UsageFault, match="File name too long"):
        write_hf(tmp_path / ("x" * 300), SMALL, merged(SMALL))


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_TENSORS = export.SafetensorError(
    "Error while serializing: I/O error: No space left on device (os error 28)"
)


@pytest.mark.parametrize(
    ("where", "fault"), [("_json", NO_SPACE), ("sync", NO_SPACE), ("save_file", NO_TENSORS)]
)
def test_a_full_disk_leaves_the_old_export(tmp_path, monkeypatch, where, fault):
    out = write_hf(tmp_path / "out", SMALL, merged(SMALL))
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(export, where, Mock(side_effect=fault))
    other = replace(SMALL, init_seed=9)
    with pytest.raises(OutOfResources):
        write_hf(out, other, merged(other))
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_when_the_new_cannot_take_its_place_the_old_comes_back(tmp_path, monkeypatch):
    out = write_hf(tmp_path / "out", SMALL, merged(SMALL))
    before, real = (out / "model.safetensors").read_bytes(), export.Path.rename

    def once_refused(self, target):
        if (
            (self / "model.safetensors").exists()
            and target == out
            and not self.name.endswith(".old")
        ):
            raise OSError(errno.EIO, "input/output error")
        return real(self, target)

    monkeypatch.setattr(export.Path, "rename", once_refused)
    with pytest.raises(UsageFault):
        write_hf(out, SMALL, merged(SMALL))
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageFault, match="tokenizer"):
        write_hf(tmp_path / "out", SMALL, merged(SMALL), b"[]")
    assert list(tmp_path.iterdir()) == []
