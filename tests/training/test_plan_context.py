"""The context of a version, and the leader's knowledge of the plans behind versions."""

from dataclasses import replace

from node.core.ids import CellId, PeerId
from node.core.journey import Hop, Losses, Path, Plan, PlanMember, Version
from node.core.samples import WHOLE, SampleClass
from node.epoch.plan_context import GENESIS, Memory, PastPlan, PlanContext, makes
from tests.training.run_facts import facts

E, S = (PeerId(p) for p in ("ends", "stage"))
BASE = Version(3, "aa" * 16)
OLD = Version(1, "bb" * 16)
OTHER = Version(8, "cc" * 16)
PATHS = tuple(Path(i, E, (10 + 2 * i, 11 + 2 * i), (Hop(1, S),)) for i in range(2))
PLAN = Plan(
    BASE.epoch,
    4,
    E,
    (PlanMember(E, 0), PlanMember(S, 1)),
    PATHS,
    {"w": S},
    lineage=BASE.lineage,
    cursor=(SampleClass(0, 0, 10),),
    tokens=300,
    change="signed",
    reference=Losses(4.0, 4.5),
)
BEFORE = PlanContext(PLAN.cursor, {"w": S}, 300, "signed", reference=PLAN.reference)


def test_the_context_before_a_plan_is_its_own() -> None:
    assert PlanContext.before(PLAN) == BEFORE
    founding = replace(PLAN, paths=(), cell_id=CellId("ab" * 8), parent=CellId("cd" * 8))
    assert PlanContext.before(founding) == replace(BEFORE, founded=True)


def test_the_context_after_a_plan_has_its_samples_behind_it() -> None:
    after = PlanContext.after(PLAN, (), {"w": E}, 428)
    taken = PlanContext((SampleClass(0, 0, 14),), {"w": E}, 428, "signed", False, PLAN.reference)
    assert after == taken
    some = PlanContext.after(PLAN, (0,), {"w": E}, 364)
    assert some.cursor == (SampleClass(0, 0, 14, (10, 11)),), "what did not count is given back"


def test_a_leader_knows_the_versions_that_its_newest_plan_explains() -> None:
    memory = Memory(PastPlan(PLAN, (1,)))
    assert memory.past(BASE, 0, 4) == BEFORE
    made = makes(PLAN, (1,))
    lost = (SampleClass(0, 0, 14, (12, 13)),)
    assert memory.past(made, 900, 4) == replace(BEFORE, cursor=lost, tokens=900)
    assert memory.past(made, 5, 4) == replace(BEFORE, cursor=lost), "no fewer than before"
    assert memory.past(makes(PLAN, ()), 900, 4) is None, "another micro-batch did not count"
    assert memory.past(GENESIS, 7, 4) == PlanContext(WHOLE, {}, 0)
    assert memory.past(OTHER, 7, 4) is None


def test_a_commit_is_known_with_its_owners_and_its_own_count() -> None:
    memory = Memory(None)
    made = makes(PLAN, (0,))
    memory.committed(made, PLAN, {"w": E}, (0,), 364)
    known = memory.past(made, 9999, 4)
    assert known == PlanContext.after(PLAN, (0,), {"w": E}, 364)
    assert memory.past(BASE, 0, 4) == BEFORE
    again = replace(PLAN, term=5)
    memory.planned(again)
    assert memory.past(made, 0, 4) is None, "it was undone"
    assert memory.past(makes(again, ()), 0, 4) is not None


def test_contexts_of_checkpoints_are_known_until_the_checkpoints_change() -> None:
    memory = Memory(None)
    memory.kept(((OTHER, BEFORE),))
    assert memory.past(OTHER, 0, 4) == BEFORE
    assert memory.knows(OTHER)
    memory.kept(((OLD, BEFORE),))
    assert memory.past(OTHER, 0, 4) is None
    assert not memory.knows(OTHER)


def test_other_peers_are_asked_once_and_waited_for() -> None:
    memory = Memory(None)
    assert memory.asking(OTHER, 10.0, 5.0) == "ask"
    assert memory.asking(OTHER, 14.9, 5.0) == "wait"
    assert memory.asking(OTHER, 15.0, 5.0) == "over"
    assert memory.asking(OLD, 15.0, 5.0) == "ask", "another version"
    assert memory.asking(OLD, 16.0, 5.0) == "wait"
    memory.planned(PLAN)
    assert memory.asking(OLD, 16.0, 5.0) == "ask"
    assert memory.ask_again(OLD)
    assert not memory.ask_again(OLD)
    assert memory.asking(OLD, 17.0, 5.0) == "ask"
    assert not memory.ask_again(OTHER)


def test_a_recalled_plan_is_gone_on_from_if_it_was_asked_for() -> None:
    made = makes(PLAN, (0,))
    memory = Memory(None)
    assert memory.recalled(made, PLAN, (0,)) is None, "nobody was asked"
    memory.asking(made, 0.0, 5.0)
    assert memory.recalled(OTHER, PLAN, (0,)) is None
    assert memory.recalled(made, PLAN, (0,)) is True
    assert memory.past(made, 364, 4) == PlanContext.after(PLAN, (0,), {"w": S}, 364)
    assert memory.recalled(made, PLAN, (0,)) is None, "once"
    memory.asking(BASE, 0.0, 5.0)
    assert memory.recalled(BASE, PLAN, ()) is True, "it starts there"
    assert memory.past(BASE, 0, 4) == BEFORE


def test_a_recalled_plan_replaces_the_leaders_own_history() -> None:
    memory = Memory(None)
    memory.planned(PLAN)
    made = makes(PLAN, ())
    memory.committed(made, PLAN, {"w": E}, (), 428)
    other = replace(PLAN, term=9, lineage="dd" * 16)
    memory.asking(other.base, 0.0, 5.0)
    assert memory.recalled(other.base, other, ()) is True
    assert memory.past(made, 428, 4) is None


def test_a_version_that_nobody_remembers_is_guessed_from_its_epoch() -> None:
    memory = Memory(None)
    memory.asking(OTHER, 0.0, 5.0)
    assert memory.recalled(OTHER, None, ()) is False
    guess = PlanContext((SampleClass(0, 0, 8 * 4),), {}, 77)
    assert memory.past(OTHER, 77, 4) == guess
    assert memory.past(OTHER, -1, 4) == replace(guess, tokens=0), "nobody says a number"
    memory.kept(((OTHER, BEFORE),))
    assert memory.past(OTHER, 77, 4) == BEFORE


def test_stages_that_stood_still_do_until_they_have_worked() -> None:
    stood = {1: OLD, 2: OLD}
    memory = Memory(PastPlan(replace(PLAN, stood=stood)))
    assert memory.stood(BASE) == stood
    plan = replace(PLAN, stood=stood)
    assert memory.stood(makes(plan, ())) == {2: OLD}, "stage 1 has a current member"
    memory.committed(makes(plan, (1,)), plan, {}, (1,), 364)
    assert memory.stood(makes(plan, (1,))) == {2: OLD}
    assert memory.stood(makes(plan, ())) == {}, "that version was not made"
    assert memory.stood(OTHER) == {}
    assert Memory(PastPlan(PLAN)).stood(BASE) == {}
    assert Memory(None).stood(BASE) == {}


def test_the_facts_of_a_run_bound_what_others_claim() -> None:
    bounds = facts(epochs=7, target_batch=8, micro_batch=4, sequence=16, stages=3).bounds
    assert (bounds.epochs, bounds.tokens, bounds.stages, bounds.micro_batches) == (7, 128, 3, 2)
