"""A Hugging Face directory as the model that a run begins from. Enters: config.json and the
safetensors of a Llama, Mistral, Qwen2 or Qwen3 decoder. Leaves: the shape, the tensors of a stage
in the run's number format, their digests. Never: anything of the directory that is executed or
unpickled.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from node.core.errors import OutOfResources, Refused, UsageFault, refuse
from node.core.tables import build
from node.model.files import INDEX, POINTER, WEIGHTS, check_pointer
from node.model.rope import rope_fields
from node.model.settings import DIGEST, ModelSettings
from node.model.shapes import EMBEDDING, HEAD, all_shapes, base_shapes
from node.wire.tensors import digest, dtype_of

SEQ_LEN = 1024
"""Tokens of a sequence unless another number is given: the length that a model was published for is
more than the card of a volunteer holds."""
ROWS = 4096
"""Rows of two matrices that are compared at once."""
MOST_JSON = 64 << 20
_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_WHAT = f"tutti trains decoders of the kinds {', '.join(_KINDS)}"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def model_of(directory: Path) -> tuple[dict[str, Any], int]:
    """Fields of the manifest's ``model`` for the model in ``directory``, and the most tokens of a
    sequence it was made for.

    Raises UsageFault if there is no such directory, and for a model that would compute other
    numbers here than it does there.
    """
    return fields_of(_json(directory / "config.json"), directory)


def fields_of(c: Mapping[str, Any], directory: Path) -> tuple[dict[str, Any], int]:
    """As :func:`model_of`, for the content ``c`` of a config.json that lies in ``directory``."""
    kind = c.get("model_type")
    if kind not in _KINDS:
        raise UsageFault(f"{directory} holds a model of the kind {kind!r}", _WHAT)
    _plain(c, directory)
    try:
        most = c.get("max_position_embeddings") or SEQ_LEN
        rope = rope_fields(c, most)
        usual_window = None
        if kind == "mistral":
            usual_window = 4096
        window = c.get("sliding_window", usual_window)
        if window and c.get("use_sliding_window", kind == "mistral"):
            most = min(most, window)
        usual_width = 0
        if kind == "qwen3":
            usual_width = 128
        fields = {
            "layers": c["num_hidden_layers"],
            "d_model": c["hidden_size"],
            "heads": c["num_attention_heads"],
            "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
            "head_width": c.get("head_dim") or usual_width,
            "d_ff": c["intermediate_size"],
            "vocab": c["vocab_size"],
            "seq_len": min(SEQ_LEN, most),
            "positions": most,
            "norm_eps": c["rms_norm_eps"],
            "qk_norm": kind == "qwen3",
            "qkv_bias": kind == "qwen2",
            "tied": c.get("tie_word_embeddings", False),
            "init_std": c.get("initializer_range", 0.02),
            **rope,
        }
    except KeyError as e:
        raise UsageFault(f"{directory}/config.json has no {e}", _WHAT) from e
    except UsageFault as e:
        raise UsageFault(f"the model in {directory}: {e.what}", e.next_step) from e
    except (TypeError, ValueError, ArithmeticError) as e:
        raise UsageFault(f"{directory}/config.json: {e}", _WHAT) from e
    build(ModelSettings, fields, "model", source=f"in {directory}/config.json")
    return fields, most


def _plain(c: Mapping[str, Any], directory: Path) -> None:
    """Raises UsageFault for features that such models may have and none here has."""
    found = (
        (c.get("hidden_act", "silu") != "silu", f"hidden_act = {c.get('hidden_act')!r}"),
        (
            c.get("attention_bias", False) and c["model_type"] != "qwen2",
            "attention_bias = true",
        ),
        (c.get("mlp_bias", False), "mlp_bias = true"),
        ("quantization_config" in c, "quantised weights"),
    )
    refuse(
        *(
            (has, f"the model in {directory} has {what}, which is not built here", _WHAT)
            for has, what in found
        )
    )


class Weights:
    """The tensors of the safetensors files in a directory, read when they are asked for.
    ``parameters``: the number format that they are taken in."""

    def __init__(self, directory: Path, parameters: str = "fp32") -> None:
        """Raises UsageFault for a directory without such files, or with a damaged list of them."""
        self.directory = directory
        self._dtype = dtype_of(parameters)
        self._file_of: dict[str, Path] = {}
        single = directory / WEIGHTS
        index = directory / INDEX
        # As in transformers, a single file counts before a list of files beside it. isfile is
        # False, too, where a file cannot be looked at.
        if os.path.isfile(single) or not os.path.isfile(index):
            with self._open(single) as found:
                self._file_of = dict.fromkeys(found.keys(), single)
            return
        listed = _json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise UsageFault(f"{index} has no weight_map", _AGAIN)
        for name, file in listed.items():
            # A system call takes no name with a null byte or half a surrogate pair.
            if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
                raise UsageFault(f"{index} names a file {str(file)[:80]!r}", _AGAIN)
            self._file_of[str(name)] = directory / file

    def _open(self, file: Path) -> Any:
        with contextlib.suppress(OSError), file.open("rb") as first:
            check_pointer(file, first.read(len(POINTER)))
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (OSError, SafetensorError) as e:
            raise UsageFault(f"cannot read the weights in {file}: {e}", _AGAIN) from e

    def check(self, settings: ModelSettings) -> None:
        """Raises UsageFault for tensors that the model has no place for, and for tensors that
        contradict its config.json: other rows than the vocabulary, a head of its own that is tied
        or missing. Blocks on the disk."""
        known = all_shapes(settings)
        # Some files have the shared matrix twice, and tables that are computed here.
        more = [
            name
            for name in self._file_of
            if name not in known and name != HEAD and not name.endswith("rotary_emb.inv_freq")
        ]
        if more:
            raise UsageFault(
                f"{self.directory} has {len(more)} tensors that the model of its config.json does "
                f"not: {', '.join(sorted(more)[:3])}",
                _WHAT,
            )
        self._check_rows(settings)
        self._check_head(settings)

    def _check_rows(self, settings: ModelSettings) -> None:
        if EMBEDDING not in self._file_of:
            return
        try:
            with self._open(self._file_of[EMBEDDING]) as opened:
                shape = list(opened.get_slice(EMBEDDING).get_shape())
        except SafetensorError as e:
            raise UsageFault(f"cannot read {EMBEDDING} in {self.directory}: {e}", _AGAIN) from e
        if len(shape) == 2 and shape[0] != settings.vocab:
            raise UsageFault(
                f"{self.directory}: the vocabulary has {settings.vocab} ids, and {EMBEDDING} has "
                f"{shape[0]} rows",
                f'set "vocab_size": {shape[0]} in its config.json, if the tokenizer has no id '
                "beyond, and set no model.vocab",
            )

    def _check_head(self, settings: ModelSettings) -> None:
        has = HEAD in self._file_of
        if not settings.tied and not has:
            raise UsageFault(
                f"{self.directory} has no tensor {HEAD}, and its config.json does not tie the head "
                "to the embedding",
                'set "tie_word_embeddings": true in its config.json, if the model was trained so, '
                "or download the model again",
            )
        if settings.tied and has and not self._equal(EMBEDDING, HEAD):
            raise UsageFault(
                f'{self.directory}: config.json says "tie_word_embeddings": true, and {HEAD} '
                f"differs from {EMBEDDING}",
                "set it to false to keep the head that is there, or remove that tensor to use the "
                "embedding as the head",
            )

    def _equal(self, one: str, other: str) -> bool:
        """Return True if two matrices hold the same numbers, compared some rows at a time."""
        try:
            with (
                self._open(self._file_of[one]) as left_file,
                self._open(self._file_of[other]) as right_file,
            ):
                left = left_file.get_slice(one)
                right = right_file.get_slice(other)
                shape = left.get_shape()
                if shape != right.get_shape() or len(shape) != 2:
                    return False
                starts = range(0, shape[0], ROWS)
                pieces = (slice(start, start + ROWS) for start in starts)
                return all(torch.equal(left[piece], right[piece]) for piece in pieces)
        except (KeyError, SafetensorError) as e:
            raise UsageFault(f"cannot read {other} in {self.directory}: {e}", _AGAIN) from e

    def stage(self, settings: ModelSettings, stages: int, stage: int) -> dict[str, Tensor]:
        """Every tensor of one stage on the CPU, by name; some lie in the file's own memory:
        do not write into them. Blocks on the disk.

        Raises UsageFault when one is missing, of another shape, or of numbers that are not fp32,
        bf16 or fp16.
        """
        shapes = base_shapes(settings, stages, stage)
        found = dict[str, Tensor]()
        by_file: dict[Path, list[str]] = {}
        for name in shapes:
            if name not in self._file_of:
                raise UsageFault(f"{self.directory} has no tensor {name}", _AGAIN)
            by_file.setdefault(self._file_of[name], []).append(name)
        for file, names in by_file.items():
            with self._open(file) as opened:
                found |= {name: self._tensor(opened, name, shapes[name]) for name in names}
        return found

    def _tensor(self, opened: Any, name: str, shape: tuple[int, ...]) -> Tensor:
        try:
            tensor: Tensor = opened.get_tensor(name)
        except SafetensorError as e:
            raise UsageFault(f"cannot read {name} in {self.directory}: {e}", _AGAIN) from e
        if tuple(tensor.shape) != shape or tensor.dtype not in _TYPES:
            raise UsageFault(
                f"{name} in {self.directory} has shape {tuple(tensor.shape)} of {tensor.dtype}, "
                f"the model {shape}",
                _AGAIN,
            )
        return tensor.to(self._dtype)

    def digests(self, settings: ModelSettings, stages: int) -> tuple[str, ...]:
        """The digest of every stage, the ends first: the manifest's names of the weights."""
        return tuple(
            DIGEST + digest(self.stage(settings, stages, stage)) for stage in range(stages + 1)
        )

    def verified(
        self, settings: ModelSettings, stages: int, stage: int, wanted: str
    ) -> dict[str, Tensor]:
        """As :meth:`stage`. Raises Refused when it has another digest than ``wanted``."""
        found = self.stage(settings, stages, stage)
        if (here := DIGEST + digest(found)) != wanted:
            raise Refused(
                f"the weights of stage {stage} in {self.directory} are others than the run begins "
                f"from: {here[:23]}…, not {wanted[:23]}…",
                "leave  --weights  away, and they are fetched from other peers",
            )
        return found


def keep_weights(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` so that :class:`Weights` reads them there. Blocks on the disk. Raises
    OutOfResources where there is no room."""
    half = directory / "model.half"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_file({n: t.contiguous().cpu() for n, t in tensors.items()}, half)
        half.rename(directory / "model.safetensors")
    except (OSError, SafetensorError) as e:
        with contextlib.suppress(OSError):
            half.unlink()
        raise OutOfResources(
            f"cannot keep the weights that the run begins from in {directory}: {e}",
            "free some space, or they are fetched again at the next start",
        ) from e


_AGAIN = "give the directory of a whole model, as it was downloaded or exported"


def _json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MOST_JSON:
            raise UsageFault(f"{file} is longer than {MOST_JSON} bytes", _AGAIN)
        raw = file.read_bytes()
        check_pointer(file, raw)
        found = json.loads(raw)
    except OSError as e:
        raise UsageFault(f"cannot read {file}: {e.strerror}", _AGAIN) from e
    except (ValueError, RecursionError) as e:
        raise UsageFault(f"{file} is no JSON: {e}", _AGAIN) from e
    if not isinstance(found, dict):
        raise UsageFault(f"{file} holds no object", _AGAIN)
    return found
