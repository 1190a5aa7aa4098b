"""The cell that a joiner goes to, and the times at which a peer leaves its own."""

import pytest

from node.core.ids import CellId, PeerId, child_cell, first_cell, is_cell
from node.scheduler.cells import (
    COMING_S,
    PATIENCE_S,
    START_S,
    Dissolution,
    choose_cell,
    spread,
)

A, B, C = (CellId(letter * 16) for letter in "abc")
ROOT = first_cell("run")


def chosen(
    seen: dict[CellId, list[int]], me: str = "me", kept: str = "", working: tuple[CellId, ...] = ()
) -> CellId:
    return choose_cell(seen, 2, PeerId(me), kept=kept, first=ROOT, working=working)


def test_a_run_begins_with_its_first_cell() -> None:
    assert chosen({}) == ROOT
    assert is_cell(ROOT)


SICK = {A: [1, 2], B: [0, 0, 1, 1, 2, 2], C: [0, 1, 1, 2, 2]}


@pytest.mark.parametrize(
    ("seen", "more", "cell"),
    [
        pytest.param({A: [0, 1]}, {"kept": B}, B, id="who was in a cell goes back to it"),
        pytest.param(
            {A: [0, 1, 2], B: [0, 0, 0, 1, 1, 1], C: [0, 1, 2]}, {}, B, id="a stage is lacking"
        ),
        pytest.param(
            {A: [0, 0, 1, 1, 2, 2], B: [0, 0, 0, 0, 1, 1, 1, 2]}, {}, B, id="the thinnest stage"
        ),
        pytest.param(SICK, {}, A, id="the one that lacks a stage"),
        pytest.param(SICK, {"working": (B, C)}, C, id="a cell at work before it"),
    ],
)
def test_a_joiner_goes_to_the_cell_that_needs_it_most(seen, more, cell: CellId) -> None:
    assert chosen(seen, **more) == cell


def test_joiners_spread_over_cells_that_need_them_alike() -> None:
    seen = {cell: [0, 1, 2] for cell in (A, B, C)}
    found = [chosen(seen, f"peer {i}") for i in range(300)]
    assert all(60 <= found.count(cell) <= 140 for cell in seen)


def test_cells_founded_by_different_plans_have_different_names() -> None:
    names = {
        child_cell(cell, line, term) for cell in (A, B) for line in ("x", "y") for term in (1, 2)
    }
    assert len(names) == 8
    assert all(is_cell(name) for name in names)


ME = PeerId("me")
WHOLE = {A: [1, 2], B: [0, 1, 2]}


class Peer:
    """A peer in cell A that looks at the cells once a second."""

    def __init__(self) -> None:
        self.machine = Dissolution(ME, 2, 0.0)
        self.now = 0.0
        self.term = 1

    def looks(self, seconds: float, *working: CellId, coming: bool = False) -> CellId | None:
        """Return the first cell that the machine chooses, or None if there is none in `seconds`."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            to = self.machine.look(A, self.term, (), WHOLE, working, self.now, coming=coming)
            if to is not None:
                return to
        return None


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.mark.parametrize(
    ("worked", "waits", "coming"),
    [
        pytest.param(500, PATIENCE_S, False, id="a cell at rest"),
        pytest.param(0, START_S, False, id="who has just started waits longer"),
        pytest.param(5, COMING_S, True, id="somebody is about to take part"),
    ],
)
def test_a_peer_leaves_for_a_cell_at_work(
    peer: Peer, worked: float, waits: float, coming: bool
) -> None:
    assert peer.looks(worked, A, B) is None
    assert peer.looks(waits - 1, B, coming=coming) is None
    assert peer.looks(2, B, coming=coming) == B


def test_a_leader_that_comes_back_in_time_keeps_its_cell(peer: Peer) -> None:
    peer.looks(5, A, B)
    assert peer.looks(PATIENCE_S - 1, B) is None
    assert peer.looks(1, A, B) is None
    assert peer.looks(PATIENCE_S - 1, B) is None


def test_a_plan_says_that_the_cell_works(peer: Peer) -> None:
    peer.looks(5, A, B)
    for _ in range(5):
        assert peer.looks(PATIENCE_S - 1, B) is None
        peer.term += 1
    assert peer.looks(PATIENCE_S + 1, B) == B


def test_nobody_leaves_where_no_other_cell_works(peer: Peer) -> None:
    assert peer.looks(10 * START_S) is None
    assert peer.looks(1, B) == B


def test_a_peer_that_enters_another_cell_begins_to_wait_anew() -> None:
    machine = Dissolution(ME, 2, 0.0)
    for second in range(1, 100):
        assert machine.look(A, 1, (), WHOLE, (A, B), float(second)) is None
    assert machine.look(C, 1, (), WHOLE, (A, B), 200.0) is None
    assert machine.look(C, 1, (), WHOLE, (A, B), 200.0 + PATIENCE_S - 1) is None
    assert machine.look(C, 1, (), WHOLE, (A, B), 200.0 + PATIENCE_S) in (A, B)


def test_leavers_spread_by_need_and_all_find_the_same() -> None:
    seen = {A: [0, 1, 2], B: [0, 0, 1, 1, 2, 2]}
    leavers = [PeerId(f"peer {i}") for i in range(9)]
    found = spread(leavers, seen, 2)
    # The first three make the thin cell as thick as the other; the rest go to both alike.
    assert 5 <= list(found.values()).count(A) <= 7
    assert spread(leavers[::-1], seen, 2) == found
    for me in leavers:
        machine = Dissolution(me, 2, 0.0)
        mates = [p for p in leavers if p != me]
        assert machine.look(C, 1, mates, seen, (A, B), START_S) == found[me]


def test_leavers_of_one_cell_spread_over_equal_ones() -> None:
    leavers = [PeerId(f"peer {i}") for i in range(30)]
    found = list(spread(leavers, {A: [0, 1, 2], B: [0, 1, 2]}, 2).values())
    assert found.count(A) == found.count(B) == 15
