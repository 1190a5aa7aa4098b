"""Repeated rounds: new owners for the parts of dead and stuck ones, copies, and their end."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.leader.deadlines import AGAIN
from node.epoch.leader.leader import Leader, Phase
from node.epoch.pace import ALL_OWN
from node.epoch.plan_context import makes
from tests.training.test_leader import (
    S1,
    S2,
    T1,
    E,
    begun,
    commits,
    committed,
    heard,
    kinds,
    next_plan,
    reported,
    tell,
    waits,
)

THIRD = PeerId("stage1c")
FOURTH = PeerId("stage1d")


def two_parts(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
    """Two parts a stage: of the first two peers at first, then of the first living one where an
    owner is gone."""
    peers = sorted(p for p, _ in cell)
    placed = {f"s{stage}a": peers[0], f"s{stage}b": peers[:2][-1]}
    kept = {part: previous[part] for part in placed if part in previous}
    if kept:
        return {part: kept.get(part, peers[-1]) for part in placed}
    return placed


def rounds(actions: Iterable[Any]) -> list[ev.SendRound]:
    return [a for a in actions if isinstance(a, ev.SendRound)]


def opened(*peers: PeerId, **kw: Any) -> tuple[Leader, Plan]:
    """A leader of these peers of stage 1, which own two parts, in the round of the first epoch."""
    given: dict[str, Any] = {"assign": two_parts, "late_s": 1e9} | kw
    leader, plan = begun(map(heard, (E, S2, *peers)), **given)
    for note in rounds(reported(leader, plan, 3.0)):
        assert (note.round.attempt, note.round.owners, note.round.sources) == (0, {}, ())
    return leader, plan


def lacks(
    leader: Leader,
    plan: Plan,
    peers: Sequence[PeerId],
    attempt: int = 0,
    holds: tuple[str, ...] = (),
    failed: tuple[PeerId, ...] = (),
    now: float = 3.0,
) -> list[Any]:
    """These members report that parts are missing."""
    words = (ev.Incomplete(peer, plan.hash, attempt, holds, failed) for peer in peers)
    return tell(leader, words, now)


def test_parts_of_a_dead_owner_go_to_the_first_that_holds_them_fresh() -> None:
    fifth = PeerId("stage1e")
    leader, plan = opened(S1, T1, THIRD, FOURTH, fifth)
    assert (plan.owners["s1a"], plan.owners["s1b"]) == (S1, T1)
    leader.handle(ev.Unreachable(S1), 3.0)
    lacks(leader, plan, [T1, fifth])
    (again,) = rounds(lacks(leader, plan, [FOURTH, THIRD], holds=("s1a",)))
    assert again.round.owners == {"s1a": THIRD}
    assert again.to == (T1, THIRD, FOURTH, fifth)
    assert (again.round.dead, again.round.attempt) == ((S1,), 1)


def test_parts_of_a_dead_owner_that_nobody_holds_are_assigned_anew() -> None:
    leader, plan = opened(S1, T1, THIRD)
    leader.handle(ev.Unreachable(S1), 3.0)
    (again,) = rounds(lacks(leader, plan, [T1, THIRD]))
    assert again.round.owners == {"s1a": THIRD}
    leader.handle(ev.Unreachable(THIRD), 4.0)
    (third,) = rounds(lacks(leader, plan, [T1], 1))
    assert third.round.owners == {"s1a": T1}, "a part may move twice"


def test_rounds_open_without_the_owners_that_died_in_the_run() -> None:
    leader, plan = begun(map(heard, (E, S2, S1, T1, THIRD)), assign=two_parts, late_s=1e9)
    leader.handle(ev.Unreachable(S1), 2.5)
    notes = rounds(reported(leader, plan, 3.0))
    assert {note.to: note.round.owners for note in notes} == {
        (E,): {},
        (T1, THIRD): {"s1a": THIRD},
        (S2,): {},
    }


def test_the_accused_are_probed_except_the_leader_and_strangers() -> None:
    leader, plan = opened(S1, T1)
    done = lacks(leader, plan, [T1], failed=(S1, E, PeerId("stranger")))
    assert done == [ev.ProbePeer(S1)]


def test_each_repair_gives_more_time_and_is_recorded() -> None:
    leader, plan = opened(S1, T1, THIRD)
    first = leader.facts.waits.round_s
    done = lacks(leader, plan, [S1, T1, THIRD])
    (again,) = rounds(done)
    assert again.round.deadline_s == AGAIN * first
    (said,) = (a for a in done if isinstance(a, ev.RecordFact))
    assert said.facts == {"stage": 1, "attempt": 1, "dead": 0}
    assert leader.repeats.repaired == 1
    late = 3.0 + 1.5 * AGAIN * first
    leader.handle(ev.ClockTick(), late - 0.1)
    assert leader.phase is Phase.ROUND
    assert "epoch-abandoned" in kinds(leader.handle(ev.ClockTick(), late)), "and no more than that"


def stuck_rounds(leader: Leader, plan: Plan, *holds: tuple[str, ...]) -> list[dict[str, PeerId]]:
    """Owners in the repairs of rounds after which S1 holds these parts, and the others none."""
    found = []
    for attempt, held in enumerate(holds):
        lacks(leader, plan, [S1], attempt, held)
        (again,) = rounds(lacks(leader, plan, [T1, THIRD], attempt, ("s1b",)))
        found.append(again.round.owners)
    return found


def test_an_owner_that_does_not_step_twice_in_a_row_owns_nothing() -> None:
    leader, plan = opened(S1, T1, THIRD)
    assert stuck_rounds(leader, plan, ("s1b",), ("s1b",)) == [{}, {"s1a": THIRD}]


def test_a_round_in_which_an_owner_steps_starts_its_count_anew() -> None:
    leader, plan = opened(S1, T1, THIRD)
    both = ("s1a", "s1b")
    assert stuck_rounds(leader, plan, ("s1b",), both, ("s1b",)) == [{}, {}, {}]


def test_half_of_the_others_are_not_most_of_them() -> None:
    leader, plan = opened(S1, T1, THIRD)
    for attempt in range(2):
        lacks(leader, plan, [S1], attempt, holds=("s1a",))
        lacks(leader, plan, [T1], attempt, failed=(S1,))
        (again,) = rounds(lacks(leader, plan, [THIRD], attempt))
        assert "s1a" not in again.round.owners


@pytest.mark.parametrize(
    ("accusers", "owners"),
    [((T1,), {}), ((T1, THIRD), {"s1a": FOURTH}), ((T1, THIRD, FOURTH), {"s1a": FOURTH})],
)
def test_an_owner_that_gives_most_others_nothing_loses_its_parts(
    accusers: Sequence[PeerId], owners: dict[str, PeerId]
) -> None:
    """It has stepped them, and perhaps nobody but the leader can reach it."""
    leader, plan = opened(S1, T1, THIRD, FOURTH)
    again: list[ev.SendRound] = []
    for attempt in range(2):
        lacks(leader, plan, [S1], attempt, holds=("s1a",))
        for peer in (T1, THIRD, FOURTH):
            failed = (S1,) if peer in accusers else ()
            holds = ("s1b",) if peer in accusers else ("s1a", "s1b")
            again = rounds(lacks(leader, plan, [peer], attempt, holds, failed)) or again
    assert again[0].round.owners == owners


def test_where_all_owners_are_stuck_only_parts_of_the_dead_move() -> None:
    leader, plan = opened(S1, T1)
    for attempt in range(2):
        (again,) = rounds(lacks(leader, plan, [S1, T1], attempt))
        assert again.round.owners == {}, "there is nobody else"
    leader.handle(ev.Unreachable(S1), 4.0)
    (again,) = rounds(lacks(leader, plan, [T1], 2))
    assert again.round.owners == {"s1a": T1}


def test_in_a_large_stage_only_owners_take_over() -> None:
    """Of the owners alone it is known that every replica reaches them."""
    peers = [PeerId(f"stage1{n:02}") for n in range(ALL_OWN + 1)]
    leader, plan = opened(*peers)
    assert (plan.owners["s1a"], plan.owners["s1b"]) == (peers[0], peers[1])
    leader.handle(ev.Unreachable(peers[0]), 3.0)
    (again,) = rounds(lacks(leader, plan, peers[1:]))
    assert again.round.owners == {"s1a": peers[1]}
    leader.handle(ev.Unreachable(peers[1]), 4.0)
    (again,) = rounds(lacks(leader, plan, peers[2:], 1))
    assert set(again.round.owners.values()) == {peers[2], peers[3]}, "no owner is left"


def test_in_a_small_stage_everybody_takes_over() -> None:
    peers = [PeerId(f"stage1{n:02}") for n in range(ALL_OWN)]
    leader, plan = opened(*peers)
    leader.handle(ev.Unreachable(peers[0]), 3.0)
    (again,) = rounds(lacks(leader, plan, peers[1:]))
    assert again.round.owners == {"s1a": peers[-1]}


def test_a_listener_takes_over_no_parts() -> None:
    newcomer = replace(heard(FOURTH), digest="another")
    leader, plan = begun([*map(heard, (E, S2, S1, T1)), newcomer], assign=two_parts, late_s=1e9)
    assert plan.member(FOURTH).current is False
    reported(leader, plan, 3.0)
    leader.handle(ev.Unreachable(S1), 3.0)
    (again,) = rounds(lacks(leader, plan, [T1, FOURTH]))
    assert again.round.owners == {"s1a": T1}


def test_a_round_that_never_ends_is_given_up() -> None:
    leader, plan = opened(S1)
    done: list[Any] = []
    for attempt in range(5):
        assert "epoch-abandoned" not in kinds(done)
        done = lacks(leader, plan, [S1], attempt)
    (said,) = (a for a in done if isinstance(a, ev.RecordFact))
    assert said.text == "epoch 0 starts again: stage 1 could not finish its round in 5 attempts"


def test_a_report_of_another_attempt_does_not_count() -> None:
    leader, plan = opened(S1)
    assert lacks(leader, plan, [S1], 1) == []
    assert len(rounds(lacks(leader, plan, [S1], 0))) == 1
    assert lacks(leader, plan, [S1], 0) == [], "it is repeated"


def test_a_member_that_has_committed_lacks_nothing_any_more() -> None:
    leader, plan = opened(S1, T1)
    leader.handle(ev.Committed(S1, plan.hash, 0, "d1", 1.0), 3.0)
    assert lacks(leader, plan, [S1]) == []
    (copy,) = rounds(lacks(leader, plan, [T1]))
    assert (copy.to, copy.round.sources, copy.round.digest) == ((T1,), (S1,), "d1")
    assert copy.round.owners == {}


def test_reports_of_another_plan_or_by_strangers_change_no_round() -> None:
    leader, plan = opened(S1)
    stranger = PeerId("stage1x")
    assert lacks(leader, plan, [stranger]) == []
    words = (
        ev.Incomplete(S1, "another", 0, (), ()),
        ev.Committed(S1, "another", 0, "d1"),
        ev.Committed(stranger, plan.hash, 0, "d1"),
    )
    for word in words:
        assert leader.handle(word, 3.0) == []
    assert leader.phase is Phase.ROUND


@pytest.mark.parametrize("speed", [0.0, 4.0])
def test_a_commit_is_the_newest_that_the_leader_knows_of_a_member(speed: float) -> None:
    leader, plan = opened(S1)
    leader.handle(ev.Committed(S1, plan.hash, 0, "d1", speed), 3.0)
    following = next_plan(committed(leader, plan, 3.0, E, S2))
    assert following.digests[1] == "d1"
    members = {m.peer: (m.speed, m.current) for m in following.members}
    assert members == {E: (1.0, True), S2: (1.0, True), S1: (speed or 1.0, True)}


def test_the_next_plan_finds_repaired_parts_at_their_new_owner() -> None:
    leader, plan = opened(S1, T1)
    leader.handle(ev.Unreachable(S1), 5.0)
    (again,) = rounds(lacks(leader, plan, [T1], now=5.0))
    assert again.round.owners == {"s1a": T1}
    committed(leader, plan, 6.0, E, S2)
    done = committed(leader, plan, 6.0, T1, attempt=1)
    assert "epoch-committed" in kinds(done)
    following = next_plan(done)
    assert following.owners == plan.owners | {"s1a": T1}
    assert following.moved == {}, "T1 has stepped it"


@pytest.mark.parametrize("copies", [False, True])
def test_after_a_repeated_average_voters_are_heard_again_before_the_next_plan(
    copies: bool,
) -> None:
    """The dead of the first attempt may live behind a partition, and finish the round there. A
    copy makes nothing that they could."""
    others = [PeerId(f"stage2{c}") for c in "bcd"]
    leader, plan = begun(map(heard, (E, S1, T1, S2, *others)), late_s=1e9)
    reported(leader, plan, 3.0)
    committed(leader, plan, 3.0, E, S2, *others)
    if copies:
        committed(leader, plan, 4.0, S1)
        lacks(leader, plan, [T1], now=4.0)
    else:
        lacks(leader, plan, [S1, T1], now=4.0)
    done = committed(leader, plan, 4.5, S1, T1, attempt=1)
    assert "epoch-committed" in kinds(done)
    if copies:
        assert next_plan(done).epoch == 1
        return
    assert waits(leader, 5.0).startswith("more than half of the voters (3 of 7")
    note = replace(heard(S2, makes(plan, ()), 128), digest="digest 2 next")
    assert next_plan([*leader.handle(note, 5.5), *leader.handle(ev.ClockTick(), 5.5)]).epoch == 1


def test_owners_stay_from_plan_to_plan() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2)), assign=two_parts)
    following = next_plan(commits(leader, plan, 3.0))
    assert (following.owners, following.moved) == (plan.owners, {})


def test_a_member_that_cannot_be_spared_copies_until_the_round_is_given_up() -> None:
    """This is the leader itself."""
    second = PeerId("ends2")
    leader, plan = begun(map(heard, (E, second, S1, S2)), late_s=1e9, target_batch=4)
    reported(leader, plan, 3.0)
    committed(leader, plan, 3.0, second, S1, S2)
    found: list[ev.SendRound] = []
    done: list[Any] = []
    for attempt in range(7):
        assert "epoch-abandoned" not in kinds(done)
        done = lacks(leader, plan, [E], attempt)
        found += rounds(done)
    assert "epoch-abandoned" in kinds(done)
    assert {(note.to, note.round.sources) for note in found} == {((E,), (second,))}
    assert [note.round.attempt for note in found] == list(range(1, 7))
