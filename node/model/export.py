"""A trained model as a Hugging Face directory, written whole or not at all.

The files are written here, without that library: config.json, model.safetensors,
generation_config.json and, when there is a tokenizer, tokenizer.json and tokenizer_config.json; of
a run that trains adapters the two files that PEFT reads. The caller gives README.md, the model
card. Tensors come stage by stage, so that no more of the model than a stage has to be in memory.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.core.errors import (
    LocalFault,
    OutOfResources,
    Refused,
    UsageFault,
    refuse,
    writing,
)
from node.core.home import sync
from node.core.numbers import human
from node.model.rope import rope_config
from node.model.settings import ModelSettings
from node.model.shapes import head_dim, parameter_shapes
from node.wire.tensor_file import file_header
from node.wire.tensors import dtype_of, encode, nbytes_of

MARK = "tutti"
MARKED = ("config.json", "tutti.json")
"""Key, and the files that may have it, by which a directory is known as an export of this
program."""
CARD = "README.md"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tutti.json",
    CARD,
}
"""Every name that an export of this version or an older one has written."""
BESIDE = 64 << 20
"""Bytes allowed for the files beside the tensors."""


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
    scaling = rope_config(settings)
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
            **(scaling or {"rope_type": "default"}),
            "rope_theta": settings.rope_theta,
        },
        "rope_scaling": scaling,
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


def trained_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of an export: the whole model, or all adapters."""
    return parameter_shapes(settings, 1, 0) | parameter_shapes(settings, 1, 1)


def check_place(directory: Path, nbytes: int) -> None:
    """Check that an export of ``nbytes`` may be written to ``directory``. Blocks on the disk.

    Raises Refused when something is there that an export must not replace, OutOfResources when the
    disk has no room, UsageFault for a place that cannot be looked at.
    """
    with _writing(directory):
        if why := objection(directory):
            raise Refused(why, "choose a new directory, or move what is there away")
        there = next(p for p in (directory, *directory.parents) if p.exists())
        disk = shutil.disk_usage(there)
    # A file system that does not say its size has a total of 0.
    if disk.total and disk.free < nbytes:
        raise OutOfResources(
            f"{directory} needs {human(nbytes)}, and {human(disk.free)} are free there",
            "free some space on that disk, or choose a directory on another one",
        )


def objection(directory: Path) -> str:
    """Reason why an export must not be written to ``directory``, "" for none. It may take the place
    of nothing, of an empty directory, and of an earlier export that nobody has changed."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        return f"{directory} is not a directory"
    names = sorted(file.name for file in directory.iterdir()) if directory.exists() else []
    if not names:
        return ""
    mark = _mark(directory)
    if mark is None:
        return f"{directory} is not empty and not an earlier export"
    if foreign := [name for name in names if name not in FILES]:
        return f"{directory} is an earlier export, and holds {foreign[0]}, which is not part of it"
    card = directory / CARD
    if card.exists() and mark.get("card") != hashlib.sha256(card.read_bytes()).hexdigest():
        return f"{card} was changed since it was exported"
    return ""


def _mark(directory: Path) -> dict[str, Any] | None:
    """The mark of an earlier export, None where there is none."""
    for name in MARKED:
        try:
            mark = json.loads((directory / name).read_bytes()).get(MARK)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(mark, dict):
            return mark
    return None


class Export:
    """An export that is being written, in a hidden directory beside its place.

    First :meth:`open`, then :meth:`put` for the tensors of every stage, then :meth:`publish`, which
    renames it into place: a reader finds the earlier export, the new one or, for an instant, none;
    never half. :meth:`discard` removes an unpublished export and may always be called. Every method
    blocks on the disk. Each raises OutOfResources when the disk is full and UsageFault when the
    place cannot be written; the earlier export then stays.
    """

    def __init__(self, directory: Path, settings: ModelSettings, parameters: str = "fp32") -> None:
        """Describe an export of the model of ``settings``, its numbers in the format
        ``parameters``, to ``directory``. Raises UsageFault for a path without a name."""
        self.directory = Path(directory).absolute()
        if not self.directory.name:
            raise UsageFault(f"{directory} cannot be an export", "choose a new directory")
        self._settings = settings
        self._wire = parameters
        self._shapes = trained_shapes(settings)
        self._left = set(self._shapes)
        self._sizes: dict[str, int] = {}
        """Bytes of each file as they should be."""
        self._staged = self.directory.with_name(f".{self.directory.name}.{secrets.token_hex(4)}")
        self._out = -1
        dtype = dtype_of(parameters)
        self._head, self._places = file_header(
            {self._named(name): (dtype, shape) for name, shape in self._shapes.items()},
            {"format": "pt"},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum(nbytes_of(shape, self._wire) for shape in self._shapes.values())

    def open(self) -> None:
        """Make the hidden directory and the file of tensors. Raises as :func:`check_place` too."""
        check_place(self.directory, self.nbytes + BESIDE)
        with _writing(self.directory):
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._staged.mkdir(0o755)
            self._out = self._create(self._tensors)
            _write_at(self._out, memoryview(self._head), 0)
            size = max((end for _, end in self._places.values()), default=len(self._head))
            os.ftruncate(self._out, size)
            self._sizes[self._tensors] = size

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of the model, in their place in the file. Raises UsageFault for a tensor
        that the model does not have, for one of another shape and for one that came before."""
        unknown = sorted(tensors.keys() - self._shapes.keys())
        refuse(
            (
                unknown,
                f"{len(unknown)} unknown tensors: {unknown[:3]}",
                "give the tensors of every stage of this run, and only those",
            ),
            *(
                (
                    tuple(tensor.shape) != self._shapes[name],
                    f"{name} has shape {tuple(tensor.shape)}, not {self._shapes[name]}",
                    "use the settings of this run",
                )
                for name, tensor in tensors.items()
                if name in self._shapes
            ),
            (
                not tensors.keys() <= self._left,
                f"tensors given twice: {sorted(tensors.keys() - self._left)[:3]}",
                "give each tensor once",
            ),
        )
        with _writing(self.directory):
            for name in sorted(tensors):
                begin, _ = self._places[self._named(name)]
                _write_at(self._out, encode(tensors[name], self._wire), begin)
                self._left.discard(name)

    def publish(self, tokenizer_json: bytes | None = None, card: str = "", base: str = "") -> int:
        """Write the other files, check them all, and rename the directory into its place. Returns
        the bytes of the whole export.

        ``base``: name of the model beside which adapters were trained. Raises UsageFault when
        tensors are missing and for JSON that is no tokenizer, Refused when something has come to
        the place meanwhile.
        """
        missing = sorted(self._left)
        refuse(
            (
                missing,
                f"not the whole model: {len(missing)} tensors missing {missing[:3]}",
                "give the tensors of every stage of this run, and only those",
            )
        )
        with _writing(self.directory):
            mark: dict[str, Any] = {"format": 1}
            if card:
                self._file(CARD, card.encode())
                mark["card"] = hashlib.sha256(card.encode()).hexdigest()
            if self._settings.adapter:
                self._adapter_files(mark, base)
            else:
                self._model_files(mark, tokenizer_json)
            os.fsync(self._out)
            self._close()
            self._check()
            for name in self._sizes:
                sync(self._staged / name)
            sync(self._staged)
            if why := objection(self.directory):
                raise Refused(why, "choose a new directory, or move what is there away")
            _swap(self._staged, self.directory)
        return sum(self._sizes.values())

    def discard(self) -> None:
        """Remove everything that was not published."""
        self._close()
        shutil.rmtree(self._staged, ignore_errors=True)

    @property
    def _tensors(self) -> str:
        return "adapter_model.safetensors" if self._settings.adapter else "model.safetensors"

    def _named(self, name: str) -> str:
        """The name of a tensor in the file."""
        return f"base_model.model.{name}" if self._settings.adapter else name

    def _close(self) -> None:
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def _create(self, name: str) -> int:
        """Descriptor of a new file; all files of an export have one mode."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._staged / name, flags, 0o644)

    def _file(self, name: str, content: bytes) -> None:
        fd = self._create(name)
        try:
            _write_at(fd, memoryview(content), 0)
        finally:
            os.close(fd)
        self._sizes[name] = len(content)

    def _json(self, name: str, value: dict[str, Any]) -> None:
        self._file(name, (json.dumps(value, indent=2) + "\n").encode())

    def _model_files(self, mark: dict[str, Any], tokenizer_json: bytes | None) -> None:
        settings = self._settings
        special = _special(tokenizer_json)
        ids = {name: token[1] for name, token in special.items()}
        dtype = dtype_of(self._wire)
        config = config_of(settings, ids.get("bos"), ids.get("eos"), ids.get("pad"), dtype)
        self._json("config.json", config | {MARK: mark})
        self._json(
            "generation_config.json",
            {f"{name}_token_id": i for name, i in ids.items()} | {"do_sample": True},
        )
        if tokenizer_json is None:
            return
        self._file("tokenizer.json", tokenizer_json)
        self._json(
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max(settings.seq_len, settings.positions),
                "clean_up_tokenization_spaces": False,
                **{f"{name}_token": token[0] for name, token in special.items()},
            },
        )

    def _adapter_files(self, mark: dict[str, Any], base: str) -> None:
        settings = self._settings
        self._json(
            "adapter_config.json",
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": base or None,
                "r": settings.adapter,
                "lora_alpha": settings.adapter_alpha,
                "lora_dropout": 0.0,
                "target_modules": list(settings.adapter_targets),
                "bias": "none",
                "fan_in_fan_out": False,
                "inference_mode": True,
            },
        )
        self._json("tutti.json", {MARK: mark})

    def _check(self) -> None:
        """Raises LocalFault unless every file has its size, and the library finds every tensor in
        the file of tensors."""
        found = {file.name: file.stat().st_size for file in self._staged.iterdir()}
        try:
            with safe_open(self._staged / self._tensors, framework="pt") as opened:
                whole = set(opened.keys()) == {self._named(name) for name in self._shapes}
        except SafetensorError:
            whole = False
        if found != self._sizes or not whole:
            raise LocalFault(
                f"{self.directory} was not written whole: {found}, and not {self._sizes}",
                "check that disk, or choose a directory on another one",
            )


def _writing(directory: Path) -> Any:
    return writing(directory, "choose a directory you may write to", UsageFault)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the system may take it in several pieces. Raises OSError."""
    while len(data):
        done = os.pwrite(fd, data, offset)
        data = data[done:]
        offset += done


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
