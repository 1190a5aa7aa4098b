"""What a stage gives in a window, and what becomes of its own and what came from other cells. Pure:
enters: parameters, what cells gave. Leaves: what partners may fetch, what takes its place. Never: a
message, a plan, who the partners are.

All that a round between cells does to numbers is here, so that every cell of a group comes to the
same bits from the same contributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from node.averaging.strategies.outer import OuterSettings

Named = Mapping[str, Tensor]


class Gives(Protocol):
    """Who knows what a stage contributes: its anchor."""

    def gives(self, of: Named | None = None) -> dict[str, Tensor] | None:
        """The contribution by these parameters, fp32 on the CPU; None without an anchor."""
        ...


class Merge(Protocol):
    """Of one stage, in one window."""

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """What partners may fetch, by the parameters at which the window began for the cell; None
        where the cell has nothing to give."""
        ...

    def makes(self, cell: str, own: Named, came: Mapping[str, Named]) -> dict[str, Tensor]:
        """What the cell's replicas put in place: parameters by their names, and what belongs to
        them. ``own`` is what :meth:`gives` gave, ``came`` what other cells did."""
        ...


class Averaging:
    """Parameters, or anchor and momentum after an outer step of each cell's own: their mean."""

    def __init__(self, giver: Gives) -> None:
        self._giver = giver

    def gives(self, local: Named) -> dict[str, Tensor] | None:
        """As :class:`Merge`."""
        return self._giver.gives(local)

    def makes(self, cell: str, own: Named, came: Mapping[str, Named]) -> dict[str, Tensor]:
        """The mean of all."""
        return mean_of({**came, cell: own})


def merge_of(settings: OuterSettings, giver: Gives) -> Merge:
    """What these settings ask for."""
    return Averaging(giver)


def mean_of(given: Mapping[str, Named]) -> dict[str, Tensor]:
    """The mean of what cells give, in the order of their names: all that have the same come to the
    same bits."""
    cells = sorted(given)
    with torch.no_grad():
        found: dict[str, Tensor] = {}
        for name, first in given[cells[0]].items():
            total = first.to("cpu", torch.float64)
            for cell in cells[1:]:
                total = total + given[cell][name].to("cpu")
            found[name] = (total / len(cells)).to(torch.float32)
        return found


def moved(here: Named, given: Named, mean: Named) -> dict[str, Tensor]:
    """Parameters in place, moved by as much as ``mean`` is from those the window began with:
    what was learned meanwhile stays."""
    with torch.no_grad():
        return {
            name: here[name].to("cpu", torch.float32) + (mean[name] - began.to("cpu"))
            for name, began in given.items()
        }


def distance(a: Named, b: Named) -> float:
    """Of two cells, relative to the length of the second."""
    apart = sum(
        float((a[n].to("cpu").double() - b[n].to("cpu").double()).square().sum()) for n in b
    )
    length = sum(float(t.to("cpu").double().square().sum()) for t in b.values())
    return math.sqrt(apart / length) if length else math.sqrt(apart)


def nearer(a: Named, b: Named, share: float) -> dict[str, Tensor]:
    """So much of the way from ``b`` to ``a``."""
    return {n: torch.lerp(b[n].to("cpu", torch.float32), a[n].to("cpu"), share) for n in b}


def finite(tensors: Named) -> bool:
    """Whether every number is."""
    return all(bool(torch.isfinite(t).all()) for t in tensors.values())
