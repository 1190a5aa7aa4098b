"""The number formats of tensors on their way, and the bytes each takes; ``codecs.py`` encodes and
decodes them. Enters: a name, a count. Leaves: bytes. Never: torch, so that settings and the
simulator can ask."""

from dataclasses import dataclass

INT8_BLOCK = 256
"""Numbers that share a scale in int8."""
INT4_BLOCK = 64
"""Numbers that share a scale in int4, which has so few steps that its blocks must be small."""
TOP_BLOCK = 4096
"""Numbers of a top-k block."""
TOP_SHARE = 32
"""top-k keeps one number of ``TOP_SHARE`` in every block."""
TOP_BITS = 9
"""Bits of a kept number: five of its place, two that say how many share its higher bits, two of its
value."""
TOP_SCALES = 4
"""Bytes of the two magnitudes of a block."""


@dataclass(frozen=True, slots=True)
class Format:
    """``lossy``: coarser than the rounding of half a float; ``biased``: leaves numbers out, so that
    it only works with error feedback; ``finite``: its bytes stand for finite numbers or are
    refused."""

    lossy: bool
    biased: bool
    finite: bool


FORMATS: dict[str, Format] = {
    "fp32": Format(False, False, False),
    "bf16": Format(True, False, False),  # 8 bits of precision, the range of fp32
    "fp16": Format(True, False, False),  # 11 bits of precision, at most 65504
    "int8": Format(True, False, True),  # steps of 1/127 of the largest of a block
    "int4": Format(True, False, True),  # steps of 1/7 of the largest of a block
    "top-k": Format(True, True, True),  # the largest of every TOP_SHARE, in 2 bits
}

BLOCKWISE = ("int8", "int4")
"""Formats in which every block of numbers has a scale: of them, stages may send activations."""


def nbytes_of(numbers: int, name: str) -> int:
    """Bytes that ``numbers`` numbers take. Raises ValueError for an unknown name."""
    match name:
        case "fp32":
            return 4 * numbers
        case "bf16" | "fp16":
            return 2 * numbers
        case "int8":
            return 4 * -(-numbers // INT8_BLOCK) + numbers
        case "int4":
            return 4 * -(-numbers // INT4_BLOCK) + -(-numbers // 2)
        case "top-k":
            whole, rest = divmod(numbers, TOP_BLOCK)
            nbytes = whole * top_row(TOP_BLOCK)
            if rest:
                nbytes += top_row(rest)
            return nbytes
        case _:
            raise ValueError(f"unknown number format {name!r}: use {', '.join(FORMATS)}")


def kept(numbers: int) -> int:
    """Number of elements that top-k keeps: of a whole block its share, of the rest at least one."""
    whole, rest = divmod(numbers, TOP_BLOCK)
    return whole * (TOP_BLOCK // TOP_SHARE) + -(-rest // TOP_SHARE)


def top_row(numbers: int) -> int:
    """Bytes of one top-k block of ``numbers`` numbers: its magnitudes and its codes."""
    return TOP_SCALES + -(-TOP_BITS * kept(numbers) // 8)
