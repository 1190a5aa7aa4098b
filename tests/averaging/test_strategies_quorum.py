"""A round among unequal peers: when it closes, who is in it, what becomes of the late."""

from __future__ import annotations

import pytest

from node.averaging.quorum import Begin, Left, Merge, Quorum, Reported, Ticked, TooOld, Wake
from node.core.ids import PeerId

A, B, C, D = (PeerId(x) for x in "abcd")
ALL = frozenset((A, B, C, D))


def test_it_closes_at_once_when_everybody_is_in() -> None:
    q = Quorum(quorum=2, most=30.0)
    assert q.handle(Begin(ALL), 0.0) == []
    assert q.handle(Reported(A, 0, 100), 1.0) == []
    assert q.handle(Reported(B, 0, 100), 2.0) == [Wake(32.0)]
    q.handle(Reported(C, 0, 100), 3.0)
    assert q.handle(Reported(D, 0, 300), 4.0) == [
        Merge(0, {A: 1 / 6, B: 1 / 6, C: 1 / 6, D: 0.5}, frozenset())
    ]
    assert q.round == 1


def test_after_a_quorum_it_waits_no_longer_than_the_grace() -> None:
    q = Quorum(quorum=2, most=30.0, overlap=10, step_s=1.0, sync_s=2.0, safety=0.5)
    q.handle(Begin(ALL), 100.0)
    q.handle(Reported(A, 0, 10), 101.0)
    assert q.handle(Reported(B, 0, 30), 104.0) == [Wake(106.0)]  # half of 10 - 4 - 2
    assert q.handle(Ticked(), 105.9) == [Wake(106.0)]
    assert q.handle(Ticked(), 106.0) == [Merge(0, {A: 0.25, B: 0.75}, frozenset((C, D)))]


@pytest.mark.parametrize(("quorum_s", "grace"), [(0.0, 4.0), (4.0, 2.0), (8.0, 0.0), (50.0, 0.0)])
def test_the_grace_is_what_overlap_leaves(quorum_s: float, grace: float) -> None:
    assert Quorum(1, 30.0, 10, 1.0, 2.0, 0.5).grace(quorum_s) == grace
    assert Quorum(1, 1.5, 10, 1.0, 2.0, 0.5).grace(0.0) == 1.5
    assert Quorum(1, 30.0).grace(quorum_s) == 30.0


def test_no_quorum_no_merge_however_long_it_takes() -> None:
    q = Quorum(quorum=3, most=1.0)
    q.handle(Begin(ALL), 0.0)
    q.handle(Reported(A, 0, 1), 0.0)
    q.handle(Reported(B, 0, 1), 0.0)
    assert q.handle(Ticked(), 1e6) == []
    assert isinstance(q.handle(Reported(C, 0, 1), 1e6)[0], Wake)


def test_a_quorum_shrinks_with_the_members() -> None:
    q = Quorum(quorum=3, most=1.0)
    q.handle(Begin(ALL), 0.0)
    q.handle(Reported(A, 0, 1), 0.0)
    q.handle(Left(B), 1.0)
    q.handle(Left(C), 1.0)
    (merge,) = q.handle(Left(D), 2.0)
    assert merge == Merge(0, {A: 1.0}, frozenset())


def test_who_is_late_is_in_the_next_round_unless_it_is_too_old() -> None:
    q = Quorum(quorum=1, most=0.0, bound=1)
    q.handle(Begin(ALL), 0.0)
    (merge,) = q.handle(Reported(A, 0, 5), 1.0)
    assert merge == Merge(0, {A: 1.0}, ALL - {A})
    assert q.handle(Reported(B, 0, 5), 2.0) == []  # between rounds
    (merge,) = q.handle(Begin(ALL), 3.0)
    assert merge == Merge(1, {B: 1.0}, ALL - {B})
    assert q.handle(Reported(C, 0, 5), 4.0) == [TooOld(C, 0)]
    (merge,) = q.handle(Begin(frozenset((D,))), 5.0) or q.handle(Reported(D, 2, 5), 5.0)
    assert merge == Merge(2, {D: 1.0}, frozenset())


def test_a_report_counts_once_and_the_newest_counts() -> None:
    q = Quorum(quorum=0, most=1.0)
    q.handle(Begin(frozenset((A, B))), 0.0)
    q.handle(Reported(A, 0, 5), 0.0)
    q.handle(Reported(A, 0, 15), 0.0)
    assert q.handle(Reported(B, 0, 5), 0.0) == [Merge(0, {A: 0.75, B: 0.25}, frozenset())]


def test_nonsense_is_refused() -> None:
    q = Quorum(quorum=1, most=1.0)
    q.handle(Begin(ALL), 0.0)
    for bad in (Reported(A, 1, 5), Reported(A, 0, 0)):
        with pytest.raises(ValueError, match="report"):
            q.handle(bad, 0.0)
    with pytest.raises(ValueError, match="open"):
        q.handle(Begin(ALL), 0.0)
