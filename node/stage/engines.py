"""The engines that a member works with. No engine knows another; the code that conducts them holds
all of them. Also the pipeline's telemetry: seconds to the metrics, facts to the journal, silent
peers to the leader."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from node.averaging.exchange.service import CellRound
from node.checkpoint.fetch import FetchTimeouts, fetch
from node.checkpoint.state import StateKind, StateSnapshot
from node.checkpoint.store import CheckpointStore
from node.core.clock import Clock, SystemClock
from node.core.ids import PeerId
from node.core.journey import Version
from node.optim.owner import Owner
from node.pipeline.events import Trouble
from node.pipeline.service import Pipeline
from node.pipeline.timing import RunningAverage
from node.scheduler.costs import STEADY, SecondsPerUnit
from node.stage.text import Samples
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.port import TransportPort

TERA = 1e12
PATIENCE = FetchTimeouts(describe_s=20.0, stall_s=5.0, request_s=120.0, tries=2)
"""Timeouts of fetches from replicas while an epoch or a window goes on: shorter than a newcomer's
for a whole stage."""


class StepMeter:
    """Seconds of 10^12 operations in the optimizer's steps here."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps = RunningAverage()
        self._stepping = (-1, 0.0, 0.0)
        """The epoch under way, with the operations and seconds of its optimizer steps so far."""
        self.product_s = 0.0
        """Seconds of 10^12 operations in a plain product, as measured at the start."""

    @property
    def tera_s(self) -> float:
        """Seconds of 10^12 operations: in the steps of the optimizer here, before the first one in
        a plain product; 0 for unknown."""
        return self._steps.steady(STEADY) or self.product_s

    def stepped(self, epoch: int, operations: float, seconds: float) -> None:
        """Some of an epoch's optimizer steps took ``seconds``. Only the whole epoch counts: a few
        vectors take next to no operations and long for each of them."""
        at, done, took = self._stepping
        if epoch != at:
            if done > 0:
                self._steps.add(took / done * TERA, self._clock.now())
            done = took = 0.0
        self._stepping = (epoch, done + operations, took + seconds)


class PipelineMeter:
    """The pipeline's telemetry port. ``accuse(peer)`` is told of peers that did not answer."""

    def __init__(self, journal: Journal, metrics: Metrics, clock: Clock | None = None) -> None:
        self._journal = journal
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self.accuse: Callable[[PeerId], None] = lambda peer: None
        self.timer: Callable[[], float] = time.perf_counter
        """Seconds of the clock by which work on the device is timed."""
        self.compute_s = 0.0
        self.micro_batches = 0
        self.last_work = self._clock.now()
        self._rate = SecondsPerUnit()
        self._tokens = SecondsPerUnit()
        self.steps = StepMeter(self._clock)

    @property
    def speed(self) -> float:
        """Micro-batches per second of device time, forward and backward; 0 before the first
        epoch."""
        return self._rate.per_second

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of device time."""
        return self._tokens.per_second

    def epoch_done(
        self, micro_batches: int, tokens: int, computed: float, compute_s: float
    ) -> None:
        """Count this peer's work in one epoch: ``micro_batches`` with ``tokens`` count. Its device
        computed for ``compute_s`` seconds, enough for ``computed`` micro-batches. A speed is the
        device's, also where other peers failed and work of this one does not count."""
        self.micro_batches += micro_batches
        if micro_batches > 0 and computed > 0 and compute_s > 0:
            self._rate.observe(computed, compute_s)
            self._tokens.observe(tokens * computed / micro_batches, compute_s)

    def worked(self) -> None:
        """Note the time: useful work was done just now."""
        self.last_work = self._clock.now()

    def spent(self, kind: str, seconds: float) -> None:
        """Count seconds of ``kind``: compute, wire or wait."""
        if kind == "compute":
            self.compute_s += seconds
            self.worked()
        self._metrics.time_spent(kind, max(0.0, seconds))

    def emit(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        """Emit one fact; a hop that died is also an accusation."""
        self._journal.emit("pipeline", kind, text, level, **fields)
        if kind == "hop-turned" and fields.get("trouble") == Trouble.FAILED.value:
            self.accuse(PeerId(str(fields["peer"])))


@dataclass(frozen=True)
class Engines:
    """Everything a member works with; ``text`` only at the ends. ``heavy`` runs work that must not
    hold up the event loop."""

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
        """Call ``fn`` on the ``heavy`` thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self.heavy, fn, *args)

    async def fetch(
        self,
        donors: Sequence[PeerId],
        stage: int,
        kind: StateKind,
        version: Version | None,
        shapes: Mapping[str, Sequence[int]],
        gate: asyncio.Event | None = None,
    ) -> StateSnapshot:
        """Fetch state from other peers, with short timeouts because work goes on meanwhile. See
        :func:`node.checkpoint.fetch.fetch`; raises NoDonor."""
        return await fetch(
            self.transport,
            donors,
            stage,
            kind,
            version,
            shapes,
            settings=self.store.settings,
            patience=PATIENCE,
            gate=gate,
        )
