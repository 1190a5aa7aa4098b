"""A language that needs no file and whose best possible loss is known: a seeded Markov chain over
32 letters."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

LETTERS = b"abcdefghijklmnopqrstuvwxyz .,;?\n"
"""What the symbols look like, so that samples can be read; also their token ids under the byte
tokenizer."""

_V = len(LETTERS)
_BITS = 12
_FAVOURITES = (0.5, 0.25, 0.125, 0.0625)
"""Shares of a context's four favourite successors; the rest, a sixteenth, is spread evenly over all
letters, which makes the chain ergodic: there is one entropy rate, whatever the first letters."""


class MarkovLanguage:
    """Each letter depends on the two before it. Every machine makes the same text from the same
    seed: probabilities are multiples of 2**-12 and the dice are the raw words of a counter-based
    generator."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        dice = self._dice("grammar")
        favourites = dice.random_raw(_V * _V * len(_FAVOURITES)) % np.uint64(_V)
        counts = np.full((_V * _V, _V), (1 << _BITS) // 16 // _V, dtype=np.int64)
        rows = np.arange(_V * _V)
        for share, successor in zip(
            _FAVOURITES, favourites.reshape(len(_FAVOURITES), -1).astype(np.int64), strict=True
        ):
            np.add.at(counts, (rows, successor), int(share * (1 << _BITS)))
        self._counts = counts

    def _dice(self, use: str) -> np.random.Philox:
        digest = hashlib.sha256(f"{self.seed}:{use}".encode()).digest()
        return np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    @cached_property
    def probabilities(self) -> np.ndarray:
        """[V * V, V] float64: row ``a * V + b`` is the distribution of the letter after the letters
        number a, b."""
        return self._counts / (1 << _BITS)

    def generate(self, tokens: int) -> np.ndarray:
        """The first ``tokens`` token ids of the language's only text, uint8."""
        # One table entry per (context, throw of 12 bits): the next letter.
        table = np.repeat(
            np.tile(np.arange(_V, dtype=np.uint8), _V * _V), self._counts.reshape(-1)
        ).tobytes()
        throws = (
            (self._dice("text").random_raw(tokens) >> np.uint64(64 - _BITS))
            .astype(np.int64)
            .tolist()
        )
        out, context = bytearray(tokens), 0
        for i, throw in enumerate(throws):
            letter = table[context << _BITS | throw]
            out[i] = letter
            context = (context % _V) * _V + letter
        return np.frombuffer(LETTERS, dtype=np.uint8)[np.frombuffer(out, dtype=np.uint8)]
