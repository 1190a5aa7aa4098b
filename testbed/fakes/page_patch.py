"""Merge patches as the page applies them, in Python."""

from collections.abc import Mapping
from typing import Any


def merged(old: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with the changes of ``patch``, as the page makes them."""
    made = dict(old)
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, dict):
            before = made.get(key)
            if not isinstance(before, dict):
                before = {}
            made[key] = merged(before, value)
        else:
            made[key] = value
    return made
