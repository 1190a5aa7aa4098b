"""One sample as the model sees it: token ids, which of them are trained on, where documents end.
Enters: a corpus or a stream. Never: torch, which takes its time to load.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from node.core.errors import UsageFault
from node.data.marks import CONTEXT, LAST, ids_in
from node.data.order import SampleOrder
from node.data.sources import Corpus
from node.data.streamed.stream import Stream


@dataclass(frozen=True)
class Sample:
    """``ids`` [T + 1] of one sample. ``trained``: the token is a target; ``ends``: the next token
    belongs to another document, from which it cannot be seen."""

    ids: np.ndarray
    trained: np.ndarray
    ends: np.ndarray

    def runs(self) -> Iterator[tuple[np.ndarray, bool, bool]]:
        """Ids of the parts of a sample in order, whether they are trained on, and whether a
        document ends behind them. The first token, which nothing predicts, counts as its
        neighbour."""
        trained = self.trained.copy()
        trained[:1] = trained[1:2]
        cuts = np.flatnonzero(np.diff(trained) | self.ends[:-1]) + 1
        for start, stop in zip([0, *cuts], [*cuts, len(self.ids)], strict=True):
            yield self.ids[start:stop], bool(trained[start]), bool(self.ends[stop - 1])


def sample_of(row: np.ndarray, end: int | None, marked: bool) -> Sample:
    """The sample of a row of ids, as :func:`node.stage.text.pair` takes them."""
    row = row.astype(np.int64)
    ends = np.zeros(len(row), dtype=bool)
    if marked:
        ids = ids_in(row)
        trained = (row & CONTEXT) == 0
        if end is not None:
            ends = (row & LAST) != 0
    else:
        ids = row
        trained = np.ones(len(row), dtype=bool)
        if end is not None:
            ends = row == end
    trained[:1] = False
    trained[1:] &= ~ends[:-1]
    return Sample(ids, trained, ends)


def samples_at(found: Corpus | Stream, positions: Sequence[int], seed: int) -> list[Sample]:
    """The samples at these positions of the run, from 0. Blocks; a stream is closed afterwards.
    Raises UsageFault for a position below 0."""
    if min(positions) < 0:
        raise UsageFault("samples are counted from 1", "give 1, 2, 3, …")
    rows = None
    if isinstance(found, Stream):
        rows = _rows(found, positions)
    if isinstance(found, Corpus):
        order = SampleOrder(found.windows, seed)
        length = found.seq_len
        windows = [order.sample(position) for position in positions]
        rows = [np.asarray(found.train[w * length : (w + 1) * length + 1]) for w in windows]
    return [sample_of(row, found.end, found.marked) for row in rows or ()]


def _rows(stream: Stream, positions: Sequence[int]) -> list[np.ndarray]:
    async def fetched() -> np.ndarray:
        try:
            return await stream.rows(positions)
        finally:
            await stream.close()

    return list(asyncio.run(fetched()))
