"""Connections of strangers to p2pd: their share of the places, and their end."""

import pytest

from node.core.ids import PeerId
from node.transport.links import GIB, IDLE_S, MOST_DIALLED, Links, block, inbound_limit

MEMBER = PeerId("member")
NEWCOMER = PeerId("newcomer")


def at(host: str) -> tuple[str, ...]:
    return (f"/ip4/{host}/tcp/4001",)


def links(total: int = 8) -> Links:
    return Links(total, lambda peer: peer == MEMBER)


def crowd(count: int) -> dict[PeerId, tuple[str, ...]]:
    """Peers of one address block."""
    return {PeerId(f"stranger-{n}"): at(f"192.0.2.{n}") for n in range(count)}


def test_strangers_share_half_of_the_places() -> None:
    some = links()
    present = crowd(6)
    ended = some.look(present, (), 0.0)
    assert list(ended.values()) == ["places"] * 2
    assert len(some.strangers()) == 4
    kept = {peer: present[peer] for peer in some.strangers()} | {MEMBER: at("192.0.2.9")}
    assert some.look(kept, (), 1.0) == {}
    assert MEMBER not in some.strangers()


def test_a_newcomer_of_another_network_displaces_one_of_a_crowd() -> None:
    some = links()
    present = crowd(4)
    assert some.look(present, (), 0.0) == {}
    present[NEWCOMER] = at("198.51.100.1")
    (gone,) = some.look(present, (), 1.0)
    assert gone in crowd(4)
    assert NEWCOMER in some.strangers()


def test_a_connection_that_nobody_uses_ends() -> None:
    some = links()
    present = {**crowd(3), MEMBER: at("192.0.2.9")}
    idle, asks, streams = crowd(3)
    assert some.look(present, (), 0.0) == {}
    some.used(asks, IDLE_S - 1)
    assert some.look(present, (streams,), IDLE_S - 1) == {}
    assert some.look(present, (streams,), IDLE_S + 1) == {idle: "idle"}
    del present[idle]
    assert some.look(present, (), 2 * IDLE_S) == {asks: "idle"}


def test_strangers_of_which_nothing_is_heard_are_told_apart() -> None:
    some = links()
    present = {**crowd(3), MEMBER: at("192.0.2.9")}
    silent, asked, asks = crowd(3)
    some.look(present, (), 8.0)
    some.used(asked, 9.0)
    some.used(asks, 19.0)
    assert some.strangers(before=0.0) == [silent]
    assert some.strangers(before=10.0) == [silent, asked]
    assert some.strangers() == [silent, asked, asks]


def test_a_peer_that_comes_back_is_not_idle_from_the_start() -> None:
    some = links()
    present = crowd(1)
    some.look(present, (), 0.0)
    some.look({}, (), 1.0)
    assert some.look(present, (), 2 * IDLE_S) == {}


def test_a_stranger_that_becomes_a_member_needs_no_place_of_a_stranger() -> None:
    members: set[PeerId] = set()
    some = Links(4, members.__contains__)
    present = crowd(2)
    some.look(present, (), 0.0)
    members.update(present)
    assert some.look(present, (), 1.0) == {}
    assert some.strangers() == []
    present |= {NEWCOMER: at("198.51.100.1"), PeerId("x"): at("198.51.100.2")}
    assert some.look(present, (), 2.0) == {}


def test_a_connection_that_this_peer_made_needs_no_place_and_may_be_idle() -> None:
    some = links()
    present = crowd(4)
    some.look(present, (), 0.0)
    late = PeerId("late")
    some.dialled(late)
    present[late] = at("192.0.2.77")
    assert some.look(present, (), 1.0) == {}
    assert late not in some.strangers()
    assert late not in some.look(present, (), 2 * IDLE_S)
    assert some.look({late: present[late]}, (), 2 * IDLE_S) == {}
    some.look({}, (), 2 * IDLE_S)
    present = crowd(4) | {late: present[late]}
    assert list(some.look(present, (), 3 * IDLE_S)) == [late], "the next one is of its making"


def test_few_connections_count_as_made_here() -> None:
    some = links(2)
    present = crowd(MOST_DIALLED + 2)
    for peer in present:
        some.dialled(peer)
    assert len(some.look(present, (), 0.0)) == 1


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((), ""),
        (("/ip4/192.0.2.7/tcp/1",), "192.0.2.0/24"),
        (("/p2p-circuit", "/ip6/2001:db8::1/tcp/1"), "2001:db8::/48"),
        (("nonsense",), ""),
    ],
)
def test_the_block_is_that_of_the_other_end(ends: tuple[str, ...], expected: str) -> None:
    assert block(ends) == expected


def test_incoming_connections_grow_with_the_memory_of_the_machine() -> None:
    assert [inbound_limit(gib * GIB) for gib in (2, 8, 32)] == [80, 128, 320]
