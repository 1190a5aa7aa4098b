"""Weights of contributions, and the contributions left out. A contribution weighs never more tokens
than the plan lets its sender have worked on. It is left out if its norm is far off, compared with
the others' norms or with the norms of past epochs. Enters: claims, tokens assigned by the plan,
norms. Leaves: weights, the peers left out of this step, and why. Never: a tensor, a ban."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high

from node.core.ids import PeerId

WINDOW = 64
"""Epochs for which norms are remembered."""
FEWEST_KNOWN = 8
"""Epochs of a part to be known before anybody is measured by them."""
COMPARABLE = 3
"""Contributors from which contributions are measured by each other: with two, nobody can say which
is the odd one."""
WEIGHT = 0.5
"""Weight of a quarantined contribution as an offence of its sender: less than a contribution that
is provably wrong."""


@dataclass(frozen=True, slots=True)
class Size:
    """One contribution: tokens claimed, and the 2-norm of each of its gradient sums, in the order
    of the parts."""

    tokens: int
    norms: tuple[float, ...]

    @property
    def per_token(self) -> float:
        """2-norm of the whole contribution over its tokens."""
        return math.hypot(*self.norms) / self.tokens


@dataclass(slots=True)
class NormHistory:
    """Norms of accepted gradients, (epoch, tokens, norm per token) for each part: the owner's
    measure of the usual norm."""

    _seen: dict[str, deque[tuple[int, int, float]]] = field(default_factory=dict)

    def note(self, epoch: int, names: Sequence[str], size: Size) -> None:
        """Remember the size of a typical contribution to an epoch, once for each part."""
        for name, norm in zip(names, size.norms, strict=True):
            self._seen.setdefault(name, deque(maxlen=WINDOW)).append(
                (epoch, size.tokens, norm / size.tokens)
            )

    def void(self, epoch: int) -> None:
        """Forget ``epoch`` and later ones: the swarm went back."""
        self._seen = {
            name: deque((s for s in seen if s[0] < epoch), WINDOW)
            for name, seen in self._seen.items()
        }

    def expected(self, epoch: int, names: Sequence[str], tokens: int) -> float:
        """Norm per token to be expected of ``tokens`` tokens in these parts; 0 when too little is
        known."""
        parts: list[float] = []
        for name in names:
            known = [s for s in self._seen.get(name, ()) if epoch - WINDOW <= s[0] < epoch]
            if len(known) < FEWEST_KNOWN:
                return 0.0
            parts.append(median_high(norm * _noisier(seen, tokens) for _, seen, norm in known))
        return math.hypot(*parts)


def weights(
    claims: Mapping[PeerId, int], allowed: Mapping[PeerId, int], total: int
) -> dict[PeerId, int]:
    """Tokens each contribution counts for, at most those it claims; a function of the arguments,
    whatever their order.

    ``allowed``: tokens the plan assigned, by member; ``total``: tokens of all micro-batches that
    count. A member that claims more than it was assigned may have done the work of a replica that
    died, so all may claim the tokens that nobody else accounts for:

        w_i = min(t_i, allowed_i + max(0, total - sum_j min(t_j, allowed_j)))

    Without ``allowed``, or with 0 for an unknown ``total``, every claim stands. A claim below 1
    weighs nothing.
    """
    if not allowed or total <= 0:
        return {peer: max(0, tokens) for peer, tokens in claims.items()}
    assigned = {peer: max(0, allowed.get(peer, 0)) for peer in claims}
    spare = max(
        0, total - sum(max(0, min(tokens, assigned[peer])) for peer, tokens in claims.items())
    )
    return {peer: max(0, min(tokens, assigned[peer] + spare)) for peer, tokens in claims.items()}


def quarantined(
    sizes: Mapping[PeerId, Size],
    factor: float,
    epoch: int = 0,
    names: Sequence[str] = (),
    trail: NormHistory | None = None,
) -> dict[PeerId, str]:
    """The peers that must be left out, and why; never everybody. ``factor`` 0 turns it off.

    With three or more contributions, one is left out if its norm per token exceeds ``factor`` times
    the (upper) median of the others'. Fewer are measured by ``trail``; if all of them exceed it,
    the trail is out of date and the smallest is the measure. A mean over fewer tokens is noisier:
    its norm grows at most as 1/sqrt(tokens), so a contribution of few tokens is allowed that much
    more. The answer does not depend on the order of ``sizes``.
    """
    if not factor or len(sizes) < 2:
        return {}
    ordered = sorted(sizes)
    if len(sizes) >= COMPARABLE:
        measures = {
            p: median_high(_scaled(sizes[o], sizes[p]) for o in ordered if o != p) for p in ordered
        }
        whose = "the others' median"
    else:
        measures = {
            p: 0.0 if trail is None else trail.expected(epoch, names, sizes[p].tokens)
            for p in ordered
        }
        whose = "what was usual"
        if all(_exceeds(sizes[p], measures[p], factor) for p in ordered):
            least = min(ordered, key=lambda p: (sizes[p].per_token, p))
            measures = {p: _scaled(sizes[least], sizes[p]) for p in ordered}
            whose = "the smallest"
    return {
        p: f"norm per token {sizes[p].per_token:.3g}, {factor:g} times {whose} is "
        f"{factor * measures[p]:.3g}"
        for p in ordered
        if _exceeds(sizes[p], measures[p], factor)
    }


def _exceeds(size: Size, measure: float, factor: float) -> bool:
    return 0.0 < measure and size.per_token > factor * measure


def _scaled(other: Size, size: Size) -> float:
    return other.per_token * _noisier(other.tokens, size.tokens)


def _noisier(seen: int, tokens: int) -> float:
    return math.sqrt(max(1.0, seen / tokens))
