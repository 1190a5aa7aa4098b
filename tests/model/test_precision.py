"""Forward and backward in 16 bits: formats that change between passes, and gradients that fp16
alone would lose."""

import math
from functools import partial

import pytest
import torch

from node.model.device import Device, Format
from node.model.precision import FIRST_SIZE, GROW_AFTER, GradientScale, Precision
from node.model.settings import ModelSettings
from node.model.stages import build
from node.model.text_cache import TextCache
from node.pipeline.gradients import Share
from node.pipeline.visit_buffers import StageMath, TextStep
from node.pipeline.watch import YOUNG, ActivationGuard
from testbed.models.visits import read, visit

CPU = Device(torch.device("cpu"))
SHAPE = ModelSettings(layers=2, d_model=64, heads=2, kv_heads=1, d_ff=128, seq_len=16)
SIZE = (2, SHAPE.seq_len, SHAPE.d_model)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def passed(math_: StageMath, dy: torch.Tensor) -> tuple[torch.Tensor, Share]:
    """Return (gradient of the input, gradients of the parameters) of one micro-batch."""
    _, upstream, share = visit(math_, random(*SIZE), dy)
    return torch.frombuffer(bytearray(upstream), dtype=torch.float32), share


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("recompute", ["off", "layers", "stage"])
def test_small_gradients_survive_fp16(recompute: str) -> None:
    module = build(SHAPE, 1, 1)
    dy = 1e-8 * random(*SIZE, seed=1)
    exact, exact_share = passed(StageMath(module, "fp32"), dy)
    half = Precision(CPU, "fp32", lambda: "fp16")
    made = partial(StageMath, module, "fp32", half.autocast, recompute)
    scaled, scaled_share = passed(made(half.gradients), dy)
    assert apart(scaled, exact) < 0.01
    assert scaled_share.keys() == exact_share.keys()
    assert max(apart(scaled_share[name], g) for name, g in exact_share.items()) < 0.02
    lost = passed(made(), dy)[1]
    assert max(apart(lost[name], g) for name, g in exact_share.items()) > 0.1, "without a scale"


def test_after_an_overflow_the_same_backward_is_made_again() -> None:
    scale = GradientScale()
    x = torch.ones(4, requires_grad=True)
    y = (x.half() * 60000).float()
    (found,) = scale.gradients(y, [x], torch.ones(4))
    assert found is not None
    assert torch.equal(found, torch.full((4,), 60000.0))
    assert scale.size == 2.0, "half of it reaches the backward, and 65,504 is fp16's largest"
    (found,) = scale.gradients((x.half() * math.inf).float(), [x], torch.ones(4))
    assert found is not None
    assert not torch.isfinite(found).any(), "for whoever checks it"
    assert scale.size == 2.0, "no size helps, so the next micro-batch keeps its own"


def test_the_scale_grows_again_up_to_the_first() -> None:
    scale = GradientScale()
    x = torch.ones(1, requires_grad=True)
    scale.size = FIRST_SIZE / 2
    sizes = set()
    for _ in range(2 * GROW_AFTER):
        scale.gradients(x * 1.0, [x], None)
        sizes.add(scale.size)
    assert sizes == {FIRST_SIZE / 2, FIRST_SIZE}


def test_the_format_may_change_between_two_passes() -> None:
    answers: list[Format] = ["fp16", "bf16", "fp32"]
    precision = Precision(CPU, "fp32", answers.pop)
    formats = []
    for _ in range(3):
        with precision.autocast():
            formats.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    assert formats == [torch.float32, torch.bfloat16, torch.float16]
    assert Precision(CPU, "fp32").format == "fp32"
    assert Precision(CPU, "bf16").format == "bf16", "parameters that fp32 cannot compute with"


def test_what_only_goes_forward_is_computed_in_fp32() -> None:
    module = build(SHAPE, 1, 1)
    x = random(*SIZE)
    precision = Precision(CPU, "fp32", lambda: "bf16")

    def passes(mode: str) -> tuple[bytes, bytes]:
        made = StageMath(module, "fp32", precision.autocast, mode, precision.gradients)
        trained, _, _ = visit(made, x, torch.ones(SIZE))
        alone, _ = made.forward_only(read(x))
        return trained, bytes(alone)

    exact = bytes(StageMath(module, "fp32").forward_only(read(x))[0])
    trained, alone = passes("off")
    assert alone == exact != trained
    assert passes("stage") == passes("layers") == (trained, alone)


def test_a_peer_in_bf16_is_not_taken_for_a_broken_one() -> None:
    """A receiver compares the magnitudes of tensors that peers of both formats send."""
    module = build(SHAPE, 1, 1)
    guard = ActivationGuard(8.0)
    for i in range(3 * YOUNG):
        x = random(*SIZE, seed=i)
        kind = ("fp32", "bf16", "fp16")[i % 3]
        with torch.no_grad(), CPU.computing_in(kind):
            size = module(x).float().square().mean().sqrt().item()
        assert guard.odd("lane", kind, size) == 0.0
    assert guard.odd("lane", "fp32", 100 * size) > 0.0, "it does look"


def test_a_text_between_two_layers_of_a_bf16_forward_has_its_own_format() -> None:
    """Its keys and values are those of the passes before, which no training surrounded."""
    stage = build(SHAPE, 1, 1)
    precision = Precision(CPU, "fp32", lambda: "bf16")
    math_ = StageMath(stage, "fp32", precision.autocast)
    tokens = random(5, SHAPE.d_model)

    def written(at_rest: int) -> list[torch.Tensor]:
        """Hidden states of five tokens, the first ones at rest and the others during forwards."""
        cache = TextCache()
        found: list[torch.Tensor] = []

        def write() -> None:
            if cache.length == len(tokens):
                return
            token = read(tokens[cache.length][None, None])
            (data,) = math_.extend_texts([TextStep(cache, cache.length, 1, input=token)])
            assert not isinstance(data, Exception), data
            found.append(torch.frombuffer(bytearray(data), dtype=torch.float32))

        for _ in range(at_rest):
            write()
        math_.pausing(write)
        while len(found) < len(tokens):
            visit(math_, random(*SIZE), random(*SIZE, seed=1))
        math_.pausing(lambda: None)
        return found

    whole = written(len(tokens))
    for at_rest in (0, 2):
        torch.testing.assert_close(written(at_rest), whole, rtol=0.0, atol=1e-5)
