"""Request of an epoch to a round, its fresh parts, and the outcome that the epoch gets."""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import torch

from node.averaging.exchange.events import Group, micro_groups
from node.core.ids import PeerId, RoundId
from node.wire.coding.formats import nbytes_of

Step = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Function from mean gradients of owned parts (fp32, CPU) to their fresh parameters, same names and
shapes, fp32 or bf16. Runs on the given executor.

The tensors it returns are served as they are: nobody may change them afterwards. If it returns a
mean that it was given, that tensor may be overwritten by the values that its bytes decode to; a
step that keeps the mean returns another tensor.
"""

Check = Callable[[Mapping[str, torch.Tensor]], str]
"""Fresh parameters of some parts to the reason for which no honest owner gives them; empty for
none. Runs in a thread."""

TOKENS_LIMIT = 1 << 40
"""Tokens nobody can have behind one epoch's gradients, when the caller knows no better bound."""


@dataclass(frozen=True)
class WeightCaps:
    """Limits of contributions. ``most``: a contribution that claims more tokens is refused.
    ``allowed``: tokens that the plan assigned to each member at this stage (empty: no caps);
    ``total``: tokens of the micro-batches that count (0: unknown). A contribution weighs no more
    than these tokens explain, see :func:`node.averaging.reducers.quarantine.weights`."""

    most: int = TOKENS_LIMIT
    allowed: Mapping[PeerId, int] = field(default_factory=dict)
    total: int = 0


@dataclass(frozen=True)
class RoundRequest:
    """One attempt of one epoch for one cell, as its plan has it; the same at every member except
    for gradients, tokens and deadline.

    ``members`` are the live peers of the cell, listeners included; ``owners`` maps every part of
    the stage to one of them; ``gradients`` are *sums* over ``tokens`` tokens (None or 0 tokens:
    this peer gives nothing), each read in a thread when it is wanted; ``deadline_s`` counts from
    the call. ``ready(names)`` is awaited before parts of ours are stepped. ``check`` is asked about
    fresh parts of others before they count. ``hold(names)`` gives the values of our parts to which
    no member has anything to give, on the executor of the step; None: that is a fault.

    ``up`` and ``down``: number formats (``formats.FORMATS``) of tensors to the owners ("":
    ``averaging.wire``) and back. If ``down`` is lossy, the owner itself continues with the values
    that its bytes decode to, so all hold the same bits.
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
    up: str = ""
    down: str = "fp32"
    ready: Callable[[tuple[str, ...]], Awaitable[None]] | None = None
    check: Check | None = None

    def groups_of(self, peer: PeerId, most: int) -> tuple[Group, ...]:
        """The parts of one owner in groups of at most ``most`` bytes as they travel, the larger
        way, and at most four times this size in memory; in the order they travel in. Each group
        costs a call, 4 ms of processor time in all."""
        counts = {
            name: math.prod(self.shapes[name])
            for name, owner in self.owners.items()
            if owner == peer
        }
        return micro_groups(
            {
                name: max(n, nbytes_of(n, self.up or "fp32"), nbytes_of(n, self.down))
                for name, n in counts.items()
            },
            most,
        )


@dataclass(slots=True)
class FreshPart:
    """A fresh part: the peer that stepped it, the tokens behind it, the peers that contributed
    gradients. The tensor is never written again; ``data``: the bytes it travels as, the same from
    every peer that serves it."""

    tensor: torch.Tensor
    source: PeerId
    tokens: int
    contributors: tuple[PeerId, ...]
    codec: str
    data: torch.Tensor


@dataclass(frozen=True)
class RoundOutcome:
    """Outcome of one attempt.

    ``fresh``: parameters by name (CPU, fp32, or bf16 where they come so; not to be changed in
    place), from this and earlier attempts, each from its owner in *this* attempt. ``missing``: the
    rest of the stage, to be asked for in the next attempt. ``failed``: owners that gave nothing,
    and why (this peer too, if its own step failed). ``refused``: peers that sent contributions with
    unfit values here, and why; this peer's own is checked before it is sent. ``quarantined``: peers
    with contributions that were left out here because they were far larger than the others', and
    why. ``contributors``: all peers with gradients in the mean of some part. ``nbytes``: tensor
    bytes sent and received. ``impossible``: owners with parts that did not pass the request's
    ``check``.
    """

    fresh: dict[str, torch.Tensor]
    contributors: frozenset[PeerId]
    failed: dict[PeerId, str]
    nbytes: int
    seconds: float
    missing: tuple[str, ...] = ()
    refused: dict[PeerId, str] = field(default_factory=dict)
    quarantined: dict[PeerId, str] = field(default_factory=dict)
    impossible: frozenset[PeerId] = frozenset()
