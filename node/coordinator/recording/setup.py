"""Facts of a run in a recording: everything that a fresh machine needs beside its events. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from node.consensus.rules import Rules
from node.coordinator.recording.values import ValueGroup
from node.core.errors import Refused
from node.core.ids import NO_CELL, CellId, PeerId
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
class RunNumbers(ValueGroup):
    """The amounts of a run, as in :class:`~node.epoch.facts.RunFacts`."""

    stages: int
    epochs: int
    min_replicas: int
    waits: Waits
    sizes: WorkSizes
    run_id: str
    spare: int
    prove: bool


@dataclass(frozen=True)
class RecordingSetup:
    """The first record of a recording. ``version``: the tutti that wrote it; ``peer``: the peer
    that recorded itself. ``scheduler`` and ``parts`` (by stage) are what paths and owners are made
    from."""

    version: str
    peer: PeerId
    run: RunNumbers
    batch: GlobalBatch
    evaluation: EvaluationFacts
    scheduler: SchedulerSettings
    parts: dict[int, tuple[ParameterPart, ...]]

    def __post_init__(self) -> None:
        """Raises ValueError for a run that no manifest may have: a fresh machine makes lists of its
        stages and micro-batches."""
        most = self.batch.micro_batch * MOST_PATHS
        if not (1 <= self.run.stages <= MOST_STAGES and 1 <= self.batch.target_batch <= most):
            raise ValueError("more stages or micro-batches than a run may have")

    @classmethod
    def of(
        cls,
        version: str,
        peer: PeerId,
        facts: RunFacts,
        scheduler: SchedulerSettings,
        parts: Mapping[int, tuple[ParameterPart, ...]],
    ) -> "RecordingSetup":
        """The setup of a peer that plans with these facts."""
        run = RunNumbers(**{one.name: getattr(facts, one.name) for one in fields(RunNumbers)})
        return cls(version, peer, run, facts.batch, facts.evaluation, scheduler, dict(parts))

    def facts(self, rules: Mapping[str, Rules]) -> RunFacts:
        """The facts of a fresh leader. ``rules``: settings by the owner's change, "" for the
        manifest's own."""

        def read(change: str) -> Rules:
            if change not in rules:
                raise Refused("not a change that was read when this was recorded", "")
            return rules[change]

        make = PlanFunctions(
            assign=lambda stage, cell, previous, room: assign(
                self.parts[stage], cell, previous, room
            ),
            router=lambda: Router(self.scheduler, self.run.stages),
            read=read,
        )
        # The scheduler says how many stages a plan may leave out.
        numbers = {name: value for name, value in vars(self.run).items() if name != "spare"}
        return RunFacts(
            make=make,
            batch=self.batch,
            evaluation=self.evaluation,
            scheduler=self.scheduler,
            **numbers,
        )


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
    ``history``, ``dropped`` and ``dead`` are its past plan; ``conduct`` has the newest record
    last."""

    me: PeerId
    term: int
    history: Plan | None
    dropped: tuple[int, ...]
    dead: tuple[PeerId, ...]
    rules: Rules | None
    known: frozenset[PeerId]
    cell: CellId
    conduct: tuple[tuple[PeerId, Record], ...]

    @classmethod
    def of(
        cls,
        me: PeerId,
        *,
        term: int = 0,
        history: PastPlan | None = None,
        rules: Rules | None = None,
        known: frozenset[PeerId] = frozenset(),
        cell: CellId = NO_CELL,
        conduct: Mapping[PeerId, Record] | None = None,
    ) -> "LeaderStart":
        """The start of a leader with these arguments."""
        plan = None
        dropped: tuple[int, ...] = ()
        dead: tuple[PeerId, ...] = ()
        if history is not None:
            plan = history.plan
            dropped = history.dropped
            dead = history.dead
        records = tuple((conduct or {}).items())
        return cls(me, term, plan, dropped, dead, rules, known, cell, records)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a leader beside its peer and the facts of the run."""
        past = None
        if self.history is not None:
            past = PastPlan(self.history, self.dropped, self.dead)
        return {
            "term": self.term,
            "history": past,
            "rules": self.rules,
            "known": self.known,
            "cell": self.cell,
            "conduct": dict(self.conduct),
        }
