"""Parameters of each stage and their sizes; the shapes of published models by name. No tensor
library, so that planners may ask.

Stage 0 (the ends) holds the embedding, the final norm and the head, and with ``ends_layers`` the
first transformer layers; block stage s = 1..S holds a contiguous range of the others. Names equal
the ones of Hugging Face's Llama and Qwen3, with global layer numbers, so that the stages' tensors
merge into one whole model by union.
"""

import math
from itertools import pairwise
from typing import Any

from node.core.errors import UsageFault, refuse
from node.core.ids import ENDS
from node.model.settings import ModelSettings

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a layer, by the last part of their names."""


def check_settings(settings: ModelSettings) -> None:
    """Raises UsageFault naming the field, where fields do not go together. The manifest checks each
    field by itself."""
    m = settings
    targets = settings.adapter_targets
    refuse(
        (
            m.head_width % 2,
            f"model.head_width = {m.head_width}",
            "give an even number, or 0 for d_model // heads",
        ),
        (
            not m.head_width and m.d_model % (2 * m.heads),
            f"model.heads = {m.heads} does not cut model.d_model = {m.d_model} into heads of even "
            "width (rotary pairs)",
            "make model.d_model a multiple of 2 x model.heads, or give model.head_width",
        ),
        (
            m.heads % m.kv_heads,
            f"model.kv_heads = {m.kv_heads} does not divide model.heads = {m.heads}",
            "make model.heads a multiple of model.kv_heads",
        ),
        (
            m.ends_layers >= m.layers,
            f"model.ends_layers = {m.ends_layers} of model.layers = {m.layers}",
            f"at most {m.layers - 1}: block stages need a layer",
        ),
        (
            m.rope_low >= m.rope_high,
            f"model.rope_low = {m.rope_low} is not less than model.rope_high = {m.rope_high}",
            "make it less",
        ),
        (
            m.rope_kind in ("dynamic", "yarn") and head_dim(m) <= 2,
            f"model.rope_kind = {m.rope_kind} with heads of width {head_dim(m)}",
            "make the heads wider",
        ),
        (
            m.rope_kind == "yarn" and m.rope_theta <= 1.0,
            f"model.rope_theta = {m.rope_theta} with model.rope_kind = yarn",
            "make it more than 1",
        ),
        (
            (m.rope_kind == "longrope") != bool(m.rope_factors)
            or len(m.rope_factors) not in (0, head_dim(m)),
            f"model.rope_factors has {len(m.rope_factors)} numbers with model.rope_kind = "
            f"{m.rope_kind}",
            f"longrope needs {head_dim(m)}, half of them for longer sequences; others need none",
        ),
        (
            not all(1e-3 <= factor <= 1e6 for factor in m.rope_factors),
            "model.rope_factors",
            "must be numbers between 0.001 and 1000000",
        ),
        (
            m.qk_norm and m.qkv_bias,
            "model.qkv_bias = true with model.qk_norm = true",
            "leave out one: no model that others load has both",
        ),
        (
            m.adapter
            and (not targets or len({*targets}) < len(targets) or not {*targets} <= {*MATRICES}),
            f"model.adapter_targets = {list(targets)}",
            f"name some of {', '.join(MATRICES)}, each once",
        ),
    )


def head_dim(settings: ModelSettings) -> int:
    """Width of one attention head."""
    return settings.head_width or settings.d_model // settings.heads


def layer_cut(settings: ModelSettings, stages: int) -> list[range]:
    """The layers of block stages 1..``stages`` in order: contiguous, lengths differing by at most
    one, longer first.

    Raises UsageFault when a stage would be left without a layer.
    """
    check_settings(settings)
    first = settings.ends_layers
    shared = settings.layers - first
    if not 1 <= stages <= shared:
        raise UsageFault(
            f"{shared} layers cannot be cut into {stages} stages",
            f"choose pipeline.stages between 1 and {shared}",
        )
    size, longer = divmod(shared, stages)
    starts = (first + s * size + min(s, longer) for s in range(stages + 1))
    return [range(a, b) for a, b in pairwise(starts)]


def layers_of(settings: ModelSettings, stages: int, stage: int) -> range:
    """The layers of ``stage``; the layers of the ends come before block stage 1."""
    if stage == ENDS:
        return range(settings.ends_layers)
    return layer_cut(settings, stages)[stage - 1]


def layers_said(settings: ModelSettings, stages: int, stage: int) -> str:
    """The layers of ``stage`` for people: "2-3"; of the ends "embedding, head", with its layers in
    between."""
    layers = layers_of(settings, stages, stage)
    said = f"{layers.start}-{layers.stop - 1}"
    if stage != ENDS:
        return said
    if layers:
        return f"embedding, {said}, head"
    return "embedding, head"


def ends_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Parameters of stage 0 beside its layers; a tied head has no tensor of its own."""
    matrix = (settings.vocab, settings.d_model)
    shapes = {EMBEDDING: matrix, FINAL_NORM: (settings.d_model,)}
    if not settings.tied:
        shapes[HEAD] = matrix
    return shapes


def layer_shapes(settings: ModelSettings, layer: int) -> dict[str, tuple[int, ...]]:
    """Parameters of one transformer layer. Matrices are [out, in], as in torch's Linear."""
    d = settings.d_model
    hd = head_dim(settings)
    q = settings.heads * hd
    kv = settings.kv_heads * hd
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (settings.d_ff, d),
        "mlp.up_proj.weight": (settings.d_ff, d),
        "mlp.down_proj.weight": (d, settings.d_ff),
    }
    if settings.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
        }
    if settings.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (hd,), "self_attn.k_norm.weight": (hd,)}
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def base_shapes(settings: ModelSettings, stages: int, stage: int) -> dict[str, tuple[int, ...]]:
    """Name to shape of everything ``stage`` holds of the model itself, cut into ``stages`` block
    stages.

    Raises UsageFault for a cut or a stage number that does not exist.
    """
    layer_cut(settings, stages)
    if not ENDS <= stage <= stages:
        raise UsageFault(f"there is no stage {stage}", f"choose a stage between 0 and {stages}")
    shapes = dict[str, tuple[int, ...]]()
    if stage == ENDS:
        shapes = ends_shapes(settings)
    for layer in layers_of(settings, stages, stage):
        shapes |= layer_shapes(settings, layer)
    return shapes


def parameter_shapes(
    settings: ModelSettings, stages: int, stage: int
) -> dict[str, tuple[int, ...]]:
    """Name to shape of the trained parameters of ``stage``: all, or the adapters of its layers.
    Raises UsageFault as :func:`base_shapes`."""
    base = base_shapes(settings, stages, stage)
    if not settings.adapter:
        return base
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in base.items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in settings.adapter_targets and path != name:
            shapes[f"{path}.lora_A.weight"] = (settings.adapter, shape[1])
            shapes[f"{path}.lora_B.weight"] = (shape[0], settings.adapter)
    return shapes


def all_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Name to shape of the whole model, without adapters."""
    return base_shapes(settings, 1, 0) | base_shapes(settings, 1, 1)


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    """Numbers held by parameters of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


# Published models, as their config.json has them. Sequences are as long as the manifest says: what
# a model was published for is more than the card of a volunteer holds.
# ------------------------------------------------------------

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
