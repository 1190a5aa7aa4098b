"""Members that do not do their part in a round: the epoch goes on, and plans go without them for a
while."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from node.core.ids import PeerId
from node.core.journey import Path, Plan
from node.pipeline.events import MicroBatchDone
from node.training.leader.attempt import COPIES
from node.training.leader.conduct import Conduct
from node.training.leader.leader import Leader, Phase
from node.training.protocol import events as ev
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
    kinds,
    next_plan,
    reported,
    tell,
    the_plan,
)

EVERYBODY = (E, S1, S2, T1, T2)
STEP_S = 0.25


def here(leader: Leader, now: float, *peers: PeerId) -> list[Any]:
    """These peers say that they live and hold what was committed last."""
    base = leader.roster.base
    assert base is not None
    done: list[Any] = []
    for peer in peers:
        note = heard(peer, base, leader.tokens)
        known = leader.roster.agreed.get(note.stage, note.digest)
        done += leader.handle(dataclasses.replace(note, digest=known), now)
    return done


def practised(**kw: Any) -> tuple[Leader, Plan, float]:
    """A leader that has seen four quick rounds of five peers, its next plan, and the time."""
    known = {"round_s": 30.0, "late_s": 4.0, "epochs": 10_000} | kw
    leader, plan = begun(map(heard, EVERYBODY), **known)
    now = 3.0
    for _ in range(4):
        plan = next_plan(commits(leader, plan, now))
        now += 1.0
        assert the_plan(here(leader, now, *EVERYBODY)) is None
    return leader, plan, now


def without(leader: Leader, plan: Plan, now: float, *silent: PeerId) -> tuple[list[Any], float]:
    """All but these commit at once, and live; what the leader does until it plans or a minute is
    over, and the time then."""
    done = reported(leader, plan, now)
    for m in plan.members:
        if m.peer not in silent:
            digest = f"digest {m.stage} of {plan.epoch + 1}"
            done += leader.handle(ev.Committed(m.peer, plan.hash, 0, digest, 1.0), now)
    end = now + 60.0
    while the_plan(done) is None and now < end:
        now += STEP_S
        done += here(leader, now, *EVERYBODY)
        done += leader.handle(ev.ClockTick(), now)
    return done, now


def test_an_epoch_goes_on_soon_without_a_silent_member() -> None:
    leader, plan, began = practised()
    done, now = without(leader, plan, began, T1)
    following = next_plan(done)
    assert now - began < 6.0, "an attempt of the round may take 30 s"
    assert "epoch-committed" in kinds(done)
    assert following.epoch == plan.epoch + 1
    assert following.member(T1) is None, "though it says that it is there"
    assert "s to pass before it plans with this peer again" in leader.left_out_because(T1, now)
    assert leader.left_out_because(S1, now) == ""


def test_a_silent_member_takes_less_than_a_tenth_of_the_time() -> None:
    leader, plan, began = practised()
    now, epochs, faults = began, 0, []
    while now < began + 600.0:
        done, now = without(leader, plan, now, T1)
        faults += [a for a in done if isinstance(a, ev.CountFault)]
        plan = next_plan(done)
        epochs += 1
        now += 1.0
        here(leader, now, *EVERYBODY)
    assert epochs / (now - began) > 0.9 * 0.8, "a quiet epoch takes 1.25 s here"
    assert {f.peer for f in faults} <= {T1}
    assert leader.conduct.left_out_s(T1, now) > 60.0


def test_silence_again_and_again_is_a_fault() -> None:
    leader, plan, now = practised()
    faults: list[Any] = []
    for _ in range(3):
        done, now = without(leader, plan, now, T1)
        faults.append([a.peer for a in done if isinstance(a, ev.CountFault)])
        plan = next_plan(done)
        now += leader.conduct.left_out_s(T1, now)
        here(leader, now, *EVERYBODY)
        plan = next_plan(without(leader, plan, now)[0])
        assert plan.member(T1) is not None, "it is let in again"
    assert faults == [[], [], [T1]]


def test_a_member_that_was_only_late_is_planned_with_at_once() -> None:
    leader, plan, began = practised()
    done, now = without(leader, plan, began, T1)
    following = next_plan(done)
    assert following.member(T1) is None
    late = ev.Committed(T1, plan.hash, 0, f"digest 1 of {plan.epoch + 1}", 1.0)
    assert kinds(leader.handle(late, now)) == ["peer-let-in"]
    done, _ = without(leader, following, now)
    assert next_plan(done).member(T1) is not None


def test_a_leader_that_stood_still_blames_nobody() -> None:
    leader, plan, now = practised()
    leader.handle(ev.ClockTick(), now)
    done = reported(leader, plan, now)
    for m in plan.members:
        if m.peer != T1:
            digest = f"digest {m.stage} of {plan.epoch + 1}"
            done += leader.handle(ev.Committed(m.peer, plan.hash, 0, digest, 1.0), now)
    now += 30.0
    for peer in EVERYBODY:
        leader.handle(heard(peer), now)
    assert leader.handle(ev.ClockTick(), now) == []
    done = leader.handle(ev.Committed(T1, plan.hash, 0, f"digest 1 of {plan.epoch + 1}", 1.0), now)
    assert "epoch-committed" in kinds(done)
    assert not leader.conduct.left_out(now)


def test_before_rounds_were_measured_a_member_has_its_whole_time() -> None:
    leader, plan = begun(map(heard, EVERYBODY), round_s=30.0, late_s=4.0)
    done, now = without(leader, plan, 3.0, T1)
    assert "epoch-committed" in kinds(done)
    assert now >= 3.0 + 30.0


def test_members_whose_votes_are_needed_have_their_whole_time() -> None:
    """Three of five, which may all be on one busy machine."""
    leader, plan, began = practised()
    reported(leader, plan, began)
    for peer in (E, S1):
        stage = heard(peer).stage
        leader.handle(ev.Committed(peer, plan.hash, 0, f"digest {stage}", 1.0), began)
    for now in (10.0, 20.0, 30.0):
        for peer in EVERYBODY:
            leader.handle(heard(peer), began + now)
        leader.handle(ev.ClockTick(), began + now)
        assert leader.phase is Phase.ROUND
        assert leader._epoch is not None
        assert not leader._epoch.dead


def test_the_only_holder_of_a_stage_is_planned_with_whatever_it_did() -> None:
    """Also where a newcomer is there, which holds nothing yet."""
    leader, plan = begun(map(heard, (E, S1, S2, T1)), round_s=6.0)
    plan = next_plan(commits(leader, plan, 3.0))
    leader.conduct.late(S2, "an older plan", 5.0, 3.0)
    leader.conduct.late(T1, "an older plan", 5.0, 3.0)
    here(leader, 4.0, E, S1, S2, T1)
    leader.handle(heard(T2), 4.0)
    following = next_plan(commits(leader, plan, 4.0))
    assert {m.peer for m in following.members} == {E, S1, S2, T2}
    assert [m.peer for m in following.stage(2) if m.current] == [S2]


def test_who_has_not_finished_an_epoch_listens_first() -> None:
    """Whatever version it says that it holds: nobody waits for its gradients or its parts."""
    leader, plan, now = practised()
    newcomer = PeerId("stage1c")
    leader.handle(ev.Declined(plan.hash, "a reason"), now)
    plan = next_plan(here(leader, now, newcomer))
    assert leader.roster.can_start(newcomer, plan.base)
    assert [m.peer for m in plan.stage(1) if not m.current] == [newcomer]
    assert newcomer not in plan.owners.values()
    plan = next_plan(without(leader, plan, now + 2.0)[0])
    assert newcomer in {m.peer for m in plan.stage(1) if m.current}


def test_members_of_the_plan_before_are_on_no_trial_under_another_leader() -> None:
    """That has led before, and knows itself and one other."""
    second = PeerId("ends2")
    _, plan = begun(map(heard, (E, second, S1, T1, S2)))
    conduct = Conduct()
    conduct.good(second, agrees=True)
    conduct.good(S1, agrees=True)
    leader = Leader(second, facts(), term=plan.term, history=plan, conduct=conduct)
    done = tell(leader, map(heard, (second, S1, T1, S2)), 0.0)
    following = next_plan(done + leader.handle(ev.ClockTick(), 2.0))
    assert [m.peer for m in following.stage(1) if m.current] == [S1, T1]


def test_voters_that_are_needed_are_planned_with_whatever_they_did() -> None:
    more = tuple(PeerId(f"stage{stage}{c}") for stage in (1, 2) for c in "bc")
    leader, plan = begun(map(heard, (E, S1, S2, *more)), late_s=1e9)
    for peer in more:
        leader.conduct.late(peer, "an older plan", 5.0, 3.0)
    following = next_plan(commits(leader, plan, 4.0))
    assert {m.peer for m in following.members} == {E, S1, S2, *more}


def test_a_member_that_never_gets_its_parts_does_not_end_the_epoch() -> None:
    leader, plan, now = practised()
    reported(leader, plan, now)
    for m in plan.members:
        if m.peer != T1:
            digest = f"digest {m.stage} of {plan.epoch + 1}"
            leader.handle(ev.Committed(m.peer, plan.hash, 0, digest, 1.0), now)
    done: list[Any] = []
    for attempt in range(COPIES + 1):
        done += leader.handle(ev.Incomplete(T1, plan.hash, attempt, (), ()), now)
    assert "epoch-committed" in kinds(done)
    assert "epoch-abandoned" not in kinds(done)
    assert next_plan(done).member(T1) is None


def test_an_epoch_is_closed_without_an_ends_peer_that_starts_nothing() -> None:
    second = PeerId("ends2")
    leader, plan = begun(map(heard, (E, second, S1, S2)), epoch_s=60.0, epochs=10_000)
    now = 3.0
    for _ in range(3):
        plan = next_plan(commits_of(leader, plan, now))
        now += 1.0
    mine = [path for path in plan.paths if path.origin == E]
    assert 0 < len(mine) < len(plan.paths)
    began = now
    leader.handle(ev.MicroBatchesReported(E, plan.hash, done_of(mine)), now)
    done: list[Any] = []
    while leader.phase is Phase.RUN:
        now += STEP_S
        for peer in (E, second, S1, S2):
            here(leader, now, peer)
        done += leader.handle(ev.ClockTick(), now)
    assert now - began < 8.0, "the epoch may take 60 s"
    assert kinds(done)[0] == "peer-left-out"
    assert leader.conduct.left_out(now) == {second}
    late = ev.MicroBatchesReported(second, plan.hash, done_of(plan.paths))
    assert kinds(leader.handle(late, now)) == ["peer-let-in"], "it was only slow"


def done_of(paths: Sequence[Path]) -> tuple[MicroBatchDone, ...]:
    return tuple(MicroBatchDone(path.index, True, 1.0, 64) for path in paths)


def commits_of(leader: Leader, plan: Plan, now: float) -> list[Any]:
    """As :func:`commits`, with several ends peers."""
    for origin in {path.origin for path in plan.paths}:
        leader.handle(ev.MicroBatchesReported(origin, plan.hash, done_of(plan.paths)), now)
    return commits(leader, plan, now)


# ------------------------------------------------------------ impossible parameters

THIRD = PeerId("stage1c")


def refused(leader: Leader, plan: Plan, now: float, owner: PeerId, *by: PeerId) -> list[Any]:
    """The owner and all others commit; these members refuse what it gave."""
    done = reported(leader, plan, now)
    for m in plan.members:
        if m.peer in by:
            word: Any = ev.Incomplete(m.peer, plan.hash, 0, (), (owner,), (owner,))
        else:
            word = ev.Committed(m.peer, plan.hash, 0, f"digest {m.stage} bad", 1.0)
        done += leader.handle(word, now)
    return done


def test_the_round_is_repeated_without_an_owner_whose_parts_are_refused() -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1, THIRD)))
    owner = plan.owners["s1"]
    others = [p for p in (S1, T1, THIRD) if p != owner]
    done = refused(leader, plan, 3.0, owner, *others)
    assert [(f.peer, f.weight) for f in done if isinstance(f, ev.CountFault)] == [(owner, 1.0)]
    again = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert set(again.to) == set(others)
    assert owner in again.round.dead
    assert again.round.owners["s1"] in others
    assert again.round.sources == (), "what the owner has committed is not copied"
    for peer in others:
        done += leader.handle(ev.Committed(peer, plan.hash, 1, "digest 1 good", 1.0), 3.5)
    assert "epoch-committed" in kinds(done)
    assert leader.roster.agreed[1] == "digest 1 good"
    assert next_plan(done + leader.handle(ev.ClockTick(), 4.0)).member(owner) is None


def test_an_accomplice_that_has_committed_them_is_not_copied_from_for_long() -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1, THIRD, PeerId("stage1d"))))
    owner = plan.owners["s1"]
    accomplice, *honest = [m.peer for m in plan.stage(1) if m.peer != owner]
    done = refused(leader, plan, 3.0, owner, *honest)
    copy = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert copy.round.sources == (accomplice,)
    done = []
    for peer in honest:
        word = ev.Incomplete(peer, plan.hash, 1, (), (accomplice,), (accomplice,))
        done += leader.handle(word, 3.5)
    again = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert again.round.sources == ()
    assert {owner, accomplice} <= set(again.round.dead)


def test_a_listener_that_took_them_listens_again() -> None:
    listener = dataclasses.replace(heard(THIRD), digest="another")
    leader, plan = begun([*map(heard, (E, S1, S2, T1)), listener])
    late = plan.member(THIRD)
    assert late is not None
    owner = plan.owners["s1"]
    other = T1 if owner == S1 else S1
    assert not late.current
    done = refused(leader, plan, 3.0, owner, other)
    again = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert (again.to, again.round.sources) == ((other,), ())
    assert {owner, THIRD} <= set(again.round.dead)


@pytest.mark.parametrize("believers", [1, 2])
def test_one_member_alone_does_not_put_an_owner_out(believers: int) -> None:
    peers = [S1, T1, THIRD, PeerId("stage1d")][: believers + 2]
    leader, plan = begun(map(heard, (E, S2, *peers)))
    owner = plan.owners["s1"]
    liar = next(p for p in peers if p != owner)
    done = refused(leader, plan, 3.0, owner, liar)
    again = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert (again.to, again.round.dead) == ((liar,), ())
    assert not [a for a in done if isinstance(a, ev.CountFault)]
