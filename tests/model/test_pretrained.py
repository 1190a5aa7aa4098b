"""A directory as transformers writes it is the same model here, or is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from node.app.assembly import _weights
from node.config import NodeConfig
from node.core.errors import Refused, UsageFault
from node.manifest import Manifest, amended
from node.model.export import config_of
from node.model.pretrained import SEQ_LEN, Weights, model_of
from node.model.settings import DIGEST, ModelSettings
from node.model.stages import build
from testbed.models.directories import KINDS, made
from testbed.reference.unsplit import Unsplit


def settings_of(directory: Path) -> ModelSettings:
    return ModelSettings(**model_of(directory)[0])


def changed(directory: Path, **values: Any) -> Path:
    file = directory / "config.json"
    config = {**json.loads(file.read_bytes()), **values}
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def llama(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_transformers(kind: str, numbers: torch.dtype, tmp_path: Path) -> None:
    """Logits of one document, and of three that are packed into one sequence."""
    there = made(kind, tmp_path)
    if numbers is torch.bfloat16:
        model = transformers.AutoModelForCausalLM.from_pretrained(there).to(numbers)
        for file in there.glob("*.safetensors*"):
            file.unlink()
        model.save_pretrained(there)  # one file
    settings = settings_of(there)
    weights = Weights(there)
    weights.check(settings)
    model = Unsplit(settings)
    parts = [weights.stage(settings, 2, stage) for stage in range(3)]
    model.load_state_dict({name: t for part in parts for name, t in part.items()})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    tokens = torch.arange(64)[None] * 11 % settings.vocab
    with torch.no_grad():
        assert float((model(tokens) - theirs(tokens).logits).abs().max()) < 1e-5
        positions = torch.cat([torch.arange(n) for n in (20, 1, 43)])[None]
        packed = theirs(tokens, position_ids=positions, use_cache=False).logits
        assert float((model.logits(tokens, (19, 20)) - packed).abs().max()) < 1e-5
        assert float((model(tokens) - packed).abs().max()) > 1e-3


def test_a_single_file_counts_before_a_list_of_files(llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    shards = {file: file.read_bytes() for file in llama.glob("*.safetensors*")}
    model.save_pretrained(llama)
    for file, content in shards.items():
        file.write_bytes(content)  # those that transformers has removed
    theirs = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ours = Weights(llama).stage(settings_of(llama), 2, 0)["model.norm.weight"]
    assert torch.equal(ours, theirs.model.norm.weight)
    assert torch.equal(ours, model.model.norm.weight)


def test_the_weights_of_the_ends_have_their_layers(llama: Path) -> None:
    settings = settings_of(llama)
    weights = Weights(llama)
    deep = replace(settings, ends_layers=1)
    ends, block = (weights.stage(deep, 1, stage) for stage in range(2))
    plain = {**weights.stage(settings, 1, 0), **weights.stage(settings, 1, 1)}
    assert {*ends} - {*weights.stage(settings, 1, 0)} == {
        name for name in plain if name.startswith("model.layers.0.")
    }
    assert (ends | block).keys() == plain.keys()
    model = build(deep, 1, 0)
    model.load_state_dict(ends)
    assert all(torch.equal(t, plain[name]) for name, t in model.state_dict().items())


def test_digests_name_the_weights_of_every_stage(llama: Path) -> None:
    settings = settings_of(llama)
    weights = Weights(llama)
    ends, one, two = weights.digests(settings, 2)
    assert len({ends, one, two}) == 3
    assert weights.verified(settings, 2, 1, one).keys() == weights.stage(settings, 2, 1).keys()
    with pytest.raises(Refused, match="others than the run begins from"):
        weights.verified(settings, 2, 1, two)


LONG = {"max_position_embeddings": 1 << 17}


@pytest.mark.parametrize(
    ("values", "length", "most"),
    [
        ({}, 64, 64),
        (LONG, SEQ_LEN, 1 << 17),
        (LONG | {"model_type": "mistral", "sliding_window": 32}, 32, 32),
        (LONG | {"model_type": "mistral", "sliding_window": None}, SEQ_LEN, 1 << 17),
        (LONG | {"model_type": "mistral", "sliding_window": "gone"}, SEQ_LEN, 4096),
        (
            LONG | {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False},
            SEQ_LEN,
            1 << 17,
        ),
    ],
)
def test_sequences_are_as_long_as_the_model_was_made_for(
    llama: Path, values: dict[str, Any], length: int, most: int
) -> None:
    fields, positions = model_of(changed(llama, **values))
    assert (fields["seq_len"], positions) == (length, most)
    for shorter in (ModelSettings(**fields), ModelSettings(**fields | {"seq_len": 16})):
        assert config_of(shorter)["max_position_embeddings"] == most
    assert config_of(ModelSettings(seq_len=16))["max_position_embeddings"] == 16


def test_older_files_say_the_rotary_base_elsewhere(llama: Path) -> None:
    want = settings_of(llama)
    scaling = json.loads((llama / "config.json").read_bytes())["rope_parameters"]
    base = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old = changed(llama, rope_parameters="gone", rope_theta=base, rope_scaling=scaling)
    assert settings_of(old) == want
    assert settings_of(changed(old, rope_scaling=None, rope_theta="gone")) == replace(
        want, rope_theta=10_000.0, rope_factor=1.0, rope_context=8192
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"model_type": ["llama"]}, "the kind"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"partial_rotary_factor": 0.5}, "turns a part"),
        ({"hidden_size": "gone"}, "hidden_size"),
        ({"hidden_size": "32"}, "model.d_model"),
        ({"num_hidden_layers": 3.5}, "model.layers"),
        ({"num_hidden_layers": 5000}, r"model\.layers = 5000  \(in"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "'su'"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "'proportional'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "turns a part"),
        (
            {"layer_types": ["full_attention"], "rope_parameters": {"full_attention": {}}},
            "differs between layers",
        ),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": 3}}, "json"),
        (
            {
                "rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": [1]},
                "original_max_position_embeddings": 1,
            },
            "json",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": [1]}, "config.json"),
        ({"max_position_embeddings": "many"}, "config.json"),
    ],
)
def test_what_would_be_another_model_is_refused(
    llama: Path, values: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageFault, match=says) as fault:
        model_of(changed(llama, **values))
    assert fault.value.next_step


@pytest.mark.parametrize("name", ["typo", "typo" * 75], ids=["short", "too long for a name"])
def test_a_directory_that_is_named_and_not_there_is_refused(tmp_path: Path, name: str) -> None:
    demo = Manifest.default_demo()
    manifest = amended(demo, {"model.weights": [DIGEST + "a" * 64] * (demo.pipeline.stages + 1)})
    assert _weights(NodeConfig(tmp_path), manifest, 1) is None
    named = NodeConfig.load({"home": str(tmp_path), "weights": str(tmp_path / name)}, {})
    with pytest.raises(UsageFault, match="typo"):
        _weights(named, manifest, 1)


def test_files_that_are_none_are_refused(llama: Path) -> None:
    index = llama / "model.safetensors.index.json"
    config = llama / "config.json"
    whole = json.loads(index.read_bytes())
    for raw, says in (
        (b"{", "no JSON"),
        (b"[]", "no object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {"a": "../../etc/passwd"}}', "names a file"),
        (b'{"weight_map": {"a": 3}}', "names a file"),
        (b'{"weight_map": {"a": "a\\u0000b"}}', "names a file"),
        (b'{"weight_map": {"a": "\\ud800"}}', "names a file"),
    ):
        index.write_bytes(raw)
        with pytest.raises(UsageFault, match=says):
            Weights(llama)
    settings = settings_of(llama)
    save_file({"a": torch.zeros(2)}, llama / "model-of-another.safetensors")
    for file in ("model-of-another.safetensors", ".", ""):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(whole["weight_map"], file)}))
        with pytest.raises(UsageFault, match=r"cannot read|names a file"):
            Weights(llama).check(settings)
    config.write_bytes(b"[" * 100_000)
    with pytest.raises(UsageFault, match="no JSON"):
        model_of(llama)
    with pytest.raises(UsageFault, match="cannot read"):
        model_of(llama / "nowhere")
    index.unlink()
    with pytest.raises(UsageFault, match="cannot read the weights"):
        Weights(llama)
    for file in set(whole["weight_map"].values()):
        (llama / file).write_bytes(b"\xff" * 100)
    index.write_text(json.dumps(whole))
    with pytest.raises(UsageFault, match="cannot read the weights"):
        Weights(llama).stage(ModelSettings(layers=3), 2, 1)


def test_tensors_that_do_not_fit_the_model_are_refused(llama: Path) -> None:
    settings = settings_of(llama)
    tensors = dict[str, torch.Tensor]()
    for file in llama.glob("*.safetensors"):
        tensors |= load_file(file)
    (llama / "model.safetensors.index.json").unlink()
    norm = "model.layers.1.input_layernorm.weight"

    def holding(**more: torch.Tensor | None) -> Weights:
        kept = {n: t for n, t in {**tensors, **more}.items() if t is not None}
        save_file(kept, llama / "model.safetensors")
        return Weights(llama)

    for number in (None, torch.ones(31), torch.ones(32, dtype=torch.int64)):
        weights = holding(**{norm: number})
        with pytest.raises(UsageFault, match=norm):
            weights.stage(settings, 1, 1)
        weights.stage(settings, 1, 0)
    with pytest.raises(UsageFault, match=r"1 tensors .* extra"):
        holding(extra=torch.ones(2)).check(settings)
    tied = replace(settings, tied=True)
    with pytest.raises(UsageFault, match=r"lm_head\.weight differs") as fault:
        holding().check(tied)
    assert "set it to false" in fault.value.next_step
    shared = tensors["model.embed_tokens.weight"]
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    same = holding(**table, **{"lm_head.weight": shared.clone()})
    same.check(tied)
    assert "lm_head.weight" not in same.stage(tied, 1, 0)
    with pytest.raises(UsageFault, match=r"no tensor lm_head\.weight") as fault:
        holding(**{"lm_head.weight": None}).check(settings)
    assert '"tie_word_embeddings": true' in fault.value.next_step
    with pytest.raises(UsageFault, match=r"301 ids, and .* has 300 rows") as fault:
        holding().check(replace(settings, vocab=301))
    assert '"vocab_size": 300' in fault.value.next_step


def test_a_git_lfs_pointer_is_called_that(llama: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    shards = sorted(llama.glob("*.safetensors"))
    shards[-1].write_bytes(pointer)
    with pytest.raises(UsageFault, match="is a Git LFS pointer") as fault:
        Weights(llama).digests(settings_of(llama), 1)
    assert "lfs pull" in fault.value.next_step
    (llama / "model.safetensors.index.json").unlink()
    shards[-1].rename(llama / "model.safetensors")
    with pytest.raises(UsageFault, match="is a Git LFS pointer"):
        Weights(llama)
    (llama / "config.json").write_bytes(pointer)
    with pytest.raises(UsageFault, match="is a Git LFS pointer"):
        model_of(llama)
