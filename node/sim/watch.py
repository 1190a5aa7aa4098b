"""Where the simulated swarm tells the checkers what happens, and what is counted for the
outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.sim.disk import Checkpoint
from node.sim.invariants import (
    AppliedOnce,
    CountsOnce,
    EqualDigests,
    NoSampleLost,
    OneFault,
    OneOwner,
    OnlyGrow,
    PurePlan,
    WeightedMean,
    WholeCheckpoint,
)
from node.sim.values import Moment, Share, Value
from node.training.leader.leader import Leader
from node.training.protocol import events as ev

if TYPE_CHECKING:
    from node.sim.peer import SimPeer
    from node.sim.rounds import Request
    from node.sim.swarm import Swarm


class Watch:
    """All checkers, and what is counted for the outcome."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.recent: deque[str] = deque(maxlen=24)
        self.digests, self.owners, self.once = (
            EqualDigests(swarm),
            OneOwner(swarm),
            CountsOnce(swarm),
        )
        self.samples, self.mean, self.whole = (
            NoSampleLost(swarm),
            WeightedMean(swarm),
            WholeCheckpoint(swarm),
        )
        self.grow, self.applied, self.pure, self.one_fault = (
            OnlyGrow(swarm),
            AppliedOnce(swarm),
            PurePlan(swarm),
            OneFault(swarm),
        )
        self.counts: dict[str, int] = {}
        self.commits: list[tuple[float, int, int, PeerId]] = []
        """(time, epoch made, tokens, leader)"""
        self.detected: dict[PeerId, float] = {}
        self.given_up_epochs = self.given_up_tokens = self.samples_back = self.samples_counted = 0

    def note(self, text: str) -> None:
        """One line for the record of what happened last."""
        self.recent.append(f"{self.swarm.world.now:8.3f} {text}")

    def count(self, kind: str, by: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + by

    # ----------------------------------------------------------- the leader's side

    def objected(self, peer: SimPeer, plan: Plan, why: str) -> None:
        if self.swarm.honest(plan.leader):
            self.pure.objected(peer, plan, why)

    def leads(self, peer: SimPeer) -> None:
        self.count("leaders")
        self.note(f"{peer.name} leads")

    def before_leader(self, peer: SimPeer, leader: Leader, event: Any) -> Any:
        return leader.term, leader.base, self.pure.before(leader, event)

    def after_leader(
        self, peer: SimPeer, leader: Leader, event: Any, actions: Sequence[Any], before: Any
    ) -> None:
        if not actions:
            return
        term, base, twin = before
        self.pure.after(twin, event, actions)
        if not self.swarm.honest(peer.name):
            return
        for a in actions:
            if isinstance(a, ev.Report) and a.kind == "history-lost":
                self.samples.guessed.update(leader.memory.forgotten)
        for a in actions:
            match a:
                case ev.SendPlan(plan):
                    heard = (
                        event.term
                        if isinstance(event, ev.Heard) and self.swarm.honest(event.peer)
                        else 0
                    )
                    self.grow.plan(peer, plan, (max(term, heard), base), actions)
                    self.digests.plan(plan)
                    self.owners.plan(plan)
                    self.once.plan(plan)
                    self.samples.plan(plan)
                    if plan.outer:
                        self.samples.close(plan, (), 0)
                    if not plan.last:
                        self.one_fault.ended(
                            peer, False, "another plan"
                        ) if base == plan.base else None
                        self.one_fault.planned(peer, plan)
                    self.note(
                        f"{peer.name} plans epoch {plan.epoch} term {plan.term} {plan.hash[:6]}"
                    )
                case ev.SendRound():
                    self.owners.round(a)
                    if a.attempt == 0:
                        self.samples.close(a.plan, a.dropped, a.tokens)
                case ev.Report():
                    if a.kind == "epoch-committed":
                        self.one_fault.ended(peer, True, "")
                        epoch, tokens = int(str(a.facts["epoch"])), int(str(a.facts["tokens"]))
                        self.commits.append((self.swarm.world.now, epoch, tokens, peer.name))
                        each = self.swarm.setup.micro_batch
                        self.samples_counted += each * int(str(a.facts.get("counted", 0)))
                        self.samples_back += each * int(str(a.facts.get("dropped", 0)))
                    elif a.kind == "epoch-abandoned":
                        self.one_fault.ended(peer, False, a.text)

    def report(self, peer: SimPeer, report: ev.Report) -> None:
        self.count(report.kind)
        if report.kind != "epoch-planned":
            self.note(f"{peer.name}: {report.kind}: {report.text}")
        if report.kind == "peer-lost":
            self.detected.setdefault(PeerId(str(report.facts["peer"])), self.swarm.world.now)

    # ----------------------------------------------------------- the member's side

    def member(
        self, peer: SimPeer, event: Any, actions: Sequence[Any], at: Version, term: int
    ) -> None:
        self.grow.member(peer, event, actions, at, term)

    def began(self, peer: SimPeer, plan: Plan, listener: bool) -> None:
        if not listener and self.swarm.honest(peer.name):
            self.digests.began(peer, plan)

    def micro_batch(self, peer: SimPeer, plan: Plan, index: int, again: bool) -> None:
        self.once.counted(peer, plan, index, again)

    def taken(self, peer: SimPeer, plan: Plan | None, plan_hash: str) -> None:
        self.once.taken(peer, plan, plan_hash)

    def step(
        self, peer: SimPeer, request: Request, action: Any, shares: Sequence[Share], failed: bool
    ) -> None:
        if failed:
            raise self.applied.broken(
                f"{peer.name} steps in attempt {request.round.attempt}, which it had called off"
            )
        self.once.step(peer, request, [s for s in shares if self.swarm.honest(s.peer)])
        self.mean.step(peer, request, action.contributors, action.tokens, shares)

    def stepping(
        self, peer: SimPeer, plan: Plan, part: str, old: Value, moment: Moment | None, again: bool
    ) -> None:
        if self.swarm.honest(peer.name):
            self.applied.stepping(peer, plan, part, old, moment, again)

    def owing(self, peer: SimPeer, plan: Plan, part: str, debt: Moment) -> None:
        if self.swarm.honest(peer.name):
            self.applied.owing(peer, plan, part, debt)

    def settling(self, peer: SimPeer, plan: Plan, moments: Mapping[str, Moment]) -> None:
        if self.swarm.honest(peer.name):
            self.applied.settling(peer, plan, moments)

    def adopting(self, peer: SimPeer, names: Sequence[str], fresh: Mapping[str, Value]) -> None:
        if set(fresh) != set(names):
            raise self.owners.broken(f"{peer.name} adopts {len(fresh)} of {len(names)} parts")

    def adopted(self, peer: SimPeer, plan: Plan) -> None:
        """Parts are in place under the plan's next version."""

    def restored(self, peer: SimPeer, found: Checkpoint) -> None:
        self.count("restored")
        self.whole.restored(peer, found)

    def gave_up(self, peer: SimPeer, epochs: int, tokens: int) -> None:
        self.count("gave-up")
        self.given_up_epochs = max(self.given_up_epochs, epochs)
        self.given_up_tokens = max(self.given_up_tokens, tokens)

    def banned(self, peer: SimPeer, other: PeerId) -> None:
        self.count("bans")
        if self.swarm.honest(other):
            self.count("bans-of-honest")
        self.note(f"{peer.name} bans {other}")
