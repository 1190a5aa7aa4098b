"""Gathering the whole model from the swarm: every stage from its members at one epoch, written as
Hugging Face has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from node.app.assembly import Assembled
from node.checkpoint.fetch import fetch
from node.checkpoint.state import NoDonor, StateKind
from node.core.errors import NetworkFault
from node.core.journey import Plan
from node.core.tasks import together
from node.data.settings import Places
from node.data.tokenizer import open_tokenizer
from node.model.export import write_adapter, write_hf
from node.model.shapes import parameter_shapes
from node.transport.port import TransportPort

ATTEMPTS = 5
"""The swarm moves on while stages are gathered; a version that slipped away is tried for again this
often."""


Stage = tuple[dict[str, torch.Tensor], int]
"""Parameters by name, and their epoch."""


async def gather(
    a: Assembled, transport: TransportPort, directory: Path, places: Places
) -> AsyncIterator[tuple[str, str, dict[str, Any]]]:
    """Fetch every stage and write ``directory``, all of one epoch where the swarm allows (it is
    said when not). Yields what was done: a word, a sentence, and figures.

    Raises NetworkFault when a stage has no donor, what :func:`open_tokenizer` raises where ``a``
    hosts a block stage, and what :func:`write_hf` raises for a place that cannot be written.
    """
    m, plan = a.manifest, a.work.plan
    if plan is None:
        raise NetworkFault(
            "the swarm has not begun: no plan yet",
            "wait for every stage to have a peer; see tutti status",
        )
    tokenizer = a.tokenizer or await asyncio.to_thread(open_tokenizer, m.data, places)
    attempts = 0
    while True:
        now = a.work.plan or plan
        # All at once: the swarm goes on meanwhile, and the model should be of one epoch.
        got = await together(*(_stage(a, transport, now, s) for s in range(m.pipeline.stages + 1)))
        low, high = min(epoch for _, epoch in got), max(epoch for _, epoch in got)
        if low == high or attempts == ATTEMPTS:
            break
        attempts += 1
        yield "epochs-apart", f"stages came at epochs {low} to {high}; gathering them again", {}
    for stage, (_, epoch) in enumerate(got):
        text = f"stage {stage} of {m.pipeline.stages} at epoch {epoch}"
        yield "stage-gathered", text, {"stage": stage, "epoch": epoch}
    whole = {name: tensor for tensors, _ in got for name, tensor in tensors.items()}
    parameters = m.optimizer.parameters
    if m.model.adapter:
        await asyncio.to_thread(write_adapter, directory, m.model, whole, parameters)
    else:
        tokenizer_json = tokenizer.to_json()
        await asyncio.to_thread(write_hf, directory, m.model, whole, tokenizer_json, parameters)
    text = f"epoch {high}" if low == high else f"epochs {low} to {high} (the swarm trained on)"
    fields = {"directory": str(directory), "epoch": high}
    yield "exported", f"wrote {directory} from {text}", fields


async def _stage(a: Assembled, transport: TransportPort, plan: Plan, stage: int) -> Stage:
    if stage == a.stage.stage:
        return a.stage.parameters(), a.stage.version.epoch
    donors = [x.peer for x in plan.stage(stage) if x.current]
    shapes = parameter_shapes(a.manifest.model, a.manifest.pipeline.stages, stage)
    settings, attempts = a.work.engines.store.settings, 0
    while True:
        try:
            got = await fetch(
                transport, donors, stage, StateKind.PARAMETERS, None, shapes, settings=settings
            )
            return got.tensors, got.version.epoch
        except NoDonor as e:
            attempts += 1
            if attempts == ATTEMPTS:
                raise NetworkFault(
                    f"stage {stage} could not be gathered: {e}", "see tutti peers"
                ) from e
        await asyncio.sleep(0.2 * attempts)
