"""A leader in virtual time that plans the epochs of a lying cell, and inspects its tensors."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from node.core.ids import ENDS, PeerId
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.facts import (
    EvaluationFacts,
    GlobalBatch,
    PlanFunctions,
    RunFacts,
    Waits,
    WorkSizes,
)
from node.epoch.leader.leader import Leader
from node.pipeline.events import MicroBatchDone, VisitSketches
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings
from testbed.models.lying import Lie, LyingCell

FIRST = Version(0)


@dataclass
class Outcome:
    """Result of some epochs. ``losses``: nats per token of each; ``banned``: by peer the number of
    the epoch, from 1, after which it was found to lie; ``worked``: peers on the paths of the next
    plan; ``seconds``: processor time of computing the epochs; ``judging_s``: of inspecting them."""

    losses: list[float] = field(default_factory=list)
    banned: dict[PeerId, int] = field(default_factory=dict)
    worked: set[PeerId] = field(default_factory=set)
    seconds: float = 0.0
    judging_s: float = 0.0


class JudgedCell:
    """A cell of these peers under a real leader, the first ends peer. Nobody is late or dies."""

    def __init__(
        self,
        cell: LyingCell,
        peers: Sequence[tuple[PeerId, int]],
        micro_batches: int,
        micro_batch: int,
    ) -> None:
        self._cell = cell
        self._peers = tuple(peers)
        stages = max(stage for _, stage in peers)
        facts = RunFacts(
            stages,
            epochs=1 << 20,
            batch=GlobalBatch(micro_batches * micro_batch, micro_batch),
            min_replicas=1,
            evaluation=EvaluationFacts(0, False, 0, ""),
            waits=Waits(1e6, 1e6, late_s=1e6),
            make=PlanFunctions(
                lambda stage, replicas, previous, room: {f"s{stage}": min(p for p, _ in replicas)},
                lambda: Router(SchedulerSettings("round-robin"), stages),
            ),
            sizes=WorkSizes(sequence=cell.model.seq_len),
        )
        self._leader = Leader(next(p for p, s in peers if s == ENDS), facts)
        self._leader.conduct.inspect = self._timed  # pyright: ignore[reportAttributeAccessIssue]
        self._judging_s = 0.0
        self._now = 0.0
        self._at = FIRST
        self._tokens = 0
        self._plan: Plan | None = None

    def run(self, epochs: int, lie: Lie | None = None, *, until_banned: bool = False) -> Outcome:
        """Train some epochs, in which one peer may lie; with ``until_banned`` no more of them once
        somebody is banned."""
        self._cell.lie = lie
        outcome = Outcome()
        for number in range(1, epochs + 1):
            plan = self._next_plan()
            began = time.process_time()
            loss, rows = self._cell.epoch(plan)
            self._cell.step(plan.epoch)
            outcome.seconds += time.process_time() - began
            outcome.losses.append(loss)
            before = self._judging_s
            done = self._report(plan, rows)
            outcome.judging_s += self._judging_s - before
            self._plan = _sent(done)
            for peer in _banned(done):
                outcome.banned[peer] = number
            if until_banned and outcome.banned:
                break
        self._plan = self._next_plan()
        outcome.worked = {hop.peer for path in self._plan.paths for hop in path.hops}
        return outcome

    def _timed(self, *words: Any) -> list[Any]:
        """The leader's inspection of an epoch, its processor time counted."""
        conduct = self._leader.conduct
        began = time.process_time()
        done = type(conduct).inspect(conduct, *words)
        self._judging_s += time.process_time() - began
        return done

    def _report(self, plan: Plan, rows: Mapping[PeerId, Sequence[VisitSketches]]) -> list[Any]:
        """Let all members finish the epoch of a plan; returns the leader's actions."""
        for origin in {path.origin for path in plan.paths}:
            own = [path.index for path in plan.paths if path.origin == origin]
            results = tuple(MicroBatchDone(index, True, 1.0, 1) for index in own)
            self._tell(ev.MicroBatchesReported(origin, plan.hash, results))
        done: list[Any] = []
        for m in plan.members:
            self._tell(ev.Sketched(m.peer, plan.hash, tuple(rows.get(m.peer, ()))))
            done += self._tell(ev.Committed(m.peer, plan.hash, 0, f"{m.stage}"))
        return done

    def _next_plan(self) -> Plan:
        """The plan of the next epoch, which the leader may have made already."""
        plan = self._plan
        while plan is None:
            for peer, stage in self._peers:
                self._tell(ev.Heartbeat(peer, stage, FIRST, f"{stage}", ev.Capacity(1.0)))
            self._now += 2.0
            plan = _sent(self._tell(ev.ClockTick()))
        self._plan = None
        return plan

    def _tell(self, event: ev.LeaderEvent) -> list[Any]:
        self._now += 1e-3
        return self._leader.handle(event, self._now)


def _sent(actions: Iterable[Any]) -> Plan | None:
    return next((a.plan for a in actions if isinstance(a, ev.SendPlan)), None)


def _banned(actions: Iterable[Any]) -> list[PeerId]:
    return [
        PeerId(str(a.facts["peer"]))
        for a in actions
        if isinstance(a, ev.RecordFact) and a.kind == "false-tensors"
    ]
