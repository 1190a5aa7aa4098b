"""Micro-groups: units exchanged and stepped together, so that one group's exchange hides behind
another's compute.

The published rules bound a group by the cost of a slot, in whatever unit cost has; ours bounds it
by bytes, and balances cost. Groups are synchronous, so their time is the sum of each group's
slowest slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Literal

from node.core.errors import UsageFault
from node.partition.matrices import Unit, in_order

Mode = Literal["no", "single", "slot", "global"]
Group = tuple[tuple[Unit, ...], ...]
"""The units of each slot; the slot is the rank that hosts them."""


def published_groups(
    units: Sequence[Unit], slots: int, most: int, mode: Mode = "global"
) -> list[Group]:
    """The planner's groups of arXiv 2602.06079 by ``Unit.cost``; ``most`` is C_max in the unit of
    cost.

    ``no``: chunks of ``slots`` as they come; ``single``: the same, largest first; ``slot``: filled
    until a slot reaches C_max; ``global``: greedy with rollback: the largest units whose
    longest-first schedule stays within C_max. Raises UsageFault for a unit above C_max (slot,
    global).
    """
    if slots < 1:
        raise UsageFault("a group has no slots", "give at least one")
    order = in_order(units)
    if mode in ("no", "single"):
        flat = list(units) if mode == "no" else order
        return [
            _padded([(u,) for u in flat[i : i + slots]], slots) for i in range(0, len(flat), slots)
        ]
    for u in order:
        if u.cost > most:
            raise UsageFault(
                f"{u.name} costs {u.cost}, a slot takes {most}", "raise C_max, or split the matrix"
            )
    if mode == "slot":
        return _streamed(order, slots, most)
    made: list[Group] = []
    # Longest-first never moves what it has placed, so appending to a schedule and undoing one step
    # is planning it anew.
    loads, lists, total = [(0, i) for i in range(slots)], [[] for _ in range(slots)], 0
    for u in order:
        load, slot = loads[0]
        if (
            lists
            and total
            and (total + u.cost > most * slots or max(load + u.cost, max(loads)[0]) > most)
        ):
            made.append(tuple(tuple(x) for x in lists))
            loads, lists, total = [(0, i) for i in range(slots)], [[] for _ in range(slots)], 0
            load, slot = loads[0]
        heapreplace(loads, (load + u.cost, slot))
        lists[slot].append(u)
        total += u.cost
    if total:
        made.append(tuple(tuple(x) for x in lists))
    return made


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


def group_time(groups: Sequence[Group]) -> int:
    """Sum over groups of the cost of the slowest slot: what synchronous groups take."""
    return sum(max(sum(u.cost for u in slot) for slot in g) for g in groups)


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


def _streamed(order: Sequence[Unit], slots: int, most: int) -> list[Group]:
    made: list[Group] = []
    lists: list[list[Unit]] = [[] for _ in range(slots)]
    loads = [(0, i) for i in range(slots)]
    heapify(loads)
    for u in order:
        load, slot = loads[0]
        heapreplace(loads, (load + u.cost, slot))
        lists[slot].append(u)
        if max(loads)[0] >= most:
            made.append(tuple(tuple(x) for x in lists))
            lists, loads = [[] for _ in range(slots)], [(0, i) for i in range(slots)]
    if any(lists):
        made.append(tuple(tuple(x) for x in lists))
    return made


def _padded(group: list[tuple[Unit, ...]], slots: int) -> Group:
    return tuple(group + [()] * (slots - len(group)))
