"""Error feedback between cells: who rounds keeps what its rounding lost, and adds it to what it
rounds next of the same part. Enters: what this peer says for its cell, what became of it. Leaves:
numbers to say, what is owed. Never: a word with anybody outside the cell: nobody has to know what
another owes.

All replicas of a cell owe the same, because each may be asked for what the cell says: who joins
takes it over with the anchor. Whatever was moved has been said, or is owed (Seide et al. 2014).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from node.averaging.coding.codecs import settle
from node.averaging.coding.formats import FORMATS
from node.averaging.strategies.outer import OuterSettings

Named = Mapping[str, Tensor]
WORDS = "words"
"""What is owed of a part, in a checkpoint."""
FADES = 0.95
"""Share that is kept of what is owed in formats that leave numbers out: a number's turn comes after
many rounds, and old differences point where nobody is any more (SparseLoCo, arXiv 2508.15706)."""


def feedback_of(s: OuterSettings) -> ErrorFeedback:
    """Nothing owed yet, under these settings."""
    return ErrorFeedback(s.codec, FADES if FORMATS[s.codec].biased else 1.0)


class ErrorFeedback:
    """``words``: lost when this peer spoke. fp32 on the CPU, by part, nothing where nothing was."""

    def __init__(self, codec: str, keeps: float = 1.0) -> None:
        """``keeps``: share of what is owed that the next word takes up."""
        self.codec, self.keeps = codec, keeps
        self.words: dict[str, Tensor] = {}
        self._said: dict[str, Tensor] = {}
        self._round = ""
        self._next: dict[str, Tensor] | None = None
        self._before: dict[str, Tensor] | None = None

    # ----------------------------------------------------------- a round

    def begin(self, round: str) -> None:
        """An attempt of the round of this name: nothing of another one that was not adopted
        counts."""
        if round != self._round:
            self._said, self._next, self._round = {}, None, round

    @torch.no_grad()
    def says(self, given: Named) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what is said of ``given`` and what is owed to it, its bytes). Asked again in the same
        round it is the same.

        What cannot be said comes back as it is, without bytes; nothing is owed then.
        """
        said: dict[str, Tensor] = {}
        coded: dict[str, Tensor] = {}
        for name, tensor in given.items():
            whole = tensor.detach().to("cpu", torch.float32)
            if (owed := self.words.get(name)) is not None:
                whole = whole + owed * self.keeps
            try:
                coded[name], said[name] = settle(whole, self.codec)
            except ValueError:
                self._said, self.words = {}, {}
                return dict(given), {}
            self._said[name] = whole - said[name]
        return said, coded

    def spoken(self) -> None:
        """What was said last has been taken whole: its loss is owed from now on."""
        self._next = {**self.words, **self._said}

    # ----------------------------------------------------------- versions

    def moved(self) -> None:
        """What the round brought is in place."""
        self._replace(self._next)

    @property
    def owed(self) -> dict[str, Tensor]:
        """At the version that is final."""
        return self.words if self._before is None else self._before

    def takes_over(self, words: Named) -> None:
        """Another replica of the cell owes this."""
        self._replace(dict(words))

    def settled(self) -> None:
        """What is in place is final."""
        self._before = None

    def rolled_back(self) -> None:
        """The last version was undone."""
        if self._before is not None:
            self.words = self._before
        self._before = None

    def _replace(self, after: dict[str, Tensor] | None) -> None:
        if after is not None:
            self._before = self.words if self._before is None else self._before
            self.words = after
        self._next = None

    # ----------------------------------------------------------- the disk

    def saved(self, name: str) -> dict[str, Tensor]:
        """What a checkpoint keeps of one part."""
        return {WORDS: self.words[name]} if name in self.words else {}

    def restored(self, name: str, found: Named, shape: tuple[int, ...]) -> None:
        """What a checkpoint had of one part."""
        if WORDS in found and tuple(found[WORDS].shape) == tuple(shape):
            self.words[name] = found[WORDS]
