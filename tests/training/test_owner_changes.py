"""The owner's changes at one peer: the reports of them to leaders, and the plans under older
ones."""

from dataclasses import replace

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import ChangeStatus, Rules, mark
from node.core.ids import PeerId
from node.core.journey import Plan

LEADER = PeerId("leader")
OTHER = PeerId("other")
OWN = Rules()
FIRST = Rules(2, OuterSettings("gossip", window_s=60.0), 1, "first")
SECOND = Rules(4, revision=2, change="second")
PLAN = Plan(3, 1, LEADER, (), (), {}, outer=1)


@pytest.fixture
def changes() -> ChangeStatus:
    return ChangeStatus(OWN)


def test_a_new_change_is_learned_once(changes: ChangeStatus) -> None:
    assert (changes.known, changes.in_force) == (OWN, OWN)
    assert changes.learns(FIRST)
    assert not changes.learns(FIRST)
    assert (changes.known, changes.in_force) == (FIRST, OWN), "no plan is under it yet"
    assert changes.learns(SECOND)
    assert not changes.learns(FIRST)
    assert changes.known == SECOND


def test_a_change_with_the_number_of_the_known_one_is_not_learned(changes: ChangeStatus) -> None:
    changes.learns(FIRST)
    assert not changes.learns(replace(FIRST, change="twin"))
    assert changes.known == FIRST


def test_each_leader_hears_of_the_change_until_its_plan_shows_it(changes: ChangeStatus) -> None:
    assert changes.tells(LEADER) == "", "the manifest's own settings are no change"
    changes.learns(FIRST)
    assert changes.tells(LEADER) == "first"
    assert not changes.follows(LEADER, OWN), "a plan from before the change"
    assert changes.tells(LEADER) == "first"
    assert not changes.follows(LEADER, FIRST)
    assert changes.in_force == FIRST
    assert changes.tells(LEADER) == ""
    assert changes.tells(OTHER) == "first", "the next leader may have missed that plan"
    changes.learns(SECOND)
    assert changes.tells(LEADER) == "second"


def test_a_change_that_first_comes_with_a_plan_is_news(changes: ChangeStatus) -> None:
    assert changes.follows(LEADER, FIRST)
    assert (changes.known, changes.in_force) == (FIRST, FIRST)
    assert changes.tells(LEADER) == ""
    assert not changes.follows(LEADER, FIRST)
    assert changes.follows(LEADER, SECOND)


def test_of_two_changes_with_one_number_the_one_in_a_plan_counts(changes: ChangeStatus) -> None:
    changes.learns(FIRST)
    twin = replace(FIRST, change="twin")
    assert changes.follows(LEADER, twin)
    assert (changes.known, changes.in_force) == (twin, twin)


def test_a_plan_under_an_older_change_than_the_one_in_force_is_refused(
    changes: ChangeStatus,
) -> None:
    changes.learns(SECOND)
    assert changes.refuses(PLAN, OWN) == "", "no plan was under the known change yet"
    changes.follows(LEADER, SECOND)
    assert changes.refuses(PLAN, SECOND) == ""
    assert changes.tells(LEADER) == ""
    why = changes.refuses(PLAN, FIRST)
    assert "under change 1" in why
    assert "change 2 is in force" in why
    assert changes.tells(LEADER) == "second", "the leader has forgotten it"


def test_a_plan_that_ends_the_run_is_under_any_change(changes: ChangeStatus) -> None:
    changes.follows(LEADER, SECOND)
    assert changes.refuses(replace(PLAN, outer=0), FIRST) == ""
    assert changes.tells(LEADER) == ""


def test_an_invite_is_revoked_with_all_who_came_with_it() -> None:
    invite = PeerId("invite")
    status = ChangeStatus(OWN, {OTHER: invite}.get)
    assert not status.revokes(OTHER)
    status.learns(Rules(revision=1, change="1", revoked=frozenset({mark(invite)})))
    assert status.revokes(OTHER)
    assert not status.revokes(LEADER)


def test_only_the_marked_peers_are_revoked() -> None:
    rules = Rules(revoked=frozenset({mark(OTHER)}))
    assert rules.revokes(OTHER)
    assert not rules.revokes(LEADER)
    assert not OWN.revokes(OTHER)
    assert len(mark(OTHER)) == 16
