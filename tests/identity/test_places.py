"""Places for established peers and for strangers."""

import random

import pytest

from node.core.ids import PeerId
from node.identity.places import PlacesByPeer, block_of

MEMBER = PeerId("member")
NEWCOMER = PeerId("newcomer")


def places(total: int = 8, per_peer: int = 4) -> PlacesByPeer[str]:
    return PlacesByPeer("calls", total, per_peer, lambda peer: peer == MEMBER)


def fill(into: PlacesByPeer[str], block: str, peers: int, each: int) -> None:
    for number in range(peers * each):
        peer = PeerId(f"stranger-{number % peers}")
        into.take(f"{block}/{peer}/{number}", peer, block)


@pytest.mark.parametrize(
    ("address", "block"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("tunnel", "tunnel"),
    ],
)
def test_a_block_is_that_of_one_site(address: str, block: str) -> None:
    assert block_of(address) == block


def test_strangers_leave_half_to_established_peers() -> None:
    some = places()
    fill(some, "a", 4, 4)
    assert some.strangers == 4
    assert all(some.take(f"m{i}", MEMBER) for i in range(4))
    refused = some.take("m4", MEMBER)
    assert refused.refusal == "4 calls of this peer are open"


def test_an_established_peer_takes_what_strangers_hold_beyond_a_full_house() -> None:
    some = PlacesByPeer[str]("calls", 4, 4, lambda peer: peer == MEMBER)
    fill(some, "a", 2, 1)
    taken = [some.take(f"m{i}", MEMBER) for i in range(4)]
    assert all(taken)
    assert [bool(t.evicted) for t in taken] == [False, False, True, True]
    assert some.strangers == 0
    crowd = PlacesByPeer[str]("calls", 4, 1, lambda peer: True)
    assert all(crowd.take(f"{i}", PeerId(f"{i}")) for i in range(4))
    assert "peers of the run" in crowd.take("one more", MEMBER).refusal


@pytest.mark.parametrize("block", ["a", "b"], ids=["the same block", "another block"])
def test_a_newcomer_takes_the_place_of_the_greediest(block: str) -> None:
    some = places(total=16, per_peer=8)
    fill(some, "a", 2, 4)
    taken = some.take("first", NEWCOMER, block)
    assert taken.evicted == "a/stranger-0/6"
    assert taken.evicted not in some
    assert some.strangers == 8
    assert "first" in some


def test_equals_do_not_change_places() -> None:
    some = places(total=16)
    fill(some, "a", 8, 1)
    assert "8 calls for strangers are taken" in some.take("first", NEWCOMER, "a").refusal
    assert some.take("first", NEWCOMER, "b").evicted is not None, "a block has eight of them"


def test_books_balance_whatever_comes() -> None:
    dice = random.Random(5)
    some = places(total=20, per_peer=6)
    held = set[str]()
    for number in range(3000):
        if held and dice.random() < 0.4:
            gone = dice.choice(sorted(held))
            some.leave(gone)
            some.leave(gone)
            held.discard(gone)
            continue
        peer = dice.choice([MEMBER, *(PeerId(f"p{i}") for i in range(9))])
        block = dice.choice("abc")
        room = some.has_room(peer, block)
        taken = some.take(str(number), peer, block)
        assert bool(taken) == room
        if taken:
            held.add(str(number))
        if taken.evicted is not None:
            held.remove(taken.evicted)
        assert len(some) == len(held) <= 20
        assert some.strangers <= 10
        assert some.held_by(peer) <= 6
    for holder in held:
        some.leave(holder)
    assert len(some) == some.strangers == some.held_by(MEMBER) == 0


def test_strangers_take_turns_where_places_are_held_for_a_moment() -> None:
    """Twenty keys of one address held every place again and again, one each."""
    some = PlacesByPeer[str]("large messages", 8, 4, by_turns=True)
    held: list[tuple[str, PeerId]] = []
    for number in range(200):
        if len(some) == 4:
            some.leave(held.pop(0)[0])
        holder = f"call-{number}", PeerId(f"stranger-{number % 20}")
        assert some.take(*holder, "a", number / 10)
        held.append(holder)
    assert not some.take("again", PeerId("stranger-0"), "a", 300.0), "it had as many as the others"
    assert not some.take("first", NEWCOMER, "a", 19.95), "the others' messages may be under way"
    assert some.take("first", NEWCOMER, "a", 300.0).evicted in {holder for holder, _ in held}
    assert not some.take("second", NEWCOMER, "a", 300.0), "it has a place"


def test_turns_of_long_ago_are_forgotten() -> None:
    some = PlacesByPeer[str]("large messages", 4, 4, by_turns=True)
    for number in range(1000):
        assert some.take("call", PeerId(f"stranger-{number}"), "a")
        some.leave("call")
    assert len(some._turns) <= 16 * 4
