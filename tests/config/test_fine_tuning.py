"""Rates and epochs of a run that begins from a pretrained model."""

import math

import pytest

from node import fine_tuning
from node.core.errors import UsageFault
from node.core.journey import UNKNOWN, Losses
from node.manifest import Manifest, amended, typed
from node.optim.settings import learning_rate

SMOLLM2 = {
    "model.layers": 30,
    "model.d_model": 576,
    "model.heads": 9,
    "model.kv_heads": 3,
    "model.d_ff": 1536,
    "model.vocab": 49_152,
    "model.seq_len": 1024,
    "model.tied": True,
}
LLAMA_8B = SMOLLM2 | {
    "model.layers": 32,
    "model.d_model": 4096,
    "model.heads": 32,
    "model.kv_heads": 8,
    "model.d_ff": 14_336,
    "model.vocab": 128_256,
    "model.tied": False,
}


def made(of_model, **said) -> Manifest:
    """Manifest of a run from a pretrained model; in the settings' names `__` stands for the dot."""
    given = typed({name.replace("__", "."): value for name, value in said.items()})
    changes = of_model | fine_tuning.usual(of_model, given) | given
    return amended(Manifest.default_demo(), changes)


def test_rates_follow_the_width_and_what_is_trained():
    small = made(SMOLLM2).optimizer
    large = made(LLAMA_8B).optimizer
    assert (small.name, large.name) == ("adamw", "adamw")
    assert 5e-5 <= small.adam_lr <= 3e-4
    assert 1e-5 <= large.adam_lr <= 5e-5
    assert small.adam_lr / large.adam_lr == pytest.approx(4096 / 576, rel=0.05)
    for of_model, whole in ((SMOLLM2, small), (LLAMA_8B, large)):
        adapters = made(of_model, model__adapter=8).optimizer.adam_lr
        assert 1e-4 <= adapters <= fine_tuning.HIGHEST_OF_ADAPTERS
        assert adapters > 4 * whole.adam_lr
    tiny = made(SMOLLM2 | {"model.d_model": 36}).optimizer
    assert tiny.adam_lr == fine_tuning.HIGHEST


def test_updates_of_every_method_are_as_long_as_those_of_adamw():
    import torch

    from node.optim.muon import muon_fresh

    manifest = made(SMOLLM2, optimizer__name="muon")
    o = manifest.optimizer
    for rows in (192, 576, 1536):
        orthogonal = torch.linalg.qr(torch.randn(max(rows, 576), min(rows, 576)))[0]
        orthogonal = orthogonal if rows >= 576 else orthogonal.T
        update = muon_fresh(o, torch.zeros(rows, 576), orthogonal, o.lr)
        length = float(update.pow(2).mean().sqrt())
        assert length == pytest.approx(fine_tuning.ADAM_RMS * o.adam_lr, rel=0.05)
    assert o.shampoo_lr == pytest.approx(fine_tuning.ADAM_RMS * o.adam_lr, rel=0.05)


@pytest.mark.parametrize("epochs", [1, 3, 60, 5000])
def test_the_rate_rises_briefly_and_falls_to_a_tenth(epochs):
    manifest = made(SMOLLM2, training__epochs=epochs)
    o = manifest.optimizer
    rates = [learning_rate(o, "adamw", epoch, epochs) for epoch in range(epochs)]
    assert max(rates) >= 0.9 * o.adam_lr or epochs == 1
    assert rates.index(max(rates)) <= max(1, 0.11 * epochs)
    assert epochs == 1 or rates[-1] == pytest.approx(o.floor * o.adam_lr)
    assert 1 <= manifest.training.eval_every <= max(1, epochs // 10)


@pytest.mark.parametrize(
    ("of_model", "tokens"), [(SMOLLM2, 4096), (LLAMA_8B, 65_536)], ids=["135M", "8B"]
)
def test_an_epoch_is_as_long_as_the_model_is_large(of_model, tokens):
    manifest = made(of_model)
    assert manifest.training.target_batch * manifest.model.seq_len == tokens
    assert manifest.pipeline.micro_batch * manifest.model.seq_len <= 1024
    short = made(of_model, model__seq_len=64)
    assert short.training.target_batch * 64 == tokens


@pytest.mark.parametrize(
    "said",
    [
        {"pipeline__micro_batch": 3},
        {"training__target_batch": 7},
        {"training__target_batch": 6, "pipeline__micro_batch": 3},
        {"model__seq_len": 1000},
    ],
)
def test_what_the_owner_says_stands_and_the_rest_fits_it(said):
    manifest = made(SMOLLM2, **said)
    for name, value in said.items():
        section, _, key = name.partition("__")
        assert getattr(getattr(manifest, section), key) == value
    assert manifest.training.target_batch % manifest.pipeline.micro_batch == 0


def test_a_rate_that_the_owner_says_is_kept_and_explained():
    said = {"optimizer__adam_lr": 2e-3, "optimizer__warmup": 0, "training__epochs": 20}
    manifest = made(SMOLLM2, **said)
    assert (manifest.optimizer.adam_lr, manifest.optimizer.warmup) == (2e-3, 0)
    assert manifest.optimizer.decay == 1.0
    lines = " ".join(fine_tuning.explained(manifest))
    usual = made(SMOLLM2).optimizer.adam_lr
    assert "0.002" in lines
    assert f"{usual:.2g} is usual" in lines
    assert "is usual" not in " ".join(fine_tuning.explained(made(SMOLLM2)))
    assert math.isclose(made(SMOLLM2, optimizer__name="soap").optimizer.soap_lr, usual)


def test_stages_follow_the_layers_of_any_model():
    assert made(SMOLLM2).pipeline.stages == 3
    assert made(SMOLLM2 | {"model.layers": 2}).pipeline.stages == 2
    assert made({}, model__layers=1).pipeline.stages == 1
    assert made(SMOLLM2, model__ends_layers=29).pipeline.stages == 1
    with pytest.raises(UsageFault, match="stages = 3"):
        made(SMOLLM2 | {"model.layers": 2}, pipeline__stages=3)


def test_a_run_from_new_weights_keeps_its_rates():
    new = made({}, model__layers=4)
    demo = Manifest.default_demo()
    assert new.optimizer == demo.optimizer
    assert new.training.target_batch == demo.training.target_batch
    assert not new.training.reference


def test_a_run_that_made_its_model_worse_is_told_a_tenth_of_its_rate():
    run = {"training__epochs": 60, "optimizer__warmup": 6, "training__eval_every": 6}
    manifest = made(SMOLLM2, optimizer__adam_lr=2e-3, **run)
    before = Losses(4.6, 4.5)
    said = fine_tuning.worse(manifest, 13, 4.7, before)
    assert "--set optimizer.adam_lr=0.0002" in said
    assert "--set optimizer.adam_lr=0.0002" in said[:70], "as far as the monitor shows"
    for epoch, loss, known in (
        (13, 4.4, before),
        (13, 4.501, before),
        (5, 4.7, before),
        (13, 4.7, UNKNOWN),
        (13, 0.0, before),
    ):
        assert not fine_tuning.worse(manifest, epoch, loss, known)
    late = made(SMOLLM2, **run | {"optimizer__warmup": 8})
    assert not fine_tuning.worse(late, 9, 4.7, before), "measured at epoch 6, while the rate rose"
    assert fine_tuning.worse(late, 12, 4.7, before)
