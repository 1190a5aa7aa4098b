"""Adapters are trained beside weights that stay, and load in PEFT."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from node.core.errors import OutOfResources, Refused, UsageFault
from node.model.cost import flops_per_token, stage_bytes
from node.model.export import trained_shapes
from node.model.pretrained import Weights, keep_weights, model_of
from node.model.settings import ModelSettings
from node.model.shapes import base_shapes, check_settings, count, parameter_shapes
from node.model.stages import base_of, build
from testbed.models.directories import made
from testbed.reference.unsplit import Unsplit
from tests.model.conftest import exported

SMALL = ModelSettings(layers=3, d_model=32, d_ff=48, qkv_bias=True)
LORA = replace(SMALL, adapter=4, adapter_targets=("q_proj", "down_proj"))
TOKENS = torch.arange(20)[None] * 7 % 259


@pytest.mark.parametrize("ends_layers", [0, 1])
@pytest.mark.parametrize("stage", range(3))
def test_only_adapters_are_parameters(stage: int, ends_layers: int) -> None:
    cut = {"layers": 4, "ends_layers": ends_layers}
    lora = replace(LORA, **cut)
    module = build(lora, 2, stage)
    plain = build(replace(SMALL, **cut), 2, stage)
    trained = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert trained == parameter_shapes(lora, 2, stage)
    assert bool(trained) == (stage > 0 or ends_layers > 0)
    kept = base_of(module)
    assert {name: tuple(t.shape) for name, t in kept.items()} == base_shapes(lora, 2, stage)
    assert all(torch.equal(t, kept[name]) for name, t in plain.state_dict().items())


def test_a_new_adapter_changes_nothing_and_a_trained_one_does() -> None:
    lora = Unsplit(LORA)
    plain = Unsplit(SMALL)
    with torch.no_grad():
        before = plain(TOKENS)
        assert torch.equal(lora(TOKENS), before)
        for name, parameter in lora.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
        assert not torch.allclose(lora(TOKENS), before, atol=1e-3)
    lora.loss(TOKENS, TOKENS)[0].backward()
    assert all(p.grad is not None for p in lora.parameters())


def test_first_adapters_do_not_depend_on_the_cut() -> None:
    whole = dict(build(LORA, 1, 1).named_parameters())
    found = {name: t for s in (1, 2, 3) for name, t in build(LORA, 3, s).named_parameters()}
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_an_export_has_the_adapters_of_the_ends() -> None:
    assert trained_shapes(replace(LORA, ends_layers=1)) == trained_shapes(LORA)


def test_memory_and_work_count_what_stays(saved: Path) -> None:
    lora = stage_bytes(LORA, 1, 1)
    plain = stage_bytes(SMALL, 1, 1)
    trained = 4 * count(parameter_shapes(LORA, 1, 1))
    assert lora.parameters == plain.parameters + trained
    assert lora.gradients == trained
    assert flops_per_token(LORA, 1, 1) < flops_per_token(SMALL, 1, 1)
    assert flops_per_token(LORA, 1, 0) < flops_per_token(SMALL, 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"adapter_targets": ()},
        {"adapter_targets": ("q_proj", "q_proj")},
        {"adapter_targets": ("lm_head",)},
    ],
)
def test_adapters_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageFault, match=r"model\.adapter"):
        check_settings(replace(LORA, **change))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("qwen2", tmp_path_factory.mktemp("saved") / "qwen2")


def test_exported_adapters_load_in_peft(saved: Path, tmp_path: Path) -> None:
    settings = ModelSettings(**model_of(saved)[0], adapter=3, adapter_alpha=6.0)
    weights = Weights(saved)
    lora = Unsplit(settings)
    for stage in (0, 1):
        lora.load_state_dict(weights.stage(settings, 1, stage), strict=False)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.normal_(0.0, 0.1)
    adapters = {name: p.data for name, p in lora.named_parameters()}
    out = exported(tmp_path / "out", settings, adapters)
    assert exported(out, settings, adapters) == out, "an earlier export is replaced"
    import peft  # takes its time to load

    base = transformers.AutoModelForCausalLM.from_pretrained(saved)
    loaded = peft.PeftModel.from_pretrained(base, str(out))
    with torch.no_grad():
        assert float((loaded(TOKENS).logits - lora(TOKENS)).abs().max()) < 1e-5
    with pytest.raises(UsageFault, match="not the whole model"):
        exported(tmp_path / "half", settings, dict(list(adapters.items())[1:]))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    with pytest.raises(Refused):
        exported(tmp_path / "own", settings, adapters)


def test_fetched_weights_are_kept_and_read_again(tmp_path: Path) -> None:
    stage = base_of(build(LORA, 2, 1))
    keep_weights(tmp_path / "base", stage)
    for name, tensor in Weights(tmp_path / "base").stage(LORA, 2, 1).items():
        assert torch.equal(stage[name], tensor), name
    with pytest.raises(UsageFault, match="has no tensor"):
        Weights(tmp_path / "base").stage(LORA, 2, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutOfResources, match="cannot keep"):
        keep_weights(tmp_path / "file", stage)
