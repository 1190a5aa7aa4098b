"""Micro-groups as published (arXiv 2602.06079): the cost of a slot bounds a group. Groups are
synchronous, so their time is the sum of each group's slowest slot."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Literal

from node.core.errors import UsageFault
from node.partition.matrices import Unit, in_order
from node.partition.plan import Group

Mode = Literal["no", "single", "slot", "global"]


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
    # Longest-first never moves a placed unit, so appending to a schedule and undoing one step gives
    # the same result as planning it anew.
    loads = [(0, i) for i in range(slots)]
    lists = [[] for _ in range(slots)]
    total = 0
    for u in order:
        load, slot = loads[0]
        if (
            lists
            and total
            and (total + u.cost > most * slots or max(load + u.cost, max(loads)[0]) > most)
        ):
            made.append(tuple(tuple(x) for x in lists))
            loads = [(0, i) for i in range(slots)]
            lists = [[] for _ in range(slots)]
            total = 0
            load, slot = loads[0]
        heapreplace(loads, (load + u.cost, slot))
        lists[slot].append(u)
        total += u.cost
    if total:
        made.append(tuple(tuple(x) for x in lists))
    return made


def group_time(groups: Sequence[Group]) -> int:
    """Sum over groups of the cost of the slowest slot: what synchronous groups take."""
    return sum(max(sum(u.cost for u in slot) for slot in g) for g in groups)


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
            lists = [[] for _ in range(slots)]
            loads = [(0, i) for i in range(slots)]
    if any(lists):
        made.append(tuple(tuple(x) for x in lists))
    return made


def _padded(group: list[tuple[Unit, ...]], slots: int) -> Group:
    return tuple(group + [()] * (slots - len(group)))
