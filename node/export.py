"""Gathering the whole model from the swarm: every stage from its members at one epoch, written as Hugging Face has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from node.checkpoint.service import fetch
from node.checkpoint.state import NoDonor, StateKind
from node.core.errors import NetworkFault
from node.core.ids import PeerId
from node.manifest import Manifest
from node.model.export import write_hf
from node.model.shapes import parameter_shapes
from node.transport.port import TransportPort

if TYPE_CHECKING:
    from node.assembly import Assembled

ATTEMPTS = 5
"""The swarm moves on while stages are gathered; a version that slipped away is tried for again this often."""


async def gather(a: Assembled, m: Manifest, transport: TransportPort, directory: Path, say: Callable[..., None]) -> None:
    """Fetch every stage and write ``directory``. Stages are of one epoch where the swarm stands still, and of epochs at
    most one apart while it trains (said in the event). Raises NetworkFault when a stage has no donor."""
    plan = a.work.plan
    if plan is None:
        raise NetworkFault("the swarm has not begun: no plan yet", "wait for every stage to have a peer; see tutti status")
    tensors: dict[str, torch.Tensor] = {}
    epochs: dict[int, int] = {}
    for stage in range(m.pipeline.stages + 1):
        if stage == a.stage.stage:
            tensors.update(a.stage.parameters())
            epochs[stage] = a.stage.epoch
        else:
            donors = [x.peer for x in plan.cell(stage) if x.current]
            found, epochs[stage] = await _fetch_stage(a, m, transport, donors, stage)
            tensors.update(found)
        say(
            "stage-gathered", f"stage {stage} of {m.pipeline.stages} at epoch {epochs[stage]}", stage=stage, epoch=epochs[stage]
        )
    cpu = {name: t.detach().to("cpu", torch.float32) for name, t in tensors.items()}
    json = a.tokenizer.to_json() if a.tokenizer is not None else None
    await asyncio.to_thread(write_hf, directory, m.model, cpu, json)
    low, high = min(epochs.values()), max(epochs.values())
    text = f"epoch {high}" if low == high else f"epochs {low} to {high} (the swarm went on meanwhile)"
    say("exported", f"wrote {directory} from {text}", directory=str(directory), epoch=high)


async def _fetch_stage(
    a: Assembled, m: Manifest, transport: TransportPort, donors: list[PeerId], stage: int
) -> tuple[dict[str, torch.Tensor], int]:
    shapes = parameter_shapes(m.model, m.pipeline.stages, stage)
    for attempt in range(ATTEMPTS):
        try:
            got = await fetch(transport, donors, stage, StateKind.PARAMETERS, None, shapes, None, settings=a.checkpoint)
            return got.tensors, got.epoch
        except NoDonor as e:
            if attempt == ATTEMPTS - 1:
                raise NetworkFault(f"stage {stage} could not be gathered: {e}", "see tutti peers") from e
            await asyncio.sleep(0.2 * (attempt + 1))
    raise NetworkFault(f"stage {stage} could not be gathered", "see tutti peers")
