"""Weights of the differences of one window, which judge each other. Pure. Enters: the decoded
differences of a group, the same at every cell. Leaves: a weight for each cell, the same at every
cell. Never: a gradient, a loss, a weight of an earlier window.

Each cell's difference is a descent direction on text that the other cells have not seen. The inner
product of two differences estimates, to first order, how much one cell's update lowers the loss on
the other cell's text. All cells have all differences, so they
compute the same weights without a message (docs/decisions/032-weights-by-agreement.md).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_high, median_low

import torch
from torch import Tensor

Named = Mapping[str, Tensor]
COPY = 0.1
"""Share of the usual distance (1 - cosine) of two differences below which one is a copy of the
other. Honest cells of one run are at 0.9 to 1.1 of the usual distance."""
PLAIN = 1e-9
"""Distance below which two differences are the same numbers, rounding of the cosine aside."""
AGAINST = 0.25
"""Share of the usual agreement below which a difference does not help."""
AGREED = 0.05
"""Least usual agreement: below it the group does not agree on a direction, and nobody is judged."""
LESS = 1 / 16
"""Weight of a difference that does not help. It is not 0, so that a cell with other text than the
others still counts."""
LEAST_CELLS = 3
"""Fewest cells, or differences that are no copies, among which one can be judged."""
PIECE = 1 << 20
"""Numbers of each difference that are multiplied at once."""


def weights_of(given: Mapping[str, Named]) -> dict[str, float]:
    """The weight of each cell's difference, at most 1. Copies of one difference share one weight
    and have one voice. A difference whose median cosine with the others is much lower than usual
    counts for LESS. All count whole where fewer than LEAST_CELLS differ, or nobody agrees.
    Thresholds are far from the values that honest cells have, so the last bits of a cosine do not
    make cells differ. If a crafted difference lies at a threshold, cells may make different
    anchors; in the next window the rarer anchor gives way."""
    cells = sorted(given)
    whole = dict.fromkeys(cells, 1.0)
    if len(cells) < LEAST_CELLS:
        return whole
    cosines = _cosines([given[cell] for cell in cells])
    originals = _originals(cosines)
    copies = Counter(originals)
    if len(copies) < LEAST_CELLS:
        return whole
    agreement = {i: median_high([cosines[i][j] for j in copies if j != i]) for i in copies}
    usual = median_low(agreement.values())
    if usual < AGREED:
        return whole
    shares = {i: LESS if agreed < AGAINST * usual else 1.0 for i, agreed in agreement.items()}
    return {
        cell: shares[original] / copies[original]
        for cell, original in zip(cells, originals, strict=True)
    }


@torch.no_grad()
def _cosines(given: Sequence[Named]) -> list[list[float]]:
    """Cosine of every pair; 0 where a difference has no length."""
    count = len(given)
    products = torch.zeros(count, count, dtype=torch.float64)
    for name in sorted(given[0]):
        parts = [of[name].to("cpu").flatten().split(PIECE) for of in given]
        for pieces in zip(*parts, strict=True):
            rows = torch.stack([piece.to(torch.float64) for piece in pieces])
            products += rows @ rows.T
    lengths = products.diagonal().sqrt()
    scale = lengths.outer(lengths)
    return torch.where(scale > 0.0, products / scale, 0.0).tolist()


def _originals(cosines: Sequence[Sequence[float]]) -> list[int]:
    """For every cell the first cell in order with the same difference, often itself."""
    apart = [[1.0 - cosine for cosine in row] for row in cosines]
    # Plain copies cost nothing, so they may be most of a group: one of each is enough here.
    plain = _first_within(apart, PLAIN)
    kept = [i for i, original in enumerate(plain) if plain[:i].count(original) < 2]
    if len(kept) < LEAST_CELLS:
        return plain
    # The nearest of a copied cell is its copy. The second nearest is an honest cell, for most.
    second = [sorted(apart[i][j] for j in kept if j != i)[1] for i in kept]
    return _first_within(apart, max(PLAIN, COPY * median_high(second)))


def _first_within(apart: Sequence[Sequence[float]], near: float) -> list[int]:
    """For every cell the first original in order that is nearer than ``near``, or itself."""
    found: list[int] = []
    for i, row in enumerate(apart):
        same = (j for j in range(i) if found[j] == j and row[j] < near)
        found.append(next(same, i))
    return found
