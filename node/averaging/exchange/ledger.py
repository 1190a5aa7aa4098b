"""What an owner keeps of its rounds and of the streams that are open.
Enters: requests, contributions, fresh parts.
Never: a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from node.averaging.coding.codecs import Coded
from node.averaging.coding.parcel import ParcelReader
from node.averaging.exchange.events import Began, EndStream, Read, Serve, Wait
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

    ``until``: its deadline; ``gathers``: by owner, the task that takes its fresh parts. ``given``:
    by group and contributor, from its arrival to its step; ``begun``: groups whose step has begun,
    so that it takes no more contributions. ``failed``: owners that gave nothing, and why;
    ``refused``: peers whose gradients are unfit here, and why; ``nbytes``: tensor bytes sent and
    received.
    """

    request: RoundRequest
    step: StepCall | None
    groups: tuple[Group, ...]
    until: float
    settled: asyncio.Future[str]
    gathers: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)
    given: dict[tuple[int, PeerId], Given] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    failed: dict[PeerId, str] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def mine(self) -> frozenset[str]:
        """All parts we own in it."""
        return frozenset(name for group in self.groups for name in group.names)

    def settle(self, why: str) -> None:
        """Resolve ``settled``; only the first call has an effect."""
        if not self.settled.done():
            self.settled.set_result(why)

    def drop(self) -> None:
        """No step of this attempt will begin any more: let go of what was given for one."""
        # In place, and of a copy of the keys: a step takes what it was given out of it on a thread
        # of its own.
        for group, peer in list(self.given):
            if group not in self.begun:
                del self.given[group, peer]


@dataclass(slots=True)
class EpochState:
    """What an epoch has brought so far. ``held``: fresh parts, our own and others'; ``lost``: peers
    that the leader has found dead in it."""

    attempts: dict[RoundId, RoundAttempt] = field(default_factory=dict)
    held: dict[str, FreshPart] = field(default_factory=dict)
    quarantined: dict[PeerId, str] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)


@dataclass(slots=True)
class ExchangeStream:
    """One open stream, how it began, and what the machine has ordered for it."""

    began: Began
    heads: list
    orders: asyncio.Queue[Read | Wait | Serve | EndStream] = field(default_factory=asyncio.Queue)
    reader: ParcelReader | None = None
    """The bytes received so far of a contribution that is still wanted, else None."""
