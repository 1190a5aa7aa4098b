"""Which cell a joiner goes to."""

from __future__ import annotations

from node.core.ids import CellId, PeerId, child_cell, first_cell, is_cell
from node.scheduler.cells import choose_cell

A, B, C = (CellId(letter * 16) for letter in "abc")
ROOT = first_cell("run")


def chosen(seen: dict[CellId, list[int]], me: str = "me", kept: str = "") -> CellId:
    return choose_cell(seen, 2, PeerId(me), kept=kept, first=ROOT)


def test_a_run_begins_with_its_first_cell() -> None:
    assert chosen({}) == ROOT
    assert is_cell(ROOT)


def test_who_was_in_a_cell_goes_back_to_it() -> None:
    assert chosen({A: [0, 1]}, kept=B) == B


def test_a_cell_that_lacks_a_stage_comes_first() -> None:
    assert chosen({A: [0, 1, 2], B: [0, 0, 0, 1, 1, 1], C: [0, 1, 2]}) == B


def test_the_thinnest_stage_counts_before_the_number_of_peers() -> None:
    assert chosen({A: [0, 0, 1, 1, 2, 2], B: [0, 0, 0, 0, 1, 1, 1, 2]}) == B


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
