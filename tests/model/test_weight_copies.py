"""Weights cast once for all micro-batches between two changes: the same numbers as autocast's, to
the bit, and nothing stale."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from node.core.journey import Version
from node.model.cost import RECOMPUTE, cast_bytes
from node.model.device import Device, Format
from node.model.precision import Precision
from node.model.settings import ModelSettings
from node.model.stages import Blocks, Ends, base_of, build
from node.model.text_cache import TextCache
from node.model.weight_copies import WeightCopies
from node.pipeline.visit_buffers import StageMath, TextStep, VisitBuffers
from node.stage.state import StageState
from testbed.models.visits import read, visit

CPU = Device(torch.device("cpu"))
HALF = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
BLOCKS = ModelSettings(layers=2, d_model=64, heads=4, kv_heads=2, d_ff=96, seq_len=16, vocab=61)
SHAPES = {
    "plain": BLOCKS,
    "biases": replace(BLOCKS, qkv_bias=True),
    "norms": replace(BLOCKS, qk_norm=True),
    "adapters": replace(BLOCKS, adapter=4),
}
ENDS = {
    "own head": replace(BLOCKS, ends_layers=1),
    "tied": replace(BLOCKS, ends_layers=1, tied=True),
}
SIZE = (3, BLOCKS.seq_len, BLOCKS.d_model)
VISITS = 2


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


class WeightCasts(TorchDispatchMode):
    """Counts casts of matrices from fp32 to another format while it is entered."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        held = (*module.parameters(), *module.buffers())
        self.shapes = {tuple(t.shape) for t in held if t.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dtype is torch.float32:
            self.count += tuple(args[0].shape) in self.shapes
        return func(*args, **(kwargs or {}))


def stage(settings: ModelSettings, number: int, *, keep: bool) -> tuple[Ends | Blocks, StageState]:
    """A stage with its state. Adapters are given numbers: they begin as zero."""
    module = build(settings, 1, number)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(module.named_parameters()):
            if name.endswith("lora_B.weight"):
                parameter.copy_(0.02 * random(*parameter.shape, seed=i))
    frozen = base_of(module) if settings.adapter else None
    if not keep:
        return module, StageState(module, number, frozen=frozen)
    return module, StageState(module, number, frozen=frozen, copies=module.keep_copies())


def stepped(state: StageState, seed: int) -> dict[str, Tensor]:
    """Other parameters near those in place."""
    return {
        name: tensor + 0.02 * random(*tensor.shape, seed=seed)
        for name, tensor in state.parameters().items()
    }


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("settings", SHAPES.values(), ids=SHAPES)
def test_blocks_give_the_numbers_of_autocast_through_every_change(
    settings: ModelSettings, mode: str
) -> None:
    found = []
    for keep in (False, True):
        module, state = stage(settings, 1, keep=keep)
        math = StageMath(module, "fp32", HALF, recompute=mode)
        seen: list[Any] = []

        def micro_batches(math: StageMath = math, seen: list[Any] = seen) -> None:
            for number in range(VISITS):
                x = random(*SIZE, seed=number)
                seen.append(visit(math, x, random(*SIZE, seed=9), (5, 20)))
                seen.append(bytes(math.forward_only(read(x))[0]))

        micro_batches()
        state.adopt(stepped(state, 1), Version(1))
        micro_batches()
        state.roll_back()
        micro_batches()
        state.adopt(stepped(state, 2), Version(1))
        state.adopt(stepped(state, 3), Version(2))
        micro_batches()
        if state.frozen is not None:
            state.begin({name: 1.5 * tensor for name, tensor in state.frozen.items()})
            micro_batches()
        found.append(seen)
    for plain, kept in zip(*found, strict=True):
        if isinstance(plain, bytes):
            assert kept == plain
            continue
        assert kept[:2] == plain[:2]
        assert same(kept[2], plain[2])
        assert all(g.dtype is torch.float32 for g in kept[2].values())
    outputs = [one[0] for one in found[1] if not isinstance(one, bytes)]
    assert outputs[0] == outputs[2 * VISITS], "rolled back"
    assert len(set(outputs)) == len(outputs) - VISITS, "every change is seen"


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("settings", ENDS.values(), ids=ENDS)
def test_ends_learn_the_same_in_pieces_of_the_loss(settings: ModelSettings, mode: str) -> None:
    tokens = torch.arange(3 * settings.seq_len).reshape(3, -1) % settings.vocab
    found = []
    for keep in (False, True):
        module, state = stage(settings, 0, keep=keep)
        assert isinstance(module, Ends)
        module.logits_at_once = 7 * settings.vocab
        math = StageMath(module, "fp32", HALF, recompute=mode)
        losses = []
        shares = []
        for version in range(1, 4):
            gradients = {name: torch.zeros_like(t) for name, t in state.parameters().items()}
            for _ in range(VISITS):
                work = VisitBuffers(float("inf"), SIZE, batch=lambda: (tokens, tokens))
                math.embed(work)
                assert work.output is not None
                work.input = read(torch.frombuffer(work.output, dtype=torch.float32).reshape(SIZE))
                math.loss(work)
                losses.append(work.loss_sum)
                assert work.upstream is not None
                shares.append(work.share or {})
                work.gradient = read(
                    torch.frombuffer(work.upstream, dtype=torch.float32).reshape(SIZE)
                )
                math.embed_backward(work)
                shares.append(work.share or {})
                for share in shares[-2:]:
                    for name, gradient in share.items():
                        gradients[name] += gradient
            fresh = {n: t - 0.01 * gradients[n] for n, t in state.parameters().items()}
            state.adopt(fresh, Version(version))
        found.append((losses, shares))
    (losses, shares), (kept_losses, kept_shares) = found
    assert kept_losses == losses
    assert losses[-1] < losses[0], "it learns"
    assert all(same(a, b) for a, b in zip(kept_shares, shares, strict=True))


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("adapter", [0, 4])
def test_a_later_micro_batch_casts_no_weight(adapter: int, mode: str) -> None:
    counts = []
    for keep in (False, True):
        module, state = stage(replace(BLOCKS, adapter=adapter), 1, keep=keep)
        math = StageMath(module, "fp32", HALF, recompute=mode)
        for number in range(3):
            if number == 2:
                state.adopt(stepped(state, 1), Version(1))
            with WeightCasts(module) as casts:
                visit(math, random(*SIZE), random(*SIZE))
            counts.append(casts.count)
    trained = sum(p.dim() == 2 for p in module.parameters())
    frozen = sum(b.dim() == 2 for b in module.buffers())
    assert trained + frozen > 7
    assert min(counts[:3]) >= trained + frozen, "autocast casts them each time"
    assert counts[3:] == [trained + frozen, 0, trained], "frozen weights are cast once"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_format_with_a_scale_and_one_that_changes(kind: Format) -> None:
    now: list[Format] = [kind]
    found = []
    for keep in (False, True):
        module, _ = stage(BLOCKS, 1, keep=keep)
        precision = Precision(CPU, "fp32", lambda: now[0])
        math = StageMath(module, "fp32", precision.autocast, "off", precision.gradients)
        seen = []
        for now[0] in (kind, "bf16", kind, "fp32"):
            seen.append(visit(math, random(*SIZE), 1e-6 * random(*SIZE, seed=1)))
        found.append(seen)
    for plain, kept in zip(*found, strict=True):
        assert kept[:2] == plain[:2]
        assert same(kept[2], plain[2])


def test_a_text_in_16_bits_leaves_copies_that_train() -> None:
    found = []
    for keep in (False, True):
        module, _ = stage(BLOCKS, 1, keep=keep)
        math = StageMath(module, "fp32", HALF)
        text = TextCache()
        texts = []
        for past in range(3):
            step = TextStep(text, past, 1, input=read(random(1, 1, BLOCKS.d_model, seed=past)))
            (hidden,) = math.extend_texts([step])
            assert not isinstance(hidden, Exception)
            texts.append(bytes(hidden))
        found.append((texts, visit(math, random(*SIZE), random(*SIZE, seed=1))))
    (texts, trained), (kept_texts, kept_trained) = found
    assert kept_texts == texts
    assert kept_trained[:2] == trained[:2]
    assert same(kept_trained[2], trained[2])


def test_a_weight_that_changes_while_it_is_cast_is_cast_again() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    copies = WeightCopies()

    class Changing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            made = func(*args, **(kwargs or {}))
            weight.data = torch.full((4, 4), 2.0)
            copies.forget()
            return made

    with HALF():
        with Changing():
            assert copies.of(weight)[0, 0] == 1.0
        assert copies.of(weight)[0, 0] == 2.0
    assert copies.of(weight) is weight, "outside of autocast"


@pytest.mark.parametrize("number", [0, 1])
def test_copies_are_as_large_as_planned_and_go_with_the_stage(number: int) -> None:
    settings = replace(BLOCKS, ends_layers=1)
    module, state = stage(settings, number, keep=True)
    math = StageMath(module, "fp32", HALF)
    if isinstance(module, Ends):
        tokens = torch.zeros(SIZE[:2], dtype=torch.int64)
        math.embed(VisitBuffers(float("inf"), SIZE, batch=lambda: (tokens, tokens)))
        math.loss_only(read(random(*SIZE)), tokens)
    else:
        visit(math, random(*SIZE), random(*SIZE))
    kept = [weakref.ref(copy) for copy in module.copies]
    nbytes = sum(copy.nbytes for copy in module.copies)
    planned = cast_bytes(settings, 1, number)
    assert 0.97 * planned <= nbytes <= planned
    del module, state, math
    gc.collect()
    assert kept
    assert all(copy() is None for copy in kept)
