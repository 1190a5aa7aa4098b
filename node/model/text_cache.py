"""Keys and values of texts that grow token by token (the KV cache), at the layers of one stage.
Enters: keys and values of new tokens. Leaves: keys and values of the whole text. Never: a token,
a peer, a bound.

Legend: n new tokens, L tokens of a text, K key/value heads, W head width.
"""

from dataclasses import dataclass

from torch import Tensor

from node.model.settings import ModelSettings
from node.model.shapes import head_dim

GROWTH = 128
"""Tokens by which the memory of a text grows at a time."""


def bytes_per_token(settings: ModelSettings, layers: int, width: int = 4) -> int:
    """Bytes of keys and values of one token in ``layers`` layers; ``width``: bytes of a number."""
    return 2 * layers * settings.kv_heads * head_dim(settings) * width


def text_bytes(settings: ModelSettings, layers: int, tokens: int, width: int = 4) -> int:
    """Bytes that a text of ``tokens`` tokens takes, in whole steps of :data:`GROWTH`."""
    steps = -(-tokens // GROWTH)
    return steps * GROWTH * bytes_per_token(settings, layers, width)


class TextCache:
    """Keys and values of one text. Made and extended on the device thread alone.

    ``length``: tokens of the text that are in it. A pass that breaks off leaves it unchanged.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(x.nbytes for x in (*self._keys.values(), *self._values.values()))

    def extend(self, layer: int, keys_nKW: Tensor, values_nKW: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new tokens of one layer behind the others; returns all keys and all values of
        that layer, each [K, L, W]. :meth:`advance` makes them part of the text."""
        keys = self._put(self._keys, layer, keys_nKW)
        values = self._put(self._values, layer, values_nKW)
        return keys, values

    def clear(self) -> None:
        """Forget the text and free its memory."""
        self.length = 0
        self._keys.clear()
        self._values.clear()

    def cut(self, length: int) -> None:
        """Forget the tokens behind the first ``length``; their memory stays for the next ones."""
        self.length = min(self.length, length)

    def advance(self, count: int) -> None:
        """Count the tokens that every layer has been given."""
        self.length += count

    def _put(self, held: dict[int, Tensor], layer: int, new_nKW: Tensor) -> Tensor:
        count, heads, width = new_nKW.shape
        end = self.length + count
        memory = held.get(layer)
        if memory is None or memory.shape[1] < end:
            capacity = -(-end // GROWTH) * GROWTH
            larger = new_nKW.new_empty(heads, capacity, width)
            if memory is not None:
                larger[:, : self.length] = memory[:, : self.length]
            memory = held[layer] = larger
        memory[:, self.length : end] = new_nKW.transpose(0, 1)
        return memory[:, :end]


@dataclass(frozen=True, slots=True)
class Turn:
    """The next ``count`` tokens of one text in a pass over several."""

    cache: TextCache
    count: int
