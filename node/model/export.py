"""A finished model as a Hugging Face directory, written whole or not at all.

The files are written here, without that library: config.json, model.safetensors,
generation_config.json and, when there is a tokenizer, tokenizer.json and tokenizer_config.json.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from node.core.errors import Refused, UsageFault, refuse, writing
from node.core.home import sync
from node.model.settings import ModelSettings
from node.model.shapes import all_shapes, head_dim, parameter_shapes
from node.wire.tensors import dtype_of

MARK = "tutti"
MARKED = ("config.json", "tutti.json")
"""Key, and the files that may have it, by which a directory is known as an export of this
program."""


def config_of(
    settings: ModelSettings,
    bos: int | None = None,
    eos: int | None = None,
    pad: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """config.json: Qwen3 with q/k norms, Qwen2 with biases, Llama without either. Old and new
    readers each find the rotary base where they look."""
    kind = "qwen3" if settings.qk_norm else "qwen2" if settings.qkv_bias else "llama"
    scaling = {
        "rope_type": "llama3",
        "factor": settings.rope_factor,
        "low_freq_factor": settings.rope_low,
        "high_freq_factor": settings.rope_high,
        "original_max_position_embeddings": settings.rope_context,
    }
    scaled = settings.rope_factor != 1.0
    llama = {"mlp_bias": False, "pretraining_tp": 1}
    qwen = {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": settings.layers,
    }
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": settings.vocab,
        "hidden_size": settings.d_model,
        "intermediate_size": settings.d_ff,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": head_dim(settings),
        "max_position_embeddings": max(settings.seq_len, settings.positions),
        "hidden_act": "silu",
        "rms_norm_eps": settings.norm_eps,
        "rope_theta": settings.rope_theta,
        "rope_parameters": {
            **(scaling if scaled else {"rope_type": "default"}),
            "rope_theta": settings.rope_theta,
        },
        "rope_scaling": scaling if scaled else None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": settings.tied,
        "initializer_range": settings.init_std,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        MARK: {"format": 1},
        **(llama if kind == "llama" else qwen),
    }


def write_hf(
    directory: Path,
    settings: ModelSettings,
    tensors: Mapping[str, Tensor],
    tokenizer_json: bytes | None = None,
    parameters: str = "fp32",
) -> Path:
    """Write the whole model (the union of the stages' tensors) to ``directory``, in the number
    format ``parameters``; returns it.

    Replaces an earlier export by renaming: a reader finds the old one, the new one or, for an
    instant, none; never half. Raises UsageFault when tensors are missing, unknown or of another
    shape; Refused when ``directory`` holds something that is not an export of this program;
    OutOfResources when the disk is full, leaving what was there.
    """
    _check(all_shapes(settings), tensors)
    return _write(
        directory,
        lambda staged: _fill(staged, settings, tensors, tokenizer_json, dtype_of(parameters)),
    )


def write_adapter(
    directory: Path,
    settings: ModelSettings,
    tensors: Mapping[str, Tensor],
    parameters: str = "fp32",
) -> Path:
    """Write the adapters of all stages as PEFT has them. As :func:`write_hf` otherwise."""
    _check(parameter_shapes(settings, 1, 1), tensors)
    return _write(
        directory, lambda staged: _fill_adapter(staged, settings, tensors, dtype_of(parameters))
    )


def _write(directory: Path, fill: Callable[[Path], None]) -> Path:
    directory, errors = Path(directory).absolute(), (OSError, SafetensorError)
    with writing(directory, "choose a directory you may write to", UsageFault, errors):
        if not replaceable(directory):
            raise Refused(
                f"{directory} is not empty and not an earlier export", "choose a new directory"
            )
        staged = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            staged.mkdir()
            fill(staged)
            for file in staged.iterdir():
                sync(file)
            _swap(staged, directory)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return directory


def replaceable(directory: Path) -> bool:
    """Whether an export may take this place: nothing there, an empty directory, or an earlier
    export."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        return False
    if not directory.exists() or not any(directory.iterdir()):
        return True
    try:
        file = next(file for name in MARKED if (file := directory / name).exists())
        return isinstance(json.loads(file.read_bytes()).get(MARK), dict)
    except (StopIteration, OSError, ValueError, AttributeError):
        return False


def _check(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    missing, unknown = (
        sorted(shapes.keys() - tensors.keys()),
        sorted(tensors.keys() - shapes.keys()),
    )
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    refuse(
        (
            missing or unknown,
            f"not the whole model: {len(missing)} tensors missing {missing[:3]}, {len(unknown)} "
            f"unknown {unknown[:3]}",
            "give the tensors of every stage of this run, and only those",
        ),
        *(
            (
                here.get(name) != shape,
                f"{name} has shape {here.get(name)}, not {shape}",
                "use the settings of this run",
            )
            for name, shape in shapes.items()
        ),
    )


def _fill(
    staged: Path,
    settings: ModelSettings,
    tensors: Mapping[str, Tensor],
    tokenizer_json: bytes | None,
    dtype: torch.dtype,
) -> None:
    whole = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in sorted(tensors)}
    save_file(whole, staged / "model.safetensors", metadata={"format": "pt"})
    special = _special(tokenizer_json)
    ids = {name: token[1] for name, token in special.items()}
    _json(
        staged / "config.json",
        config_of(settings, ids.get("bos"), ids.get("eos"), ids.get("pad"), dtype),
    )
    _json(
        staged / "generation_config.json",
        {f"{name}_token_id": i for name, i in ids.items()} | {"do_sample": True},
    )
    if tokenizer_json is not None:
        (staged / "tokenizer.json").write_bytes(tokenizer_json)
        _json(
            staged / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max(settings.seq_len, settings.positions),
                "clean_up_tokenization_spaces": False,
                **{f"{name}_token": token[0] for name, token in special.items()},
            },
        )


def _fill_adapter(
    staged: Path, settings: ModelSettings, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    named = {
        f"base_model.model.{name}": tensors[name].detach().to("cpu", dtype).contiguous()
        for name in sorted(tensors)
    }
    save_file(named, staged / "adapter_model.safetensors", metadata={"format": "pt"})
    _json(
        staged / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": settings.adapter,
            "lora_alpha": settings.adapter_alpha,
            "lora_dropout": 0.0,
            "target_modules": list(settings.adapter_targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        },
    )
    _json(staged / "tutti.json", {MARK: {"format": 1}})


_ROLES = {
    "bos": ("<|bos|>", "<s>", "<|begin_of_text|>", "<|im_start|>"),
    "eos": ("<|eos|>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>"),
    "pad": ("<|pad|>", "<pad>", "<|endoftext|>"),
}


def _special(tokenizer_json: bytes | None) -> dict[str, tuple[str, int]]:
    """Role to (word, id) of the special tokens, found by their usual words. Raises UsageFault for
    JSON that is no tokenizer."""
    if tokenizer_json is None:
        return {}
    try:
        added = {
            str(t["content"]): int(t["id"])
            for t in json.loads(tokenizer_json).get("added_tokens", [])
        }
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise UsageFault(
            "the tokenizer is not a Hugging Face tokenizer.json",
            "check the manifest's data.tokenizer",
        ) from e
    found = {role: next((w for w in words if w in added), None) for role, words in _ROLES.items()}
    return {role: (word, added[word]) for role, word in found.items() if word is not None}


def _json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _swap(staged: Path, directory: Path) -> None:
    """Put ``staged`` in the place of ``directory``. A rename cannot replace a full directory, so
    the old one steps aside."""
    aside = directory.with_name(f"{staged.name}.old")
    had_old = directory.is_dir()
    if had_old:
        directory.rename(aside)
    try:
        staged.rename(directory)
    except OSError:
        if had_old:
            aside.rename(directory)
        raise
    sync(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)
