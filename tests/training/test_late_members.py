"""Members that do not do their part: the epoch goes on without them, and they are on probation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from node.core.ids import PeerId
from node.core.journey import Path, Plan
from node.epoch import events as ev
from node.epoch.leader.attempt import COPIES
from node.epoch.leader.leader import Leader, Phase
from node.pipeline.events import MicroBatchDone
from tests.training.test_leader import (
    S1,
    S2,
    T1,
    T2,
    E,
    begun,
    commits,
    committed,
    heard,
    kinds,
    next_plan,
    reported,
    the_plan,
)

EVERYBODY = (E, S1, S2, T1, T2)
STEP_S = 0.25


def here(leader: Leader, now: float, *peers: PeerId) -> list[Any]:
    """Heartbeats of these peers, which hold the version that was committed last."""
    base = leader.roster.versions.base
    assert base is not None
    done: list[Any] = []
    for peer in peers:
        note = heard(peer, base, leader.memory.tokens)
        known = leader.roster.versions.agreed.get(note.stage, note.digest)
        done += leader.handle(dataclasses.replace(note, digest=known), now)
    return done


def digest(plan: Plan, stage: int) -> str:
    """Digest of the parameters that an honest replica makes."""
    return f"digest {stage} of {plan.epoch + 1}"


def practised() -> tuple[Leader, Plan, float]:
    """A leader that has seen four quick rounds of five peers, its next plan, and the time."""
    leader, plan = begun(map(heard, EVERYBODY), round_s=30.0, late_s=4.0, epochs=10_000)
    now = 3.0
    for _ in range(4):
        plan = next_plan(commits(leader, plan, now))
        now += 1.0
        assert the_plan(here(leader, now, *EVERYBODY)) is None
    return leader, plan, now


def without(leader: Leader, plan: Plan, now: float, *silent: PeerId) -> tuple[list[Any], float]:
    """All members except `silent` commit at once, and all live. Returns the leader's actions until
    it plans or a minute is over, and the time then."""
    done = reported(leader, plan, now)
    for m in plan.members:
        if m.peer not in silent:
            word = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
            done += leader.handle(word, now)
    end = now + 60.0
    while the_plan(done) is None and now < end:
        now += STEP_S
        done += here(leader, now, *EVERYBODY)
        done += leader.handle(ev.ClockTick(), now)
    return done, now


def epochs(leader: Leader, plan: Plan, now: float, count: int) -> Plan:
    """The plan after ``count`` epochs in which all members do their part."""
    for _ in range(count):
        plan = next_plan(without(leader, plan, now)[0])
    return plan


def listeners(plan: Plan) -> set[PeerId]:
    return {m.peer for m in plan.members if not m.current}


def current(plan: Plan, peer: PeerId) -> bool:
    member = plan.member(peer)
    return member is not None and member.current


def test_an_epoch_goes_on_soon_without_a_silent_member() -> None:
    leader, plan, began = practised()
    done, now = without(leader, plan, began, T1)
    assert now - began < 6.0, "an attempt of the round may take 30 s"
    assert "epoch-committed" in kinds(done)
    assert "peer-on-probation" in kinds(done)
    following = next_plan(done)
    assert (following.epoch, following.member(T1)) == (plan.epoch + 1, None)


def test_nobody_waits_for_a_member_on_probation() -> None:
    leader, plan, now = practised()
    done, now = without(leader, plan, now, T1)
    here(leader, now, T1)
    done, now = without(leader, next_plan(done), now)
    plan = next_plan(done)
    assert listeners(plan) == {T1}, "though it says that it holds the version"
    assert T1 not in plan.owners.values()
    assert T1 not in plan.electorate.voters
    done, at_once = without(leader, plan, now, T1)
    assert at_once == now
    assert "peer-lost" not in kinds(done)
    incomplete = ev.Incomplete(T1, next_plan(done).hash, 0, (), ())
    reported(leader, next_plan(done), now)
    assert leader.handle(incomplete, now) == [], "nothing is repaired for it"


def test_no_plan_includes_a_member_on_probation_where_two_others_work() -> None:
    third = PeerId("stage1c")
    more = (*EVERYBODY, third)
    leader, plan = begun(map(heard, more))
    now = 3.0
    plan = epochs(leader, plan, now, 2)
    here(leader, now, *more)
    leader.conduct.cost(T1, 1.0, now)
    plan = epochs(leader, plan, now, 1)
    assert plan.member(T1) is None, "though it says that it holds the version"
    before = plan.base
    done, at_once = without(leader, plan, now)
    assert at_once == now
    now += leader.conduct.probation_s(T1, now)
    here(leader, now, *more)
    leader.handle(heard(T1, before), now)
    plan = epochs(leader, next_plan(done), now, 1)
    assert T1 in listeners(plan), "it comes back as a newcomer does"
    assert current(epochs(leader, plan, now, 1), T1)


def test_the_last_plan_includes_members_on_probation() -> None:
    third = PeerId("stage1c")
    leader, plan = begun(map(heard, (*EVERYBODY, third)), epochs=3)
    now = 3.0
    plan = epochs(leader, plan, now, 2)
    here(leader, now, *EVERYBODY, third)
    leader.conduct.cost(T1, 1.0, now)
    last = epochs(leader, plan, now, 1)
    assert last.last
    assert last.member(T1) is not None


def test_a_silent_member_takes_less_than_a_tenth_of_the_time() -> None:
    leader, plan, began = practised()
    now = began
    epochs = 0
    faults = []
    while now < began + 600.0:
        done, now = without(leader, plan, now, T1)
        faults += [a.peer for a in done if isinstance(a, ev.CountFault)]
        plan = next_plan(done)
        epochs += 1
        now += 1.0
        here(leader, now, *EVERYBODY)
    assert epochs / (now - began) > 0.9
    assert leader.conduct.probation_s(T1, now) > 60.0
    assert set(faults) <= {T1}


def test_silence_again_and_again_is_a_fault() -> None:
    leader, plan, now = practised()
    faults: list[Any] = []
    for _ in range(3):
        done, now = without(leader, plan, now, T1)
        faults.append([a.peer for a in done if isinstance(a, ev.CountFault)])
        now += leader.conduct.probation_s(T1, now)
        here(leader, now, *EVERYBODY)
        plan = epochs(leader, next_plan(done), now, 2)
        assert current(plan, T1), "its probation is over"
    assert faults == [[], [], [T1]]


def test_a_member_that_was_only_slow_works_in_the_next_plan() -> None:
    leader, plan, began = practised()
    done, now = without(leader, plan, began, T1)
    late = ev.Committed(T1, plan.hash, 0, digest(plan, 1), 1.0)
    assert kinds(leader.handle(late, now)) == ["peer-excused"]
    here(leader, now, T1)
    assert current(epochs(leader, next_plan(done), now, 2), T1)


def test_a_member_that_was_late_is_waited_for_longer_the_next_time() -> None:
    leader, plan, began = practised()
    done, now = without(leader, plan, began, T1)
    leader.handle(ev.Committed(T1, plan.hash, 0, digest(plan, 1), 1.0), now)
    here(leader, now, T1)
    plan = epochs(leader, next_plan(done), now, 2)
    _, later = without(leader, plan, now, T1)
    assert later - now > 1.9 * (now - began)


def test_a_member_that_fell_silent_is_not_blamed() -> None:
    """It may be frozen."""
    leader, plan, began = practised()
    done = reported(leader, plan, began)
    for m in plan.members:
        if m.peer != T1:
            word = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
            done += leader.handle(word, began)
    now = began
    while the_plan(done) is None:
        now += STEP_S
        done += here(leader, now, *(p for p in EVERYBODY if p != T1))
        done += leader.handle(ev.ClockTick(), now)
    assert now - began < 6.0
    assert "peer-on-probation" not in kinds(done)
    here(leader, now, T1)
    assert current(epochs(leader, next_plan(done), now, 2), T1)


def test_a_leader_that_stood_still_blames_nobody() -> None:
    leader, plan, now = practised()
    leader.handle(ev.ClockTick(), now)
    reported(leader, plan, now)
    for m in plan.members:
        if m.peer != T1:
            word = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
            leader.handle(word, now)
    now += 30.0
    assert kinds(leader.handle(ev.ClockTick(), now)) == []
    done = leader.handle(ev.Committed(T1, plan.hash, 0, digest(plan, 1), 1.0), now)
    assert "epoch-committed" in kinds(done)


def test_a_member_that_always_reports_just_in_time_gets_no_more_of_it() -> None:
    leader, plan, now = practised()
    took: list[float] = []
    for _ in range(12):
        began = now
        done = reported(leader, plan, now)
        assert leader.attempt is not None
        while now + STEP_S < leader.attempt.timing.late_at:
            now += STEP_S
            done += here(leader, now, *EVERYBODY)
            done += leader.handle(ev.ClockTick(), now)
            for m in plan.members:
                if m.peer != T1:
                    again = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
                    done += leader.handle(again, now)
        done += leader.handle(ev.Committed(T1, plan.hash, 0, digest(plan, 1), 1.0), now)
        done += here(leader, now, *EVERYBODY)
        done += leader.handle(ev.ClockTick(), now)
        took.append(now - began)
        plan = next_plan(done)
    assert max(took) < 6.0


@pytest.mark.parametrize("stage", ["run", "round"])
def test_reports_that_are_repeated_give_no_member_more_time(stage: str) -> None:
    leader, plan, began = practised()
    words: list[Any] = []
    if stage == "round":
        reported(leader, plan, began)
        for m in plan.members:
            word = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
            words += [word] * (m.peer != T1)
    else:
        words.append(ev.MicroBatchesReported(T1, plan.hash, ()))
    for word in words:
        leader.handle(word, began)
    assert leader.attempt is not None
    last = leader.attempt.timing.reported
    for word in words:
        leader.handle(word, began + 2.0)
    assert leader.attempt.timing.reported == last


def test_a_newcomer_that_never_commits_takes_no_longer_than_rounds_with_new_owners() -> None:
    leader, plan, now = practised()
    for _ in range(2):
        assert leader.attempt is not None
        leader.attempt.steady = False
        done = commits(leader, plan, now)
        now += 1.0
        plan = the_plan(done) or next_plan(here(leader, now, *EVERYBODY))
    assert leader.attempt is not None
    leader.attempt.steady = False
    done, later = without(leader, plan, now, T1)
    assert later - now < 6.0, "an attempt of the round may take 30 s"
    assert "epoch-committed" in kinds(done)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_member_is_not_late_before_the_deadline_that_it_was_given(attempt: int) -> None:
    """It may wait that long for an owner that gives it nothing, in a round with new owners or in a
    repeated one."""
    leader, plan, now = practised()
    assert leader.attempt is not None
    leader.attempt.steady = attempt == 1
    done = reported(leader, plan, now)
    for m in plan.members:
        if m.peer != T1:
            word = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
            done += leader.handle(word, now)
    if attempt:
        done += leader.handle(ev.Incomplete(T1, plan.hash, 0, (), ()), now)
    notes = [a for a in done if isinstance(a, ev.SendRound) and T1 in a.to]
    assert notes[-1].round.attempt == attempt
    until = now + notes[-1].round.deadline_s
    assert until > now + 20.0
    while now < until:
        assert "peer-on-probation" not in kinds(done)
        now += STEP_S
        done += here(leader, now, *EVERYBODY)
        done += leader.handle(ev.ClockTick(), now)
    _, late = without(leader, plan, now, T1)
    assert late < until + 20.0


def test_before_rounds_were_measured_a_member_has_its_whole_time() -> None:
    leader, plan = begun(map(heard, EVERYBODY), round_s=30.0, late_s=4.0)
    done, now = without(leader, plan, 3.0, T1)
    assert "epoch-committed" in kinds(done)
    assert now >= 3.0 + 30.0


def test_members_whose_votes_are_needed_have_their_whole_time() -> None:
    """Three votes of five are needed, and all three may be on one busy machine."""
    leader, plan, began = practised()
    reported(leader, plan, began)
    for peer in (E, S1):
        stage = heard(peer).stage
        leader.handle(ev.Committed(peer, plan.hash, 0, digest(plan, stage), 1.0), began)
    for now in (10.0, 20.0, 30.0):
        here(leader, began + now, *EVERYBODY)
        leader.handle(ev.ClockTick(), began + now)
        assert leader.phase is Phase.ROUND
        assert leader.attempt is not None
        assert not leader.attempt.dead


def test_members_on_probation_whose_votes_are_needed_are_waited_for() -> None:
    more = [PeerId(f"stage{stage}{c}") for stage in (1, 2) for c in "bc"]
    leader, plan = begun(map(heard, (E, S1, S2, *more)), late_s=1e9)
    for peer in more:
        leader.conduct.cost(peer, 10.0, 3.0)
    plan = next_plan(commits(leader, plan, 4.0))
    assert listeners(plan) == set(more)
    done = reported(leader, plan, 5.0)
    for m in sorted(plan.members, key=lambda m: m.peer in more):
        assert leader.phase is Phase.ROUND
        word = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
        done = leader.handle(word, 5.0)
    assert "epoch-committed" in kinds(done), "three of seven cannot commit"
    plan = next_plan(done)
    assert set(plan.electorate.voters) == {E, S1, S2}


@pytest.mark.parametrize("newcomer", [False, True])
def test_the_only_holder_of_a_stage_works_whatever_it_did(newcomer: bool) -> None:
    """This holds also with a newcomer there, which holds nothing yet."""
    leader, plan = begun(map(heard, (E, S1, S2, T1)), round_s=6.0)
    plan = next_plan(commits(leader, plan, 3.0))
    leader.conduct.cost(S2, 5.0, 3.0)
    here(leader, 4.0, E, S1, S2, T1)
    if newcomer:
        leader.handle(heard(T2), 4.0)
    following = next_plan(commits(leader, plan, 4.0))
    assert [m.peer for m in following.stage(2) if m.current] == [S2]


def test_a_member_that_never_gets_its_parts_does_not_end_the_epoch() -> None:
    leader, plan, now = practised()
    reported(leader, plan, now)
    here(leader, now, *EVERYBODY)
    for m in plan.members:
        if m.peer != T1:
            word = ev.Committed(m.peer, plan.hash, 0, digest(plan, m.stage), 1.0)
            leader.handle(word, now)
    done: list[Any] = []
    for attempt in range(COPIES + 1):
        done += leader.handle(ev.Incomplete(T1, plan.hash, attempt, (), ()), now)
    assert "epoch-committed" in kinds(done)
    assert "epoch-abandoned" not in kinds(done)
    assert leader.conduct.on_probation(now) == {T1}


def done_of(paths: Sequence[Path]) -> tuple[MicroBatchDone, ...]:
    return tuple(MicroBatchDone(path.index, True, 1.0, 64) for path in paths)


SECOND = PeerId("ends2")


def half_done() -> tuple[Leader, Plan, float]:
    """A leader of two ends peers, three epochs after the start: it has reported all micro-batches
    of its own in this plan, at this time. An epoch may take 60 s."""
    everybody = (E, SECOND, S1, S2)
    leader, plan = begun(
        map(heard, everybody), epoch_s=60.0, late_s=4.0, epochs=10_000, target_batch=16
    )
    now = 3.0
    for _ in range(3):
        for origin in (E, SECOND):
            results = done_of([path for path in plan.paths if path.origin == origin])
            leader.handle(ev.MicroBatchesReported(origin, plan.hash, results), now)
        plan = next_plan(commits(leader, plan, now))
        now += 1.0
    mine = [path for path in plan.paths if path.origin == E]
    assert 0 < len(mine) < len(plan.paths)
    leader.handle(ev.MicroBatchesReported(E, plan.hash, done_of(mine)), now)
    return leader, plan, now


def ticks(leader: Leader, now: float, until: float) -> tuple[list[Any], float]:
    """Actions of the leader while it hears everybody and the micro-batches go on, at most until
    then, and the time."""
    done: list[Any] = []
    while leader.phase is Phase.RUN and now < until:
        now += STEP_S
        here(leader, now, E, SECOND, S1, S2)
        done += leader.handle(ev.ClockTick(), now)
    return done, now


def test_an_epoch_is_closed_without_an_ends_peer_that_starts_nothing() -> None:
    leader, plan, began = half_done()
    done, now = ticks(leader, began, began + 60.0)
    assert now - began < 8.0, "the epoch may take 60 s"
    assert kinds(done)[0] == "peer-on-probation"
    assert leader.conduct.on_probation(now) == {SECOND}
    late = ev.MicroBatchesReported(SECOND, plan.hash, done_of(plan.paths))
    assert kinds(leader.handle(late, now)) == ["peer-excused"], "it was only slow"


def test_an_ends_peer_that_reports_some_micro_batches_is_not_late() -> None:
    leader, plan, began = half_done()
    first, *rest = (path for path in plan.paths if path.origin == SECOND)
    assert rest
    leader.handle(ev.MicroBatchesReported(SECOND, plan.hash, done_of([first])), began)
    done, now = ticks(leader, began, began + 50.0)
    assert leader.phase is Phase.RUN, "a peer on the way may hold the others up"
    assert "peer-on-probation" not in kinds(done)
    assert not leader.conduct.on_probation(now)
    _, now = ticks(leader, now, began + 90.0)
    assert leader.phase is not Phase.RUN, "the deadline of the epoch"
    assert not leader.conduct.on_probation(now)


# ------------------------------------------------------------ impossible parameters

THIRD = PeerId("stage1c")


def refused(leader: Leader, plan: Plan, now: float, owner: PeerId, *by: PeerId) -> list[Any]:
    """The owner and all others commit; the members ``by`` refuse its parameters."""
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
    assert leader.conduct.on_probation(3.0) == {owner}
    again = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert set(again.to) == set(others)
    assert owner in again.round.dead
    assert again.round.owners["s1"] in others
    assert again.round.sources == (), "what the owner has committed is not copied"
    for peer in others:
        done += leader.handle(ev.Committed(peer, plan.hash, 1, "digest 1 good", 1.0), 3.5)
    assert "epoch-committed" in kinds(done)
    assert leader.roster.versions.agreed[1] == "digest 1 good"


def test_members_that_took_them_make_them_again() -> None:
    """Among the members are an accomplice, and a listener that cannot tell."""
    more = [heard(THIRD), heard(PeerId("stage1d"))]
    listener = dataclasses.replace(heard(PeerId("stage1e")), digest="another")
    leader, plan = begun([*map(heard, (E, S1, S2, T1)), *more, listener])
    assert listeners(plan) == {listener.peer}
    owner = plan.owners["s1"]
    accomplice, *honest = [m.peer for m in plan.stage(1) if m.current and m.peer != owner]
    done = refused(leader, plan, 3.0, owner, *honest)
    again = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert (set(again.to), again.round.sources) == (set(honest), ())
    assert {owner, accomplice, listener.peer} <= set(again.round.dead)
    assert leader.conduct.on_probation(3.0) == {owner}
    done = committed(leader, plan, 3.5, *honest, attempt=1)
    assert "epoch-committed" in kinds(done)
    assert "digest-mismatch" not in kinds(done), "what the others committed is forgotten"


@pytest.mark.parametrize(("holds", "put_out"), [((), True), (("s1",), False), (("s2",), True)])
def test_members_that_hold_parts_of_an_accused_owner_believe_it(
    holds: tuple[str, ...], put_out: bool
) -> None:
    fourth = PeerId("stage1d")
    fifth = PeerId("stage1e")
    leader, plan = begun(map(heard, (E, S2, S1, T1, THIRD, fourth, fifth)))
    owner = plan.owners["s1"]
    first, second, *others = [m.peer for m in plan.stage(1) if m.peer != owner]
    reported(leader, plan, 3.0)
    committed(leader, plan, 3.0, E, S2)
    for peer in (first, second):
        leader.handle(ev.Incomplete(peer, plan.hash, 0, (), (owner,), (owner,)), 3.0)
    for peer in (owner, *others):
        leader.handle(ev.Incomplete(peer, plan.hash, 0, holds, ()), 3.0)
    assert leader.conduct.on_probation(3.0) == ({owner} if put_out else set())


@pytest.mark.parametrize("believers", [1, 2])
def test_one_member_alone_does_not_put_an_owner_out(believers: int) -> None:
    peers = [S1, T1, THIRD, PeerId("stage1d")][: believers + 2]
    leader, plan = begun(map(heard, (E, S2, *peers)))
    owner = plan.owners["s1"]
    liar = next(p for p in peers if p != owner)
    done = refused(leader, plan, 3.0, owner, liar)
    again = [a for a in done if isinstance(a, ev.SendRound)][-1]
    assert (again.to, again.round.dead) == ((liar,), ())
    assert not leader.conduct.on_probation(3.0)


@pytest.mark.parametrize("older", ["owner", "other"])
def test_of_two_replicas_the_one_stays_that_did_more_epochs(older: str) -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1)))
    owner = plan.owners["s1"]
    other = T1 if owner == S1 else S1
    stays, goes = (owner, other) if older == "owner" else (other, owner)
    leader.conduct.good(stays)
    done = refused(leader, plan, 3.0, owner, other)
    assert leader.conduct.on_probation(3.0) == {goes}
    if stays == other:
        again = [a for a in done if isinstance(a, ev.SendRound)][-1]
        assert (again.to, again.round.sources) == ((other,), ())
        done += leader.handle(ev.Committed(other, plan.hash, 1, "digest 1 good", 1.0), 3.5)
    assert "epoch-committed" in kinds(done)


# ------------------------------------------------------------ the pace of the others


def test_a_member_has_a_quarter_more_time_than_the_others_took() -> None:
    leader, plan, began = practised()
    done = reported(leader, plan, began)
    others = tuple(m.peer for m in plan.members if m.peer != T1)
    now = began
    while now < began + 12.25:
        now += STEP_S
        here(leader, now, *EVERYBODY)
        if now == began + 10.0:
            done += committed(leader, plan, now, *others)
        done += leader.handle(ev.ClockTick(), now)
    assert "peer-on-probation" not in kinds(done)
    here(leader, now, *EVERYBODY)
    done = leader.handle(ev.ClockTick(), began + 12.5)
    assert kinds(done)[:2] == ["peer-on-probation", "peer-lost"]
