"""The owner's arithmetic: which contributions are fit, and their mean, the same bits in whatever order they came."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from node.averaging.codecs import PIECE, Coded, encode
from node.averaging.formats import FORMATS
from node.core.errors import StepFault
from node.core.ids import PeerId


def norms_of(named: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The 2-norm of each tensor; a NaN or an infinity anywhere makes it not finite."""
    return {name: float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) for name, tensor in named.items()}


def unfit(norms: Mapping[str, float], tokens: int, max_norm: float) -> str:
    """Why gradient sums with these norms must not be averaged, or "": over ``tokens`` each may be at most ``max_norm``."""
    for name, norm in norms.items():
        each = norm / max(1, tokens)
        if not math.isfinite(each):
            return f"gradient of {name} is not finite"
        if each > max_norm:
            return f"gradient of {name} has norm {each:.3g} per token, above {max_norm:.3g}"
    return ""


def mean(
    contributions: Mapping[PeerId, Sequence[Coded]],
    order: Sequence[PeerId],
    tokens: float,
    factors: Mapping[PeerId, float] | None = None,
) -> list[torch.Tensor]:
    """Sum in ``order``, each contribution times its factor (1 when not named), and divide by ``tokens``.

    In order, because floating-point addition does not commute with arrival; a factor of 1 changes no bit.
    """
    by = [(factors or {}).get(peer, 1) for peer in order]
    return [_mean(rows, by, tokens) for rows in zip(*(contributions[peer] for peer in order), strict=True)]


def _mean(rows: Sequence[Coded], by: Sequence[float], tokens: float) -> torch.Tensor:
    out = torch.empty(rows[0].numbers)
    scratch = torch.empty(min(PIECE, out.numel()))
    # Piece by piece, because what is in the cache is opened, added and divided for nothing.
    for start in range(0, out.numel(), PIECE):
        piece = out[start : start + PIECE]
        total = rows[0].read(start, piece)
        if by[0] != 1:
            total = torch.mul(total, by[0], out=piece)
        for row, factor in zip(rows[1:], by[1:], strict=True):
            total = torch.add(total, row.read(start, scratch[: piece.numel()]), alpha=factor, out=piece)
        if tokens != 1:
            torch.div(total, tokens, out=piece)
        elif total.data_ptr() != piece.data_ptr():
            piece.copy_(total)
    return out.view(rows[0].shape)


def opened(coded: Coded, into: torch.Tensor | None = None) -> tuple[torch.Tensor, bool]:
    """The numbers, and whether all are finite: asked where they are in the cache, and only of formats that let others pass.

    ``into``: [numbers] fp32 that may be written over, where they do not lie somewhere already.
    """
    sure = FORMATS[coded.codec].finite
    if coded.lies:
        numbers = coded.whole()
        return numbers, sure or finite(numbers)
    numbers, fine = torch.empty(coded.numbers) if into is None else into, True
    for start in range(0, coded.numbers, PIECE):
        piece = coded.read(start, numbers[start : start + PIECE])
        fine &= sure or finite(piece)
    return numbers.view(coded.shape), fine


def finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity: a sum hides neither. That of large numbers may overflow all the same, so then each is looked at."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def settled(
    name: str, tensor: torch.Tensor, shape: Sequence[int], codec: str, spare: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a fresh part is to everybody (fp32, CPU, contiguous: the step's own tensor if it can be), and the bytes that say so.

    ``spare``: the tensor is a mean of ours that may be written over. Raises ValueError when the step gave another shape; StepFault for
    numbers that are not finite or cannot be sent in ``codec``, as what others gave may come to.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"the step made {name} {tuple(tensor.shape)}, expected {tuple(shape)}")
    if codec == "fp32":
        fresh = tensor.detach().to("cpu", torch.float32).contiguous()
        data, fine = encode(fresh, codec), finite(fresh)
    else:
        try:
            data = encode(tensor, codec)
        except ValueError as e:
            raise StepFault(f"what the step made {name} cannot travel: {e}") from e
        fresh, fine = opened(Coded(data, shape, codec), tensor.view(-1) if spare else None)
    if not fine:
        raise StepFault(f"the step made {name} not finite")
    return fresh, data
