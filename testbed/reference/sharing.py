"""Choice of the peers that compute a matrix: its owner for all, or each peer for itself.

An owner's update must travel; computing it anywhere costs time. The shorter way depends on the
link, the peers' rates and the operations for each number of the matrix, so it is chosen for each
matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from node.core.errors import UsageFault
from node.partition.matrices import Unit

Exchange = Literal["to-owner", "all-reduce"]


@dataclass(frozen=True)
class Choice:
    """``shared``: the owner computes for all. Seconds of a step each way, what this matrix adds to
    the slowest peer."""

    name: str
    shared: bool
    owner_s: float
    everybody_s: float


def break_even(unit: Unit, flops_per_s: float, update_bytes: float = 2.0) -> float:
    """Bytes per second above which sharing wins: update bytes a number · rate / operations a
    number, both times equal.

    For Muon: 2 F / (5 (4 m + 2 m²/n)) with bf16 updates.
    """
    return update_bytes * unit.numel * flops_per_s / unit.cost


def who_computes(
    units: Sequence[Unit],
    rates: Sequence[float],
    links: Sequence[float],
    exchange: Exchange = "all-reduce",
    update_bytes: float = 2.0,
) -> list[Choice]:
    """``rates``: operations per second of each peer; ``links``: bytes per second each peer
    receives.

    * everybody: the slowest peer computes it whole, cost / min(rate).
    * owner: the work is spread over all, cost / Σ rate, and the update of (n - 1) / n of the
      matrices arrives at the slowest link. Where gradients go to owners anyway, the parameters that
      come back replace the second half of the all-reduce, and the update costs nothing more.

    Raises UsageFault for no peers, or a rate or link that is not above 0.
    """
    if not rates or len(rates) != len(links):
        raise UsageFault(
            f"{len(rates)} rates and {len(links)} links", "give one of each for every peer"
        )
    if not all(0 < x < float("inf") for x in (*rates, *links)):
        raise UsageFault("a rate or a link is not above 0", "measure again")
    everyone = math.fsum(rates)
    slowest = min(rates)
    link = min(links)
    others = (len(rates) - 1) / len(rates)
    made: list[Choice] = []
    for u in units:
        travel = 0.0 if exchange == "to-owner" else others * update_bytes * u.numel / link
        owner = u.cost / everyone + travel
        everybody = u.cost / slowest
        made.append(Choice(u.name, len(rates) > 1 and owner < everybody, owner, everybody))
    return made
