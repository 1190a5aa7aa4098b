"""Shapes of the Qwen3 dense models (arXiv 2505.09388), in the forms planners meet them: data for
tests and benchmarks.

*Split* is the published checkpoint form: q, k, v, o, gate, up and down are matrices of their own.
*Fused* is the form of tensor-parallel trainers: q, k and v of each key-value group are one matrix,
gate and up are one.
"""

from dataclasses import dataclass
from typing import Literal

from node.partition.matrices import Matrix

Splits = Literal["none", "parts", "heads"]


@dataclass(frozen=True)
class Model:
    """Sizes of one dense model; ``feed`` is the width of its feed-forward block."""

    hidden: int
    layers: int
    heads: int
    kv: int
    feed: int
    head: int = 128


MODELS = {
    "0.6B": Model(1024, 28, 16, 8, 3072),
    "1.7B": Model(2048, 28, 16, 8, 6144),
    "4B": Model(2560, 36, 32, 8, 9728),
    "8B": Model(4096, 36, 32, 8, 12288),
    "14B": Model(5120, 40, 40, 8, 17408),
    "32B": Model(5120, 64, 64, 8, 25600),
}


def split_form(model: Model, per_head: bool = False) -> list[Matrix]:
    """Seven matrices a layer; ``per_head``: q, k and v are split into their heads."""
    made: list[Matrix] = []
    q = model.heads * model.head
    kv = model.kv * model.head
    for i in range(model.layers):
        for name, rows, cols in (
            ("q", q, model.hidden),
            ("k", kv, model.hidden),
            ("v", kv, model.hidden),
            ("o", model.hidden, q),
            ("gate", model.feed, model.hidden),
            ("up", model.feed, model.hidden),
            ("down", model.hidden, model.feed),
        ):
            heads = (
                tuple((str(h), model.head) for h in range(rows // model.head))
                if per_head and name in "qkv"
                else ()
            )
            made.append(Matrix(f"{i:02}.{name}", rows, cols, heads))
    return made


def fused_form(model: Model, splits: Splits = "none", tensor: int = 1) -> list[Matrix]:
    """Four matrices a layer in the order of registration: proj, qkv, fc1, fc2.

    `splits`: none; parts (q, k, v and gate, up); heads (each head, and gate, up). `tensor` above 1
    gives the shard of one of `tensor` tensor-parallel ranks: qkv and fc1 are cut along rows, proj
    and fc2 along columns; only unsplit.
    """
    made: list[Matrix] = []
    q = model.heads * model.head
    kv = model.kv * model.head
    f = model.feed
    qkv: tuple[tuple[str, int], ...] = ()
    fc1: tuple[tuple[str, int], ...] = ()
    if splits == "parts":
        qkv = (("q", q), ("k", kv), ("v", kv))
    elif splits == "heads":
        qkv = tuple((str(h), model.head) for h in range(model.heads + 2 * model.kv))
    if splits != "none":
        fc1 = (("gate", f), ("up", f))
    for i in range(model.layers):
        made.append(Matrix(f"{i:02}.proj", model.hidden, q // tensor))
        made.append(Matrix(f"{i:02}.qkv", (q + 2 * kv) // tensor, model.hidden, qkv))
        made.append(Matrix(f"{i:02}.fc1", 2 * f // tensor, model.hidden, fc1))
        made.append(Matrix(f"{i:02}.fc2", model.hidden, f // tensor))
    return made
