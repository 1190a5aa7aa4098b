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
