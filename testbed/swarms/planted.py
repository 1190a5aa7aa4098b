"""Bugs planted in the machines by subclasses and in the services of peers before they start, and
the search for a schedule that shows them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from node.averaging.exchange.events import Action
from node.averaging.exchange.machine import EpochCounts, RoundMachine
from node.averaging.reducers.reducer import Gathered, Reduced
from node.core.ids import PeerId
from node.core.journey import Version
from node.epoch.facts import RunFacts
from node.epoch.leader.leader import Leader
from node.epoch.leader.roster import Roster
from node.epoch.member import Member
from node.epoch.peers.versions import Versions
from node.pipeline.events import Counted
from node.pipeline.machine import PipelineMachine
from node.sim.faults import Fault, Schedule, lay
from node.sim.process import SimPeer
from node.sim.run import ScheduleOutcome, run
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from node.sim.swarm import MachineFactory

MOST = 60
SHORT = Setup(epochs=8, checkpoint_every=2)
"""Setup long enough for a fault, its end and its consequences."""
CROWDED = Setup(
    epochs=5,
    micro_batches=6,
    checkpoint_every=2,
    work=WorkTimes(forward_s=0.2),
    links=LinkProfile(jitter_s=0.2),
)
"""Setup with many tensors on their way at any time."""


class NoLatch(RoundMachine):
    """An attempt that has failed goes on."""

    def _latch(self, epoch: EpochCounts, text: str) -> list[Action]:
        done = super()._latch(epoch, text)
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
    """Claims are forgotten when the next attempt opens."""

    def _opened(self, opened: Any, now: float) -> list[Action]:
        if (epoch := self._epochs.get(opened.round.epoch)) is not None:
            epoch.claimed = set()
            epoch.fresh = set()
        return super()._opened(replace(opened, held=frozenset()), now)


class CountsUnnamed(PipelineMachine):
    """A share counts as soon as it arrives, named or not."""

    def _count(self, key: Any, visit: Any) -> Any:
        visit.named = True
        return super()._count(key, visit)


class DigestsDoNotMatter(Versions):
    def can_start(self, peer: PeerId, version: Version) -> bool:
        c = self._peers.candidates[peer]
        return c.at == version or version in c.reachable


class EpochsAreVersions(Versions):
    def can_start(self, peer: PeerId, version: Version) -> bool:
        c = self._peers.candidates[peer]
        return version.epoch in {v.epoch for v in (c.at, *c.reachable)}


class AnyParameters(Member):
    """All parameters of one version count as the same."""

    def _planned(self, plan: Any, digest: str) -> list[Any]:
        return super()._planned(plan, "")


class AnyHistory(Member):
    """All parameters of one epoch count as the same."""

    def _planned(self, plan: Any, digest: str) -> list[Any]:
        if self.at.epoch == plan.epoch:
            self.at = plan.base
        elif self.before is not None and self.before.epoch == plan.epoch:
            self.before = plan.base
        return super()._planned(plan, digest)


def leads_with(versions: type[Versions]) -> Callable[..., Leader]:
    """Factory of leaders that judge versions like this, without proofs of connections."""

    def leader(me: PeerId, facts: RunFacts, **history: Any) -> Leader:
        made = Leader(me, facts, **history)
        roster = Roster(facts.stages, late_s=facts.waits.late_s)
        roster.versions = versions(roster.peers, roster.participants, lambda version: {})
        made.roster = roster
        return made

    return leader


def _pipeline(peer: SimPeer) -> Any:
    """The pipeline of a peer that has begun. Raises RuntimeError for another one."""
    if peer.assembled is None:
        raise RuntimeError(f"{peer.name} has no stage yet")
    return peer.assembled.pipeline


def _keeps_gradients(peer: SimPeer) -> None:
    """Gradients summed under another plan are not forgotten."""
    _pipeline(peer).shares._gradients.reset = lambda: None


def _leaves_one_out(peer: SimPeer) -> None:
    """The owner forgets the last contributor of three, and divides by all their tokens."""
    reducer = peer.work.engines.cell._reducer
    true = reducer.reduce

    def reduce(gathered: Gathered) -> Reduced:
        found = true(gathered)
        if len(gathered.claims) < 3:
            return found
        kept = dict(list(gathered.claims.items())[:-1])
        given = {p: gathered.gradients[p] for p in kept}
        norms = {p: n for p, n in gathered.norms.items() if p in kept}
        fewer = true(replace(gathered, claims=kept, gradients=given, norms=norms))
        return replace(found, numbers=fewer.numbers)

    setattr(reducer, "reduce", reduce)  # noqa: B010 - a bug is planted


def _does_not_roll_back(peer: SimPeer) -> None:
    """The version is undone, and its parameters stay."""
    stage = peer.work.stage

    def roll_back() -> None:
        if stage._before is not None:
            stage._here = stage._before._replace(parameters=stage._here.parameters)
        stage.settle()

    setattr(stage, "roll_back", roll_back)  # noqa: B010 - a bug is planted


def _saves_too_late(peer: SimPeer) -> None:
    """A checkpoint gets the parameters that are in place when it is written to the disk."""
    store = peer.work.engines.store
    stage = peer.work.stage
    true = store.save
    last = dict[int, Any]()

    def save(number: int, epoch: int, parameters: Any, *about: Any, **how: Any) -> Any:
        before = last.get(number, parameters)
        last[number] = dict(stage.parameters())
        return true(number, epoch, before, *about, **how)

    setattr(store, "save", save)  # noqa: B010 - a bug is planted


def _counts_for_all(peer: SimPeer) -> None:
    """An origin's message that one micro-batch counts is taken for a message about all of them."""
    driver = _pipeline(peer).hops.driver
    true = driver.handle

    def handle(event: Any) -> Any:
        if isinstance(event, Counted):
            for index in range(peer.swarm.setup.micro_batches):
                true(replace(event, index=index))
        return true(event)

    driver.handle = handle  # a bug is planted


def _reads_other_data(peer: SimPeer) -> None:
    """A micro-batch gets the samples after those that the plan names."""
    text: Any = peer.work.engines.text
    if text is not None:
        true = text.at
        object.__setattr__(text, "at", lambda samples: true([s + 1 for s in samples]))


def _parted_again_and_again(seed: int) -> Schedule:
    """Five partitions through the middle, each long enough that both sides may go on."""
    dice = random.Random(seed)
    return Schedule(
        seed,
        tuple(
            Fault(
                4.0 + 14.0 * i, "partition", dice.randrange(1 << 16), -1, dice.uniform(3, 12), 0.5
            )
            for i in range(5)
        ),
    )


@dataclass(frozen=True)
class Bug:
    """A planted bug, and the schedules that show it.

    `scenarios`: names of the scenarios, or a function from a seed to a schedule, that break one of
    the invariants `ids`. `first`: seed at which the search begins, near one that showed the bug
    lately.
    """

    name: str
    make: MachineFactory
    scenarios: tuple[str, ...] | Callable[[int], Schedule]
    ids: frozenset[str]
    setup: Setup = SHORT
    first: int = 0

    def schedule(self, seed: int) -> Schedule:
        if callable(self.scenarios):
            return self.scenarios(seed)
        return lay(self.scenarios, self.setup, seed)


BUGS = (
    Bug("no latch", MachineFactory(round=NoLatch), ("broken-step",), frozenset({"I8"}), first=78),
    Bug(
        "no plan hash",
        MachineFactory(pipeline=AnyPlanPipeline, round=AnyPlanRound),
        ("leader-kill",),
        frozenset({"I3", "I5"}),
        CROWDED,
        first=72,
    ),
    Bug(
        "applied twice",
        MachineFactory(round=StepsAgain),
        ("each-stage", "one-way"),
        frozenset({"I5", "I8"}),
    ),
    Bug(
        "counted twice",
        MachineFactory(pipeline=CountsUnnamed),
        ("one-way",),
        frozenset({"I3"}),
        first=60,
    ),
    Bug(
        "no digests",
        MachineFactory(leader=leads_with(DigestsDoNotMatter), member=AnyParameters),
        ("corrupt",),
        frozenset({"I1"}),
    ),
    Bug(
        "mixed histories",
        MachineFactory(leader=leads_with(EpochsAreVersions), member=AnyHistory),
        _parted_again_and_again,
        # A leader that takes any version of an epoch for every other one plans from parameters that
        # it does not have. Then an epoch that no fault has touched is given up (I10), or an older
        # plan commits one again (I11).
        frozenset({"I1", "I5", "I8", "I10", "I11"}),
        Setup(epochs=60, stages=1, replicas=4, parts=toy_parts(1, 3), checkpoint_every=2),
        first=210,
    ),
)


IN_SERVICES = (
    Bug(
        "gradients kept",
        MachineFactory(services=_keeps_gradients),
        ("leader-kill",),
        frozenset({"I3"}),
    ),
    Bug("one left out", MachineFactory(services=_leaves_one_out), ("quiet",), frozenset({"I5"})),
    Bug(
        "not rolled back",
        MachineFactory(services=_does_not_roll_back),
        ("corrupt",),
        frozenset({"I1", "I5"}),
    ),
    Bug(
        "saved too late",
        MachineFactory(services=_saves_too_late),
        ("restart",),
        frozenset({"I6"}),
        first=4,
    ),
    Bug(
        "reads other data",
        MachineFactory(services=_reads_other_data),
        ("quiet",),
        frozenset({"I3"}),
    ),
    Bug(
        "counts for all",
        MachineFactory(services=_counts_for_all),
        ("slow-peer", "one-way"),
        frozenset({"I3", "I5"}),
        CROWDED,
        first=80,
    ),
)
ALL_BUGS = BUGS + IN_SERVICES


def hunt(bug: Bug, most: int = MOST) -> tuple[ScheduleOutcome | None, int]:
    """The first schedule that breaks an invariant, and how many were tried."""
    for tried in range(most):
        outcome = run(bug.setup, bug.schedule(bug.first + tried), bug.make)
        if outcome.violation is not None:
            return outcome, tried + 1
    return None, most
