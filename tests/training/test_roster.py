"""The leader's estimates of speeds, and the versions that it finds."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Version
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.leader.roster import Roster
from node.epoch.pace import ALL_OWN
from node.epoch.peers.speeds import CEILING, FORGIVE_AFTER
from node.epoch.peers.versions import majority
from node.scheduler.costs import NOTHING, LinkCost, Measured
from tests.training.run_facts import facts
from tests.training.test_leader import heir, next_plan, tell

A, B, C, D = (PeerId(p) for p in "ABCD")


def roster(*notes: ev.Heartbeat) -> Roster:
    r = Roster(2)
    for n in notes:
        r.hear(n, 0.0)
    return r


def says(peer: PeerId, speed: float, stage: int = 1, **seen: float) -> ev.Heartbeat:
    rows = tuple((PeerId(p), rate) for p, rate in seen.items())
    return ev.Heartbeat(peer, stage, Version(0), "d", ev.Capacity(speed, seen=rows))


@pytest.mark.parametrize(
    ("notes", "speed"),
    [
        ([says(A, 1e6), says(B, 4.0), says(C, 1.0, 0, A=10.0, B=10.0)], CEILING * 4.0),
        (
            [
                says(A, 64.0, A=1e6),
                says(B, 4.0),
                *(says(p, 1.0, 0, A=10.0, B=10.0) for p in (C, D)),
                says(PeerId("E"), 1.0, 0, A=1e9, B=10.0),
            ],
            8.0,
        ),
        ([says(A, 64.0), says(C, 1.0, 0, A=1.0)], 64.0),
        ([says(A, 64.0), says(B, 1.0)], 64.0),
        ([says(A, 64.0), says(B, 8.0), says(C, 1.0, 0, A=80.0, B=10.0)], 64.0),
        ([says(A, 64.0), says(B, 4.0), says(C, 1.0, 0, B=10.0)], 64.0),
        ([says(A, 64.0), says(B, 4.0), says(C, 1.0, 0, A=0.5, B=0.5)], 8.0),
        ([says(A, 64.0), says(B, 4.0), says(C, 1.0, 0, A=8.0, B=8.0, D=8.0), says(D, 0.0)], 8.0),
    ],
    ids=[
        "bounded",
        "own-word-and-one-outvoted",
        "no-sibling",
        "not-measured",
        "seen-to-be-fast",
        "only-the-sibling-is-measured",
        "slow",
        "sibling-of-unknown-speed",
    ],
)
def test_a_claimed_speed_is_bounded_by_what_neighbours_see(
    notes: list[ev.Heartbeat], speed: float
) -> None:
    r = roster(*notes)
    assert r.speeds.of(A) == pytest.approx(speed)
    if B in r.peers.candidates:
        assert r.speeds.of(B) == pytest.approx(r.peers.candidates[B].capacity.speed), "it is honest"


def test_measurements_of_a_peer_that_got_no_work_for_long_are_out_of_date() -> None:
    costs = Measured(forward_s=2.0)
    r = Roster(2)
    for peer in (A, B):
        r.hear(ev.Heartbeat(peer, 1, Version(0), "d", ev.Capacity(3.0, costs=costs)), 0.0)
    for _ in range(FORGIVE_AFTER - 1):
        r.speeds.worked({A, B}, {B})
    assert r.speeds.measured() == {A: costs, B: costs}
    assert r.speeds.known_cost() == {A, B}
    believed = r.speeds.of(A)
    assert believed == pytest.approx(3.0, rel=0.05)
    r.speeds.worked({A, B}, {B})
    assert r.speeds.measured() == {A: NOTHING, B: costs}
    assert r.speeds.known_cost() == {B}, "it is tried again"
    assert r.speeds.of(A) == pytest.approx(CEILING * believed)
    assert r.speeds.of(B) == pytest.approx(believed)
    r.speeds.worked({A, B}, {A, B})
    assert r.speeds.measured() == {A: costs, B: costs}
    assert r.speeds.of(A) == pytest.approx(believed)


def test_most_voices_win_and_ties_go_to_the_smallest_peer() -> None:
    assert majority({A: 1, B: 2, C: 2}, 0) == 2
    assert majority({B: 1, A: 2}, 0) == 2


def test_an_undone_version_is_no_start_and_no_richer_side() -> None:
    made, again, rival = (Version(3, c * 32) for c in "abc")
    notes = [
        ev.Heartbeat(p, s, made, "d", ev.Capacity(1.0), (Version(2, "e" * 32),), tokens=90)
        for s, p in enumerate((A, B, C))
    ]
    # D caught up and can go back to nothing
    r = roster(*notes, ev.Heartbeat(D, 1, made, "d", ev.Capacity(1.0), tokens=90))
    assert r.versions.startable()[0] == made
    r.versions.undo(made)
    assert r.versions.startable() == [Version(2, "e" * 32)]
    assert r.versions.richer(60, Version(2, "e" * 32)) == []
    assert r.versions.richer(60, rival) == [], "and D is none either"
    r.versions.undo(again)
    assert r.versions.undone == {made, again}
    r.versions.undo(Version(4, "a" * 32))
    assert len(r.versions.undone) == 1, "those of older epochs are forgotten"


def test_an_orphan_side_does_not_go_back_to_the_beginning() -> None:
    """Peers that have just come are at the version where every run begins, which nobody has voted
    for."""
    far = [
        ev.Heartbeat(p, s, Version(9, "a" * 32), "d", ev.Capacity(1.0), tokens=90, orphan=True)
        for s, p in enumerate("ABC")
    ]
    fresh = [
        ev.Heartbeat(PeerId(p), s, Version(0), "d", ev.Capacity(1.0)) for s, p in enumerate("DEF")
    ]
    r = roster(*far, *fresh)
    assert r.versions.startable()[0] == Version(9, "a" * 32)
    assert r.versions.richer(90, Version(9, "a" * 32)) == []
    voted = [
        ev.Heartbeat(PeerId(p), s, Version(4, "b" * 32), "d", ev.Capacity(1.0), tokens=40)
        for s, p in enumerate("GHI")
    ]
    assert roster(*far, *fresh, *voted).versions.startable()[0] == Version(4, "b" * 32)


LEADER = PeerId("L")


def ready(peer: str, ways: Iterable[str]) -> ev.Heartbeat:
    """A heartbeat of a replica of stage 1 that reaches the leader and ``ways``."""
    costs = Measured(ways=tuple((PeerId(p), LinkCost(0.01)) for p in (LEADER, *ways) if p != peer))
    return ev.Heartbeat(PeerId(peer), 1, Version(0), "d", ev.Capacity(1.0, costs=costs))


def proving(*notes: ev.Heartbeat, **about: Any) -> Roster:
    r = Roster(1, LEADER, prove=True, **about)
    everybody = Measured(ways=tuple((n.peer, LinkCost(0.01)) for n in notes))
    r.hear(ev.Heartbeat(LEADER, 0, Version(0), "d", ev.Capacity(1.0, costs=everybody)), 0.0)
    for note in notes:
        r.hear(note, 0.0)
    return r


CROWD = [f"p{n:02}" for n in range(3 * ALL_OWN)]


def test_all_replicas_that_reach_each_other_own_parts() -> None:
    r = proving(*(ready(p, CROWD) for p in CROWD))
    assert r.participants.by_stage()[1] == CROWD
    assert r.participants.may_own(1) == set(CROWD)
    assert not any(r.participants.lacking(PeerId(p)) for p in CROWD)


def test_a_large_stage_takes_in_whoever_reaches_its_owners() -> None:
    owners = CROWD[-ALL_OWN:]
    others = CROWD[:-ALL_OWN]
    r = proving(*(ready(p, CROWD) for p in owners), *(ready(p, owners) for p in others))
    assert r.participants.by_stage()[1] == CROWD
    assert r.participants.may_own(1) == set(owners)
    assert r.participants.apart() == []
    assert not any(r.participants.lacking(PeerId(p)) for p in CROWD), "nothing waits for other ways"
    newcomer = PeerId("new")
    r.hear(ready(newcomer, owners[1:]), 1.0)
    r.hear(
        ev.Heartbeat(
            LEADER,
            0,
            Version(0),
            "d",
            ev.Capacity(
                1.0,
                costs=Measured(ways=tuple((PeerId(p), LinkCost(0.01)) for p in (*CROWD, newcomer))),
            ),
        ),
        1.0,
    )
    assert newcomer not in r.participants.by_stage()[1]
    assert r.participants.lacking(newcomer) == [owners[0]], "it has found the ways to the others"
    assert r.participants.lacking(PeerId(owners[0])) == [newcomer]
    for owner in owners:
        r.hear(ready(owner, [*CROWD, newcomer]), 2.0)
    assert r.participants.lacking(newcomer) == [owners[0]]
    r.hear(ready(newcomer, owners), 3.0)
    assert newcomer in r.participants.by_stage()[1]
    assert r.participants.may_own(1) == set(owners), "owners stay"


def with_newcomer(*ways: str) -> list[ev.Heartbeat]:
    """A stage in which all reach each other, and a newcomer that reaches ``ways``, as they it."""
    known = [ready(p, [*CROWD, "new"] if p in ways else CROWD) for p in CROWD]
    return [*known, ready("new", ways)]


def test_a_newcomer_takes_no_parts_from_owners_that_it_does_not_reach() -> None:
    *known, newcomer = with_newcomer(*CROWD[:ALL_OWN])
    r = proving(*known, newcomer)
    r.gone(newcomer.peer)
    assert r.participants.may_own(1) == set(CROWD)
    r.hear(newcomer, 1.0)
    assert r.participants.may_own(1) == set(CROWD)
    assert r.participants.by_stage()[1] == CROWD


def test_owners_of_the_last_plan_stay_so_with_a_new_leader() -> None:
    notes = with_newcomer(*CROWD[:ALL_OWN])
    fresh = proving(*notes)
    assert fresh.participants.may_own(1) == set(CROWD[:ALL_OWN]), (
        "the newcomer takes part, and reaches only these"
    )
    r = proving(*notes, owning={1: set(CROWD)})
    assert r.participants.may_own(1) == set(CROWD)
    assert r.participants.by_stage()[1] == CROWD


def test_a_leader_finds_the_owners_in_the_plan_before() -> None:
    notes = with_newcomer(*CROWD[:ALL_OWN])
    owners = {f"w{n}": PeerId(p) for n, p in enumerate(CROWD)}
    members = (PlanMember(LEADER, 0), *(PlanMember(PeerId(p), 1) for p in CROWD))
    history = Plan(0, 1, LEADER, members, (), owners)
    known = facts(stages=1, prove=True)
    ways = Measured(ways=tuple((n.peer, LinkCost(0.01)) for n in notes))
    own = replace(ready(LEADER, []), stage=0, capacity=ev.Capacity(1.0, costs=ways))
    joined = []
    for leader in (Leader(LEADER, known), heir(LEADER, known, history)):
        # It looks at its peers first when it has heard all of them.
        tell(leader, [ev.Resigning(True), own, *notes, ev.Resigning(False)], 0.0)
        plan = next_plan(leader.handle(ev.ClockTick(), 2.0))
        joined.append(plan.member(PeerId("new")) is not None)
    assert joined == [True, False], "it reaches only some of the owners"


def test_a_peer_that_takes_no_part_takes_no_parts_from_others() -> None:
    r = proving(*with_newcomer())
    assert r.participants.by_stage()[1] == CROWD
    assert r.participants.may_own(1) == set(CROWD)


def test_a_crowd_that_vouches_for_itself_comes_after_peers_that_were_met() -> None:
    made_up = [f"a{n:02}" for n in range(len(CROWD) + 5)]
    notes = [ready(p, group) for group in (CROWD, made_up) for p in group]
    assert proving(*notes).participants.by_stage()[1] == made_up
    assert proving(*notes, known=frozenset(map(PeerId, CROWD))).participants.by_stage()[1] == CROWD
