"""Times at which a cell divides; it stays whole where one of the two could not work."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import Rules
from node.core.errors import OutOfResources
from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Plan, PlanMember, Version
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.leader.division import LEFT_S, POSTPONED_S
from node.epoch.leader.leader import Leader
from tests.training.run_facts import assign, facts
from tests.training.test_leader import heard, heir, kinds, with_ways

PEERS = [PeerId(f"{p}{n}") for p in ("ends", "stage1", "stage2") for n in "ab"]
AT = Version(9, "a" * 32)
CELL = CellId("ab" * 8)
RULES = Rules(1, OuterSettings("gossip", window_s=60.0))


def whole(bits: int = 0, peers: Sequence[PeerId] = PEERS, **kw: Any) -> Leader:
    """The leader of a cell that may divide, before it has heard anybody. `bits`: number of times
    that the samples were halved."""
    history = Plan(
        AT.epoch,
        5,
        PEERS[0],
        tuple(PlanMember(p, heard(p).stage) for p in peers),
        (),
        {f"s{stage}": PEERS[2 * stage] for stage in range(3)},
        lineage=AT.lineage,
        cursor=(SampleClass(0, bits, 0),),
        tokens=500,
        loss=2.5,
        loss_val=3.5,
        cell_id=CELL,
        electorate=Electorate(tuple(peers)),
    )
    known = facts(**{"read": lambda change: RULES, "prove": True} | kw)
    return heir(PEERS[0], known, history, rules=RULES, cell=CELL)


def acts(
    leader: Leader,
    notes: Sequence[ev.Heartbeat],
    apart: tuple[tuple[PeerId, PeerId], ...] = (),
    begin: float = 0.0,
) -> list[Any]:
    """Actions of the leader in 5 seconds after it has heard these notes. `apart`: pairs that do not
    reach each other."""
    far = {frozenset(pair) for pair in apart}
    peers = [note.peer for note in notes]
    done = []
    for note in notes:
        reached = (q for q in peers if {note.peer, q} not in far)
        done += leader.handle(with_ways(note, *reached), begin)
    for second in range(5):
        done += leader.handle(ev.ClockTick(), begin + second)
    return done


def sent(actions: list[Any]) -> list[Plan]:
    return [a.plan for a in actions if isinstance(a, ev.SendPlan)]


def sent_last(leader: Leader) -> Plan:
    """The plan under way."""
    assert leader.plan is not None
    return leader.plan


def here(peer: PeerId, **about: Any) -> ev.Heartbeat:
    return heard(peer, AT, 500, term=5, **about)


def plans(
    bits: int = 0, apart: tuple[tuple[PeerId, PeerId], ...] = (), **kw: Any
) -> tuple[Leader, list[Plan]]:
    """A leader of a cell with twice the peers that a cell may have, and its plans of 5 seconds."""
    leader = whole(bits, **kw)
    return leader, sent(acts(leader, [here(p) for p in PEERS], apart))


@pytest.mark.parametrize(("bits", "cells"), [(31, 2), (32, 1)])
def test_a_share_that_cannot_be_halved_again_stays_whole(bits: int, cells: int) -> None:
    assert len(plans(bits)[1]) == cells


def fits_nowhere(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
    """In half of the cell."""
    if previous and len(cell) == 1:
        raise OutOfResources("a part fits nowhere", "add a peer")
    return assign(stage, cell, previous, room)


@pytest.mark.parametrize(
    "lacks",
    [{"apart": ((PeerId("stage1a"), PeerId("stage2a")),)}, {"assign": fits_nowhere}],
    ids=["a-way-among-who-stays", "memory"],
)
def test_a_division_that_cannot_be_planned_changes_nothing(lacks: dict[str, Any]) -> None:
    _, (plan,) = plans(**lacks)
    assert [m.peer for m in plan.members] == PEERS
    assert plan.cursor == (SampleClass(0, 0, 0),), "the cell has given no samples away"


STAY = PEERS[::2]
LEAVE = PEERS[1::2]


def test_a_cell_above_its_size_divides_and_both_halves_go_on_from_its_version() -> None:
    leader = whole()
    done = acts(leader, [here(p) for p in PEERS])
    assert kinds(done)[:2] == ["cell-divided", "epoch-planned"]
    founds, stays = sent(done)
    assert (founds.term, stays.term) == (6, 7)
    assert [(m.peer, m.stage) for m in founds.members] == [(p, heard(p).stage) for p in LEAVE]
    assert [m.peer for m in stays.members] == STAY
    assert (founds.base, stays.base) == (AT, AT)
    assert (founds.parent, founds.cell_id) == (CELL, stays.founds)
    assert stays.cell_id == CELL
    assert founds.cell_id != CELL
    assert founds.electorate == Electorate(tuple(LEAVE))
    assert set(stays.electorate.voters) == set(STAY)
    assert {c.remainder for c in (*founds.cursor, *stays.cursor)} == {0, 1}
    assert founds.owners == {f"s{stage}": PEERS[2 * stage] for stage in range(3)}
    assert founds.digests == stays.digests == {s: here(p).digest for s, p in enumerate(STAY)}
    assert (founds.loss, founds.loss_val, founds.tokens) == (2.5, 3.5, 500)
    assert (founds.change, founds.paths) == ("", ())


@pytest.mark.parametrize("half", [PEERS[::2], PEERS[1::2]])
def test_a_half_without_the_memory_for_the_state_does_not_come_to_be(
    half: Sequence[PeerId],
) -> None:
    def place(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
        if not previous and [p for p, _ in cell] == [half[2]]:
            raise OutOfResources("no room", "add a peer")
        return assign(stage, cell, previous, room)

    _, (plan,) = plans(assign=place)
    assert [m.peer for m in plan.members] == PEERS


def test_the_first_plan_of_a_new_cell_takes_the_state_from_the_owners_of_the_old_one() -> None:
    founds, _ = sent(acts(whole(), [here(p) for p in PEERS]))
    known = facts(read=lambda change: RULES, prove=True)
    leader = heir(LEAVE[0], known, founds, rules=RULES, cell=founds.cell_id)
    (plan,) = sent(acts(leader, [here(p) for p in LEAVE]))
    assert (plan.base, plan.cell_id, plan.parent) == (AT, founds.cell_id, "")
    assert plan.owners == {f"s{stage}": peer for stage, peer in enumerate(LEAVE)}
    assert plan.moved == founds.owners
    assert plan.electorate == Electorate(tuple(LEAVE))
    assert plan.tokens == founds.tokens


def test_messages_from_before_the_division_bring_nobody_back() -> None:
    leader = whole()
    done = acts(leader, [here(p) for p in PEERS])
    assert len(sent(done)) == 2
    late = [with_ways(here(p), *PEERS) for p in LEAVE]
    for note in late:
        leader.handle(note, 4.0)
    accused = ev.Accused(LEAVE[0], LEAVE[1])
    assert leader.handle(accused, 4.0) == [], "they are not here"
    for note in late:
        leader.handle(note, 4.0 + LEFT_S)
    assert leader.handle(accused, 4.0 + LEFT_S) != [], "they did not take the other plan"


@pytest.mark.parametrize("lone", ["at-the-first-version", "within-its-size", "two-of-a-stage"])
def test_a_cell_that_cannot_spare_half_of_every_stage_stays_whole(lone: str) -> None:
    peers = PEERS
    notes = [here(p) for p in peers]
    leader = whole()
    if lone == "two-of-a-stage":
        peers = [p for p in PEERS if p != PEERS[-1]]
        notes = [here(p) for p in peers]
    elif lone == "within-its-size":
        leader = whole(read=lambda change: replace(RULES, cell=2))
        leader.handle(ev.Changed(replace(RULES, cell=2, revision=1)), 0.0)
    else:
        notes = [heard(p) for p in peers]
        leader = Leader(PEERS[0], facts(read=lambda change: RULES, prove=True), rules=RULES)
    (plan,) = sent(acts(leader, notes))
    assert {m.peer for m in plan.members} == set(peers)


THIRD = PeerId("endsc")


def test_the_new_cell_gets_an_ends_peer_that_may_lead() -> None:
    peers = [*PEERS, THIRD]
    leader = whole(peers=peers)
    notes = [here(p, membership=ev.Membership(may_lead=p != PEERS[1])) for p in peers]
    founds, stays = sent(acts(leader, notes))
    assert {m.peer for m in founds.members} == {THIRD, *LEAVE[1:]}
    assert {m.peer for m in stays.members} == {PEERS[1], *STAY}


def test_a_cell_with_one_peer_that_may_lead_does_not_divide() -> None:
    leader = whole()
    notes = [here(p, membership=ev.Membership(may_lead=p != PEERS[1])) for p in PEERS]
    (plan,) = sent(acts(leader, notes))
    assert [m.peer for m in plan.members] == PEERS
    now = POSTPONED_S / 2
    leader.handle(ev.Declined(plan.hash, "no reason"), now)
    assert len(sent(acts(leader, [here(p) for p in PEERS], begin=now))) == 1, "not so soon again"
    leader.handle(ev.Declined(sent_last(leader).hash, "no reason"), 2 * POSTPONED_S)
    assert len(sent(acts(leader, [here(p) for p in PEERS], begin=2 * POSTPONED_S))) == 2
