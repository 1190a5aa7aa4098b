"""Recomputation for a backward in place of storage: the same gradients, a smaller stash."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from node.model.cost import RECOMPUTE, stash_bytes
from node.model.documents import NO_TARGET
from node.model.settings import ModelSettings
from node.model.stages import build
from node.model.text_cache import TextCache
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.pipeline import visit_buffers
from node.pipeline.gradients import Share
from node.pipeline.visit_buffers import StageMath, TextStep, VisitBuffers
from node.wire.sketcher import Sketcher
from node.wire.tensors import TensorReader
from testbed.models.visits import arrived, read, returned, visit

SMALL = ModelSettings(layers=3, d_model=32, d_ff=48, seq_len=16, qk_norm=True)
SHAPE = (2, 16, 32)


@pytest.mark.parametrize("document_ends", [(), (4, 5, 12, 15, 40, 47)])
def test_gradients_are_the_same_to_the_bit(document_ends: tuple[int, ...]) -> None:
    x = torch.randn(3, 16, 32)
    dy = torch.randn(3, 16, 32)
    found = {}
    for mode in RECOMPUTE:
        math = StageMath(build(SMALL, 1, 1), "fp32", recompute=mode)
        first, found[mode] = (visit(math, x, dy, document_ends) for _ in range(2))
        assert first[1] == found[mode][1], "nothing is left of the micro-batch before"
        assert all(p.grad is None for p in math.module.parameters())
        tables = 2 * 4 * 16 * 8 if mode == "off" else 0  # of the rotary embedding, kept once
        kept = stash_bytes(SMALL, 1, 1, 3, mode, masked=bool(document_ends)) - x.nbytes
        assert math.graph_bytes[tuple(x.shape)] == kept + tables
    output, upstream, share = found["off"]
    for mode in ("layers", "stage"):
        assert found[mode][:2] == (output, upstream)
        assert found[mode][2].keys() == share.keys()
        assert all(torch.equal(found[mode][2][name], share[name]) for name in share)


DEEP = replace(SMALL, layers=5, ends_layers=2)


def begins(math: StageMath, tokens: torch.Tensor, dy: torch.Tensor) -> tuple[bytes, Share]:
    """Return the output of the ends for `tokens`, and the share of gradients that `dy` gives. The
    targets of two tokens are missing: a document ends there."""
    targets = tokens.clone()
    targets[0, 5] = targets[1, 2] = NO_TARGET
    work = VisitBuffers(float("inf"), tuple(dy.shape), batch=lambda: (tokens, targets))
    math.embed(work)
    work.gradient = read(dy)
    math.embed_backward(work)
    return bytes(work.output or b""), work.share or {}


def test_the_ends_make_the_same_gradients_of_their_layers() -> None:
    tokens = torch.randint(0, 259, (4, 16))
    dy = torch.randn(4, 16, 32)
    found = {}
    for mode in RECOMPUTE:
        found[mode] = begins(StageMath(build(DEEP, 1, 0), "fp32", recompute=mode), tokens, dy)
    output, whole = found["off"]
    assert {name.split(".")[2] for name in whole if ".layers." in name} == {"0", "1"}
    for mode in ("layers", "stage"):
        assert found[mode][0] == output
        assert found[mode][1].keys() == whole.keys()
        assert all(torch.equal(found[mode][1][name], whole[name]) for name in whole)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("most", [1, 3])
def test_ends_that_run_out_of_memory_take_smaller_slices(where: str, most: int) -> None:
    tokens = torch.randint(0, 259, (4, 16))
    dy = torch.randn(4, 16, 32)
    whole = begins(StageMath(build(DEEP, 1, 0), "fp32"), tokens, dy)
    scarce = Scarce(where, most, build(DEEP, 1, 0))
    output, share = begins(scarce, tokens, dy)
    sent, wanted = (torch.frombuffer(bytearray(o), dtype=torch.float32) for o in (output, whole[0]))
    torch.testing.assert_close(sent, wanted, atol=1e-5, rtol=0)
    assert close(share, whole[1])
    assert scarce.recompute == "stage"
    assert 0 < scarce.slice <= most


class Scarce(StageMath):
    """Device on which the passes named `where` fail for more than `most` sequences at once."""

    def __init__(self, where: str, most: int, module: torch.nn.Module, **more: Any) -> None:
        super().__init__(module, "fp32", **more)
        self.where = where
        self.most = most
        self.failed = 0

    def _refuse(self, where: str, sequences: int) -> None:
        if where == self.where and sequences > self.most:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def _module(self, x: torch.Tensor, document_ends: tuple[int, ...]) -> torch.Tensor:
        self._refuse("forward", len(x))
        return super()._module(x, document_ends)

    def _grad(self, output: torch.Tensor, inputs: Any, gradient: Any) -> Any:
        self._refuse("backward", len(output) if output.dim() else len(inputs[0]))
        return super()._grad(output, inputs, gradient)


def close(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_a_block_that_runs_out_of_memory_takes_smaller_slices(
    where: str, most: int, mode: str
) -> None:
    x = torch.randn(7, 16, 32)
    dy = torch.randn(7, 16, 32)
    whole = visit(StageMath(build(SMALL, 1, 1), "fp32"), x, dy)
    scarce = Scarce(where, most, build(SMALL, 1, 1), recompute=mode)
    for _ in range(2):
        found = visit(scarce, x, dy)
        for got, want in zip(found[:2], whole[:2], strict=True):
            a, b = (torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in (got, want))
            assert torch.allclose(a, b, atol=1e-5)
        assert close(found[2], whole[2])
    assert (scarce.slice, scarce.recompute) == ({1: 1, 2: 1, 3: 3}[most], "stage")
    assert scarce.failed == {1: 2, 2: 2, 3: 1}[most], "once smaller, it stays so"


@pytest.mark.parametrize("most", [1, 2])
def test_the_loss_that_runs_out_of_memory_takes_smaller_slices(most: int) -> None:
    h = torch.randn(4, 16, 32)
    tokens = torch.randint(0, 259, (4, 16))

    def loss(math: StageMath) -> VisitBuffers:
        work = VisitBuffers(float("inf"), (4, 16, 32), targets=tokens, input=read(h))
        math.loss(work)
        return work

    whole = loss(StageMath(build(SMALL, 1, 0), "fp32"))
    scarce = Scarce("backward", most, build(SMALL, 1, 0))
    found = loss(scarce)
    assert (found.tokens, found.loss_sum) == (64, pytest.approx(whole.loss_sum, rel=1e-6))
    assert close(found.share, whole.share)
    assert scarce.slice == most


@pytest.mark.parametrize("most", [1, 2])
def test_forward_only_work_takes_smaller_slices_too(most: int) -> None:
    x = torch.randn(4, 16, 32)
    scarce = Scarce("forward", most, build(SMALL, 1, 1))
    maths = (scarce, StageMath(build(SMALL, 1, 1), "fp32"))
    found, wanted = (
        torch.frombuffer(math.forward_only(read(x, (4, 40)), False)[0], dtype=torch.float32)
        for math in maths
    )
    assert torch.allclose(found, wanted, atol=1e-5)
    assert scarce.slice == most


@pytest.mark.parametrize("most", [1, 2])
def test_a_held_out_loss_takes_smaller_slices_too(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = torch.randn(4, 16, 32)
    tokens = torch.randint(0, 259, (4, 16))
    math = StageMath(build(SMALL, 1, 0), "fp32")
    whole = math.loss_only(read(h), tokens)
    loss = math.module.loss

    def scarce(h: torch.Tensor, targets: torch.Tensor) -> Any:
        if len(h) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss(h, targets)

    monkeypatch.setattr(math.module, "loss", scarce)
    assert math.loss_only(read(h), tokens) == (pytest.approx(whole[0], rel=1e-6), 64)
    assert math.slice == most


class FullOnce:
    """A call that runs out of memory the first time it is reached."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self._call(*args, **options)


STEPS = {
    "input": (TensorReader, "numbers"),
    "encoding": (visit_buffers, "begin_encoding"),
    "sketch": (Sketcher, "sketch"),
    "norm": (visit_buffers, "norm_of_share"),
    "looks": (torch, "stack"),
}
"""What a job computes beside the passes through its module."""


def sketched(stage: int) -> StageMath:
    math = StageMath(build(DEEP, 1, stage), "fp32")
    math.sketch_as("seed")
    return math


def all_jobs(job: str, run: Callable[[Callable[[], None]], None]) -> VisitBuffers:
    """A visit after ``job``, one of a block stage or of the ends, which ``run`` carries out."""
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(4, 16, 32, generator=dice)
    dy = torch.randn(4, 16, 32, generator=dice)
    tokens = torch.randint(0, 259, (4, 16), generator=dice)
    if job in ("forward", "backward"):
        math = sketched(1)
        work = arrived(x)
        jobs = {"forward": math.forward, "backward": math.backward}
    elif job == "loss":
        math = sketched(0)
        work = VisitBuffers(float("inf"), (4, 16, 32), targets=tokens, input=read(x))
        jobs = {"loss": math.loss}
    else:
        math = sketched(0)
        work = VisitBuffers(float("inf"), (4, 16, 32), batch=lambda: (tokens, tokens))
        jobs = {"embed": math.embed, "embed_backward": math.embed_backward}
    for name, compute in jobs.items():
        if name == job:
            run(partial(compute, work))
            break
        compute(work)
        work.gradient = read(dy)
    assert (math.recompute, math.slice) in (("off", 0), ("stage", 2))
    return work


def with_call(
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    call: FullOnce,
    compute: Callable[[], None],
) -> None:
    """Compute with ``call`` in place of ``name``."""
    with monkeypatch.context() as patched:
        # a function, to be bound like the method that it replaces
        patched.setattr(where, name, lambda *args, **options: call(*args, **options))
        compute()


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        ("forward", "input encoding sketch looks"),
        ("backward", "input encoding sketch norm looks"),
        ("loss", "input encoding sketch norm looks"),
        ("embed", "encoding sketch looks"),
        ("embed_backward", "input sketch norm looks"),
    ],
)
def test_memory_that_runs_out_anywhere_in_a_job_loses_no_micro_batch(
    job: str, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = all_jobs(job, lambda compute: compute())
    for step in steps.split():
        where, name = STEPS[step]
        call = FullOnce(getattr(where, name))
        found = all_jobs(job, partial(with_call, monkeypatch, where, name, call))
        assert call.calls > 1, "tried again"
        assert found.tokens == whole.tokens
        assert found.loss_sum == pytest.approx(whole.loss_sum, rel=1e-6)
        assert found.sketches.keys() == whole.sketches.keys()
        assert close(found.share or {}, whole.share or {})
        for got, want in ((found.output, whole.output), (found.upstream, whole.upstream)):
            a, b = (
                torch.frombuffer(bytearray(raw or b"\0" * 4), dtype=torch.float32)
                for raw in (got, want)
            )
            assert torch.allclose(a, b, atol=1e-5)


def test_a_backward_that_texts_make_room_for_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(SHAPE)
    dy = torch.randn(SHAPE)
    whole = visit(StageMath(build(SMALL, 1, 1), "fp32"), x, dy)
    math = StageMath(build(SMALL, 1, 1), "fp32")
    work = arrived(x)
    math.forward(work)
    cache = TextCache()
    (sent,) = math.extend_texts([TextStep(cache, 0, 4, input=read(x[:1, :4]))])
    assert not isinstance(sent, Exception)
    grad = math._grad
    full = FullOnce(lambda found: found)
    monkeypatch.setattr(math, "_grad", lambda *args: full(grad(*args)))
    upstream, share = returned(math, work, dy)
    assert (cache.length, math.slice) == (0, 0)
    assert upstream == whole[1]
    assert all(torch.equal(share[name], g) for name, g in whole[2].items())


def test_what_is_too_much_for_one_sequence_fails_as_before() -> None:
    scarce = Scarce("forward", 0, build(SMALL, 1, 1))
    with pytest.raises(torch.OutOfMemoryError):
        visit(scarce, torch.randn(SHAPE), torch.randn(SHAPE))
    assert scarce.slice == 1


def test_other_errors_shrink_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    math = StageMath(build(SMALL, 1, 1), "fp32")

    def broken(x: torch.Tensor, document_ends: object) -> torch.Tensor:
        raise RuntimeError("cuDNN error")

    monkeypatch.setattr(math, "_module", broken)
    with pytest.raises(RuntimeError, match="cuDNN"):
        visit(math, torch.randn(SHAPE), torch.randn(SHAPE))
    assert (math.slice, math.recompute) == (0, "off")


@pytest.mark.parametrize("name", ["muon", "adamw", "soap", "shampoo"])
def test_a_step_out_of_memory_takes_one_matrix_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {n: p.data for n, p in build(SMALL, 1, 1).named_parameters()}
    owners = [Owner(OptimSettings(name=name, warmup=0), 9) for _ in range(2)]
    steps: Any = owners[1]._steps
    step: Callable[..., Any] = steps.step

    def scarce(here: Any, gradients: Any, state: Any, epoch: int) -> Any:
        if len(gradients) > 1:
            raise MemoryError("too much")
        return step(here, gradients, state, epoch)

    monkeypatch.setattr(steps, "step", scarce)
    for epoch in range(2):
        gradients = {n: torch.randn_like(p) for n, p in parameters.items()}
        whole, singly = (o.step_parts(parameters, gradients, epoch) for o in owners)
        assert whole.keys() == singly.keys()
        assert all(torch.allclose(whole[n], singly[n], atol=1e-5) for n in whole)
        assert owners[0].commit(epoch) == owners[1].commit(epoch) == frozenset(parameters)
    assert (owners[0].singly, owners[1].singly) == (0, 2)


def test_nothing_is_loaded_to_compute_again() -> None:
    """A compiler that nobody uses would take 70 MiB in the first epoch."""
    program = """
import sys
import torch
from node.model.settings import ModelSettings
from node.model.stages import build
settings = ModelSettings(layers=2, d_model=32, d_ff=48, seq_len=16)
ends = build(settings, 1, 0)
blocks = build(settings, 1, 1)
ends.logits_at_once = 4 * settings.vocab
blocks.recompute = True
tokens = torch.randint(0, settings.vocab, (2, 16))
hidden = ends.embed(tokens).detach().requires_grad_()
loss, _ = ends.loss(hidden, tokens)
torch.autograd.grad(loss, [hidden])
assert "sympy" not in sys.modules
loss, _ = ends.loss(blocks(ends.embed(tokens)), tokens)
found = torch.autograd.grad(loss, [*ends.parameters(), *blocks.parameters()])
assert all(gradient.abs().sum() > 0 for gradient in found)
loaded = [name for name in sys.modules if name.startswith("torch._dynamo")]
sys.exit(f"loaded {loaded[:3]}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
