"""Connects the simulated swarm to the checkers, and counts events for the outcome. It looks at the
machines in a peer's services from outside: at each event that enters and the actions that leave."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from node.averaging.exchange import events as av
from node.averaging.exchange.machine import RoundMachine
from node.checkpoint.store import Checkpoint
from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.member import Member
from node.optim.owner import Owner
from node.pipeline import events as pv
from node.pipeline.machine import PipelineMachine
from node.sim import lies
from node.sim.invariants import (
    AppliedOnce,
    CountsOnce,
    EpochRun,
    EqualDigests,
    InvariantViolation,
    NoSampleLost,
    OneFault,
    OneLine,
    OneOwner,
    OnlyGrow,
    PurePlan,
    TakenBatches,
    WeightedMean,
    WholeCheckpoint,
)
from node.sim.process import SimPeer, Swarm
from node.telemetry.events import Event

M = TypeVar("M")
Decide = Callable[[], list[Any]]
"""Returns the actions of a machine for an event."""
OBJECTED = "invalid plan"
COUNTED = {
    "history-given-up": "gave-up",
    "restored": "restored",
    "moving": "moves",
    "cell-left": "cells-left",
    "push-refused": "pushes-refused",
    "window-alone": "windows-alone",
    "stood-still": "stood-still",
}
"""Names under which facts of peers' records are counted."""


class CommitSeen(NamedTuple):
    """An epoch that was committed, at a virtual time; ``cell``: the cell that made it, empty if
    there is only one."""

    at: float
    epoch: int
    tokens: int
    leader: PeerId
    cell: str


class HistoryRecorder:
    """All checkers, and the counts for the outcome."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.recent: deque[str] = deque(maxlen=24)
        self.digests = EqualDigests(swarm)
        self.owners = OneOwner(swarm)
        self.once = CountsOnce(swarm)
        self.samples = NoSampleLost(swarm)
        self.mean = WeightedMean(swarm)
        self.whole = WholeCheckpoint(swarm)
        self.grow = OnlyGrow(swarm)
        self.applied = AppliedOnce(swarm)
        self.pure = PurePlan(swarm)
        self.one_fault = OneFault(swarm)
        self.line = OneLine(swarm)
        self.counts: Counter[str] = Counter()
        self.commits: list[CommitSeen] = []
        self.ended: set[str] = set()
        """Cells with a leader that says that the run is complete."""
        self._met: set[tuple[str, int]] = set()
        self._outer: set[str] = set()
        """Beginnings of the hashes of plans that put the mean of a window in place."""
        self.died: dict[PeerId, float] = {}
        """Time of the last death of each peer that no leader has reported lost since."""
        self.detections: list[float] = []
        """Seconds from a death to the leader's report of it."""

    def note(self, text: str) -> None:
        """Keep one line in the record of the latest events."""
        self.recent.append(f"{self.swarm.world.now:8.3f} {text}")

    def violation(self, id: str, what: str) -> InvariantViolation:
        """A violation of invariant ``id`` at this time, for the caller to raise."""
        return InvariantViolation(id, self.swarm.world.now, what, self.swarm.seed, self.recent)

    def crashed(self, peer: SimPeer, name: str, error: BaseException) -> None:
        """A task of a peer raised an unexpected error, by which a daemon would end: halt the
        simulation. An error that is no Exception, such as a test's time limit, is passed on to the
        caller of the simulation."""
        if not isinstance(error, Exception):
            self.swarm.world.halt(error)
        elif not isinstance(error, InvariantViolation):
            text = f"{name} of {peer.name} ended with {type(error).__name__}: {error}"
            found = self.violation("crash", text)
            found.__cause__ = error
            self.swarm.world.halt(found)

    # ----------------------------------------------------------- the leader's side

    def leader(self, peer: SimPeer, machine: Leader) -> Leader:
        """Watch the machine of a peer that begins to lead."""
        self.counts["leaders"] += 1
        self.one_fault.leads(peer)
        self.note(f"{peer.name} leads")

        def look(event: Any, decide: Decide) -> list[Any]:
            was = (
                machine.planning.terms.newest,
                machine.roster.versions.base,
                self.pure.before(machine, event),
            )
            actions = decide()
            self._after_leader(peer, machine, event, actions, was)
            for a in actions:
                if isinstance(a, ev.RecordFact):
                    self.report(peer, a)
            return actions

        return _seen(machine, look)

    def _after_leader(
        self, peer: SimPeer, leader: Leader, event: Any, actions: Sequence[Any], before: Any
    ) -> None:
        if not actions:
            return
        term, base, twin = before
        self.pure.after(twin, event, actions)
        if not self.swarm.honest(peer.name):
            return
        if any(isinstance(a, ev.RecordFact) and a.kind == "history-lost" for a in actions):
            self.samples.guessed.update(leader.memory.forgotten)
        for a in actions:
            match a:
                case ev.SendPlan(plan):
                    self.line.planned(plan, leader.voting.after)
                    self._planned(peer, event, plan, term, base, actions)
                case ev.SendRound(_, plan, round):
                    self.owners.round(a)
                    self.samples.close(plan, round.dropped)
                case ev.RecordFact(kind="epoch-committed", facts=facts):
                    self._committed(peer, facts)
                case ev.RecordFact(kind="epoch-abandoned" | "epoch-uncertain"):
                    self.one_fault.ended(peer, False, a.text)
                case ev.RecordFact(kind="epoch-outgrown"):
                    self.one_fault.outgrown(peer)

    def _committed(self, peer: SimPeer, facts: Mapping[str, Any]) -> None:
        self.one_fault.ended(peer, True, "")
        epoch = facts["epoch"]
        cell = facts.get("cell", "")
        self.commits.append(
            CommitSeen(self.swarm.world.now, epoch, facts["tokens"], peer.name, cell)
        )
        if not facts.get("orphan"):
            made = Version(epoch, facts["lineage"])
            self.line.committed(peer, cell, facts["hash"], facts["term"], made)
        if facts["hash"] in self._outer:
            self.counts["means-in-place"] += 1
        each = self.swarm.setup.micro_batch
        self.counts["samples-counted"] += each * facts["counted"]
        self.counts["samples-returned"] += each * facts["dropped"]

    def _planned(
        self,
        peer: SimPeer,
        event: Any,
        plan: Plan,
        term: int,
        base: Version | None,
        actions: Sequence[Any],
    ) -> None:
        heard = 0
        if isinstance(event, ev.Heartbeat) and self.swarm.honest(event.peer):
            heard = event.term
        self.grow.plan(peer, plan, (max(term, heard), base), actions)
        self.owners.plan(plan)
        self.once.plan(plan)
        self.samples.plan(plan)
        if plan.outer:
            self.samples.close(plan, ())
        if (number := plan.window.number) and (plan.cell_id, number) not in self._met:
            self._met.add((plan.cell_id, number))
            self.counts["windows-met"] += 1
        if plan.outer and plan.cell_id:
            self._outer.add(plan.hash[:12])
        if not plan.last:
            if base == plan.base:
                self.one_fault.ended(peer, False, "another plan")
            self.one_fault.planned(peer, plan)
        self.note(f"{peer.name} plans epoch {plan.epoch} term {plan.term} {plan.hash[:6]}")

    def report(self, peer: SimPeer, report: ev.RecordFact) -> None:
        self.counts[report.kind] += 1
        if report.kind == "run-finished":
            self.ended.add(peer.training.cell)
        if report.kind != "epoch-planned":
            self.note(f"{peer.name}: {report.kind}: {report.text}")
        if report.kind == "peer-lost":
            died = self.died.pop(PeerId(str(report.facts["peer"])), None)
            if died is not None:
                self.detections.append(self.swarm.world.now - died)

    # ----------------------------------------------------------- the member's side

    def member(self, peer: SimPeer, machine: Member) -> Member:
        """Watch the member machine of a process that begins."""

        def look(event: Any, decide: Decide) -> list[Any]:
            at = machine.at
            term = machine.term
            actions = decide()
            self.grow.member(peer, event, actions, at, term)
            if peer.lie:
                actions = [lies.told(peer, a) for a in actions]
            return [a for a in actions if a is not None]

        return _seen(machine, look)

    def began(self, peer: SimPeer, plan: Plan, listener: bool) -> None:
        """A plan is in force at a peer."""
        if not listener and self.swarm.honest(peer.name):
            self.digests.began(peer, plan)
            self.whole.stood(peer, plan)

    def fault(self, peer: SimPeer, other: PeerId, reason: str) -> None:
        """A peer counts a fault of another one."""
        self.pure.must(
            not reason.startswith(OBJECTED) or not self.swarm.honest(other),
            f"{peer.name} objects to a plan of {other}: {reason}",
        )

    def banned(self, peer: SimPeer, other: PeerId) -> None:
        self.counts["bans"] += 1
        if self.swarm.honest(other):
            self.counts["bans-of-honest"] += 1
        self.note(f"{peer.name} bans {other}")

    def accept(self, event: Event) -> None:
        """A line of a peer's record."""
        if event.kind in COUNTED:
            self.counts[COUNTED[event.kind]] += 1
        if event.kind == "history-given-up":
            for what in ("epochs", "tokens"):  # of all that one peer has given up
                most = max(self.counts[f"{what}-given-up"], int(event.fields[what]))
                self.counts[f"{what}-given-up"] = most

    def close(self) -> None:
        """A peer's record ends."""

    def services(self, peer: SimPeer) -> None:
        """The services of a peer are made and not started."""
        lies.puts_on(peer)

    # ----------------------------------------------------------- the engines

    def pipeline(self, peer: SimPeer, machine: PipelineMachine) -> PipelineMachine:
        """The machine of a peer's pipeline; checks the tensors that it takes and the micro-batches
        that it counts."""
        counted: set[tuple[str, pv.Key]] = set()

        def look(event: Any, decide: Decide) -> list[Any]:
            actions = decide()
            plan = machine.plan
            if isinstance(event, pv.AdoptPlan):
                counted.clear()
            elif isinstance(event, pv.TensorReceived):
                if any(isinstance(a, pv.Answer) and a.say is pv.Say.TAKE for a in actions[:1]):
                    self.once.taken(peer, plan, event.claim.plan_hash)
            for a in actions:
                if isinstance(a, pv.Commit) and plan is not None:
                    self.once.counted(peer, plan, a.key.index, (plan.hash, a.key) in counted)
                    counted.add((plan.hash, a.key))
            return actions

        return _seen(machine, look)

    def gave(
        self, peer: SimPeer, samples: tuple[int, ...], sums: Mapping[str, Tensor], tokens: int
    ) -> int:
        """A peer takes its gradients to give them. Returns the tokens that it claims for them."""
        plan = peer.work.plan
        if plan is not None and sums:
            taken = TakenBatches(samples, next(iter(sums.values())), tokens)
            self.mean.gave(plan.hash, peer.name, taken)
            self.once.gave(peer, plan, taken)
        return lies.tokens(peer, tokens)

    def round(self, peer: SimPeer, machine: RoundMachine) -> RoundMachine:
        """The machine of a peer's exchange; checks the gradients that make a step."""
        running = EpochRun()

        def look(event: Any, decide: Decide) -> list[Any]:
            match event:
                case av.Opened():
                    running.opens(event)
                case av.Stepped(fault=fault) if fault:
                    running.failed_step(event)
                case av.Voided(epoch):
                    running.voids(epoch)
            actions = decide()
            for a in actions:
                match a:
                    case av.ReduceAndStep():
                        self.step(peer, running, a)
                    case av.Fail(epoch):
                        running.failed.add(epoch)
            return actions

        return _seen(machine, look)

    def step(self, peer: SimPeer, running: EpochRun, step: av.ReduceAndStep) -> None:
        """An owner's machine orders a step."""
        opened = running.opened.get(step.round)
        if opened is None or not self.swarm.honest(peer.name):
            return
        self.applied.must(
            step.round.epoch not in running.failed,
            f"{peer.name} steps in attempt {step.round.attempt}, which it had called off",
        )
        self.mean.step(peer, opened, step)
        self.applied.once(peer, running, opened, step)
        self.once.step(peer, opened, step, self.mean)

    def gives(self, peer: SimPeer, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fresh parameters that a peer gives as owner."""
        return lies.stepped(peer, fresh) if peer.lie else fresh

    def stepping(self, peer: SimPeer, owner: Owner, means: Mapping[str, Tensor]) -> None:
        """The optimizer of a peer steps parts by these means."""
        plan = peer.work.plan
        if plan is not None and self.swarm.honest(peer.name):
            self.applied.stepping(peer, plan, owner, means)
            self.mean.stepping(peer, plan, means)

    def settling(self, peer: SimPeer, owner: Owner, names: frozenset[str]) -> None:
        """Steps of a peer become final."""
        if self.swarm.honest(peer.name):
            self.applied.settling(peer, owner, names)

    def restored(self, peer: SimPeer, found: Checkpoint) -> None:
        """A checkpoint is read back."""
        if self.swarm.honest(peer.name):
            self.whole.restored(peer, found)


def _seen(machine: M, look: Callable[[Any, Decide], list[Any]]) -> M:
    """The machine, with each of its decisions seen by ``look``; the actions that ``look`` returns
    are done."""
    handle: Callable[[Any, float], list[Any]] = machine.handle  # type: ignore[attr-defined]

    def seen(event: Any, now: float) -> list[Any]:
        return look(event, partial(handle, event, now))

    setattr(machine, "handle", seen)  # noqa: B010 - whatever machine it is
    return machine
