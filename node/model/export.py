"""A trained model as a Hugging Face directory, written whole or not at all.

The files are written here, without that library: the tensors, in one file or in several with an
index; the files that came with the model that the run began from, to the byte; without those,
config.json, generation_config.json and a tokenizer_config.json; of a run that trains adapters the
two files that PEFT reads. The caller gives README.md, the model card. Tensors come stage by stage,
so that no more of the model than a stage has to be in memory.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from node.core.home import new_directory, remove_stale, sync
from node.core.numbers import human
from node.model.extras import Extras
from node.model.files import (
    CONFIG,
    GENERATION,
    GGUF,
    INDEX,
    LIMITS,
    TOKENIZER,
    WEIGHTS,
    is_shard,
    shard_name,
)
from node.model.gguf_file import check_gguf, gguf_bytes, write_gguf
from node.model.pretrained import fields_of
from node.model.rope import rope_config
from node.model.settings import ModelSettings
from node.model.shapes import head_dim, parameter_shapes
from node.wire.tensor_file import file_header
from node.wire.tensors import dtype_of, encode, nbytes_of

MARK = "tutti"
MARKED = ("tutti.json", "config.json")
"""Key, and the files that may have it, by which a directory is known as an export of this program.
A config.json that came with the model has the mark of the export that the model was."""
CARD = "README.md"
FILES = {
    *LIMITS,
    TOKENIZER,
    WEIGHTS,
    INDEX,
    GGUF,
    "adapter_config.json",
    "adapter_model.safetensors",
    "tutti.json",
    CARD,
}
"""File names that an export of this version or an older one has written, beside shards."""
SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in one file, at most, where no tensor is larger."""
BESIDE = 64 << 20
"""Bytes allowed for the files beside the tensors."""
OLD = ".old"
"""End of the name of an earlier export that makes way for a new one."""


def config_of(
    settings: ModelSettings,
    ids: Mapping[str, int | list[int]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """config.json: Qwen3 with q/k norms, Qwen2 with biases, Llama without either. Old and new
    readers each find the rotary base where they look."""
    kind = "llama"
    if settings.qk_norm:
        kind = "qwen3"
    elif settings.qkv_bias:
        kind = "qwen2"
    scaling = rope_config(settings)
    llama = {"mlp_bias": False, "pretraining_tp": 1}
    qwen = {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": settings.layers,
    }
    own = qwen
    if kind == "llama":
        own = llama
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
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **(ids or {}),
        MARK: {"format": 1},
        **own,
    }


def carried_config(
    given: bytes, settings: ModelSettings, dtype: torch.dtype
) -> tuple[bytes, list[str]]:
    """The config.json that the run began from, for the trained model: equal to the byte, or with
    the changes that the returned lines name. Raises UsageFault where it is none of a model that is
    built here."""
    try:
        config = json.loads(given)
        fields, _ = fields_of(config, Path("the run's files"))
    except (ValueError, RecursionError, AttributeError) as e:
        raise UsageFault(f"the run's {CONFIG} is no JSON object: {e}", "export without it") from e
    notes: list[str] = []
    # A config without a scaled rotary embedding does not name the numbers of the scaling.
    usual = {f.name: f.default for f in dataclasses.fields(settings) if f.name.startswith("rope_")}
    given_fields = usual | fields
    trained = {name: getattr(settings, name) for name in given_fields if name != "seq_len"}
    differ = [name for name, value in trained.items() if value != _plain(given_fields[name])]
    if differ:
        config = config | config_of(settings, dtype=dtype)
        for role in ("bos", "eos", "pad"):
            config[f"{role}_token_id"] = json.loads(given).get(f"{role}_token_id")
        del config[MARK]
        named = ", ".join(f"model.{name}" for name in differ)
        notes.append(f"{CONFIG} differs from the given one: the run has its own {named}")
    for key in ("torch_dtype", "dtype"):
        here = str(dtype).removeprefix("torch.")
        if key in config and config[key] != here:
            notes.append(f"{CONFIG}: {key} is {here}, as the tensors are, and was {config[key]}")
            config[key] = here
    if not notes:
        return given, notes
    return _json_bytes(config), notes


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


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
    names = []
    if directory.exists():
        names = sorted(file.name for file in directory.iterdir())
    if not names:
        return ""
    mark = _mark(directory)
    if mark is None:
        return f"{directory} is not empty and not an earlier export"
    if foreign := _foreign(names):
        return f"{directory} is an earlier export, and holds {foreign[0]}, which is not part of it"
    card = directory / CARD
    if card.exists() and mark.get("card") != hashlib.sha256(card.read_bytes()).hexdigest():
        return f"{card} was changed since it was exported"
    return ""


def _foreign(names: Iterable[str]) -> list[str]:
    """The names of a directory's entries that are no files of an export."""
    return [name for name in names if name not in FILES and not is_shard(name)]


def _is_export(path: Path) -> bool:
    """Return True for a directory with nothing but files of an export."""
    try:
        return not _foreign(os.listdir(path))
    except OSError:
        return False


def clear_up(directory: Path) -> None:
    """Clear up after killed exports to ``directory``: remove their hidden directories beside it,
    and put an earlier export back that had made way. Blocks on the disk; leaves alone anything that
    it cannot remove."""
    hidden = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{8}}({re.escape(OLD)})?")
    with contextlib.suppress(OSError):
        beside = [p for p in directory.parent.iterdir() if hidden.fullmatch(p.name)]
        there = [path for path in beside if _is_export(path)]
        for path in there:
            if path.suffix != OLD:
                remove_stale(path)
        for path in there:
            # An export that lives has both for a moment, and puts this right itself.
            if path.suffix != OLD or path.with_suffix("").exists():
                continue
            if not os.path.lexists(directory):
                path.rename(directory)
            elif _mark(directory) is not None:
                shutil.rmtree(path, ignore_errors=True)


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

    def __init__(
        self,
        directory: Path,
        settings: ModelSettings,
        parameters: str = "fp32",
        shard_bytes: int = SHARD_BYTES,
        *,
        gguf: bool = False,
    ) -> None:
        """Describe an export of the model of ``settings``, its numbers in the format
        ``parameters``, to ``directory``, in files of at most ``shard_bytes`` of tensors. ``gguf``:
        with the model as GGUF too. Raises UsageFault for a path without a name."""
        self.directory = Path(directory).absolute()
        if not self.directory.name:
            raise UsageFault(f"{directory} cannot be an export", "choose a new directory")
        self._settings = settings
        self._wire = parameters
        self._gguf = gguf
        self._shapes = trained_shapes(settings)
        self._left = set(self._shapes)
        self._sizes: dict[str, int] = {}
        """Bytes of each file as they should be."""
        self._staged = self.directory.with_name(f".{self.directory.name}.{secrets.token_hex(4)}")
        self._held = -1
        """Descriptor of that directory, open as long as this export has it; -1 for none."""
        single = ""
        if settings.adapter:
            single = "adapter_model.safetensors"
        self._files = _sharded(
            {self._named(name): shape for name, shape in self._shapes.items()},
            parameters,
            shard_bytes,
            single,
        )
        self._where = {name: file for file in self._files for name in file.places}
        self.notes: list[str] = []
        """Differences between the given files and the written ones, a sentence each."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum(nbytes_of(shape, self._wire) for shape in self._shapes.values())

    @property
    def needed(self) -> int:
        """Bytes that the disk must have free for all files."""
        needed = self.nbytes + BESIDE
        if self._gguf:
            needed += sum(map(gguf_bytes, self._shapes.values()))
        return needed

    def check(self) -> None:
        """Check that the export may be written, after others that were killed are cleared up.
        Raises as :func:`check_place`."""
        clear_up(self.directory)
        check_place(self.directory, self.needed)

    def check_extras(self, extras: Extras) -> None:
        """Check that the model can be written as GGUF with this tokenizer, if it is to be. Raises
        UsageFault."""
        if self._gguf:
            check_gguf(self._settings, extras)

    def open(self) -> None:
        """Make the hidden directory and the file of tensors. Raises as :func:`check_place` too."""
        self.check()
        with _writing(self.directory):
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._held = new_directory(self._staged)
            for file in self._files:
                file.out = self._create(file.name)
                _write_at(file.out, memoryview(file.head), 0)
                os.ftruncate(file.out, file.nbytes)
                self._sizes[file.name] = file.nbytes

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
                file = self._where[self._named(name)]
                begin, _ = file.places[self._named(name)]
                _write_at(file.out, encode(tensors[name], self._wire), begin)
                self._left.discard(name)

    def publish(self, extras: Extras | None = None) -> int:
        """Write the other files, check them all, and rename the directory into its place. Returns
        the bytes of the whole export. :attr:`notes` says how the files differ from those given.

        Raises UsageFault when tensors are missing and for a model that GGUF cannot say, Refused
        when something has come to the place meanwhile.
        """
        extras = extras or Extras()
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
            if extras.card:
                self._file(CARD, extras.card.encode())
                mark["card"] = hashlib.sha256(extras.card.encode()).hexdigest()
            self._given_files(extras)
            if self._settings.adapter:
                self._adapter_files(mark, extras.base)
            else:
                self._model_files(mark, extras)
            for file in self._files:
                os.fsync(file.out)
            self._close()
            if self._gguf:
                self._write_gguf(extras)
            self._check()
            for name in self._sizes:
                sync(self._staged / name)
            sync(self._staged)
            if why := objection(self.directory):
                raise Refused(why, "choose a new directory, or move what is there away")
            _swap(self._staged, self.directory)
        self._let_go()
        return sum(self._sizes.values())

    def discard(self) -> None:
        """Remove everything that was not published."""
        self._close()
        shutil.rmtree(self._staged, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        """Close the hidden directory, which then counts as left by a process that was killed."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _named(self, name: str) -> str:
        """The name of a tensor in the file."""
        if self._settings.adapter:
            return f"base_model.model.{name}"
        return name

    def _close(self) -> None:
        for file in self._files:
            if file.out >= 0:
                os.close(file.out)
                file.out = -1

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
        self._file(name, _json_bytes(value))

    def _given_files(self, extras: Extras) -> None:
        """Write the files that came with the model, and a tokenizer_config.json where there is
        none beside a tokenizer.json that came alone."""
        given = {name: content for name, content in extras.files.items() if name != CONFIG}
        if self._settings.adapter:
            given.pop(GENERATION, None)  # PEFT takes the base model's
        if given.keys() == {TOKENIZER}:
            most = max(self._settings.seq_len, self._settings.positions)
            given["tokenizer_config.json"] = _json_bytes(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "model_max_length": most,
                    "clean_up_tokenization_spaces": False,
                    **extras.words,
                }
            )
        for name, content in given.items():
            self._file(name, content)

    def _model_files(self, mark: dict[str, Any], extras: Extras) -> None:
        """Write config.json, the index of several files, and where the model came without it
        generation_config.json."""
        dtype = dtype_of(self._wire)
        if len(self._files) > 1:
            index = {name: file.name for name, file in sorted(self._where.items())}
            self._json(INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": index})
        if given := extras.files.get(CONFIG):
            config, self.notes = carried_config(given, self._settings, dtype)
            self._file(CONFIG, config)
            self._json("tutti.json", {MARK: mark | {"notes": self.notes}})
            return
        self._json(CONFIG, config_of(self._settings, extras.ids, dtype) | {MARK: mark})
        if GENERATION not in extras.files:
            self._json(GENERATION, extras.ids | {"do_sample": True})

    def _write_gguf(self, extras: Extras) -> None:
        files = [self._staged / file.name for file in self._files]
        size = write_gguf(self._staged / GGUF, self._settings, files, extras)
        self._sizes[GGUF] = size

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
            whole = all(self._sound(file) for file in self._files)
        except SafetensorError:
            whole = False
        if found != self._sizes or not whole:
            raise LocalFault(
                f"{self.directory} was not written whole: {found}, and not {self._sizes}",
                "check that disk, or choose a directory on another one",
            )

    def _sound(self, file: "_Tensors") -> bool:
        with safe_open(self._staged / file.name, framework="pt") as opened:
            return set(opened.keys()) == file.places.keys()


@dataclass
class _Tensors:
    """One safetensors file that is being written."""

    name: str
    head: bytes
    places: Mapping[str, tuple[int, int]]
    """First byte of each tensor in the file, and the byte behind its last."""
    out: int = -1
    """Descriptor; -1 for a file that is not open."""

    @property
    def nbytes(self) -> int:
        return max((end for _, end in self.places.values()), default=len(self.head))


def _sharded(
    shapes: Mapping[str, tuple[int, ...]], wire: str, most: int, only: str
) -> list[_Tensors]:
    """Files of at most ``most`` bytes of tensors, in the order of the model; a single file has the
    name ``only``, if that is not empty."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = nbytes_of(shape, wire)
        if groups[-1] and filled + size > most and not only:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    dtype = dtype_of(wire)
    files: list[_Tensors] = []
    for number, names in enumerate(groups, 1):
        head, places = file_header(
            {name: (dtype, shapes[name]) for name in names}, {"format": "pt"}
        )
        files.append(_Tensors(only or shard_name(number, len(groups)), head, places))
    return files


def _writing(directory: Path) -> Any:
    return writing(directory, "choose a directory you may write to", UsageFault)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the system may take it in several pieces. Raises OSError."""
    while len(data):
        done = os.pwrite(fd, data, offset)
        data = data[done:]
        offset += done


def _swap(staged: Path, directory: Path) -> None:
    """Put ``staged`` in the place of ``directory``. A rename cannot replace a full directory, so
    the old one steps aside."""
    aside = directory.with_name(f"{staged.name}{OLD}")
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
    if had_old:
        # Half removed it is no export that may come back, but one that was left.
        with contextlib.suppress(OSError):
            aside.rename(staged)
        shutil.rmtree(staged, ignore_errors=True)
