"""Figures that `python -m benchmarks.cells` reads from its runs."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cells import revoked
from benchmarks.cells.independence import ENDS_S, STRIKES_S, Book
from benchmarks.cells.live import epochs
from benchmarks.report import Report
from node.core.ids import CellId
from testbed.daemons.books import COMMITTED, CONTRIBUTED
from testbed.daemons.told import Told

A = CellId("a" * 16)
B = CellId("b" * 16)


def test_a_cell_that_stops_waits_until_the_end() -> None:
    book = Book(0, {A: [STRIKES_S - 1.0, STRIKES_S + 1.0], B: [STRIKES_S - 1.0]})
    assert book.gap(A) == ENDS_S - STRIKES_S - 1.0
    assert book.gap(B) == ENDS_S - STRIKES_S + 1.0
    assert (book.count(book.epochs, A), book.count(book.epochs, B)) == (1, 0)


def test_a_window_in_which_means_are_put_in_place_is_no_wait() -> None:
    times = [float(at) for at in range(int(STRIKES_S), int(ENDS_S) + 1, 4)]
    assert Book(0, {A: times[::2]}, {A: times[1::2]}).gap(A) == 4.0


def test_epochs_of_live_cells_leave_out_rounds_without_samples() -> None:
    def commit(who: str, at: float, tokens: int) -> Told:
        return Told(who, at, "info", "training", COMMITTED, "", {"tokens": tokens})

    told = [commit("one", at, 8) for at in (5.0, 11.0, 13.0, 16.0)]
    told += [commit("one", 17.0, 0), commit("one", 21.0, 8), commit("two", 12.0, 8)]
    assert epochs(told, 10.0) == {"one": (3.0, 4.0)}


@pytest.mark.parametrize(("late_s", "holds"), [(5.0, True), (25.0, False)])
def test_work_of_a_revoked_peer_counts_without_commits(monkeypatch, late_s, holds) -> None:
    monkeypatch.setattr(revoked, "AFTER_S", 0.0)
    now = time.time()

    def peer(label: str, kind: str, at: float) -> Any:
        told = iter(([], [Told(label, at, "info", "training", kind, "")]))
        status = SimpleNamespace(leader="owner")
        return SimpleNamespace(
            label=label, key=label, told=lambda: next(told), status=lambda: status
        )

    victim = peer("victim", CONTRIBUTED, now + late_s)
    owner = peer("owner", COMMITTED, now + 20.0)
    box: Any = SimpleNamespace(tutti=lambda *words, home: SimpleNamespace(returncode=0))
    report = Report()
    revoked.revoke(report, box, victim, [owner])
    assert report.rows[0].holds is holds
    assert all(row.holds for row in report.rows[1:])
