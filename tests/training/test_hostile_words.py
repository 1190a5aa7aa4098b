"""Messages that no honest peer sends: numbers, names and plans that would crash or stall a
leader."""

import dataclasses
from typing import Any

import pytest

from node.core.ids import PeerId
from node.core.journey import Path, Plan, PlanMember, Version
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.leader.gathering import SETTLES
from node.epoch.leader.roster import Roster
from node.epoch.peers.life import UNANSWERED_S
from node.epoch.plan_context import Memory, makes
from tests.training.run_facts import facts
from tests.training.test_leader import (
    S1,
    S2,
    T1,
    T2,
    E,
    begun,
    commits,
    heard,
    led,
    next_plan,
    reported,
    tell,
    the_plan,
    waits,
)


def test_a_bound_of_nothing_casts_no_doubt() -> None:
    r = Roster(2)
    for e in (
        heard(S1),
        dataclasses.replace(heard(T1), capacity=ev.Capacity(5e-324)),
        dataclasses.replace(heard(S2), capacity=ev.Capacity(1.0, seen=((T1, 1e12), (S1, 1.0)))),
    ):
        r.hear(e, 0.0)
    assert S1 not in r.speeds.doubts()


@pytest.mark.parametrize("dropped", [(), (0,)])
def test_a_recalled_plan_has_the_samples_its_cursor_gives(dropped: tuple[int, ...]) -> None:
    plan = dataclasses.replace(
        Plan(0, 1, E, (PlanMember(E, 0),), (Path(0, E, (77, 78), ()),), {}),
        cursor=(SampleClass(0, 0, 0),),
    )
    made = makes(plan, dropped)
    memory = Memory(None)
    assert memory.asking(made, 0.0, 5.0) == "ask"
    assert memory.recalled(made, plan, dropped) is False
    assert made in memory.forgotten


def test_a_peer_that_comes_and_goes_does_not_keep_a_run_from_beginning() -> None:
    leader = led(facts(settle_s=1.0), map(heard, (E, S1, S2)))
    found = None
    now = 0.0
    while found is None and now <= SETTLES * 1.0:
        now += 0.5
        done = leader.handle(ev.Unreachable(T1) if int(2 * now) % 2 else heard(T1), now)
        found = the_plan(done + leader.handle(ev.ClockTick(), now))
    assert found is not None


def test_nothing_is_kept_of_keys_that_came_and_left() -> None:
    leader, plan = begun()
    strangers = [PeerId(f"stage1x{n}") for n in range(9)]
    tell(leader, [heard(p, leaving=True) for p in strangers], 2.5)
    plan = next_plan(commits(leader, plan, 3.0))
    tell(leader, map(ev.Unreachable, strangers), 3.5)
    next_plan(commits(leader, plan, 4.0))
    assert (leader.voting._left, leader.roster.participants._reach.keys()) == (set(), {E, S1, S2})


def test_a_peer_outside_the_run_makes_no_young_swarm_old() -> None:
    outside = dataclasses.replace(heard(T2, Version(1, "a" * 32)), stage=7000)
    leader = led(facts(min_replicas=2), [*map(heard, (E, S1, S2)), outside])
    assert waits(leader, 10.0) == "a peer for stages 1, 2"


def test_a_members_outcome_is_a_sign_of_life_after_a_repair() -> None:
    leader, plan = begun([heard(p) for p in (E, S1, T1, S2, T2)])
    reported(leader, plan, 3.0)
    tell(leader, [ev.Incomplete(p, plan.hash, 0, (), ()) for p in (S1, T1)], 4.0)
    words = (
        ev.Committed(m.peer, plan.hash, 1 if m.stage == 1 else 0, f"d{m.stage}", 1.0)
        for m in plan.members
    )
    assert next_plan(tell(leader, words, 4.2)).epoch == 1, "nobody has to be heard again first"


def test_a_peer_that_left_while_the_silent_are_looked_at_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of one can let the cell divide, and others leave with the new one."""
    leader, _ = begun(late_s=5.0)

    def both_leave(peer: PeerId, now: float, why: str) -> list[Any]:
        for p in (S1, S2):
            leader.roster.gone(p)
        return []

    leader.handle(ev.ClockTick(), 100.0)
    monkeypatch.setattr(leader, "_gone", both_leave)
    leader.handle(ev.ClockTick(), 101.0 + UNANSWERED_S)
    assert not {S1, S2} & leader.roster.life.heard.keys()
