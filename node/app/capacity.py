"""Whether a stage of a run fits into the memory of this peer, before anything of it is loaded.
Arithmetic only."""

from __future__ import annotations

from node.config import NodeConfig
from node.core.ids import ENDS
from node.manifest import Manifest
from node.model.cost import RECOMPUTE, RESERVE, Verdict, fits, fits_beside, stash_bytes
from node.model.shapes import parameter_shapes
from node.optim.parts import parts_of
from node.pipeline.settings import STASH
from node.training.rounds.memory import outer_bytes


def check_memory(
    config: NodeConfig, manifest: Manifest, stage: int, limit: int, beside: int = 0
) -> Verdict:
    """Whether ``stage`` fits into ``limit`` bytes of this peer's device, and what outer rounds keep
    of it into the ``beside`` bytes of main memory, where that is not the device's (0). Of what may
    be computed again for a backward, as little is as makes it fit."""
    m, p, t, outer = manifest.model, manifest.pipeline, manifest.training, manifest.outer
    # Who has a buddy is one: beside the own share of the optimizer's state there is a copy of
    # another's.
    shares = t.min_replicas if t.min_replicas < 2 or not t.buddy_every else t.min_replicas // 2
    parts = parts_of(parameter_shapes(m, p.stages, stage), manifest.optimizer)
    states = [part.state for part in parts]
    # A matrix is stepped whole: however many share the rest, somebody has all of the largest.
    mine = max([*states, -(-sum(states) // max(1, shares))])
    kept = outer_bytes(outer, {part.name: part.bytes for part in parts})
    asked = config.limits.recompute
    modes = RECOMPUTE if asked == "auto" and config.node.local_devices == 1 else (asked,)
    tried: list[Verdict] = []
    for mode in modes if stage != ENDS else ("off",):
        tried.append(
            fits(
                m,
                p.stages,
                stage,
                limit,
                micro_batch=p.micro_batch,
                in_flight=config.limits.in_flight,
                optimizer=mine,
                outer=kept.device if beside else kept.main + kept.device,
                recompute=mode if mode != "auto" else "off",
            )
        )
        if tried[-1].ok:
            break
    verdict = min(tried, key=lambda v: (not v.ok, v.needed))
    if not verdict.ok or not beside:
        return verdict
    found = fits_beside(stage, p.stages, kept.main, beside)
    return verdict if found.ok else found


def stash_limit(config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict) -> int:
    """Bytes of activations that a peer keeps: as many as it was told, else what the planned
    micro-batches take with the tensors that come and go, and more of them up to :data:`STASH` where
    ``verdict`` leaves memory."""
    if asked := config.limits.stash_bytes:
        return asked
    m, p = manifest.model, manifest.pipeline
    kept = stash_bytes(m, p.stages, stage, p.micro_batch, verdict.recompute)
    frames = 2 * 4 * p.micro_batch * m.seq_len * m.d_model
    planned = config.limits.in_flight * (kept + frames)
    free = max(0, int(verdict.available * (1 - RESERVE)) - verdict.needed)
    return max(planned, min(STASH, planned + free))
