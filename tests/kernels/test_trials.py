"""Trials of kernels on a stage, on the CPU: compiled by a backend that needs no compiler."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from node.kernels import trials
from node.kernels.trials import MicroBatch, choose_kernels
from node.manifest import Manifest, amended
from node.model.device import Device, Format
from node.model.kernels import EAGER, Kernels, allow_compiling, compiled, use
from node.model.precision import Precision
from node.model.stages import Blocks, Ends, build
from node.pipeline.visit_buffers import StageMath
from testbed.models.visits import visit as of_device

CPU = Device(torch.device("cpu"))
SHAPE = {
    "model.layers": 3,
    "model.d_model": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.d_ff": 64,
    "model.seq_len": 16,
    "pipeline.stages": 1,
    "pipeline.micro_batch": 2,
}


def run_of(**changes: Any) -> Manifest:
    return amended(
        Manifest.default_demo(),
        SHAPE | {key.replace("__", "."): value for key, value in changes.items()},
    )


def stage_of(manifest: Manifest, stage: int) -> Ends | Blocks:
    torch.set_num_threads(1)
    return build(manifest.model, manifest.pipeline.stages, stage)


async def chosen(
    module: Ends | Blocks,
    manifest: Manifest,
    make: Callable[[], Kernels],
    home: Path | None = None,
    **more: Any,
) -> Any:
    """The decision of an operator who asks for compiled layers, which ``make`` makes."""
    return await choose_kernels(
        "compile",
        module,
        CPU,
        Precision(CPU, manifest.optimizer.parameters),
        MicroBatch(manifest.pipeline.micro_batch, manifest.model.seq_len, False),
        home or Path(os.devnull),
        {"compile": make},
        **more,
    )


def visit(module: Ends | Blocks, x: Tensor) -> list[Tensor]:
    """Output and gradients of a visit."""
    x = x.detach().requires_grad_()
    y = module.through(x)
    if isinstance(module, Ends):
        y, _ = module.loss(y, torch.zeros(x.shape[:2], dtype=torch.long))
    trained = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(y.sum(), [x, *trained], allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


@pytest.fixture
def compiling() -> Iterator[None]:
    yield
    torch.compiler.reset()
    allow_compiling()


@pytest.mark.parametrize("stage", [0, 1])
async def test_compiled_layers_give_eagers_numbers_and_are_compiled_once(
    stage: int, compiling: None
) -> None:
    """One graph serves all layers of the stage, and is made by the trial, not by the stage. What
    another shape needs is computed eagerly."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(inputs)
        return graph.forward

    manifest = run_of()
    module = stage_of(manifest, stage)
    x = torch.randn(2, 16, 32)
    truth = visit(module, x)
    found = await chosen(module, manifest, lambda: compiled(backend))
    assert (found.name, found.problems, len(graphs)) == ("compile", (), 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(visit(module, x), truth)
    shorter = visit(module, x[:, :8])
    with torch.no_grad():
        module.through(x)
    assert len(graphs) == 1
    use(module, EAGER)
    torch.testing.assert_close(shorter, visit(module, x[:, :8]))


@pytest.mark.parametrize(("kind", "recompute"), [("fp32", "off"), ("bf16", "layers")])
async def test_visits_of_the_device_use_what_the_trial_compiled(
    kind: Format, recompute: str, compiling: None, tmp_path: Path
) -> None:
    """In their number format, with activations that are computed again, and when a micro-batch's
    memory is measured."""
    manifest = run_of()
    module = stage_of(manifest, 1)
    precision = Precision(CPU, "fp32", lambda: kind)
    math = StageMath(module, "fp32", precision.autocast, recompute, precision.gradients)
    found = await choose_kernels(
        "compile",
        module,
        CPU,
        precision,
        MicroBatch(2, 16, False),
        tmp_path,
        {"compile": lambda: compiled(lambda graph, inputs: graph.forward)},
    )
    assert found.name == "compile"
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            of_device(math, torch.randn(2, 16, 32), torch.randn(2, 16, 32))


async def test_documents_that_are_apart_are_not_compiled(compiling: None) -> None:
    module = stage_of(run_of(), 1)
    use(module, compiled(lambda graph, inputs: pytest.fail("compiled")))  # pyright: ignore
    assert isinstance(module, Blocks)
    assert module(torch.randn(1, 16, 32), (4,)).shape == (1, 16, 32)


def fused(**changes: Any) -> Callable[[], Kernels]:
    """Kernels beside eager's that change operations."""
    return lambda: replace(EAGER, name="compile", **changes)


async def test_the_stage_computes_by_kernels_that_agree() -> None:
    manifest = run_of()
    module = stage_of(manifest, 1)
    calls: list[int] = []

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        calls.append(1)
        return EAGER.swiglu(gate, up)

    found = await chosen(module, manifest, fused(swiglu=swiglu))
    assert found.name == "compile"
    assert "times as fast as eager" in found.said
    calls.clear()
    visit(module, torch.randn(1, 16, 32))
    assert len(calls) == manifest.model.layers


WRONG: dict[str, dict[str, Callable[..., Any]]] = {
    "norm": {"rms_norm": lambda x, weight, eps: 1.001 * EAGER.rms_norm(x, weight, eps)},
    "rotation": {"rotate": lambda q, k, cos, sin: EAGER.rotate(q, k, cos, -sin)},
    "product": {"swiglu": lambda gate, up: EAGER.swiglu(up, gate)},
    "not finite": {"swiglu": lambda gate, up: EAGER.swiglu(gate, up) / 0},
    "gradient": {"swiglu": lambda gate, up: EAGER.swiglu(gate, up.detach())},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_kernels_that_compute_something_else_are_not_taken(wrong: str) -> None:
    manifest = run_of()
    module = stage_of(manifest, 1)
    x = torch.randn(2, 16, 32)
    truth = visit(module, x)
    found = await chosen(module, manifest, fused(**WRONG[wrong]))
    assert (found.name, len(found.problems)) == ("eager", 1)
    assert all(torch.equal(a, b) for a, b in zip(visit(module, x), truth, strict=True))


async def test_a_wrong_loss_is_not_taken_at_the_ends() -> None:
    manifest = run_of()
    module = stage_of(manifest, 0)
    wrong = fused(cross_entropy=lambda logits, targets: 1.01 * EAGER.cross_entropy(logits, targets))
    assert (await chosen(module, manifest, wrong)).name == "eager"


async def test_a_compiler_that_fails_means_eager_and_is_said_once() -> None:
    def broken(h: Tensor) -> Tensor:
        raise RuntimeError("no compiler\nand much more")

    manifest = run_of()
    module = stage_of(manifest, 1)
    found = await chosen(module, manifest, fused(swiglu=lambda gate, up: broken(gate)))
    assert found.name == "eager"
    assert found.problems == ("compile: RuntimeError: no compiler",)


async def test_a_compiler_that_hangs_means_eager_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that hangs neither touches the stage nor begins anything when it goes on."""
    go_on = threading.Event()
    passes: list[str] = []

    def hanging(gate: Tensor, up: Tensor) -> Tensor:
        go_on.wait(60)
        passes.append("went on")
        return EAGER.swiglu(gate, up)

    ended = threading.Event()
    run = trials.KernelTrials.run

    def watched(self: trials.KernelTrials, *args: Any) -> None:
        try:
            run(self, *args)
        finally:
            ended.set()

    monkeypatch.setattr(trials.KernelTrials, "run", watched)
    manifest = run_of(model__layers=1)
    module = stage_of(manifest, 1)
    found = await chosen(module, manifest, fused(swiglu=hanging), limit_s=0.3)
    assert found.name == "eager"
    (problem,) = found.problems
    assert problem.endswith("not done after 0 s")
    visit(module, torch.randn(1, 16, 32))
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 60)
    assert len(passes) <= 1


async def test_memory_that_runs_out_in_the_trial_means_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trials, "_twin", full)
    manifest = run_of()
    found = await chosen(stage_of(manifest, 1), manifest, fused())
    assert found.problems == ("eager: OutOfMemoryError: CUDA out of memory",)


async def test_the_thread_of_a_trial_has_the_device_as_its_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    monkeypatch.setattr(Device, "make_current", lambda self: made.append(threading.get_ident()))
    seen: list[int] = []

    def make() -> Kernels:
        seen.append(threading.get_ident())
        return fused()()

    manifest = run_of()
    await chosen(stage_of(manifest, 1), manifest, make)
    assert made == seen != [threading.get_ident()]


async def test_a_trial_never_pauses_for_other_work_of_the_device() -> None:
    manifest = run_of()
    module = stage_of(manifest, 1)
    module.pause = lambda: pytest.fail("ran work of the device thread")
    assert (await chosen(module, manifest, fused())).name == "compile"


async def test_adapters_are_tried_with_the_frozen_model() -> None:
    manifest = run_of(model__adapter=2)
    assert (await chosen(stage_of(manifest, 1), manifest, fused())).name == "compile"


async def test_auto_tries_nothing_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_within", lambda *args: pytest.fail("tried"))
    manifest = run_of()
    module = stage_of(manifest, 1)
    precision = Precision(CPU, "fp32")
    found = await choose_kernels(
        "auto", module, CPU, precision, MicroBatch(2, 16, False), Path(os.devnull)
    )
    assert (found.name, found.said) == ("eager", "")


async def test_kernels_that_ended_the_process_are_not_tried_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file stays until the operator removes it, or torch is another one."""
    manifest = run_of()
    module = stage_of(manifest, 1)
    mark = tmp_path / "kernels-tried-compile"
    held: list[str] = []

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        held.append(mark.read_text(encoding="utf-8"))
        return EAGER.swiglu(gate, up)

    assert (await chosen(module, manifest, fused(swiglu=swiglu), tmp_path)).name == "compile"
    assert held[0] == torch.__version__
    assert not mark.exists()
    mark.write_text(held[0], encoding="utf-8")
    use(module, EAGER)
    for _ in range(2):
        found = await chosen(module, manifest, fused(), tmp_path)
        assert found.name == "eager"
        assert "remove" in found.said
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert (await chosen(module, manifest, fused(), tmp_path)).name == "compile"


async def test_kernels_that_lose_the_device_are_not_tried_by_the_next_process(
    tmp_path: Path,
) -> None:
    def lost(gate: Tensor, up: Tensor) -> Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    manifest = run_of()
    found = await chosen(stage_of(manifest, 1), manifest, fused(swiglu=lost), tmp_path)
    assert found.name == "eager"
    again = await chosen(stage_of(manifest, 1), manifest, fused(), tmp_path)
    assert "ended in its last trial" in again.said


def test_a_trial_that_is_stopped_as_it_begins_is_tried_again(tmp_path: Path) -> None:
    """Its thread begins it just when nobody waits any more."""

    class Late(trials.Unended):
        def begin(self, kind: Any) -> None:
            running.stop()
            self.end(kind)
            super().begin(kind)

    manifest = run_of()
    module = stage_of(manifest, 1)
    unended = Late(tmp_path)
    running = trials.KernelTrials(CPU, {"compile": fused()}, unended)
    make = partial(trials.Passes, module, Precision(CPU, "fp32"), MicroBatch(2, 16, False))
    running.run(["compile"], make)
    assert running.times == {}
    assert not unended.known("compile")


async def test_a_trial_is_known_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(trials, "sync", flushed.append)
    await chosen(stage_of(run_of(), 1), run_of(), fused(), tmp_path)
    assert flushed == [tmp_path / "kernels-tried-compile", tmp_path]


async def test_a_stage_with_kept_copies_of_its_weights_is_compiled(compiling: None) -> None:
    manifest = run_of()
    module = stage_of(manifest, 1)
    copies = module.keep_copies()
    x = torch.randn(2, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        truth = visit(module, x)
    assert [*copies], "a copy of each weight"
    found = await chosen(module, manifest, lambda: compiled("aot_eager"))
    assert (found.name, found.problems) == ("compile", ())
    allow_compiling()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(visit(module, x), truth, rtol=0.05, atol=0.05)
