"""How much memory a stage may take here, and whether one of a run fits into it, before anything of
it is loaded. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from node.averaging.exchange.events import LET_IN
from node.config import NodeConfig
from node.core.ids import ENDS, stage_name
from node.core.numbers import human, in_words
from node.manifest import Manifest
from node.model.cost import (
    RECOMPUTE,
    RESERVE,
    RoundBytes,
    Verdict,
    fits,
    fits_beside,
    frames_bytes,
    stash_bytes,
)
from node.model.shapes import parameter_shapes
from node.optim.parts import SCRATCH_KEPT, ParameterPart, parts_of, step_scratch
from node.pipeline.settings import STASH
from node.training.rounds.memory import outer_bytes

if TYPE_CHECKING:
    from node.model.device import Device


def room_on(config: NodeConfig, devices: Sequence[Device], held: int = 0) -> tuple[int, str]:
    """(bytes that a stage may take of these devices together, all alike; a text that explains the
    number where it is not all of a device). Of a GPU no more is counted than is free now, so that
    memory which other programs use, a desktop for instance, is left to them; ``held`` bytes of each
    are used by this peer itself, and count as free."""
    gpu, reserve, said = devices[0].is_cuda, config.reserve, list[str]()
    free, total = min(
        (d.memory_free() + held if gpu else d.memory_limit(), d.memory_limit()) for d in devices
    )
    if gpu:
        said.append(f"{human(free)} of {human(total)} were free")
    if reserve:
        said.append(f"{human(reserve)} are reserved for others")
    limit = max(0, min(config.memory_limit(total), free - reserve))
    return limit * len(devices), " and ".join(said)


def shares(config: NodeConfig, manifest: Manifest, limit: int) -> dict[int, int]:
    """Bytes for each stage when all stages of a run share one device and may take ``limit``
    together: first the minimum of each, then the rest in proportion to what each takes when memory
    is ample. If ``limit`` is less than all minima together, every minimum is cut by the same
    factor."""
    stages = range(manifest.pipeline.stages + 1)
    least = [check_memory(config, manifest, s, 0).needed / (1 - RESERVE) for s in stages]
    ample = [check_memory(config, manifest, s, limit).needed for s in stages]
    part, rest = min(1.0, limit / sum(least)), max(0.0, limit - sum(least))
    each = zip(stages, least, ample, strict=True)
    return {s: int(part * low + rest * high / sum(ample)) for s, low, high in each}


def check_memory(
    config: NodeConfig,
    manifest: Manifest,
    stage: int,
    limit: int,
    beside: int = 0,
    said: str = "",
) -> Verdict:
    """Whether ``stage`` fits into ``limit`` bytes of this peer's device, and what outer rounds keep
    of it into the ``beside`` bytes of main memory, where that is not the device's (0). As little is
    computed again for a backward as makes it fit. ``said``: explains the limit, for people."""
    m, p, outer = manifest.model, manifest.pipeline, manifest.outer
    parts = parts_of(parameter_shapes(m, p.stages, stage), manifest.optimizer)
    kept = outer_bytes(outer, {part.name: part.bytes for part in parts})
    rounds = _rounds(parts, manifest, kept.device if beside else kept.main + kept.device)
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
                rounds=rounds,
                recompute=mode if mode != "auto" else "off",
                width=manifest.optimizer.width,
                masked=manifest.data.document_mask,
            )
        )
        if tried[-1].ok:
            break
    verdict = min(tried, key=lambda v: (not v.ok, v.needed))
    verdict = replace(verdict, text="; ".join(filter(None, (verdict.text, said))))
    if not verdict.ok or not beside:
        return verdict
    found = fits_beside(stage, p.stages, kept.main, beside)
    return verdict if found.ok else found


def _rounds(parts: Sequence[ParameterPart], manifest: Manifest, outer: int) -> RoundBytes:
    t, group = manifest.training, manifest.averaging.group_bytes
    members, sizes = max(1, t.min_replicas), [part.bytes for part in parts]
    # Who has a buddy is one: beside the own share of the optimizer's state there is a copy of
    # another's.
    shares = members // 2 if members > 1 and t.buddy_every else members
    states = [part.state for part in parts]
    # An owner holds two groups of every other member, and their means.
    together = max((group, *sizes)) + (LET_IN - 1) * group
    step = step_scratch(parts, manifest.optimizer, group)
    return RoundBytes(
        optimizer=_share(states, shares),
        staged=_share(states, members),
        exchange=members * min(_share(sizes, members), together),
        step=step,
        shelf=min(step, SCRATCH_KEPT),
        outer=outer,
    )


def _share(sizes: Sequence[int], among: int) -> int:
    # A matrix is stepped whole: however many share the rest, somebody has all of the largest.
    return max((*sizes, -(-sum(sizes) // among)))


def hosted(config: NodeConfig, manifest: Manifest, limit: int) -> list[int]:
    """Stages that tell what a peer with these settings may hold: the one it names, else the ends
    and the block stage that takes most, as far as its role allows."""
    if config.stage is not None:
        wanted = [config.stage]
    else:
        # The first ones may have a layer more, and at later ones more gradients wait until their
        # micro-batch counts.
        wanted = [
            ENDS,
            max(
                range(1, manifest.pipeline.stages + 1),
                key=lambda stage: check_memory(config, manifest, stage, limit).needed,
            ),
        ]
    blocks = [stage for stage in wanted if stage != ENDS]
    return {"ends": [ENDS], "stage": blocks}.get(config.node.role, wanted)


def planned_memory(config: NodeConfig, manifest: Manifest) -> list[str]:
    """What a stage takes by the plan, for who has not joined yet: a line for each of
    :func:`hosted`, and its parts."""
    limit, found = config.memory_limit(1 << 60), list[str]()
    for stage in hosted(config, manifest, limit):
        plan = check_memory(config, manifest, stage, limit)
        found += [f"up to {human(plan.needed)} for {stage_name(stage)}:", *in_words(plan.table)]
    return found


def stash_limit(config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict) -> int:
    """Bytes of activations that a peer keeps: as many as it was told, else what the planned
    micro-batches take with the tensors that come and go, and more of them up to :data:`STASH` where
    ``verdict`` leaves memory."""
    if asked := config.limits.stash_bytes:
        return asked
    m, p = manifest.model, manifest.pipeline
    masked = manifest.data.document_mask
    kept = stash_bytes(m, p.stages, stage, p.micro_batch, verdict.recompute, masked)
    planned = config.limits.in_flight * (kept + frames_bytes(m, p.micro_batch))
    free = max(0, int(verdict.available * (1 - RESERVE)) - verdict.needed)
    return max(planned, min(STASH, planned + free))
