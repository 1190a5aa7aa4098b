"""The version that an epoch starts from, and the waits for a better one."""

import dataclasses
from typing import Any

from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.leader.starting_point import LOST_S
from node.epoch.plan_context import PlanContext, makes
from tests.training.test_leader import (
    S1,
    S2,
    T1,
    T2,
    YOUNG,
    A,
    B,
    E,
    begun,
    commits,
    heard,
    heir,
    kinds,
    next_plan,
    recalled,
    tell,
    the_plan,
    waits,
)

SECOND = PeerId("ends2")
PATIENCE_S = 10.0


def counted(tokens: int) -> dict[str, Any]:
    """Facts of a run whose checkpoints say that a version has so many tokens."""
    return {
        "recall": lambda version: dataclasses.replace(recalled(version), tokens=tokens),
        "patience_s": PATIENCE_S,
        "late_s": 1e9,
    }


def held(plan: Plan, *peers: PeerId, **about: Any) -> list[ev.Heartbeat]:
    """Heartbeats of peers that hold the version which this plan has made."""
    at = makes(plan, ())
    notes = (heard(p, at, 128, **about) for p in peers)
    return [dataclasses.replace(note, digest=f"digest {note.stage} next") for note in notes]


def test_a_lost_version_is_waited_for_by_stage_and_epoch() -> None:
    leader, plan = begun(patience_s=PATIENCE_S, late_s=1e9)
    commits(leader, plan, 3.0)
    tell(leader, [*held(plan, E, S1, reachable=(YOUNG,)), heard(T2)], 4.0)
    leader.handle(ev.Unreachable(S2), 5.0)
    assert waits(leader, 5.0) == "a peer of stage 2 that holds epoch 1"
    assert the_plan(leader.handle(ev.ClockTick(), 4.9 + PATIENCE_S)) is None
    done = leader.handle(ev.ClockTick(), 5.0 + PATIENCE_S)
    assert next_plan(done).base == YOUNG
    assert "went-back" in kinds(done)


def test_patience_begins_anew_after_a_plan() -> None:
    leader, plan = begun(patience_s=PATIENCE_S, late_s=1e9)
    commits(leader, plan, 3.0)
    tell(leader, [*held(plan, E, S1, reachable=(YOUNG,)), heard(T2)], 4.0)
    for lost_at in (5.0, 40.0):
        leader.handle(ev.Unreachable(S2), lost_at)
        assert the_plan(leader.handle(ev.ClockTick(), lost_at + PATIENCE_S - 0.1)) is None
        assert next_plan(tell(leader, held(plan, S2), lost_at + PATIENCE_S - 0.1)).epoch == 1


def both(leader: Leader, plan: Plan, ours: bool, theirs: bool) -> Plan | None:
    """The plan after the first one was given up, at once: peers of another side have come. The
    sides are orphans or not."""
    our_side = [heard(p, A, 900, orphan=ours) for p in (E, S1, S2)]
    their_side = [heard(p, B, 500, orphan=theirs) for p in (SECOND, T1, T2)]
    tell(leader, [*our_side, *their_side], 3.0)
    leader.handle(ev.ContextsKept(((A, context(900)), (B, context(500)))), 3.0)
    leader.handle(ev.Declined(plan.hash, "no reason"), 3.0)
    return the_plan(leader.handle(ev.ClockTick(), 4.0))


def context(tokens: int) -> PlanContext:
    return dataclasses.replace(recalled(A), tokens=tokens)


def test_an_orphan_side_joins_a_side_with_a_majority_though_that_has_fewer_tokens() -> None:
    for ours, theirs, base in ((True, False, B), (False, False, A), (True, True, A)):
        notes = [heard(p, A, 900, orphan=ours) for p in (E, S1, S2)]
        leader, plan = begun(notes, **counted(900))
        assert plan.base == A
        following = both(leader, plan, ours, theirs)
        assert following is not None
        assert following.base == base


def test_a_claim_of_a_majority_is_waited_for_by_orphans() -> None:
    notes = [heard(p, A, 900, orphan=True) for p in (E, S1, S2)]
    leader, plan = begun(notes, **counted(900))
    tell(leader, [*notes, heard(T1, B, 500)], 3.0)
    leader.handle(ev.Declined(plan.hash, "no reason"), 3.0)
    assert waits(leader, 4.0) == "the side of tage1b, which says it has counted more tokens"
    assert next_plan(leader.handle(ev.ClockTick(), 4.0 + PATIENCE_S)).base == A


def test_a_peer_that_can_put_the_best_version_in_place_claims_no_other() -> None:
    notes = [heard(p, A, 900) for p in (E, S1, S2)]
    leader, plan = begun(notes, **counted(900))
    tell(leader, [*notes, heard(T1, B, 2000, reachable=(A,))], 3.0)
    leader.handle(ev.Declined(plan.hash, "no reason"), 3.0)
    following = next_plan(leader.handle(ev.ClockTick(), 4.0))
    assert following.base == A
    assert [m.current for m in following.stage(1)] == [True, True]


def test_most_holders_of_a_version_say_how_many_tokens_it_has() -> None:
    more = [PeerId(f"stage1{c}") for c in "cd"]
    notes = [heard(p, A, 900) for p in (E, S1, S2)]
    leader, plan = begun(notes, **counted(900))
    others = [heard(p, B, 500) for p in (SECOND, *more, T2)]
    tell(leader, [*notes, *others, heard(T1, B, 10**6)], 3.0)
    leader.handle(ev.Declined(plan.hash, "no reason"), 3.0)
    assert the_plan(leader.handle(ev.ClockTick(), 4.0)) is None, "T1 claims more"
    assert next_plan(leader.handle(ev.ClockTick(), 4.0 + PATIENCE_S)).base == A


def test_nothing_in_common_names_the_stages_without_the_nearest_version() -> None:
    others = Version(9, "dd" * 16)
    notes = [heard(E, A, 900), heard(S1, A, 900), heard(S2, others, 900)]
    leader, plan = begun()
    successor = heir(E, leader.facts, plan)
    tell(successor, notes, 0.0)
    assert waits(successor, 2.0) == (
        "a version that every stage holds: nobody at stage 2 has epoch 5 as the others have it"
    )


def test_a_stage_that_is_left_out_gets_a_moment_for_a_newer_version() -> None:
    peers = (E, S1, S2, PeerId("stage3a"))
    about: dict[str, Any] = {"stages": 3, "spare": 1, "late_s": 1e9, "patience_s": PATIENCE_S}
    leader, plan = begun(map(heard, peers), **about)
    following = next_plan(commits(leader, plan, 3.0))
    leader.handle(ev.Unreachable(S2), 4.0)
    tell(leader, held(plan, E, S1, peers[-1]), 4.0)
    assert the_plan(leader.handle(ev.ClockTick(), 6.9)) is None
    around = next_plan(leader.handle(ev.ClockTick(), 7.0))
    assert (around.base, around.stood) == (following.base, {2: following.base})


def fallen(*older: PeerId) -> list[Any]:
    """Actions when for long only the ends and these peers have had parameters: the ends the newest
    ones, these those of the epoch before; S1 and S2 are gone, and T1 and T2 are here."""
    ends = (E, SECOND, PeerId("ends3"))
    leader, first = begun(map(heard, (*ends, S1, S2)), late_s=1e9, target_batch=4)
    second = next_plan(commits(leader, first, 3.0))
    third = next_plan(commits(leader, second, 4.0))
    for peer in (S1, S2):
        leader.handle(ev.Unreachable(peer), 5.0)
    mates = [heard(p, second.base, 64) if p in older else heard(p) for p in (T1, T2)]
    done = tell(leader, [*(heard(p, third.base, 128) for p in ends), *mates], 6.0)
    for now in (6.0, 6.0 + LOST_S - 0.5, 6.0 + LOST_S):
        assert the_plan(done) is None
        done = leader.handle(ev.ClockTick(), now)
    return done


def test_several_stages_fall_back_together_or_none_does() -> None:
    assert next_plan(fallen(T1, T2)).stood.keys() == {1, 2}
    done = fallen(T1)
    assert the_plan(done) is None
    assert "stage-fell-back" not in kinds(done), "stage 2 has nothing to go on from"


def test_a_new_leader_does_not_go_around_a_stage_to_an_older_version_at_once() -> None:
    peers = (E, S1, PeerId("stage3a"))
    about: dict[str, Any] = {"stages": 3, "spare": 1, "late_s": 1e9}
    leader, plan = begun(map(heard, (*peers, S2)), **about, recall=recalled)
    later = dataclasses.replace(plan, epoch=9, lineage="dd" * 16, tokens=1000)
    successor = heir(E, leader.facts, later)
    successor.handle(ev.ContextsKept(((A, recalled(A)),)), 20.0)
    tell(successor, [heard(p, A, 500) for p in peers], 20.0)
    for now in (20.0, 25.0, 29.0):
        assert the_plan(successor.handle(ev.ClockTick(), now)) is None
