"""Error feedback between cells: who rounds keeps what its rounding lost, and adds it to what it
rounds next of the same part. Enters: what this peer says for its cell, means it makes for a group,
what became of both. Leaves: numbers to say, what is owed. Never: a word with anybody: nobody has to
know what another owes.

A peer rounds twice: deltas when it speaks for its cell, means of the parts that it averages. Each
loss stays with who made it until that peer speaks, or averages that part, again; a cell's members
take turns and owe apart. So there is nothing to agree on: who joins or catches up owes nothing, who
is in another cell than before pays there, and with who dies goes what it owes. Whatever was moved
has been said, or is owed by somebody (Seide et al. 2014; both ways as DoubleSqueeze, arXiv
1905.05957).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from node.averaging.coding.codecs import settle
from node.averaging.coding.formats import FORMATS
from node.averaging.exchange.request import PartOrigin
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId

Named = Mapping[str, Tensor]
_State = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
WORDS, MEANS, LATE = "words", "means", "late"
"""What is owed of a part, in a checkpoint."""
FADES = 0.95
"""Share that is kept of what is owed in formats that leave numbers out, where cells lead
themselves: a number's turn comes after many rounds, and old differences point where nobody is any
more (SparseLoCo, arXiv 2508.15706)."""


def feedback_of(s: OuterSettings) -> ErrorFeedback:
    """Nothing owed yet, under these settings."""
    return ErrorFeedback(s.codec, FADES if s.windows and FORMATS[s.codec].biased else 1.0)


class ErrorFeedback:
    """``words``: lost when this peer spoke; ``means``: lost when it averaged; ``late``: what its
    cell has moved by in the last round that carried the part and was closed without it, for the
    next one to take. fp32 on the CPU, by part, nothing where nothing was."""

    def __init__(self, codec: str, keeps: float = 1.0) -> None:
        """``keeps``: share of what is owed that the next word takes up."""
        self.codec, self.keeps = codec, keeps
        self.words: dict[str, Tensor] = {}
        self.means: dict[str, Tensor] = {}
        self.late: dict[str, Tensor] = {}
        self._said: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._round = ""
        self._next: _State | None = None
        self._before: _State | None = None

    # ----------------------------------------------------------- a round

    def begin(self, round: str) -> None:
        """An attempt of the round of this name: nothing of another one that was not adopted
        counts."""
        if round != self._round:
            self._said, self._made, self._next, self._round = {}, {}, None, round

    @torch.no_grad()
    def catches_up(self, given: Named) -> dict[str, Tensor]:
        """A contribution, with what the round before was closed without."""
        return {name: _sum(tensor, self.late.get(name)) for name, tensor in given.items()}

    @torch.no_grad()
    def says(self, given: Named) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what is said of ``given`` and what is owed to it, its bytes). Asked again in the same
        round it is the same.

        What cannot be said comes back as it is, without bytes, for the exchange to refuse; nothing
        is owed then.
        """
        said: dict[str, Tensor] = {}
        coded: dict[str, Tensor] = {}
        for name, tensor in given.items():
            owed = self.words.get(name)
            whole = _sum(tensor, owed if owed is None or self.keeps == 1.0 else owed * self.keeps)
            try:
                coded[name], said[name] = settle(whole, self.codec)
            except ValueError:
                self._said, self.words = {}, {}
                return dict(given), {}
            self._said[name] = whole - said[name]
        return said, coded

    @torch.no_grad()
    def makes(self, means: Named) -> dict[str, Tensor]:
        """Means of parts that this peer averages, with what is owed to them: what is to be
        rounded."""
        made = {name: _sum(tensor, self.means.get(name)) for name, tensor in means.items()}
        self._made |= made
        return made

    @torch.no_grad()
    def ended(
        self,
        parts: Mapping[str, PartOrigin],
        fresh: Named,
        me: PeerId,
        refused: bool = False,
        late: Named | None = None,
    ) -> None:
        """The round has brought ``fresh``, made as ``parts`` says. ``refused``: what this peer said
        is no good to anybody. ``late``: what its cell had of the parts that were closed without it
        and counts next time; of what was late before nothing is kept.

        What was not taken of its words is owed no more than before: a cell's share of a round may
        be lost, and is not doubled.
        """
        words = {} if refused else dict(self.words)
        words |= {
            n: lost for n, lost in self._said.items() if n in parts and me in parts[n].contributors
        }
        # a late step may add to it on its own thread
        means, made = (
            dict(self.means),
            dict(self._made),
        )
        means |= {
            n: whole - fresh[n] for n, whole in made.items() if n in parts and parts[n].owner == me
        }
        self._next = (
            words,
            means,
            {n: t for n, t in self.late.items() if n not in parts} | dict(late or {}),
        )

    def spoken(self) -> None:
        """What was said last has been taken whole: its loss is owed from now on."""
        me = PeerId("")
        self.ended({name: PartOrigin(me, 1, (me,)) for name in self._said}, {}, me)

    # ----------------------------------------------------------- versions

    def moved(self) -> None:
        """What the round brought is in place."""
        self._replace(self._next)

    @property
    def owed(self) -> dict[str, Tensor]:
        """To its words at the version that is final."""
        return self.words if self._before is None else self._before[0]

    def takes_over(self, words: Named) -> None:
        """Another replica of the cell owes this to what the cell says."""
        self._replace((dict(words), dict(self.means), dict(self.late)))

    def copied(self, names: Collection[str]) -> None:
        """The result for ``names`` came whole from others: what became of our part in it is not
        known, so nothing is owed there."""
        words, means, late = (
            {n: t for n, t in side.items() if n not in names}
            for side in (self.words, self.means, self.late)
        )
        self._replace((words, means, late))

    def settled(self) -> None:
        """What is in place is final."""
        self._before = None

    def rolled_back(self) -> None:
        """The last version was undone."""
        if self._before is not None:
            self.words, self.means, self.late = self._before
        self._before = None

    def _replace(self, after: _State | None) -> None:
        if after is not None:
            self._before = self._before or (self.words, self.means, self.late)
            self.words, self.means, self.late = after
        self._next = None

    # ----------------------------------------------------------- the disk

    def saved(self, name: str) -> dict[str, Tensor]:
        """What a checkpoint keeps of one part."""
        return {which: of[name] for which, of in self._sides if name in of}

    def restored(self, name: str, found: Named, shape: tuple[int, ...]) -> None:
        """What a checkpoint had of one part."""
        for which, of in self._sides:
            if which in found and tuple(found[which].shape) == tuple(shape):
                of[name] = found[which]

    @property
    def _sides(self) -> tuple[tuple[str, dict[str, Tensor]], ...]:
        return (WORDS, self.words), (MEANS, self.means), (LATE, self.late)


def _sum(tensor: Tensor, residual: Tensor | None) -> Tensor:
    here = tensor.detach().to("cpu", torch.float32)
    return here if residual is None else here + residual
