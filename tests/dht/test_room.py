"""Room for records: the writers that keep a place when there are more writers than places."""

import contextlib
import random

import pytest

from node.core.ids import PeerId
from node.dht.room import OTHERS, Company, NoRoom, Room, Source

MEMBER = PeerId("member")
NEWCOMER = PeerId("newcomer")
HONEST = PeerId("honest")


class Present:
    """Peers that are connected, and peers of the run."""

    def __init__(self) -> None:
        self.connected: set[PeerId] = set()
        self.members = {MEMBER}

    def room(self, strangers: int = 8, each: int = 0) -> Room[str]:
        company = Company(self.members.__contains__, self.connected.__contains__)
        return Room[str](strangers, company, each)


def crowd(count: int, name: str = "stranger") -> list[PeerId]:
    return [PeerId(f"{name}-{number}") for number in range(count)]


def test_one_connection_brings_few_records_of_others() -> None:
    room = Present().room(512)
    flood = Source(PeerId("attacker"))
    attempts = crowd(512)
    for peer in attempts[:OTHERS]:
        room.enter(peer, peer, flood)
    for peer in attempts[OTHERS:]:
        with pytest.raises(NoRoom, match="somebody else"):
            room.enter(peer, peer, flood)
    assert len(room) == OTHERS
    assert room.enter("own", PeerId("attacker"), flood) is None, "its own record is another matter"


def test_a_writer_that_is_connected_outstays_one_that_is_gone() -> None:
    present = Present()
    room = present.room()
    some = crowd(8)
    present.connected |= set(some[:2])
    for peer in some:
        room.enter(peer, peer)
    evicted = [room.enter(peer, peer) for peer in crowd(6, "later")]
    assert evicted == some[2:], "the oldest first"
    present.connected |= set(crowd(6, "later"))
    with pytest.raises(NoRoom, match="8 records for strangers are taken"):
        room.enter(NEWCOMER, NEWCOMER)


def test_a_newcomer_is_in_at_once_while_twenty_peers_bring_all_they_can() -> None:
    present = Present()
    dice = random.Random(7)
    room = present.room(512)
    attackers = crowd(20, "attacker")
    present.connected |= {*attackers, HONEST, NEWCOMER}
    room.enter(HONEST, HONEST)
    room.enter(MEMBER, MEMBER)
    lost: set[str] = set()
    for number in range(3000):
        attacker = dice.choice(attackers)
        forged = PeerId(f"forged-{number}")
        source = Source(attacker, "", asked=dice.random() < 0.5)
        with contextlib.suppress(NoRoom):
            lost.add(room.enter(forged, forged, source) or "")
        if number == 2000:
            assert room.enter(NEWCOMER, NEWCOMER) is not None, "the house is full"
    assert not {HONEST, MEMBER, NEWCOMER} & lost
    assert len(room) <= 1024


def test_an_answer_of_one_peer_leaves_room_for_those_of_others() -> None:
    room = Present().room(64)
    for peer in crowd(64, "forged"):
        room.enter(peer, peer, Source(PeerId("attacker"), asked=True))
    for peer in crowd(20):
        room.enter(peer, peer, Source(HONEST, asked=True))
    assert len(room) == 64
    with pytest.raises(NoRoom):
        room.enter("one more", PeerId("one more"), Source(PeerId("attacker"), asked=True))


def test_a_stranger_that_becomes_a_member_moves_to_the_members_half() -> None:
    present = Present()
    room = present.room(2)
    room.enter(HONEST, HONEST)
    present.members.add(HONEST)
    assert room.enter(HONEST, HONEST) is None
    for peer in crowd(10):
        room.enter(peer, peer)
    assert room.enter(HONEST, HONEST) is None
    assert len(room) == 3, "two strangers beside it"


def test_a_record_that_a_neighbour_brought_is_charged_to_its_writer_once_it_comes_itself() -> None:
    room = Present().room(512)
    others = crowd(OTHERS)
    for peer in others:
        room.enter(peer, peer, Source(HONEST))
    with pytest.raises(NoRoom):
        room.enter("x", PeerId("x"), Source(HONEST))
    room.enter(others[0], others[0])
    room.enter("x", PeerId("x"), Source(HONEST))
    assert len(room) == OTHERS + 1


def test_a_peer_with_all_its_places_evicts_nobody() -> None:
    room = Present().room(4, each=2)
    for number in range(2):
        room.enter(f"a{number}", PeerId("a"))
        room.enter(f"b{number}", PeerId("b"))
    with pytest.raises(NoRoom, match="2 records of this peer"):
        room.enter("a2", PeerId("a"))
    assert len(room) == 4
