"""Positions to tensors: the micro-batches an ends peer feeds into the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from node.core.errors import UsageFault
from node.data.order import SampleOrder
from node.data.sources import Corpus


def batch(corpus: Corpus, order: SampleOrder, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the samples at ``positions``: int64 [B, T] each, targets one token
    ahead."""
    return _tensors(corpus.train, corpus.seq_len, [order.sample(p) for p in positions])


def held_out_batch(corpus: Corpus, i: int, size: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the ``i``-th batch of ``size`` held-out windows, in text order and round
    again at the end.

    Raises UsageFault when nothing is held out.
    """
    if not corpus.held_out_windows:
        raise UsageFault(
            "no text is held out", "set data.holdout above 0, or training.eval_every to 0"
        )
    return _tensors(
        corpus.held_out,
        corpus.seq_len,
        [(i * size + j) % corpus.held_out_windows for j in range(size)],
    )


def _tensors(text: np.ndarray, seq_len: int, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
    return pair(
        np.stack([text[w * seq_len : (w + 1) * seq_len + 1] for w in windows]).astype(np.int64)
    )


def pair(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of token ids, int64 [B, T + 1]."""
    both = torch.from_numpy(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
