"""Documents that are packed into sequences: the tokens that end them, and the lengths of the pieces
that attend to themselves alone. Enters: targets, or the ends that came with a frame. Never: text.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

NO_TARGET = -100
"""Target of a document's last token, where documents are kept apart: the next token belongs to
another document. ``cross_entropy`` leaves it out."""
UNTRAINED = -101
"""Target of a token that ends no document and is not trained on, such as a question of a
conversation."""


def ends_of(targets_BT: Tensor) -> tuple[int, ...]:
    """Tokens without a target, each the last of its document: numbers below B * T, counted sequence
    by sequence, rising."""
    return tuple((targets_BT.reshape(-1) == NO_TARGET).nonzero().reshape(-1).tolist())


def untrained_in(targets_BT: Tensor) -> int:
    """Count the tokens that end no document and have no target."""
    return int((targets_BT == UNTRAINED).sum())


def for_loss(targets_BT: Tensor) -> Tensor:
    """Targets as ``cross_entropy`` takes them: NO_TARGET for every token without one."""
    return targets_BT.clamp_min(NO_TARGET)


def lengths_of(document_ends: Sequence[int], sequences: int, length: int) -> tuple[int, ...]:
    """Tokens of each document, or part of one, in ``sequences`` of ``length`` tokens; none where
    every sequence is one."""
    cuts = {*(end + 1 for end in document_ends), *range(length, sequences * length, length)}
    found = tuple(b - a for a, b in pairwise(sorted({0, sequences * length} | cuts)))
    return found if len(found) > sequences else ()


def within(document_ends: Sequence[int], first: int, count: int, length: int) -> tuple[int, ...]:
    """The ends in ``count`` sequences from the ``first`` on, as if there were no others."""
    start = first * length
    stop = (first + count) * length
    return tuple(end - start for end in document_ends if start <= end < stop)
