"""A model as one GGUF file in f16, as llama.cpp and the programs built on it read it.

Enters: the settings of a Llama, Mistral, Qwen2 or Qwen3 decoder, its safetensors files, the files
of its tokenizer. Leaves: the file. Never: a tokenizer or a rotary embedding that llama.cpp would
compute otherwise; those are refused by name. Needs the package ``gguf``.

Matrices are stored in f16, vectors in fp32. llama.cpp rotates neighbouring channels of a Llama's
heads, Hugging Face channels half a head apart: rows of its queries and keys are put in that order.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from node.core.errors import UsageFault
from node.core.version import extra_command
from node.model.extras import Extras
from node.model.files import TOKENIZER
from node.model.rope import frequencies
from node.model.settings import ModelSettings
from node.model.shapes import EMBEDDING, FINAL_NORM, HEAD, head_dim

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""GGUF's name of each tensor of a layer."""
_TOP = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    HEAD: "output.weight",
}
_FACTORS = "rope_freqs.weight"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _CONTRACTIONS + _WORDS % r"\p{N}{1,3}": "llama-bpe",
    _CONTRACTIONS + _WORDS % r"\p{N}": "qwen2",
}
"""Patterns by which byte-level tokenizers split text, and llama.cpp's name of each."""
_SPACE = "\u2581"
"""Character that stands for a space in the pieces of a tokenizer of Llama 2's kind."""
_PREPENDED = {"type": "Prepend", "prepend": _SPACE}
_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
"""Its two normalizers: a space before the text, the character for every space."""
_LARGEST = 65504.0
"""Largest number of f16."""
_OTHER = (
    "export without  --gguf  and convert the directory with llama.cpp's convert_hf_to_gguf.py, "
    "which knows more tokenizers"
)


def check_library() -> None:
    """Raise UsageFault if the package ``gguf`` is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as e:
        raise UsageFault(f"--gguf needs the package gguf: {e}", extra_command("gguf")) from e


def gguf_bytes(shape: Sequence[int]) -> int:
    """Bytes of a tensor of this shape in the file."""
    return math.prod(shape) * np.dtype(_number_type(shape)).itemsize


def check_gguf(settings: ModelSettings, extras: Extras) -> None:
    """Raise UsageFault as :func:`write_gguf` does, but for the numbers."""
    _begun(None, settings, extras)


def write_gguf(path: Path, settings: ModelSettings, files: Sequence[Path], extras: Extras) -> int:
    """Write the model with the tensors in the safetensors ``files``. Returns the file's bytes.
    Tensors are read one at a time. Blocks on the disk.

    Raises UsageFault without the package, for numbers that f16 cannot hold, and for a tokenizer or
    a rotary embedding that llama.cpp does not have; OSError where the disk fails.
    """
    writer = _begun(path, settings, extras)
    try:
        for name, tensor in _tensors(settings, files):
            shape = tuple(tensor.shape)
            kind = np.dtype(_number_type(shape))
            writer.add_tensor_info(name, shape, kind, gguf_bytes(shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(settings, files):
            writer.write_tensor_data(_numbers(name, tensor))
    finally:
        writer.close()
    return path.stat().st_size


def _begun(path: Path | None, settings: ModelSettings, extras: Extras) -> Any:
    """A writer that has all but the tensors. No file is opened yet."""
    check_library()
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture(settings))
    _describe(writer, settings)
    if TOKENIZER in extras.files:
        _tokenizer(writer, settings, extras)
    return writer


def architecture(settings: ModelSettings) -> str:
    """Name of the architecture in GGUF."""
    if settings.qk_norm:
        return "qwen3"
    if settings.qkv_bias:
        return "qwen2"
    return "llama"


def _tensors(settings: ModelSettings, files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """GGUF's name and the content of every tensor, always in the same order."""
    if settings.rope_kind == "llama3" and settings.rope_factor != 1.0:
        plain = ModelSettings(
            d_model=settings.d_model,
            heads=settings.heads,
            head_width=settings.head_width,
            rope_theta=settings.rope_theta,
        )
        yield _FACTORS, frequencies(plain) / frequencies(settings)
    turned = architecture(settings) == "llama"
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name)
                if turned and name.endswith("q_proj.weight"):
                    tensor = _neighbouring(tensor, settings.heads)
                if turned and name.endswith("k_proj.weight"):
                    tensor = _neighbouring(tensor, settings.kv_heads)
                yield _named(name), tensor


def _named(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[rest]}"


def _number_type(shape: Sequence[int]) -> type[np.floating[Any]]:
    return np.float16 if len(shape) > 1 else np.float32


def _neighbouring(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of queries or keys: channels i and i + W/2 of each head lie side by side."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _numbers(name: str, tensor: Tensor) -> np.ndarray:
    if tensor.dim() < 2:
        return tensor.float().contiguous().numpy()
    wide = tensor.float()
    if float(wide.abs().max()) > _LARGEST:
        raise UsageFault(
            f"{name} has numbers beyond {_LARGEST:.0f}, which f16 cannot hold",
            "export without  --gguf",
        )
    return wide.to(torch.float16).contiguous().numpy()


def _describe(writer: Any, s: ModelSettings) -> None:
    from gguf import LlamaFileType, RopeScalingType

    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_block_count(s.layers)
    writer.add_context_length(max(s.seq_len, s.positions))
    writer.add_embedding_length(s.d_model)
    writer.add_feed_forward_length(s.d_ff)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(head_dim(s))
    writer.add_value_length(head_dim(s))
    writer.add_layer_norm_rms_eps(s.norm_eps)
    writer.add_vocab_size(s.vocab)
    writer.add_rope_dimension_count(head_dim(s))
    writer.add_rope_freq_base(s.rope_theta)
    if s.rope_kind in ("dynamic", "longrope"):
        raise UsageFault(
            f"GGUF has no rotary embedding of the kind {s.rope_kind!r} for this model",
            "export without  --gguf",
        )
    if s.rope_kind == "llama3" and s.rope_factor != 1.0 and architecture(s) != "llama":
        raise UsageFault(
            f"llama.cpp reads factors of single frequencies (rope_kind llama3) in Llamas only, and "
            f"this model is a {architecture(s)}",
            "export without  --gguf",
        )
    if s.rope_kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(s.rope_factor)
    if s.rope_kind == "yarn":
        usual = 1.0
        if s.rope_factor > 1.0:
            usual = 0.1 * math.log(s.rope_factor) + 1.0
        if not s.rope_whole or abs(s.rope_scale - usual) > 1e-6:
            raise UsageFault(
                "GGUF cannot say this YaRN: its attention factor, or truncate = false",
                "export without  --gguf",
            )
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(s.rope_factor)
        writer.add_rope_scaling_orig_ctx_len(s.rope_context)
        writer.add_rope_scaling_yarn_beta_fast(s.rope_high)
        writer.add_rope_scaling_yarn_beta_slow(s.rope_low)


# ------------------------------------------------------------ the tokenizer


def _tokenizer(writer: Any, settings: ModelSettings, extras: Extras) -> None:
    """Add tokens, merges, special ids and the chat template."""
    try:
        _add_tokenizer(writer, settings, extras, json.loads(extras.files[TOKENIZER]))
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise UsageFault(f"the tokenizer.json cannot be read: {e!r}", _OTHER) from e


def _add_tokenizer(
    writer: Any, settings: ModelSettings, extras: Extras, body: Mapping[str, Any]
) -> None:
    from gguf import TokenType

    model = body["model"]
    pieces = model.get("byte_fallback", False)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or ()]
    kind = model.get("type")
    if kind != "BPE":
        raise UsageFault(f"--gguf writes tokenizers of the kind BPE, this one is {kind}", _OTHER)
    tokens = [f"[PAD{i}]" for i in range(settings.vocab)]
    types = [int(TokenType.UNUSED)] * settings.vocab
    for word, i in model["vocab"].items():
        tokens[i] = word
        types[i] = int(TokenType.NORMAL)
        if pieces and len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            types[i] = int(TokenType.BYTE)
    for token in body.get("added_tokens") or ():
        special = token.get("special", False)
        tokens[token["id"]] = token["content"]
        types[token["id"]] = int(TokenType.USER_DEFINED)
        if special:
            types[token["id"]] = int(TokenType.CONTROL)
    ids = {word: i for i, word in enumerate(tokens)}
    unknown = model.get("unk_token") or extras.words.get("unk_token")
    if pieces:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_prefixes_space(body))
        # Pieces that were merged earlier have smaller ids, and are preferred.
        writer.add_token_scores([-float(i) for i in range(settings.vocab)])
        if unknown in ids:
            types[ids[unknown]] = int(TokenType.UNKNOWN)
    else:
        changes = _normalizers(body)
        # Qwen2 composes characters, and llama.cpp reads its text as it is.
        if changes not in ([], [{"type": "NFC"}]):
            raise _changes_text(changes)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(body.get("pre_tokenizer"), merges))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges and not pieces:
        writer.add_token_merges(merges)
    _add_roles(writer, extras, ids, unknown)
    writer.add_add_bos_token(_adds_bos(body, extras))
    if extras.template is not None:
        writer.add_chat_template(extras.template)


def _add_roles(writer: Any, extras: Extras, ids: Mapping[str, int], unknown: str | None) -> None:
    first_end = next(iter(extras.eos), None)
    end = ids.get(extras.words.get("eos_token", ""), first_end)
    for add, found in (
        (writer.add_bos_token_id, extras.bos),
        (writer.add_eos_token_id, end),
        (writer.add_pad_token_id, extras.pad),
        (writer.add_unk_token_id, ids.get(unknown or "")),
    ):
        if found is not None:
            add(found)


def _prefixes_space(body: Mapping[str, Any]) -> bool:
    """Return True if a tokenizer of Llama 2's kind puts a space before a text. Raises UsageFault
    for one that changes or splits text otherwise than llama.cpp does."""
    steps = _normalizers(body)
    pre = body.get("pre_tokenizer") or {}
    if not pre and steps in ([_PREPENDED, _REPLACED], [_REPLACED]):
        return _PREPENDED in steps
    plain = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    scheme = pre.get("prepend_scheme")
    if not steps and plain.items() <= pre.items() and scheme in ("first", "always", "never"):
        return scheme != "never"
    raise _changes_text([*steps, pre])


def _normalizers(body: Mapping[str, Any]) -> list[Any]:
    normalizer = body.get("normalizer")
    if not normalizer:
        return []
    return list(normalizer.get("normalizers", [normalizer]))


def _changes_text(steps: Sequence[Any]) -> UsageFault:
    kinds = [step.get("type") for step in steps if step]
    return UsageFault(f"--gguf does not know how this tokenizer changes text: {kinds}", _OTHER)


def _split(pre: Any, merges: Sequence[str]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits text before it merges bytes."""
    steps = []
    if isinstance(pre, dict):
        steps = pre.get("pretokenizers", [pre])
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        raise UsageFault(
            "--gguf writes no byte-level tokenizer that puts a space before a text", _OTHER
        )
    by_words = True
    if steps:
        by_words = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and (by_words or not merges):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and by_words and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not by_words:
        pattern = steps[0].get("pattern", {}).get("Regex")
        if pattern in _SPLITS and steps[0].get("behavior") == "Isolated":
            return _SPLITS[pattern]
    raise UsageFault(f"--gguf does not know how this tokenizer splits text: {kinds}", _OTHER)


def _adds_bos(body: Mapping[str, Any], extras: Extras) -> bool:
    """Return True if the tokenizer puts its first token before a text."""
    config = json.loads(extras.files.get("tokenizer_config.json", b"{}"))
    told = config.get("add_bos_token")
    if isinstance(told, bool):
        return told
    post = body.get("post_processor") or {}
    for step in post.get("processors", [post]):
        single = step.get("single") or [{}]
        word = single[0].get("SpecialToken", {}).get("id")
        if word is not None and word == extras.words.get("bos_token"):
            return True
    return False
