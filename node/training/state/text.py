"""The ends' view of the data: positions of the plan to tensors, and the held-out batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from node.data.batches import batch, held_out_batch
from node.data.order import SampleOrder
from node.data.sources import Corpus


@dataclass(frozen=True)
class Text:
    """``size``: sequences of one micro-batch."""

    corpus: Corpus
    order: SampleOrder
    size: int

    def at(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(tokens, targets), int64 [B, T], of the samples at these positions."""
        return batch(self.corpus, self.order, samples)

    def held_out_count(self) -> int:
        """Whole micro-batches of held-out text, at least 1 when there is any."""
        windows = self.corpus.held_out_windows
        return max(1, windows // self.size) if windows else 0

    def held_out(self, i: int) -> tuple[Tensor, Tensor]:
        """The ``i``-th held-out micro-batch."""
        return held_out_batch(self.corpus, i, self.size)
