"""What taking part will move over a peer's line, from the manifest alone. Pure.

Enters: a manifest, how many peers host each stage. Leaves: bytes for each epoch and second by role.
It is checked against the counters of interfaces by ``benchmarks.hour.caps``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from node.averaging.coding.formats import nbytes_of
from node.core.ids import ENDS
from node.manifest import Manifest
from node.model.shapes import parameter_shapes
from node.optim.parts import parts_of

OVERHEAD = 1.05
"""Bytes on the wire for each byte of a tensor: headers of segments, records and frames, and
acknowledgements of what came."""
FRAME = 1500
"""Bytes that a frame costs beside its tensor, both directions together: head, journey, receipts,
and the note that its share counts."""
MEMBER, HOP, SAMPLE, OWNED, PLAN = 80, 8, 7, 50, 1500
"""Bytes of a plan for each member, hop of a path, sequence, and part of the model; and what else it
has."""
IDLE = 1500.0
"""Bytes a second, each way, of a peer that takes part: the directory, heartbeats, probes; and for
each other peer:"""
IDLE_EACH = 300.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of one peer over its line. ``activations``: with their gradients, each way, of one
    epoch; ``averaging``: gradients up and parameters down and for others, each way, with copies of
    optimizer state; ``plans``: sent by one of the ends; ``state``: received once by who joins;
    ``idle``: each way, of one second whatever is trained."""

    activations: float
    averaging: float
    plans: float
    state: int
    idle: float

    @property
    def epoch(self) -> float:
        """Bytes each way of one epoch; at the ends' leader the plans come on top of what is
        sent."""
        return self.activations + self.averaging

    def over(self, epochs: float, seconds: float, leads: bool = False) -> tuple[float, float]:
        """Bytes sent and received in ``seconds`` that bring so many epochs."""
        down = epochs * self.epoch + seconds * self.idle
        return down + (epochs * self.plans if leads else 0.0), down


def forecast(manifest: Manifest, stage: int, peers: Mapping[int, int] | None = None) -> Forecast:
    """For a peer of ``stage`` (0: the ends). ``peers``: how many host each stage; those not named
    have what the run waits for before it begins. The replicas of a stage share its micro-batches
    and average with each other.

    Of the rounds between cells a cell's speaker moves more than this says, by its stage once each
    way.
    """
    m, p, t, a = manifest.model, manifest.pipeline, manifest.training, manifest.averaging
    hosts = {s: max(1, (peers or {}).get(s, t.min_replicas)) for s in range(p.stages + 1)}
    shapes = parameter_shapes(m, p.stages, stage)
    numbers = sum(math.prod(shape) for shape in shapes.values())

    tensor = p.micro_batch * m.seq_len * m.d_model * (4 if p.wire == "fp32" else 2)
    visits = 1.0 if stage == ENDS else manifest.scheduler.hops(p.stages) / p.stages
    # Forward and backward; of what is held out forward only.
    evaluated = t.eval_batches / t.eval_every if t.eval_every else 0.0
    trained = t.target_batch // p.micro_batch
    frames = (2 * trained + evaluated) * visits / hosts[stage]
    activations = frames * (OVERHEAD * tensor + FRAME / 2)

    cell = min(hosts[stage], a.peers or hosts[stage])
    others = 1 - 1 / cell
    averaging = (
        OVERHEAD * others * (nbytes_of(numbers, a.wire) + manifest.optimizer.width * numbers)
    )
    if t.buddy_every and cell > 1:
        state = sum(part.state for part in parts_of(shapes, manifest.optimizer))
        averaging += OVERHEAD * state / cell / t.buddy_every

    everybody = sum(hosts.values())
    parts = sum(len(parameter_shapes(m, p.stages, s)) for s in range(p.stages + 1))
    path = HOP * manifest.scheduler.hops(p.stages) + SAMPLE * p.micro_batch
    plan = PLAN + MEMBER * everybody + OWNED * parts + path * trained
    return Forecast(
        activations,
        averaging,
        float(plan * (everybody - 1)),
        int(OVERHEAD * 4 * numbers),
        IDLE + IDLE_EACH * (everybody - 1),
    )
