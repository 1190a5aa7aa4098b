"""What a cell says of itself to others, and the group it finds. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.core.ids import CellId
from node.core.journey import Host, Partner, Version

Hosts = Mapping[int, tuple[Host, ...]]
"""By stage: who hosts it in a cell."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """What the leader of ``cell`` says of it in a window.

    ``version`` is what the cell gives, ``anchor`` the hash of its anchor as at most 64 hex digits
    (empty where anchors do not matter), ``change`` the number of the owner's change that is in
    force, ``hosts`` where others can fetch each stage (8 peers with 4 addresses each are told),
    ``maddrs`` where the leader can be dialled, of which 4 are told.
    """

    cell: CellId
    version: Version
    hosts: Hosts
    anchor: str = ""
    change: int = 0
    maddrs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The cells that average with each other in ``window``, this one included, which met under
    ``key``. ``anchors``: as each has posted its own; empty where that was not seen."""

    window: int
    key: str
    members: Mapping[CellId, Partner]
    anchors: Mapping[CellId, str]
