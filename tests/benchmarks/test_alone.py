"""Runs in one process beside which a swarm is judged: which are run, and what tells them apart."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.real import alone
from benchmarks.real.alone import Run, compare, key_of, loss_of
from node.manifest import Manifest, amended


class Losses:
    """Losses that are known beforehand: of a rate, and a tenth of a nat more with each order."""

    def __init__(self, spread: float, **of_rate: float) -> None:
        self._of_rate = {float(name[1:]): loss for name, loss in of_rate.items()}
        self._spread = spread
        self.asked = list[Run]()

    def __call__(self, runs: Sequence[Run]) -> dict[Run, float]:
        self.asked += runs
        return {run: self._of_rate[run[0]] + self._spread * run[1] for run in runs}


def test_rates_far_behind_are_run_with_one_order() -> None:
    losses = Losses(0.01, _1=4.0, _2=3.9, _4=3.95)
    found, left_out = compare(losses, 2.0, (0.5, 1.0, 2.0), (1, 2, 3))
    assert set(found) == {(1.0, 1), (2.0, 1), (2.0, 2), (2.0, 3), (4.0, 1), (4.0, 2), (4.0, 3)}
    assert "other orders of 1 left out: 0.100 behind" in left_out


def test_the_best_rate_has_all_orders_where_it_is_not_the_usual_one() -> None:
    losses = Losses(0.001, _1=4.0, _2=3.9, _4=3.5)
    found, left_out = compare(losses, 2.0, (0.5, 1.0, 2.0), (1, 2, 3))
    assert {run for run in found if run[0] == 4.0} == {(4.0, 1), (4.0, 2), (4.0, 3)}
    assert left_out.count("left out") == 1
    assert len(losses.asked) == len(set(losses.asked))


def test_one_order_leaves_nothing_out() -> None:
    found, left_out = compare(Losses(0.0, _1=4.0, _2=3.9, _4=3.5), 2.0, (0.5, 1.0, 2.0), (1,))
    assert set(found) == {(1.0, 1), (2.0, 1), (4.0, 1)}
    assert left_out == ""


def test_a_run_is_known_by_what_decides_its_loss() -> None:
    usual = Manifest.default_demo()
    key = key_of(usual, "fp32")
    elsewhere = replace(
        usual,
        swarm=replace(usual.swarm, name="another"),
        data=replace(usual.data, source="file:/elsewhere/text.txt"),
    )
    assert key_of(elsewhere, "fp32") == key
    assert key_of(usual, "bf16") != key
    assert key_of(amended(usual, {"data.seed": usual.data.seed + 1}), "fp32") != key
    assert key_of(amended(usual, {"optimizer.adam_lr": 0.5}), "fp32") != key


def test_a_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained = list[float]()

    def train(*_: object) -> float:
        trained.append(3.5)
        return 3.5

    monkeypatch.setattr(alone, "_trained", train)
    for _ in range(2):
        assert loss_of(Manifest.default_demo(), tmp_path, "fp32", 0.001, 1) == 3.5
    assert loss_of(Manifest.default_demo(), tmp_path, "fp32", 0.001, 2) == 3.5
    assert len(trained) == 2
