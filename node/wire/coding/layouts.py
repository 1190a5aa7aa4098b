"""How the numbers of each format lie in its bytes: written and read a step at a time, which stays
in a processor's cache. Enters: the bytes of a part, and fp32 numbers. Leaves: writers, readers,
and checks of the bytes. Never: memory for a part; trust: a received part is checked by its entry of
``FAULTS`` before it is read.

int8 and int4 divide each block by its largest number and round to nearest; scales (fp32) stand
before all codes. int4 puts two codes in a byte, numbers of the first half of each ``PIECE`` in the
low half of its bytes. top-k keeps the k largest of a block, as SparseLoCo (arXiv 2508.15706): two
magnitudes (bf16) of every block stand before all codes; a number's code is its sign and which of
the two. Rising places p take 7 bits each as an Elias-Fano code: p % 32, and a string of 2 k bits in
which bit p // 32 + i is set for the i-th. The magnitudes are two of the block's own, because order
statistics are the same bits on every processor, and means are not. All little endian.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from node.wire.coding.formats import (
    INT4_BLOCK,
    INT8_BLOCK,
    TOP_BLOCK,
    TOP_SCALES,
    kept,
    top_row,
)

PIECE = 1 << 17
"""Numbers that lie together in int4, a multiple of all blocks; a part of its wire format. Norms are
summed over as many."""
STEP = 4 * PIECE
"""Numbers that one operation takes on a CPU, a multiple of ``PIECE``: 2 MiB, which stay in the
third cache. A format of blocks needs a dozen operations; to start them costs more than what less
memory saves. torch divides an operation among cores by 32 Ki numbers."""
Writer = Callable[[int, Tensor], None]
"""(first number, numbers): writes a ``STEP`` from a multiple of it on, or the shorter rest at the
end."""
Opener = Callable[[int, Tensor], None]
"""(first number, output): reads a ``STEP``, or the rest at the end, into the output."""
_SMALLEST = 1e-37
"""A scale below has an inverse that is infinite, or that processors handle in different ways."""
_LARGEST = 3.4028234663852886e38
"""Of fp32."""


def _cast_writer(kind: torch.dtype, raw: Tensor, numbers: int) -> Writer:
    narrow = raw.view(kind)

    def write(start: int, piece: Tensor) -> None:
        narrow[start : start + piece.numel()].copy_(piece)

    return write


def _int_writer(block: int, top: int, raw: Tensor, numbers: int) -> Writer:
    """Codes -``top``..``top``: a byte each, or half of one for the 7 of int4."""
    scales, packed = _scaled(raw, numbers, block)
    scratch = torch.empty(at_once(raw, numbers), device=raw.device)
    apart = torch.empty_like(scratch, dtype=torch.int8)

    def write(start: int, piece: Tensor) -> None:
        n = piece.numel()
        codes = apart[:n] if top == 7 else packed[start : start + n]
        here = scales[start // block : -(-(start + n) // block)]
        _blockwise(piece, here, codes, scratch, block, top)
        if top == 7:
            _pack(codes.view(torch.uint8), packed[start // 2 :].view(torch.uint8))

    return write


def at_once(raw: Tensor, numbers: int) -> int:
    """Numbers that are written or read at once: a ``STEP``, which stays in a processor's cache; on
    a GPU, where every operation costs its start, all of them."""
    if raw.is_cuda:
        return numbers
    return min(STEP, numbers)


def _pack(codes: Tensor, into: Tensor) -> None:
    """Write codes uint8 of int4 two to a byte: of every ``PIECE``, and of the rest at the end, the
    first half of the numbers goes to the low half of its bytes."""
    for begin, rows in _pieces(codes):
        half = -(-rows.shape[1] // 2)
        begin = begin // 2
        packed = into[begin : begin + len(rows) * half].view(len(rows), half)
        packed.copy_(rows[:, :half]).bitwise_and_(15)
        packed[:, : rows.shape[1] - half].bitwise_or_(rows[:, half:] << 4)


def _unpack(packed: Tensor, codes: Tensor) -> None:
    """The inverse of :func:`_pack`, int8: ``codes`` [n] is written."""
    for begin, rows in _pieces(codes):
        half = -(-rows.shape[1] // 2)
        begin = begin // 2
        part = packed[begin : begin + len(rows) * half].view(len(rows), half)
        # Up and down again: the shift to the right keeps the sign.
        rows[:, :half].copy_(part).bitwise_left_shift_(4).bitwise_right_shift_(4)
        rows[:, half:].copy_(part[:, : rows.shape[1] - half]).bitwise_right_shift_(4)


def _pieces(codes: Tensor) -> list[tuple[int, Tensor]]:
    """(first number, [pieces, numbers]) of the whole pieces of ``codes`` and of the rest."""
    n = codes.numel()
    whole = n // PIECE * PIECE
    found: list[tuple[int, Tensor]] = []
    if whole:
        found.append((0, codes[:whole].view(-1, PIECE)))
    if whole < n:
        found.append((whole, codes[whole:].view(1, -1)))
    return found


def _top_writer(raw: Tensor, numbers: int) -> Writer:
    scales, rows_of = _tops(raw, numbers)

    def write(start: int, piece: Tensor) -> None:
        for first, rows, codes in rows_of(start, piece):
            count = kept(rows.shape[1])
            top = torch.topk(rows.abs(), count, dim=1)
            # Among the kept, an eighth of the way down and five eighths.
            both = torch.stack((top.values[:, 5 * count // 8], top.values[:, count // 8]), dim=1)
            both = both.to(torch.bfloat16)
            largest = top.values[:, :1].to(torch.bfloat16)
            # Numbers that cannot be sent show in a scale, and are refused.
            scales[first : first + len(rows)] = torch.where(largest.isfinite(), both, largest)
            at = top.indices.sort(dim=1).values
            numbers = rows.gather(1, at)
            middle = both.float().mean(dim=1, keepdim=True)
            codes.copy_(_packed(_top_bits(at, numbers < 0, numbers.abs() > middle)))

    return write


def _top_bits(at: Tensor, negative: Tensor, large: Tensor) -> Tensor:
    """The bits uint8 [rows, 9 k] of rising places [rows, k] and of their values: sign and
    magnitude."""
    rows, count = at.shape
    low = at[:, :, None] >> torch.arange(5) & 1
    high = torch.zeros(rows, 2 * count, dtype=torch.uint8)
    high.scatter_(1, (at >> 5) + torch.arange(count), 1)
    return torch.cat((low.reshape(rows, -1), high, negative, large), dim=1).to(torch.uint8)


def _packed(bits: Tensor) -> Tensor:
    """Bits [rows, n] as bytes uint8, the first bit lowest, zeros at the end."""
    whole = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    return (whole.view(len(bits), -1, 8) << torch.arange(8, dtype=torch.uint8)).sum(
        dim=2, dtype=torch.uint8
    )


def _unpacked(codes: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(low bits of places int64 [rows, k], bit string of their high bits uint8 [rows, 2 k],
    negative and large bool [rows, k]) of codes uint8 [rows, bytes]."""
    bits = (codes[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).reshape(len(codes), -1)
    low = (bits[:, : 5 * count].view(len(bits), count, 5).long() << torch.arange(5)).sum(dim=2)
    high = bits[:, 5 * count : 7 * count]
    negative = bits[:, 7 * count : 8 * count]
    large = bits[:, 8 * count : 9 * count]
    return low, high, negative.bool(), large.bool()


def _places(low: Tensor, high: Tensor) -> Tensor:
    """Places int64 [rows, k]; every row of ``high`` has k bits set."""
    rows, count = low.shape
    where = high.nonzero()[:, 1].view(rows, count)
    return (where - torch.arange(count) << 5) + low


def _blockwise(
    flat: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor, block: int, top: int
) -> None:
    """Write scales, and codes -top..top, of one piece; its last block may be short."""
    n = flat.numel()
    whole = n // block * block
    work = torch.abs(flat, out=scratch[:n])
    for begin, stop, width in ((0, whole, block), (whole, n, n - whole)):
        if begin == stop:
            continue
        scale = scales[begin // block : -(-stop // block)]
        rows = work[begin:stop].view(-1, width)
        torch.amax(rows, dim=1, out=scale)
        scale.div_(top)
        # The inverse of next to nothing is infinite: such a block is sent as zeros. NaN stays, and
        # is refused.
        inverse = scale.reciprocal().masked_fill_(scale < _SMALLEST, 0.0)
        torch.mul(flat[begin:stop].view(-1, width), inverse[:, None], out=rows)
        codes[begin:stop].copy_(work[begin:stop].round_())


def _cast_opener(kind: torch.dtype, raw: Tensor, numbers: int) -> Opener:
    narrow = raw.view(kind)

    def opener(start: int, into: Tensor) -> None:
        into.copy_(narrow[start : start + into.numel()])

    return opener


def _int_opener(block: int, top: int, raw: Tensor, numbers: int) -> Opener:
    scales, packed = _scaled(raw, numbers, block)

    def opener(start: int, into: Tensor) -> None:
        n = into.numel()
        codes = packed[start : start + n]
        if top == 7:
            codes = torch.empty(n, dtype=torch.int8, device=raw.device)
            _unpack(packed[start // 2 :], codes)
        _scale(codes, scales[start // block :], into, block)

    return opener


def _top_opener(raw: Tensor, numbers: int) -> Opener:
    scales, rows_of = _tops(raw, numbers)

    def opener(start: int, into: Tensor) -> None:
        into.zero_()
        for first, rows, codes in rows_of(start, into):
            low, high, negative, large = _unpacked(codes, kept(rows.shape[1]))
            both = scales[first : first + len(rows)].float()
            values = torch.where(large, both[:, 1:], both[:, :1])
            rows.scatter_(1, _places(low, high), torch.where(negative, -values, values))

    return opener


def _scale(codes: Tensor, scales: Tensor, out: Tensor, block: int) -> None:
    """Write the codes of one piece times their scales to ``out``. Converting first and multiplying
    in place is twice as fast as one product of both types."""
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


Rows = Callable[[int, Tensor], list[tuple[int, Tensor, Tensor]]]


def _tops(raw: Tensor, numbers: int) -> tuple[Tensor, Rows]:
    """(magnitudes bf16 [blocks, 2], the smaller one first; a function that cuts a piece of numbers,
    given its first number, into blocks of one width: number of the first block, numbers [blocks,
    width], codes [blocks, bytes])."""
    blocks = -(-numbers // TOP_BLOCK)
    scales = raw[: TOP_SCALES * blocks].view(torch.bfloat16).view(blocks, 2)
    codes = raw[TOP_SCALES * blocks :]
    each = top_row(TOP_BLOCK) - TOP_SCALES

    def rows_of(start: int, piece: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        first = start // TOP_BLOCK
        whole = piece.numel() // TOP_BLOCK
        found = []
        if whole:
            these = codes[first * each : (first + whole) * each].view(whole, each)
            found.append((first, piece[: whole * TOP_BLOCK].view(whole, TOP_BLOCK), these))
        if rest := piece.numel() - whole * TOP_BLOCK:
            begin = (first + whole) * each
            these = codes[begin : begin + top_row(rest) - TOP_SCALES].view(1, -1)
            found.append((first + whole, piece[whole * TOP_BLOCK :].view(1, rest), these))
        return found

    return scales, rows_of


def _bad_scale(block: int, largest: int, raw: Tensor, numbers: int) -> str:
    scales, _ = _scaled(raw, numbers, block)
    if not scales.numel():
        return ""
    # One pass for all of it: a NaN fails both comparisons.
    low, high = torch.aminmax(scales)
    fine = float(low) >= 0 and float(high) * largest < _LARGEST
    return "" if fine else "a block's scale is negative or not finite"


def _bad_top(raw: Tensor, numbers: int) -> str:
    scales, rows_of = _tops(raw, numbers)
    small = scales[:, 0]
    large = scales[:, 1]
    # A NaN fails both comparisons.
    if not bool(((small >= 0) & (small <= large) & (large < _LARGEST)).all()):
        return "a top-k magnitude is negative or not finite"
    for start in range(0, numbers, PIECE):
        # Of the numbers only how many they are counts; a view of one takes no memory.
        piece = torch.zeros(1).expand(min(PIECE, numbers - start))
        for _, rows, codes in rows_of(start, piece):
            count = kept(rows.shape[1])
            low, high, _, _ = _unpacked(codes, count)
            if not bool((high.sum(dim=1) == count).all()):
                return "top-k places do not say how many they are"
            at = _places(low, high)
            if bool((at[:, -1] >= rows.shape[1]).any()) or bool((at[:, 1:] <= at[:, :-1]).any()):
                return "top-k places do not rise within their block"
    return ""


WRITERS: dict[str, Callable[[Tensor, int], Writer]] = {
    "fp32": partial(_cast_writer, torch.float32),
    "bf16": partial(_cast_writer, torch.bfloat16),
    "fp16": partial(_cast_writer, torch.float16),
    "int8": partial(_int_writer, INT8_BLOCK, 127),
    "int4": partial(_int_writer, INT4_BLOCK, 7),
    "top-k": _top_writer,
}
"""Writers by format: each makes the writer of a part from (its bytes uint8 [nbytes], its number of
elements)."""
OPENERS: dict[str, Callable[[Tensor, int], Opener]] = {
    "fp32": partial(_cast_opener, torch.float32),
    "bf16": partial(_cast_opener, torch.bfloat16),
    "fp16": partial(_cast_opener, torch.float16),
    "int8": partial(_int_opener, INT8_BLOCK, 127),
    "int4": partial(_int_opener, INT4_BLOCK, 7),
    "top-k": _top_opener,
}
"""By format: makes the reader of a part from the same arguments."""
FAULTS: dict[str, Callable[[Tensor, int], str]] = {
    "int8": partial(_bad_scale, INT8_BLOCK, 128),
    "int4": partial(_bad_scale, INT4_BLOCK, 8),
    "top-k": _bad_top,
}
"""By format, for those in which not all bytes are valid: why no encoder writes a part like this, or
""."""
