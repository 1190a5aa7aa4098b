"""The owner's arithmetic: which contributions are fit, and their mean, the same bits in whatever
order they came."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from node.averaging.coding.codecs import TYPED, Coded, Encoding, Numbers
from node.averaging.coding.formats import FORMATS
from node.averaging.coding.layouts import PIECE
from node.core.errors import StepFault
from node.core.ids import PeerId


def norms_of(named: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The 2-norm of each tensor; a NaN or an infinity anywhere makes it not finite."""
    return {
        name: float(torch.linalg.vector_norm(tensor, dtype=torch.float32))
        for name, tensor in named.items()
    }


def unfit(norms: Mapping[str, float], tokens: int, max_norm: float) -> str:
    """Why gradient sums with these norms must not be averaged, or "": over ``tokens`` each may be
    at most ``max_norm``."""
    for name, norm in norms.items():
        each = norm / max(1, tokens)
        if not math.isfinite(each):
            return f"gradient of {name} is not finite"
        if each > max_norm:
            return f"gradient of {name} has norm {each:.3g} per token, above {max_norm:.3g}"
    return ""


class Mean(Numbers):
    """Contributions to one part, each times its factor, added in their order and divided by
    ``tokens``: worked out when it is asked for, so that it can be rounded and sent while it is in
    the cache. They must stay until then."""

    def __init__(self, rows: Sequence[Numbers], by: Sequence[float], tokens: float) -> None:
        self.shape, self.numbers = rows[0].shape, rows[0].numbers
        self._rows, self._by, self._tokens = rows, by, tokens
        self._scratch = torch.empty(min(PIECE, self.numbers))

    def _piece(self, start: int, into: torch.Tensor) -> None:
        total = self._rows[0].read(start, into)
        if self._by[0] != 1:
            total = torch.mul(total, self._by[0], out=into)
        for row, factor in zip(self._rows[1:], self._by[1:], strict=True):
            total = torch.add(
                total, row.read(start, self._scratch[: into.numel()]), alpha=factor, out=into
            )
        if math.frexp(self._tokens)[0] == 0.5:  # a power of two: the same bits in half the time
            torch.mul(total, 1 / self._tokens, out=into)
        else:
            torch.div(total, self._tokens, out=into)


def means(
    contributions: Mapping[PeerId, Sequence[Numbers]],
    order: Sequence[PeerId],
    tokens: float,
    factors: Mapping[PeerId, float] | None = None,
) -> list[Mean]:
    """Of each part the sum in ``order``, each contribution times its factor (1 when not named),
    divided by ``tokens``.

    In order, because floating-point addition does not commute with arrival; a factor of 1 changes
    no bit.
    """
    by = [(factors or {}).get(peer, 1) for peer in order]
    return [
        Mean(rows, by, tokens)
        for rows in zip(*(contributions[peer] for peer in order), strict=True)
    ]


def opened(coded: Coded) -> tuple[torch.Tensor, bool]:
    """The numbers, fp32, or bf16 where they travel so, and whether all are finite: asked where they
    are in the cache, and only of formats that let others pass."""
    sure = FORMATS[coded.codec].finite
    if coded.codec in TYPED:
        numbers = coded.raw.view(TYPED[coded.codec]).view(coded.shape)
        return numbers, finite(numbers)
    numbers, fine = torch.empty(coded.numbers), True
    for start in range(0, coded.numbers, PIECE):
        piece = coded.read(start, numbers[start : start + PIECE])
        fine &= sure or finite(piece)
    return numbers.view(coded.shape), fine


def finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity: a sum hides neither. That of large numbers may overflow all the same,
    so then each is looked at."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def settled(name: str, given: Numbers, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a fresh part is to everybody (CPU, contiguous, fp32, or bf16 where it travels so: the
    memory of ``given`` if it has this format), and the bytes that say so.

    Raises StepFault for numbers that are not finite or cannot be sent in ``codec``, as what others
    gave may come to.
    """
    if codec in TYPED and isinstance(given, Coded) and given.codec == codec:
        data = given.raw
        fresh = data.view(TYPED[codec])
        fine = finite(fresh)
    else:
        fresh, fine, sure = torch.empty(given.numbers), True, FORMATS[codec].finite
        encoding = None if codec == "fp32" else Encoding(given.numbers, codec)
        scratch = torch.empty(0 if encoding is None else min(PIECE, given.numbers))
        for start in range(0, given.numbers, PIECE):
            piece = fresh[start : start + PIECE]
            if encoding is None:
                given.read(start, piece)
            else:
                encoding.write(start, given.read(start, scratch[: piece.numel()]))
                encoding.read(start, piece)
            fine &= sure or finite(piece)
        try:
            data = fresh.view(torch.uint8) if encoding is None else encoding.done()
        except ValueError as e:
            raise StepFault(f"what the step made {name} cannot travel: {e}") from e
        fresh = data.view(TYPED[codec]) if codec in TYPED else fresh
    if not fine:
        raise StepFault(f"the step made {name} not finite")
    return fresh.view(given.shape), data
