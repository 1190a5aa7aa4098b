"""What is learned from, which is part of the manifest; and where this peer keeps the files that a
manifest names. A manifest names content; a path is each peer's own."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DataSettings:
    """A source of tokens and its order."""

    source: str = "builtin:pydoc"
    """builtin:pydoc | file:NAME (txt, jsonl, parquet, bin; SHA256SUMS for shards beside it) |
    http(s)://… (SHA256SUMS, one shard, or shards x-{000..012}.jsonl) | hf:NAME[:CONFIG]:SPLIT |
    synthetic:SEED. The name of a file may be a path, where it lies at peers that say nothing else;
    its ending is the format. Sources of shards are streamed."""
    sha256: str = ""
    """Hex hash of the source's bytes, of a stream that of its list of shards, compared by everybody
    who opens it; empty: not compared."""
    windows: int = 0
    """Samples that a stream takes from each piece of 1 MiB, as stored; found by ``swarm init``."""
    column: str = "text"
    """The field of a stream's documents that is the text."""
    tokenizer: str = "bytes"
    """"bytes", or the name of a Hugging Face tokenizer.json; a path as in ``source``."""
    tokenizer_sha256: str = ""
    """Hex hash of that file, compared as ``sha256`` is."""
    document_mask: bool = False
    """Documents that are packed into one sequence do not see each other: a token attends to those
    of its own document, positions count from its beginning, and its last token has no target."""
    seed: int = 42
    """Seed of the sample order."""
    holdout: float = 0.05
    """Share of the text, at its end, that is never trained on."""


@dataclass(frozen=True)
class Places:
    """A field: the file, or a directory that holds it under the manifest's name; "" for the path
    the manifest gives."""

    data: str = ""
    tokenizer: str = ""
    weights: str = ""


AS_NAMED = Places()


def local(name: str, place: str) -> Path:
    """The file that a manifest calls ``name``, of a peer that keeps it at ``place``."""
    path = Path(os.path.expanduser(place or name))
    return path / Path(name).name if place and os.path.isdir(path) else path


def meant_for_one(place: str) -> bool:
    """Whether a place says that this very run reads a file: a directory may be set once for all
    runs of a peer."""
    return bool(place) and not os.path.isdir(os.path.expanduser(place))
