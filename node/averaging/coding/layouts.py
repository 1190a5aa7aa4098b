"""How the numbers of each format lie in its bytes: written and read a piece at a time, which stays
in the processor's cache. Enters: the bytes of a part, and fp32 numbers. Leaves: who writes them,
who reads them, what is wrong with them. Never: memory for a part; trust: a part that came is looked
at by its ``FAULTS`` before it is read.

int8 and int4 divide each block by its largest number and round to nearest; scales (fp32) stand
before all codes. int4 puts two codes in a byte, numbers of the first half of each ``PIECE`` in the
low half of its bytes. top-k stands as places in the block (two bytes each, rising), then values
(bf16). All little endian.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from node.averaging.coding.formats import INT4_BLOCK, INT8_BLOCK, TOP_BLOCK, TOP_SHARE, kept

PIECE = 1 << 17
"""Numbers worked on at a time, a multiple of all blocks: 512 KiB, which stay in the processor's
second cache. Part of what int4 is on the wire."""
Writer = Callable[[int, Tensor], None]
"""(first number, numbers): writes a ``PIECE``, or what is left at the end, from a multiple of it
on."""
Opener = Callable[[int, Tensor], None]
"""(first number, where to): the same way back."""
_SMALLEST = 1e-37
"""A scale below has an inverse that is infinite, or that processors handle in different ways."""
_LARGEST = 3.4028234663852886e38
"""Of fp32."""


def _cast_writer(kind: torch.dtype) -> Callable[[Tensor, int], Writer]:
    def made(raw: Tensor, numbers: int) -> Writer:
        narrow = raw.view(kind)

        def write(start: int, piece: Tensor) -> None:
            narrow[start : start + piece.numel()].copy_(piece)

        return write

    return made


def _int8_writer(raw: Tensor, numbers: int) -> Writer:
    scales, codes = _scaled(raw, numbers, INT8_BLOCK)
    scratch = torch.empty(min(PIECE, numbers))

    def write(start: int, piece: Tensor) -> None:
        stop = start + piece.numel()
        _blockwise(
            piece,
            scales[start // INT8_BLOCK : -(-stop // INT8_BLOCK)],
            codes[start:stop],
            scratch,
            INT8_BLOCK,
            127,
        )

    return write


def _int4_writer(raw: Tensor, numbers: int) -> Writer:
    scales, packed = _scaled(raw, numbers, INT4_BLOCK)
    scratch, codes = (
        torch.empty(min(PIECE, numbers)),
        torch.empty(min(PIECE, numbers), dtype=torch.int8),
    )

    def write(start: int, piece: Tensor) -> None:
        n = piece.numel()
        _blockwise(
            piece,
            scales[start // INT4_BLOCK : -(-(start + n) // INT4_BLOCK)],
            codes[:n],
            scratch,
            INT4_BLOCK,
            7,
        )
        half = -(-n // 2)
        into = packed[start // 2 : start // 2 + half].view(torch.uint8)
        into.copy_(codes[:half].view(torch.uint8)).bitwise_and_(15)
        into[: n - half].bitwise_or_(codes[half:n].view(torch.uint8) << 4)

    return write


def _top_writer(raw: Tensor, numbers: int) -> Writer:
    places, values = _tops(raw, numbers)
    share = TOP_BLOCK // TOP_SHARE

    def write(start: int, piece: Tensor) -> None:
        whole, done = piece.numel() // TOP_BLOCK * TOP_BLOCK, start // TOP_BLOCK * share
        for rows in (piece[:whole].view(-1, TOP_BLOCK), piece[whole:].view(1, -1)):
            if not rows.numel():
                continue
            at = (
                torch.topk(rows.abs(), kept(rows.shape[1]), dim=1, sorted=False)
                .indices.sort(dim=1)
                .values
            )
            these = slice(done, done + at.numel())
            places[these] = at.reshape(-1).to(torch.int16)
            values[these] = rows.gather(1, at).reshape(-1).to(torch.bfloat16)
            done = these.stop

    return write


def _blockwise(
    flat: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor, block: int, top: int
) -> None:
    """Write scales, and codes -top..top, of one piece, whose last block may be short."""
    n = flat.numel()
    whole = n // block * block
    work = torch.abs(flat, out=scratch[:n])
    for begin, stop, width in ((0, whole, block), (whole, n, n - whole)):
        if begin == stop:
            continue
        scale, rows = scales[begin // block : -(-stop // block)], work[begin:stop].view(-1, width)
        torch.amax(rows, dim=1, out=scale)
        scale.div_(top)
        # The inverse of next to nothing is infinite: such a block is sent as zeros. NaN stays, and
        # is refused.
        inverse = scale.reciprocal().masked_fill_(scale < _SMALLEST, 0.0)
        torch.mul(flat[begin:stop].view(-1, width), inverse[:, None], out=rows)
        codes[begin:stop].copy_(work[begin:stop].round_())


def _cast_opener(kind: torch.dtype) -> Callable[[Tensor, int], Opener]:
    def made(raw: Tensor, numbers: int) -> Opener:
        narrow = raw.view(kind)

        def opener(start: int, into: Tensor) -> None:
            into.copy_(narrow[start : start + into.numel()])

        return opener

    return made


def _int8_opener(raw: Tensor, numbers: int) -> Opener:
    scales, codes = _scaled(raw, numbers, INT8_BLOCK)

    def opener(start: int, into: Tensor) -> None:
        _scale(codes[start : start + into.numel()], scales[start // INT8_BLOCK :], into, INT8_BLOCK)

    return opener


def _int4_opener(raw: Tensor, numbers: int) -> Opener:
    scales, packed = _scaled(raw, numbers, INT4_BLOCK)

    def opener(start: int, into: Tensor) -> None:
        n = into.numel()
        codes = torch.empty(n, dtype=torch.int8)
        half = -(-n // 2)
        part = packed[start // 2 : start // 2 + half]
        # Up and down again: the shift to the right keeps the sign.
        codes[:half].copy_(part).bitwise_left_shift_(4).bitwise_right_shift_(4)
        codes[half:].copy_(part[: n - half]).bitwise_right_shift_(4)
        _scale(codes, scales[start // INT4_BLOCK :], into, INT4_BLOCK)

    return opener


def _top_opener(raw: Tensor, numbers: int) -> Opener:
    places, values = _tops(raw, numbers)
    share = TOP_BLOCK // TOP_SHARE

    def opener(start: int, into: Tensor) -> None:
        blocks, done = into.numel() // TOP_BLOCK, start // TOP_BLOCK * share
        into.zero_()
        for rows, each in (
            (into[: blocks * TOP_BLOCK].view(-1, TOP_BLOCK), share),
            (into[blocks * TOP_BLOCK :].view(1, -1), kept(into.numel() - blocks * TOP_BLOCK)),
        ):
            if not rows.numel():
                continue
            these = slice(done, done + len(rows) * each)
            rows.scatter_(
                1, places[these].view(-1, each).long(), values[these].view(-1, each).float()
            )
            done = these.stop

    return opener


def _scale(codes: Tensor, scales: Tensor, out: Tensor, block: int) -> None:
    """One piece: twice as fast as a product of both types at once."""
    numbers = codes.numel()
    whole = numbers // block * block
    out.copy_(codes)
    if whole:
        out[:whole].view(-1, block).mul_(scales[: whole // block, None])
    if whole < numbers:
        out[whole:].mul_(scales[whole // block])


def _scaled(raw: Tensor, numbers: int, block: int) -> tuple[Tensor, Tensor]:
    """(scales [blocks] fp32, codes int8)."""
    scales = 4 * -(-numbers // block)
    return raw[:scales].view(torch.float32), raw[scales:].view(torch.int8)


def _tops(raw: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
    """(places int16, values bf16), [kept] each."""
    count = kept(numbers)
    return raw[: 2 * count].view(torch.int16), raw[2 * count :].view(torch.bfloat16)


def _passes(raw: Tensor, numbers: int) -> str:
    return ""


def _bad_scale(block: int, largest: int) -> Callable[[Tensor, int], str]:
    def fault(raw: Tensor, numbers: int) -> str:
        scales, _ = _scaled(raw, numbers, block)
        if not scales.numel():
            return ""
        # One pass for all of it: a NaN fails both comparisons.
        low, high = torch.aminmax(scales)
        fine = float(low) >= 0 and float(high) * largest < _LARGEST
        return "" if fine else "a block's scale is negative or not finite"

    return fault


def _bad_top(raw: Tensor, numbers: int) -> str:
    places, values = _tops(raw, numbers)
    if not bool(torch.isfinite(values).all()):
        return "a top-k value is not finite"
    whole, share = numbers // TOP_BLOCK, TOP_BLOCK // TOP_SHARE
    for at, width in (
        (places[: whole * share].view(-1, share), TOP_BLOCK),
        (places[whole * share :].view(1, -1), numbers - whole * TOP_BLOCK),
    ):
        if not at.numel():
            continue
        if (
            bool((at[:, 0] < 0).any())
            or bool((at[:, -1] >= width).any())
            or bool((at[:, 1:] <= at[:, :-1]).any())
        ):
            return "top-k places do not rise within their block"
    return ""


WRITERS: dict[str, Callable[[Tensor, int], Writer]] = {
    "fp32": _cast_writer(torch.float32),
    "bf16": _cast_writer(torch.bfloat16),
    "fp16": _cast_writer(torch.float16),
    "int8": _int8_writer,
    "int4": _int4_writer,
    "top-k": _top_writer,
}
"""By format: (the part's bytes uint8 [nbytes], its numbers) to who writes it."""
OPENERS: dict[str, Callable[[Tensor, int], Opener]] = {
    "fp32": _cast_opener(torch.float32),
    "bf16": _cast_opener(torch.bfloat16),
    "fp16": _cast_opener(torch.float16),
    "int8": _int8_opener,
    "int4": _int4_opener,
    "top-k": _top_opener,
}
"""The same to who reads it."""
FAULTS: dict[str, Callable[[Tensor, int], str]] = {
    "fp32": _passes,
    "bf16": _passes,
    "fp16": _passes,
    "int8": _bad_scale(INT8_BLOCK, 128),
    "int4": _bad_scale(INT4_BLOCK, 8),
    "top-k": _bad_top,
}
"""The same to why no encoder writes this, or ""."""
