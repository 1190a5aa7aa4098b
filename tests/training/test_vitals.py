"""A peer is shown as silent or lost at the first evidence, and as living at its next sign."""

from typing import Any

import pytest

from node.coordinator import messenger, service
from node.coordinator.vitals import Life, Vitals
from node.core.ids import PeerId
from node.epoch import events as ev
from protos import training_pb2 as pb
from tests.training.test_damaged import taking_part

A = PeerId("A")
LIFE_S = 20.0


@pytest.fixture
def vitals() -> Vitals:
    """A peer that was heard at 100 s and renewed its record then."""
    made = Vitals()
    made.record(A, 1, LIFE_S, 5.0, 100.0)
    made.alive(A, 100.0)
    return made


def test_a_stranger_and_a_peer_that_was_just_heard_live(vitals: Vitals):
    assert vitals.look(PeerId("B"), 100.0) == (Life.LIVES, 0.0)
    assert vitals.look(A, 103.0) == (Life.LIVES, 0.0)


def test_a_broken_connection_makes_a_peer_silent_since_its_last_sign(vitals: Vitals):
    vitals.doubt(A, 104.0)
    assert vitals.look(A, 104.0) == (Life.SILENT, 4.0)
    vitals.doubt(A, 110.0)
    assert vitals.look(A, 110.0) == (Life.SILENT, 10.0)


def test_the_leaders_word_makes_it_lost_unless_it_was_heard_since(vitals: Vitals):
    vitals.dead(A, 106.0, since=99.0)
    assert vitals.look(A, 106.0) == (Life.LIVES, 0.0)
    vitals.dead(A, 106.0, since=101.0)
    assert vitals.look(A, 109.0) == (Life.LOST, 3.0)


@pytest.mark.parametrize("kind", ["doubt", "dead"])
def test_an_answer_ends_the_evidence_and_an_older_one_does_not(vitals: Vitals, kind: str):
    getattr(vitals, kind)(A, 104.0)
    vitals.alive(A, 103.0)
    assert vitals.look(A, 105.0)[0] is not Life.LIVES
    vitals.alive(A, 105.0)
    assert vitals.look(A, 105.0) == (Life.LIVES, 0.0)


def test_one_renewal_may_be_old_news_and_two_are_a_sign_of_life(vitals: Vitals):
    vitals.doubt(A, 104.0)
    vitals.record(A, 2, LIFE_S, 5.0, 105.0)
    assert vitals.look(A, 105.0)[0] is Life.SILENT
    vitals.record(A, 2, LIFE_S, 5.0, 107.0)
    assert vitals.look(A, 107.0)[0] is Life.SILENT
    vitals.record(A, 3, LIFE_S, 5.0, 110.0)
    assert vitals.look(A, 110.0)[0] is Life.LIVES


@pytest.mark.parametrize("kind", ["doubt", "dead"])
def test_a_peer_that_had_said_so_has_left(vitals: Vitals, kind: str):
    vitals.leaves(A, True)
    assert vitals.look(A, 101.0)[0] is Life.LIVES
    getattr(vitals, kind)(A, 104.0)
    assert vitals.look(A, 105.0) == (Life.LEFT, 1.0)
    vitals.alive(A, 106.0)
    vitals.leaves(A, False)
    vitals.doubt(A, 107.0)
    assert vitals.look(A, 107.0)[0] is Life.SILENT


def test_a_daemon_that_was_started_again_lives(vitals: Vitals):
    vitals.dead(A, 104.0)
    vitals.record(A, 2, LIFE_S, 6.0, 105.0)
    assert vitals.look(A, 105.0)[0] is Life.LIVES


def test_a_record_that_is_not_renewed_in_time_makes_its_writer_silent(vitals: Vitals):
    vitals.record(A, 1, LIFE_S, 5.0, 111.0)
    assert vitals.look(A, 111.0)[0] is Life.LIVES
    vitals.record(A, 1, LIFE_S, 5.0, 113.0)
    assert vitals.look(A, 113.5) == (Life.SILENT, 13.5)
    vitals.alive(A, 112.0)
    assert vitals.look(A, 113.5)[0] is Life.LIVES


def test_a_record_whose_number_is_ahead_of_its_life_says_nothing_of_silence(vitals: Vitals):
    vitals.record(A, 2, -3600.0, 5.0, 101.0)
    vitals.record(A, 2, -3600.0, 5.0, 200.0)
    assert vitals.look(A, 200.0)[0] is Life.LIVES


def test_a_directory_that_was_not_read_is_no_evidence(vitals: Vitals):
    assert vitals.look(A, 500.0)[0] is Life.LIVES


async def test_only_peers_in_sight_are_lost_because_another_one_says_so(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another peer could fill the memory with names that nobody has."""
    a, b, plan = await rig.trained("ab", 1)
    t = taking_part(a)
    strange = PeerId("x" * 100_000)
    following = rig.plan((a, b), dict.fromkeys(rig.shapes, a), plan)
    t.member.handle(ev.VersionPlaced(following.base, (), 0), 0.0)
    t.member.handle(ev.PlanArrived(following), 0.0)
    monkeypatch.setattr(a.work, "lost", lambda plan_hash, dead: None)
    note = pb.DeadNote(plan_hash=following.hash, dead=[strange, a.me, b.me])
    assert t.hear_of_dead(plan.leader, note) is None
    assert t.kit.vitals.lost() == [b.me]

    async def tell(channel: Any, said: Any, timeout: float) -> pb.NoteReply:
        return pb.NoteReply(accepted=True, lost=[strange, a.me, b.me])

    monkeypatch.setattr(messenger, "tell", tell)
    t = taking_part(a)
    await t.messenger.send(b.me, pb.Note(ready=pb.ReadyNote()), 5.0)
    assert t.kit.vitals.lost() == [], "it has just answered"
    monkeypatch.setattr(service, "HEARD_S", 0.0)
    await t.messenger.send(b.me, pb.Note(ready=pb.ReadyNote()), 5.0)
    assert t.kit.vitals.lost() == [b.me]


async def test_a_stage_remembers_whom_the_leader_of_its_plan_has_found_dead(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, plan = await rig.trained("ab", 1)
    monkeypatch.setattr(a.work.engines.pipeline, "gone", lambda peer: None, raising=False)
    following = rig.plan((a, b), dict.fromkeys(rig.shapes, a), plan)
    await a.work.begin(following, False)
    a.work.lost(following.hash, {b.me, PeerId("a stranger")})
    a.work.lost(following.hash, set())
    assert a.work.lost_in(following) == (b.me,)
    assert a.work.lost_in(plan) == ()
    after = rig.plan((a, b), dict.fromkeys(rig.shapes, a), following)
    await a.work.begin(after, False)
    assert a.work.lost_in(after) == ()


async def test_news_of_a_death_that_comes_before_its_plan_begins_here_counts_in_it(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, plan = await rig.trained("ab", 1)
    gone = list[PeerId]()
    monkeypatch.setattr(a.work.engines.pipeline, "gone", gone.append, raising=False)
    following = rig.plan((a, b), dict.fromkeys(rig.shapes, a), plan)
    a.work.lost(following.hash, {b.me})
    assert (gone, a.work.lost_in(plan)) == ([], ()), "the plan before goes on with it"
    await a.work.begin(following, False)
    assert gone == [b.me]
    assert a.work.lost_in(following) == (b.me,)
