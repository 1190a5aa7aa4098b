"""Marks on token ids: on tokens that are not trained on, and on tokens that end a document. They
are the two highest bits of an id of 32 bits, so that ids and marks travel as one array. Enters: ids
below 2^30, and conversations with the spans of their text that are trained on.
"""

from dataclasses import dataclass
from typing import Any

CONTEXT = 1 << 31
"""The token is read and not trained on: it is no target."""
LAST = 1 << 30
"""The next token belongs to another document."""


@dataclass(frozen=True)
class Conversation:
    """Text of a conversation; ``trained``: ranges of its characters that are trained on; ``open``:
    the text does not end itself, so that the end of a document follows it."""

    text: str
    trained: tuple[tuple[int, int], ...]
    open: bool = False


def ids_in(marked: Any) -> Any:
    """The ids of an array or tensor of marked ids."""
    return marked & (LAST - 1)
