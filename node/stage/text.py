"""The ends' view of the data: positions of the plan to tensors, and the held-out batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from node.data.marks import CONTEXT, LAST, ids_in
from node.data.order import SampleOrder
from node.data.sources import Corpus, Ids
from node.data.streamed.stream import Stream
from node.model.documents import NO_TARGET, UNTRAINED

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Text:
    """Samples of a corpus that is here as a whole; ``size``: sequences of a micro-batch."""

    corpus: Corpus
    order: SampleOrder
    size: int

    @property
    def trouble(self) -> str:
        """The reason why text cannot be had, empty for none."""
        return ""

    def at(self, samples: Sequence[int]) -> Batch:
        """(tokens, targets) of the samples at these positions: int64 [B, T] each, targets one token
        ahead."""
        return self._windows(self.corpus.train, map(self.order.sample, samples))

    def expect(self, samples: Iterable[int]) -> None:
        """Announce that the samples at these positions are wanted soon."""

    async def fetch(self, samples: Sequence[int]) -> Callable[[], Batch]:
        """Wait until the samples at these positions can be had. Returns a function that makes their
        batch on any thread."""
        return partial(self.at, samples)

    def held_out_count(self) -> int:
        """Whole micro-batches of held-out text, at least 1 when there is any."""
        return _batches(self.corpus.held_out_windows, self.size)

    def held_out(self, i: int) -> Batch:
        """The ``i``-th held-out micro-batch, in text order and round again at the end."""
        count = self.corpus.held_out_windows
        return self._windows(
            self.corpus.held_out, ((i * self.size + j) % count for j in range(self.size))
        )

    async def fetch_held_out(self, i: int) -> Batch:
        """The same as :meth:`held_out`."""
        return self.held_out(i)

    async def close(self) -> None:
        """Release open resources."""

    def _windows(self, text: Ids, windows: Iterable[int]) -> Batch:
        length = self.corpus.seq_len
        rows = np.stack([np.asarray(text[w * length : (w + 1) * length + 1]) for w in windows])
        return pair(rows.astype(np.int64), self.corpus.end, self.corpus.marked)


@dataclass(frozen=True)
class StreamedText:
    """Samples of a stream, in place of a corpus; see :class:`Text`."""

    stream: Stream
    size: int

    @property
    def trouble(self) -> str:
        return self.stream.trouble

    def expect(self, samples: Iterable[int]) -> None:
        self.stream.expect(samples)

    async def fetch(self, samples: Sequence[int]) -> Callable[[], Batch]:
        rows = await self.stream.rows(samples)
        return partial(pair, rows, self.stream.end, self.stream.marked)

    def held_out_count(self) -> int:
        return _batches(self.stream.held_out_windows, self.size)

    async def fetch_held_out(self, i: int) -> Batch:
        rows = await self.stream.held_out_rows(i, self.size)
        return pair(rows, self.stream.end, self.stream.marked)

    async def close(self) -> None:
        await self.stream.close()


Samples = Text | StreamedText


def pair(rows: np.ndarray, end: int | None, marked: bool = False) -> Batch:
    """(tokens, targets) of token ids, int64 [B, T + 1]. A token ``end`` has no target, because the
    next token belongs to another document; None: every token has one.

    ``marked``: the ids carry the marks of :mod:`node.data.marks`. A target marked CONTEXT is not
    trained on; ``end`` is then the mark LAST, or None.
    """
    both = torch.from_numpy(rows)
    tokens = both[:, :-1].contiguous()
    targets = both[:, 1:].contiguous()
    if not marked:
        if end is not None:
            targets.masked_fill_(tokens == end, NO_TARGET)
        return tokens, targets
    context = (targets & CONTEXT) != 0
    targets = ids_in(targets).masked_fill_(context, UNTRAINED)
    if end is not None:
        targets.masked_fill_((tokens & LAST) != 0, NO_TARGET)
    return ids_in(tokens), targets


def _batches(windows: int, size: int) -> int:
    return max(1, windows // size) if windows else 0
