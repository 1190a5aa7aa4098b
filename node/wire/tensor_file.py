"""Header of a safetensors file, for a writer that streams the numbers behind it.

Format: 8 bytes little-endian length of the header, the header as JSON (name -> dtype, shape,
[begin, end)), then the numbers of every tensor back to back.
https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

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


def file_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """First bytes of a file of ``tensors`` (name to dtype and shape), and the place of each tensor:
    its first byte in the file and the byte behind its last.

    Tensors follow each other in the order of their names; the last place ends the file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _TYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)  # the format wants the numbers aligned
    head = len(body).to_bytes(8, "little") + body
    places = {name: tuple(entries[name]["data_offsets"]) for name in tensors}
    return head, {name: (len(head) + a, len(head) + b) for name, (a, b) in places.items()}
