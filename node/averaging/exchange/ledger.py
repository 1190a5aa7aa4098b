"""What an owner keeps of its rounds and of the streams that are open.
Enters: requests, contributions, fresh parts.
Never: a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from node.averaging.coding.codecs import Coded
from node.averaging.coding.parcel import ParcelReader
from node.averaging.exchange.events import EndStream, Read, Serve, Wait
from node.averaging.exchange.groups import Group
from node.averaging.exchange.request import RoundRequest
from node.averaging.exchange.request import Step as StepCall
from node.core.ids import PeerId, RoundId


@dataclass(slots=True)
class FreshPart:
    """A fresh part: who stepped it, over how many tokens, from whose gradients. The tensor is never
    written again; ``data``: the bytes it travels as, the same from whomever it is had."""

    tensor: torch.Tensor
    source: PeerId
    tokens: int
    contributors: tuple[PeerId, ...]
    codec: str
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Given:
    """A contribution: its numbers as they came (none of our own, which are the request's), and the
    2-norm of each part."""

    tokens: int
    named: Mapping[str, Coded]
    norms: Mapping[str, float]


@dataclass(slots=True)
class RoundAttempt:
    """One of our own rounds. ``settled`` resolves to "" when all our parts are fresh, or to what
    went wrong.

    ``cell``: ours, 0 where there are none; ``given``: by group and contributor, from its arrival to
    its step; ``begun``: groups, by cell, whose step takes no more; ``faults``: by cell, why our
    parts do not get fresh there."""

    request: RoundRequest
    step: StepCall | None
    groups: tuple[Group, ...]
    settled: asyncio.Future[str]
    cell: int = 0
    given: dict[tuple[int, PeerId], Given] = field(default_factory=dict)
    begun: set[tuple[int, int]] = field(default_factory=set)
    faults: dict[int, str] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)

    @property
    def mine(self) -> frozenset[str]:
        """All parts we own in it."""
        return frozenset(name for group in self.groups for name in group.names)

    @property
    def cells(self) -> frozenset[int]:
        """All that our parts are asked for in."""
        return frozenset(self.request.cells.values()) or frozenset((self.cell,))

    def cell_of(self, peer: PeerId) -> int:
        """A member's."""
        return self.request.cells.get(peer, self.cell)

    def lacking(self, held: Mapping[int, Mapping[str, FreshPart]]) -> Iterator[int]:
        """Cells in which not all of our parts are fresh, one by one: of many, who asks seldom needs
        more than the first."""
        mine = self.mine
        return (cell for cell in self.cells if not mine <= held.get(cell, {}).keys())

    def drop(self, cells: Collection[int]) -> None:
        """No step of this attempt will begin any more in these cells: let go of what was given for
        one."""
        # In place, and of a copy of the keys: a step takes what it was given out of it on a thread
        # of its own.
        for group, peer in list(self.given):
            cell = self.cell_of(peer)
            if cell in cells and (cell, group) not in self.begun:
                del self.given[group, peer]


@dataclass(slots=True)
class EpochState:
    """What an epoch has brought so far. ``held`` is by cell."""

    attempts: dict[RoundId, RoundAttempt] = field(default_factory=dict)
    held: dict[int, dict[str, FreshPart]] = field(default_factory=dict)
    stepped: set[str] = field(default_factory=set)
    quarantined: dict[PeerId, str] = field(default_factory=dict)

    def of(self, cell: int) -> dict[str, FreshPart]:
        """Fresh parts of a cell, to be added to."""
        return self.held.setdefault(cell, {})

    @property
    def here(self) -> dict[str, FreshPart]:
        """Fresh parts of our own cell."""
        newest = max(self.attempts, default=None)
        return {} if newest is None else self.of(self.attempts[newest].cell)


@dataclass(slots=True)
class ExchangeStream:
    """One open stream and what the machine has ordered for it."""

    number: int
    peer: PeerId
    round: RoundId
    group: int
    tokens: int
    heads: list
    orders: asyncio.Queue[Read | Wait | Serve | EndStream] = field(default_factory=asyncio.Queue)
    reader: ParcelReader | None = None
    """What has come so far of a contribution that is still wanted."""
