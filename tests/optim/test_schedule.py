from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from node.optim.settings import SCHEDULES, OptimSettings, learning_rate, share

SETTINGS = OptimSettings(lr=0.02, adam_lr=0.003, warmup=10, decay=0.4)


def test_it_rises_stays_and_falls_to_a_tenth():
    rates = [learning_rate(SETTINGS, "muon", e, 100) for e in range(100)]
    assert rates[:10] == pytest.approx([0.002 * (i + 1) for i in range(10)])
    assert rates[9:61] == [0.02] * 52
    steps = [a - b for a, b in zip(rates[60:], rates[61:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert steps[0] > 0
    assert rates[-1] == pytest.approx(0.002)
    peaks = {"muon": 0.02, "adamw": 0.003, "shampoo": SETTINGS.shampoo_lr, "soap": SETTINGS.soap_lr}
    assert {m: learning_rate(SETTINGS, m, 30, 100) for m in peaks} == peaks


@pytest.mark.parametrize(
    ("settings", "epoch", "epochs", "expected"),
    [
        (SETTINGS, 500, 100, 0.1),  # past the end
        (SETTINGS, 500, 0, 1.0),  # without an end
        (OptimSettings(warmup=0), 0, 100, 1.0),
    ],
)
def test_the_share_at_the_edges_of_a_run(settings, epoch, epochs, expected):
    assert share(settings, epoch, epochs) == pytest.approx(expected)


@pytest.mark.parametrize("epochs", [1, 2, 5, 12])
def test_short_runs_never_stop_learning(epochs):
    assert all(0 < share(SETTINGS, e, epochs) <= 1 for e in range(epochs + 1))


@given(st.sampled_from(SCHEDULES[:2]), st.floats(0, 1), st.floats(0.05, 1), st.integers(3, 500))
def test_every_schedule_falls_from_the_peak_to_the_floor(schedule, floor, decay, epochs):
    settings = OptimSettings(warmup=0, decay=decay, schedule=schedule, floor=floor)
    rates = [share(settings, e, epochs) for e in range(epochs)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    plain = [share(replace(settings, floor=0.0), e, epochs) for e in range(epochs)]
    assert rates == pytest.approx([floor + (1 - floor) * rate for rate in plain])
    if epochs * (1 - decay) <= epochs - 1:
        assert rates[-1] == floor


def test_a_constant_rate_stays_after_its_warm_up():
    settings = OptimSettings(warmup=4, decay=1.0, schedule="constant", floor=0.0)
    assert [share(settings, e, 9) for e in range(12)] == [0.25, 0.5, 0.75, *[1.0] * 9]


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("linear", "get_linear_schedule_with_warmup"),
        ("cosine", "get_cosine_schedule_with_warmup"),
    ],
)
def test_decay_over_all_but_the_warm_up_is_as_in_transformers(schedule, theirs):
    warm = 10
    epochs = 60
    settings = OptimSettings(warmup=warm, decay=1 - warm / epochs, schedule=schedule, floor=0.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = getattr(transformers, theirs)(optimizer, warm, epochs - 1).lr_lambdas[0]
    # torch's schedule begins at 0 and wastes a step; from the peak on both are the same.
    assert [share(settings, e, epochs) for e in range(warm)] == pytest.approx(
        [rates(e + 1) for e in range(warm)]
    )
    assert [share(settings, e, epochs) for e in range(warm, epochs)] == pytest.approx(
        [rates(e) for e in range(warm, epochs)], abs=1e-9
    )
