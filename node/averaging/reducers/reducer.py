"""One owner's way from contributions to one gradient per token: checks which contributions are fit,
weighs them, leaves out absurd ones, and averages the rest; the same bits in any order of arrival.
Enters: gradient sums and their senders' claims. Leaves: means for the optimizer. Never: a socket, a
ban."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high

import torch

from node.averaging.reducers import robust
from node.averaging.reducers.quarantine import NormHistory, Size, quarantined, weights
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId
from node.wire.coding.codecs import Coded, Numbers
from node.wire.coding.layouts import STEP


@dataclass(frozen=True, slots=True)
class Gathered:
    """Contributions to be reduced. ``claims``: tokens by contributor; ``gradients``: their sums
    over these tokens, as they came, in the order of ``names``. ``allowed`` and ``total``: see
    :func:`node.averaging.reducers.quarantine.weights`. ``norms``: norms of ``gradients``, by
    contributor; absent if unknown."""

    epoch: int
    names: tuple[str, ...]
    claims: Mapping[PeerId, int]
    gradients: Mapping[PeerId, Sequence[Numbers]]
    allowed: Mapping[PeerId, int] = field(default_factory=dict)
    total: int = 0
    norms: Mapping[PeerId, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Result of a reduction. ``numbers``: gradients per token, in the order of the names, which may
    need the contributions until they are read; ``tokens``: the weight behind them;
    ``contributors``: the peers that have gradients in them, sorted; ``quarantined``: the peers left
    out, and why. ``fell_back``: True if they are too few for the configured reducer, so it is their
    mean. ``center`` and ``typical`` are for :meth:`Reducer.remember`."""

    epoch: int
    names: tuple[str, ...]
    numbers: Sequence[Numbers]
    tokens: int
    contributors: tuple[PeerId, ...]
    quarantined: dict[PeerId, str]
    fell_back: bool
    typical: Size
    center: list[torch.Tensor] | None = None


def norms_of(
    named: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """The 2-norm of each tensor; a NaN or an infinity anywhere makes it not finite. The tensors are
    read one at a time. Raises ValueError for one that is missing, or has another shape."""
    found: dict[str, float] = {}
    for name, shape in shapes.items():
        tensor = named.get(name)
        if tensor is None or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"gradients of another shape or none: {name}")
        found[name] = float(torch.linalg.vector_norm(tensor, dtype=torch.float32))
    return found


def unfit(norms: Mapping[str, float], tokens: int, max_norm: float) -> str:
    """Reason for which gradient sums with these norms must not be averaged, or "": over ``tokens``
    each may be at most ``max_norm``."""
    for name, norm in norms.items():
        each = norm / max(1, tokens)
        if not math.isfinite(each):
            return f"gradient of {name} is not finite"
        if each > max_norm:
            return f"gradient of {name} has norm {each:.3g} per token, above {max_norm:.3g}"
    return ""


def beyond_format(
    gradients: Mapping[str, torch.Tensor], norms: Mapping[str, float], wire: str
) -> str:
    """Reason for which gradient sums with these norms cannot travel in a number format, or "".
    Sums over many tokens may be above the largest number of fp16."""
    if wire != "fp16":
        return ""
    most = torch.finfo(torch.float16).max
    for name, norm in norms.items():
        if norm <= most:
            continue
        lowest, highest = torch.aminmax(gradients[name])
        largest = max(-float(lowest), float(highest))
        if largest > most:
            return (
                f"a gradient of {name} is {largest:.3g}, and the largest number of fp16 is "
                f"{most:.0f}: averaging.wire has formats that hold it"
            )
    return ""


class Mean(Numbers):
    """Contributions to one part, each times its factor, added in their order and divided by
    ``tokens``. They are computed only when read, so that they can be rounded and sent while they
    are in the cache. The contributions must stay until then."""

    def __init__(self, rows: Sequence[Numbers], by: Sequence[float], tokens: float) -> None:
        self.shape = rows[0].shape
        self.numbers = rows[0].numbers
        self._rows = rows
        self._by = by
        self._tokens = tokens
        self._scratch = torch.empty(min(STEP, self.numbers))

    def _piece(self, start: int, into: torch.Tensor) -> None:
        total = self._rows[0].read(start, into)
        if self._by[0] != 1:
            total = torch.mul(total, self._by[0], out=into)
        for row, factor in zip(self._rows[1:], self._by[1:], strict=True):
            total = torch.add(
                total, row.read(start, self._scratch[: into.numel()]), alpha=factor, out=into
            )
        if math.frexp(self._tokens)[0] == 0.5:  # a power of two: the same bits in half the time
            torch.mul(total, 1 / self._tokens, out=into)
        else:
            torch.div(total, self._tokens, out=into)


def means(
    contributions: Mapping[PeerId, Sequence[Numbers]],
    order: Sequence[PeerId],
    tokens: float,
    factors: Mapping[PeerId, float] | None = None,
) -> list[Mean]:
    """The mean of each part: the sum in ``order``, each contribution times its factor (1 if it has
    none), divided by ``tokens``.

    The order is fixed because the last bits of a floating-point sum depend on it; a factor of 1
    changes no bit.
    """
    by = [(factors or {}).get(peer, 1) for peer in order]
    return [
        Mean(rows, by, tokens)
        for rows in zip(*(contributions[peer] for peer in order), strict=True)
    ]


class Reducer:
    """Reduces by the manifest. :meth:`reduce` changes nothing, so it may run on any thread and be
    done again; :meth:`remember` is called when its result was stepped."""

    def __init__(self, settings: AveragingSettings) -> None:
        self._settings = settings
        self._trail = NormHistory()
        self._centers: dict[str, tuple[int, torch.Tensor]] = {}

    def reduce(self, g: Gathered) -> Reduced:
        """Reduce the contributions; the bits of the result do not depend on the order of arrival.
        Raises ValueError if nobody contributed, or all weigh nothing."""
        sizes = {
            p: Size(
                t,
                tuple(g.norms[p] if p in g.norms else (each.norm() for each in g.gradients[p])),
            )
            for p, t in sorted(g.claims.items())
            if t > 0
        }
        # Before anybody is left out: what a liar claims must not become room for the claims of
        # another.
        weigh = {
            p: w for p, w in weights(g.claims, g.allowed, g.total).items() if w > 0 and p in sizes
        }
        out = quarantined(
            {p: sizes[p] for p in weigh}, self._settings.quarantine, g.epoch, g.names, self._trail
        )
        order = tuple(sorted(weigh.keys() - out.keys()))
        if not order:
            raise ValueError("no contribution has any weight")
        asked = self._settings.reducer
        fell_back = asked != "mean" and len(order) < robust.FEWEST
        name = "mean" if fell_back else asked
        made = self._apply(name, g, order, sizes, weigh)
        typical = median_high([(sizes[p].per_token, p) for p in order])[1]
        center = None
        if name == "centered-clip":
            center = [each.whole().clone() for each in made]
        return Reduced(
            g.epoch,
            g.names,
            made,
            sum(weigh[p] for p in order),
            order,
            out,
            fell_back,
            sizes[typical],
            center,
        )

    def remember(self, reduced: Reduced) -> None:
        """Expect such norms from now on, and start from this average next time."""
        self._trail.note(reduced.epoch, reduced.names, reduced.typical)
        self._centers = {n: c for n, c in self._centers.items() if c[0] >= reduced.epoch - 1}
        if reduced.center is not None:
            self._centers |= {
                n: (reduced.epoch, c) for n, c in zip(reduced.names, reduced.center, strict=True)
            }

    def void(self, epoch: int) -> None:
        """``epoch`` and later ones did not happen."""
        self._trail.void(epoch)
        self._centers = {n: c for n, c in self._centers.items() if c[0] < epoch}

    def _apply(
        self,
        name: str,
        g: Gathered,
        order: tuple[PeerId, ...],
        sizes: Mapping[PeerId, Size],
        weigh: Mapping[PeerId, int],
    ) -> Sequence[Numbers]:
        s = self._settings
        tokens = [g.claims[p] for p in order]
        if name == "mean":
            scaled = {p: weigh[p] / t for p, t in zip(order, tokens, strict=True) if weigh[p] != t}
            return means(g.gradients, order, sum(weigh[p] for p in order), scaled)
        norms = [sizes[p].per_token for p in order]
        weight = [float(weigh[p]) for p in order]
        if name == "clipped-mean":
            shares = robust.clipped(norms, weight, s.clip)
            return means(
                g.gradients,
                order,
                1,
                {p: f / t for p, f, t in zip(order, shares, tokens, strict=True)},
            )
        given = [[each.whole() for each in g.gradients[p]] for p in order]
        if name == "median":
            return [Coded.of(t) for t in robust.median(given, tokens)]
        if name == "trimmed-mean":
            return [Coded.of(t) for t in robust.trimmed_mean(given, tokens, s.trim)]
        center = self._center(g)
        shares, kept = robust.centered(
            given, tokens, norms, weight, s.clip, s.clip_iterations, center
        )
        factors = {p: f / t for p, f, t in zip(order, shares, tokens, strict=True)}
        moved = [each.whole() for each in means(g.gradients, order, 1, factors)]
        if center is not None:
            for m, c in zip(moved, center, strict=True):
                m.add_(c, alpha=kept)
        return [Coded.of(m) for m in moved]

    def _center(self, g: Gathered) -> list[torch.Tensor] | None:
        """Averages of the epoch before, zeros for parts that were another's; None when all were."""
        known = {
            n: c for n in g.names if (c := self._centers.get(n)) is not None and c[0] == g.epoch - 1
        }
        if not known:
            return None
        like = next(iter(g.gradients.values()))
        return [
            known[n][1] if n in known else torch.zeros(t.shape)
            for n, t in zip(g.names, like, strict=True)
        ]
