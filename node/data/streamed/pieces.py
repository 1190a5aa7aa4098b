"""Places of samples in the shards: pure arithmetic on the sizes of the shards.

The shards, one behind the other, are cut into *pieces* of :data:`PIECE` bytes as stored. Every
piece gives the same number of windows, spread evenly over its tokens. So a position leads to its
bytes without a count of the tokens before it, and any peer can start anywhere. Where a piece has
fewer tokens than its windows together, neighbours overlap; where it has more, tokens between them
are left out.

Positions go round ``lanes`` pieces in turn, which mixes their samples. The classes of positions
that cells hold are classes of lanes, too: cells that share a run read different pieces.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from node.core.errors import refuse
from node.data.order import SampleOrder

PIECE = 1 << 20
"""Bytes of a piece, as stored. Part of the format: other pieces give other samples."""
LANES = 64
"""Pieces that are read in turn, or fewer if there are fewer; a power of two."""
HELD_OUT = 16
"""Pieces, at the end of the shards, that are held out at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``start`` to ``stop``, as stored, of the shard with this number."""

    shard: int
    start: int
    stop: int


Piece = tuple[Part, ...]


class Pieces:
    """``sizes``: bytes of each shard as stored; ``windows``: of each piece; ``holdout``: share of
    the bytes, at the end, that is never trained on."""

    def __init__(self, sizes: Sequence[int], windows: int, holdout: float, seed: int) -> None:
        """Raises UsageFault when there is nothing to train on."""
        self.sizes = tuple(sizes)
        self.windows = max(1, windows)
        total = sum(sizes)
        held = 0
        if holdout:
            held = min(HELD_OUT * PIECE, max(1, int(total * holdout)))
        self._trained = total - held
        self.count = max(1, round(self._trained / PIECE))
        """Pieces to train on."""
        self.held = -(-held // PIECE)
        """Pieces held out."""
        refuse((total <= held, "there is nothing to train on", "name shards that are not empty"))
        self.lanes = min(LANES, 1 << (self.count.bit_length() - 1))
        self._starts = starts = (0, *accumulate(sizes))
        cut = (min(stop, self._trained) - start for start, stop in pairwise(starts))
        self._cut = [(shard, size) for shard, size in enumerate(cut) if size > 0]
        """Shards with bytes to train on, and how many."""
        self._shards = SampleOrder(len(self._cut), seed)
        self._order = SampleOrder(self.windows, seed)
        # Of the pass that is read, and of the next one.
        self._pass = lru_cache(maxsize=4)(self._arranged)

    @property
    def held_bytes(self) -> int:
        """Bytes held out, at the end of the shards."""
        return sum(self.sizes) - self._trained

    def place(self, position: int) -> tuple[int, int]:
        """The number of the piece of a position, and which of its windows it is. Numbers of pieces
        rise from pass to pass."""
        number = self.piece(position)
        turn = position // self.lanes % self.windows
        return number, self._order.sample(number * self.windows + turn)

    def piece(self, position: int) -> int:
        """The number of the piece alone."""
        return position // (self.lanes * self.windows) * self.lanes + position % self.lanes

    def following(self, number: int) -> int:
        """The piece that is read when this one has been used up."""
        return number + self.lanes

    def held_out(self, window: int) -> tuple[int, int]:
        """The piece of the ``window``-th held-out window, round again at the end, and which of its
        windows it is. Pieces that are held out have negative numbers."""
        number, turn = divmod(window % (self.held * self.windows), self.windows)
        return -1 - number, turn

    def after(self, number: int) -> int:
        """Replacement for an empty piece."""
        if number >= 0:
            return number + 1
        return -1 - (-number % self.held)

    def elsewhere(self, number: int) -> int:
        """A piece that lies far from this one, mostly in another shard."""
        if number >= 0:
            return number + self.count // 5 + 1
        return self.after(number)

    def parts(self, number: int) -> Piece:
        """Places of a piece's bytes in the shards."""
        if number < 0:
            start = self._trained + (-1 - number) * PIECE
            stop = min(self._starts[-1], start + PIECE)
            return _parts(self._starts, range(len(self.sizes)), start, stop)
        data_pass, i = divmod(number, self.count)
        starts, shards = self._pass(data_pass)
        whole = self._trained
        return _parts(starts, shards, i * whole // self.count, (i + 1) * whole // self.count)

    def _arranged(self, data_pass: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shards in the order of a pass, and where each begins."""
        n = len(self._cut)
        order = [self._cut[self._shards.sample(data_pass * n + i)] for i in range(n)]
        return (0, *accumulate(size for _, size in order)), tuple(shard for shard, _ in order)


def _parts(starts: Sequence[int], shards: Sequence[int], start: int, stop: int) -> Piece:
    """The parts of ``shards``, laid one behind the other at ``starts``, from ``start`` to
    ``stop``."""
    found = []
    i = bisect_right(starts, start) - 1
    while start < stop:
        end = min(stop, starts[i + 1])
        if end > start:
            found.append(Part(shards[i], start - starts[i], end - starts[i]))
        start = end
        i = i + 1
    return tuple(found)
