"""Pushes without a barrier in a swarm whose servers and speakers die in mid-round: real machines in
virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.averaging.exchange.groups import micro_groups
from node.averaging.strategies.outer import OuterSettings
from node.core.journey import Plan, of_cell
from node.sim.faults import Schedule
from node.sim.process import SimPeer
from node.sim.run import run
from node.sim.setup import Setup, WorkTimes, toy_parts
from node.training.leader.attempt import EpochAttempt
from node.training.protocol import events as ev
from node.training.protocol.meetings import speakers
from node.training.protocol.rules import Rules
from tests.sim.outcomes import held
from tests.sim.test_switch import GOSSIP, Watched

HOGWILD = OuterSettings("hogwild", "deltas", 2, "sgd", lr=0.3)
STALE = replace(HOGWILD, strategy="parameter-server", staleness=2, shards=2)
PAIRS = Setup(
    stages=1,
    parts=toy_parts(1, 3),
    ends=2,
    replicas=6,
    epochs=9,
    cell=2,
    outer=HOGWILD,
    min_replicas=6,
    work=WorkTimes(step_s=0.05),
)
DELAYS = (0.02, 0.06, 0.1, 0.14, 0.18, 0.24, 0.3, 0.4)


def outer_round(swarm: Watched, number: int) -> Plan:
    """Run until the outer round of this number is planned."""
    swarm.world.run(120.0, lambda: any(p.outer == number for p in swarm.plans.values()))
    return next(p for p in swarm.plans.values() if p.outer == number)


def servers(plan: Plan, stage: int = 1) -> list[str]:
    groups = sorted({m.group for m in plan.stage(stage)})
    return sorted(
        {
            peer
            for group in groups
            for part, peer in of_cell(plan.reducers, group).items()
            if part.startswith("1.")
        }
    )


def groups_of(plan: Plan, stage: int) -> int:
    """Exchanges that each cell's speaker has with all servers."""
    (group,) = {m.group for m in plan.stage(stage)}
    by = of_cell(plan.reducers, group)
    owned = [
        {p.name: p.bytes for p in PAIRS.parts[stage] if by[p.name] == peer}
        for peer in sorted(set(by.values()))
    ]
    return sum(len(micro_groups(sizes, PAIRS.group_bytes)) for sizes in owned if sizes)


def ends(swarm: Watched) -> dict[int, set[str]]:
    """What the block peers of each cell hold at the end."""
    swarm.finish()
    last = next(reversed(swarm.plans.values()))
    found: dict[int, set[str]] = {}
    for peer in (p for p in swarm.live(1) if p.member.at.epoch == PAIRS.epochs):
        found.setdefault(last.home(peer.name), set()).add(peer.digest)
    return found


def died(swarm: Watched, name: str) -> SimPeer:
    peer = swarm.peers[name]  # type: ignore[index]
    peer.kill()
    return peer


def test_each_push_is_applied_once_and_cells_keep_own_values() -> None:
    swarm = Watched(PAIRS, 1)
    found = ends(swarm)
    assert all(len(digests) == 1 for digests in found.values()), "one cell, one value"
    assert len({d for digests in found.values() for d in digests}) == 3, "another one in each"
    pushes = sum(
        groups_of(plan, stage) * len(plan.cells(stage))
        for plan in swarm.plans.values()
        if plan.outer
        for stage in (0, 1)
    )
    assert swarm.pushes() == pushes
    assert not swarm.watch.counts.get("epoch-abandoned")


@pytest.mark.parametrize("settings", [HOGWILD, STALE], ids=["hogwild", "stale"])
def test_a_server_that_dies_mid_round_costs_no_epoch(
    settings: OuterSettings,
) -> None:
    repaired = 0
    for delay in DELAYS:
        swarm = Watched(replace(PAIRS, outer=settings), 2)
        plan = outer_round(swarm, 2)
        swarm.world.run(swarm.world.now + delay, None)
        gone = died(swarm, servers(plan)[0])
        found = ends(swarm)
        assert not swarm.watch.counts.get("epoch-abandoned"), delay
        assert all(len(digests) == 1 for digests in found.values()), delay
        assert gone.name not in servers(next(p for p in reversed(swarm.plans.values()) if p.outer))
        assert swarm.live(1)[0].member.at.epoch == PAIRS.epochs
        repaired += swarm.watch.counts.get("round-repaired", 0)
    assert repaired, "in no schedule another had to serve"


@pytest.mark.parametrize("seed", [3, 5])
def test_a_speaker_that_dies_mid_round_loses_no_push(seed: int) -> None:
    repaired = []
    quiet = Watched(PAIRS, seed)
    plan, at = outer_round(quiet, 2), quiet.world.now
    group = plan.stage(1)[0].group
    serving = {plan.home(p) for p in servers(plan)}  # type: ignore[arg-type]
    cell, speaker = next(
        (c, p) for p in sorted(speakers(plan, (1, group), ())) if (c := plan.home(p)) not in serving
    )
    for delay in (-0.06, -0.02, 0.0, 0.01, 0.03, 0.1, 0.2, 0.4):
        swarm = Watched(PAIRS, seed)
        swarm.world.run(at + delay, None)
        died(swarm, speaker)
        swarm.until(plan.epoch + 1)
        assert any(
            p.alive for p in map(swarm.peers.__getitem__, (m.peer for m in plan.cell(1, cell)))
        )
        held = [
            p.work.anchor.serving._under_way or p.work.anchor.serving._parts for p in swarm.live(1)
        ]
        versions = {served.version for parts in held for served in parts.values()}
        assert versions == {6}, f"{delay}: three cells, two rounds, each is heard once in each"
        repaired.append(swarm.watch.counts.get("round-repaired", 0))
        assert all(len(digests) == 1 for digests in ends(swarm).values()), delay
    assert 0 in repaired, "what it has given is given"
    assert 1 in repaired, "else its mate speaks"


def test_a_cell_slow_twice_in_a_row_exceeds_a_tight_staleness() -> None:
    setup = replace(
        PAIRS,
        replicas=5,
        min_replicas=5,
        cell=1,
        outer=replace(STALE, staleness=3, shards=1),
        epochs=30,
    )
    outcome = held(setup, Schedule(4, ()))
    assert outcome.counts["pushes-refused"] > 0
    assert outcome.counts["pushes-applied"] > outcome.counts["pushes-refused"]
    loose = run(replace(setup, outer=replace(setup.outer, staleness=8)), Schedule(4, ()))
    assert not loose.counts.get("pushes-refused"), (
        "of five cells eight others' pushes can lie between a pull and a push"
    )


def test_the_leader_lets_unanswered_cells_push_again() -> None:
    swarm = Watched(PAIRS, 5)
    plan = outer_round(swarm, 1)
    attempt = EpochAttempt(plan, 0.0, 9.0, pushes=True)
    unit = next(u for u in plan.units if u[0] == 1)
    attempt.attempts[unit] = 1
    cells = {c: [m.peer for m in plan.cell(1, c)] for c in plan.cells(1)}
    serving = servers(plan)
    home = plan.home(serving[0])  # type: ignore[arg-type]
    first, other = (c for c in sorted(cells) if c != home)
    parts = ("1.0", "1.1", "1.2")

    def assign(stage: int, able: object, previous: object) -> dict[str, str]:
        return dict.fromkeys(parts, next(iter(able))[0])  # type: ignore[call-overload]

    def said(done: list[str], lacking: dict[str, tuple[str, ...]]) -> list[ev.SendRound]:
        attempt.outcomes = {
            p: ev.Committed(p, plan.hash, 0, f"digest {plan.home(p)}") for p in done
        }  # type: ignore[misc, arg-type]
        attempt.outcomes |= {
            p: ev.Incomplete(p, plan.hash, 0, holds, ()) for p, holds in lacking.items()
        }  # type: ignore[misc, arg-type]
        return attempt.repair(unit, sorted(lacking), assign, 6.0)  # type: ignore[arg-type]

    # The servers are there for the cell that was not answered; who is behind its own cell copies
    # from it.
    lacking = {
        **dict.fromkeys(serving, parts),
        **dict.fromkeys(cells[first], ()),
        cells[other][0]: (),
    }
    mates = [p for p in cells[home] if p not in serving]
    again, copy = said([*mates, cells[other][1]], lacking)
    assert (again.sources, set(again.to), again.owners) == ((), {*serving, *cells[first]}, {})
    assert set(again.among) >= set(cells[first])
    assert not {*again.among} & {*cells[other]}
    assert (copy.to, copy.sources, copy.digest) == (
        (cells[other][0],),
        (cells[other][1],),
        f"digest {other}",
    )
    # A server that is done takes part in no other attempt: what it has not given is copied.
    only = dict.fromkeys(cells[first], ())
    (copy,) = said([*cells[home], *cells[other]], only)
    assert set(copy.sources) == {*cells[home], *cells[other]}
    # A dead one's parts go to those who push again.
    attempt.dead = set(serving)  # type: ignore[arg-type]
    again = said([*mates, *cells[other]], only)[0]
    assert (again.sources, set(again.among)) == ((), set(cells[first]))
    assert set(again.owners.values()) <= set(cells[first])
    # After some attempts nothing is tried any more.
    attempt.attempts[unit] = 3
    (copy,) = said([*mates, *cells[other]], only)
    assert copy.sources


def test_the_owner_changes_to_pushes_and_away_from_them() -> None:
    there, back = (
        Rules(1, HOGWILD, 1, "hogwild"),
        Rules(1, OuterSettings("gossip", every=1), 2, "gossip"),
    )
    swarm = Watched(replace(GOSSIP, epochs=24), 6, there, back)
    swarm.until(3)
    swarm.block().change("hogwild")
    swarm.until(14)
    assert any(p.work.anchor.serving.names for p in swarm.live(1))
    assert swarm.pushes() > 0
    swarm.block().change("gossip")
    swarm.finish()
    assert {p.standing.in_force for p in swarm.live()} == {back}
    assert not any(p.work.anchor.serving.names for p in swarm.live()), (
        "what was served before it is no value to begin with"
    )
