"""Tokens that the plan assigns to each replica."""

import pytest

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.stage.inner_round import caps_of

E0, E1, A, B, L, Z = map(PeerId, ("e0", "e1", "a", "b", "l", "z"))
MEMBERS = (
    *(PlanMember(p, ENDS) for p in (E0, E1)),
    *(PlanMember(p, 1) for p in (A, B)),
    PlanMember(L, 1, current=False),
    PlanMember(Z, 2),
)
PATHS = tuple(
    Path(i, origin, (i, i + 10), (Hop(1, block), Hop(2, Z)))
    for i, (origin, block) in enumerate([(E0, A), (E1, A), (E0, B)])
)
PLAN = Plan(4, 1, E0, MEMBERS, PATHS, {})


@pytest.mark.parametrize(
    ("stage", "allowed"), [(1, {A: 32, B: 16}), (2, {Z: 48}), (ENDS, {E0: 32, E1: 16})]
)
def test_each_replica_may_claim_the_tokens_planned_for_it(stage, allowed):
    assert caps_of(PLAN, stage, 8).allowed == allowed


def test_what_was_dropped_counts_for_nobody_but_was_assigned():
    got = caps_of(PLAN, 1, 8, dropped=(1, 7))
    assert (got.allowed, (got.total, got.most)) == ({A: 32, B: 16}, (32, 48))


def test_an_idle_current_replica_is_listed_and_a_listener_not():
    assert caps_of(Plan(4, 1, E0, MEMBERS, PATHS[:2], {}), 1, 8).allowed == {A: 32, B: 0}
