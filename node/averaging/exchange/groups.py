"""Micro-groups: which of an owner's parts travel and are stepped together, so that the transfer of
one group overlaps with the step of another. Enters: names with their bytes, and the most a group
may hold. Leaves: groups in the order of their steps. Never: a cost, an owner, a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

LET_IN = 2
"""Groups of an attempt whose gradients an owner holds at once: one is stepped while the next one's
arrive."""
UNDER_WAY = 3
"""Groups of one owner that a member has under way: one leaves the owner, one is stepped there, one
goes up."""


@dataclass(frozen=True, slots=True)
class Group:
    """``names`` sorted; ``digest`` is a hash of these names: a peer with another digest at this
    index has cut the parts into other groups."""

    index: int
    names: tuple[str, ...]
    digest: str


def micro_groups(sizes: Mapping[str, int], most: int) -> tuple[Group, ...]:
    """Parts in order of names, in about as few groups as ``most`` bytes each allow, of about equal
    bytes.

    A part larger than ``most`` is a group of its own. The same at every member, in whatever order
    ``sizes`` comes: whole numbers only. Equal groups, because the transfers that do not overlap are
    the first one's to the owner and the last one's back.
    """
    total = sum(sizes.values())
    count = max(1, -(-total // most))
    made: list[list[str]] = []
    used = done = 0
    for name in sorted(sizes):
        size = sizes[name]
        # Too much for this group, or its middle lies in the next group's share of the bytes.
        if (
            not made
            or used
            and (used + size > most or (2 * done + size) * count > 2 * total * len(made))
        ):
            made.append([])
            used = 0
        made[-1].append(name)
        used, done = used + size, done + size
    return tuple(Group(index, tuple(names), _digest(names)) for index, names in enumerate(made))


def contribute_until(started: float, deadline_s: float, count: int) -> tuple[float, ...]:
    """When each of ``count`` groups is stepped without the late: contributions have three fifths of
    a round; the steps and the way back have the rest, and a group may wait until its equal share of
    that begins."""
    return tuple(started + deadline_s * (0.6 + 0.4 * index / count) for index in range(count))


def _digest(names: list[str]) -> str:
    return blake2b(
        "".join(f"{len(name)}:{name}" for name in names).encode(), digest_size=16
    ).hexdigest()
