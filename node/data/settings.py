"""What is learned from. Part of the manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSettings:
    """A source of tokens and its order."""

    source: str = "builtin:pydoc"
    """builtin:pydoc | file:PATH (txt, jsonl, parquet, bin) | hf:NAME[:SPLIT[:COLUMN]] | synthetic:SEED."""
    sha256: str = ""
    """Hex hash of the source's bytes; checked by ends peers when not empty."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face tokenizer.json."""
    seed: int = 42
    """Seed of the sample order."""
    holdout: float = 0.05
    """Share of the text, at its end, that is never trained on."""
