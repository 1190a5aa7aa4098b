"""The shape of the model. Part of the manifest."""

from dataclasses import dataclass

from node.core.tables import setting

DIGEST = "blake3:"
"""Prefix of the hex digits of a stage's digest in a manifest. Digests from before protocol 7 do not
have it."""


@dataclass(frozen=True)
class ModelSettings:
    """A decoder as Llama, Mistral (without a sliding window), Qwen2 or Qwen3."""

    layers: int = setting(
        6, "Transformer blocks, cut into stages as evenly as possible.", least=1, most=4096
    )
    ends_layers: int = setting(
        0,
        "First layers that stay at the ends, beside the embedding. Block stages share the others, "
        "and get the activations of these layers.",
        least=0,
        most=4095,
    )
    d_model: int = setting(128, "Width of the hidden state.", least=8, most=65536)
    heads: int = setting(4, "Query heads.", least=1, most=1024)
    head_width: int = setting(0, "Width of a head; 0: d_model // heads.", least=0, most=65536)
    kv_heads: int = setting(
        2, "Key/value heads (grouped-query attention); divides heads.", least=1, most=1024
    )
    d_ff: int = setting(384, "Width of the SwiGLU.", least=8, most=1 << 20)
    vocab: int = setting(
        259, "Token ids; 259 for the built-in byte tokenizer.", least=2, most=1 << 22
    )
    seq_len: int = setting(
        128, "Number of tokens that a training sequence predicts.", least=2, most=1 << 20
    )
    positions: int = setting(
        0,
        "Number of positions that the model accepts, if that is more than seq_len: the positions "
        "of the model from which the run begins. Exports contain it.",
        least=0,
        most=1 << 24,
    )
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.", least=1.0, most=1e12)
    rope_kind: str = setting(
        "llama3",
        "Rule by which the rotary embedding is scaled, where rope_factor is not 1: llama3 | linear "
        "| dynamic | yarn | longrope, as transformers computes them.",
        choices=("llama3", "linear", "dynamic", "yarn", "longrope"),
    )
    rope_factor: float = setting(
        1.0,
        "Factor by which the long waves of the rotary embedding turn more slowly; 1: no scaling.",
        least=1.0,
        most=1e6,
    )
    rope_low: float = setting(
        1.0,
        "Waves that turn fewer times than this over rope_context positions are slowed by the "
        "whole factor. For llama3 and yarn.",
        least=0.01,
        most=1e6,
    )
    rope_high: float = setting(
        4.0,
        "Waves that turn more times than this over rope_context positions are not slowed; waves "
        "between the two bounds are slowed in part. For llama3 and yarn.",
        least=0.01,
        most=1e6,
    )
    rope_context: int = setting(
        8192, "Number of positions on which the model was trained before.", least=2, most=1 << 24
    )
    rope_whole: bool = setting(
        True,
        "yarn: the first and the last wave that are scaled in part are rounded to whole channels.",
    )
    rope_scale: float = setting(
        1.0, "yarn and longrope: factor of cosine and sine.", least=1e-3, most=1e3
    )
    rope_factors: tuple[float, ...] = setting(
        (),
        "longrope: divisor of each pair's frequency in sequences up to rope_context positions, "
        "then the same number of divisors for longer ones.",
    )
    norm_eps: float = setting(1e-5, "RMSNorm epsilon.", least=1e-12, most=0.1)
    qk_norm: bool = setting(False, "RMSNorm on queries and keys, as Qwen3.")
    qkv_bias: bool = setting(False, "Queries, keys and values have a bias, as Qwen2.")
    tied: bool = setting(False, "Head shares the embedding matrix.")
    init_std: float = setting(
        0.02, "Standard deviation of the initial weights.", least=1e-6, most=10.0
    )
    init_seed: int = setting(
        1234,
        "Seed of the initial weights; each parameter is drawn from (seed, name), so every cut "
        "gives the same model.",
        least=0,
        most=2**63 - 1,
    )
    weights: tuple[str, ...] = setting(
        (),
        'Digests of the stages of a given model, the ends first, each after "blake3:": the run '
        "begins from it. Empty: from drawn weights.",
    )
    base: str = setting(
        "",
        "Name on the Hugging Face hub of the model that the run begins from; empty: unknown. "
        "Exported adapters name it.",
        pattern=r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?)?",
        says="ORGANISATION/NAME on the Hugging Face hub, or empty",
    )
    adapter: int = setting(
        0,
        "Rank of the adapters (LoRA, arXiv 2106.09685): low-rank matrices that are trained beside"
        " frozen weights; 0: the weights are trained.",
        least=0,
        most=4096,
    )
    adapter_alpha: float = setting(
        16.0, "An adapter's output is multiplied by this over its rank.", least=1e-6, most=1e6
    )
    adapter_targets: tuple[str, ...] = setting(
        ("q_proj", "v_proj"),
        "Matrices of a layer that have an adapter, by the last part of their names.",
    )
