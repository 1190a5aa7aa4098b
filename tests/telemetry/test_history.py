"""The epochs that a peer saw, and the work of each peer in them."""

from types import SimpleNamespace
from typing import Any

from node.core.journey import Hop, Path
from node.telemetry.history import MOST_LINES, MOST_WORKERS, WHOLE, EpochLine, History

A = "A" * 6
B = "B" * 6
C = "C" * 6


def plan(epoch: int, tokens: int | None = None, **more) -> Any:
    """Plan with the fields that a history reads. Its two paths begin at A; one goes over B, one
    over C."""
    paths = (Path(0, A, (0,), (Hop(1, B),)), Path(1, A, (1,), (Hop(1, C),)))
    usual = {"cell_id": "", "loss": 5.0 - epoch / 1000, "loss_val": 0.0, "paths": paths}
    counted = 100 * epoch if tokens is None else tokens
    return SimpleNamespace(epoch=epoch, tokens=counted, **(usual | more))


def after(*plans: Any) -> History:
    history = History()
    for one in plans:
        history.planned(one, 2.0)
    return history


def test_every_plan_reports_on_the_epoch_before_it():
    history = after(plan(0), plan(1), plan(2, loss_val=4.5), plan(3, loss_val=4.5))
    assert history.after(0, 0) == [
        EpochLine(1, 100, 4.999, 0.0, 2.0),
        EpochLine(2, 200, 4.998, 4.5, 2.0),
        EpochLine(3, 300, 4.997, 0.0, 2.0),
    ]
    assert [line.epoch for line in history.after(2, history.edition)] == [3]
    assert history.after(3, history.edition) == []


def test_work_counts_when_its_epoch_is_committed():
    history = after(plan(0))
    assert history.work(9, A) == []
    history.planned(plan(0), 0.0)  # the attempt was repeated
    history.planned(plan(1), 0.0)
    found = {(w.peer, w.stage): (w.micro_batches, w.epochs) for w in history.work(9, A)}
    assert found == {(A, 0): (2, 1), (B, 1): (1, 1), (C, 1): (1, 1)}
    assert [w.peer for w in history.work(1, A)] == [A]
    history.planned(plan(7), 0.0)  # epochs that this peer missed
    assert {(w.peer, w.epochs) for w in history.work(9, A)} == {(A, 1), (B, 1), (C, 1)}


def test_a_swarm_that_went_back_has_another_edition():
    history = after(plan(1), plan(2), plan(3))
    before = history.edition
    history.planned(plan(2, tokens=222), 0.0)
    assert history.edition != before
    assert [(line.epoch, line.tokens) for line in history.after(9, before)] == [(1, 100), (2, 222)]


def test_a_daemon_that_started_again_has_another_edition():
    history = History(1_700_000_000)
    history.planned(plan(5), 0.0)
    assert [line.epoch for line in history.after(9, 1_600_000_000)] == [5]


def test_another_cell_counts_no_work_of_the_old_one():
    history = after(plan(1, cell_id="a" * 16), plan(2, cell_id="b" * 16))
    assert history.work(9, A) == []


def test_the_own_work_is_told_with_the_work_of_its_whole_stage():
    busy = tuple(Hop(1, f"busy{n:03}") for n in range(300))
    rare = (Path(0, C, (0,), busy), Path(1, C, (1,), (*busy, Hop(2, A), Hop(2, B))))
    found = after(plan(0, paths=rare), plan(1)).work(256, A)
    assert len(found) == 257
    assert {w.of_stage for w in found if w.stage == 1} == {600}
    own = found[-1]
    assert (own.peer, own.stage, own.micro_batches, own.of_stage) == (A, 2, 1, 2)


def test_old_epochs_are_put_together():
    history = History()
    count = 4 * MOST_LINES
    for epoch in range(count + 1):
        held_out = 1.0 + epoch if epoch % 10 == 0 else 1.0 + epoch - epoch % 10
        history.planned(plan(epoch, loss_val=held_out), 2.0, repaired=int(epoch == 7))
        assert len(history.after(0, 0)) <= MOST_LINES
    lines = history.after(0, 0)
    assert sum(line.epochs for line in lines) == count
    assert sum(line.seconds for line in lines) == 2.0 * count
    assert sum(line.repaired for line in lines) == 1
    assert all(line.epochs == 1 for line in lines[-WHOLE:])
    assert [line.epoch for line in lines] == sorted({line.epoch for line in lines})
    assert lines[-1].epoch == count
    assert lines[0].loss_val > 0


def test_the_memory_of_workers_is_bounded():
    history = History()
    for epoch in range(30):
        hops = tuple(Hop(1, f"{epoch:03}{n:03}") for n in range(200))
        paths = (Path(0, A, (0,), hops),)
        history.planned(plan(epoch, paths=paths), 0.0)
    found = history.work(10_000, A)
    assert len(found) <= MOST_WORKERS
    assert found[0].peer == A, "those with most work stay"
