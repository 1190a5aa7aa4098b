"""What is learned from. Part of the manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSettings:
    """A source of tokens and its order."""

    source: str = "builtin:pydoc"
    """builtin:pydoc | file:NAME (txt, jsonl, parquet, bin) | hf:NAME[:SPLIT[:COLUMN]] |
    synthetic:SEED. The name of a file may be a path, where it lies at peers that say nothing else;
    its ending is the format."""
    sha256: str = ""
    """Hex hash of the source's bytes, compared by everybody who opens it; empty: not compared."""
    tokenizer: str = "bytes"
    """"bytes", or the name of a Hugging Face tokenizer.json; a path as in ``source``."""
    tokenizer_sha256: str = ""
    """Hex hash of that file, compared as ``sha256`` is."""
    seed: int = 42
    """Seed of the sample order."""
    holdout: float = 0.05
    """Share of the text, at its end, that is never trained on."""
