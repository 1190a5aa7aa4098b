"""Contributions of a stage to a window, and their merge across cells. Pure. Enters: parameters,
contributions of cells. Leaves: the contribution that partners may fetch, the result that replaces
the parameters. Never: a message, a plan, the choice of partners.

All arithmetic of rounds between cells is here, so that every cell of a group computes the same bits
from the same contributions.

Error feedback (Seide et al. 2014): the coding error of a difference is kept and added to the next
difference of the same part, so nothing is lost for good. All replicas of a cell keep the same error
feedback, because any of them may be asked for the cell's contribution; a newcomer fetches it with
the anchor. Other cells need not know it.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import WireError
from node.outer.weighing import weights_of
from node.wire.coding.codecs import decode, encode, settle
from node.wire.coding.formats import FORMATS, nbytes_of

Named = Mapping[str, Tensor]
Pushed = Mapping[float, int]
"""The server's step into which the last push of each cell went, by the number that stands for the
cell in a result."""
WORDS = "words"
"""Key of a part's error feedback, in checkpoints and in the state that newcomers fetch."""
FADES = 0.95
"""Share of the error feedback that is kept from one window to the next, in formats that leave
numbers out: a number is sent once in many rounds, and by then old differences point in a wrong
direction (SparseLoCo, arXiv 2508.15706)."""
MOMENTUM = "#momentum"
"""Suffix of a part's name for its outer momentum, in contributions and results."""
WORD = 4
"""Bytes of a number of state on the wire: coded bytes travel as words of this size."""
STEP = "#step"
"""Key of the server's step at which an anchor was made."""
TAKEN = "#taken"
"""Key of the cells with a push in a server's result."""
MOST_STEPS = 1 << 24
"""Steps are numbered below this bound, in fp32 without loss."""
MOST_NAMED = 16
"""Most cells with a push in one step: no group is larger."""
MOST_PUSHED = 256
"""Most cells with a remembered push. The newest pushes stay."""
FAR = 3.0
"""Multiple of the group's median length above which a difference is scaled down."""


class WindowState:
    """State that a stage keeps from window to window. ``state``: anchor and outer momentum, None
    where there are none; ``words``: the error feedback of each part; ``step``: the server's step at
    which the anchor was made, by this peer's knowledge. A peer that fetched its anchor knows an
    older step, so its contribution counts as older than it is. ``pushed``: the last pushes in the
    anchor, as far as this peer saw them come; it is not in checkpoints, nor fetched."""

    def __init__(self, state: OuterState | None = None) -> None:
        self.state = state
        self.words: Named = {}
        self.step = 0
        self.pushed: Pushed = {}


class Merge:
    """Merge of the contributions of one window to one stage. This class computes the mean of
    parameters, or of anchor and momentum after each cell's own outer step. ``shapes``: shapes of
    the parts that the window carries.

    ``shared``: all cells of the group must compute the same bits, so every contribution is needed
    and nothing may count that only one cell knows. ``near``: contributions lie near each other, so
    an outlier can be moved closer. ``owes``: the error feedback once the result is in place; None
    keeps it as it is.
    """

    shared = False
    near = True
    owes: Named | None = None
    weights: Mapping[str, float] | None = None

    def __init__(
        self, kept: WindowState, settings: OuterSettings, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._kept = kept
        self.settings = settings
        self._shapes = shapes

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """The contribution that partners may fetch, made from the parameters ``local`` at which the
        window began here; None if the cell has nothing to contribute."""
        here = {name: t.to("cpu", torch.float32) for name, t in local.items()}
        if self.settings.carries == "parameters":
            return here
        if self._kept.state is None:
            return None
        stepped = self._stepped(pseudo_gradient(self._kept.state, here))
        return {**stepped.anchor, **{name + MOMENTUM: t for name, t in stepped.momentum.items()}}

    def opens(self, came: Named) -> dict[str, Tensor]:
        """Decode a contribution, of this or another cell. Raises WireError for numbers that no
        honest cell gives."""
        if not finite(came):
            raise WireError("gives numbers that are not finite")
        return dict(came)

    def makes(self, cell: str, own: Named, came: Mapping[str, Named]) -> dict[str, Tensor]:
        """The result of the window: parameters by name, and the state that belongs to them. ``own``
        and ``came``: the decoded contributions of this and of other cells. Raises ValueError if an
        anchor is needed and missing."""
        return mean_of({**came, cell: own})

    def made(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the result of :meth:`makes`."""
        if self.settings.carries == "parameters":
            return dict(self._shapes)
        return {**self._shapes, **{name + MOMENTUM: of for name, of in self._shapes.items()}}

    def checks(self, made: Named) -> None:
        """Check a result that another peer gives. Raises WireError for one that no honest cell
        computes."""
        if not finite(made):
            raise WireError("gives a mean of numbers that are not finite")

    def since(self, local: Named, told: bool) -> Named:
        """The parameters that the result replaces: the contributed ones. If a merge of differences
        has nothing of this cell in its result (``told``), they are the anchor, so that the training
        since the anchor stays."""
        return local

    def lacks(self, cell: str, made: Named) -> bool:
        """Return True if a result that another cell computed contains nothing of ``cell``; False if
        that cannot be told."""
        return False

    def _stepped(self, along: Named) -> OuterState:
        if self._kept.state is None:
            raise ValueError("differences from an anchor that is not here")
        return outer_step(self._kept.state, along, self.settings)


class OuterSteps(Merge):
    """DiLoCo where anchors are equal: coded differences from the anchor travel, and every cell
    makes the same outer step along the mean of the same differences.

    The own difference counts as others decode it; the coding error becomes error feedback.
    """

    shared = True
    near = False

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """Bytes of the differences, as words. None without an anchor, or if the differences cannot
        be coded; then there is no error feedback."""
        kept = self._kept
        codec = self.settings.codec
        if kept.state is None:
            return None
        given = pseudo_gradient(kept.state, {name: local[name] for name in self._shapes})
        try:
            if self.settings.feedback:
                _, coded, left = says(given, kept.words, codec)
                self.owes = {**kept.words, **left}
            else:
                coded = {name: encode(tensor, codec) for name, tensor in given.items()}
        except ValueError:
            kept.words = {}
            return None
        return {name: _words(data) for name, data in coded.items()}

    def opens(self, came: Named) -> dict[str, Tensor]:
        """The decoded differences. Raises WireError for bytes that no encoder writes, and for
        numbers that are not finite."""
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
        held = _held({**came, cell: own})
        if self.settings.weights == "agreement":
            self.weights = weights_of(held)
        after = self._stepped(mean_of(held, self.weights))
        return {name: after.anchor[name] for name in self._shapes} | {
            name + MOMENTUM: after.momentum[name] for name in self._shapes
        }

    def since(self, local: Named, told: bool) -> Named:
        """The parameters that the result replaces, as in :meth:`Merge.since`. Training since the
        anchor is in no result yet, and will be in this cell's next difference."""
        if told and self._kept.state is not None:
            return {name: self._kept.state.anchor[name] for name in self._shapes}
        return {name: local[name] for name in self._shapes}


class OuterPushes(OuterSteps):
    """Outer steps without a barrier: the server of a stage applies the differences that have
    arrived as one step from the server's anchor, though each is a difference from its own cell's
    anchor. The result names the cells whose differences it contains, so that each counts once; a
    cell that was left out keeps its difference for the next window.

    ``members``: cells of the group. Each difference counts for 1 / ``members``, however many came,
    as a step of SGD without momentum. A push is refused if its anchor is more than
    ``outer.staleness`` steps older than the server's; with None no push is too old.

    A push is also refused if its cell has not got the result of the last one: its difference, from
    the same anchor, contains that one, which would count in every window until a result reaches
    the cell. The server sees this by the step, because a cell that got a result has its step. It
    goes by what is in its own anchor, so every replica of the server knows it, and so does the next
    server that adopted the same results. Where that is lost (a restart, an anchor that was fetched
    from others), such a push counts again, once: the server remembers it from then on.

    A cell keeps a refused push on top of its next anchor, because no result names the pushes in
    it. So a push with a missed result counts once more, with the next push that is taken.
    """

    shared = False

    def __init__(
        self,
        kept: WindowState,
        settings: OuterSettings,
        shapes: Mapping[str, tuple[int, ...]],
        members: int,
    ) -> None:
        super().__init__(kept, settings, shapes)
        self._members = members
        self.ages: dict[str, int] = {}
        """Age of each push that came, in steps of the server, refused ones included."""
        self.repeated: frozenset[str] = frozenset()
        """Cells with a refused push: it contains an earlier one that is in the anchor."""

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """The contribution of :meth:`OuterSteps.gives`, with the server's step at which the anchor
        was made."""
        given = super().gives(local)
        if given is None:
            return None
        return {**given, STEP: _number(self._kept.step)}

    def opens(self, came: Named) -> dict[str, Tensor]:
        """Decode as :meth:`OuterSteps.opens` does. Raises WireError for an invalid step, too."""
        _check_step(came)
        return {**super().opens(came), STEP: came[STEP].detach().to("cpu", torch.float32)}

    @torch.no_grad()
    def makes(self, cell: str, own: Named, came: Mapping[str, Named]) -> dict[str, Tensor]:
        """The next anchor, its step, and the cells whose differences it contains."""
        # The step that a stranger claims makes no other cell's push older.
        newest = self._kept.step
        steps = {name: int(of[STEP]) for name, of in sorted(came.items())}
        self.ages = {name: max(0, newest - step) for name, step in steps.items()}
        last = self._kept.pushed
        self.repeated = frozenset(
            name for name, step in steps.items() if step < last.get(_short(name), 0)
        )
        here = {
            name: {part: of[part] for part in self._shapes}
            for name, of in {**came, cell: own}.items()
            if name == cell or not self.refuses(name)
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

    def refuses(self, cell: str) -> bool:
        """Return True if the push that came from ``cell`` is refused."""
        return cell in self.repeated or self.late(self.ages[cell])

    def late(self, age: int) -> bool:
        """Return True if a push of this age is too old."""
        return self.settings.staleness is not None and age > self.settings.staleness

    def made(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the anchor, the step and the cells."""
        return {**self._shapes, STEP: (1,), TAKEN: (MOST_NAMED,)}

    def checks(self, made: Named) -> None:
        """Check as :meth:`Merge.checks` does. Raises WireError for an invalid step, too: taken
        over, it would spoil this cell's own contributions."""
        super().checks(made)
        _check_step(made)

    def lacks(self, cell: str, made: Named) -> bool:
        """Return True if the push of ``cell`` is not in the result ``made``."""
        return _short(cell) not in made[TAKEN].tolist()


def merge_of(
    settings: OuterSettings,
    kept: WindowState,
    shapes: Mapping[str, tuple[int, ...]],
    members: int,
) -> Merge:
    """The merge that these settings ask for, of the parts that a window carries. ``members``: cells
    of the group."""
    if settings.pushes:
        return OuterPushes(kept, settings, shapes, members)
    if settings.carries == "deltas":
        return OuterSteps(kept, settings, shapes)
    return Merge(kept, settings, shapes)


def pushed_by(made: Named, before: Pushed) -> dict[float, int]:
    """The last pushes in the anchor of a server's result ``made``. ``before``: those in the anchor
    before it. Only the newest are kept, as cells come and go."""
    step = int(made[STEP])
    # A server that knows an older step numbers anew; what went into later steps says nothing then.
    found = {cell: at for cell, at in before.items() if at < step}
    found |= {cell: step for cell in made[TAKEN].tolist() if cell}
    newest = sorted(found, key=lambda cell: (found[cell], cell))[-MOST_PUSHED:]
    return {cell: found[cell] for cell in newest}


@torch.no_grad()
def says(
    given: Named, owed: Named, codec: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Code ``given`` with the error feedback ``owed`` added: (the numbers that others decode, their
    bytes, the new error feedback), fp32 on the CPU. Raises ValueError for numbers that cannot be
    coded."""
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


def _check_step(named: Named) -> None:
    """Check the step in a contribution or a result. Raises WireError unless it is a whole number
    below :data:`MOST_STEPS`."""
    step = float(named[STEP])
    if not (0 <= step < MOST_STEPS and step.is_integer()):
        raise WireError("gives numbers of a step that nobody made")


def _short(cell: str) -> float:
    """The first 24 bits of a cell's name, which fp32 holds."""
    return float(int(cell[:6] or "0", 16))


def _words(data: Tensor) -> Tensor:
    """Bytes as the fp32 words in which state travels, padded with zeros."""
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
        share = 1.0
        if lengths[cell]:
            share = 2.0 ** -max(0, math.ceil(math.log2(lengths[cell] / most)))
        found[cell] = of
        if share != 1.0:
            found[cell] = {name: share * t for name, t in of.items()}
    return found


@torch.no_grad()
def mean_of(
    given: Mapping[str, Named], weights: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """The mean of the cells' contributions, summed in the order of the cells' names: all cells that
    have the same contributions compute the same bits. ``weights``: of the cells, None if equal."""
    counts = weights or dict.fromkeys(given, 1.0)
    first, *others = sorted(given)
    whole = math.fsum(counts.values())
    found: dict[str, Tensor] = {}
    for name, tensor in given[first].items():
        total = tensor.to("cpu", torch.float64) * counts[first]
        for cell in others:
            total.add_(given[cell][name].to("cpu"), alpha=counts[cell])
        found[name] = (total / whole).to(torch.float32)
    return found


@torch.no_grad()
def moved(here: Named, began: Named, mean: Named, mixing: float = 0.0) -> dict[str, Tensor]:
    """``here`` + (``mean`` - ``began``) * (1 - ``mixing``): the training since ``began`` stays."""
    return {
        name: here[name].to("cpu", torch.float32) + (mean[name] - was.to("cpu")) * (1.0 - mixing)
        for name, was in began.items()
    }


def distance(a: Named, b: Named) -> float:
    """Euclidean distance of two cells' tensors, relative to the length of the second."""
    apart = sum(
        float((a[n].to("cpu").double() - b[n].to("cpu").double()).square().sum()) for n in b
    )
    length = sum(float(t.to("cpu").double().square().sum()) for t in b.values())
    if not length:
        return math.sqrt(apart)
    return math.sqrt(apart / length)


def nearer(a: Named, b: Named, share: float) -> dict[str, Tensor]:
    """``b`` + ``share`` * (``a`` - ``b``)."""
    return {n: torch.lerp(b[n].to("cpu", torch.float32), a[n].to("cpu"), share) for n in b}


def finite(tensors: Named) -> bool:
    """Return True if every number is finite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values())
