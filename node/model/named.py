"""Shapes of published models by name, as their config.json has them. Enters: a name. Leaves: fields
of the manifest's ``model``. Never: weights.

Sequences are as long as the manifest says: what a model was published for is more than the card of
a volunteer holds.
"""

from __future__ import annotations

from typing import Any

from node.core.errors import UsageFault

_QWEN3 = {
    "vocab": 151_936,
    "kv_heads": 8,
    "head_width": 128,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qk_norm": True,
}
_QWEN2 = {"vocab": 151_936, "rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True}
_LLAMA3 = {"vocab": 128_256, "kv_heads": 8, "rope_theta": 5e5, "norm_eps": 1e-5}


def _shape(layers: int, d_model: int, heads: int, d_ff: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "d_model": d_model, "heads": heads, "d_ff": d_ff, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(28, 1024, 16, 3072, tied=True, **_QWEN3),
    "qwen3-1.7b": _shape(28, 2048, 16, 6144, tied=True, **_QWEN3),
    "qwen3-4b": _shape(36, 2560, 32, 9728, tied=True, **_QWEN3),
    "qwen3-8b": _shape(36, 4096, 32, 12_288, **_QWEN3),
    "qwen3-14b": _shape(40, 5120, 40, 17_408, **_QWEN3),
    "qwen3-32b": _shape(64, 5120, 64, 25_600, **_QWEN3),
    "qwen2.5-0.5b": _shape(24, 896, 14, 4864, kv_heads=2, tied=True, **_QWEN2),
    "qwen2.5-1.5b": _shape(28, 1536, 12, 8960, kv_heads=2, tied=True, **_QWEN2),
    "llama-3.2-1b": _shape(16, 2048, 32, 8192, tied=True, rope_factor=32.0, **_LLAMA3),
    "llama-3.2-3b": _shape(28, 3072, 24, 8192, tied=True, rope_factor=32.0, **_LLAMA3),
    "llama-3.1-8b": _shape(32, 4096, 32, 14_336, rope_factor=8.0, **_LLAMA3),
    "mistral-7b": _shape(
        32, 4096, 32, 14_336, vocab=32_768, kv_heads=8, rope_theta=1e6, norm_eps=1e-5
    ),
}
"""Fields of :class:`~node.model.settings.ModelSettings`; of others the defaults. Mistral: 0.3."""


def shape_named(name: str) -> dict[str, Any]:
    """The fields. Raises UsageFault for a name that is not known."""
    found = SHAPES.get(name.lower())
    if found is None:
        raise UsageFault(f"no shape is known as {name!r}", f"choose one of {', '.join(SHAPES)}")
    return dict(found)
