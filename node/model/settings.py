"""The shape of the model. Part of the manifest."""

from dataclasses import dataclass

DIGEST = "blake3:"
"""Prefix of the hex digits of a stage's digest in a manifest. Digests from before protocol 7 do not
have it."""


@dataclass(frozen=True)
class ModelSettings:
    """A decoder as Llama, Mistral (without a sliding window), Qwen2 or Qwen3."""

    layers: int = 6
    """Transformer blocks, cut into stages as evenly as possible."""
    ends_layers: int = 0
    """First layers that stay at the ends, beside the embedding. Block stages share the others, and
    get the activations of these layers."""
    d_model: int = 128
    """Width of the hidden state."""
    heads: int = 4
    """Query heads."""
    head_width: int = 0
    """Width of a head; 0: d_model // heads."""
    kv_heads: int = 2
    """Key/value heads (grouped-query attention); divides heads."""
    d_ff: int = 384
    """Width of the SwiGLU."""
    vocab: int = 259
    """Token ids; 259 for the built-in byte tokenizer."""
    seq_len: int = 128
    """Tokens a training sequence predicts."""
    positions: int = 0
    """Positions that the model sees, where that is more than ``seq_len``: the positions of the
    model that the run begins from. Exports say so."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    rope_kind: str = "llama3"
    """Rule by which the rotary embedding is scaled, where ``rope_factor`` is not 1: llama3 | linear
    | dynamic | yarn | longrope, as transformers computes them."""
    rope_factor: float = 1.0
    """How many times as slowly the long waves of the rotary embedding turn; 1: as the others."""
    rope_low: float = 1.0
    """Waves that turn less often than this over ``rope_context`` positions are slowed whole, ..."""
    rope_high: float = 4.0
    """... those that turn more often than this are not, and between them in part. Both of llama3
    and yarn."""
    rope_context: int = 8192
    """Positions that the model was trained on before."""
    rope_whole: bool = True
    """yarn: the first and the last wave that are scaled in part are rounded to whole channels."""
    rope_scale: float = 1.0
    """yarn and longrope: factor of cosine and sine."""
    rope_factors: tuple[float, ...] = ()
    """longrope: divisor of each pair's frequency in sequences up to ``rope_context`` positions,
    then the same number of divisors for longer ones."""
    norm_eps: float = 1e-5
    """RMSNorm epsilon."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, as Qwen3."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias, as Qwen2."""
    tied: bool = False
    """Head shares the embedding matrix."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    init_seed: int = 1234
    """Seed of the initial weights; each parameter is drawn from (seed, name), so every cut gives
    the same model."""
    weights: tuple[str, ...] = ()
    """Digests of the stages of a given model, the ends first, each after "blake3:": the run
    begins from it. Empty: from drawn weights."""
    base: str = ""
    """Name on the Hugging Face hub of the model that the run begins from; empty: unknown. Exported
    adapters name it."""
    adapter: int = 0
    """Rank of the adapters (LoRA, arXiv 2106.09685): low-rank matrices that are trained beside
    weights that stay as they are; 0: the weights are trained."""
    adapter_alpha: float = 16.0
    """An adapter's output is multiplied by this over its rank."""
    adapter_targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Matrices of a layer that have one, by their last name."""
