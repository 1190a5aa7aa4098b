"""Bugs planted in the machines by subclasses, and the hunt for a schedule that shows them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from node.averaging.exchange.books import Epoch
from node.averaging.exchange.events import Action
from node.averaging.exchange.machine import RoundMachine
from node.core.ids import PeerId
from node.core.journey import Version
from node.pipeline.machine import PipelineMachine
from node.sim.run import Outcome, run
from node.sim.scenarios import lay
from node.sim.setup import Setup
from node.sim.swarm import Machines
from node.training.leader.leader import Leader
from node.training.leader.roster import Roster
from node.training.member import Member
from node.training.protocol.facts import RunFacts

MOST = 300


class NoLatch(RoundMachine):
    """An attempt that has failed goes on."""

    def _latch(self, number: int, epoch: Epoch, text: str) -> list[Action]:
        done = super()._latch(number, epoch, text)
        epoch.fault = ""
        return done


class AnyPlanRound(RoundMachine):
    """Contributions of another plan are as good."""

    def _objection(self, number: int, began: Any, opened: Any) -> Any:
        return super()._objection(number, replace(began, plan_hash=opened.plan_hash), opened)


class AnyPlanPipeline(PipelineMachine):
    """Frames of another plan are as good."""

    def _in_force(self, epoch: int, plan_hash: str) -> Any:
        return super()._in_force(epoch, self.plan.hash if self.plan else plan_hash)


class StepsAgain(RoundMachine):
    """What was claimed is forgotten when the next attempt opens."""

    def _opened(self, opened: Any, now: float) -> list[Action]:
        if (epoch := self._epochs.get(opened.round.epoch)) is not None:
            epoch.claimed, epoch.fresh = set(), set()
        return super()._opened(replace(opened, held=frozenset()), now)


class CountsUnnamed(PipelineMachine):
    """A share counts as soon as it is there, named or not."""

    def _count(self, key: Any, visit: Any) -> Any:
        visit.named = True
        return super()._count(key, visit)


class DigestsDoNotMatter(Roster):
    def stands(self, peer: PeerId, version: Version) -> frozenset[int]:
        c = self.candidates[peer]
        return frozenset({c.cell} if c.at == version or version in c.reachable else ())


class EpochsAreVersions(Roster):
    def stands(self, peer: PeerId, version: Version) -> frozenset[int]:
        c = self.candidates[peer]
        return frozenset(
            {c.cell} if version.epoch in {v.epoch for v in (c.at, *c.reachable)} else ()
        )


class AnyParameters(Member):
    """Parameters of the same version are the same parameters."""

    def _planned(self, plan: Any) -> list[Any]:
        self.digest = ""
        return super()._planned(plan)


class AnyHistory(Member):
    """Parameters of the same epoch are the same parameters."""

    def _planned(self, plan: Any) -> list[Any]:
        if self.at.epoch == plan.epoch:
            self.at = plan.base
        elif self.before is not None and self.before.epoch == plan.epoch:
            self.before = plan.base
        return super()._planned(plan)


class Planted(Machines):
    def __init__(
        self, round: Any = None, pipeline: Any = None, roster: Any = None, member: Any = None
    ) -> None:
        self._round, self._pipeline, self._roster, self._member = round, pipeline, roster, member

    def round(self) -> RoundMachine:
        return self._round() if self._round else super().round()

    def pipeline(self, me: PeerId, fewest: int) -> PipelineMachine:
        return (self._pipeline or PipelineMachine)(me, fewest)

    def leader(self, me: PeerId, facts: RunFacts, **history: Any) -> Leader:
        made = super().leader(me, facts, **history)
        if self._roster:
            made.roster = self._roster(facts.stages)
        return made

    def member(self, *args: Any) -> Member:
        return (self._member or Member)(*args)


@dataclass(frozen=True)
class Bug:
    """``scenarios`` in which it shows, as one of these invariants."""

    name: str
    make: Machines
    scenarios: tuple[str, ...]
    ids: frozenset[str]


BUGS = (
    Bug("no latch", Planted(round=NoLatch), ("broken-step",), frozenset({"I8"})),
    Bug(
        "no plan hash",
        Planted(pipeline=AnyPlanPipeline, round=AnyPlanRound),
        ("one-way", "leader-kill"),
        frozenset({"I3", "I5"}),
    ),
    Bug("applied twice", Planted(round=StepsAgain), ("kill", "pause"), frozenset({"I5", "I8"})),
    Bug("counted twice", Planted(pipeline=CountsUnnamed), ("one-way",), frozenset({"I3"})),
    Bug(
        "no digests",
        Planted(roster=DigestsDoNotMatter, member=AnyParameters),
        ("corrupt",),
        frozenset({"I1"}),
    ),
    Bug(
        "mixed histories",
        Planted(roster=EpochsAreVersions, member=AnyHistory),
        ("partition",),
        frozenset({"I1", "I5", "I8"}),
    ),
)


def hunt(bug: Bug, most: int = MOST) -> tuple[Outcome | None, int]:
    """The first schedule that breaks an invariant, and how many were tried."""
    setup = Setup()
    for seed in range(most):
        outcome = run(setup, lay(bug.scenarios, setup, seed), bug.make)
        if outcome.violation is not None:
            return outcome, seed + 1
    return None, most
