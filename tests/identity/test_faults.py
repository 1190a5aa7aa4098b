"""Bans: when, how long, how they grow and are forgiven, and that strangers cannot fill the book."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.identity.faults import FaultBook

A = PeerId("a")
B = PeerId("b")


def test_nobodys_fault_leaves_no_trace() -> None:
    book = FaultBook()
    for _ in range(100):
        assert book.count(A, 0, 0) == 0
    assert len(book) == 0


def test_bans_double_up_to_a_limit_and_are_forgiven_in_time() -> None:
    book = FaultBook(max_ban_s=60, forgive_s=500)
    now = 0.0
    lengths = []
    for _ in range(5):
        lengths.append(book.count(A, 3, now))
        now += lengths[-1]
    assert lengths == [10, 20, 40, 60, 60]
    assert book.count(A, 3, now + 499) == 60
    assert book.count(A, 3, now + 499 + 60 + 500) == 10


def test_further_faults_during_a_ban_do_not_lengthen_it() -> None:
    book = FaultBook()
    book.count(A, 3, 0)
    assert [book.count(A, 3, t) for t in (1.0, 5.0, 9.9)] == [0, 0, 0]
    assert book.banned(A, 9.9) == pytest.approx(0.1)


def test_a_ban_is_as_many_times_longer_as_its_faults_are_beyond_the_threshold() -> None:
    book = FaultBook()
    assert book.count(A, 12, 0) == 40
    assert book.count(A, 1, 40) == 20, "faults from before the last ban do not count twice"


def test_after_a_ban_one_more_fault_is_enough_while_the_others_count() -> None:
    book = FaultBook()
    assert book.count(A, 3, 0) == 10
    assert book.count(A, 1, 10) == 20
    assert book.count(A, 0.5, 30) == 0, "a small one may be nobody's fault"
    assert book.count(A, 1, 150) == 0, "one within 100 s"


def test_a_thousand_bans_do_not_overflow() -> None:
    book = FaultBook()
    now = 0.0
    for _ in range(2000):
        now += book.count(A, 3, now)
    assert book.banned(A, now - 1) == 1


def test_strangers_cannot_fill_the_book() -> None:
    book = FaultBook(max_peers=10)
    for i in range(1000):
        book.count(PeerId(str(i)), 1e-9, 0)
    assert len(book) == 10
    for _ in range(10_000):
        book.count(A, 1e-9, 0)
    assert book.banned(A, 0) == 0


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.floats(0, 4), st.floats(0, 50))))
def test_a_ban_comes_from_enough_weight_within_the_window(
    faults: list[tuple[PeerId, float, float]],
) -> None:
    book = FaultBook()
    now = 0.0
    counted = {A: [], B: []}
    ends = {A: 0.0, B: 0.0}
    for peer, weight, gap in faults:
        now += gap
        free = book.banned(peer, now) == 0
        length = book.count(peer, weight, now)
        if free and weight:
            counted[peer].append((now, weight))
            since = ends[peer] if weight < 1 else 0.0
            enough = sum(w for at, w in counted[peer] if now - at < 100 and at >= since) >= 3
            assert (length > 0) == enough
        else:
            assert length == 0
        if length:
            ends[peer] = now + length
            assert book.banned(peer, now) == pytest.approx(length)
