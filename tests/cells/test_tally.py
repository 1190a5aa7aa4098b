"""A daemon's account of its cell and of the windows that the cell went through."""

import pytest

from node.core.ids import CellId, PeerId
from node.core.journey import Partner, Plan, PlanMember, Window
from node.outer.service import CellTally
from node.outer.window import WindowNews
from protos.control_pb2 import CellLine

CELL = CellId("ab" * 8)
OTHER = CellId("cd" * 8)
ME = PeerId("me")
EVERY = 60.0
PARTNERS = (Partner(OTHER, PeerId("it"), {}),)


def plan(number: int = 0, *, outer: int = 0, cell: CellId = CELL) -> Plan:
    window = Window(number, PARTNERS if number or outer else ())
    return Plan(1, 1, ME, (PlanMember(ME, 0),), (), {}, outer=outer, cell_id=cell, window=window)


def line(tally: CellTally, wall: float, news: WindowNews | None = None) -> CellLine:
    return tally.line(CELL, 2, 2, news or WindowNews(), EVERY, wall)


@pytest.fixture
def tally() -> CellTally:
    """A peer in the cell since a moment after the start of window 10."""
    made = CellTally()
    made.planned(plan(), EVERY, 601.0)
    return made


def test_a_window_is_by_the_wall_clock(tally: CellTally) -> None:
    now = line(tally, 625.0)
    assert (now.window, now.next_s, now.window_s) == (10, 35.0, 60.0)
    assert (now.cell, now.peers, now.cells) == (CELL, 2, 2)


def test_alone_means_nobody_found_in_a_whole_window(tally: CellTally) -> None:
    assert not line(tally, 665.0).alone, "window 10 had begun before"
    assert line(tally, 725.0).alone
    assert line(tally, 726.0).alone_windows == 1, "a window counts once"
    assert line(tally, 905.0).alone_windows == 4


def test_a_group_and_then_its_mean(tally: CellTally) -> None:
    tally.planned(plan(11), EVERY, 672.0)
    met = line(tally, 675.0)
    assert (met.met, met.met_cells, met.last) == (11, 2, 0)
    tally.planned(plan(outer=11), EVERY, 690.0)
    news = WindowNews(11, 2, 1, 1000, 0.5)
    done = line(tally, 725.0, news)
    assert (done.last, done.cells_averaged, done.bytes, done.last_s) == (11, 2, 1000, 0.5)
    assert not done.alone
    assert (done.averaged_windows, done.alone_windows) == (1, 0)
    assert line(tally, 726.0, news).averaged_windows == 1


def test_a_cell_that_still_makes_the_last_mean_was_not_alone(tally: CellTally) -> None:
    tally.planned(plan(11), EVERY, 690.0)
    tally.planned(plan(outer=11), EVERY, 721.0)
    assert not line(tally, 785.0).alone
    assert line(tally, 845.0).alone


def test_a_new_cell_has_no_windows_behind_it(tally: CellTally) -> None:
    tally.planned(plan(cell=OTHER), EVERY, 702.0)
    assert line(tally, 725.0).alone_windows == 0
    assert not line(tally, 725.0).alone


def test_before_the_first_plan_nothing_is_known() -> None:
    first = CellTally().line(CELL, 1, 1, WindowNews(), EVERY, 7_000.0)
    assert (first.alone, first.alone_windows, first.met, first.last) == (False, 0, 0, 0)
