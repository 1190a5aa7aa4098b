"""Positions to tensors: the micro-batches an ends peer feeds into the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from node.core.errors import UsageFault
from node.data.order import SampleOrder
from node.data.sources import Corpus, Ids
from node.model.documents import NO_TARGET


def batch(corpus: Corpus, order: SampleOrder, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the samples at ``positions``: int64 [B, T] each, targets one token
    ahead."""
    return _tensors(corpus, corpus.train, [order.sample(p) for p in positions])


def held_out_batch(corpus: Corpus, i: int, size: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the ``i``-th batch of ``size`` held-out windows, in text order and round
    again at the end.

    Raises UsageFault when nothing is held out.
    """
    if not corpus.held_out_windows:
        raise UsageFault(
            "no text is held out", "set data.holdout above 0, or training.eval_every to 0"
        )
    windows = [(i * size + j) % corpus.held_out_windows for j in range(size)]
    return _tensors(corpus, corpus.held_out, windows)


def _tensors(corpus: Corpus, text: Ids, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
    length = corpus.seq_len
    rows = np.stack([np.asarray(text[w * length : (w + 1) * length + 1]) for w in windows])
    return pair(rows.astype(np.int64), corpus.end)


def pair(rows: np.ndarray, end: int | None) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of token ids, int64 [B, T + 1]. A token ``end`` has no target: what follows
    is another document; None: every token has one."""
    both = torch.from_numpy(rows)
    tokens, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    return tokens, targets if end is None else targets.masked_fill_(tokens == end, NO_TARGET)
