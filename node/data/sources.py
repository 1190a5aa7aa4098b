"""A source's name to a corpus: tokens in memory or mapped from disk, hashed, split into training and held-out text.

``builtin:pydoc`` is the text of Python's own help; it differs between Python versions, so peers that share a run compare
its hash. Readers of the formats are in ``readers.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from node.core.errors import Refused, UsageFault
from node.data import readers
from node.data.cache import cached
from node.data.settings import DataSettings
from node.data.synthetic import MarkovLanguage
from node.data.tokenizer import Tokenizer, load_tokenizer

SYNTHETIC_TOKENS = 1 << 20
"""Length of the synthetic text."""


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``held_out`` are unsigned token ids [n], perhaps memory-mapped: read, never write.

    Windows are ``seq_len + 1`` tokens long and begin ``seq_len`` apart, so each token but the first is a target once.
    """

    train: np.ndarray
    held_out: np.ndarray
    sha256: str
    vocab: int
    seq_len: int

    @property
    def windows(self) -> int:
        """Samples in one data pass."""
        return max(0, (len(self.train) - 1) // self.seq_len)

    @property
    def held_out_windows(self) -> int:
        return max(0, (len(self.held_out) - 1) // self.seq_len)

    def require_vocab(self, vocab: int) -> None:
        """Raises UsageFault when a model of ``vocab`` ids could meet an id it has no embedding for."""
        if self.vocab > vocab:
            raise UsageFault(
                f"the data has {self.vocab} token ids, the model {vocab}", f"set model.vocab to at least {self.vocab}"
            )


def open_source(settings: DataSettings, seq_len: int, home: Path) -> Corpus:
    """Read, hash, tokenise and split what ``settings.source`` names. Tokenised files are kept under ``home/data``.

    Raises UsageFault for a source that does not exist, does not parse, or is too short for one window of training text;
    Refused when the hash is not ``settings.sha256``; OutOfResources when the disk is full.
    """
    if not 0 <= settings.holdout < 1:
        raise UsageFault(f"data.holdout is {settings.holdout}", "give a share from 0 to below 1")
    if seq_len < 1:
        raise UsageFault(f"model.seq_len is {seq_len}", "give a whole number above 0")
    tokenizer = load_tokenizer(settings.tokenizer)
    kind, colon, name = settings.source.partition(":")
    if not colon or not name:
        raise UsageFault(f"unknown data source {settings.source!r}", _SOURCES)
    if kind == "builtin":
        tokens, digest, vocab = _builtin(name, tokenizer)
    elif kind == "synthetic":
        tokens, digest, vocab = _synthetic(name, tokenizer)
    elif kind == "file":
        tokens, digest, vocab = _file(Path(name).expanduser(), tokenizer, settings.sha256, home)
    elif kind == "hf":
        tokens, digest, vocab = _hub(name, tokenizer, settings.sha256, home)
    else:
        raise UsageFault(f"unknown data source {settings.source!r}", _SOURCES)
    _check_hash(digest, settings.sha256)
    return _split(tokens, settings, seq_len, digest, vocab)


_SOURCES = "use builtin:pydoc, file:PATH, hf:NAME[:SPLIT[:COLUMN]] or synthetic:SEED"


def _builtin(name: str, tokenizer: Tokenizer) -> tuple[np.ndarray, str, int]:
    if name != "pydoc":
        raise UsageFault(f"there is no built-in text {name!r}", "use builtin:pydoc")
    raw = readers.pydoc()
    return tokenizer.encode(raw), hashlib.sha256(raw).hexdigest(), tokenizer.vocab


def _synthetic(name: str, tokenizer: Tokenizer) -> tuple[np.ndarray, str, int]:
    if not (name.isascii() and name.isdigit()):
        raise UsageFault(f"the seed of the synthetic language is {name!r}", "use synthetic:SEED with a whole number")
    raw = MarkovLanguage(int(name)).generate(SYNTHETIC_TOKENS).tobytes()
    return tokenizer.encode(raw), hashlib.sha256(raw).hexdigest(), tokenizer.vocab


def _file(path: Path, tokenizer: Tokenizer, wanted: str, home: Path) -> tuple[np.ndarray, str, int]:
    digest = readers.file_sha256(path)
    _check_hash(digest, wanted)  # before minutes of tokenising
    kind = path.suffix.lower()
    if kind == ".bin":
        tokens, vocab = readers.pretokenised(path, tokenizer.vocab)
        return tokens, digest, vocab
    if kind == ".txt" and tokenizer.digest == "bytes-1":
        return readers.mapped(path, np.dtype(np.uint8)), digest, tokenizer.vocab
    if kind == ".txt":
        documents, ends = readers.text_pieces(path), None
    elif kind in (".jsonl", ".ndjson"):
        documents, ends = readers.jsonl(path), tokenizer.eos
    elif kind == ".parquet":
        documents, ends = readers.parquet(path), tokenizer.eos
    else:
        raise UsageFault(f"cannot read {path}: unknown ending", "use .txt, .jsonl, .parquet or .bin")
    return cached(home, f"{kind}:{digest}", documents, tokenizer, ends), digest, tokenizer.vocab


def _hub(name: str, tokenizer: Tokenizer, wanted: str, home: Path) -> tuple[np.ndarray, str, int]:
    dataset, column = readers.hub(name)
    digest = readers.documents_sha256(readers.hub_documents(dataset, column))
    _check_hash(digest, wanted)
    documents = readers.hub_documents(dataset, column)
    return cached(home, f"hf:{digest}", documents, tokenizer, tokenizer.eos), digest, tokenizer.vocab


def _check_hash(digest: str, wanted: str) -> None:
    if wanted and digest != wanted.lower():
        raise Refused(
            f"the data's sha256 is {digest[:16]}…, the run asks for {wanted[:16]}…",
            "get the same data as the run's other peers, or join as a block stage, which needs none",
        )


def _split(tokens: np.ndarray, settings: DataSettings, seq_len: int, digest: str, vocab: int) -> Corpus:
    window = seq_len + 1
    held = max(int(len(tokens) * settings.holdout), window) if settings.holdout else 0
    if len(tokens) - held < window:
        raise UsageFault(
            f"{settings.source} has {len(tokens)} tokens, too few for windows of {window} to train on"
            + (" and to hold out" if held else ""),
            "give a longer text or a shorter model.seq_len",
        )
    cut = len(tokens) - held
    return Corpus(tokens[:cut], tokens[cut:], digest, vocab, seq_len)
