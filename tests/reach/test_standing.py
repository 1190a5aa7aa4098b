"""Reachability of this peer: other peers' reports decide, and far peers decide more than the
LAN."""

import pytest

from node.core.ids import PeerId
from node.reach.standing import AGAIN_S, AGAIN_SOON_S, DOUBTS, STALE_S, Reach, ReachReport, Standing

A, B, C, D = (PeerId(x) for x in "ABCD")


def report(
    by: PeerId,
    *,
    open: bool = True,
    far: bool = True,
    at: float = 0.0,
    host: str = "11.0.0.5",
    port: int = 4001,
) -> ReachReport:
    return ReachReport(by, host, port, frozenset({4001, 5001} if open else ()), far, at)


@pytest.fixture
def r() -> Reach:
    made = Reach()
    made.listens(4001, 5001)
    return made


def test_most_of_those_far_away_decide(r: Reach) -> None:
    assert r.standing(0.0) is Standing.UNKNOWN, "nobody tried yet"
    r.reported(report(A, open=False, far=False))
    assert r.standing(1.0) is Standing.CLOSED
    r.reported(report(A, open=True, far=False))
    assert r.standing(1.0) is Standing.OPEN, "on a LAN without a way out the LAN is everybody"
    r.reported(report(B, open=False, at=1.0))
    assert r.standing(1.0) is Standing.CLOSED, (
        "a neighbour on the LAN does not speak for those outside"
    )
    r.reported(report(C, at=2.0))
    r.reported(report(D, at=3.0))
    assert r.standing(3.0) is Standing.OPEN, "one of three lies"
    assert r.bulk_open(3.0)


def test_a_moment_of_trouble_closes_nothing(r: Reach) -> None:
    r.reported(report(A))
    assert r.whom_to_ask([A], 0.0) == [A]
    for tries in range(1, DOUBTS):
        r.reported(report(A, open=False, at=60.0 + 10 * tries))
        assert r.standing(60.0 + 10 * tries) is Standing.OPEN
        assert r.whom_to_ask([A], 60.0 + 10 * tries + AGAIN_SOON_S) == [A], "it is asked again soon"
    r.reported(report(A, at=100.0))
    r.reported(report(A, open=False, at=110.0))
    assert r.standing(110.0) is Standing.OPEN, "what was in order in between is forgotten"
    for tries in range(1, DOUBTS):
        r.reported(report(A, open=False, at=110.0 + 10 * tries))
    assert r.standing(140.0) is Standing.CLOSED


def test_reports_grow_stale_and_other_ports_make_them_void(r: Reach) -> None:
    r.reported(report(A))
    assert r.standing(STALE_S - 1) is Standing.OPEN
    assert r.standing(STALE_S + 1) is Standing.UNKNOWN
    r.reported(report(A, at=400.0))
    r.listens(4001, 6001)
    assert r.standing(401.0) is Standing.UNKNOWN
    r.reported(report(A, at=402.0))
    assert r.standing(402.0) is Standing.OPEN
    assert not r.bulk_open(402.0), "the libp2p port answers, the gRPC port does not"


def test_three_peers_are_asked_at_a_time_those_never_asked_first(r: Reach) -> None:
    assert r.whom_to_ask([A, B, C, D], 0.0) == [A, B, C]
    assert r.whom_to_ask([A, B, C, D], 1.0) == [], "three at a time"
    assert r.whom_to_ask([A, B, C, D], AGAIN_SOON_S) == [D, A, B], "who was never asked comes first"
    r.reported(report(A, at=6.0))
    assert r.whom_to_ask([A, B, C, D], 6.0 + AGAIN_SOON_S) == [], "once it is known there is time"
    assert r.whom_to_ask([A, B, C, D], 6.0 + AGAIN_S)


def test_public_addresses_come_from_the_newest_reports(r: Reach) -> None:
    r.reported(report(A, port=777))
    r.reported(report(B, port=888, at=1.0))
    r.reported(report(C, host="192.168.1.4", at=2.0))
    assert r.seen(2.0) == (("192.168.1.4", 4001), ("11.0.0.5", 888), ("11.0.0.5", 777))
    assert r.public(2.0, 4001) == ("11.0.0.5",)


def test_one_peer_that_lies_adds_no_address(r: Reach) -> None:
    r.reported(report(A, host="11.0.0.66"))
    assert r.public(0.0, 4001) == ("11.0.0.66",), "in a swarm of two nobody else can tell"
    r.reported(report(B, at=1.0))
    assert r.public(1.0, 4001) == (), "one of the two lies"
    r.reported(report(C, open=False, at=2.0))
    assert r.public(2.0, 4001) == ("11.0.0.5",)
    assert r.public(2.0, 9999) == (), "that port did not answer"
    r.reported(report(A, host="11.0.0.66", at=3.0))
    assert r.public(3.0, 4001) == ("11.0.0.5",)


def test_two_peers_that_see_different_families_agree(r: Reach) -> None:
    r.reported(report(A, host="2a00::5"))
    r.reported(report(B, at=1.0))
    assert r.public(1.0, 4001) == ("11.0.0.5",), "the own IPv6 addresses are known without it"


def test_neighbours_do_not_outvote_the_one_peer_outside(r: Reach) -> None:
    for neighbour in (A, B):
        r.reported(report(neighbour, far=False, host="192.168.1.4"))
    r.reported(report(C))
    assert r.public(0.0, 4001) == ("11.0.0.5",)


def test_a_host_where_no_port_answered_is_not_announced(r: Reach) -> None:
    for peer in (A, B):
        r.reported(report(peer, open=False))
    assert r.public(0.0, 4001) == ()


@pytest.mark.parametrize(
    ("ports", "moves"),
    [
        ((), False),
        ((4001,), False),
        ((700, 800), True),
        ((700, 800, 900), True),
        ((4001, 4001, 900), False),
        ((900, 4001, 4001), False),
        ((4001, 0), False),
    ],
    ids=str,
)
def test_ports_move_where_no_two_peers_see_the_same(r: Reach, ports: tuple, moves: bool) -> None:
    for peer, port in zip((A, B, C), ports, strict=False):
        r.reported(report(peer, port=port))
    for neighbour in ("one", "two"):
        r.reported(report(PeerId(neighbour), far=False, host="192.168.1.4"))
    assert r.moving_ports(0.0) is moves


def test_ports_of_two_hosts_do_not_move(r: Reach) -> None:
    r.reported(report(A))
    r.reported(report(B, host="2600::5"))
    assert not r.moving_ports(0.0)


def test_the_place_that_most_peers_see_comes_first(r: Reach) -> None:
    for number, peer in enumerate((A, B)):
        r.reported(report(peer, at=float(number)))
    for number in range(5):
        liar = PeerId(f"liar-{number}")
        r.reported(report(liar, host=f"2600::{number + 1}", at=2.0 + number))
    r.reported(report(C, port=900, at=9.0))
    seen = r.seen(9.0)
    assert len(seen) == 4
    assert [at for at in seen if at[0] == "11.0.0.5"] == [("11.0.0.5", 4001), ("11.0.0.5", 900)]
