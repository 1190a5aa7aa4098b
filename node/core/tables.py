"""Settings: fields of frozen dataclasses, each declared with its default, its text and its range;
and tables of plain values (from TOML, the environment, flags) that are read into them, with
complaints people can act on."""

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from node.core.errors import Removed, UsageFault
from node.core.numbers import rate_of

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FieldRule:
    """Values that a field may hold: one of ``choices``, a number between ``least`` and ``most``, or
    text matching ``pattern``; without any of these, every value of its type.

    ``says``: the sentence shown when a value breaks the rule; if empty, it is made from the bounds.
    ``removed``: replacements by former choice. ``reads``: returns the value of a text, or None if
    the text has no value. ``refused``: returns the reason against a value in the range, "" if there
    is none.
    """

    least: float = -math.inf
    most: float = math.inf
    choices: tuple[Any, ...] = ()
    pattern: str = ""
    says: str = ""
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reads: Callable[[str], Any] | None = None
    refused: Callable[[Any], str] | None = None

    @property
    def bounded(self) -> bool:
        """True if the range leaves out some number."""
        return not (math.isinf(self.least) and math.isinf(self.most))

    def allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.pattern:
            return (
                isinstance(value, str | int) and re.fullmatch(self.pattern, str(value)) is not None
            )
        if not self.bounded:
            return True
        return (
            isinstance(value, (int, float))
            and math.isfinite(value)
            and self.least <= value <= self.most
        )

    @property
    def sentence(self) -> str:
        """The range in words; "" for every value of the type."""
        if self.says:
            return self.says
        if self.choices:
            return "one of " + ", ".join(str(c) for c in self.choices)
        if self.pattern:
            return f"text matching {self.pattern}"
        if not self.bounded:
            return ""
        if math.isinf(self.most):
            return f"{_plain(self.least)} or more"
        return f"between {_plain(self.least)} and {_plain(self.most)}"


UNLIMITED = FieldRule()
"""Every value of a field's type."""


def setting(
    default: T,
    text: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    choices: tuple[Any, ...] = (),
    pattern: str = "",
    says: str = "",
    removed: Mapping[str, str] | None = None,
) -> T:
    """Declare a field of a settings class: its default, its meaning for users in one paragraph, and
    the values it may hold, as in :class:`FieldRule`."""
    return _declared(default, text, FieldRule(least, most, choices, pattern, says, removed or {}))


def text_setting(text: str, *, pattern: str, says: str, refused: Callable[[str], str]) -> str:
    """Declare a text with a grammar of its own, empty by default. ``refused`` returns the fault of
    a value, "" for none."""
    return _declared("", text, FieldRule(pattern=pattern, says=says, refused=refused))


def rate_setting(text: str, *, refused: Callable[[float], str] | None = None) -> float:
    """Declare a limit in bytes a second, which users may write as text ("20Mbit"). The default, 0,
    is no limit."""
    rule = FieldRule(
        least=0,
        says='bytes a second as a number, or such as "20Mbit", "2.5MB", "500k" (20 Mbit are 2.5 '
        "MB); 0 for no limit",
        reads=rate_of,
        refused=refused,
    )
    return _declared(0.0, text, rule)


def _declared(default: T, text: str, rule: FieldRule) -> T:
    return dataclasses.field(default=default, metadata={"text": text, "rule": rule})


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared setting. ``name`` begins with its section ("model.layers"); ``hint``: the type of
    its field."""

    name: str
    hint: Any
    default: Any
    text: str
    rule: FieldRule

    def read(self, text: Any) -> Any:
        """Read a text as :func:`from_text` does."""
        return from_text(text, self.hint)

    def check(self, raw: Any, source: str = "") -> Any:
        """Check a value as :func:`check` does."""
        return check(self.name, raw, self.hint, self.rule, source=source)

    @property
    def type_sentence(self) -> str:
        """The type in words."""
        return type_sentence(self.hint)

    @property
    def range_sentence(self) -> str:
        """The type and the range in words."""
        return _range_sentence(self.hint, self.rule)


_ALIKE = 0.65
"""Ratio of equal characters from which a name counts as a typo of another: "layer" of "layers", not
"hiden" of "tied"."""


def build(kind: type[T], table: Any, section: str, *, source: str = "") -> T:
    """``table`` as an instance of the dataclass ``kind``; missing fields keep their defaults.

    Raises UsageFault naming ``section.field``, the bad value and the allowed ones. ``source`` names
    the origin of the value ("in swarm.toml") and ends the first line.
    """
    if not isinstance(table, Mapping):
        raise UsageFault(
            f"{section or 'the file'} is not a table{_where(source)}", f"write it as  [{section}]"
        )
    known = settings_of({section: kind})
    values: dict[str, Any] = {}
    for key, raw in table.items():
        name = dotted(section, str(key))
        if name not in known:
            raise unknown(name, [*known], source)
        values[key] = known[name].check(raw, source)
    return kind(**values)


def check(name: str, raw: Any, hint: Any, rule: FieldRule = UNLIMITED, *, source: str = "") -> Any:
    """``raw`` as the type ``hint`` (bool, int, float, str, a tuple of str, int or float, or one of
    several of these) if ``rule`` allows it. Raises Removed for a former choice, UsageFault for any
    other bad value."""
    if isinstance(raw, str) and rule.reads is not None:
        found = rule.reads(raw)
        if found is not None:
            raw = found
    value = _typed(raw, hint)
    if value is None:
        step = f"expected {_range_sentence(hint, rule)}"
        raise UsageFault(f"{name} = {show(raw)}{_where(source)}", step)
    if value in rule.removed:
        raise Removed(f"{name} = {show(raw)} was removed{_where(source)}", rule.removed[value])
    if not rule.allows(value):
        raise UsageFault(f"{name} = {show(raw)}{_where(source)}", f"allowed: {rule.sentence}")
    if rule.refused is not None:
        reason = rule.refused(value)
        if reason:
            raise UsageFault(f"{name} = {show(value)}{_where(source)}", reason)
    return value


def from_text(text: Any, hint: Any) -> Any:
    """The value that TOML would give for a text from the environment. Anything but a text, and a
    text that is no TOML value, is returned unchanged."""
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


MOST_LISTED = 30
"""Names that a complaint lists."""


def unknown(name: str, known: list[str], source: str = "") -> UsageFault:
    """The complaint about an unknown name, with the nearest known one."""
    near = _meant(name, known)
    section, dot, _ = name.rpartition(".")
    beside = []
    if dot:
        beside = sorted(k for k in known if k.rpartition(".")[0] == section)
    listed = beside or sorted(known)
    if near:
        hint = f"did you mean  {near}  ?"
    elif len(listed) <= MOST_LISTED:
        hint = "known here: " + ", ".join(listed)
    else:
        hint = "all settings, with their meanings:  tutti config"
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


def settings_of(sections: Mapping[str, type]) -> dict[str, Setting]:
    """Settings of these dataclasses by their dotted names, in the order of the fields, each of
    which is declared by :func:`setting`."""
    found = dict[str, Setting]()
    for section, kind in sections.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            name = dotted(section, field.name)
            text = field.metadata["text"]
            rule = field.metadata["rule"]
            found[name] = Setting(name, hints[field.name], field.default, text, rule)
    return found


def dotted(section: str, key: str) -> str:
    if section:
        return f"{section}.{key}"
    return key


def show(value: Any) -> str:
    """A value as a TOML file would have it, shortened and without control characters."""
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


def _range_sentence(hint: Any, rule: FieldRule) -> str:
    kind = type_sentence(hint)
    if not rule.sentence:
        return kind
    return f"{kind}, {rule.sentence}"


def _where(source: str) -> str:
    if not source:
        return ""
    return f"  ({source})"


def _plain(number: float) -> str:
    if float(number).is_integer() and abs(number) < 1e15:
        return str(int(number))
    return f"{number:g}"
