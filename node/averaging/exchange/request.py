"""What the epoch asks of a round and what it is told afterwards."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from node.averaging.coding.codecs import encode
from node.averaging.coding.formats import nbytes_of
from node.averaging.exchange.events import Kind, QuorumRule
from node.averaging.exchange.groups import Group, micro_groups
from node.core.ids import PeerId, RoundId

Step = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Mean gradients of owned parts (fp32, CPU) to their fresh parameters, same names and shapes. Runs
on the given executor.

What it gives is served as it is: nobody may change these tensors afterwards. A mean that it gives
back itself may be written over with what its bytes are to others, so whoever keeps one gives back
another tensor."""

TOKENS_LIMIT = 1 << 40
"""Tokens nobody can have behind one epoch's gradients, when the caller knows no better bound."""


@dataclass(frozen=True)
class WeightCaps:
    """What contributions may weigh. ``most``: who claims more tokens is refused. ``allowed``:
    tokens that the plan assigned to each member at this stage (empty: no caps); ``total``: tokens
    of the micro-batches that count (0: unknown). A contribution weighs no more than they explain,
    see :func:`node.averaging.reducers.weights.weights`."""

    most: int = TOKENS_LIMIT
    allowed: Mapping[PeerId, int] = field(default_factory=dict)
    total: int = 0


@dataclass(frozen=True)
class TensorFormat:
    """``up`` and ``down``: number formats (``formats.FORMATS``) of what goes to the owners ("":
    ``averaging.wire``) and of what comes back. With a lossy ``down`` the owner itself goes on with
    what its bytes are to the others, so all hold the same bits. ``coded``: bytes in ``up`` of
    gradients that are just what these bytes say, as error feedback gives them; the others are
    encoded here."""

    up: str = ""
    down: str = "fp32"
    coded: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRequest:
    """One attempt of one epoch for one cell, as its plan has it; the same at every member but for
    gradients, tokens and deadline.

    ``members`` are the live peers of the cell, listeners included; ``owners`` maps every part of
    the stage to one of them; ``gradients`` are *sums* over ``tokens`` tokens (None or 0 tokens:
    this peer gives nothing); ``deadline_s`` counts from the call. ``ready(names)`` is awaited
    before parts of ours are stepped. ``hold``: what parts of ours are when nobody has given
    anything to them, on the given executor; None: that is a fault.

    ``summed``: contributions are sums over tokens; else values, of which the mean by tokens is
    taken. ``reducer``: what is made of the contributions instead of their mean; "": as
    ``averaging.reducer`` says. ``inward``: what this peer gives stays here, for the parts that it
    owns itself; nobody else is to have it twice. ``gathers`` False: nothing is asked for, because
    everything is here, whoever gave it; others may still ask us. ``cells``: those of the members,
    where each cell is averaged and answered by itself and none waits for another; empty: all are in
    one. ``apply(cell, names, means)`` is then what is made of our parts ``names`` instead of the
    step, at most once in a cell for each part, one cell after another as they come, on the given
    executor; no means where a cell gives nothing.
    """

    round: RoundId
    plan_hash: str
    members: tuple[PeerId, ...]
    listeners: frozenset[PeerId]
    owners: Mapping[str, PeerId]
    ownership_hash: str
    shapes: Mapping[str, tuple[int, ...]]
    gradients: Mapping[str, torch.Tensor] | None
    tokens: int
    deadline_s: float
    caps: WeightCaps = field(default_factory=WeightCaps)
    hold: Callable[[tuple[str, ...]], Mapping[str, torch.Tensor]] | None = None
    form: TensorFormat = field(default_factory=TensorFormat)
    summed: bool = True
    reducer: str = ""
    inward: bool = False
    gathers: bool = True
    quorum: QuorumRule = QuorumRule()
    cells: Mapping[PeerId, int] = field(default_factory=dict)
    ready: Callable[[tuple[str, ...]], Awaitable[None]] | None = None
    apply: (
        Callable[[int, tuple[str, ...], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
        | None
    ) = None

    def sent_as(self, up: str) -> RoundRequest:
        """With this number format for what goes to the owners, unless the request names one."""
        return replace(self, form=replace(self.form, up=self.form.up or up))

    @property
    def may_hold(self) -> bool:
        """Whether it is no fault that nobody gives anything to a part."""
        return self.hold is not None or self.apply is not None

    def kept(self, cell: int, names: tuple[str, ...]) -> Mapping[str, torch.Tensor]:
        """What parts of ours are where nobody gave anything to them."""
        if self.apply is not None:
            return self.apply(cell, names, {})
        return self.hold(names) if self.hold is not None else {}

    def bytes_of(self, name: str) -> torch.Tensor:
        """Our contribution to a part as it travels: uint8. Raises ValueError as
        :func:`codecs.encode`."""
        ready = self.form.coded.get(name)
        return encode((self.gradients or {})[name], self.form.up) if ready is None else ready

    def groups_of(self, peer: PeerId, most: int) -> tuple[Group, ...]:
        """The parts of one owner in groups of at most ``most`` bytes as they travel, the larger
        way, and four times as many in memory; in the order they travel in. Each group costs a call,
        4 ms of processor time in all."""
        counts = {
            name: math.prod(self.shapes[name])
            for name, owner in self.owners.items()
            if owner == peer
        }
        ways = (self.form.up or "fp32", self.form.down)
        return micro_groups(
            {name: max(n, *(nbytes_of(n, way) for way in ways)) for name, n in counts.items()}, most
        )


@dataclass(frozen=True, slots=True)
class PartOrigin:
    """How one fresh part was made: at which owner, over how many tokens, from whose
    contributions."""

    owner: PeerId
    tokens: int
    contributors: tuple[PeerId, ...]


@dataclass(frozen=True)
class RoundOutcome:
    """What one attempt brought.

    ``fresh``: parameters by name (fp32, CPU, not to be changed in place), from this and earlier
    attempts, each from its owner in *this* attempt. ``stepped``: the parts stepped here this epoch.
    ``missing``: the rest of the stage, to be asked for in the next attempt. ``failed``: owners that
    gave nothing, and why (this peer too, when its own step failed). ``refused``: whose
    contributions were refused here for their values, and why; this peer's own is found out before
    it is sent. ``quarantined``: whose were left out here because they were far larger than the
    others'. ``unwelcome``: those of ``failed`` that live and said why they refused us. ``tokens``
    and ``contributors``: behind the parts' means, the largest and all of them. ``parts``: how each
    fresh part was made. ``unserved``: parts of ours that some cell did not get. ``nbytes``: tensor
    bytes sent and received.
    """

    fresh: dict[str, torch.Tensor]
    tokens: int
    contributors: frozenset[PeerId]
    failed: dict[PeerId, str]
    nbytes: int
    seconds: float
    stepped: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    refused: dict[PeerId, str] = field(default_factory=dict)
    quarantined: dict[PeerId, str] = field(default_factory=dict)
    unwelcome: dict[PeerId, Kind] = field(default_factory=dict)
    parts: dict[str, PartOrigin] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()
