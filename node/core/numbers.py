"""Numbers that a stranger may have written."""

from __future__ import annotations

from typing import Any


def whole(value: Any, least: int = 0, below: int = 2**63) -> int:
    """The value itself. Raises ValueError for anything but an integer of this range."""
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"expected a whole number from {least} to {below - 1}")
    return value
