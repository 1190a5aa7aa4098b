"""Facts of a run in a recording: everything that a fresh machine needs beside its events. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from node.consensus.rules import Rules
from node.core.errors import Refused
from node.core.ids import CellId, PeerId
from node.core.journey import MOST_PATHS, Plan, Version
from node.epoch.facts import (
    EvaluationFacts,
    GlobalBatch,
    PlanFunctions,
    RunFacts,
    Waits,
    WorkSizes,
)
from node.epoch.leader.conduct import Record
from node.epoch.plan_context import PastPlan
from node.optim.ownership import assign
from node.optim.parts import ParameterPart
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings

MOST_STAGES = 4096
"""Block stages of a run, as in its manifest."""
FORMAT = 2
"""Number of the format. A reader refuses any other."""


@dataclass(frozen=True)
class Setup:
    """The first record of a recording. ``version``: the tutti that wrote it; ``peer``: the peer
    that recorded itself. ``scheduler`` and ``parts`` (by stage) are what paths and owners are made
    from; the other fields are as in :class:`~node.epoch.facts.RunFacts`."""

    version: str
    peer: PeerId
    stages: int
    epochs: int
    batch: GlobalBatch
    min_replicas: int
    evaluation: EvaluationFacts
    waits: Waits
    sizes: WorkSizes
    run_id: str
    spare: int
    prove: bool
    scheduler: SchedulerSettings
    parts: dict[int, tuple[ParameterPart, ...]]

    def __post_init__(self) -> None:
        """Raises ValueError for a run that no manifest may have: a fresh machine makes lists of its
        stages and micro-batches."""
        most = self.batch.micro_batch * MOST_PATHS
        if not (1 <= self.stages <= MOST_STAGES and 1 <= self.batch.target_batch <= most):
            raise ValueError("more stages or micro-batches than a run may have")

    @classmethod
    def of(
        cls,
        version: str,
        peer: PeerId,
        facts: RunFacts,
        scheduler: SchedulerSettings,
        parts: Mapping[int, tuple[ParameterPart, ...]],
    ) -> "Setup":
        """The setup of a peer that plans with these facts."""
        own = {f.name for f in fields(cls)}
        numbers = {f.name: getattr(facts, f.name) for f in fields(facts) if f.name in own}
        return cls(version, peer, scheduler=scheduler, parts=dict(parts), **numbers)

    def facts(self, rules: Mapping[str, Rules]) -> RunFacts:
        """The facts of a fresh leader. ``rules``: settings by the owner's change, "" for the
        manifest's own."""
        names = {f.name for f in fields(RunFacts)}
        numbers: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name in names
        }

        def read(change: str) -> Rules:
            if change not in rules:
                raise Refused("not a change that was read when this was recorded", "")
            return rules[change]

        make = PlanFunctions(
            assign=lambda stage, cell, previous, room: assign(
                self.parts[stage], cell, previous, room
            ),
            router=lambda: Router(self.scheduler, self.stages),
            read=read,
        )
        return RunFacts(make=make, **numbers)


@dataclass(frozen=True)
class MemberStart:
    """A member machine begins: the arguments of :class:`~node.epoch.member.Member`."""

    me: PeerId
    at: Version
    checkpoints: tuple[Version, ...]
    tokens: int


@dataclass(frozen=True)
class LeaderStart:
    """A leader machine begins: the arguments of :class:`~node.epoch.leader.leader.Leader`.
    ``history`` and ``dropped`` are its past plan; ``conduct`` has the newest record last."""

    me: PeerId
    term: int
    history: Plan | None
    dropped: tuple[int, ...]
    rules: Rules | None
    known: frozenset[PeerId]
    cell: CellId
    conduct: tuple[tuple[PeerId, Record], ...]

    @property
    def past(self) -> PastPlan | None:
        """The plan that the leader goes on from, if any."""
        if self.history is None:
            return None
        return PastPlan(self.history, self.dropped)
