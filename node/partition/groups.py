"""Micro-groups: units exchanged and stepped together, so that one group's exchange hides behind
another's compute.

A group is bounded by bytes, and cost is balanced. Groups are synchronous, so their time is the sum
of each group's slowest slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node.core.errors import UsageFault
from node.partition.matrices import Unit, in_order

Group = tuple[tuple[Unit, ...], ...]
"""The units of each slot; the slot is the rank that hosts them."""


def bounded_groups(
    units: Sequence[Unit],
    owner: Mapping[str, int],
    ranks: int,
    most_bytes: int,
    element_bytes: int = 4,
) -> list[Group]:
    """Micro-groups of a plan: in none does a rank hold more than ``most_bytes`` of matrices.

    As few groups as that allows. Every rank works through its units, largest first, and puts into
    the g-th group what it does in the g-th equal share of the time, so that the ranks leave each
    group together. Raises UsageFault for a matrix above C_max.
    """
    queues: list[list[Unit]] = [[] for _ in range(ranks)]
    for u in in_order(units):
        if u.numel * element_bytes > most_bytes:
            raise UsageFault(
                f"{u.name} is {u.numel * element_bytes} bytes, a micro-group takes {most_bytes}",
                "raise C_max, or split the matrix",
            )
        queues[owner[u.name]].append(u)
    least = max(
        (-(-sum(u.numel for u in q) * element_bytes // most_bytes) for q in queues), default=1
    )
    count = max(1, least)
    while True:
        cut = [_cut(q, count, most_bytes, element_bytes) for q in queues]
        if all(c is not None for c in cut):
            return [tuple(tuple(c[g]) for c in cut if c is not None) for g in range(count)]
        count += 1


def _cut(
    queue: Sequence[Unit], count: int, most: int, element_bytes: int
) -> list[list[Unit]] | None:
    """A queue in ``count`` groups by the middle of each unit's time; later if a group is full; None
    if they do not suffice."""
    total, done = max(1, sum(u.cost for u in queue)), 0
    groups: list[list[Unit]] = [[] for _ in range(count)]
    used, at = [0] * count, 0
    for k, u in enumerate(queue):
        size = u.numel * element_bytes
        at = max(at, min(count - 1, (2 * done + u.cost) * count // (2 * total)))
        while at < count and used[at] + size > most:
            at += 1
        if at == count:
            return (
                None
                if count < len(queue)
                else [[v] for v in queue] + [[] for _ in range(count - len(queue))]
                if k
                else None
            )
        groups[at].append(u)
        used[at] += size
        done += u.cost
    return groups
