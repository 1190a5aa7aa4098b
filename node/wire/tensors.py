"""One tensor as a head and a run of bytes; many tensors as heads first, then one stream of chunks.

The receiver knows every name, shape and format from the manifest and the plan. A head that says
anything else is refused before memory is set aside for it, and a stream that is longer or shorter
than its heads is refused too. Numbers are little endian, rows outermost first.
"""

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from node.core.errors import WireError
from node.wire.coding import formats
from node.wire.coding.codecs import Coded, check_sendable, dequantise, quantise
from node.wire.coding.formats import BLOCKWISE
from protos import tensor_pb2

Shape = Sequence[int]
Buffer = bytes | bytearray | memoryview
"""Bytes that a reader can be fed, and that :func:`encode` returns."""

PIECE = 1 << 20
"""Bytes of a tensor that have a hash of their own, fewer only in its last piece."""
HASH = 32
"""Bytes of a hash."""

_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The wire's own numbers for these have the same names, in capitals."""


def dtype_of(wire: str) -> torch.dtype:
    """The torch dtype of a wire format's name. Raises ValueError for a name that is not fp32, bf16
    or fp16."""
    if wire not in _WIRES:
        raise ValueError(f"unknown wire format {wire!r}: use {', '.join(_WIRES)}")
    return _WIRES[wire]


def nbytes_of(shape: Shape, wire: str) -> int:
    """Bytes a tensor of ``shape`` takes in one of :data:`~node.wire.coding.formats.FORMATS`. Raises
    ValueError for a negative dimension or an unknown format."""
    if any(d < 0 for d in shape):
        raise ValueError(f"a shape has no negative dimension: {tuple(shape)}")
    return formats.nbytes_of(math.prod(shape), wire)


def expected_head(name: str, shape: Shape, wire: str) -> tensor_pb2.TensorHead:
    """The head that goes before this tensor. Raises ValueError as :func:`nbytes_of`."""
    return tensor_pb2.TensorHead(
        name=name,
        shape=[int(d) for d in shape],
        nbytes=nbytes_of(shape, wire),
        wire=wire.upper().replace("-", "_"),
    )


def compare(head: tensor_pb2.TensorHead, wanted: tensor_pb2.TensorHead, wire: str) -> None:
    """Raises WireError unless ``head`` announces exactly the name, shape, format and number of
    bytes of the one that is ``wanted``, for a tensor in format ``wire``."""
    name = wanted.name
    if head.name != name:
        raise WireError(f"tensor {head.name[:80]!r} where {name!r} belongs")
    if head.shape != wanted.shape:
        raise WireError(
            f"tensor {name!r} has shape {list(head.shape[:8])}, expected {list(wanted.shape)}"
        )
    if head.wire != wanted.wire:
        raise WireError(f"tensor {name!r} travels as format {head.wire}, expected {wire}")
    if head.nbytes != wanted.nbytes:
        raise WireError(f"tensor {name!r} announces {head.nbytes} bytes, expected {wanted.nbytes}")


def encode(tensor: torch.Tensor, wire: str) -> memoryview:
    """The numbers of ``tensor``, any shape and device, as a flat view of bytes.

    A contiguous fp32 tensor on the CPU travelling as fp32 is not copied: the view *is* its memory,
    so the tensor must not change until the last chunk is cut. Elsewhere it is cast on its own
    device, then brought over. bf16 and fp16 round to nearest; numbers beyond fp16's range (65504)
    become infinite, which receivers refuse. Raises ValueError for a tensor that holds no
    floating-point numbers, and for a format without a torch dtype.
    """
    if not tensor.is_floating_point():
        raise ValueError(f"only floating-point tensors travel, not {tensor.dtype}")
    cast = to_host(tensor.detach().to(dtype_of(wire))).contiguous().reshape(-1)
    return cast.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor in a wire format of stages, and scalars about its numbers, all on its own device,
    which may still be computing them. ``looks``: fp32 scalars: the 2-norm of the encoded numbers
    (in int8 and int4: of the exact numbers); if the error is measured, then the 2-norm of the exact
    numbers and the 2-norms of the differences."""

    data: torch.Tensor
    wire: str
    numbers: int
    looks: tuple[torch.Tensor, ...]

    def rms(self, looks: Sequence[float]) -> float:
        """Root mean square of the numbers. ``looks``: values of the scalars."""
        return looks[0] / math.sqrt(max(1, self.numbers))

    def read(self, data: torch.Tensor, looks: Sequence[float]) -> tuple[memoryview, float | None]:
        """(bytes to send, relative error if it is measured) of :attr:`data` on the host, and from
        what the looks are. Raises ValueError in int8 and int4 for a number that is not finite, or
        nearly so."""
        if self.wire in BLOCKWISE:
            check_sendable(data, self.numbers, self.wire)
        flat = data.reshape(-1).view(torch.uint8).numpy().data
        if len(looks) < 2:
            return flat, None
        _, exact, *off = looks
        if not exact:
            return flat, 0.0
        return flat, math.hypot(*off) / exact


def begin_encoding(tensor: torch.Tensor, wire: str, *, measure: bool) -> Encoded:
    """The numbers of ``tensor`` in any format that stages send in, made on its device without a
    wait for it. Raises ValueError for an unknown format, and for a tensor that holds no
    floating-point numbers."""
    if not tensor.is_floating_point():
        raise ValueError(f"only floating-point tensors travel, not {tensor.dtype}")
    exact = tensor.detach()
    if wire in BLOCKWISE:
        norm = _norm(exact)
        encoding, off = quantise(exact, wire, measure=measure)
        looks = (norm,)
        if measure:
            looks = (norm, norm, *off)
        return Encoded(encoding.raw, wire, exact.numel(), looks)
    cast = exact.to(dtype_of(wire)).contiguous()
    looks = (_norm(cast),)
    if measure:
        looks = (*looks, _norm(exact), _norm(cast.float() - exact.float()))
    return Encoded(cast, wire, exact.numel(), looks)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """2-norm, summed in fp32."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32)


def to_host(tensor: torch.Tensor, *, wait: bool = True) -> torch.Tensor:
    """The tensor on the CPU; itself where it is there. Without ``wait`` the copy of a tensor of a
    GPU is only issued, on the current stream.

    A tensor of a GPU arrives in page-locked memory, which torch keeps for the next tensor of its
    size. Fresh pageable memory costs the driver a copy of its own and the system a fault for each
    page: 1.3 GB/s beside 50 on an H100.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    host = _on_host(tensor.shape, tensor.dtype, locked=True)
    return host.copy_(tensor, non_blocking=not wait)


def _on_host(shape: Shape, dtype: torch.dtype, *, locked: bool) -> torch.Tensor:
    """A tensor on the CPU that is not filled yet; in page-locked memory if ``locked`` and if the
    system locks more pages."""
    if locked:
        with contextlib.suppress(RuntimeError):
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    return torch.empty(tuple(shape), dtype=dtype)


def chunks(buffer: Buffer, size: int) -> Iterator[bytes]:
    """Cut into messages of at most ``size`` bytes, in order; nothing for an empty buffer."""
    view = memoryview(buffer)
    for start in range(0, len(view), size):
        yield bytes(view[start : start + size])


class BytesReader:
    """Puts a stream of chunks back together, as the bytes of each tensor.

    ``wanted`` are the heads this side knows must come, in order, all in format ``wire``. The heads
    that came are compared with them when the reader is made (WireError). Memory for a tensor is set
    aside when its first byte arrives, so that a sender of nothing costs nothing.
    """

    def __init__(
        self,
        heads: Sequence[tensor_pb2.TensorHead],
        wanted: Sequence[tensor_pb2.TensorHead],
        wire: str,
    ) -> None:
        if len(heads) != len(wanted):
            raise WireError(f"{len(heads)} tensors announced, expected {len(wanted)}")
        for head, want in zip(heads, wanted, strict=True):
            compare(head, want, wire)
        self._wanted = wanted
        self._parts = list[torch.Tensor]()
        self._into = memoryview(b"")
        """Bytes of the last tensor that are still to be filled."""
        self.nbytes = self.remaining = sum(head.nbytes for head in wanted)
        """Bytes of the whole stream, and bytes still missing."""

    def feed(self, data: Buffer) -> None:
        """Take the next bytes; chunks may cross tensors. Raises WireError, taking nothing, when
        they are too many."""
        view = memoryview(data)
        if len(view) > self.remaining:
            raise WireError(
                f"{len(view)} bytes came where {self.remaining} were left of {self.nbytes}"
            )
        self.remaining -= len(view)
        while len(view):
            while not len(self._into):
                self._into = self._open()
            taken = min(len(view), len(self._into))
            self._into[:taken] = view[:taken]
            self._into = self._into[taken:]
            view = view[taken:]

    def fill(self, write: Callable[[memoryview], int]) -> None:
        """Let ``write`` put the next bytes of a tensor into the memory that it is given; it returns
        their number. Raises WireError if no bytes are missing."""
        if not self.remaining:
            raise WireError(f"more bytes came than the {self.nbytes} announced")
        while not len(self._into):
            self._into = self._open()
        taken = write(self._into)
        self._into = self._into[taken:]
        self.remaining -= taken

    def raw(self) -> list[torch.Tensor]:
        """The tensors as they came, in order. Raises WireError when bytes are missing."""
        if self.remaining:
            raise WireError(f"the stream ended {self.remaining} bytes short of {self.nbytes}")
        while len(self._parts) < len(self._wanted):  # the last ones have no bytes
            self._open()
        return self._parts

    def _open(self) -> memoryview:
        part = torch.empty(self._wanted[len(self._parts)].nbytes, dtype=torch.uint8)
        self._parts.append(part)
        return part.numpy().data


class TensorReader(BytesReader):
    """The same as numbers: ``expected`` lists the (name, shape) that must come. ``locked``: they
    are put into page-locked memory, for a GPU. int8 and int4 stay bytes until they are read."""

    def __init__(
        self,
        heads: Sequence[tensor_pb2.TensorHead],
        expected: Sequence[tuple[str, Shape]],
        wire: str,
        *,
        locked: bool = False,
    ) -> None:
        self.wire = wire
        self._dtype = torch.uint8
        if wire not in BLOCKWISE:
            self._dtype = dtype_of(wire)
        self._locked = locked
        self._coded: Coded | None = None
        """The bytes of the last tensor, looked through."""
        super().__init__(heads, [expected_head(n, shape, wire) for n, shape in expected], wire)

    def finish(self) -> list[torch.Tensor]:
        """The tensors, fp32 on the CPU, in order. Raises WireError when bytes are missing. Before,
        :meth:`raw` gives the last one still in the wire's format, for a look at the numbers."""
        done = self.raw()
        self._widen()
        return done

    def arrive(self, up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take the tensor to where ``up`` brings it, in the wire's format. Of a reader of one
        tensor. Raises WireError when bytes are missing."""
        (came,) = self.raw()
        self._parts[0] = up(came)
        self._into = memoryview(b"")  # it would keep the memory of before alive

    def rms(self) -> float:
        """Root mean square of the last tensor's numbers; NaN or infinite when a number is, or when
        their squares are beyond fp32. Raises WireError when bytes are missing, and for scales that
        no encoder writes."""
        last = self.raw()[-1]
        if self.wire in BLOCKWISE:
            self._coded = Coded(last, self._wanted[-1].shape, self.wire)
            norm = self._coded.norm()
        else:
            norm = torch.linalg.vector_norm(last, dtype=torch.float32).item()
        return norm / math.sqrt(max(1, math.prod(self._wanted[-1].shape)))

    def numbers(self, device: torch.device) -> torch.Tensor:
        """The first tensor, fp32 on ``device``. It goes over the bus in the wire's format. Raises
        WireError when bytes are missing, and for scales that no encoder writes."""
        came = self.raw()[0].to(device, non_blocking=True)
        if self.wire not in BLOCKWISE:
            return came.float()
        if self._coded is not None and self._coded.raw.data_ptr() == came.data_ptr():
            return self._coded.whole()  # its scales have been looked at
        return dequantise(came, self._wanted[0].shape, self.wire)

    def _widen(self) -> None:
        # One tensor at a time, as it gets full: two copies of everything never exist together.
        if not self._parts:
            return
        if self.wire in BLOCKWISE:
            shape = self._wanted[len(self._parts) - 1].shape
            self._parts[-1] = dequantise(self._parts[-1], shape, self.wire)
        else:
            self._parts[-1] = self._parts[-1].float()

    def _open(self) -> memoryview:
        self._widen()
        head = self._wanted[len(self._parts)]
        shape: Shape = head.shape
        if self.wire in BLOCKWISE:
            shape = (head.nbytes,)
        tensor = _on_host(shape, self._dtype, locked=self._locked)
        self._parts.append(tensor)
        return tensor.reshape(-1).view(torch.uint8).numpy().data


def pieces(nbytes: int) -> list[tuple[int, int]]:
    """Offset and length of each piece of ``nbytes`` bytes, in order."""
    return [(at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)]


def hash_of(data: Buffer) -> bytes:
    """The :data:`HASH` bytes of BLAKE3 that name a piece."""
    return blake3(data).digest()


def hashes_of(data: memoryview) -> bytes:
    """The hashes of all pieces of a tensor's bytes, one after the other."""
    return b"".join(hash_of(data[at : at + size]) for at, size in pieces(len(data)))


def digest(named: Mapping[str, torch.Tensor]) -> str:
    """Hex digest of named tensors, whatever their order, device or strides: a tree of hashes, see
    :func:`digest_of`. Equal digests mean bit-equal fp32 values: 0.0 and -0.0 differ."""
    return digest_of({n: (t.shape, hashes_of(encode(t, "fp32"))) for n, t in named.items()})


def digest_of(hashes: Mapping[str, tuple[Shape, bytes]]) -> str:
    """The digest of tensors, made from their shapes and :func:`hashes_of` their fp32 bytes.

    Hex BLAKE3 over (name, shape, hashes) in sorted order of names, lengths written before the bytes
    they measure; the shape gives the number of hashes.
    """
    whole = blake3()
    for name in sorted(hashes):
        label = name.encode()
        shape, each = hashes[name]
        whole.update(struct.pack("<I", len(label)) + label)
        whole.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + each)
    return whole.hexdigest()
