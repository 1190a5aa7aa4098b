"""The leader's facts for the record: kind, sentence, level and numbers."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import Rules
from node.core.errors import OutOfResources
from node.core.ids import CellId, PeerId
from node.core.journey import (
    Electorate,
    Partner,
    Plan,
    PlanMember,
    Version,
    Window,
    lineage_after,
)
from node.epoch import events as ev
from node.epoch.attempts.timing import AttemptTimes
from node.epoch.events import RecordFact
from node.epoch.leader import reports
from node.epoch.leader.attempt import EpochAttempt
from node.pipeline.events import MicroBatchDone
from node.scheduler.placement import Move
from tests.training import test_leader
from tests.training.test_leader import S1, S2, T1, E, begun, commits, heard, reported

OWN = CellId("ab" * 8)
OTHER = CellId("cd" * 8)
ME = PeerId("me")
IT = PeerId("it")
MEMBERS = (PlanMember(ME, 0), PlanMember(IT, 1))
MOVE = Move(IT, 1, 2, 1.25)
AT = Version(7, "ab" * 16)
WAS = Version(9, "cd" * 16)
CROWD = [PeerId(f"peer{n}") for n in range(20)]
CHANGE = Rules(8, OuterSettings("butterfly", window_s=60.0), 3)


def means(*stages: int) -> Plan:
    window = Window(partners=(Partner(OTHER, IT, {}),), means=dict.fromkeys(stages, "d"))
    return Plan(7, 1, ME, MEMBERS, (), {}, outer=90, cell_id=OWN, window=window)


def committed(plan: Plan) -> RecordFact:
    return reports.epoch_committed(
        EpochAttempt(plan, AttemptTimes(0.0, 1.0)), Version(8), 100, 2.0, 1.0
    )


FOUNDED = Plan(12, 1, ME, MEMBERS, (), {}, cell_id=OTHER, parent=OWN)
DIVIDES = "cell ababab divides at epoch 12: 2 of its peers become cell cdcdcd"
LANDS = "epoch 7: puts in place the means with cell cdcdcd"


@pytest.mark.parametrize(
    ("report", "text", "facts"),
    [
        (lambda: reports.cell_divided(FOUNDED), DIVIDES, {"cell": OTHER, "peers": 2, "epoch": 12}),
        (lambda: reports.epoch_planned(means(0, 1), (), {}), LANDS, {"outer": 90}),
        (lambda: reports.epoch_planned(means(1), (), {}), f"{LANDS} at 1 of 2 stages", {}),
        (
            lambda: committed(means(0, 1)),
            "epoch 8/100 committed, the means with cell cdcdcd are in place",
            {"cell": OWN, "outer": 90},
        ),
        (
            lambda: committed(Plan(7, 1, ME, MEMBERS, (), {})),
            "epoch 8/100 committed, loss 2.000",
            {},
        ),
    ],
    ids=["divided", "all-stages", "one-stage", "mean", "training"],
)
def test_what_cells_do_is_said_with_their_names(
    report: Callable[[], RecordFact], text: str, facts: dict[str, object]
) -> None:
    said = report()
    assert said.text == text
    assert facts.items() <= said.facts.items()


def test_a_run_of_one_cell_says_nothing_of_cells() -> None:
    facts = committed(Plan(7, 1, ME, MEMBERS, (), {})).facts
    assert not {"cell", "orphan"} & facts.keys()


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (
            lambda: reports.peer_left(IT),
            RecordFact("peer-left", "peer it has left", facts={"peer": IT}),
        ),
        (
            lambda: reports.peer_lost(IT, "is silent"),
            RecordFact("peer-lost", "peer it is silent", "warning", {"peer": IT}),
        ),
        (
            lambda: reports.on_probation(IT, "was late", 14.96),
            RecordFact(
                "peer-on-probation",
                "peer it was late: it gets no work for 15 s",
                "warning",
                {"peer": IT, "seconds": 15.0},
            ),
        ),
        (
            lambda: reports.lied(IT, "sent noise", 3600.0),
            RecordFact(
                "false-tensors",
                "peer it sent noise, in several epochs: it gets no work for 3600 s",
                "warning",
                {"peer": IT, "seconds": 3600.0},
            ),
        ),
        (
            lambda: reports.excused(IT),
            RecordFact(
                "peer-excused", "peer it was only slow: its probation is over", facts={"peer": IT}
            ),
        ),
        (
            lambda: reports.move_asked(MOVE),
            RecordFact(
                "move-asked",
                "peer it should change from stage 1 to stage 2: the swarm becomes 1.25 times as "
                "fast",
                facts={"peer": IT, "source": 1, "target": 2, "gain": 1.25},
            ),
        ),
        (
            lambda: reports.help_asked(MOVE),
            RecordFact(
                "move-asked",
                "stage 2 lacks peers: it of stage 1 should change to it",
                facts={"peer": IT, "source": 1, "target": 2},
            ),
        ),
        (
            lambda: reports.out_of_room(OutOfResources("no room", "add a peer")),
            RecordFact(
                "out-of-memory",
                "the members cannot own every parameter: no room; add a peer",
                "error",
            ),
        ),
        (
            lambda: reports.agreement_lost((0, 2)),
            RecordFact(
                "agreement-lost",
                "nobody has the parameters that were agreed on at the ends, stage 2: goes on with "
                "what the peers there hold",
                "warning",
                {"stages": [0, 2]},
            ),
        ),
        (
            lambda: reports.undone_counted(),
            RecordFact(
                "undone-counted",
                "nobody can go back to the epoch that all agreed on: goes on with one replica's "
                "result",
                "warning",
            ),
        ),
        (
            lambda: reports.history_lost(AT),
            RecordFact(
                "history-lost",
                "nobody remembers the plan behind epoch 7: the order of samples is guessed",
                "warning",
                {"epoch": 7},
            ),
        ),
        (
            lambda: reports.version_unproven(AT, CROWD[:3]),
            RecordFact(
                "version-unproven",
                "epoch 7, held by peer0, peer1, peer2, is ignored: too few voters can have "
                "committed it, and no peer showed a certificate",
                "warning",
                {"epoch": 7, "lineage": AT.lineage, "peers": CROWD[:3]},
            ),
        ),
        (
            lambda: reports.version_unproven(AT, CROWD[:4]),
            RecordFact(
                "version-unproven",
                "epoch 7, held by peer0, peer1, peer2 and others, is ignored: too few voters can "
                "have committed it, and no peer showed a certificate",
                "warning",
                {"epoch": 7, "lineage": AT.lineage, "peers": CROWD[:4]},
            ),
        ),
        (
            lambda: reports.version_unproven(AT, CROWD),
            RecordFact(
                "version-unproven",
                "epoch 7, held by peer0, peer1, peer2 and others, is ignored: too few voters can "
                "have committed it, and no peer showed a certificate",
                "warning",
                {"epoch": 7, "lineage": AT.lineage, "peers": CROWD[:16]},
            ),
        ),
        (
            lambda: reports.history_changed(AT, WAS, 500, 400),
            RecordFact(
                "history-changed",
                "goes on from epoch 7 of a history with 500 tokens, more than the 400 here",
                "warning",
                {"epoch": 7, "from": 9, "tokens": 500},
            ),
        ),
        (
            lambda: reports.went_back(AT, WAS),
            RecordFact(
                "went-back",
                "goes back from epoch 9 to 7, which every stage still has",
                "warning",
                {"epoch": 7, "from": 9},
            ),
        ),
        (
            lambda: reports.stage_left_out(2, AT),
            RecordFact(
                "stage-left-out",
                "nobody holds stage 2: epoch 7 goes on without it",
                "warning",
                {"stage": 2, "epoch": 7},
            ),
        ),
        (
            lambda: reports.stage_back(2, WAS, AT),
            RecordFact(
                "stage-back",
                "stage 2 is there again from epoch 9 on, with the parameters of epoch 7",
                facts={"stage": 2, "epoch": 9, "held": 7},
            ),
        ),
        (
            lambda: reports.stage_fell_back({1: AT, 2: WAS}),
            RecordFact(
                "stage-fell-back",
                "the newest parameters of some stages are lost: goes on with stage 1 from epoch "
                "7, stage 2 from epoch 9; what was learned there since is lost",
                "error",
                {"stages": {"1": 7, "2": 9}},
            ),
        ),
        (
            lambda: reports.averaging_changed(CHANGE, AT),
            RecordFact(
                "averaging-changed",
                "change 3 of the owner comes into force at epoch 7: cells of 8, "
                f"{CHANGE.outer.says}",
                facts={"epoch": 7, "revision": 3},
            ),
        ),
        (
            lambda: reports.averaging_changed(Rules(revision=4), AT),
            RecordFact(
                "averaging-changed",
                "change 4 of the owner comes into force at epoch 7: cells of all replicas",
                facts={"epoch": 7, "revision": 4},
            ),
        ),
        (
            lambda: reports.round_repaired(1, 2, 3),
            RecordFact(
                "round-repaired",
                "stage 1 repeats its round (repair 2, members dead so far: 3)",
                "warning",
                {"stage": 1, "attempt": 2, "dead": 3},
            ),
        ),
        (
            lambda: reports.orphaned(Electorate((ME,), (ME, IT, E))),
            RecordFact(
                "orphaned",
                "goes on without a majority of the 3 voters: if these have gone on too, what is "
                "learned here is discarded when the two sides meet",
                "warning",
                {"voters": 1, "elders": 3},
            ),
        ),
        (
            lambda: reports.digest_mismatch(IT, 1),
            RecordFact(
                "digest-mismatch",
                "peer it differs from its cell and catches up",
                "error",
                {"peer": IT, "stage": 1},
            ),
        ),
        (
            lambda: reports.digests_disputed((1, 2), True),
            RecordFact(
                "digest-mismatch",
                "replicas of stage 1, stage 2 computed different parameters, and no majority "
                "agrees",
                "error",
                {"stages": [1, 2]},
            ),
        ),
        (
            lambda: reports.digests_disputed((1,), False),
            RecordFact(
                "digests-disputed",
                "replicas of stage 1 computed different parameters, and no majority agrees, after "
                "repeats too: goes on with those of one replica",
                "error",
                {"stages": [1]},
            ),
        ),
        (
            lambda: reports.evaluated(7, 2.5),
            RecordFact(
                "evaluated",
                "held-out loss 2.500 at epoch 7",
                facts={"epoch": 7, "loss_val": 2.5},
            ),
        ),
        (
            lambda: reports.worse(7, 2.5, 2.0, "go slower"),
            RecordFact(
                "worse-than-before",
                "the held-out loss 2.500 at epoch 7 is above 2.000, that before training: go "
                "slower",
                "warning",
                {"epoch": 7, "loss_val": 2.5, "loss_val_before": 2.0},
            ),
        ),
        (lambda: reports.run_finished(9), RecordFact("run-finished", "all 9 epochs are committed")),
    ],
    ids=lambda value: value.kind if isinstance(value, RecordFact) else None,
)
def test_a_fact_has_its_sentence_and_its_numbers(
    report: Callable[[], RecordFact], expected: RecordFact
) -> None:
    assert report() == expected


# ------------------------------------------------------------ an epoch, as its leader reports it


def of_kind(actions: Iterable[Any], kind: str) -> RecordFact:
    """The one recorded fact of this kind among the actions."""
    (found,) = (a for a in actions if isinstance(a, RecordFact) and a.kind == kind)
    return found


LISTENER = replace(heard(T1), digest="another digest")


def test_a_planned_epoch_is_reported_with_its_members_and_samples() -> None:
    leader, first = begun([*map(heard, (E, S1, S2)), LISTENER])
    leader.handle(ev.Declined(first.hash, "no reason"), 2.0)
    said = of_kind(leader.handle(ev.ClockTick(), 4.0), "epoch-planned")
    plan = leader.plan
    assert plan is not None
    assert said.text == "epoch 0: 2 micro-batches over 3 peers, 1 catching up"
    assert said.level == "debug"
    expected = {
        "epoch": 0,
        "lineage": "",
        "term": 2,
        "hash": plan.hash[:12],
        "members": 4,
        "listeners": 1,
        "cursor": 0,
        "returned": 0,
        "positions": [0, []],
        "tokens": 0,
        "micro_batches": 2,
        "peers": [E, S1, T1, S2],
        "paths": "round-robin",
        "laid_by": "turns",
        "skip": 0.0,
    }
    assert said.facts == expected


def test_the_samples_that_a_plan_has_behind_it_are_reported() -> None:
    leader, plan = begun()
    rows = (MicroBatchDone(0, True, 1.0, 64), MicroBatchDone(1, False))
    leader.handle(ev.MicroBatchesReported(E, plan.hash, rows), 3.0)
    done = test_leader.committed(leader, plan, 4.0)
    facts = of_kind(done, "epoch-planned").facts
    lost = plan.paths[1].samples
    assert (facts["cursor"], facts["returned"], facts["tokens"]) == (8, len(lost), 64)
    assert facts["positions"] == [8, list(lost)]


def test_a_committed_epoch_is_reported_with_its_times_and_losses() -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1)), epoch_s=20.12345, round_s=6.12345)
    rows = (MicroBatchDone(0, True, 128.0, 64), MicroBatchDone(1, False, 7.0, 64))
    leader.handle(ev.MicroBatchesReported(E, plan.hash, rows), 5.0)
    assert not leader.handle(ev.Unreachable(PeerId("stranger")), 5.0)
    leader.handle(ev.Unreachable(T1), 5.5)
    leader.handle(ev.Incomplete(S1, plan.hash, 0, (), ()), 6.0)
    test_leader.committed(leader, plan, 6.5, E, S1)
    done = test_leader.committed(leader, plan, 6.5, S2)
    said = of_kind(done, "epoch-committed")
    assert said.text == "epoch 1/100 committed, loss 2.000"
    assert said.level == "info"
    expected = {
        "epoch": 1,
        "lineage": lineage_after(plan, (1,)),
        "term": 1,
        "hash": plan.hash[:12],
        "loss": 2.0,
        "tokens": 64,
        "counted": 1,
        "seconds": 4.5,
        "run_s": 3.0,
        "within_s": [20.123, 12.247],
        "predicted_s": 0.0,
        "dropped": 1,
        "repaired": 1,
        "dead": 1,
    }
    assert said.facts == expected


def test_an_abandoned_epoch_is_reported_with_its_reason() -> None:
    leader, plan = begun()
    (said,) = leader.handle(ev.Declined(plan.hash, "its disk is full"), 3.0)
    why = "epoch 0 starts again: the leader cannot follow its own plan: its disk is full"
    facts = {"epoch": 0, "hash": plan.hash[:12], "micro_batches": 2}
    assert said == RecordFact("epoch-abandoned", why, "warning", facts)


def test_an_epoch_without_enough_votes_is_reported_as_uncertain() -> None:
    leader, plan = begun(map(heard, (E, S1, S2, T1)))
    reported(leader, plan, 3.0)
    leader.handle(ev.Equivocated(frozenset({S1, S2, T1})), 3.0)
    done = test_leader.committed(leader, plan, 4.0)
    said = of_kind(done, "epoch-uncertain")
    facts = {"epoch": 1, "voters": 4, "voted": 4, "hash": plan.hash[:12]}
    assert said.facts == facts
    assert said.level == "warning"
    assert leader.idle
    assert not [a for a in done if isinstance(a, RecordFact) and a.kind == "epoch-committed"]


def test_the_end_of_the_run_is_reported() -> None:
    leader, plan = begun(epochs=1)
    said = of_kind(commits(leader, plan, 3.0), "run-finished")
    assert said.text == "all 1 epochs are committed"
