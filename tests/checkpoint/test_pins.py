"""Snapshots that a donor pins, the readers it pins them for, and the time it does: counted in
bytes, in virtual time."""

from collections.abc import Callable

import pytest
import torch

from node.checkpoint.pins import (
    BEHIND_S,
    GRACE_S,
    IDLE_S,
    LONGEST_S,
    OF_READER,
    OF_STRANGER,
    PACE_S,
    PINS,
    SPARE_S,
    STUCK_S,
    TIMES,
    Pin,
    PinKey,
    Pins,
)
from node.checkpoint.service import TIDY_S
from node.checkpoint.state import StateKind
from node.core.ids import PeerId
from node.core.journey import Version

MEMBER = PeerId("member")
SIZE = 4000
"""Bytes of a snapshot."""
GIVEN_BACK_S = 30.0
"""Seconds after which a reader that takes next to nothing has left nothing behind."""


class Donor:
    """Pins of a donor whose parameters have SIZE bytes and which has every epoch."""

    def __init__(
        self,
        rate: float = 0.0,
        established: Callable[[PeerId], bool] = lambda peer: peer == MEMBER,
    ) -> None:
        self.pins = Pins(SIZE, rate, established)
        self.now = 0.0

    def describe(self, peer: str, epoch: int, size: int = SIZE) -> Pin | None:
        key = PinKey(1, StateKind.PARAMETERS, Version(epoch))
        pin = self.pins.hold(key, {"w": torch.zeros(size // 4)}, PeerId(peer), self.now)
        if pin is not None:
            self.pins.reads(pin, PeerId(peer), ("w",), self.now)
        assert self.pins.nbytes <= TIMES * max(SIZE, size)
        return pin

    def read(self, peer: str, pin: Pin, share: float = 1.0) -> None:
        pin.took(PeerId(peer), int(share * SIZE), self.now)

    def held(self) -> list[int]:
        self.pins.expire(self.now)
        return sorted(key.version.epoch for key in self.pins._pins)


@pytest.fixture
def donor() -> Donor:
    return Donor()


@pytest.mark.parametrize(("peer", "most"), [("stranger", OF_STRANGER), (MEMBER, OF_READER)])
def test_a_reader_that_touches_everything_holds_few(donor: Donor, peer: str, most: int) -> None:
    for epoch in range(PINS):
        assert donor.describe(peer, epoch) is not None
        donor.now += 0.1
    assert donor.held() == list(range(PINS - most, PINS))
    newest = donor.pins.find(1, StateKind.PARAMETERS, PINS - 1, "", donor.now)
    assert newest is not None
    assert newest.uses(PeerId(peer), donor.now)
    assert not newest.uses(PeerId("another"), donor.now), "only who was told of it reads it"


def test_strangers_have_half_of_the_places_and_members_the_rest(donor: Donor) -> None:
    for n in range(PINS // 2):
        pin = donor.describe(f"stranger {n}", n, SIZE // 2)
        assert pin is not None
        donor.read(f"stranger {n}", pin, 0.1)
    assert donor.describe("newcomer", 99, SIZE // 2) is None
    assert donor.describe("newcomer", 1, SIZE // 2) is not None, "which is held already"
    assert donor.describe(MEMBER, 99, SIZE // 2) is not None


def test_all_snapshots_together_are_few_times_the_parameters() -> None:
    """The limit counts snapshots pinned for members too."""
    donor = Donor(established=lambda peer: True)
    for n in range(TIMES):
        pin = donor.describe(f"member {n}", n)
        assert pin is not None
        donor.read(f"member {n}", pin, 0.5)
    assert donor.describe("newcomer", 99) is None
    assert donor.pins.nbytes == TIMES * SIZE


def test_a_member_takes_the_memory_of_strangers(donor: Donor) -> None:
    for n in range(TIMES):
        pin = donor.describe(f"stranger {n}", n)
        assert pin is not None
        donor.read(f"stranger {n}", pin, 0.2 + 0.1 * n)
    assert donor.describe(MEMBER, 99) is not None
    assert donor.held() == [1, 2, 3, 99], "of the one that had read least"


def test_readers_that_get_on_come_before_newcomers_and_others_do_not(donor: Donor) -> None:
    pins = [donor.describe(f"reader {n}", n) for n in range(TIMES)]
    for second in range(0, int(GRACE_S) + 60, 10):
        donor.now = float(second)
        for n, pin in enumerate(pins):
            assert pin is not None
            assert pin.uses(PeerId(f"reader {n}"), donor.now)
            if n:
                donor.read(f"reader {n}", pin, 20 / PACE_S)
            else:
                donor.read(f"reader {n}", pin, 1 / SIZE)
    donor.now += SPARE_S / 2
    assert donor.describe("newcomer", 99) is not None
    assert donor.held() == [1, 2, 3, 99], "all but the one that takes a byte now and then"
    assert donor.describe("another", 100) is None


def test_a_reader_that_has_read_everything_and_begins_anew_gives_way(donor: Donor) -> None:
    for n in range(TIMES):
        greedy = f"greedy {n}"
        pin = donor.describe(greedy, n)
        assert pin is not None
        donor.read(greedy, pin)
        donor.describe(greedy, n)
        donor.read(greedy, pin, 0.5)
    assert donor.describe("newcomer", 99) is not None


def test_a_snapshot_ends_without_a_reader_that_takes_anything(donor: Donor) -> None:
    pin = donor.describe("reader", 1)
    while donor.held():
        # The reader asks again and again, like a peer busy with another stage, and takes nothing.
        donor.now += 0.9 * IDLE_S
        if pin is not None and donor.pins.holds(pin):
            donor.pins.reads(pin, PeerId("reader"), ("w",), donor.now)
    assert STUCK_S < donor.now < STUCK_S + IDLE_S
    donor.describe("reader", 2)
    donor.now += IDLE_S + 1
    assert donor.held() == []


def test_a_snapshot_ends_soon_after_a_reader_that_took_next_to_nothing(donor: Donor) -> None:
    pin = donor.describe("nibbler", 1)
    other = donor.describe("reader", 2)
    donor.describe("nibbler", 3)
    assert pin is not None
    assert other is not None
    donor.read("nibbler", pin, 1 / SIZE)
    donor.now += 50.0
    donor.read("nibbler", pin, 0.0)
    donor.read("reader", other, 0.1)
    donor.now += BEHIND_S + 1
    assert donor.held() == [2], "who gets on may rest for longer"
    donor.now += IDLE_S
    assert donor.held() == []


def test_a_reader_that_had_only_begun_to_nibble_leaves_nothing_soon(donor: Donor) -> None:
    pin = donor.describe("nibbler", 1)
    reader = donor.describe("reader", 2)
    assert pin is not None
    assert reader is not None
    donor.read("nibbler", pin, 1 / SIZE)
    donor.read("reader", reader, 0.5)
    donor.now += GIVEN_BACK_S - TIDY_S
    assert donor.held() == [2]


def test_a_snapshot_is_held_for_a_reader_that_waits_for_another_donor(donor: Donor) -> None:
    donor.describe("reader", 1)
    donor.now += IDLE_S - 1
    assert donor.held() == [1]


def test_a_reader_that_begins_anew_is_no_nibbler(donor: Donor) -> None:
    pin = donor.describe("reader", 1)
    assert pin is not None
    donor.read("reader", pin)
    donor.describe("reader", 1)
    donor.read("reader", pin, 0.5)
    donor.now += BEHIND_S + 1
    assert donor.held() == [1]


def test_a_snapshot_is_held_while_a_slow_reader_takes_a_message(donor: Donor) -> None:
    pin = donor.describe("reader", 1)
    assert pin is not None
    donor.now += 50.0
    donor.read("reader", pin, 1 / SIZE)
    pin.readers += 1
    donor.now += BEHIND_S + 1
    assert donor.held() == [1]


def test_no_snapshot_is_held_for_ever(donor: Donor) -> None:
    pin = donor.describe("reader", 1)
    began = donor.now
    while pin is not None and donor.pins.holds(pin):
        donor.now += 0.9 * IDLE_S
        donor.read("reader", pin, IDLE_S / PACE_S)
        donor.pins.expire(donor.now)
    assert LONGEST_S < donor.now - began < LONGEST_S + IDLE_S


def test_a_donor_that_gives_little_expects_no_more() -> None:
    """At the donor's rate limit no reader can read faster."""
    slow = Donor(rate=SIZE * TIMES / PACE_S / 4)
    pins = [slow.describe(f"reader {n}", n) for n in range(TIMES)]
    slow.now = GRACE_S + 40
    for n, pin in enumerate(pins):
        assert pin is not None
        slow.read(f"reader {n}", pin, 40 / PACE_S / 4)
    assert slow.describe("newcomer", 99) is None
