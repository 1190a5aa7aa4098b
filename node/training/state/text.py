"""The ends' view of the data: positions of the plan to tensors, and the held-out batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from node.data.batches import batch, held_out_batch, pair
from node.data.order import SampleOrder
from node.data.sources import Corpus
from node.data.streamed.stream import Stream

Batch = tuple[Tensor, Tensor]


class Samples(ABC):
    """Micro-batches of (tokens, targets), int64 [B, T] each; ``size``: sequences of one."""

    size: int

    def expect(self, samples: Iterable[int]) -> None:  # noqa: B027 - only some have to
        """The samples at these positions are wanted soon."""

    @abstractmethod
    async def fetch(self, samples: Sequence[int]) -> Callable[[], Batch]:
        """What makes the batch of the samples at these positions, on any thread; waits until they
        can be had."""

    @abstractmethod
    def held_out_count(self) -> int:
        """Whole micro-batches of held-out text, at least 1 when there is any."""

    @abstractmethod
    async def fetch_held_out(self, i: int) -> Batch:
        """The ``i``-th held-out micro-batch."""

    async def close(self) -> None:  # noqa: B027 - only some have to
        """Let go of what is kept open."""


@dataclass(frozen=True)
class Text(Samples):
    """Samples of a corpus that is here as a whole."""

    corpus: Corpus
    order: SampleOrder
    size: int

    def at(self, samples: Sequence[int]) -> Batch:
        """(tokens, targets), int64 [B, T], of the samples at these positions."""
        return batch(self.corpus, self.order, samples)

    async def fetch(self, samples: Sequence[int]) -> Callable[[], Batch]:
        return partial(self.at, samples)

    def held_out_count(self) -> int:
        return _batches(self.corpus.held_out_windows, self.size)

    def held_out(self, i: int) -> Batch:
        """The ``i``-th held-out micro-batch."""
        return held_out_batch(self.corpus, i, self.size)

    async def fetch_held_out(self, i: int) -> Batch:
        return self.held_out(i)


@dataclass(frozen=True)
class StreamedText(Samples):
    """Samples of a stream."""

    stream: Stream
    size: int

    def expect(self, samples: Iterable[int]) -> None:
        self.stream.expect(samples)

    async def fetch(self, samples: Sequence[int]) -> Callable[[], Batch]:
        return partial(pair, await self.stream.rows(samples), self.stream.end)

    def held_out_count(self) -> int:
        return _batches(self.stream.held_out_windows, self.size)

    async def fetch_held_out(self, i: int) -> Batch:
        return pair(await self.stream.held_out_rows(i, self.size), self.stream.end)

    async def close(self) -> None:
        await self.stream.close()


def _batches(windows: int, size: int) -> int:
    return max(1, windows // size) if windows else 0
