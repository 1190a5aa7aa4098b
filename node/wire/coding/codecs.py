"""Activations, differences and gradients in few bits: the bytes that one peer sends, and the
numbers that the others read from them. Enters: fp32 numbers. Leaves: bytes, and the numbers that
everybody will have. Never: memory for bytes that were not counted first; parameters (see
``outer.check``): their rounding would add up.

How each format lies in its bytes is in ``layouts.py``. Encoding is a function of the numbers alone.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from node.core.errors import StepFault, WireError
from node.wire.coding.formats import FORMATS, nbytes_of
from node.wire.coding.layouts import FAULTS, OPENERS, PIECE, STEP, WRITERS, at_once

if sys.byteorder != "little":
    raise ImportError("tensors are sent as they lie in memory, which must be little endian")


CPU = torch.device("cpu")


class Numbers(ABC):
    """fp32 numbers of ``shape`` that need not be in memory: they are decoded one ``STEP`` at a
    time, in the processor's cache, so that 8 MiB of received bytes are not first written to memory
    as 32 MiB of numbers and then read again."""

    shape: tuple[int, ...]
    numbers: int

    def read(self, start: int, into: Tensor) -> Tensor:
        """Read numbers from ``start``, a multiple of ``STEP``, to fill ``into`` [numbers]. Returns
        ``into``, or a view of memory that has the numbers already and must not be changed."""
        for at in range(0, into.numel(), STEP):
            self._piece(start + at, into[at : at + STEP])
        return into

    @abstractmethod
    def _piece(self, start: int, into: Tensor) -> None:
        """Fill ``into`` with the numbers from ``start`` on, at most a ``STEP``."""

    def whole(self) -> Tensor:
        """All the numbers in their shape."""
        return self.read(0, torch.empty(self.numbers)).view(self.shape)

    def norm(self) -> float:
        """Their 2-norm, not finite where a number is not. Equal numbers give equal bits at every
        peer, as long as they are on the CPU."""
        scratch = torch.empty(min(STEP, self.numbers))
        starts = range(0, self.numbers, STEP)
        norms: list[float] = []
        for start in starts:
            # The sum of more squares in fp32 would be less exact.
            pieces = self.read(start, scratch[: self.numbers - start]).split(PIECE)
            norms += [float(torch.linalg.vector_norm(piece)) for piece in pieces]
        return math.hypot(*norms)


TYPED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats of parameters, which lie in memory as they travel."""


class Coded(Numbers):
    """The numbers of a part as the bytes they came in, looked through and not opened.

    Raises WireError, before anything is allocated, when there are more or fewer bytes than
    ``shape`` takes; and for scales, places or values that no encoder writes. ValueError for an
    unknown codec. ``data`` must not change any more.
    """

    def __init__(self, data: Tensor, shape: Sequence[int], codec: str) -> None:
        self.shape = tuple(shape)
        self.numbers = math.prod(shape)
        self.codec = codec
        expected = nbytes_of(self.numbers, codec)
        if data.numel() != expected:
            raise WireError(
                f"{data.numel()} bytes for {self.numbers} numbers as {codec}, expected {expected}"
            )
        if self.numbers:
            raw = _aligned(data)
        else:
            raw = torch.empty(0, dtype=torch.uint8, device=data.device)
        if codec in FAULTS and (fault := FAULTS[codec](raw, self.numbers)):
            raise WireError(fault)
        self.lies = codec == "fp32"
        """True if the numbers are in memory as fp32 already."""
        self.raw = raw
        self.open = OPENERS[codec](raw, self.numbers)
        """Reads numbers from the first of a piece on; :meth:`read` calls it piece by piece."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Coded":
        """Numbers that travel as they are, or not at all: the same memory if they are fp32 or bf16,
        contiguous and on the CPU."""
        if tensor.dtype is torch.bfloat16:
            return cls(tensor.detach().cpu().reshape(-1).view(torch.uint8), tensor.shape, "bf16")
        return cls(_flat(tensor).view(torch.uint8), tensor.shape, "fp32")

    def read(self, start: int, into: Tensor) -> Tensor:
        if self.lies:
            return self.raw.view(torch.float32)[start : start + into.numel()]
        return super().read(start, into)

    def _piece(self, start: int, into: Tensor) -> None:
        self.open(start, into)

    def whole(self) -> Tensor:
        """All the numbers in their shape, on the device of the bytes; for fp32 their memory."""
        if self.lies:
            return self.raw.view(torch.float32).view(self.shape)
        if not self.raw.is_cuda:
            return super().whole()
        # A GPU reads all pieces at once.
        into = torch.empty(self.numbers, device=self.raw.device)
        if self.numbers:
            self.open(0, into)
        return into.view(self.shape)

    def norm(self) -> float:
        if self.lies or self.raw.is_cuda:
            return float(torch.linalg.vector_norm(self.whole()))
        return super().norm()


class Rounded(Numbers):
    """Numbers of ours as others would have them if they got them in ``codec``: rounded when they
    are asked for."""

    def __init__(self, tensor: Tensor, codec: str) -> None:
        self.shape = tuple(tensor.shape)
        self.numbers = tensor.numel()
        self._flat = _flat(tensor)
        self._way = Encoding(min(STEP, self.numbers), codec)

    def _piece(self, start: int, into: Tensor) -> None:
        self._way.write(0, self._flat[start : start + into.numel()])
        self._way.read(0, into)


class Encoding:
    """The bytes of ``numbers`` numbers in ``codec``, written a piece at a time; each can be read
    again while it is in the cache. ``device``: of the numbers and the bytes; other than a CPU for
    ``BLOCKWISE`` formats alone.

    Raises ValueError for an unknown codec.
    """

    def __init__(self, numbers: int, codec: str, device: torch.device = CPU) -> None:
        self.numbers = numbers
        self.codec = codec
        self._raw = torch.empty(nbytes_of(numbers, codec), dtype=torch.uint8, device=device)
        self.write = WRITERS[codec](self._raw, numbers)
        """Takes a ``STEP`` of numbers (fp32, CPU, contiguous), or the shorter rest at the end, and
        their first index, a multiple of ``STEP``."""
        self.read = OPENERS[codec](self._raw, numbers)
        """Gives the numbers written there, as everybody will decode them."""

    @property
    def raw(self) -> Tensor:
        """All the bytes [nbytes_of] uint8, which nobody has looked at."""
        return self._raw

    def done(self) -> Tensor:
        """All the bytes [nbytes_of] uint8. Raises ValueError as :func:`encode`."""
        check_sendable(self._raw, self.numbers, self.codec)
        return self._raw


def check_sendable(data: Tensor, numbers: int, codec: str) -> None:
    """Raises ValueError if the bytes of an encoder show that it was given a number that cannot be
    sent as ``codec``."""
    if codec in FAULTS and FAULTS[codec](data, numbers):
        raise ValueError(f"a number that is not finite, or nearly so, cannot be sent as {codec}")


def encode(tensor: Tensor, codec: str) -> Tensor:
    """The numbers of ``tensor``, any shape, as bytes [nbytes_of] uint8 on the CPU; its own memory
    for contiguous fp32.

    Raises ValueError for an unknown codec, and for a number that is not finite, or within a fifth
    of the largest that is; fp32, bf16 and fp16 let these pass, and receivers refuse them.
    """
    flat = _flat(tensor)
    if codec == "fp32":
        return flat.view(torch.uint8)
    encoding = Encoding(flat.numel(), codec)
    for start in range(0, flat.numel(), STEP):
        encoding.write(start, flat[start : start + STEP])
    return encoding.done()


def quantise(
    tensor: Tensor, codec: str, *, measure: bool = False
) -> tuple[Encoding, tuple[Tensor, ...]]:
    """Returns ``tensor`` in a ``BLOCKWISE`` format, on its own device, and the 2-norms of the
    differences of each piece from the numbers in it; none unless ``measure``. Nothing is looked at
    here, so a GPU may still be writing: :meth:`Encoding.done` has the bytes and their check.

    Each piece is read again while it is in the cache.
    """
    flat = tensor.detach().to(torch.float32).reshape(-1)
    numbers = flat.numel()
    encoding = Encoding(numbers, codec, flat.device)
    step = max(1, at_once(flat, numbers))
    again = torch.empty(step if measure else 0, device=flat.device)
    off: list[Tensor] = []
    for start in range(0, numbers, step):
        piece = flat[start : start + step]
        encoding.write(start, piece)
        if measure:
            read = again[: piece.numel()]
            encoding.read(start, read)
            off.append(torch.linalg.vector_norm(read.sub_(piece)))
    return encoding, tuple(off)


def dequantise(data: Tensor, shape: Sequence[int], codec: str) -> Tensor:
    """The inverse of :func:`quantise`: fp32 in ``shape``, on the device of ``data``. Raises as
    :class:`Coded`."""
    return Coded(data, shape, codec).whole()


def decode(data: Tensor, numbers: int, codec: str) -> Tensor:
    """Decode ``numbers`` numbers from ``data``: fp32 on the CPU, [numbers]. Raises as
    :class:`Coded`."""
    found = Coded(data, (numbers,), codec).whole()
    if codec == "fp32":
        return found.clone()
    return found


def settle(tensor: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """Returns the bytes to send and the numbers that everybody decodes from them, in the shape of
    ``tensor``.

    The owner of a result adopts the second, so that all members end with the same bits.
    """
    data = encode(tensor, codec)
    return data, decode(data, tensor.numel(), codec).view(tensor.shape)


def opened(coded: Coded) -> tuple[Tensor, bool]:
    """The numbers, fp32, or bf16 where they travel so, and True if all are finite. They are checked
    while they are in the cache, and only in formats that can hold a number that is not finite."""
    sure = FORMATS[coded.codec].finite
    if coded.codec in TYPED:
        numbers = coded.raw.view(TYPED[coded.codec]).view(coded.shape)
        return numbers, finite(numbers)
    numbers = torch.empty(coded.numbers)
    fine = True
    for start in range(0, coded.numbers, STEP):
        piece = coded.read(start, numbers[start : start + STEP])
        fine &= sure or finite(piece)
    return numbers.view(coded.shape), fine


def finite(tensor: Tensor) -> bool:
    """Return True if no number is NaN or infinite: a sum hides neither. The sum of large finite
    numbers may overflow all the same; then each number is checked."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def settled(name: str, given: Numbers, codec: str) -> tuple[Tensor, Tensor]:
    """A fresh part as every member will decode it (CPU, contiguous, fp32, or bf16 where it travels
    so: the memory of ``given`` if it has this format), and its bytes.

    Raises StepFault for numbers that are not finite or cannot be sent in ``codec``; gradients of
    others may lead to such numbers.
    """
    if codec in TYPED and isinstance(given, Coded) and given.codec == codec:
        data = given.raw
        fresh = data.view(TYPED[codec])
        fine = finite(fresh)
    else:
        fresh = torch.empty(given.numbers)
        fine = True
        sure = FORMATS[codec].finite
        encoding = None
        if codec != "fp32":
            encoding = Encoding(given.numbers, codec)
        scratch = torch.empty(0 if encoding is None else min(STEP, given.numbers))
        for start in range(0, given.numbers, STEP):
            piece = fresh[start : start + STEP]
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


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).reshape(-1)


def _aligned(data: Tensor) -> Tensor:
    """The bytes as uint8 that may be seen as words; copied only when they lie at an odd address."""
    raw = data.view(torch.uint8).reshape(-1)
    if raw.data_ptr() % 4 or raw.storage_offset() % 4:
        return raw.clone()
    return raw
