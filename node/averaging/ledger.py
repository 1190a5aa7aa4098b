"""What an owner keeps of its rounds and of the streams that are open.
Enters: requests, contributions, fresh parts.
Never: a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from node.averaging.events import Read, Refuse, Serve, Wait
from node.averaging.groups import Group
from node.averaging.parcel import Reader
from node.averaging.request import RoundRequest
from node.averaging.request import Step as StepCall
from node.core.ids import PeerId, RoundId


@dataclass(slots=True)
class Held:
    """A fresh part: who stepped it, over how many tokens, from whose gradients. The tensor is never written again; ``data``:
    the bytes it travels as, the same from whomever it is had."""

    tensor: torch.Tensor
    source: PeerId
    tokens: int
    contributors: tuple[PeerId, ...]
    codec: str
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Given:
    """A contribution: its numbers, and the 2-norm of each part."""

    tokens: int
    named: Mapping[str, torch.Tensor]
    norms: Mapping[str, float]


@dataclass(slots=True)
class Attempt:
    """One of our own rounds. ``settled`` resolves to "" when all our parts are fresh, or to what went wrong.

    ``given``: by group and contributor, from its arrival to its step; ``begun``: groups whose step takes no more."""

    request: RoundRequest
    step: StepCall
    groups: tuple[Group, ...]
    settled: asyncio.Future[str]
    given: dict[tuple[int, PeerId], Given] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    refused: dict[PeerId, str] = field(default_factory=dict)

    @property
    def mine(self) -> frozenset[str]:
        """All parts we own in it."""
        return frozenset(name for group in self.groups for name in group.names)

    def drop(self) -> None:
        """No step of this attempt will begin any more: let go of what was given for one."""
        self.given = {key: value for key, value in self.given.items() if key[0] in self.begun}


@dataclass(slots=True)
class Epoch:
    """What an epoch has brought so far."""

    attempts: dict[RoundId, Attempt] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    stepped: set[str] = field(default_factory=set)
    quarantined: dict[PeerId, str] = field(default_factory=dict)


@dataclass(slots=True)
class Line:
    """One open stream and what the machine has ordered for it."""

    number: int
    peer: PeerId
    round: RoundId
    group: int
    tokens: int
    heads: list
    orders: asyncio.Queue[Read | Wait | Serve | Refuse] = field(default_factory=asyncio.Queue)
    reader: Reader | None = None
    """What has come so far of a contribution that is still wanted."""
