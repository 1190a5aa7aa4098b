"""Modules with bf16 parameters: their results, their memory, exports and imports."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from node.core.ids import ENDS
from node.model.cost import stage_bytes
from node.model.device import Device
from node.model.pretrained import Weights, model_of
from node.model.settings import ModelSettings
from node.model.stages import build
from node.pipeline.gradients import GradientSum
from node.pipeline.visit_buffers import StageMath
from testbed.models.directories import made
from testbed.models.visits import visit
from tests.model.conftest import exported

SMALL = ModelSettings(layers=2, d_model=32, heads=2, kv_heads=1, d_ff=64, seq_len=16, qk_norm=True)
LORA = replace(SMALL, adapter=2)
HALF = partial(Device(torch.device("cpu")).autocast, "bf16")


@pytest.mark.parametrize("settings", [SMALL, LORA])
@pytest.mark.parametrize("recompute", ["off", "layers", "stage"])
def test_a_visit_in_bf16_is_near_one_in_fp32(settings: ModelSettings, recompute: str) -> None:
    """Both modules have the rounded weights. Hidden states are fp32; gradients are in the
    parameters' format, and summed in fp32."""
    half = build(settings, 1, 1, "bf16")
    whole = build(settings, 1, 1)
    whole.load_state_dict(half.state_dict())
    assert {t.dtype for t in half.state_dict().values()} == {torch.bfloat16}
    found = []
    for module, autocast in ((half, HALF), (whole, Device(torch.device("cpu")).autocast)):
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
        math = StageMath(module, "fp32", autocast, recompute)
        output, _, share = visit(math, x, torch.ones(2, 16, 32))
        sums = GradientSum()
        sums.offer([share], 32)
        out = torch.frombuffer(bytearray(output), dtype=torch.float32)
        found.append((out, sums.whole()[0], {g.dtype for g in share.values()}))
    (out, grads, kinds), (plain, theirs, _) = found
    torch.testing.assert_close(out, plain, atol=0.05, rtol=0.05)
    assert kinds == {torch.bfloat16}
    assert {g.dtype for g in grads.values()} == {torch.float32}
    assert grads.keys() == theirs.keys()
    for name, gradient in grads.items():
        apart = (gradient - theirs[name]).norm()
        assert apart <= 0.05 * theirs[name].norm() + 1e-6, name


def test_a_tokens_gradients_are_summed_in_fp32() -> None:
    """A thousand ones in bf16 would be 256."""
    ends = build(SMALL, 1, ENDS, "bf16")
    tokens = torch.full((4, 256), 7)
    with HALF():
        h = ends.embed(tokens)  # type: ignore[union-attr, operator]
    assert h.dtype is torch.float32
    weight = ends.get_parameter("model.embed_tokens.weight")
    assert torch.equal(h[0, 0], weight[7].float())
    (gradient,) = torch.autograd.grad(h, [weight], torch.ones_like(h))
    assert gradient[7].tolist() == [1024.0] * 32
    assert float(gradient.float().abs().sum()) == 1024.0 * 32
    with pytest.raises(IndexError):
        ends.embed(torch.tensor([[SMALL.vocab]]))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("stage", [ENDS, 1])
def test_parameters_take_half_and_sums_do_not(stage: int) -> None:
    whole, half = (stage_bytes(SMALL, 1, stage, width=width) for width in (4, 2))
    assert (half.parameters, half.before) == (whole.parameters // 2, whole.before // 2)
    assert half.shares / half.uncounted == whole.shares / whole.uncounted / 2
    assert (half.gradients, half.work) == (whole.gradients, whole.work)
    frozen, less = (stage_bytes(LORA, 1, 1, width=width).parameters for width in (4, 2))
    assert less == frozen // 2, "what adapters are trained beside too"


def test_given_weights_are_those_that_are_rounded(tmp_path: Path) -> None:
    there = made("qwen3", tmp_path / "hf")
    settings = ModelSettings(**model_of(there)[0])
    whole = Weights(there)
    half = Weights(there, "bf16")
    named = half.digests(settings, 2)
    assert named != whole.digests(settings, 2)
    found = half.verified(settings, 2, 1, named[1])
    assert all(
        torch.equal(t, whole.stage(settings, 2, 1)[name].bfloat16()) for name, t in found.items()
    )
    tensors = half.stage(settings, 1, 0) | half.stage(settings, 1, 1)
    out = exported(tmp_path / "out", settings, tensors, parameters="bf16")
    # Numbers that bf16 can hold have one name in either format.
    assert Weights(out).digests(settings, 2) == named
    size = sum(t.numel() for t in tensors.values())
    assert 2 * size < (out / "model.safetensors").stat().st_size < 2 * size + 20_000


def test_transformers_loads_an_export_in_bf16(tmp_path: Path) -> None:
    tensors = {n: t for s in (0, 1) for n, t in build(SMALL, 1, s, "bf16").state_dict().items()}
    out = exported(tmp_path / "out", SMALL, tensors, parameters="bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype is torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
    lora = dict(build(LORA, 1, 1, "bf16").named_parameters())
    exported(tmp_path / "lora", LORA, lora, parameters="bf16")
    saved = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
