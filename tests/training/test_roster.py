"""What the leader believes of speeds, and which versions it finds."""

import pytest

from node.core.ids import PeerId
from node.core.journey import Version
from node.training.leader.roster import CEILING, Roster, majority
from node.training.protocol import events as ev

A, B, C, D = (PeerId(p) for p in "ABCD")


def roster(*notes: ev.Heartbeat) -> Roster:
    r = Roster(2)
    for n in notes:
        r.hear(n, 0.0)
    return r


def test_a_claimed_speed_is_bounded_by_what_neighbours_see() -> None:
    seen = ((A, 10.0), (B, 10.0))
    liar, honest = (
        ev.Heartbeat(A, 1, Version(0), "d", 1e6),
        ev.Heartbeat(B, 1, Version(0), "d", 4.0),
    )
    watcher = ev.Heartbeat(C, 0, Version(0), "d", 1.0, seen=seen)
    r = roster(liar, honest, watcher)
    assert r.speed(A) == pytest.approx(CEILING * 4.0)
    assert r.speed(B) == pytest.approx(4.0)


def test_a_peers_own_speed_claim_is_ignored_and_one_is_outvoted() -> None:
    notes = [
        ev.Heartbeat(A, 1, Version(0), "d", 64.0, seen=((A, 1e6),)),
        ev.Heartbeat(B, 1, Version(0), "d", 4.0),
    ]
    notes += [
        ev.Heartbeat(p, 0, Version(0), "d", 1.0, seen=((A, rate), (B, 10.0)))
        for p, rate in ((C, 10.0), (D, 10.0))
    ]
    notes.append(ev.Heartbeat(PeerId("E"), 0, Version(0), "d", 1.0, seen=((A, 1e9), (B, 10.0))))
    assert roster(*notes).speed(A) == pytest.approx(8.0)


def test_without_siblings_or_measurements_a_claim_stands() -> None:
    alone = roster(
        ev.Heartbeat(A, 1, Version(0), "d", 64.0),
        ev.Heartbeat(C, 0, Version(0), "d", 1.0, seen=((A, 1.0),)),
    )
    assert alone.speed(A) == 64.0
    assert (
        roster(
            ev.Heartbeat(A, 1, Version(0), "d", 64.0), ev.Heartbeat(B, 1, Version(0), "d", 1.0)
        ).speed(A)
        == 64.0
    )


def test_a_fast_peer_that_is_seen_to_be_fast_is_believed() -> None:
    watcher = ev.Heartbeat(C, 0, Version(0), "d", 1.0, seen=((A, 80.0), (B, 10.0)))
    assert (
        roster(
            ev.Heartbeat(A, 1, Version(0), "d", 64.0),
            ev.Heartbeat(B, 1, Version(0), "d", 8.0),
            watcher,
        ).speed(A)
        == 64.0
    )


def test_most_voices_win_and_ties_go_to_the_smallest_peer() -> None:
    assert majority({A: 1, B: 2, C: 2}) == 2
    assert majority({B: 1, A: 2}) == 2


def test_an_undone_version_is_no_start_and_no_richer_side() -> None:
    made, again, rival = (Version(3, c * 32) for c in "abc")
    notes = [
        ev.Heartbeat(p, s, made, "d", 1.0, (Version(2, "e" * 32),), tokens=90)
        for s, p in enumerate((A, B, C))
    ]
    # D caught up and can go back to nothing
    r = roster(*notes, ev.Heartbeat(D, 1, made, "d", 1.0, tokens=90))
    assert r.startable()[0] == made
    r.undo(made)
    assert r.startable() == [Version(2, "e" * 32)]
    assert r.richer(60, Version(2, "e" * 32)) == []
    assert r.richer(60, rival) == [], "and D is none either"
    r.undo(again)
    assert r.undone == {made, again}
    r.undo(Version(4, "a" * 32))
    assert len(r.undone) == 1, "those of older epochs are forgotten"
