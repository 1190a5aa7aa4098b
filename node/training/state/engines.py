"""Everything a member works with. Each engine is a stranger to the others; whoever conducts them
holds all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from node.averaging.exchange.service import CellRound
from node.checkpoint.store import CheckpointStore
from node.optim.owner import Owner
from node.pipeline.service import Pipeline
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.training.state.meter import PipelineMeter
from node.training.state.text import Samples
from node.transport.port import TransportPort


@dataclass(frozen=True)
class Engines:
    """Everything a member works with; ``text`` only at the ends. ``heavy`` runs what must not hold
    up the loop."""

    transport: TransportPort
    pipeline: Pipeline
    cell: CellRound
    owner: Owner
    store: CheckpointStore
    heavy: Executor
    journal: Journal
    metrics: Metrics
    meter: PipelineMeter
    text: Samples | None = None

    async def aside(self, fn: Callable[..., Any], *args: Any) -> Any:
        """What ``fn`` gives, called on the thread for what must not hold up the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.heavy, fn, *args)
