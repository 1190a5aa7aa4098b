"""The owner changes how cells average while a swarm trains: real machines in virtual time, with
deaths, joiners and old news."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import Rules, mark
from node.consensus.votes import signing_domain
from node.coordinator import notes
from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.facts import RunFacts
from node.sim.faults import lay, strike
from node.sim.process import SimPeer
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from node.sim.swarm import SimSwarm

GOSSIP = Setup(
    cell=4,
    outer=OuterSettings("gossip", window_s=10.0),
    ends=2,
    stages=1,
    replicas=4,
    parts=toy_parts(1, 3),
    epochs=50,
    spread_s=0.05,
    links=LinkProfile(0.002, 0.002),
    work=WorkTimes(ends_s=0.03, forward_s=0.09, step_s=0.03),
)
"""One cell, until a change makes them smaller."""
DILOCO = Rules(2, OuterSettings("butterfly", "deltas", "nesterov", window_s=10.0), 1, "diloco")
PLAIN = Rules(4, OuterSettings("moshpit", grid=(2, 2), window_s=10.0), 2, "moshpit")


class Watched(SimSwarm):
    """Keeps every plan, in order."""

    def __init__(self, setup: Setup, seed: int, *changes: Rules) -> None:
        super().__init__(setup, seed)
        self.changes = {rules.change: rules for rules in changes}
        self.plans: dict[str, Plan] = {}
        moved = self.watch.grow.member

        def seen(peer: SimPeer, event: Any, *rest: Any) -> None:
            if isinstance(event, ev.PlanArrived):
                self.plans.setdefault(event.plan.hash, event.plan)
            moved(peer, event, *rest)

        self.watch.grow.member = seen  # type: ignore[method-assign]

    def until(self, epoch: int) -> None:
        self.world.run(300.0, lambda: any(made >= epoch for _, made, *_ in self.watch.commits))
        assert self.watch.commits[-1][1] >= epoch

    def comes(self, condition: Callable[[], bool]) -> None:
        """Run until the condition holds; fail if it does not within 300 s."""
        self.world.run(self.world.now + 300.0, condition)
        assert condition()

    def finish(self) -> None:
        self.world.run(400.0, lambda: bool(self.watch.counts.get("run-finished")))
        assert self.watch.counts.get("run-finished"), self.watch.recent
        self.world.run(self.world.now + 5.0, None)

    def tell(self, change: str) -> None:
        """The owner asks a daemon that happens to be up."""
        for peer in self.live()[-1:]:
            peer.change(change)

    def block(self) -> SimPeer:
        return self.live(1)[0]

    def done(self, epoch: int) -> Plan:
        """The plan that made the version after ``epoch``."""
        return next(p for p in reversed(self.plans.values()) if p.epoch == epoch)


def test_a_change_starts_with_the_next_plan_and_divides_cells() -> None:
    swarm = Watched(GOSSIP, 1, DILOCO)
    swarm.until(4)
    assert swarm.watch.counts.get("cell-divided", 0) == 0
    swarm.block().change("diloco")
    swarm.finish()
    first = next(p for p in swarm.plans.values() if p.change)
    assert 5 <= first.epoch <= 6
    assert all(not p.change for p in swarm.plans.values() if p.epoch < first.epoch)
    assert len({p.training.cell for p in swarm.live()}) == 2, "of two replicas a stage at most"
    assert swarm.watch.counts["means-in-place"] >= 2, "they average as the change says"
    assert all(p.work.anchor.kept for p in swarm.live())
    assert {p.training.admission.changes.in_force for p in swarm.live()} == {DILOCO}
    assert swarm.watch.counts.get("averaging-changed") == 1


def test_a_change_goes_from_cell_to_cell() -> None:
    swarm = Watched(replace(GOSSIP, cell=2, epochs=100_000), 2, PLAIN)
    counts = swarm.watch.counts
    swarm.comes(lambda: counts["means-in-place"] >= 2)
    assert len({p.training.cell for p in swarm.live()}) == 2
    swarm.block().change("moshpit")
    swarm.comes(lambda: counts["averaging-changed"] == 2)
    met = counts["means-in-place"]
    swarm.comes(lambda: counts["means-in-place"] >= met + 2)
    assert {p.training.admission.changes.in_force for p in swarm.live()} == {PLAIN}
    assert counts["averaging-changed"] == 2, "in each cell once"


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.6])
def test_the_leader_dies_and_the_change_does_not(delay: float) -> None:
    swarm = Watched(GOSSIP, 3, DILOCO)
    swarm.until(4)
    swarm.block().change("diloco")
    swarm.world.run(swarm.world.now + delay, None)
    swarm.chief().kill()
    swarm.finish()
    assert {p.training.admission.changes.in_force for p in swarm.live()} == {DILOCO}


def test_a_change_reaches_joiners_and_survives_a_full_restart() -> None:
    swarm = Watched(replace(GOSSIP, epochs=40, checkpoint_every=1), 4, DILOCO)
    swarm.until(3)
    swarm.block().change("diloco")
    swarm.until(8)
    joined = swarm.add(1)
    swarm.until(24)
    assert joined.training.admission.changes.in_force == DILOCO
    peers = swarm.live()
    for peer in peers:
        peer.kill()
    for peer in peers:
        peer.boot()
    swarm.finish()
    assert {p.training.admission.changes.in_force for p in swarm.live()} == {DILOCO}
    assert swarm.watch.counts.get("averaging-changed") == 1, "a checkpoint knows what was in force"


def test_old_or_forged_changes_are_ignored_and_counted() -> None:
    swarm = Watched(GOSSIP, 5, DILOCO, PLAIN)
    swarm.until(2)
    swarm.block().change("moshpit")
    swarm.until(6)
    chief = swarm.chief()
    liar = swarm.block()
    heard = liar.training.reporting.own.heartbeat(chief.name)
    said: list[str | None] = []

    def hear(by: SimPeer, sender: SimPeer, note: Any) -> None:
        """Deliver a note as the network would."""
        context = SimpleNamespace(peer=sender.name)

        async def tell() -> None:
            reply = await by.training.Tell(note, context)
            said.append(None if reply.accepted else reply.reason)

        swarm.world.push(0.0, lambda: by.loop.create_task(tell()), loop=by.loop)
        swarm.world.run(swarm.world.now + 0.001)

    hear(chief, liar, notes.ready_note(replace(heard, membership=ev.Membership(change="diloco"))))
    hear(chief, liar, notes.ready_note(replace(heard, membership=ev.Membership(change="forged"))))
    assert said[0] is None, "an honest peer may be behind"
    assert "signed" in str(said[1])
    assert chief.training.admission.changes.known == PLAIN
    plan = swarm.done(6)
    domain = signing_domain("plan", swarm.manifest.run_id)
    tells = set[str]()
    for change in ("diloco", "", "forged"):
        other = replace(plan, change=change, term=plan.term + 9, leader=chief.name)
        swarm.liars.add(chief.name)  # these plans are none of its own
        signature = chief.identity.sign(other.canonical(), domain)
        hear(liar, chief, notes.plan_note(other, signature))
        tells.add(liar.training.admission.changes.tells(chief.name))
    swarm.liars.clear()
    assert "under change 1" in str(said[2])
    assert "under change 0" in str(said[3])
    assert str(said[4]).startswith("invalid plan")
    assert "moshpit" in tells, "whoever leads is told what is in force, with the next heartbeat"
    swarm.finish()
    assert {p.training.admission.changes.in_force for p in swarm.live()} == {PLAIN}


def test_random_faults_while_it_changes() -> None:
    for seed in (100, 101):
        swarm = Watched(GOSSIP, seed, DILOCO, PLAIN)
        for fault in lay(("random",), GOSSIP, seed).faults:
            swarm.world.push(fault.at, strike, swarm, fault)
        for at, text in ((2.0 + seed % 5, "diloco"), (9.0 + seed % 3, "moshpit")):
            swarm.world.push(at, swarm.tell, text)
        swarm.finish()


@pytest.mark.parametrize("who", ["the leader", "a replica"])
def test_a_peer_that_the_owner_revokes_is_out(who: str) -> None:
    swarm = Watched(GOSSIP, 5)
    swarm.until(4)
    chief = swarm.chief()
    gone = chief if who == "the leader" else next(p for p in swarm.live(1) if p is not chief)
    swarm.changes["out"] = Rules(4, GOSSIP.outer, 1, "out", frozenset({mark(gone.name)}))
    swarm.watch.one_fault.fault("revoked")
    teller = next(p for p in swarm.live() if p is not gone)
    teller.change("out")
    told = swarm.world.now
    swarm.world.run(told + 20.0, None)
    after = [p for p in swarm.plans.values() if p.change == "out"]
    assert after, "the others go on"
    assert all(p.member(gone.name) is None and gone.name not in p.owners.values() for p in after)
    assert all(gone.name not in p.electorate.voters for p in after)
    commits = [c for c in swarm.watch.commits if c.at > told and c.leader != gone.name]
    assert commits[0].at - told < 10.0
    assert not any(gone.name in p.transport.lines for p in swarm.live() if p is not gone)
    swarm.finish()


def test_sessions_end_of_all_who_came_with_a_revoked_invite() -> None:
    invites = {PeerId("s01-000"): PeerId("invite")}

    class Invited(Watched):
        def facts(self, facts: RunFacts) -> RunFacts:
            return replace(super().facts(facts), invite_of=invites.get)

    swarm = Invited(GOSSIP, 5)
    swarm.until(1)
    teller = swarm.chief()
    ended: list[tuple[bool, ...]] = []

    def expel(*about: Callable[[PeerId], bool]) -> None:
        ended.extend(tuple(told(peer) for told in about) for peer in invites)

    teller.transport.expel = expel  # type: ignore[method-assign]
    marks = frozenset(map(mark, invites.values()))
    swarm.changes["out"] = Rules(4, GOSSIP.outer, 1, "out", marks)
    teller.change("out")
    swarm.comes(lambda: bool(ended))
    assert ended[0] == (False, True), "it may come back with another invite"
