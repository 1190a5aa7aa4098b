"""Named tensors in one safetensors file, streamed out and hashed on the way, checked before the
library reads it.

Format: 8 bytes little-endian length of the header, the header as JSON (name -> dtype, shape,
[begin, end)), then the numbers of every tensor back to back.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open

from node.checkpoint.files import write
from node.core.errors import Refused

HEADER_LIMIT = 8 << 20
"""Bytes of header this project writes or reads; the library itself allows 100 MB."""

NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.:#\[\]-]{0,199}(/[a-z][a-z0-9_]{0,63})?")
"""A parameter ("model.norm.weight") or an optimizer state of a part
("model.norm.weight/momentum")."""

_TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BLOCK = 8 << 20


def check_name(name: str) -> None:
    """Raises ValueError for a tensor name outside the pattern; a name is never a path, and never
    looks like one."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"not a tensor name: {name[:80]!r}")


def write_tensors(fd: int, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write ``tensors`` (any device, any strides) to a new file; returns (bytes, hex sha256) of
    what was written.

    Raises ValueError for a name that cannot be kept, OSError from the disk.
    """
    sha, size = hashlib.sha256(), 0

    def put(data: memoryview) -> None:
        nonlocal size
        for at in range(0, len(data), _BLOCK):
            piece = data[at : at + _BLOCK]
            write(fd, piece)
            sha.update(piece)
            size += len(piece)

    put(memoryview(_header(tensors)))
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        put(flat.view(torch.uint8).numpy().data)
    return size, sha.hexdigest()


def read_tensors(fd: int, size: int) -> dict[str, torch.Tensor]:
    """Every tensor of an open file of ``size`` bytes, on the CPU, independent of the file
    afterwards.

    The length of the header is checked before the library sees the file. Raises Refused for
    anything that is not such a file, OSError from the disk.
    """
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > size - 8:
        raise Refused("its header is longer than the file")
    if length > HEADER_LIMIT:
        raise Refused(f"its header of {length} bytes is over the limit of {HEADER_LIMIT}")
    try:
        with safe_open(f"/dev/fd/{fd}", framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}
        for name in tensors:
            check_name(name)
    except (SafetensorError, ValueError) as e:
        raise Refused(f"not a file of tensors: {e}") from e
    return tensors


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries, at = {}, 0
    for name in sorted(tensors):
        check_name(name)
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)  # the format wants the numbers aligned
    if len(body) > HEADER_LIMIT:
        raise ValueError(
            f"{len(entries)} tensors need a header of {len(body)} bytes, more than {HEADER_LIMIT}"
        )
    return len(body).to_bytes(8, "little") + body
