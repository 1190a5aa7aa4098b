"""Relays through which a peer is reached: two, not the same for every peer, others when they
fail."""

from collections import Counter

from node.core.ids import PeerId
from node.reach.reserve import FIRST_S, LONGEST_S, WANTED, Reservations

RELAYS = [PeerId(f"relay {i}") for i in range(6)]


def test_two_are_asked_and_no_more_while_they_answer() -> None:
    r = Reservations(b"salt", WANTED)
    asked = r.due(RELAYS, 0.0)
    assert (len(asked), r.due(RELAYS, 0.0)) == (WANTED, [])
    for relay in asked:
        r.granted(relay)
    assert r.held == set(asked)
    assert r.due(RELAYS, 100.0) == []


def test_another_takes_the_place_of_one_that_is_lost() -> None:
    r = Reservations(b"salt", WANTED)
    first, second = r.due(RELAYS, 0.0)
    r.granted(first)
    r.granted(second)
    r.lost(first, 10.0)
    third = r.due(RELAYS, 10.0)
    assert len(third) == 1
    assert third[0] not in (first, second)


def test_one_that_refuses_is_asked_again_ever_more_rarely() -> None:
    r = Reservations(b"salt", WANTED)
    only = PeerId("only")
    at = []
    now = 0.0
    while now < 1000.0:
        if r.due([only], now):
            at.append(now)
            r.lost(only, now)
        now += 0.5
    pauses = [b - a for a, b in zip(at, at[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (FIRST_S, LONGEST_S)


def test_nothing_is_asked_for_who_wants_none() -> None:
    assert Reservations(b"salt").due(RELAYS, 0.0) == []


def test_clients_spread_over_relays() -> None:
    chosen = Counter(
        relay for i in range(300) for relay in Reservations(b"%d" % i, WANTED).due(RELAYS, 0.0)
    )
    assert min(chosen.values()) > 60
    assert max(chosen.values()) < 140
