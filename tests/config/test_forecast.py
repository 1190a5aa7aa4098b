"""Forecast of a peer's traffic from the manifest alone. benchmarks/firsthour/caps.py measures that
it is right."""

import math

import pytest

from node.app.capacity import OVERHEAD, Forecast, forecast
from node.app.joining import sheet
from node.config import NodeConfig
from node.manifest import Manifest, amended
from node.model.shapes import parameter_shapes


def manifest(**changes: object) -> Manifest:
    fields = {key.replace("__", "."): value for key, value in changes.items()}
    made = Manifest.default_demo()
    return Manifest.parse(amended(made, fields).to_toml()) if fields else made


def test_activation_traffic_is_shared_by_replicas():
    m = manifest(training__eval_every=0)
    p = m.pipeline
    tensor = p.micro_batch * m.model.seq_len * m.model.d_model * 4
    alone = forecast(m, 1, {1: 1})
    expected = 2 * m.training.target_batch / p.micro_batch * tensor * OVERHEAD
    assert alone.activations == pytest.approx(expected, rel=0.01)
    assert forecast(m, 1, {1: 2}).activations == pytest.approx(alone.activations / 2)
    assert forecast(m, 0).activations == pytest.approx(alone.activations), (
        "the ends send each there and back too"
    )
    half = manifest(training__eval_every=0, pipeline__wire="bf16")
    assert forecast(half, 1, {1: 1}).activations == pytest.approx(alone.activations / 2, rel=0.01)


def test_evaluation_counts_for_as_often_as_it_happens():
    never, often = (forecast(manifest(training__eval_every=n), 1) for n in (0, 1))
    m = manifest()
    share = m.training.eval_batches / (2 * m.training.target_batch / m.pipeline.micro_batch)
    assert often.activations / never.activations == pytest.approx(1 + share)


def test_a_peer_that_is_alone_in_a_stage_averages_with_nobody():
    m = manifest(training__buddy_every=0)
    numbers = sum(
        math.prod(shape) for shape in parameter_shapes(m.model, m.pipeline.stages, 1).values()
    )
    found = [forecast(m, 1, {1: n}).averaging for n in (1, 2, 4)]
    assert found == [
        0.0,
        pytest.approx(OVERHEAD * 0.5 * 8 * numbers),
        pytest.approx(OVERHEAD * 0.75 * 8 * numbers),
    ]
    cells = manifest(training__buddy_every=0, averaging__cell=2, outer__window_s=20.0)
    assert forecast(cells, 1, {1: 4}).averaging == pytest.approx(found[1]), (
        "a cell of two, however many there are"
    )
    assert forecast(manifest(), 1, {1: 2}).averaging > found[1], (
        "copies of optimizer state at a buddy"
    )


def test_fresh_parameters_in_bf16_are_half_the_bytes():
    whole, half = (
        forecast(manifest(optimizer__parameters=p, training__buddy_every=0), 1, {1: 4})
        for p in ("fp32", "bf16")
    )
    assert half.averaging == pytest.approx(whole.averaging * 6 / 8)
    assert half.activations == whole.activations


def test_an_hour_is_its_epochs_and_its_seconds():
    f = Forecast(activations=1000.0, averaging=100.0, plans=10.0, state=5, idle=2.0)
    assert f.over(60, 3600) == (60 * 1100 + 7200, 60 * 1100 + 7200)
    assert f.over(60, 3600, leads=True) == (60 * 1110 + 7200, 60 * 1100 + 7200)


def test_the_sheet_names_activations_and_what_caps_them(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "70")
    lines = sheet(NodeConfig(tmp_path), manifest(), signed=True)
    text = " ".join(" ".join(lines).split())
    for words in (
        "of activations and their gradients",
        "of averaging",
        "at the ends",
        "an hour",
        "--max-up RATE",
    ):
        assert words in text
    assert max(map(len, lines)) <= 70
