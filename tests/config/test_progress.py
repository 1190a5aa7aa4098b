"""How long a run will still take, at the speed of the last ten minutes."""

from types import SimpleNamespace
from typing import Any

import pytest

from node.app.progress import OVER_S, Progress
from node.app.snapshot import Tally
from node.core.journey import UNKNOWN


def after(*marks: tuple[int, float]) -> Progress:
    progress = Progress()
    for epoch, now in marks:
        progress.reached(epoch, now)
    return progress


def test_it_is_unknown_until_two_epochs_have_passed():
    assert after().left(100, 0.0) == (0.0, 0.0)
    assert after((10, 0.0), (11, 60.0)).left(100, 60.0) == (0.0, 0.0)
    assert after((10, 0.0), (11, 60.0), (12, 120.0)).left(100, 120.0) == (88 * 60.0, 120.0)


def test_the_last_ten_minutes_count():
    slow = [(epoch, 100.0 * epoch) for epoch in range(11)]
    fast = [(10 + i, 1000.0 + i) for i in range(1, 1201)]
    left, over = after(*slow, *fast).left(2210, 2200.0)
    assert left == pytest.approx(1000.0)
    assert over == pytest.approx(OVER_S)


def test_epochs_of_hours_are_measured_over_hours():
    left, over = after((0, 0.0), (1, 3600.0), (2, 7200.0), (3, 10800.0)).left(5, 10800.0)
    assert (left, over) == (7200.0, 7200.0)


def test_a_swarm_that_stands_gets_slower_and_one_that_works_does_not():
    progress = after((0, 0.0), (1, 10.0), (2, 20.0))
    assert progress.left(12, 25.0) == (100.0, 20.0)
    assert progress.left(12, 120.0) == (600.0, 120.0)


def test_nothing_is_left_at_the_end():
    assert after((8, 0.0), (9, 1.0), (10, 2.0)).left(10, 2.0) == (0.0, 0.0)


def plan(epoch: int, cell: str = "", tokens: int = 0) -> Any:
    return SimpleNamespace(
        cell_id=cell,
        epoch=epoch,
        tokens=tokens,
        loss=0.0,
        loss_val=0.0,
        forecast=(1.0, 1.0),
        reference=UNKNOWN,
    )


def test_a_pause_counts_neither_for_an_epoch_nor_for_the_speed():
    tally = Tally()
    for epoch, now in ((18, 10.0), (19, 20.0), (20, 30.0)):
        tally.planned(plan(epoch, tokens=1000 * epoch), now)
    assert (tally.last_took_s, tally.shown.tokens_per_s) == (10.0, 100.0)
    given_up: Any = SimpleNamespace(
        stage=SimpleNamespace(version=SimpleNamespace(epoch=20)),
        meter=SimpleNamespace(micro_batches=0),
    )
    tally.gave_up(given_up)
    assert tally.left_s(31.0) == 0.0
    assert tally.planned(plan(21, tokens=21_000), 7230.0) == 0.0
    assert (tally.last_took_s, tally.shown.tokens_per_s) == (10.0, 0.0)
    assert tally.planned(plan(22, tokens=22_000), 7250.0) == 20.0
    assert tally.shown.tokens_per_s == 50.0


def test_figures_follow_a_swarm_that_went_back():
    tally = Tally()
    for epoch, now in ((199, 0.0), (200, 10.0), (100, 20.0)):
        tally.planned(plan(epoch, tokens=1000 * epoch), now)
    assert (tally.shown.tokens, tally.shown.tokens_per_s) == (100_000, 0.0)
    assert tally.planned(plan(101, tokens=101_000), 40.0) == 20.0
    assert (tally.shown.tokens, tally.shown.tokens_per_s) == (101_000, 50.0)
    assert tally.planned(plan(101, tokens=101_000), 50.0) == 0.0, "the attempt was repeated"
    assert tally.left_s(40.5) == 1.5


def test_a_peer_of_another_cell_counts_the_epochs_of_that_one():
    tally = Tally()
    for cell, epoch, now in (("a", 5, 0.0), ("a", 6, 10.0), ("a", 7, 20.0), ("b", 7, 30.0)):
        tally.planned(plan(epoch, cell), now)
        assert tally.progress.left(17, now) == ((100.0, 20.0) if now == 20.0 else (0.0, 0.0))


def test_a_swarm_that_went_back_and_another_cell_are_measured_anew():
    progress = after((8, 0.0), (9, 1.0), (10, 2.0), (5, 3.0))
    assert progress.left(20, 3.0) == (0.0, 0.0)
    for epoch in (6, 7):
        progress.reached(epoch, epoch - 2.0)
    assert progress.left(20, 5.0) == (13.0, 2.0)
    progress.restart()
    assert progress.left(20, 5.0) == (0.0, 0.0)
