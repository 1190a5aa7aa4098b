from collections import Counter

import pytest

from node.core.ids import PeerId
from node.scheduler.placement import Move, choose_moves, choose_stage

ME, A, B, C, D = (PeerId(x) for x in ("me", "A", "B", "C", "D"))


def test_an_empty_stage_comes_first_then_the_slowest() -> None:
    view = {1: {A: 0.1}, 2: {}, 3: {B: 9.0}}
    assert choose_stage(view, [1, 2, 3], ME) == 2
    assert choose_stage(view, [1, 3], ME) == 1
    assert choose_stage({1: {A: 1.0}}, [1, 2], ME) == 2  # a stage nobody has heard of is empty
    assert choose_stage({1: {A: 5.0}, 2: {B: 1.0, C: 1.0}}, [1, 2], ME) == 2  # speed counts, not heads


def test_unknown_speeds_fall_back_to_counting_replicas() -> None:
    assert choose_stage({1: {A: 0.0, B: 0.0}, 2: {C: 0.0}, 3: {D: 0.0, ME: 0.0}}, [1, 2], ME) == 2


def test_my_own_old_record_does_not_count() -> None:
    assert choose_stage({1: {ME: 100.0}, 2: {A: 1.0}}, [1, 2], ME) == 1


def test_joiners_that_cannot_see_each_other_spread_out() -> None:
    chosen = Counter(choose_stage({}, [1, 2, 3], PeerId(f"peer{i}")) for i in range(300))
    assert set(chosen) == {1, 2, 3}
    assert min(chosen.values()) > 60


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="no stage"):
        choose_stage({1: {A: 1.0}}, [], ME)


def moves(view, movable=(1, 2, 3, 4), download_s=10.0, horizon_s=300.0, **more) -> list[tuple[PeerId, int, int]]:
    chosen = choose_moves(view, movable, download_s=download_s, horizon_s=horizon_s, **more)
    return [(m.peer, m.source, m.target) for m in chosen]


def test_a_move_lifts_the_slowest_stage() -> None:
    view = {1: {A: 2.0, B: 2.0, C: 2.0}, 2: {D: 2.0}}
    assert choose_moves(view, [1, 2], download_s=10, horizon_s=300) == [Move(A, 1, 2, 2.0)]
    assert moves(view, [1]) == []
    assert moves(view, stay={A, B, C}) == []
    assert moves({1: {A: 1.0, B: 2.0, C: 3.0}, 2: {D: 1.0}}) == [(B, 1, 2)], "the one that fits"


def test_a_move_that_costs_more_than_it_gains_is_not_made() -> None:
    view = {1: {A: 1.0, B: 1.0}, 2: {C: 1.0}}
    assert moves(view) == []  # only moves the bottleneck
    uneven = {1: {A: 1.0, B: 2.0, C: 2.0}, 2: {D: 3.6}}
    assert choose_moves(uneven, [1, 2], download_s=10, horizon_s=1e9) == [Move(A, 1, 2, pytest.approx(4 / 3.6))]
    assert moves(uneven, horizon_s=1e9, at_least=1.2) == []
    assert moves(uneven, horizon_s=12) == [], "half of what A does not do in 10 s is more than 0.4 a second for 12"
    assert moves(uneven, horizon_s=13) == [(A, 1, 2)]
    lossy = {1: {A: 2.0, B: 2.0}, 2: {C: 1.0}, 3: {D: 9.0}}
    assert moves(lossy, download_s=1, horizon_s=10) == [(A, 1, 2)]


def test_two_stages_that_are_equally_slow_are_helped_together() -> None:
    six = [[PeerId(f"{s}{i}") for i in range(6)] for s in range(4)]
    view = {s + 1: dict.fromkeys(six[s][:n], 1.0) for s, n in enumerate((4, 4, 6, 6))}
    chosen = moves(view)
    assert [(a, b) for _, a, b in chosen] == [(3, 1), (4, 2)]
    assert moves(view, most=1) == [], "one alone gains nothing"


def test_who_is_on_the_way_counts_where_it_goes_and_does_not_move() -> None:
    view = {1: {A: 1.0, B: 1.0, C: 1.0}, 2: {D: 1.0}}
    coming = {**view, 2: {D: 1.0, ME: 1.0}}
    assert moves(view) == [(A, 1, 2)]
    assert moves(coming, away={ME}) == []
    assert moves({1: {A: 1.0, B: 1.0, ME: 1.0}, 2: {D: 0.5}}, away={ME, A}) == [], "B alone serves stage 1"


def test_a_stage_is_never_left_empty() -> None:
    assert moves({1: {A: 50.0}, 2: {B: 1.0}}, download_s=1, horizon_s=1000) == []
    assert moves({1: {A: 50.0}}, [1], download_s=1, horizon_s=1000) == []


def test_a_stage_nobody_hosts_gets_a_peer() -> None:
    assert choose_moves({1: {A: 1.0, B: 2.0}, 2: {}}, [1, 2], download_s=10, horizon_s=60) == [Move(A, 1, 2, float("inf"))]
