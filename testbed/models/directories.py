"""Directories of small random models, as transformers saves them: in several files."""

from pathlib import Path
from typing import Any

import torch
import transformers

from node.data.tokenizer_files import TokenizerFiles

KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": None},
}

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


def made(kind: str, there: Path) -> Path:
    """The directory of a random model."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **KINDS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:  # else norms are one, biases zero, and nobody would miss them
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(there, max_shard_size="40KB")
    if not (there / "model.safetensors.index.json").is_file():
        raise RuntimeError(f"{kind} is in one file")
    return there


def files_of(directory: Path) -> TokenizerFiles:
    """The files of the tokenizer and of the model in one directory."""
    return TokenizerFiles.beside(directory / "tokenizer.json", directory)
