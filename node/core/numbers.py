"""Numbers and names that a stranger may have written."""

from __future__ import annotations

from typing import Any

from node.core.errors import WireError
from node.core.ids import CELL_DIGITS, CellId, is_cell


def whole(value: Any, least: int = 0, below: int = 2**63) -> int:
    """The value itself. Raises ValueError for anything but an integer of this range."""
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"expected a whole number from {least} to {below - 1}")
    return value


def cell_name(text: Any) -> CellId:
    """A cell's name as others write it, that is not empty. Raises WireError for anything else."""
    if type(text) is not str or not text or not is_cell(text):
        raise WireError(f"a cell's name is {CELL_DIGITS} hex digits")
    return CellId(text)
