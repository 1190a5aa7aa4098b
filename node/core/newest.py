"""A table that keeps its newest entries: strangers can fill it, and not the memory."""

from collections import OrderedDict
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """Map of at most ``most`` entries. Setting one makes it the newest; the oldest makes room."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """For :mod:`copy`: the bound, then the entries."""
        return type(self), (self._most,), None, None, iter(self.items())
