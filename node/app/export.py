"""Gathering the whole model from the swarm: every stage from its members at one epoch, written as
Hugging Face has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from node.checkpoint.fetch import fetch
from node.checkpoint.state import NoDonor, StateKind
from node.core.errors import NetworkFault
from node.core.journey import Plan
from node.core.tasks import together
from node.data.places import Places
from node.data.tokenizer import open_tokenizer
from node.manifest import Manifest
from node.model.export import write_adapter, write_hf
from node.model.shapes import parameter_shapes
from node.transport.port import TransportPort

if TYPE_CHECKING:
    from node.app.assembly import Assembled

Stage = tuple[dict[str, torch.Tensor], int]
"""Parameters by name, and their epoch."""
ATTEMPTS = 5
"""The swarm moves on while stages are gathered; a version that slipped away is tried for again this
often."""


async def gather(
    a: Assembled,
    m: Manifest,
    transport: TransportPort,
    directory: Path,
    places: Places,
    say: Callable[..., None],
) -> None:
    """Fetch every stage and write ``directory``, all of one epoch where the swarm allows (the event
    says when not).

    Raises NetworkFault when a stage has no donor, what :func:`open_tokenizer` raises where ``a``
    hosts a block stage, and what :func:`write_hf` raises for a place that cannot be written.
    """
    plan = a.work.plan
    if plan is None:
        raise NetworkFault(
            "the swarm has not begun: no plan yet",
            "wait for every stage to have a peer; see tutti status",
        )
    tokenizer = a.tokenizer or await asyncio.to_thread(open_tokenizer, m.data, places)
    got = await _every_stage(a, m, transport, plan)
    for _ in range(ATTEMPTS):
        if _span(got)[0] == _span(got)[1]:
            break
        say(
            "epochs-apart",
            f"stages came at epochs {_span(got)[0]} to {_span(got)[1]}; gathering them again",
        )
        got = await _every_stage(a, m, transport, a.work.plan or plan)
    for stage, (_, epoch) in enumerate(got):
        say(
            "stage-gathered",
            f"stage {stage} of {m.pipeline.stages} at epoch {epoch}",
            stage=stage,
            epoch=epoch,
        )
    low, high = _span(got)
    whole, parameters = (
        {k: t for tensors, _ in got for k, t in tensors.items()},
        m.optimizer.parameters,
    )
    if m.model.adapter:
        await asyncio.to_thread(write_adapter, directory, m.model, whole, parameters)
    else:
        tokenizer_json = tokenizer.to_json()
        await asyncio.to_thread(write_hf, directory, m.model, whole, tokenizer_json, parameters)
    text = (
        f"epoch {high}" if low == high else f"epochs {low} to {high} (the swarm went on meanwhile)"
    )
    say("exported", f"wrote {directory} from {text}", directory=str(directory), epoch=high)


def _span(got: list[Stage]) -> tuple[int, int]:
    return min(epoch for _, epoch in got), max(epoch for _, epoch in got)


async def _every_stage(
    a: Assembled, m: Manifest, transport: TransportPort, plan: Plan
) -> list[Stage]:
    """All at once: the swarm goes on meanwhile, and the model should be of one epoch."""
    return await together(*(_stage(a, m, transport, plan, s) for s in range(m.pipeline.stages + 1)))


async def _stage(
    a: Assembled, m: Manifest, transport: TransportPort, plan: Plan, stage: int
) -> Stage:
    if stage == a.stage.stage:
        return a.stage.parameters(), a.stage.version.epoch
    donors = [x.peer for x in plan.stage(stage) if x.current]
    shapes = parameter_shapes(m.model, m.pipeline.stages, stage)
    for attempt in range(ATTEMPTS):
        try:
            got = await fetch(
                transport,
                donors,
                stage,
                StateKind.PARAMETERS,
                None,
                shapes,
                settings=a.work.engines.store.settings,
            )
            return got.tensors, got.version.epoch
        except NoDonor as e:
            if attempt == ATTEMPTS - 1:
                raise NetworkFault(
                    f"stage {stage} could not be gathered: {e}", "see tutti peers"
                ) from e
            await asyncio.sleep(0.2 * (attempt + 1))
    raise NetworkFault(f"stage {stage} could not be gathered", "see tutti peers")
