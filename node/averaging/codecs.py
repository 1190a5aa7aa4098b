"""Differences and gradients in few bits: what one peer sends, what the others read, what the owner adopts.
Enters: fp32 numbers. Leaves: bytes, and the numbers that everybody will have.
Never: memory for bytes that were not counted first; parameters (see ``outer.check``): their rounding would add up.

int8 and int4 divide each block by its largest number and round to nearest; scales (fp32) stand before all codes. int4 puts
two codes in a byte, numbers of the first half of each ``PIECE`` in the low half of its bytes. top-k stands as places in the block
(two bytes each, rising), then values (bf16). All little endian. Encoding is a function of the numbers alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from node.averaging.formats import FORMATS, INT4_BLOCK, INT8_BLOCK, TOP_BLOCK, TOP_SHARE, kept, nbytes_of
from node.core.errors import WireError

Buffer = bytes | bytearray | memoryview
PIECE = 1 << 17
"""Numbers worked on at a time, a multiple of all blocks: 512 KiB, which stay in the processor's second cache. Part of what int4 is on the wire."""

if sys.byteorder != "little":
    raise ImportError("tensors are sent as they lie in memory, which must be little endian")


def encode(tensor: Tensor, codec: str) -> Tensor:
    """The numbers of ``tensor``, any shape, as bytes [nbytes_of] uint8 on the CPU; its own memory for contiguous fp32.

    Raises ValueError for an unknown codec, and for a number that is not finite, or within a fifth of the largest that is;
    fp32, bf16 and fp16 let these pass, and receivers refuse them.
    """
    if codec not in FORMATS:
        nbytes_of(0, codec)
    flat = tensor.detach().to("cpu", torch.float32).reshape(-1)
    if codec in _CASTS:
        return flat.to(_CASTS[codec]).view(torch.uint8)
    return _ENCODERS[codec](flat)


class Coded:
    """The numbers of a part as the bytes they came in, looked through and not opened: who adds them up opens piece by piece, in the
    processor's cache, so 32 MiB of numbers need not lie in memory because 8 MiB of bytes have come.

    Raises WireError, before anything is allocated, when there are more or fewer bytes than ``shape`` takes; and for scales,
    places or values that no encoder writes. ValueError for an unknown codec. ``data`` must not change any more.
    """

    def __init__(self, data: Tensor | Buffer, shape: Sequence[int], codec: str) -> None:
        self.shape, self.numbers, self.codec = tuple(shape), math.prod(shape), codec
        expected = nbytes_of(self.numbers, codec)
        size = data.numel() if isinstance(data, Tensor) else memoryview(data).nbytes
        if size != expected:
            raise WireError(f"{size} bytes for {self.numbers} numbers as {codec}, expected {expected}")
        raw = _aligned(data) if self.numbers else torch.empty(0, dtype=torch.uint8)
        self._lie = raw.view(torch.float32) if codec == "fp32" else None
        if self._lie is None:
            self._open = _OPENERS[codec](raw, self.numbers)

    @property
    def lies(self) -> bool:
        """The numbers are in memory as fp32 already."""
        return self._lie is not None

    @classmethod
    def of(cls, tensor: Tensor) -> Coded:
        """Numbers that travel as they are, or not at all: the same memory if they are fp32, contiguous and on the CPU."""
        flat = tensor.detach().to("cpu", torch.float32).reshape(-1)
        return cls(flat.view(torch.uint8), tensor.shape, "fp32")

    def read(self, start: int, into: Tensor) -> Tensor:
        """As many numbers from ``start`` on, a multiple of ``PIECE``, as ``into`` [numbers] has room for: there, or where they lie
        already and must not be changed."""
        if self._lie is not None:
            return self._lie[start : start + into.numel()]
        for at in range(0, into.numel(), PIECE):
            self._open(start + at, into[at : at + PIECE])
        return into

    def pieces(self) -> Iterator[Tensor]:
        """All of them in order, fp32; each is good until the next is asked for."""
        scratch = torch.empty(0 if self._lie is not None else min(PIECE, self.numbers))
        for start in range(0, self.numbers, PIECE):
            size = min(PIECE, self.numbers - start)
            yield self._lie[start : start + size] if self._lie is not None else self.read(start, scratch[:size])

    def whole(self) -> Tensor:
        """All of them in their shape; for fp32 the memory of the bytes."""
        flat = self._lie if self._lie is not None else self.read(0, torch.empty(self.numbers))
        return flat.view(self.shape)

    def norm(self) -> float:
        """Their 2-norm, not finite where a number is not. The same for the same bytes, whoever asks."""
        if self._lie is not None:
            return float(torch.linalg.vector_norm(self._lie))
        return math.hypot(*(float(torch.linalg.vector_norm(piece)) for piece in self.pieces()))


def decode(data: Tensor | Buffer, numbers: int, codec: str) -> Tensor:
    """The ``numbers`` numbers that ``data`` stands for: fp32 on the CPU, [numbers]. Raises as :class:`Coded`."""
    found = Coded(data, (numbers,), codec).whole()
    return found.clone() if codec == "fp32" else found


def settle(tensor: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """(bytes to send, the numbers that they are to everybody), the latter in the shape of ``tensor``.

    The owner of a result adopts the second, so that all members end with the same bits.
    """
    data = encode(tensor, codec)
    return data, decode(data, tensor.numel(), codec).view(tensor.shape)


class Feedback:
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a round's rounding lost is added to the next one.

    Two phases, because a round may come to nothing: :meth:`encode` remembers what *would* be lost, :meth:`commit` makes it so.
    """

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.lost: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def encode(self, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`settle`, of ``tensor`` and what is owed to it. Raises ValueError when the shape of ``name`` has changed."""
        owed = self.lost.get(name)
        if owed is not None and owed.shape != tensor.shape:
            raise ValueError(f"{name} was {tuple(owed.shape)} and is {tuple(tensor.shape)}")
        whole = tensor.detach().to("cpu", torch.float32) if owed is None else tensor.detach().to("cpu", torch.float32) + owed
        data, sent = settle(whole, self.codec)
        self._pending[name] = whole - sent
        return data, sent

    def commit(self, names: Iterable[str]) -> None:
        """The round took what was last encoded of ``names``."""
        for name in names:
            if name in self._pending:
                self.lost[name] = self._pending.pop(name)

    def void(self) -> None:
        """It did not."""
        self._pending.clear()


_SMALLEST = 1e-37
"""A scale below has an inverse that is infinite, or that processors handle in different ways."""
_LARGEST = 3.4028234663852886e38
"""Of fp32."""
_CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _blockwise(flat: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor, block: int, top: int) -> None:
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
        # The inverse of next to nothing is infinite: such a block is sent as zeros. NaN stays, and is refused.
        inverse = scale.reciprocal().masked_fill_(scale < _SMALLEST, 0.0)
        torch.mul(flat[begin:stop].view(-1, width), inverse[:, None], out=rows)
        codes[begin:stop].copy_(work[begin:stop].round_())


def _int8(flat: Tensor) -> Tensor:
    blocks = -(-flat.numel() // INT8_BLOCK)
    out = torch.empty(nbytes_of(flat.numel(), "int8"), dtype=torch.uint8)
    scales, codes = out[: 4 * blocks].view(torch.float32), out[4 * blocks :].view(torch.int8)
    scratch = torch.empty(min(PIECE, flat.numel()))
    for start in range(0, flat.numel(), PIECE):
        stop = start + PIECE
        _blockwise(
            flat[start:stop], scales[start // INT8_BLOCK : stop // INT8_BLOCK], codes[start:stop], scratch, INT8_BLOCK, 127
        )
    _refuse_infinite(scales, 128)
    return out


def _int4(flat: Tensor) -> Tensor:
    blocks = -(-flat.numel() // INT4_BLOCK)
    out = torch.empty(nbytes_of(flat.numel(), "int4"), dtype=torch.uint8)
    scales, packed = out[: 4 * blocks].view(torch.float32), out[4 * blocks :]
    codes, scratch = torch.empty(PIECE, dtype=torch.int8), torch.empty(min(PIECE, flat.numel()))
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE]
        n = piece.numel()
        _blockwise(piece, scales[start // INT4_BLOCK : (start + PIECE) // INT4_BLOCK], codes[:n], scratch, INT4_BLOCK, 7)
        into = packed[start // 2 : start // 2 + -(-n // 2)]
        half = into.numel()
        into.copy_(codes[:half].view(torch.uint8)).bitwise_and_(15)
        into[: n - half].bitwise_or_(codes[half:n].view(torch.uint8) << 4)
    _refuse_infinite(scales, 8)
    return out


def _top(flat: Tensor) -> Tensor:
    n, whole = flat.numel(), flat.numel() // TOP_BLOCK * TOP_BLOCK
    out = torch.empty(nbytes_of(n, "top-k"), dtype=torch.uint8)
    places, values = out[: 2 * kept(n)].view(torch.int16), out[2 * kept(n) :].view(torch.bfloat16)
    done, share = 0, TOP_BLOCK // TOP_SHARE
    step = PIECE * 4
    for start in [*range(0, whole, step), *([whole] if whole < n else [])]:
        part = flat[start : min(start + step, whole) if start < whole else n]
        rows = part.view(-1, TOP_BLOCK) if start < whole else part.view(1, -1)
        count = share if start < whole else kept(rows.shape[1])
        at = torch.topk(rows.abs(), count, dim=1, sorted=False).indices.sort(dim=1).values
        stop = done + at.numel()
        places[done:stop] = at.reshape(-1).to(torch.int16)
        values[done:stop] = rows.gather(1, at).reshape(-1).to(torch.bfloat16)
        done = stop
    if not bool(torch.isfinite(values).all()):
        raise ValueError("a number that is not finite cannot be sent as top-k")
    return out


Opener = Callable[[int, Tensor], None]
"""(first number, where to): opens a ``PIECE``, or what is left at the end, from a multiple of it on."""


def _from_cast(kind: torch.dtype) -> Callable[[Tensor, int], Opener]:
    def opener(raw: Tensor, numbers: int) -> Opener:
        narrow = raw.view(kind)
        return lambda start, into: (into.copy_(narrow[start : start + into.numel()]), None)[1]

    return opener


def _from_int8(raw: Tensor, numbers: int) -> Opener:
    blocks = -(-numbers // INT8_BLOCK)
    scales, codes = _checked(raw[: 4 * blocks].view(torch.float32), 128), raw[4 * blocks :].view(torch.int8)

    def opener(start: int, into: Tensor) -> None:
        _scale(codes[start : start + into.numel()], scales[start // INT8_BLOCK :], into, INT8_BLOCK)

    return opener


def _from_int4(raw: Tensor, numbers: int) -> Opener:
    blocks = -(-numbers // INT4_BLOCK)
    scales, packed = _checked(raw[: 4 * blocks].view(torch.float32), 8), raw[4 * blocks :].view(torch.int8)

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


def _from_top(raw: Tensor, numbers: int) -> Opener:
    count, whole, share = kept(numbers), numbers // TOP_BLOCK, TOP_BLOCK // TOP_SHARE
    places, values = raw[: 2 * count].view(torch.int16), raw[2 * count :].view(torch.bfloat16)
    if not bool(torch.isfinite(values).all()):
        raise WireError("a top-k value is not finite")
    for at, width in (
        (places[: whole * share].view(-1, share), TOP_BLOCK),
        (places[whole * share :].view(1, -1), numbers - whole * TOP_BLOCK),
    ):
        if not at.numel():
            continue
        if bool((at[:, 0] < 0).any()) or bool((at[:, -1] >= width).any()) or bool((at[:, 1:] <= at[:, :-1]).any()):
            raise WireError("top-k places do not rise within their block")

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
            rows.scatter_(1, places[these].view(-1, each).long(), values[these].view(-1, each).float())
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


def _checked(scales: Tensor, largest: int) -> Tensor:
    """Raises WireError for a scale that is negative, or not finite when multiplied by the ``largest`` code."""
    if not scales.numel():
        return scales
    # One pass for all of it: a NaN fails both comparisons.
    low, high = torch.aminmax(scales)
    if not (float(low) >= 0 and float(high) * largest < _LARGEST):
        raise WireError("a block's scale is negative or not finite")
    return scales


def _refuse_infinite(scales: Tensor, largest: int) -> None:
    if scales.numel() and not float(scales.max()) * largest < _LARGEST:
        raise ValueError("a number that is not finite, or nearly so, cannot be sent in blocks")


def _aligned(data: Tensor | Buffer) -> Tensor:
    """The bytes as uint8 that may be seen as words; copied only when they lie at an odd address or must not be written to."""
    if not isinstance(data, Tensor):
        view = memoryview(data).cast("B")
        data = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    raw = data.view(torch.uint8).reshape(-1)
    return raw.clone() if raw.data_ptr() % 4 or raw.storage_offset() % 4 else raw


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"int8": _int8, "int4": _int4, "top-k": _top}
_OPENERS: dict[str, Callable[[Tensor, int], Opener]] = {
    "bf16": _from_cast(torch.bfloat16),
    "fp16": _from_cast(torch.float16),
    "int8": _from_int8,
    "int4": _from_int4,
    "top-k": _from_top,
}
