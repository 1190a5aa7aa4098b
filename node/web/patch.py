"""Changes between two documents, as JSON merge patches (RFC 7386). Pure.

Documents are dictionaries of dictionaries, numbers, texts and lists, without null. A list is
replaced as a whole.
"""

from collections.abc import Mapping
from typing import Any


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes ``new`` of ``old``; empty if they are equal."""
    found: dict[str, Any] = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := changes(before, value):
                found[key] = inner
        elif value != before:
            found[key] = value
    return found


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
