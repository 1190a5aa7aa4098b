"""What a stage gives in a window, and how contributions of cells are merged. Pure. Enters:
parameters, what cells gave. Leaves: what partners may fetch, what replaces the parameters. Never: a
message, a plan, who the partners are.

All arithmetic of rounds between cells is here, so that every cell of a group computes the same bits
from the same contributions.

Error feedback (Seide et al. 2014): what coding lost of a difference is kept and added to the next
difference of the same part, so nothing is lost for good. All replicas of a cell keep the same,
because any of them may be asked for what the cell gives; a newcomer fetches it with the anchor.
Other cells need not know it.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from node.averaging.coding.codecs import decode, encode, settle
from node.averaging.coding.formats import FORMATS, nbytes_of
from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import WireError

Named = Mapping[str, Tensor]
WORDS = "words"
"""Key of a part's error feedback, in checkpoints and in what newcomers fetch."""
FADES = 0.95
"""Share of the error feedback that is kept from one window to the next, in formats that leave
numbers out: a number is sent once in many rounds, and by then old differences point in a wrong
direction (SparseLoCo, arXiv 2508.15706)."""
MOMENTUM = "#momentum"
"""A part's outer momentum in what cells give and make, behind the part's name."""
WORD = 4
"""Bytes of a number of state on the wire: coded bytes travel as so many words."""
STEP, TAKEN = "#step", "#taken"
"""The server's step that an anchor is of; whose pushes are in what a server made."""
MOST_STEPS = 1 << 24
"""Steps are numbered below this, in fp32 without loss."""
MOST_NAMED = 16
"""Cells whose pushes go into one step: more are in no group."""
FAR = 3.0
"""A difference longer than so many times the group's median length is scaled down."""


class Giver:
    """What a stage keeps from window to window. ``state``: anchor and outer momentum, None where
    there are none; ``words``: the error feedback of each part; ``step``: the server's step at which
    the anchor was made, as far as this peer knows. A peer that fetched its anchor knows an older
    step, so what it gives counts as older than it is."""

    def __init__(self, state: OuterState | None = None) -> None:
        self.state = state
        self.words: Named = {}
        self.step = 0


class Merge:
    """How the contributions of one window to one stage are merged. This class computes the mean of
    parameters, or of anchor and momentum after each cell's own outer step. ``shapes``: of the parts
    that the window carries.

    ``shared``: all cells of the group must compute the same bits, so every contribution is needed
    and nothing may count that only one cell knows. ``near``: contributions lie near each other, so
    an outlier can be moved closer. ``owes``: the error feedback once the result is in place; None:
    it stays as it is.
    """

    shared, near = False, True
    owes: Named | None = None

    def __init__(
        self, giver: Giver, settings: OuterSettings, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._giver, self.settings, self._shapes = giver, settings, shapes

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """What partners may fetch, made from the parameters at which the window began here; None
        when the cell has nothing to give."""
        here = {name: t.to("cpu", torch.float32) for name, t in local.items()}
        if self.settings.carries == "parameters":
            return here
        if self._giver.state is None:
            return None
        stepped = self._stepped(pseudo_gradient(self._giver.state, here))
        return {**stepped.anchor, **{name + MOMENTUM: t for name, t in stepped.momentum.items()}}

    def opens(self, came: Named) -> dict[str, Tensor]:
        """Decode what a cell gave, this one included. Raises WireError for numbers that no honest
        cell gives."""
        if not finite(came):
            raise WireError("gives numbers that are not finite")
        return dict(came)

    def makes(self, cell: str, own: Named, came: Mapping[str, Named]) -> dict[str, Tensor]:
        """The result of the window: parameters by name, and what goes with them. ``own`` and
        ``came``: the decoded contributions of this and of other cells. Raises ValueError when an
        anchor is needed and missing."""
        return mean_of({**came, cell: own})

    def made(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what :meth:`makes` makes."""
        if self.settings.carries == "parameters":
            return dict(self._shapes)
        return {**self._shapes, **{name + MOMENTUM: of for name, of in self._shapes.items()}}

    def since(self, local: Named, told: bool) -> Named:
        """The parameters that the result replaces: those that were given. For a merge of
        differences whose result contains nothing of this cell (``told``) it is the anchor, so that
        everything learned since the anchor stays."""
        return local

    def lacks(self, cell: str, made: Named) -> bool:
        """Whether a result that another cell computed contains nothing of ``cell``; False when that
        cannot be told."""
        return False

    def _stepped(self, along: Named) -> OuterState:
        if self._giver.state is None:
            raise ValueError("differences from an anchor that is not here")
        return outer_step(self._giver.state, along, self.settings)


class OuterSteps(Merge):
    """DiLoCo where anchors are equal: differences from the anchor travel, coded, and every cell
    makes the same outer step along the mean of the same differences.

    The own difference counts as others have it, after it was coded; what coding lost is owed.
    """

    shared, near = True, False

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """Bytes of the differences, as words. None without an anchor, and for differences that
        cannot be coded: nothing is owed then."""
        giver, codec = self._giver, self.settings.codec
        if giver.state is None:
            return None
        given = pseudo_gradient(giver.state, {name: local[name] for name in self._shapes})
        try:
            if self.settings.feedback:
                _, coded, left = says(given, giver.words, codec)
                self.owes = {**giver.words, **left}
            else:
                coded = {name: encode(tensor, codec) for name, tensor in given.items()}
        except ValueError:
            giver.words = {}
            return None
        return {name: _words(data) for name, data in coded.items()}

    def opens(self, came: Named) -> dict[str, Tensor]:
        """The differences. Raises WireError for bytes that no encoder writes, and for numbers that
        are not finite."""
        found: dict[str, Tensor] = {}
        for name, shape in self._shapes.items():
            numbers = math.prod(shape)
            size = nbytes_of(numbers, self.settings.codec)
            data = came[name].detach().contiguous().view(torch.uint8)
            if data.numel() != _padded(size) or bool(data[size:].any()):
                raise WireError(f"{name} is not {size} bytes of {self.settings.codec}")
            found[name] = decode(data[:size], numbers, self.settings.codec).view(shape)
        if not finite(found):
            raise WireError("gives differences that are not finite")
        return found

    @torch.no_grad()
    def makes(self, cell: str, own: Named, came: Mapping[str, Named]) -> dict[str, Tensor]:
        """Anchor and momentum after the outer step."""
        after = self._stepped(mean_of(_held({**came, cell: own})))
        return {name: after.anchor[name] for name in self._shapes} | {
            name + MOMENTUM: after.momentum[name] for name in self._shapes
        }

    def since(self, local: Named, told: bool) -> Named:
        """As :meth:`Merge.since`. What was learned since the anchor is in no result yet, and will
        be in this cell's next difference."""
        if told and self._giver.state is not None:
            return {name: self._giver.state.anchor[name] for name in self._shapes}
        return {name: local[name] for name in self._shapes}


class Pushes(OuterSteps):
    """Without a barrier: the server of a stage applies the differences that have come as one step
    from the server's anchor, though each is a difference from its own cell's anchor. The result
    names the cells whose differences are in it, so each counts once; a cell that was left out keeps
    its difference for the next window.

    ``members``: cells of the group. Each difference counts for 1 / ``members``, however many came,
    as a step of SGD without momentum. A push whose anchor is more than ``outer.staleness`` steps
    older than the server's is refused; None: none is.
    """

    shared = False

    def __init__(
        self,
        giver: Giver,
        settings: OuterSettings,
        shapes: Mapping[str, tuple[int, ...]],
        members: int,
    ) -> None:
        super().__init__(giver, settings, shapes)
        self._members = members
        self.ages: dict[str, int] = {}
        """Of the pushes that came, in steps of the server, those that were not taken included."""

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """As before, with the server's step at which the anchor was made."""
        given = super().gives(local)
        return None if given is None else {**given, STEP: _number(self._giver.step)}

    def opens(self, came: Named) -> dict[str, Tensor]:
        """As before. Raises WireError for a step that is none, too."""
        if not 0 <= float(came[STEP]) < MOST_STEPS:
            raise WireError("gives a difference from a step that nobody made")
        return {**super().opens(came), STEP: came[STEP].detach().to("cpu", torch.float32)}

    @torch.no_grad()
    def makes(self, cell: str, own: Named, came: Mapping[str, Named]) -> dict[str, Tensor]:
        """The next anchor, its step, and whose differences are in it."""
        # What a stranger says of its step makes nobody else's push older.
        newest = self._giver.step
        self.ages = {name: max(0, newest - int(of[STEP])) for name, of in sorted(came.items())}
        here = {
            name: {part: of[part] for part in self._shapes}
            for name, of in {**came, cell: own}.items()
            if name == cell or not self.late(self.ages[name])
        }
        taken = _held(here)
        share = len(taken) / self._members
        after = self._stepped({name: share * t for name, t in mean_of(taken).items()})
        whose = sorted(_short(name) for name in taken)[:MOST_NAMED]
        return {
            **{name: after.anchor[name] for name in self._shapes},
            STEP: _number(newest + 1),
            TAKEN: torch.tensor([*whose, *[0.0] * (MOST_NAMED - len(whose))]),
        }

    def late(self, age: int) -> bool:
        """Whether a push of this age is not taken."""
        return self.settings.staleness is not None and age > self.settings.staleness

    def made(self) -> dict[str, tuple[int, ...]]:
        """Anchor, step and names."""
        return {**self._shapes, STEP: (1,), TAKEN: (MOST_NAMED,)}

    def lacks(self, cell: str, made: Named) -> bool:
        """Whether the push of this cell is not in it."""
        return _short(cell) not in made[TAKEN].tolist()


def merge_of(
    settings: OuterSettings,
    giver: Giver,
    shapes: Mapping[str, tuple[int, ...]],
    members: int,
) -> Merge:
    """What these settings ask for, of the parts that a window carries. ``members``: cells of the
    group."""
    if settings.pushes:
        return Pushes(giver, settings, shapes, members)
    return (OuterSteps if settings.carries == "deltas" else Merge)(giver, settings, shapes)


@torch.no_grad()
def says(
    given: Named, owed: Named, codec: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Code ``given`` with the error feedback ``owed`` added: (the numbers that others decode, their
    bytes, the new error feedback), fp32 on the CPU. Raises ValueError for what cannot be coded."""
    keeps = FADES if FORMATS[codec].biased else 1.0
    said: dict[str, Tensor] = {}
    coded: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for name, tensor in given.items():
        whole = tensor.detach().to("cpu", torch.float32)
        if name in owed:
            whole = whole + owed[name] * keeps
        coded[name], said[name] = settle(whole, codec)
        left[name] = whole - said[name]
    return said, coded, left


def _number(value: int) -> Tensor:
    return torch.tensor([float(min(value, MOST_STEPS - 1))])


def _short(cell: str) -> float:
    """The first 24 bits of a cell's name, which fp32 holds."""
    return float(int(cell[:6] or "0", 16))


def _words(data: Tensor) -> Tensor:
    """Bytes as words that state travels in, zeros at the end."""
    return pad(data, (0, _padded(data.numel()) - data.numel())).view(torch.float32)


def _padded(size: int) -> int:
    return -(-size // WORD) * WORD


def _held(given: Mapping[str, Named]) -> dict[str, Named]:
    """Scale differences that are much longer than the group's median by a half, a quarter, and so
    on: powers of two, so that the last bits of a length do not make cells differ."""
    lengths = {
        cell: math.sqrt(sum(float(t.double().square().sum()) for t in of.values()))
        for cell, of in given.items()
    }
    most = FAR * sorted(lengths.values())[(len(lengths) - 1) // 2]
    if len(given) < 3 or not most:  # of two nobody can say which is wrong
        return dict(given)
    found: dict[str, Named] = {}
    for cell, of in given.items():
        share = 2.0 ** -max(0, math.ceil(math.log2(lengths[cell] / most))) if lengths[cell] else 1.0
        found[cell] = of if share == 1.0 else {name: share * t for name, t in of.items()}
    return found


@torch.no_grad()
def mean_of(given: Mapping[str, Named]) -> dict[str, Tensor]:
    """The mean of what cells give, in the order of their names: all that have the same come to the
    same bits."""
    first, *others = (given[cell] for cell in sorted(given))
    found: dict[str, Tensor] = {}
    for name, tensor in first.items():
        total = sum((of[name].to("cpu") for of in others), tensor.to("cpu", torch.float64))
        found[name] = (total / len(given)).to(torch.float32)
    return found


@torch.no_grad()
def moved(here: Named, began: Named, mean: Named, mixing: float = 0.0) -> dict[str, Tensor]:
    """``here`` + (``mean`` - ``began``) * (1 - ``mixing``): what was learned meanwhile stays."""
    return {
        name: here[name].to("cpu", torch.float32) + (mean[name] - was.to("cpu")) * (1.0 - mixing)
        for name, was in began.items()
    }


def distance(a: Named, b: Named) -> float:
    """Of two cells, relative to the length of the second."""
    apart = sum(
        float((a[n].to("cpu").double() - b[n].to("cpu").double()).square().sum()) for n in b
    )
    length = sum(float(t.to("cpu").double().square().sum()) for t in b.values())
    return math.sqrt(apart / length) if length else math.sqrt(apart)


def nearer(a: Named, b: Named, share: float) -> dict[str, Tensor]:
    """``b`` + ``share`` * (``a`` - ``b``)."""
    return {n: torch.lerp(b[n].to("cpu", torch.float32), a[n].to("cpu"), share) for n in b}


def finite(tensors: Named) -> bool:
    """Whether every number is."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values())
