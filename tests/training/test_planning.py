"""The contents of plans: windows of other cells, owners and donors, votes, terms."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import Rules
from node.consensus.terms import STEP_HEARD
from node.core.ids import CellId, PeerId
from node.core.journey import NO_WINDOW, Electorate, Partner, Plan, Version, Window
from node.epoch import events as ev
from node.epoch.leader.leader import Leader, Phase
from node.epoch.leader.planning import DEPART_S
from node.epoch.leader.voting import ALONE_S
from node.epoch.pace import RECALL_FROM
from node.epoch.peers.speeds import FORGIVE_AFTER
from node.epoch.plan_context import PlanContext, makes
from node.pipeline.events import MicroBatchDone
from node.scheduler.costs import LinkCost, Measured
from tests.training.run_facts import assign, facts
from tests.training.test_leader import (
    S1,
    S2,
    T1,
    T2,
    YOUNG,
    A,
    E,
    begun,
    both_sides,
    commits,
    committed,
    heard,
    heir,
    kinds,
    led,
    next_plan,
    recalled,
    reported,
    tell,
    the_plan,
    waits,
)

PARTNER = Partner(CellId("cd" * 8), PeerId("far"), {})
GROUP = ev.Grouped(Window(7, (PARTNER,)), until=100.0)


def holding(plan: Plan, peer: PeerId, **about: Any) -> ev.Heartbeat:
    """A heartbeat of a peer that holds the version which this plan has made."""
    note = heard(peer, makes(plan, ()), 128, **about)
    return dataclasses.replace(note, digest=f"digest {note.stage} next")


def shown(actions: Iterable[Any]) -> bool:
    """True if the plan goes out with a certificate."""
    (sent,) = (a for a in actions if isinstance(a, ev.SendPlan))
    return sent.certified


# ------------------------------------------------------------ windows


def test_the_first_plan_after_a_group_is_found_gives_its_start_to_the_partners() -> None:
    leader, plan = begun()
    leader.handle(GROUP, 2.5)
    plan = next_plan(commits(leader, plan, 10.0))
    assert plan.window == Window(7, (PARTNER,), 90.0)
    assert (plan.outer, len(plan.paths)) == (0, 2)
    assert next_plan(commits(leader, plan, 20.0)).window == NO_WINDOW


def test_the_last_plan_gives_nothing_to_other_cells() -> None:
    leader, plan = begun(epochs=1)
    leader.handle(GROUP, 2.5)
    last = next_plan(commits(leader, plan, 10.0))
    assert (last.last, last.window) == (True, NO_WINDOW)


def landing() -> tuple[Leader, Plan]:
    """A leader whose members have the means of a window, and its plan to put them in place, made
    at the second 20."""
    leader, plan = begun()
    leader.handle(GROUP, 2.5)
    plan = next_plan(commits(leader, plan, 10.0))
    means = [heard(p, outer=ev.OuterReport((7, f"mean {s}"))) for s, p in enumerate((E, S1, S2))]
    tell(leader, means, 15.0)
    return leader, next_plan(commits(leader, plan, 20.0))


def test_an_outer_round_has_no_micro_batches_and_begins_at_once() -> None:
    leader, plan = landing()
    assert (plan.outer, plan.paths, plan.last) == (7, (), False)
    assert plan.forecast == (0.0, 0.0)
    assert plan.window == Window(0, (PARTNER,), means={s: f"mean {s}" for s in range(3)})
    assert plan.deadline_s == leader.facts.waits.round_s
    assert leader.phase is Phase.ROUND
    assert plan.loss > 0
    following = next_plan(committed(leader, plan, 21.0))
    assert (following.base, following.outer) == (makes(plan, ()), 0)
    assert following.window == NO_WINDOW
    assert (following.cursor, following.owners) == (plan.cursor, plan.owners), "nobody stepped"
    assert (following.loss, following.tokens) == (plan.loss, plan.tokens)


def test_a_new_change_of_the_owner_forgets_the_group_of_the_old_one() -> None:
    rules = Rules(0, OuterSettings("butterfly", window_s=60.0), 1, "signed")
    leader, plan = begun(read=lambda change: rules if change else Rules())
    leader.handle(GROUP, 2.5)
    leader.handle(ev.Changed(rules), 2.6)
    done = commits(leader, plan, 10.0)
    assert (next_plan(done).change, next_plan(done).window) == ("signed", NO_WINDOW)
    assert "averaging-changed" in kinds(done)
    assert "averaging-changed" not in kinds(commits(leader, next_plan(done), 12.0)), "once"


# ------------------------------------------------------------ owners and donors


def donors(leaving: bool, gone_s: float) -> dict[str, PeerId]:
    """Donors in a plan that is made ``gone_s`` seconds after the owner S1 has gone."""
    leader, plan = begun(map(heard, (E, S1, T1, S2)), late_s=1e9, eval_every=1)
    commits(leader, plan, 3.0)
    leader.handle(holding(plan, S1, leaving=leaving), 3.5)
    leader.handle(ev.Unreachable(S1), 4.0)
    following = next_plan(leader.handle(ev.Evaluated(1, 2.0), 4.0 + gone_s))
    assert (plan.owners["s1"], following.owners["s1"]) == (S1, T1)
    return following.moved


def test_a_peer_that_left_gives_its_state_for_a_while() -> None:
    assert donors(True, DEPART_S - 1.0) == {"s1": S1}
    assert donors(True, DEPART_S) == {}


def test_a_peer_that_was_lost_gives_no_state() -> None:
    assert donors(False, 1.0) == {}


def test_the_memory_that_members_report_is_given_to_the_choice_of_owners() -> None:
    rooms: list[Any] = []

    def place(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
        rooms.append((stage, dict(previous), dict(room)))
        return assign(stage, cell, previous, room)

    leader, plan = begun([heard(E), heard(S1, room=7), heard(T1), heard(S2, room=9)], assign=place)
    assert rooms == [(0, {}, {}), (1, {}, {S1: 7}), (2, {}, {S2: 9})]
    rooms.clear()
    next_plan(commits(leader, plan, 3.0))
    assert [previous for _, previous, _ in rooms[-3:]] == [plan.owners] * 3


def test_the_owners_of_a_repaired_round_are_those_of_the_next_plan() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2)))
    owner = plan.owners["s1"]
    other = T1 if owner == S1 else S1
    reported(leader, plan, 3.0)
    done: list[Any] = []
    for attempt in range(2):
        leader.handle(ev.Incomplete(owner, plan.hash, attempt, (), ()), 3.0)
        done = leader.handle(ev.Incomplete(other, plan.hash, attempt, (), (owner,)), 3.0)
    (again,) = (a for a in done if isinstance(a, ev.SendRound))
    assert again.round.owners == {"s1": other}
    following = next_plan(committed(leader, plan, 3.5))
    # The test's choice of owners takes the first peer again, which needs the state that T1 has.
    assert (following.owners["s1"], following.moved) == (owner, {"s1": other})


# ------------------------------------------------------------ votes and terms


def test_the_commit_names_the_votes_that_were_signed() -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1)))
    reported(leader, plan, 3.0)
    leader.handle(ev.Equivocated(frozenset({T1})), 3.0)
    assert leader.voting.commit is None
    for m in plan.members:
        word = ev.Committed(m.peer, plan.hash, 0, f"d{m.stage}", 1.0, voted=m.peer != S2)
        done = leader.handle(word, 4.0)
    commit = leader.voting.commit
    assert commit is not None
    assert commit.votes == ((E, 0, 0, "d0"), (S1, 1, 0, "d1"))
    assert (commit.term, commit.version) == (plan.term, makes(plan, ()))
    assert commit.voters == plan.electorate.voters
    assert shown(done), "the next plan goes out with the certificate"
    assert T1 not in next_plan(done).electorate.voters


def test_without_a_signed_vote_there_is_no_commit_to_show() -> None:
    leader, plan = begun()
    assert not shown(commits(leader, plan, 3.0))
    assert leader.voting.commit is None


def test_reports_of_another_plan_have_no_votes() -> None:
    leader, plan = begun()
    word = ev.Committed(S1, plan.hash, 0, "d1", 1.0, voted=True)
    assert leader.votes_on(word) == (plan, makes(plan, ()))
    assert leader.votes_on(dataclasses.replace(word, plan_hash="another")) is None
    assert leader.votes_on(dataclasses.replace(word, peer=T1)) is None
    leader.handle(ev.Declined(plan.hash, "no reason"), 3.0)
    assert leader.votes_on(word) is None


def test_a_leader_names_itself_first_among_the_voters() -> None:
    _, plan = begun(map(heard, (PeerId("ends0"), E, S1, S2)))
    assert plan.electorate.voters[0] == E
    leader = heir(S2, facts(), plan)
    tell(leader, [dataclasses.replace(heard(p), term=1) for p in (E, S1, S2)], 0.0)
    following = next_plan(leader.handle(ev.ClockTick(), 2.0))
    assert following.electorate == plan.electorate, "the same voters decide on the same version"
    reported(leader, following, 3.0)
    assert next_plan(committed(leader, following, 3.0)).electorate.voters[0] == S2


def test_a_side_without_a_majority_says_once_that_it_goes_on_alone() -> None:
    others = (T1, T2, PeerId("stage1c"), PeerId("stage2c"))
    leader, plan = begun(map(heard, (E, S1, S2, *others)), late_s=1e9)
    commits(leader, plan, 3.0)
    for peer in (*others, S2):
        leader.handle(ev.Unreachable(peer), 4.0)
    tell(leader, [holding(plan, p) for p in (E, S1, S2)], 5.0)
    assert waits(leader, 6.0).startswith("more than half of the voters (3 of 7")
    assert the_plan(leader.handle(ev.ClockTick(), 5.0 + ALONE_S - 1.0)) is None
    done = leader.handle(ev.ClockTick(), 7.0 + ALONE_S)
    assert next_plan(done).electorate.orphan
    assert kinds(done).count("orphaned") == 1
    again = commits(leader, next_plan(done), 80.0)
    assert "orphaned" not in kinds(again)
    (said,) = (a for a in again if isinstance(a, ev.RecordFact) and a.kind == "epoch-committed")
    assert said.facts["orphan"] is True
    assert leader.voting.commit is None, "no majority has committed"


def test_the_term_of_a_plan_is_above_all_that_members_report() -> None:
    def next_term(own: int, *said: int) -> int:
        leader = Leader(E, facts(), term=own)
        notes = [heard(p, term=t) for p, t in zip((E, S1, S2), said, strict=True)]
        tell(leader, notes, 0.0)
        leader.handle(ev.ClockTick(), 2.0)
        return next_plan(leader.handle(ev.Recalled(YOUNG), 2.1)).term

    assert next_term(0, 3, 9, 4) == 10
    assert next_term(20, 3, 9, 4) == 21
    assert next_term(20, 3, 9, 21 + STEP_HEARD) == 21 + STEP_HEARD, "the bound of one plan"


# ------------------------------------------------------------ the version that a plan starts from


def test_a_richer_history_is_gone_on_from_and_said() -> None:
    leader, plan = begun(recall=recalled, late_s=1e9)
    plan = next_plan(commits(leader, plan, 3.0))
    richer = [heard(PeerId("ends2"), A, 900), heard(T1, A, 900), heard(T2, A, 900)]
    leader.handle(ev.ContextsKept(((A, recalled(A)),)), 3.0)
    done = commits(leader, plan, 4.0, richer)
    following = next_plan(done)
    assert following.base == A
    (said,) = (a for a in done if isinstance(a, ev.RecordFact) and a.kind == "history-changed")
    assert said.facts["from"] == 2


def test_at_most_a_few_peers_are_asked_for_a_plan_and_not_the_leader_itself() -> None:
    more = [PeerId(f"stage1{c}") for c in "bcdef"]
    leader = led(facts(), [heard(p, A, 500) for p in (E, S1, S2, *more)])
    (asked,) = (a for a in leader.handle(ev.ClockTick(), 2.0) if isinstance(a, ev.Recall))
    assert asked == ev.Recall(A, (S1, *more)[:RECALL_FROM])
    assert waits(leader, 2.5) == "the history of epoch 5"
    assert leader.handle(ev.ClockTick(), 3.0) == [], "they are asked once"


def test_losses_are_those_of_a_recalled_plan() -> None:
    _, first = begun()
    told = dataclasses.replace(first, loss=2.5, loss_val=3.5)
    at = makes(told, ())
    leader = led(facts(), [heard(p, at, 128) for p in (E, S1, S2)])
    leader.handle(ev.ClockTick(), 2.0)
    plan = next_plan(leader.handle(ev.Recalled(at, told), 2.1))
    assert (plan.base, plan.loss, plan.loss_val, plan.tokens) == (at, 2.5, 3.5, 128)


def test_a_version_in_a_checkpoint_of_the_leader_is_not_asked_for() -> None:
    context = PlanContext(recalled(A).cursor, {"s1": S1}, 700)
    leader = led(facts(recall=lambda v: context), [heard(p, A, 500) for p in (E, S1, T1, S2)])
    done = leader.handle(ev.ClockTick(), 2.0)
    assert not [a for a in done if isinstance(a, ev.Recall)]
    plan = next_plan(done)
    assert (plan.cursor, plan.tokens) == (context.cursor, 700)
    assert "history-lost" not in kinds(done)


def test_a_leader_without_a_plan_asks_members_that_have_followed_one() -> None:
    """Its checkpoint has the context, but the members' plan names the voters."""
    notes = [heard(p, A, 500, term=4) for p in (E, S1, S2)]
    leader = led(facts(recall=recalled), notes)
    done = leader.handle(ev.ClockTick(), 2.0)
    assert [a.version for a in done if isinstance(a, ev.Recall)] == [A]
    done = leader.handle(ev.Recalled(A), 2.5)
    assert next_plan(done).base == A
    assert "history-lost" not in kinds(done), "the checkpoint knows it"


@pytest.mark.parametrize("phase", ["run", "gather"])
def test_an_answer_that_comes_late_changes_no_plan(phase: str) -> None:
    leader, plan = begun()
    other = dataclasses.replace(plan, term=9)
    if phase == "gather":
        leader.handle(ev.Declined(plan.hash, "no reason"), 3.0)
    assert leader.handle(ev.Recalled(YOUNG, other), 3.0) == []


def test_the_end_of_a_run_is_open_to_few_events() -> None:
    leader, last = begun([heard(p, A, 500) for p in (E, S1, S2)], epochs=5, recall=recalled)
    assert last.last
    assert leader.idle
    assert leader.handle(ev.Accused(S1, S2), 3.0) == []
    assert kinds(leader.handle(ev.Unreachable(S2), 3.0)) == ["peer-lost"]


def test_members_of_both_sides_are_listed_with_what_they_hold() -> None:
    _, plan = begun(both_sides(500, 900), recall=recalled)
    assert {m.peer: m.current for m in plan.members} == {
        E: False,
        PeerId("ends2"): True,
        S1: False,
        S2: False,
        T1: True,
        T2: True,
    }
    assert plan.digests == {s: heard(p, plan.base).digest for s, p in ((0, E), (1, T1), (2, T2))}


def test_a_young_electorate_has_all_current_members() -> None:
    _, plan = begun(map(heard, (E, S1, S2)))
    assert plan.electorate == Electorate((E, S1, S2))
    assert plan.base == Version(0)


def test_the_votes_of_peers_that_have_left_are_not_waited_for() -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1, T2)), late_s=1e9)
    newcomers = [PeerId("stage1c"), PeerId("stage2c")]
    tell(leader, map(heard, newcomers), 2.5)
    for peer in (S1, S2):
        leader.handle(ev.Unreachable(peer), 3.0)
    leader.handle(ev.Declined(plan.hash, "no reason"), 3.0)
    done = tell(leader, [heard(p, leaving=True) for p in (T1, T2)], 3.5)
    plan = next_plan(done)
    leader.handle(ev.Declined(plan.hash, "no reason"), 4.0)
    tell(leader, [heard(p, leaving=True) for p in (T1, T2)], 4.0)
    assert waits(leader, 4.0).startswith("more than half of the voters (1 of 3")
    for peer in (T1, T2):
        leader.handle(ev.Unreachable(peer), 4.5)
    assert waits(leader, 5.0).startswith("more than half of the voters (1 of 3")


def test_a_replica_that_got_no_work_for_long_is_tried_with_one_micro_batch() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2)), target_batch=16)
    visits = []
    for now in range(3, 3 + FORGIVE_AFTER + 3):
        for peer in (S1, T1, S2):
            slow = 4000.0 if peer == T1 else 1.0
            costs = Measured(forward_s=slow, backward_s=2 * slow)
            said = heard(peer, plan.base, term=plan.term, speed=8.0 / slow, costs=costs)
            leader.handle(said, float(now))
        reported(leader, plan, float(now))
        words = (
            ev.Committed(m.peer, plan.hash, 0, f"d{m.stage}", 2e-3 if m.peer == T1 else 8.0)
            for m in plan.members
        )
        plan = next_plan(tell(leader, words, float(now)))
        visits.append(sum(hop.peer == T1 for path in plan.paths for hop in path.hops))
    tried = visits.index(1)
    assert tried in (FORGIVE_AFTER - 1, FORGIVE_AFTER)
    assert sum(visits) == 1, "one micro-batch, and none again at once"


# ------------------------------------------------------------ peers that come while an epoch runs

SIZES: dict[str, Any] = {"parameters": (10**6,) * 3, "tensor": 10**5}
QUICK = Measured(ways=((S1, LinkCost(0.1, 0.05)),))
"""A line over which the parameters of a stage take a second."""


def joined(
    sizes: dict[str, Any], run_s: float, at: Version = YOUNG, **about: Any
) -> tuple[Plan, Plan]:
    """The plan under way when a replica of stage 1 comes with the version ``at``, and the next
    plan."""
    costs = [heard(p, costs=QUICK) for p in (E, S1, S2)]
    leader, plan = begun(costs, **sizes)
    leader.handle(dataclasses.replace(heard(T1, at, costs=QUICK), **about), 5.0)
    return plan, next_plan(commits(leader, plan, 2.0 + run_s))


@pytest.mark.parametrize("digest", ["", "of something else"])
def test_a_newcomer_with_other_parameters_than_it_claims_listens(digest: str) -> None:
    _, plan = joined(SIZES, 60.0, digest=digest)
    row = plan.member(T1)
    assert row is not None
    assert not row.current


def test_a_newcomer_with_the_base_of_the_epoch_under_way_works_in_the_next_one() -> None:
    before, plan = joined(SIZES, 60.0)
    row = plan.member(T1)
    assert row is not None
    assert row.current
    assert plan.base == makes(before, ())
    assert T1 not in plan.owners.values(), "it has no optimizer state"
    assert plan.digests[1], "by which it knows the parameters that it fetches"


@pytest.mark.parametrize(
    ("sizes", "run_s", "at"),
    [
        (SIZES, 2.5, YOUNG),
        (SIZES | {"parameters": (10**9,) * 3}, 60.0, YOUNG),
        (SIZES, 60.0, A),
        ({}, 60.0, YOUNG),
    ],
    ids=["short epoch", "large stage", "other history", "unknown sizes"],
)
def test_a_newcomer_listens_where_a_fetch_is_not_worth_it(
    sizes: dict[str, Any], run_s: float, at: Version
) -> None:
    _, plan = joined(sizes, run_s, at)
    row = plan.member(T1)
    assert row is not None
    assert not row.current


def test_a_newcomer_that_did_not_fetch_listens_next_time() -> None:
    costs = [heard(p, costs=QUICK) for p in (E, S1, S2)]
    leader, plan = begun(costs, **SIZES)
    leader.handle(heard(T1, costs=QUICK), 5.0)
    plan = next_plan(commits(leader, plan, 62.0))
    leader.handle(ev.Unreachable(T1), 63.0)
    leader.handle(heard(T1, costs=QUICK), 64.0)
    plan = next_plan(commits(leader, plan, 120.0))
    row = plan.member(T1)
    assert row is not None
    assert not row.current


# ------------------------------------------------------------ the last few micro-batches


def all_but(missing: int) -> tuple[Leader, Plan, float]:
    """A leader to which all but the last ``missing`` of 400 micro-batches were reported, one in
    half a second, its plan, and the time of the last report."""
    leader, plan = begun(target_batch=400, late_s=1e9, epoch_s=1e4)
    now = 2.0
    for path in plan.paths[: len(plan.paths) - missing]:
        now += 0.5
        row = MicroBatchDone(path.index, True, 1.0, 64)
        leader.handle(ev.MicroBatchesReported(E, plan.hash, (row,)), now)
        leader.handle(ev.ClockTick(), now)
    return leader, plan, now


@pytest.mark.parametrize(("missing", "closes"), [(3, True), (4, False)])
def test_an_epoch_is_closed_without_its_last_few_late_micro_batches(
    missing: int, closes: bool
) -> None:
    leader, plan, last = all_but(missing)
    for seconds in (1.0, 2.0, 3.0, 3.5):
        leader.handle(ev.ClockTick(), last + seconds)
    assert leader.phase is Phase.RUN, "eight times the usual time have not passed"
    leader.handle(ev.ClockTick(), last + 4.5)
    assert (leader.phase is Phase.ROUND) is closes
    if closes:
        attempt = leader.attempt
        assert attempt is not None
        assert attempt.results.dropped == tuple(p.index for p in plan.paths[-missing:])


@pytest.mark.parametrize(("until", "slack"), [(30.0, 0.0), (4.5, 2.0)])
def test_a_leader_that_stood_still_or_is_busy_gives_no_work_up(until: float, slack: float) -> None:
    leader, plan, last = all_but(1)
    for seconds in (1.0, 2.0, 3.0, 4.0, until):
        leader.handle(ev.ClockTick(slack=slack), last + seconds)
    assert leader.phase is Phase.RUN
    row = MicroBatchDone(plan.paths[-1].index, True, 1.0, 64)
    leader.handle(ev.MicroBatchesReported(E, plan.hash, (row,)), last + until)
    attempt = leader.attempt
    assert attempt is not None
    assert leader.phase is Phase.ROUND
    assert attempt.results.dropped == ()


def test_a_report_read_after_a_stop_of_the_leader_is_not_of_the_future() -> None:
    leader, plan, last = all_but(2)
    now = last + 30.0
    row = MicroBatchDone(plan.paths[-2].index, True, 1.0, 64)
    leader.handle(ev.MicroBatchesReported(E, plan.hash, (row,)), now)
    leader.handle(ev.ClockTick(), now)
    attempt = leader.attempt
    assert attempt is not None
    assert attempt.timing.reported == now


# ------------------------------------------------------------ the first plan of a run
