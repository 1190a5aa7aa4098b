"""A table of plain values (from TOML, the environment, flags) into a frozen dataclass, with
complaints people can act on; and the meanings of its fields."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from node.core.errors import Removed, UsageFault

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FieldRule:
    """Values that a field may hold: one of ``choices``, a number between ``low`` and ``high``, or
    text matching ``pattern``.

    ``says`` is the sentence shown when a value breaks the rule; made up from the bounds when empty.
    ``removed``: former choices, and their replacements.
    """

    low: float = -math.inf
    high: float = math.inf
    choices: tuple[Any, ...] = ()
    pattern: str = ""
    says: str = ""
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.pattern:
            return (
                isinstance(value, str | int) and re.fullmatch(self.pattern, str(value)) is not None
            )
        return (
            isinstance(value, (int, float))
            and math.isfinite(value)
            and self.low <= value <= self.high
        )

    @property
    def sentence(self) -> str:
        if self.says:
            return self.says
        if self.choices:
            return "one of " + ", ".join(str(c) for c in self.choices)
        if self.pattern:
            return f"text matching {self.pattern}"
        if math.isinf(self.high):
            return f"{_plain(self.low)} or more"
        return f"between {_plain(self.low)} and {_plain(self.high)}"


_ALIKE = 0.65
"""Ratio of equal characters from which a name counts as a typo of another: "layer" of "layers", not
"hiden" of "tied"."""
Rules = Mapping[str, FieldRule]
"""Field name, with its section in front ("model.layers"), to the rule of that field."""


def build(kind: type[T], table: Any, section: str, rules: Rules, *, source: str = "") -> T:
    """``table`` as an instance of the dataclass ``kind``; missing fields keep their defaults.

    Raises UsageFault naming ``section.field``, the bad value and the allowed ones. ``source`` names
    the origin of the value ("in swarm.toml") and ends the first line.
    """
    if not isinstance(table, Mapping):
        raise UsageFault(
            f"{section or 'the file'} is not a table{_where(source)}", f"write it as  [{section}]"
        )
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = {}
    for key, raw in table.items():
        if key not in known:
            raise unknown(dotted(section, str(key)), [dotted(section, k) for k in known], source)
        values[key] = check(
            dotted(section, key), raw, hints[key], rules.get(dotted(section, key)), source=source
        )
    return kind(**values)


def check(name: str, raw: Any, hint: Any, rule: FieldRule | None, *, source: str = "") -> Any:
    """``raw`` as the type ``hint`` (bool, int, float, str, a tuple of str, int or float, or one
    of several of these) if ``rule`` allows it. Raises Removed for a choice that was, UsageFault for
    anything else."""
    value = _typed(raw, hint)
    if value is None:
        step = f"expected {type_sentence(hint)}"
        if rule:
            step += f", {rule.sentence}"
        raise UsageFault(f"{name} = {show(raw)}{_where(source)}", step)
    if rule is not None and value in rule.removed:
        raise Removed(f"{name} = {show(raw)} was removed{_where(source)}", rule.removed[value])
    if rule is not None and not rule.allows(value):
        raise UsageFault(f"{name} = {show(raw)}{_where(source)}", f"allowed: {rule.sentence}")
    return value


def from_text(text: Any, hint: Any) -> Any:
    """Text from the environment as the value TOML would have given; itself when it does not look
    like one, or is no text."""
    if not isinstance(text, str):
        return text
    word = text.strip()
    if hint is bool:
        return {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }.get(word.lower(), text)
    if typing.get_origin(hint) is tuple:
        return [from_text(w, typing.get_args(hint)[0]) for w in re.split(r"[,\s]+", word) if w]
    if typing.get_origin(hint) is types.UnionType:
        found = [from_text(text, kind) for kind in typing.get_args(hint)]
        return next((value for value in found if not isinstance(value, str)), text)
    if hint in (int, float):
        with contextlib.suppress(ValueError):
            return hint(word)
    return text


ALIASES: Mapping[str, str] = {
    **dict.fromkeys(
        ("width", "hidden_size", "hidden", "n_embd", "embed_dim", "dim", "d_embed"), "d_model"
    ),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"), "layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "heads"),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads", "num_key_value_heads"), "kv_heads"),
    "head_dim": "head_width",
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "n_inner", "d_ffn"), "d_ff"),
    **dict.fromkeys(("vocab_size", "n_vocab"), "vocab"),
    **dict.fromkeys(
        ("block_size", "context", "context_length", "max_seq_len", "max_length", "n_ctx"),
        "seq_len",
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), "positions"),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), "adapter"),
    "lora_alpha": "adapter_alpha",
    "rms_norm_eps": "norm_eps",
    "learning_rate": "lr",
    "warmup_steps": "warmup",
    **dict.fromkeys(("max_steps", "num_train_epochs", "steps"), "epochs"),
    **dict.fromkeys(("batch_size", "global_batch_size", "train_batch_size"), "target_batch"),
    **dict.fromkeys(
        ("micro_batch_size", "microbatch_size", "per_device_train_batch_size"), "micro_batch"
    ),
}
"""Keys of settings by the names that other libraries have for them."""


def unknown(name: str, known: list[str], source: str = "") -> UsageFault:
    """The complaint about a name nobody reads, with the nearest one that exists."""
    near = _meant(name, known)
    section, dot, _ = name.rpartition(".")
    beside = []
    if dot:
        beside = sorted(k for k in known if k.rpartition(".")[0] == section)
    if near:
        hint = f"did you mean  {near}  ?"
    else:
        hint = "known here: " + ", ".join(beside or sorted(known))
    return UsageFault(f"{name} is not a setting{_where(source)}", hint)


def _meant(name: str, known: list[str]) -> str:
    """The known name that ``name`` is probably a typo of; "" if none is close. Keys are compared
    within a section and sections by themselves: a common section makes two names no more alike."""
    section, _, key = name.rpartition(".")
    known_as = [one for one in known if one.rpartition(".")[2] == ALIASES.get(key)]
    for one in known_as:
        if len(known_as) == 1 or one.rpartition(".")[0] == section:
            return one
    keys: dict[str, list[str]] = {}
    for one in known:
        keys.setdefault(one.rpartition(".")[0], []).append(one.rpartition(".")[2])
    if section not in keys:
        sections = difflib.get_close_matches(section, keys, n=1, cutoff=_ALIKE)
        if sections:
            section = sections[0]
    near = difflib.get_close_matches(key, keys.get(section, []), n=1, cutoff=_ALIKE)
    if near:
        return dotted(section, near[0])
    elsewhere = [dotted(s, key) for s, of in keys.items() if key in of]
    if len(elsewhere) != 1:
        return ""
    return elsewhere[0]


def settings_of(sections: Mapping[str, type]) -> dict[str, Any]:
    """Type of every field of these dataclasses, by its dotted name."""
    return {
        dotted(section, key): hint
        for section, kind in sections.items()
        for key, hint in typing.get_type_hints(kind).items()
    }


def dotted(section: str, key: str) -> str:
    if section:
        return f"{section}.{key}"
    return key


def show(value: Any) -> str:
    """A value as it would stand in the file, cut short and without control characters."""
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    if len(text) > 60:
        return text[:57] + "..."
    return text


def _typed(raw: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is types.UnionType:
        return next(
            (value for kind in typing.get_args(hint) if (value := _typed(raw, kind)) is not None),
            None,
        )
    if hint is bool:
        return raw if isinstance(raw, bool) else None
    if isinstance(raw, bool):
        return None
    if hint is int:
        return raw if isinstance(raw, int) and abs(raw) < 2**63 else None
    if hint is float:
        if isinstance(raw, int) and abs(raw) < 2**53:
            return float(raw)
        return raw if isinstance(raw, float) and math.isfinite(raw) else None
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        if not isinstance(raw, (list, tuple)):
            return None
        values = tuple(_typed(v, kind) for v in raw)
        if None in values:
            return None
        return values
    if not isinstance(raw, str):
        return None
    return str(raw)


def type_sentence(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        kinds = {str: "texts", int: "whole numbers", float: "numbers"}
        return f"a list of {kinds[typing.get_args(hint)[0]]}"
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(
            type_sentence(kind) for kind in typing.get_args(hint) if kind is not types.NoneType
        )
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(
        hint, "text in quotes"
    )


def _where(source: str) -> str:
    if not source:
        return ""
    return f"  ({source})"


def _plain(number: float) -> str:
    if float(number).is_integer() and abs(number) < 1e15:
        return str(int(number))
    return f"{number:g}"


@lru_cache
def meanings(kind: type) -> Mapping[str, str]:
    """Text of the strings below the fields of a dataclass, by field, each one paragraph."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    found = dict[str, str]()
    lines = body.body if isinstance(body, ast.ClassDef) else []
    for line, below in zip(lines, lines[1:], strict=False):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[line.target.id] = " ".join(str(below.value.value).replace("``", "").split())
    return found
