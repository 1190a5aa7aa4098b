"""The leader's choices one by one: the history that goes on, its requests, the stages of peers that
leave or move."""

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import Rules, mark
from node.core.errors import OutOfResources, Refused
from node.core.ids import ENDS, PeerId, short
from node.core.journey import Plan, Version, lineage_after
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.facts import RunFacts
from node.epoch.leader.balance import COMING_S, OUTGROWN_S, OUTGROWN_TIMES
from node.epoch.leader.leader import Leader, Phase
from node.epoch.leader.starting_point import COURTESY_S, LOST_S
from node.epoch.plan_context import PastPlan, PlanContext
from node.epoch.waiting import Lack
from node.pipeline.events import MicroBatchDone
from node.scheduler.costs import NOTHING, LinkCost, Measured
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings
from tests.training.run_facts import facts

E, S1, S2, T1, T2 = (PeerId(p) for p in ("ends", "stage1a", "stage2a", "stage1b", "stage2b"))
A = Version(5, "aa" * 16)
B = Version(7, "bb" * 16)
YOUNG = Version(0)


def heard(
    peer: PeerId,
    at: Version = YOUNG,
    tokens: int = 0,
    *,
    speed: float = 1.0,
    costs: Measured = NOTHING,
    room: int = 0,
    **kw: Any,
) -> ev.Heartbeat:
    stage = 0 if peer.startswith("ends") else int(peer[5])
    capacity = ev.Capacity(speed, room, costs=costs)
    return ev.Heartbeat(peer, stage, at, f"digest {stage} {at}", capacity, tokens=tokens, **kw)


def tell(leader: Leader, events: Iterable[ev.LeaderEvent], now: float) -> list[Any]:
    return [a for event in events for a in leader.handle(event, now)]


def committed(
    leader: Leader, plan: Plan, now: float, *peers: PeerId, attempt: int = 0
) -> list[Any]:
    """Let these members commit, all if none is named; returns the leader's actions."""
    words = (
        ev.Committed(m.peer, plan.hash, attempt, f"digest {m.stage} next", 1.0)
        for m in plan.members
        if not peers or m.peer in peers
    )
    return tell(leader, words, now)


def led(facts: RunFacts, notes: Iterable[ev.Heartbeat]) -> Leader:
    """A leader that has heard these notes at the time 0. Its checkpoints have the versions in them
    that `facts` recalls."""
    leader = Leader(E, facts)
    heard_first = list(notes)
    known = sorted({v for n in heard_first for v in (n.at, *n.reachable)})
    kept = [(v, context) for v in known if (context := facts.make.recall(v)) is not None]
    leader.handle(ev.ContextsKept(tuple(kept)), 0.0)
    tell(leader, heard_first, 0.0)
    return leader


def heir(me: PeerId, facts: RunFacts, history: Plan, **about: Any) -> Leader:
    """A leader that takes over after this plan."""
    return Leader(me, facts, history=PastPlan(history), term=history.term, **about)


def the_plan(actions: list[Any]) -> Plan | None:
    return next((a.plan for a in actions if isinstance(a, ev.SendPlan)), None)


def next_plan(actions: list[Any]) -> Plan:
    plan = the_plan(actions)
    assert plan is not None
    return plan


def waits(leader: Leader, now: float) -> str:
    """Reason for which the leader waits; fails if there is a plan."""
    assert the_plan(leader.handle(ev.ClockTick(), now)) is None
    return str(leader.gathering.waiting or "")


def lacks(leader: Leader, now: float) -> Lack:
    """Kind of lack for which the leader waits; fails if there is a plan."""
    waits(leader, now)
    assert leader.gathering.waiting is not None
    return leader.gathering.waiting.lack


def kinds(actions: Iterable[Any]) -> list[str]:
    """Kinds of the recorded facts among the actions."""
    return [a.kind for a in actions if isinstance(a, ev.RecordFact)]


def begun(notes: Iterable[ev.Heartbeat] = (), **kw: Any) -> tuple[Leader, Plan]:
    """A leader that has heard these notes, or one peer of each stage, and its first plan."""
    leader = led(facts(**kw), notes or [heard(E), heard(S1), heard(S2)])
    return leader, next_plan(leader.handle(ev.ClockTick(), 2.0))


def reported(leader: Leader, plan: Plan, now: float) -> list[Any]:
    """Report the results of all micro-batches and return the leader's actions."""
    rows: dict[PeerId, list[MicroBatchDone]] = {}
    for p in plan.paths:
        rows.setdefault(p.origin, []).append(MicroBatchDone(p.index, True, 1.0, 64))
    words = (ev.MicroBatchesReported(e, plan.hash, tuple(done)) for e, done in rows.items())
    return tell(leader, words, now)


def commits(
    leader: Leader, plan: Plan, now: float, between: Iterable[ev.Heartbeat] = ()
) -> list[Any]:
    """Let every member do its part, with `between` heard before the last member's; returns the
    leader's actions."""
    reported(leader, plan, now)
    assert leader.phase is Phase.ROUND
    done = []
    for m in plan.members:
        done += tell(leader, between if m == plan.members[-1] else (), now)
        done += leader.handle(
            ev.Committed(m.peer, plan.hash, 0, f"digest {m.stage} next", 1.0), now
        )
    return done


def recalled(version: Version) -> PlanContext:
    return PlanContext((SampleClass(0, 0, 40),), {}, 0)


def both_sides(tokens_a: int, tokens_b: int) -> list[ev.Heartbeat]:
    """Heartbeats of two sides: each side covers every block stage, and has one ends peer."""
    return [
        heard(E, A, tokens_a),
        heard(PeerId("ends2"), B, tokens_b),
        heard(S1, A, tokens_a),
        heard(S2, A, tokens_a),
        heard(T1, B, tokens_b),
        heard(T2, B, tokens_b),
    ]


@pytest.mark.parametrize(
    ("tokens_a", "tokens_b", "wins"), [(900, 800, A), (800, 900, B), (900, 900, B)]
)
def test_of_two_histories_the_one_with_more_tokens_goes_on(
    tokens_a: int, tokens_b: int, wins: Version
) -> None:
    _, plan = begun(both_sides(tokens_a, tokens_b), recall=recalled)
    assert plan.base == wins
    current = {m.peer for m in plan.members if m.current}
    assert current == {n.peer for n in both_sides(0, 0) if n.at == wins}
    assert {h.peer for p in plan.paths for h in p.journey} <= current
    assert set(plan.owners.values()) <= current


def test_stages_of_different_histories_make_no_version() -> None:
    lost = [heard(E, A, 500), heard(S1, Version(5, "bb" * 16), 600), heard(S2, A, 500)]
    leader = led(facts(recall=recalled, patience_s=5.0, late_s=1e9), lost)
    assert lacks(leader, 30.0) is Lack.COMMON
    text = str(leader.gathering.waiting)
    assert text.endswith("nobody at stage 1 has epoch 5 as the others have it")


def test_peers_of_a_richer_side_get_time_to_bring_the_rest() -> None:
    known = facts(recall=recalled, patience_s=10.0, late_s=1e9)
    leader = led(known, [n for n in both_sides(500, 900) if n.peer != T2])
    assert "more tokens" in waits(leader, 5.0)
    done = leader.handle(heard(T2, B, 900), 6.0) + leader.handle(ev.ClockTick(), 8.0)
    assert next_plan(done).base == B


def test_a_claim_of_more_tokens_holds_nobody_up_for_long() -> None:
    leader, plan = begun(patience_s=10.0, late_s=1e9, epochs=10_000)
    liar = heard(T1, Version(2**52, "cc" * 16), 2**52)
    leader.handle(liar, 2.5)
    assert the_plan(commits(leader, plan, 3.0)) is None, "it is waited for"
    assert the_plan(leader.handle(ev.ClockTick(), 12.9)) is None
    plan = next_plan(leader.handle(ev.ClockTick(), 13.1))
    assert plan.base.epoch == 1
    assert not next(m for m in plan.members if m.peer == T1).current
    now = 14.0
    waited = 0
    while now < 3.0 + 20 * COURTESY_S:
        following = the_plan(commits(leader, plan, now, [liar]))
        if following is None:
            waited += 1
            now += 10.0
            following = next_plan(leader.handle(ev.ClockTick(), now))
        plan = following
        now = now + 15.0
    assert waited == 4, "after 1, 3, 7 and 15 minutes: twice as long each time"


def test_what_an_abandoned_epoch_left_behind_is_no_richer_side() -> None:
    leader, plan = begun()
    reported(leader, plan, 2.5)
    leader.handle(ev.Committed(S1, plan.hash, 0, "d", 1.0), 2.6)
    leader.handle(ev.Unreachable(S2), 2.7)
    assert leader.phase is Phase.GATHER
    adopted = heard(S1, Version(1, lineage_after(plan, ())), 128, reachable=(YOUNG,))
    again = next_plan(tell(leader, [adopted, heard(S2)], 3.0) + leader.handle(ev.ClockTick(), 4.5))
    assert (again.base, again.member(S1).current) == (YOUNG, True)


def differs(leader: Leader, plan: Plan, now: float) -> list[Any]:
    """Let every member do its part, with different parameters at the two members of stage 1;
    returns the leader's actions until a moment later."""
    reported(leader, plan, now)
    done = []
    for m in plan.members:
        digest = m.peer if m.stage == 1 else f"digest {m.stage} next"
        done += leader.handle(ev.Committed(m.peer, plan.hash, 0, digest, 1.0), now)
        held = heard(m.peer, Version(1, lineage_after(plan, ())), 128)
        done += tell(
            leader, [dataclasses.replace(held, digest=digest, reachable=(YOUNG,))], now + 1.0
        )
    return done + leader.handle(ev.ClockTick(), now + 2.0)


def test_of_two_differing_replicas_one_listens_after_two_tries() -> None:
    leader, plan = begun([heard(E), heard(S1), heard(T1), heard(S2)])
    leader.conduct.good(T1)
    done = differs(leader, plan, 3.0)
    plan = next_plan(done)
    assert kinds(done)[:2] == ["digest-mismatch", "epoch-abandoned"]
    assert plan.base == YOUNG, "who stands at what was undone is no richer side"
    assert all(m.current for m in plan.members), "a bit may have flipped once"
    assert plan.digests[1] == heard(S1).digest
    done = differs(leader, plan, 7.0)
    plan = next_plan(done)
    assert kinds(done)[:3] == ["digest-mismatch", "peer-on-probation", "epoch-abandoned"]
    assert plan.base == YOUNG
    assert [(m.peer, m.current) for m in plan.stage(1)] == [(S1, False), (T1, True)]
    assert leader.repeats.mismatches == 2
    done = differs(leader, plan, 11.0)
    assert "epoch-committed" in kinds(done), "nobody waits for it, and it has no say"
    assert leader.roster.versions.agreed[1] == T1


def test_a_difference_in_a_later_epoch_is_first_taken_for_an_accident() -> None:
    leader, plan = begun([heard(E), heard(S1), heard(T1), heard(S2)])
    differs(leader, plan, 3.0)
    for now in (7.0, 8.0):
        plan = next_plan(commits(leader, leader.plan or plan, now))
    for now, blamed in ((9.0, False), (10.0, True)):
        reported(leader, plan, now)
        words = (ev.Committed(m.peer, plan.hash, 0, f"of {m.peer}", 1.0) for m in plan.members)
        done = tell(leader, words, now)
        assert "epoch-abandoned" in kinds(done)
        assert ("peer-on-probation" in kinds(done)) is blamed
        at = plan.base
        notes = (heard(m.peer, at, plan.tokens) for m in plan.members)
        here = [dataclasses.replace(n, digest=plan.digests[n.stage]) for n in notes]
        plan = next_plan(tell(leader, here, now) + leader.handle(ev.ClockTick(), now + 0.5))
        assert plan.base == at


@pytest.mark.parametrize("liar", [S1, T1])
def test_replicas_that_differ_cost_a_bounded_number_of_epochs(liar: PeerId) -> None:
    """One of two lies in every epoch: in the end one of the two listens nearly all the time."""
    leader, plan = begun([heard(E), heard(S1), heard(T1), heard(S2)], epochs=10_000)
    now = 3.0
    abandoned = 0
    committed = 0
    for _ in range(300):
        base = plan.base
        reported(leader, plan, now)
        done: list[Any] = []
        for m in plan.members:
            digest = f"lie {now}" if m.peer == liar else f"truth {m.stage} {base.epoch + 1}"
            done += leader.handle(ev.Committed(m.peer, plan.hash, 0, digest, 1.0), now + 1.0)
        abandoned += kinds(done).count("epoch-abandoned")
        committed += kinds(done).count("epoch-committed")
        now += 2.0
        here = leader.roster.versions.base or base
        for peer in (E, S1, T1, S2):
            stage = heard(peer).stage
            known = leader.roster.versions.agreed.get(stage, "")
            note = dataclasses.replace(heard(peer, here, leader.memory.tokens), digest=known)
            done += leader.handle(note, now)
        plan = next_plan(done + leader.handle(ev.ClockTick(), now))
    assert abandoned <= 10
    assert committed == 300 - abandoned


def test_an_undone_version_counts_where_nobody_can_go_back() -> None:
    """The one holder of the version before at stage 2 died in the epoch; its mate listened."""
    late = heard(T2, A, orphan=True)
    leader, plan = begun([heard(E), heard(S1), heard(T1), heard(S2), late], patience_s=10.0)
    assert not plan.member(T2).current
    reported(leader, plan, 3.0)
    for m in sorted(plan.members, key=lambda m: -m.stage):
        digest = m.peer if m.stage == 1 else "same"
        leader.handle(ev.Committed(m.peer, plan.hash, 0, digest, 1.0), 4.0)
        if m.peer == T2:
            leader.handle(ev.Unreachable(S2), 4.0)
    assert (leader.phase, leader.repeats.mismatches) == (Phase.GATHER, 1)
    assert lacks(leader, 5.0) is Lack.COMMON
    assert lacks(leader, 13.0) is Lack.COMMON, "who can go back may come"
    done = leader.handle(ev.ClockTick(), 15.5)
    following = next_plan(done)
    assert kinds(done)[0] == "undone-counted"
    assert (following.base, following.tokens) == (Version(1, lineage_after(plan, ())), 128)
    assert [m.peer for m in following.members if m.stage and m.current] == [S1, T2]


def test_what_was_copied_is_no_witness_for_it() -> None:
    three = PeerId("stage1c")
    leader, plan = begun([heard(E), heard(S1), heard(T1), heard(three), heard(S2)])
    reported(leader, plan, 3.0)
    for peer, digest in ((E, "e"), (S2, "s"), (S1, "wrong"), (T1, "right")):
        leader.handle(ev.Committed(peer, plan.hash, 0, digest, 1.0), 3.0)
    (copy,) = (
        a
        for a in leader.handle(ev.Incomplete(three, plan.hash, 0, (), ()), 3.0)
        if isinstance(a, ev.SendRound)
    )
    assert copy.round.digest == "wrong"
    done = leader.handle(ev.Committed(three, plan.hash, 1, "wrong", 1.0), 3.0)
    assert kinds(done) == ["digest-mismatch", "epoch-abandoned"]


def test_a_new_leader_asks_for_the_plan_behind_the_version() -> None:
    _, plan = begun()
    dropped = (plan.paths[0].index,)
    at = Version(1, lineage_after(plan, dropped))
    newcomer = PeerId("ends0")
    leader = Leader(newcomer, facts())
    there = [heard(newcomer), *(heard(p, at, 64) for p in (E, S1, S2))]
    actions = tell(leader, there, 0.0) + leader.handle(ev.ClockTick(), 2.0)
    assert [a for a in actions if isinstance(a, ev.Recall)] == [ev.Recall(at, (E, S1, S2))]
    assert the_plan(actions) is None
    assert the_plan(leader.handle(ev.Recalled(Version(9, "ee" * 16), plan, ()), 2.1)) is None, (
        "it asked for another"
    )
    following = next_plan(leader.handle(ev.Recalled(at, plan, dropped), 2.2))
    assert (following.base, following.tokens) == (at, 64)
    assert following.cursor == (SampleClass(0, 0, 8, plan.paths[0].samples),), (
        "what did not count is given back"
    )


SECOND = PeerId("ends2")


def successor(*reported: PeerId) -> Leader:
    """The leader that takes over from E, after these peers have reported to it at the time 0."""
    _, plan = begun([heard(p) for p in (E, SECOND, S1, T1, S2, T2)])
    leader = Leader(SECOND, facts(late_s=4.0), term=plan.term, history=PastPlan(plan))
    tell(leader, map(heard, reported), 0.0)
    return leader


def test_a_leader_that_takes_over_plans_as_soon_as_all_others_have_reported() -> None:
    leader = successor(SECOND, S1, T1, S2)
    assert waits(leader, 0.1) == "more peers"
    plan = next_plan(leader.handle(heard(T2), 0.2))
    assert {m.peer for m in plan.members} == {SECOND, S1, T1, S2, T2}


def test_a_leader_that_takes_over_waits_a_moment_for_one_that_does_not_report() -> None:
    leader = successor(SECOND, S1, T1, S2)
    plan = next_plan(leader.handle(ev.ClockTick(), 1.0))
    assert {m.peer for m in plan.members} == {SECOND, S1, T1, S2}


def test_a_leader_that_stood_still_hears_its_voters_again_before_it_plans() -> None:
    leader, plan = begun([heard(p) for p in (E, S1, T1, S2, T2)], late_s=4.0)
    leader.handle(ev.Declined(plan.hash, "no reason"), 2.1)
    assert waits(leader, 60.0).startswith("more than half of the voters (1 of 5 are here")
    assert the_plan(tell(leader, map(heard, (E, S1)), 60.1)) is None
    tell(leader, [heard(S2)], 60.2)
    assert next_plan(leader.handle(ev.ClockTick(), 60.3)).term == plan.term + 1


@pytest.mark.parametrize("answer", ["forged", "nothing", "silence"])
def test_a_forgotten_history_is_guessed_with_a_warning(answer: str) -> None:
    at = Version(3, "ab" * 16)
    _, other = begun()
    leader = led(facts(), [heard(E), *(heard(p, at, 64) for p in (S1, S2, PeerId("ends2")))])
    leader.handle(ev.ClockTick(), 2.0)
    if answer == "silence":
        done = leader.handle(ev.ClockTick(), 2.0 + facts().waits.recall_s)
    else:
        done = leader.handle(ev.Recalled(at, other if answer == "forged" else None, ()), 2.5)
    plan = next_plan(done)
    assert (plan.base, plan.cursor) == (at, (SampleClass(0, 0, 24),))
    assert [a.kind for a in done if isinstance(a, ev.RecordFact) and a.level == "warning"] == [
        "history-lost"
    ]


def test_a_peer_that_leaves_is_planned_without_and_stays_a_donor() -> None:
    leader, plan = begun()
    leader.handle(heard(T1), 2.1)
    plan = next_plan(commits(leader, plan, 3.0))
    owner = plan.owners["s1"]
    other = T1 if owner == S1 else S1
    at = leader.roster.versions.base
    assert at not in (None, YOUNG)
    leader.handle(dataclasses.replace(heard(other, at, 128), digest="digest 1 next"), 3.1)
    leader.handle(
        dataclasses.replace(heard(owner, at, 128), digest="digest 1 next", leaving=True), 3.2
    )
    following = next_plan(commits(leader, plan, 4.0))
    assert following.member(owner) is None
    assert (following.owners["s1"], following.moved) == (other, {"s1": owner})
    assert kinds(leader.handle(ev.Unreachable(owner), 4.5)) == ["peer-left"]


def test_a_peer_that_lacks_parts_copies_from_those_who_agree() -> None:
    """A peer with another digest, asked for the majority's parameters, would be blamed for its
    honest answer."""
    more = [PeerId(f"stage1{c}") for c in "bcd"]
    leader, plan = begun([heard(p) for p in (E, S1, S2, *more)])
    reported(leader, plan, 3.0)
    for peer, digest in zip((*more[1:], S1), ("most", "most", "other"), strict=True):
        leader.handle(ev.Committed(peer, plan.hash, 0, digest, 1.0), 3.5)
    done = leader.handle(ev.Incomplete(more[0], plan.hash, 0, (), ()), 3.5)
    (again,) = [a for a in done if isinstance(a, ev.SendRound)]
    said = again.round
    assert (again.to, said.digest, said.sources) == ((more[0],), "most", tuple(more[1:]))


def test_a_resigning_leader_finishes_its_epoch_and_stops() -> None:
    leader, plan = begun()
    leader.handle(ev.Resigning(True), 2.0)
    assert not leader.idle
    assert the_plan(commits(leader, plan, 3.0)) is None
    assert leader.idle
    assert leader.plan is None
    assert the_plan(leader.handle(ev.ClockTick(), 9.0)) is None


LOPSIDED = (S1, S2, *(PeerId(f"stage1{c}") for c in "bcd"))


def test_a_peer_moves_to_the_bottleneck_stage() -> None:
    notes = map(heard, (E, *LOPSIDED))
    leader, plan = begun(notes, rebalance_every_s=10.0, download_s=1.0, late_s=1e9)
    moves: list[ev.RequestMove] = []
    for i in range(12):
        now = 3.0 + 5 * i
        closes = reported(leader, plan, now)
        moves += [a for a in closes if isinstance(a, ev.RequestMove)]
        plan = next_plan(commits(leader, plan, now))
    # Nobody obeys here, so another peer is asked at every look, never the same twice, and never the
    # last of its stage.
    assert {m.stage for m in moves} == {ENDS, 2}
    assert all(m.peer.startswith("stage1") for m in moves)
    assert len({m.peer for m in moves}) == len(moves)
    assert 2 <= len(moves) <= 6


def test_members_move_to_the_ends_and_from_them() -> None:
    settings: dict[str, Any] = {"rebalance_every_s": 2.0, "download_s": 1.0, "late_s": 1e9}
    leader, plan = begun(map(heard, (E, *LOPSIDED)), **settings)
    plan = next_plan(commits(leader, plan, 3.0))
    assert sorted(stage for _, stage in moved(reported(leader, plan, 6.0))) == [ENDS, 2]

    ends = [PeerId(f"ends{c}") for c in "bcd"]
    leader, plan = begun(map(heard, (E, S1, S2, *ends)), **settings)
    plan = next_plan(commits(leader, plan, 3.0))
    asked = moved(reported(leader, plan, 6.0))
    assert sorted(stage for _, stage in asked) == [1, 2]
    assert {peer for peer, _ in asked} < set(ends), "the leader stays, and another beside it"


def moved(actions: Iterable[Any]) -> list[tuple[PeerId, int]]:
    return [(a.peer, a.stage) for a in actions if isinstance(a, ev.RequestMove)]


def test_newcomers_are_dealt_to_the_bottleneck_stage_as_the_epoch_closes() -> None:
    leader, plan = begun(rebalance_every_s=10.0, download_s=1.0, late_s=1e9)
    new = [PeerId(f"stage1{c}") for c in "bcd"]
    ends = [PeerId(f"ends{c}") for c in "bcd"]
    notes = map(heard, [*new, *ends])
    assert not moved(tell(leader, notes, 2.5)), "the epoch is under way"
    closes = reported(leader, plan, 3.0)
    assert [stage for _, stage in moved(closes)] == [2, 2]
    assert {peer for peer, _ in moved(closes)} <= {*new, *ends}
    assert kinds(closes).count("move-asked") == 2


def test_an_epoch_that_few_began_begins_again_with_the_many_that_came() -> None:
    settings: dict[str, Any] = {"late_s": 1e9, "epoch_s": 1e6}
    leader, plan = begun(**settings)
    wave = [PeerId(f"{stage}{c}") for stage in ("ends", "stage1", "stage2") for c in "bcd"]
    tell(leader, map(heard, wave), 5.0)
    assert the_plan(leader.handle(ev.ClockTick(), 2.0 + OUTGROWN_S - 1)) is None, "it is young"
    done = leader.handle(ev.ClockTick(), 2.0 + OUTGROWN_S)
    again = next_plan(done)
    assert (again.epoch, again.base) == (plan.epoch, plan.base)
    assert {m.peer for m in again.members} == {E, S1, S2, *wave}
    (said,) = (a for a in done if isinstance(a, ev.RecordFact) and a.kind == "epoch-outgrown")
    assert (said.facts["members"], said.facts["waiting"]) == (3, 9)
    assert commits(leader, again, 20.0)


@pytest.mark.parametrize(
    ("wave", "finished"),
    [("ends stage1", 0), ("ends stage1 stage2", 3)],
    ids=["the slowest stage gets nobody", "the rest is short"],
)
def test_an_epoch_goes_on_where_newcomers_would_not_end_it_sooner(wave: str, finished: int) -> None:
    leader, plan = begun(late_s=1e9, epoch_s=1e6, target_batch=16)
    tell(leader, [heard(PeerId(f"{stage}b")) for stage in wave.split()], 5.0)
    rows = tuple(MicroBatchDone(p.index, True, 1.0, 64) for p in plan.paths[:finished])
    leader.handle(ev.MicroBatchesReported(E, plan.hash, rows), 6.0)
    assert the_plan(leader.handle(ev.ClockTick(), 2.0 + OUTGROWN_S)) is None
    assert leader.plan == plan


def test_an_epoch_goes_on_where_most_of_it_is_computed_though_nothing_is_reported() -> None:
    leader, plan = begun(late_s=1e9, epoch_s=1e6)
    wave = [PeerId(f"{stage}{c}") for stage in ("ends", "stage1", "stage2") for c in "bcd"]
    tell(leader, map(heard, wave), 5.0)
    all_but_one = 2 * len(plan.paths) - 1
    for peer in (S1, S2):
        said = heard(peer, term=plan.term)
        running = ev.Running(plan.hash, all_but_one)
        tell(leader, [replace(said, capacity=replace(said.capacity, running=running))], 6.0)
    assert the_plan(leader.handle(ev.ClockTick(), 2.0 + OUTGROWN_S)) is None
    assert leader.plan == plan


def test_members_that_leave_end_their_epoch_though_others_wait_in_their_place() -> None:
    leader, plan = begun(late_s=1e9, epoch_s=1e6)
    wave = [heard(PeerId(f"{stage}b")) for stage in ("ends", "stage1", "stage2")]
    leaves = [heard(p, leaving=True) for p in (S1, S2)]
    tell(leader, [*wave, *leaves], 5.0)
    assert the_plan(leader.handle(ev.ClockTick(), 2.0 + OUTGROWN_S)) is None
    assert leader.plan == plan


@pytest.mark.parametrize(
    ("speed", "at"), [(0.0, YOUNG), (1.0, A)], ids=["unknown members", "another version"]
)
def test_an_epoch_goes_on_where_nothing_is_known_of_its_members_or_none_could_join(
    speed: float, at: Version
) -> None:
    few = [heard(p, speed=speed) for p in (E, S1, S2)]
    leader, plan = begun(few, late_s=1e9, epoch_s=1e6)
    names = [f"{stage}{c}" for stage in ("ends", "stage1", "stage2") for c in "bcde"]
    tell(leader, [heard(PeerId(name), at) for name in names], 5.0)
    assert the_plan(leader.handle(ev.ClockTick(), 2.0 + OUTGROWN_S)) is None
    assert leader.plan == plan


def test_an_epoch_begins_again_for_the_stage_that_most_paths_wait_for() -> None:
    settings = SchedulerSettings("round-robin", skip=0.5, keep_first=1)
    about: dict[str, Any] = {
        "stages": 4,
        "scheduler": settings,
        "router": lambda: Router(settings, 4),
        "target_batch": 24,
        "late_s": 1e9,
        "epoch_s": 1e6,
    }
    speeds = {E: 9.0} | {PeerId(f"stage{n}a"): 2.0 for n in range(1, 5)}
    leader, plan = begun([heard(p, speed=speed) for p, speed in speeds.items()], **about)
    leader.handle(heard(PeerId("stage1b"), speed=2.2), 5.0)
    again = next_plan(leader.handle(ev.ClockTick(), 2.0 + OUTGROWN_S))
    assert again.base == plan.base
    assert again.member(PeerId("stage1b")) is not None, "the others have a third of the visits"


def test_newcomers_make_an_epoch_begin_again_a_few_times_only() -> None:
    leader, plan = begun(late_s=1e9, epoch_s=1e6)
    plans = 0
    for wave, c in enumerate("bcd", start=1):
        crowd = [f"{c}{i}" for i in range(9**wave)]
        who = [PeerId(f"{stage}{name}") for stage in ("ends", "stage1", "stage2") for name in crowd]
        tell(leader, map(heard, who), 20.0 * wave)
        plans += the_plan(leader.handle(ev.ClockTick(), 20.0 * wave + 1)) is not None
    assert plans == OUTGROWN_TIMES


EB = PeerId("endsb")


def running(peer: PeerId, plan_hash: str) -> ev.Heartbeat:
    """A heartbeat of a peer at which this plan runs; "" for none."""
    note = heard(peer)
    capacity = dataclasses.replace(note.capacity, running=ev.Running(plan_hash))
    return dataclasses.replace(note, capacity=capacity)


@pytest.mark.parametrize("peer", [T1, EB])
def test_a_member_that_began_anew_before_it_was_missed_is_lost_to_the_epoch(peer: PeerId) -> None:
    leader, plan = begun(map(heard, (E, EB, S1, S2, T1)), late_s=1e9, target_batch=16)
    assert not tell(leader, [running(peer, h) for h in ("", plan.hash, plan.hash)], 3.0)
    done = leader.handle(running(peer, ""), 4.0)
    assert kinds(done) == ["peer-lost"]
    (told,) = (a for a in done if isinstance(a, ev.SendLost))
    assert told.dead == (peer,)
    assert not tell(leader, [running(peer, "")], 5.0), "once"
    for origin in {E, EB} - {peer}:
        rows = [MicroBatchDone(p.index, True, 1.0, 64) for p in plan.paths if p.origin == origin]
        leader.handle(ev.MicroBatchesReported(origin, plan.hash, tuple(rows)), 6.0)
    assert leader.phase is Phase.ROUND, "nobody waits for its micro-batches"
    assert peer in leader.roster.peers.candidates, "the next plan takes it in"


def test_a_leader_and_members_that_have_closed_the_epoch_name_no_plan_and_are_not_lost() -> None:
    leader, plan = begun(late_s=1e9)
    for peer in (E, S1):
        tell(leader, [running(peer, plan.hash)], 3.0)
    assert not tell(leader, [running(E, "")], 3.5), "after a takeover"
    reported(leader, plan, 4.0)
    assert not tell(leader, [running(S1, "")], 4.5)
    assert leader.phase is Phase.ROUND


def test_members_are_asked_also_where_no_epoch_is_planned_or_none_succeeds() -> None:
    def place(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
        raise OutOfResources("w keeps 100 bytes of state, nobody has room", "add a peer")

    notes = [heard(E, speed=4.0), *map(heard, LOPSIDED)]
    leader = led(facts(assign=place, rebalance_every_s=10.0, download_s=1.0, late_s=1e9), notes)
    assert the_plan(leader.handle(ev.ClockTick(), 2.0)) is None
    assert {stage for _, stage in moved(leader.handle(ev.ClockTick(), 13.0))} == {2}

    leader, plan = begun(notes, rebalance_every_s=10.0, download_s=1.0, late_s=1e9)
    asked = list[tuple[PeerId, int]]()
    for now in (3.0, 9.0, 15.0):
        nothing = tuple(MicroBatchDone(p.index, False) for p in plan.paths)
        done = leader.handle(ev.MicroBatchesReported(E, plan.hash, nothing), now)
        asked += moved(done)
        plan = next_plan(leader.handle(ev.ClockTick(), now + 3.0))
    assert {stage for _, stage in asked} == {2}


@pytest.mark.parametrize("still", [True, False])
def test_nobody_is_sent_after_a_peer_that_takes_long_to_fetch_its_new_stage(still: bool) -> None:
    def place(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
        raise OutOfResources("w keeps 100 bytes of state, nobody has room", "add a peer")

    notes = [heard(E, speed=4.0), *map(heard, LOPSIDED)]
    leader = led(facts(assign=place, rebalance_every_s=10.0, download_s=1.0, late_s=1e9), notes)
    leader.handle(ev.ClockTick(), 2.0)
    ((peer, stage),) = moved(leader.handle(ev.ClockTick(), 13.0))
    leader.handle(ev.Unreachable(peer), 14.0)
    coming = {peer: stage} if still else {}
    asked = moved(leader.handle(ev.ClockTick(coming=coming), 15.0 + COMING_S))
    assert [target for _, target in asked] == ([] if still else [stage])


@pytest.mark.parametrize(("tensor_s", "asked"), [(0.01, [ENDS, 2]), (10.0, [])])
def test_nobody_moves_to_a_stage_whose_fetch_takes_longer_than_the_gain_lasts(
    tensor_s: float, asked: list[int]
) -> None:
    costs = Measured(ways=((E, LinkCost(tensor_s)),))
    notes = [heard(E, speed=4.0), *(heard(p, costs=costs) for p in LOPSIDED)]
    about: dict[str, Any] = {"parameters": (10**6,) * 3, "tensor": 10**4, "late_s": 1e9}
    leader, plan = begun(notes, rebalance_every_s=10.0, download_s=1.0, **about)
    plan = next_plan(commits(leader, plan, 3.0))
    assert sorted(stage for _, stage in moved(reported(leader, plan, 14.0))) == asked


def test_no_newcomer_moves_for_an_epoch_that_never_comes() -> None:
    leader, plan = begun(rebalance_every_s=10.0, download_s=1.0, late_s=1e9, epochs=1)
    tell(leader, [heard(PeerId(f"stage1{c}")) for c in "bcd"], 2.5)
    assert not moved(reported(leader, plan, 3.0))


def test_a_young_swarm_asks_another_peer_when_one_refuses() -> None:
    leader = Leader(E, facts(lacks_s=10.0, late_s=1e9))
    done = tell(leader, [heard(E), heard(S1), heard(T1)], 0.0) + leader.handle(ev.ClockTick(), 9.9)
    assert (moved(done), str(leader.gathering.waiting or "")) == ([], "a peer for stage 2")
    ((first, stage),) = moved(leader.handle(ev.ClockTick(), 10.0))
    assert (stage, moved(leader.handle(ev.ClockTick(), 10.25))) == (2, [])
    leader.handle(ev.MoveRefused(first), 10.3)
    ((second, stage),) = moved(done := leader.handle(ev.ClockTick(), 10.5))
    assert (second, stage) == (({S1, T1} - {first}).pop(), 2)
    assert kinds(done) == ["move-asked"]
    tell(leader, [dataclasses.replace(heard(second), stage=2, digest=heard(S2).digest)], 12.0)
    assert the_plan(leader.handle(ev.ClockTick(), 14.0)) is not None, "and so it begins"


def test_a_peer_on_its_way_to_the_lacking_stage_is_waited_for() -> None:
    leader = led(facts(lacks_s=10.0, late_s=1e9), [heard(E), heard(S1), heard(T1)])
    comes = ev.ClockTick(coming={S2: 2})
    for now in (0.0, 10.0, COMING_S - 1.0):
        assert moved(leader.handle(comes, now)) == []
    assert [stage for _, stage in moved(leader.handle(comes, COMING_S))] == [2]


def test_a_swarm_that_is_complete_again_settles_again() -> None:
    leader = led(facts(late_s=1e9), [heard(E), heard(S1), heard(S2)])
    leader.handle(ev.Unreachable(S2), 0.5)
    assert waits(leader, 20.0) == "a peer for stage 2"
    assert the_plan(leader.handle(heard(S2), 30.0)) is None
    assert waits(leader, 30.9) == "more peers"
    assert the_plan(leader.handle(ev.ClockTick(), 31.0)) is not None


def test_a_stage_below_min_replicas_gets_a_peer() -> None:
    leader = led(facts(min_replicas=2, late_s=1e9), [heard(E), heard(S1), heard(T1), heard(S2)])
    assert moved(leader.handle(ev.ClockTick(), 30.0)) == [], "2 and 1"
    leader.handle(heard(PeerId("stage1c")), 31.0)
    assert moved(leader.handle(ev.ClockTick(), 40.9)) == []
    assert [stage for _, stage in moved(leader.handle(ev.ClockTick(), 41.0))] == [2]


def test_a_stage_lost_later_gets_a_peer_if_nobody_returns() -> None:
    leader, plan = begun(late_s=1e9, patience_s=5.0)
    tell(leader, [heard(T1)], 2.5)
    plan = next_plan(commits(leader, plan, 3.0))
    leader.handle(ev.Unreachable(S2), 4.0)
    assert leader.phase is Phase.GATHER
    for p, stage in ((E, 0), (S1, 1), (T1, 1)):
        here = dataclasses.replace(heard(p, plan.base, 128), digest=f"digest {stage} next")
        leader.handle(here, 5.0)
    assert moved(leader.handle(ev.ClockTick(), 5.0 + LOST_S - 1)) == []
    assert [stage for _, stage in moved(leader.handle(ev.ClockTick(), 5.0 + LOST_S))] == [2]


def test_where_plans_may_leave_the_stage_out_nobody_is_asked() -> None:
    leader, plan = begun(late_s=1e9, spare=1, recall=recalled)
    tell(leader, [heard(T1)], 2.5)
    commits(leader, plan, 3.0)
    done = leader.handle(ev.Unreachable(S2), 4.0)
    for t in range(5, 100):
        done += leader.handle(ev.ClockTick(), float(t))
    assert moved(done) == []


def test_no_result_counts_more_tokens_than_a_micro_batch_has() -> None:
    leader, plan = begun()
    rows = (MicroBatchDone(0, True, 1.0, 65), MicroBatchDone(1, True, 1.0, 64))
    leader.handle(ev.MicroBatchesReported(E, plan.hash, rows), 3.0)
    assert leader.phase is Phase.RUN, "the absurd result is not heard"
    leader.handle(ev.MicroBatchesReported(E, plan.hash, (MicroBatchDone(0, True, 1.0, 64),)), 3.1)
    assert leader.phase is Phase.ROUND


@pytest.mark.parametrize(
    ("size", "tokens", "counts"),
    [
        ({"sequence": 0}, 10**9, True),
        ({"micro_batch": 1, "target_batch": 1, "sequence": 1}, 2, False),
    ],
)
def test_tokens_are_bounded_by_the_length_of_a_sample_where_it_is_known(
    size: dict[str, int], tokens: int, counts: bool
) -> None:
    leader, plan = begun(**size)
    rows = tuple(MicroBatchDone(path.index, True, 1.0, tokens) for path in plan.paths)
    leader.handle(ev.MicroBatchesReported(E, plan.hash, rows), 3.0)
    assert (leader.phase is Phase.ROUND) is counts


def test_an_owner_that_lives_but_does_not_step_loses_its_parts() -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1)), round_s=6.0, late_s=1e9)
    owner = plan.owners["s1"]
    other = T1 if plan.owners["s1"] == S1 else S1
    reported(leader, plan, 2.5)
    for attempt in range(2):
        leader.handle(ev.Incomplete(owner, plan.hash, attempt, (), ()), 3.0)
        done = leader.handle(ev.Incomplete(other, plan.hash, attempt, (), (owner,)), 3.0)
        (again,) = (a for a in done if isinstance(a, ev.SendRound))
        assert again.round.owners == ({} if attempt == 0 else {"s1": other}), "once may be chance"


def test_every_so_many_epochs_and_the_last_are_evaluated() -> None:
    leader, plan = begun(eval_every=2, epochs=3)
    asked = []
    for now in (3.0, 5.0, 7.0):
        done = commits(leader, plan, now)
        for wanted in (a for a in done if isinstance(a, ev.Evaluate)):
            assert the_plan(done) is None, "it is waited for"
            done = leader.handle(ev.Evaluated(wanted.epoch, 2.0), now + 1.0)
            asked += [a.text for a in done if getattr(a, "kind", "") == "evaluated"]
        plan = next_plan(done)
    assert asked == [f"held-out loss 2.000 at epoch {epoch}" for epoch in (2, 3)]


def test_members_receive_the_list_of_the_dead() -> None:
    leader, plan = begun([heard(E), heard(S1), heard(S2), heard(T2)])
    said = [a for a in leader.handle(ev.Unreachable(T2), 2.5) if isinstance(a, ev.SendLost)]
    assert said == [ev.SendLost((E, S1, S2), plan, (T2,))]


def test_members_of_its_stage_hear_of_a_death_during_the_round() -> None:
    """The members' own connections to the dead peer may be fine."""
    leader, plan = begun([heard(E), heard(S1), heard(S2), heard(T2)])
    reported(leader, plan, 3.0)
    done = leader.handle(ev.Unreachable(T2), 3.5)
    assert [a for a in done if isinstance(a, ev.SendLost)] == [ev.SendLost((S2,), plan, (T2,))]


def test_a_leaving_peer_has_no_vote_on_its_stages_version() -> None:
    leaves = dataclasses.replace(heard(PeerId("ends0"), A, 80), digest="another", leaving=True)
    leader = led(
        facts(recall=lambda v: PlanContext((SampleClass(0, 0, 40),), {}, 80), late_s=1e9),
        [*(heard(p, A, 80) for p in (E, S1, S2)), leaves],
    )
    plan = next_plan(leader.handle(ev.ClockTick(), 30.0))
    assert [m.peer for m in plan.stage(0) if m.current] == [E]


def test_an_agreed_version_that_is_lost_does_not_stop_the_swarm() -> None:
    leader, plan = begun(patience_s=10.0)
    commits(leader, plan, 3.0)
    at = leader.roster.versions.base
    leader.handle(dataclasses.replace(heard(T1, at, 128), digest="not what was agreed"), 4.0)
    leader.handle(ev.Unreachable(S1), 4.1)
    assert leader.phase is Phase.GATHER
    leader.handle(ev.ClockTick(), 4.2)
    assert the_plan(leader.handle(ev.ClockTick(), 14.1)) is None, "S1 may come back"
    done = leader.handle(ev.ClockTick(), 14.3)
    assert "agreement-lost" in kinds(done)
    following = next_plan(done)
    first = following.stage(1)[0]
    assert (following.base, first.peer, first.current) == (at, T1, True)


@pytest.mark.parametrize("early", [False, True])
def test_a_stage_falls_back_to_its_newest_remaining_parameters(
    early: bool,
) -> None:
    """One peer of stage 1 committed with the others, who have settled since. Now it is gone, and
    its mate holds the epoch before."""
    leader, first = begun()
    second = next_plan(commits(leader, first, 3.0))
    third = next_plan(commits(leader, second, 4.0))
    leader.handle(ev.Unreachable(S1), 5.0)

    def waits(since: float, *more: ev.Heartbeat) -> list[Any]:
        done: list[Any] = []
        for now in (
            since,
            since + 15.0,
            since + 30.0,
            since + 45.0,
            since + LOST_S - 1.0,
            since + LOST_S,
        ):
            assert not any(isinstance(a, ev.SendPlan) for a in done), "whoever has it may come back"
            done += tell(
                leader, [heard(E, third.base, 256), heard(S2, third.base, 256), *more], now
            )
            done += leader.handle(ev.ClockTick(), now)
        return done

    older = heard(T1, second.base, 128)
    done = waits(6.0, older if early else heard(T1))
    if not early:
        assert the_plan(done) is None, "what a run begins with is nothing to go on from"
        assert leader.gathering.waiting is not None
        assert leader.gathering.waiting.lack is Lack.COMMON
        done = tell(leader, [older], 70.0)
    plan = next_plan(done)
    assert (plan.base, plan.stood) == (third.base, {1: second.base})
    assert [m.peer for m in plan.stage(1) if m.current] == [T1]
    (said,) = (a for a in done if isinstance(a, ev.RecordFact) and a.kind == "stage-fell-back")
    assert said.facts["stages"] == {"1": 1}


def test_state_that_fits_nowhere_is_reported_once() -> None:
    asked: list[Any] = []

    def place(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
        asked.append((stage, room))
        if stage == 1 and all(limit < 100 for limit in room.values()):
            raise OutOfResources(
                "w keeps 100 bytes of state, nobody has room for it", "add a peer with more memory"
            )
        return {f"s{stage}": min(p for p, _ in cell)}

    leader = led(facts(assign=place), [heard(E), heard(S1, room=99), heard(S2)])
    said = [a for now in range(2, 8) for a in leader.handle(ev.ClockTick(), float(now))]
    assert the_plan(said) is None
    (report,) = [a for a in said if isinstance(a, ev.RecordFact) and a.kind == "out-of-memory"]
    assert report.level == "error"
    assert "add a peer with more memory" in report.text
    assert "w keeps 100 bytes" in str(leader.gathering.waiting or "")
    assert (leader.phase, leader.planning.terms.newest) == (Phase.GATHER, 0)
    assert asked[:2] == [(0, {}), (1, {S1: 99})], "what is not known is not given"
    # A peer with enough memory comes, and the run goes on.
    next_plan(tell(leader, [heard(T1, room=100)], 9.0))
    assert str(leader.gathering.waiting or "") == ""


def test_a_change_of_an_abandoned_plan_holds_in_the_next() -> None:
    rules = Rules(1, OuterSettings("butterfly", window_s=60.0), 1, "signed")
    known = facts(read=lambda change: rules if change else Rules())
    leader = led(known, [heard(E), heard(S1), heard(T1), heard(S2)])
    leader.handle(ev.Changed(rules), 1.0)
    leader.handle(ev.Changed(Rules(0, OuterSettings(), 0)), 1.0)
    first = next_plan(leader.handle(ev.ClockTick(), 2.0))
    assert first.change == "signed"
    leader.handle(ev.Unreachable(S2), 3.0)
    again = next_plan(leader.handle(heard(S2), 4.0))
    other = Leader(E, known, history=PastPlan(first))
    taken = tell(other, [heard(E), heard(S1), heard(T1), heard(S2)], 0.0)
    for plan in (again, next_plan(taken)):
        assert (plan.base, plan.change) == (first.base, "signed")


def test_a_peer_that_a_recalled_change_revokes_votes_no_more() -> None:
    rules = Rules(revision=1, change="signed", revoked=frozenset({mark(S2)}))
    leader, plan = begun(
        [heard(p, A, 500) for p in (E, S1, S2)],
        read=lambda change: rules if change else Rules(),
        recall=lambda version: dataclasses.replace(recalled(version), change="signed"),
    )
    assert (plan.change, set(plan.electorate.voters)) == ("signed", {E, S1, S2})
    leader.handle(ev.Unreachable(S2), 3.0)
    again = next_plan(tell(leader, [heard(T2, A, 500)], 4.0))
    assert (again.base, set(again.electorate.voters)) == (A, {E, S1})


def test_a_change_reported_by_a_stranger_is_verified() -> None:
    def read(change: str) -> Rules:
        if change:
            raise Refused("not signed by the owner")
        return Rules()

    _, plan = begun(
        [heard(p, A, 500) for p in (E, S1, S2)],
        read=read,
        recall=lambda version: dataclasses.replace(recalled(version), change="forged"),
    )
    assert (plan.change, plan.outer) == ("", 0)


# ------------------------------------------------------------ ways


def with_ways(note: ev.Heartbeat, *to: PeerId) -> ev.Heartbeat:
    """The heartbeat with paths to these peers."""
    return dataclasses.replace(
        note,
        capacity=ev.Capacity(
            1.0, costs=Measured(ways=tuple((p, LinkCost(0.0, 0.01)) for p in sorted(to)))
        ),
    )


def test_no_plan_uses_an_unproven_pair_and_the_pair_is_named() -> None:
    lone = [with_ways(heard(E), S1, S2), with_ways(heard(S1), E), with_ways(heard(S2), E)]
    leader = led(facts(prove=True), lone)
    pair = f"{short(S1)} of stage 1 and {short(S2)} of stage 2"
    assert waits(leader, 2.0) == f"a connection between {pair}"
    one_way = [with_ways(heard(E), S1, S2), with_ways(heard(S1), E, S2), with_ways(heard(S2), E)]
    assert the_plan(tell(leader, one_way, 2.5)) is None, "who is called must be able to call back"
    next_plan(tell(leader, [with_ways(heard(S2), E, S1)], 3.0) + leader.handle(ev.ClockTick(), 3.5))


def test_going_back_is_said_though_no_path_is_found_at_first() -> None:
    others = {p: {E, S1, S2} - {p} for p in (E, S1, S2)}
    leader, plan = begun(
        [with_ways(heard(p), *others[p]) for p in others], prove=True, patience_s=1.0
    )
    next_plan(commits(leader, plan, 3.0))
    at = leader.roster.versions.base
    here = [
        dataclasses.replace(
            with_ways(heard(p, at, 128, reachable=(YOUNG,)), *others[p]), digest=f"digest {s} next"
        )
        for s, p in ((0, E), (2, S2))
    ]
    leader.handle(ev.Unreachable(S1), 4.0)
    tell(leader, [*here, with_ways(heard(S1), E)], 4.5)
    assert not waits(leader, 4.6).startswith("a connection between"), "patience is not over"
    done = leader.handle(ev.ClockTick(), 6.0)
    assert str(leader.gathering.waiting or "").startswith("a connection between")
    done += tell(leader, [with_ways(heard(S1), E, S2)], 6.5)
    assert next_plan(done + leader.handle(ev.ClockTick(), 7.0)).base == YOUNG
    assert kinds(done).count("went-back") == 1


def test_a_replica_that_cannot_reach_its_siblings_waits() -> None:
    everybody = {E, S1, S2, T1}
    notes = [with_ways(heard(p), *(everybody - {p})) for p in (E, S2)]
    notes += [with_ways(heard(S1), E, S2), with_ways(heard(T1), E, S2)]
    leader, plan = begun(notes, prove=True)
    assert {m.peer for m in plan.members} in ({E, S1, S2}, {E, T1, S2})
    inside = plan.stage(1)[0].peer
    assert leader.roster.participants.apart() == [(T1 if inside == S1 else S1, inside)]
    tell(leader, [with_ways(heard(p), *(everybody - {p})) for p in (S1, T1)], 2.5)
    assert {m.peer for m in next_plan(commits(leader, plan, 3.0)).members} == everybody


def test_a_search_takes_unproven_pairs_for_far_apart() -> None:
    apart = {S1, T2}
    everybody = (E, S1, S2, T1, T2)
    reach = {p: set(everybody) - (apart if p in apart else {p}) for p in everybody}
    notes = [with_ways(heard(p), *reach[p]) for p in everybody]
    leader, plan = begun(notes, prove=True, router=lambda: Router(SchedulerSettings(), 2))
    (asked,) = (a for a in reported(leader, plan, 3.0) if isinstance(a, ev.SearchPaths))
    peers = asked.job.task.peers
    delays = asked.job.problem.delays
    assert {
        (peers[a], peers[b]) for a, row in enumerate(delays) for b, s in enumerate(row) if s > 1
    } == {(S1, T2), (T2, S1)}


def test_a_peer_that_does_not_reach_the_leader_is_not_counted_on() -> None:
    notes = [with_ways(heard(E), S2), with_ways(heard(S1), E, S2), with_ways(heard(S2), E, S1)]
    leader = Leader(E, facts(prove=True))
    tell(leader, notes[1:], 0.0)
    assert waits(leader, 1.0) == "a peer for the ends and stages 1, 2", "it has not heard itself"
    tell(leader, notes, 1.5)
    assert (
        waits(leader, 2.0)
        == f"a connection between {short(S1)} of stage 1 and {short(E)} of the ends"
    )


def test_a_leader_that_cannot_follow_its_own_plan_makes_another() -> None:
    leader, plan = begun()
    assert leader.handle(ev.Declined("another plan", "why"), 2.1) == []
    assert leader.plan is plan
    (said,) = leader.handle(ev.Declined(plan.hash, "its checkpoint is damaged"), 2.1)
    assert said.kind == "epoch-abandoned"
    assert "its checkpoint is damaged" in said.text
    assert leader.plan is None
    assert next_plan(leader.handle(ev.ClockTick(), 4.0)).term == plan.term + 1


def test_a_leader_with_a_damaged_final_version_starts_elsewhere() -> None:
    older = Version(4, "cc" * 16)
    others = (heard(p, A, reachable=(older,)) for p in (S1, S2))
    leader, last = begun([heard(E, older, reachable=(A,)), *others], epochs=5, recall=recalled)
    assert last.last
    assert leader.phase is Phase.FINISHED
    tell(leader, [heard(E, older)], 2.1)
    leader.handle(ev.Declined(last.hash, "its checkpoint is damaged"), 2.1)
    assert next_plan(leader.handle(ev.ClockTick(), 3.0)).base == older


def test_the_last_plan_is_sent_again_to_who_comes_and_can_serve() -> None:
    def here(*who: PeerId) -> list[ev.Heartbeat]:
        return [with_ways(heard(p, A), *who) for p in who]

    leader, last = begun(here(E, S1, S2), epochs=5, recall=recalled, prove=True)
    assert last.last
    assert the_plan(tell(leader, [with_ways(heard(T1, A)), *here(E, S1, S2)], 3.0)) is None
    assert next_plan(tell(leader, here(E, S1, S2, T1), 4.0)).member(T1)
    assert the_plan(tell(leader, here(E, S1, S2, T1), 5.0)) is None, "once"
    leader.handle(ev.Unreachable(S2), 6.0)
    assert the_plan(tell(leader, [with_ways(heard(S2, A)), *here(E, S1, T1)], 7.0)) is None
    assert the_plan(tell(leader, here(E, S1, S2, T1), 8.0)) is not None, "it was started again"


def test_a_peer_is_silent_to_its_leader_when_it_would_be_asked_whether_it_lives() -> None:
    leader, _ = begun(late_s=5.0)
    for now in (3.0, 4.0, 5.0):
        leader.handle(heard(S1), now)
    assert leader.silent_s(S1, 5.5) == 0.0
    assert leader.silent_s(S1, 9.5) == 4.5
    assert leader.silent_s(E, 100.0) == 0.0, "the leader itself"
    assert leader.silent_s(PeerId("stranger"), 100.0) == 0.0
