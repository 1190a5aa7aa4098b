"""Names of the files of a Hugging Face model directory, and the most bytes of each; Git LFS
pointers, which lie in a clone in the place of files that were not downloaded.

No library and no disk: manifests, readers and exports share the names.
"""

import re
from pathlib import Path

from node.core.errors import UsageFault

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
GGUF = "model-f16.gguf"
_MIB = 1 << 20
TOKENIZER_FILES = {
    "tokenizer_config.json": 16 * _MIB,
    "special_tokens_map.json": _MIB,
    "added_tokens.json": 16 * _MIB,
    "chat_template.jinja": _MIB,
    "chat_template.json": _MIB,
    "vocab.json": 64 * _MIB,
    "merges.txt": 64 * _MIB,
    "vocab.txt": 64 * _MIB,
    "tokenizer.model": 64 * _MIB,
    "spiece.model": 64 * _MIB,
    "sentencepiece.bpe.model": 64 * _MIB,
}
"""Files that belong to a tokenizer, beside tokenizer.json."""
MODEL_FILES = {CONFIG: _MIB, GENERATION: _MIB}
"""Files that belong to a model, beside its tensors."""
LIMITS = TOKENIZER_FILES | MODEL_FILES
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of every Git LFS pointer."""
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


def shard_name(number: int, count: int) -> str:
    """Name of file ``number``, from 1, of ``count`` files of tensors."""
    if count > 1:
        return f"model-{number:05}-of-{count:05}.safetensors"
    return WEIGHTS


def is_shard(name: str) -> bool:
    """Return True for the name of one of several files of tensors."""
    return _SHARD.fullmatch(name) is not None


def check_pointer(path: Path, first: bytes) -> None:
    """Raise UsageFault if the file at ``path`` is a Git LFS pointer. ``first``: its first
    bytes."""
    if first.startswith(POINTER):
        raise UsageFault(
            f"{path} is a Git LFS pointer: the clone holds a text in place of the file",
            f"fetch the files:  git -C {path.parent} lfs pull  , or download them again",
        )
