"""Averages that a minority of liars cannot move at will, fast enough to keep up with a network.
Enters: gradient sums and tokens, in an order that is given. Leaves: one gradient per token. Never:
a judgement of trust.

Only ``mean`` is the token-weighted mean; the others give up some of it. Coordinate-wise median and
trimmed mean ask every contributor once, whatever its tokens: a rank has no weights. All are per
token, and all need three contributors: with two, nobody can say which one lies. A sorting network
says which rows to compare, in which order, so that the wanted order statistics end in their places.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import median as middle
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

FEWEST = 3
"""Contributors from which a robust average means anything."""
CHUNK = 1 << 14
"""Numbers of one row worked on at a time: 64 KiB, so that the rows of a cell stay in the
processor's second cache, and the calls are few (measured: 32 KiB takes 1.2 times the time, 8 KiB
twice the time)."""

Row = NDArray[np.float32]
Contribution = Sequence[torch.Tensor]
"""Gradient sums of one contributor: fp32 on the CPU, the same shapes in the same order for
everybody."""


class Comparator(NamedTuple):
    """Put the smaller of rows ``low`` and ``high`` into ``low``, the larger into ``high``; only
    what ``keep`` names is used: 1 the smaller, 2 the larger, 3 both."""

    low: int
    high: int
    keep: int


@lru_cache(maxsize=256)
def merge_exchange(count: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge exchange for any number of rows: Knuth, TAOCP volume 3, 5.2.2,
    algorithm M."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = 0
    if count > 1:
        p = top
    while p:
        q = top
        r = 0
        d = p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d = q - p
            q = q >> 1
            r = p
        p >>= 1
    return tuple(pairs)


@lru_cache(maxsize=256)
def selection(count: int, first: int, last: int) -> tuple[Comparator, ...]:
    """The comparators of :func:`merge_exchange` after which rows ``first``..``last`` hold *the set*
    of these ranks.

    Found from behind: what feeds no wanted row is left out, and so is a comparison of two rows that
    are both wanted and not looked at again, because the set does not change.
    """
    unused = 0
    exact = 1
    member = 2
    state = [member if first <= i <= last else unused for i in range(count)]
    kept: list[Comparator] = []
    for low, high in reversed(merge_exchange(count)):
        keep = (state[low] != unused) + 2 * (state[high] != unused)
        if keep == 0 or (state[low] == state[high] == member):
            continue
        kept.append(Comparator(low, high, keep))
        state[low] = state[high] = exact
    return tuple(reversed(kept))


def median(given: Sequence[Contribution], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Coordinate-wise median of g_i / t_i, for an even number the midpoint: Yin et al., arXiv
    1803.01498, definition 1."""
    n = len(given)
    return _ranks(given, tokens, (n - 1) // 2, n // 2)


def trimmed(count: int, share: float) -> int:
    """Contributors left out at each end: ``share`` of them, rounded down, at least one; never all
    but the middle."""
    return min(max(1, math.floor(share * count)), (count - 1) // 2)


def trimmed_mean(
    given: Sequence[Contribution], tokens: Sequence[int], share: float
) -> list[torch.Tensor]:
    """Mean of g_i / t_i in each coordinate without the :func:`trimmed` largest and smallest: arXiv
    1803.01498, definition 2."""
    n = len(given)
    cut = trimmed(n, share)
    return _ranks(given, tokens, cut, n - 1 - cut)


def clipped(norms: Sequence[float], weights: Sequence[float], clip: float) -> list[float]:
    """Shares of per-token gradients with these 2-norms in a mean that none can move further than
    ``clip`` median norms."""
    radius = clip * middle(norms)
    total = sum(weights)
    return [w / total * _within(norm, radius) for norm, w in zip(norms, weights, strict=True)]


def centered(
    given: Sequence[Contribution],
    tokens: Sequence[int],
    norms: Sequence[float],
    weights: Sequence[float],
    clip: float,
    iterations: int,
    center: Contribution | None = None,
) -> tuple[list[float], float]:
    """Shares of the per-token gradients v_i = g_i / t_i, and of the center, in the result of
    centered clipping.

    Karimireddy et al., arXiv 2012.10333, algorithm 2: from c = ``center`` (None: zero),
    ``iterations`` times

        c <- c + sum_i w_i / W * (v_i - c) * min(1, radius / |v_i - c|)

    where radius is ``clip`` times the median of the |v_i - c|. Every c is a combination of the
    inputs, so the distances follow from the inner products: one pass over the tensors, however many
    iterations. ``norms``: |v_i|.
    """
    rows = [*zip(given, tokens, norms, strict=True)]
    if center is not None:
        rows.append((center, 1, math.hypot(*(float(torch.linalg.vector_norm(t)) for t in center))))
    n = len(given)
    total = sum(weights)
    products = np.zeros((n + 1, n + 1))
    products[: len(rows), : len(rows)] = _products(rows)
    shares = np.zeros(n + 1)
    shares[n] = 1.0
    away = np.eye(n + 1)[:n]
    for _ in range(iterations):
        apart = away - shares
        distances = np.sqrt(np.maximum(0.0, np.einsum("ij,jk,ik->i", apart, products, apart)))
        radius = clip * float(np.median(distances))
        moves = [
            w / total * _within(float(d), radius) for d, w in zip(distances, weights, strict=True)
        ]
        shares = shares + np.asarray(moves) @ apart
    kept = 0.0
    if center is not None:
        kept = float(shares[n])
    return [float(s) for s in shares[:n]], kept


def _within(norm: float, radius: float) -> float:
    if norm <= radius:
        return 1.0
    return radius / norm


def _products(rows: Sequence[tuple[Contribution, int, float]]) -> NDArray[np.float64]:
    """Inner products of the per-token vectors. Rows have unit length while they are multiplied: no
    square overflows."""
    scales = np.array([norm for _, _, norm in rows])
    factors = [
        np.float32(1.0 / (tokens * norm)) if norm > 1e-30 else np.float32(0.0)
        for _, tokens, norm in rows
    ]
    sums = np.zeros((len(rows), len(rows)))
    scratch = np.empty((len(rows), CHUNK), np.float32)
    for flats in zip(*(map(_flat, given) for given, _, _ in rows), strict=True):
        for start in range(0, flats[0].size, CHUNK):
            part = scratch[:, : min(CHUNK, flats[0].size - start)]
            for row, flat, factor in zip(part, flats, factors, strict=True):
                np.multiply(flat[start : start + CHUNK], factor, out=row)
            sums += part @ part.T
    return sums * scales[:, None] * scales


def _ranks(
    given: Sequence[Contribution], tokens: Sequence[int], first: int, last: int
) -> list[torch.Tensor]:
    """Mean of the order statistics ``first``..``last`` of g_i / t_i in each coordinate."""
    steps = selection(len(given), first, last)
    made = list[torch.Tensor]()
    divisors = [np.float32(t) for t in tokens]
    for tensors in zip(*given, strict=True):
        flats = [_flat(t) for t in tensors]
        made.append(torch.empty(tensors[0].shape, dtype=torch.float32))
        into = made[-1].numpy().reshape(-1)
        scratch = np.empty((len(flats) + 1, min(CHUNK, max(1, into.size))), np.float32)
        for start in range(0, into.size, CHUNK):
            size = min(CHUNK, into.size - start)
            rows = [row[:size] for row in scratch]
            for row, flat, divisor in zip(rows, flats, divisors, strict=False):
                np.divide(flat[start : start + size], divisor, out=row)
            _middle(rows, steps, first, last, into[start : start + size])
    return made


def _middle(rows: list[Row], steps: Sequence[Comparator], first: int, last: int, out: Row) -> None:
    """Run the network; ``rows`` has one row to spare at its end."""
    spare = rows[-1]
    for low, high, keep in steps:
        a = rows[low]
        b = rows[high]
        if keep == 3:
            np.minimum(a, b, out=spare)
            np.maximum(a, b, out=b)
            rows[low], spare = spare, a
        elif keep == 1:
            np.minimum(a, b, out=a)
        else:
            np.maximum(a, b, out=b)
    np.copyto(out, rows[first])
    for row in rows[first + 1 : last + 1]:
        np.add(out, row, out=out)
    if last > first:
        np.divide(out, np.float32(last - first + 1), out=out)


def _flat(tensor: torch.Tensor) -> Row:
    return tensor.detach().contiguous().numpy().reshape(-1)
