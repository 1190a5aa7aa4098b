"""The rotary embedding (arXiv 2104.09864) in its kinds: read from a config.json, computed, written.

Enters: config.json of a Hugging Face model, or the settings of a run. Leaves: fields of the
settings; angles per position; fields of a config.json. Never: a kind that is computed otherwise
than transformers computes it; those are refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from node.core.errors import refuse
from node.model.settings import ModelSettings
from node.model.shapes import head_dim

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_BUILT = f"{', '.join(KINDS)} are built here"
_BASE = 10_000.0
"""Base of a model that names none."""
_FAST = 32.0
_SLOW = 1.0
"""Turns over the context between which YaRN scales a wave in part, where a config names none."""


# ------------------------------------------------------------ from a config


def rope_fields(config: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Fields of :class:`ModelSettings` for the rotary embedding of a config.json. ``most``: the
    longest sequence of that model. As in transformers, a ``rope_scaling`` that is not empty
    replaces ``rope_parameters``.

    Raises UsageFault for a kind that is not built here, KeyError for a missing number, TypeError
    for a value of another type.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_parameters is {type(rope).__name__}, not a table")
    nested = sorted({str(name) for name in config.get("layer_types") or ()} & rope.keys())
    refuse((nested, f"the rotary embedding differs between layers: {nested}", _BUILT))
    kind = rope.get("rope_type", rope.get("type", "default"))
    refuse((kind not in KINDS, f"the rotary embedding is of the kind {kind!r}", _BUILT))
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    refuse((part not in (None, 1), "the rotary embedding turns a part of each head", _BUILT))
    base = rope.get("rope_theta") or config.get("rope_theta") or _BASE
    fields: dict[str, Any] = {"rope_theta": base}
    if kind == "default":
        return fields
    if kind != "llama3":  # the kind of a manifest that names none
        fields["rope_kind"] = kind
    before = config.get("original_max_position_embeddings")
    before = before or rope.get("original_max_position_embeddings") or most
    if kind == "linear":
        return fields | {"rope_factor": rope["factor"]}
    if kind == "dynamic":
        return fields | {"rope_factor": rope["factor"], "rope_context": most}
    if kind == "llama3":
        return fields | {
            "rope_factor": rope["factor"],
            "rope_low": rope["low_freq_factor"],
            "rope_high": rope["high_freq_factor"],
            "rope_context": before,
        }
    if kind == "yarn":
        factor = rope["factor"]
    else:
        factor = rope.get("factor")
    if factor is None:
        factor = most / before
    fields |= {"rope_factor": factor, "rope_context": before}
    if kind == "yarn":
        return fields | {
            "rope_low": rope.get("beta_slow") or _SLOW,
            "rope_high": rope.get("beta_fast") or _FAST,
            "rope_whole": bool(rope.get("truncate", True)),
            "rope_scale": _yarn_scale(rope, factor),
        }
    return fields | {
        "rope_factors": (*rope["short_factor"], *rope["long_factor"]),
        "rope_scale": _longrope_scale(rope, factor, before),
    }


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    """Factor of cosine and sine, as the YaRN paper (arXiv 2309.00071) and DeepSeek have it."""
    given = rope.get("attention_factor")
    if given is not None:
        return given
    over = rope.get("mscale")
    under = rope.get("mscale_all_dim")
    if over and under:
        return _grown(factor, over) / _grown(factor, under)
    return _grown(factor, 1.0)


def _grown(factor: float, share: float) -> float:
    if factor > 1.0:
        return 0.1 * share * math.log(factor) + 1.0
    return 1.0


def _longrope_scale(rope: Mapping[str, Any], factor: float, before: int) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return given
    if factor > 1.0:
        return math.sqrt(1.0 + math.log(factor) / math.log(before))
    return 1.0


# ------------------------------------------------------------ computed


def regime(settings: ModelSettings, length: int) -> int:
    """Number of the tables that sequences of ``length`` positions use: two lengths of one number
    share their tables."""
    beyond = length > settings.rope_context
    if settings.rope_kind == "dynamic":
        return length if beyond else 0
    return int(settings.rope_kind == "longrope" and beyond)


def frequencies(settings: ModelSettings, length: int = 1) -> Tensor:
    """Radians a position of every pair of channels [W / 2], fp32, in a sequence of ``length``
    positions. The formulas equal transformers'."""
    s = settings
    width = head_dim(s)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    kind = s.rope_kind
    if kind == "longrope":
        half = len(s.rope_factors) // 2
        chosen = s.rope_factors[:half]
        if regime(s, length):
            chosen = s.rope_factors[half:]
        return 1.0 / (torch.tensor(chosen) * s.rope_theta**exponents)
    if kind == "dynamic":
        stretched = s.rope_factor * max(length, s.rope_context) / s.rope_context
        grown = stretched - (s.rope_factor - 1.0)
        return 1.0 / ((s.rope_theta * grown ** (width / (width - 2))) ** exponents)
    plain = 1.0 / (s.rope_theta**exponents)
    if s.rope_factor == 1.0:
        return plain
    if kind == "linear":
        return plain / s.rope_factor
    if kind == "yarn":
        kept = _kept_by_yarn(s, width)
        return plain / s.rope_factor * (1 - kept) + plain * kept
    turns = s.rope_context / (2 * math.pi / plain)
    share = ((turns - s.rope_low) / (s.rope_high - s.rope_low)).clamp(0.0, 1.0)
    return (1 - share) * plain / s.rope_factor + share * plain


def _kept_by_yarn(s: ModelSettings, width: int) -> Tensor:
    """Share of each frequency [W / 2] that YaRN keeps."""

    def channel(turns: float) -> float:
        """Channel of the wave with this number of turns over the context."""
        wave = s.rope_context / (turns * 2 * math.pi)
        return width * math.log(wave) / (2 * math.log(s.rope_theta))

    low = channel(s.rope_high)
    high = channel(s.rope_low)
    if s.rope_whole:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0.0, 1.0)


# ------------------------------------------------------------ into a config


def rope_config(settings: ModelSettings) -> dict[str, Any] | None:
    """``rope_scaling`` of a config.json, None for an embedding without scaling."""
    s = settings
    kind = s.rope_kind
    found: dict[str, Any] = {"rope_type": kind, "factor": s.rope_factor}
    if kind == "longrope":
        half = len(s.rope_factors) // 2
        return found | {
            "short_factor": list(s.rope_factors[:half]),
            "long_factor": list(s.rope_factors[half:]),
            "attention_factor": s.rope_scale,
            "original_max_position_embeddings": s.rope_context,
        }
    if kind == "yarn":
        return found | {
            "beta_fast": s.rope_high,
            "beta_slow": s.rope_low,
            "truncate": s.rope_whole,
            "attention_factor": s.rope_scale,
            "original_max_position_embeddings": s.rope_context,
        }
    if s.rope_factor == 1.0:
        return None
    if kind == "llama3":
        return found | {
            "low_freq_factor": s.rope_low,
            "high_freq_factor": s.rope_high,
            "original_max_position_embeddings": s.rope_context,
        }
    return found
