"""An export of a model that came in a directory: its files to the byte, adapters, GGUF."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from node.app.export.merging import merge_adapters
from node.core.errors import UsageFault
from node.data.tokenizer import byte_letters
from node.data.tokenizer_files import TokenizerFiles
from node.model.export import trained_shapes
from node.model.files import GGUF
from node.model.pretrained import Weights, model_of
from node.model.settings import ModelSettings
from testbed.models.directories import files_of
from testbed.reference.unsplit import Unsplit
from tests.model.conftest import exported

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TOKENS = torch.arange(24)[None] * 7 % 250
TINY = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 257,
    "eos_token_id": 258,
}


def made(kind: str, there: Path, **more: Any) -> Path:
    """A random model with numbers that f16 holds, a byte-level tokenizer and a chat template."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
        parameter.data = parameter.data.half().float()
    model.generation_config.eos_token_id = [258, 256]
    model.save_pretrained(there)
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_letters())}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(there)
    return there


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("saved") / "llama")


def whole(there: Path, settings: ModelSettings) -> dict[str, torch.Tensor]:
    weights = Weights(there)
    return weights.stage(settings, 1, 0) | weights.stage(settings, 1, 1)


def test_what_goes_in_comes_out(saved: Path, tmp_path: Path) -> None:
    given = files_of(saved)
    settings = ModelSettings(**model_of(saved)[0] | {"seq_len": 16})
    out = exported(tmp_path / "out", settings, whole(saved, settings), given=given)
    before = {p.name: p.read_bytes() for p in saved.iterdir() if p.suffix != ".safetensors"}
    after = {p.name: p.read_bytes() for p in out.iterdir() if p.suffix != ".safetensors"}
    assert json.loads(after.pop("tutti.json"))["tutti"]["notes"] == []
    assert {"tokenizer_config.json", "generation_config.json", "config.json"} <= before.keys()
    assert after == before
    ours = transformers.AutoTokenizer.from_pretrained(out)
    assert ours.chat_template == TEMPLATE
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [258, 256]
    exported(out, settings, whole(saved, settings), given=given)  # an earlier export is replaced


def test_an_export_of_a_model_that_was_an_export_is_replaced(tmp_path: Path) -> None:
    """Its config.json came with the model, and names the card of the export before."""
    settings = ModelSettings(layers=1, head_width=32, positions=128)
    numbers = {name: torch.zeros(shape) for name, shape in trained_shapes(settings).items()}
    first = exported(tmp_path / "first", settings, numbers, card="the first card")
    config = (first / "config.json").read_bytes()
    given = TokenizerFiles({"config.json": config})
    for card in ("the second card", "the third card"):
        out = exported(tmp_path / "next", settings, numbers, given=given, card=card)
    assert (out / "config.json").read_bytes() == config
    assert (out / "README.md").read_text() == "the third card"


@pytest.mark.parametrize(
    "own",
    [
        {"rope_theta": 777.0},
        {"rope_factor": 4.0},
        {"rope_kind": "linear", "rope_factor": 4.0},
        {"rope_kind": "yarn", "rope_factor": 4.0, "rope_high": 32.0, "rope_context": 64},
    ],
)
def test_a_config_of_another_rotary_embedding_says_so(
    saved: Path, tmp_path: Path, own: dict[str, Any]
) -> None:
    settings = replace(ModelSettings(**model_of(saved)[0]), **own)
    out = exported(tmp_path / "out", settings, whole(saved, settings), given=files_of(saved))
    assert own.items() <= asdict(ModelSettings(**model_of(out)[0])).items()
    assert json.loads((out / "config.json").read_bytes())["eos_token_id"] == 258
    [note] = json.loads((out / "tutti.json").read_bytes())["tutti"]["notes"]
    assert all(f"model.{name}" in note for name in own)


def test_a_config_that_changes_says_so(saved: Path, tmp_path: Path) -> None:
    given = files_of(saved)
    settings = ModelSettings(**model_of(saved)[0])
    out = exported(
        tmp_path / "half",
        settings,
        {n: t.bfloat16() for n, t in whole(saved, settings).items()},
        parameters="bf16",
        given=given,
    )
    before = json.loads((saved / "config.json").read_bytes())
    after = json.loads((out / "config.json").read_bytes())
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed == {"dtype"}
    notes = json.loads((out / "tutti.json").read_bytes())["tutti"]["notes"]
    assert notes == ["config.json: dtype is bfloat16, as the tensors are, and was float32"]


def test_adapters_open_by_themselves_and_merge(saved: Path, tmp_path: Path) -> None:
    given = files_of(saved)
    settings = ModelSettings(**model_of(saved)[0], adapter=3, adapter_alpha=6.0)
    lora = Unsplit(settings)
    base = whole(saved, settings)
    ends, blocks = (Weights(saved).stage(settings, 1, stage) for stage in (0, 1))
    lora.load_state_dict(ends, strict=False)
    lora.load_state_dict(blocks, strict=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.normal_(0.0, 0.2)
    adapters = {name: p.data for name, p in lora.named_parameters()}
    out = exported(tmp_path / "out", settings, adapters, given=given, base=str(saved))
    import peft  # takes its time to load

    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(str(out))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == (TEMPLATE, 258)
    merged = merge_adapters(base, adapters, settings)
    again = replace(settings, adapter=0)
    one = exported(tmp_path / "merged", again, merged, given=given)
    plain = transformers.AutoModelForCausalLM.from_pretrained(one)
    with torch.no_grad():
        wanted = lora.logits(TOKENS)
        torch.testing.assert_close(loaded(TOKENS).logits, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(plain(TOKENS).logits, wanted, atol=1e-4, rtol=1e-4)
        first = transformers.AutoModelForCausalLM.from_pretrained(saved)(TOKENS).logits
    assert float((first - wanted).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_gguf_is_read_back_with_equal_logits(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    saved = made(kind, tmp_path / "saved", **more)
    settings = ModelSettings(**model_of(saved)[0])
    given = files_of(saved)
    out = exported(tmp_path / "out", settings, whole(saved, settings), given=given, gguf=True)
    ours = transformers.AutoModelForCausalLM.from_pretrained(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out, gguf_file=GGUF, dtype=torch.float32
    )
    with torch.no_grad():
        logits = ours(TOKENS).logits
        assert logits.std() > 0.1
        torch.testing.assert_close(theirs(TOKENS).logits, logits, atol=1e-4, rtol=1e-4)
    fields = gguf.GGUFReader(out / GGUF).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 258
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens[:256] == byte_letters()
    assert tokens[256:260] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD259]"]
    assert len(tokens) == 264
    assert np.all(np.asarray(fields["tokenizer.ggml.token_type"].contents()[259:]) == 5)


def pieces(normalizer: Any, pre: Any = None) -> bytes:
    """A tokenizer.json of Llama 2's kind, with this normalizer and pre-tokenizer."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {"\u2581": 259, "a": 260, "\u2581a": 261}
    made = Tokenizer(models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre
    return made.to_str().encode()


PREPENDED = normalizers.Prepend("\u2581")
REPLACED = normalizers.Replace(" ", "\u2581")


@pytest.mark.parametrize(
    ("normalizer", "pre", "prefixed"),
    [
        (normalizers.Sequence([PREPENDED, REPLACED]), None, True),
        (normalizers.Sequence([REPLACED]), None, False),
        (REPLACED, None, False),
        (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), True),
        (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False), False),
    ],
)
def test_gguf_says_whether_a_text_begins_with_a_space(
    normalizer: Any, pre: Any, prefixed: bool, saved: Path, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    settings = ModelSettings(**model_of(saved)[0])
    file = pieces(normalizer, pre)
    given = TokenizerFiles({}, file)
    out = exported(tmp_path / "out", settings, whole(saved, settings), given=given, gguf=True)
    fields = gguf.GGUFReader(out / GGUF).fields
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is prefixed
    first = Tokenizer.from_str(file.decode()).encode("a").tokens
    assert first == (["\u2581a"] if prefixed else ["a"])


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (pieces(normalizers.Sequence([normalizers.Lowercase(), REPLACED])), "'Lowercase'"),
        (pieces(REPLACED, pre_tokenizers.Whitespace()), "'Whitespace'"),
        (pieces(None, pre_tokenizers.Metaspace()), "'Metaspace'"),
        (pieces(None), r"changes text: \[\]"),
    ],
)
def test_gguf_refuses_pieces_of_another_text(
    file: bytes, said: str, saved: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    settings = ModelSettings(**model_of(saved)[0])
    given = TokenizerFiles({}, file)
    with pytest.raises(UsageFault, match=said):
        exported(tmp_path / "out", settings, whole(saved, settings), given=given, gguf=True)


def test_gguf_refuses_what_it_cannot_say(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    settings = ModelSettings(**model_of(saved)[0])
    given = files_of(saved)
    for changes, said in (
        ({"rope_kind": "dynamic", "rope_factor": 2.0}, "'dynamic'"),
        ({"rope_kind": "yarn", "rope_factor": 2.0, "rope_scale": 3.0}, "attention factor"),
    ):
        other = replace(settings, **changes)
        with pytest.raises(UsageFault, match=said):
            exported(tmp_path / "out", other, whole(saved, other), given=given, gguf=True)
    qwen = replace(settings, rope_factor=8.0, qk_norm=True)
    zeros = {name: torch.zeros(shape) for name, shape in trained_shapes(qwen).items()}
    with pytest.raises(UsageFault, match="this model is a qwen3"):
        exported(tmp_path / "out", qwen, zeros, given=given, gguf=True)
    body = json.loads(given.tokenizer_json or b"")
    body["model"]["vocab"]["beyond"] = 264
    longer = replace(given, tokenizer_json=json.dumps(body).encode())
    with pytest.raises(UsageFault, match="tokenizer.json cannot be read"):
        exported(tmp_path / "out", settings, whole(saved, settings), given=longer, gguf=True)
    body = json.loads(given.tokenizer_json or b"")
    body["model"]["merges"] = [["a", "b"]]
    body["pre_tokenizer"] = {"type": "Whitespace"}
    strange = replace(given, tokenizer_json=json.dumps(body).encode())
    with pytest.raises(UsageFault, match="splits text"):
        exported(tmp_path / "out", settings, whole(saved, settings), given=strange, gguf=True)
    body = json.loads(given.tokenizer_json or b"")
    body["normalizer"] = {"type": "Lowercase"}
    lower = replace(given, tokenizer_json=json.dumps(body).encode())
    with pytest.raises(UsageFault, match="changes text: .'Lowercase'"):
        exported(tmp_path / "out", settings, whole(saved, settings), given=lower, gguf=True)
    body["normalizer"] = {"type": "NFC"}
    body["pre_tokenizer"]["add_prefix_space"] = True
    spaced = replace(given, tokenizer_json=json.dumps(body).encode())
    with pytest.raises(UsageFault, match="puts a space before a text"):
        exported(tmp_path / "out", settings, whole(saved, settings), given=spaced, gguf=True)
    large = whole(saved, settings) | {"lm_head.weight": torch.full((264, 32), 1e6)}
    with pytest.raises(UsageFault, match="f16 cannot hold"):
        exported(tmp_path / "out", settings, large, given=given, gguf=True)
    assert not (tmp_path / "out").exists()
