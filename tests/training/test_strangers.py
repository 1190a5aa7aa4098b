"""Heartbeats of strangers to a leader, within all bounds: the history that goes on, and the
increase of its term."""

import dataclasses
from typing import Any

from node.consensus.terms import STEP_HEARD
from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from tests.training.run_facts import facts
from tests.training.test_leader import tell

E = PeerId("ends")
S1 = PeerId("stage1")
S2 = PeerId("stage2")
X = PeerId("0-ends")
X1 = PeerId("0-stage1")
X2 = PeerId("0-stage2")
OURS = Version(5, "aa" * 16)
THEIRS = Version(90, "bb" * 16)
EACH = 128


def leader(known: frozenset[PeerId], term: int = 7) -> Leader:
    return Leader(E, facts(late_s=1e9), term=term, known=known)


def heard(peer: PeerId, at: Version, term: int = 7, **about: Any) -> ev.Heartbeat:
    stage = 0 if peer.endswith("ends") else int(peer[-1])
    tokens = at.epoch * EACH
    return dataclasses.replace(
        ev.Heartbeat(
            peer, stage, at, f"digest {stage} {at}", ev.Capacity(1.0), tokens=tokens, term=term
        ),
        **about,
    )


def planned(made: Leader, *said: ev.Heartbeat, known: frozenset[PeerId]) -> Plan:
    """Repeat these heartbeats until there is a plan, and return it."""
    for second in range(120):
        now = float(second)
        todo = [
            a
            for word in said
            for a in [*made.handle(word, now), *made.handle(ev.ClockTick(known=known), now)]
        ]
        while todo:
            match todo.pop(0):
                case ev.SendPlan(plan):
                    return plan
                case ev.Recall(version):
                    todo += made.handle(ev.Recalled(version), now)
    raise AssertionError(str(made.gathering.waiting))


ALL = (heard(E, OURS), heard(S1, OURS), heard(S2, OURS))
STRANGERS = (heard(X, THEIRS), heard(X1, THEIRS), heard(X2, THEIRS))


def test_strangers_do_not_determine_the_starting_version() -> None:
    known = frozenset({S1, S2})
    plan = planned(leader(known), *STRANGERS, *ALL, known=known)
    assert (plan.base, {m.peer for m in plan.members if m.current}) == (OURS, {E, S1, S2})
    assert plan.tokens == OURS.epoch * EACH


def test_a_parted_side_of_known_colleagues_is_trusted() -> None:
    known = frozenset({S1, S2, X, X1, X2})
    assert planned(leader(known), *ALL, *STRANGERS, known=known).base == THEIRS


def test_the_leaders_own_history_needs_no_colleagues() -> None:
    """They have lost theirs."""
    known = frozenset({S1, S2})
    young = Version(0)
    said = (heard(E, OURS), heard(S1, young), heard(S2, young), heard(X1, OURS), heard(X2, OURS))
    plan = planned(leader(known), *said, known=known)
    assert (plan.base, {m.peer for m in plan.members if m.current}) == (OURS, {E, X1, X2})


def test_strangers_count_where_no_colleague_of_a_stage_is_left() -> None:
    known = frozenset({S1})
    said = (heard(E, OURS), heard(S1, THEIRS), heard(X, THEIRS), heard(X2, THEIRS))
    assert planned(leader(known), *said, known=known).base == THEIRS


def test_nobody_waits_for_strangers_that_claim_more_tokens() -> None:
    known = frozenset({S1, S2})
    made = leader(known)
    tell(made, (heard(X1, THEIRS), *ALL), 0.0)
    made.handle(ev.ClockTick(known=known), 2.0)
    assert made.plan is None or made.plan.base == OURS
    assert "counted more tokens" not in str(made.gathering.waiting)


def test_one_report_raises_the_term_only_as_plans_explain() -> None:
    known = frozenset({S1, S2})
    plan = planned(leader(known), *ALL, heard(X1, OURS, term=1 << 40), known=known)
    assert 7 < plan.term <= 8 + STEP_HEARD
    plan = planned(leader(known), *ALL[:2], heard(S2, OURS, term=5000), known=known)
    assert plan.term == 5001, "the other side of a parted network made more plans"


def test_a_leader_that_knows_no_term_believes_the_majority() -> None:
    known = frozenset({S1, S2})
    said = (
        heard(E, OURS, term=0),
        heard(S1, OURS, term=9_000_000),
        heard(S2, OURS, term=9_000_003),
        heard(X1, OURS, term=1 << 40),
    )
    plan = planned(leader(known, term=0), *said, known=known)
    assert 9_000_003 < plan.term <= 9_000_003 + STEP_HEARD + 1
