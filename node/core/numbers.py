"""Numbers and names that a stranger may have written, and numbers for people."""

import re
from collections.abc import Iterable, Sized
from itertools import groupby
from typing import Any, TypeVar

from node.core.errors import WireError
from node.core.ids import CELL_DIGITS, CellId, PeerId, is_cell

S = TypeVar("S", bound=Sized)

PEER_NAME = 128
"""Characters of a peer's name."""


def whole(value: Any) -> int:
    """The value itself. Raises ValueError for anything but an integer from 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a whole number from 0 to {2**63 - 1}")
    return value


def few(told: S, most: int, what: str) -> S:
    """``told`` itself. Raises WireError for more than ``most`` entries."""
    if len(told) > most:
        raise WireError(f"{len(told)} {what}, at most {most} are told")
    return told


def plural(number: int, what: str) -> str:
    """1, "peer" -> "peer"; 2 -> "peers"; 2, "micro-batch" -> "micro-batches"; 2, "copy" ->
    "copies"."""
    if number == 1:
        return what
    if what.endswith(("s", "x", "z", "tch", "sh")):
        return f"{what}es"
    if what.endswith("y") and what[-2:-1] not in "aeiou":
        return f"{what[:-1]}ies"
    return f"{what}s"


def several(number: int, what: str) -> str:
    """1, "peer" -> "1 peer"; 2 -> "2 peers", with :func:`plural`."""
    return f"{number} {plural(number, what)}"


def human(size: float) -> str:
    """Bytes for people: "9.8 GiB"."""
    value = size
    unit = "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value = value / 1024
        unit = bigger
    if unit == "B":
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}"


def in_words(rows: Iterable[tuple[str, str, int]]) -> list[str]:
    """A plan of memory (when, what, bytes) as one phrase for each time, rows without bytes left
    out."""
    return [
        f"{when} {', '.join(f'{what} {human(nbytes)}' for _, what, nbytes in of)}"
        for when, of in groupby((row for row in rows if row[2]), lambda row: row[0])
    ]


def cell_name(text: Any) -> CellId:
    """A cell's name as others write it, that is not empty. Raises WireError for anything else."""
    if type(text) is not str or not text or not is_cell(text):
        raise WireError(f"a cell's name is {CELL_DIGITS} hex digits")
    return CellId(text)


def peer_name(text: Any) -> PeerId:
    """A peer's name as others write it. Raises WireError for anything else; whether the name is a
    key shows where a signature is checked."""
    if type(text) is not str or not 0 < len(text) <= PEER_NAME:
        raise WireError(f"the name of a peer has 1 to {PEER_NAME} characters")
    if not (text.isascii() and text.isprintable()):
        raise WireError("the name of a peer is printable")
    return PeerId(text)


def short_text(text: Any, most: int) -> str:
    """A text of at most ``most`` characters. Raises WireError for anything else."""
    if type(text) is not str or len(text) > most:
        raise WireError(f"expected a text of at most {most} characters")
    return text


def whole_number(text: str) -> int | None:
    """A number of at most 18 decimal digits, ASCII alone; None for any other text. Unlike int(), it
    takes no sign, space, underscore or digit of another script, and unlike isdigit() no "\u00b2",
    which is no number to int()."""
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    return None


def rate_of(text: str) -> float | None:
    """Bytes a second of "20Mbit", "2.5MB", "2.5MB/s", "20Mbps", "500k"; None if the text is no
    rate. Without a unit it is bytes, as those who limit rates are used to (curl, wget, rsync); k, M
    and G are powers of 1000, Ki, Mi and Gi of 1024."""
    found = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?)\s*([kKMG]?)(i?)(B|bit|bits|bps)?(/s)?", text.strip()
    )
    if found is None or (found[3] and not found[2]) or (found[4] == "bps" and found[5]):
        return None
    step = (1024 if found[3] else 1000) ** " KMG".index(found[2].upper() or " ")
    return float(found[1]) * step / (1 if found[4] in (None, "B") else 8)
