"""What a run fixes for its leader: numbers of the manifest, and the pure functions that plans are
made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId
from node.core.journey import Path, Version
from node.scheduler.router import Router
from node.training.protocol.bounds import Bounds
from node.training.protocol.meetings import Meetings
from node.training.protocol.plan_context import Cursor, PlanContext
from node.training.protocol.rules import Read, Rules


@dataclass(frozen=True)
class RunFacts:
    """What the manifest fixes, and the pure functions the plan is made of.

    ``assign(stage, ((peer, speed), …), previous owners, room of each peer) -> owners`` places the
    parts of one stage; nobody's room is given where none is known. Raises OutOfResources when the
    state does not fit; ``assign_paths(origins, stages, samples) -> paths`` routes the micro-batches
    where ``router()`` makes no router; ``operations``: floating-point operations of a micro-batch,
    forward and backward, at each stage; ``steps``: of a step of the optimizer, by stage and part;
    empty where nothing is to be reckoned. ``epoch_timeout_s`` and ``round_timeout_s`` are floors.
    ``sizes``: bytes of the parameters of each stage, ``tensor``: of a micro-batch on its way;
    ``probe_every_s``: between two small messages that only measure a way, 0 for none;
    ``sampler(cursor)`` gives a sampler at that position; ``cursor(sampler)`` reads it back;
    ``recall(version)`` is what a checkpoint says goes with it, None without one. ``sequence``:
    tokens of a sample, which bounds what may be reported of one; 0 for no bound. ``settle_s``: a
    young swarm waits so long for company; ``late_s``: silence that means death; ``lacks_s``: a
    young swarm waits so long for peers of a stage before it asks another for one; ``patience_s``:
    wait for a lost version before an older one is taken. ``rebalance_every_s``: between two changes
    of stage, 0 for none; ``download_s``: what a change costs. ``spare``: block stages that a plan
    may leave out when nobody holds them. ``cell``: most peers of a cell, 0 for all of a stage;
    ``meetings``: how cells average with each other, None when there is one only. ``read(change)``:
    what the owner's change says instead, and ``meet(settings)`` the meetings by it. ``prove``: only
    peers that say they reach each other share a path or a cell.
    """

    stages: int
    epochs: int
    target_batch: int
    micro_batch: int
    min_replicas: int
    epoch_timeout_s: float
    round_timeout_s: float
    eval_every: int
    assign: Callable[..., dict[str, PeerId]]
    assign_paths: Callable[..., tuple[Path, ...]]
    sampler: Callable[[Cursor], Any]
    cursor: Callable[[Any], Cursor]
    recall: Callable[[Version], PlanContext | None] = lambda version: None
    router: Callable[[], Router | None] = lambda: None
    probe_every_s: float = 0.0
    sizes: tuple[int, ...] = ()
    operations: tuple[float, ...] = ()
    steps: tuple[Mapping[str, float], ...] = ()
    tensor: int = 0
    run_id: str = ""
    sequence: int = 0
    settle_s: float = 1.0
    late_s: float = 4.0
    lacks_s: float = 10.0
    patience_s: float = 10.0
    recall_s: float = 5.0
    rebalance_every_s: float = 0.0
    download_s: float = 15.0
    cell: int = 0
    meetings: Meetings | None = None
    spare: int = 0
    read: Read = lambda change: Rules()
    meet: Callable[[OuterSettings], Meetings | None] = lambda outer: None
    prove: bool = False

    @property
    def bounds(self) -> Bounds:
        """How far numbers go that others tell."""
        return Bounds(self.epochs, self.target_batch * self.sequence)
