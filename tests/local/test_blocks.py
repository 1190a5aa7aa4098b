"""A block stage cut over two processes computes, trains and fails as one device does."""

import gc
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from node.core.errors import DeviceLost, ExitCode
from node.core.journey import Version
from node.pipeline.guard import NotFinite
from testbed.models.visits import arrived, read, returned, visit

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def floats(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.float32)


def trip(side: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take one micro-batch there and back, counted; returns the output and the input's gradient."""
    y, dx, share = visit(side.math, numbers(seed, 3, 16, 32), numbers(seed + 1, 3, 16, 32))
    side.gradients.offer([share], 3 * 16)
    side.gradients.drain()
    return floats(y), floats(dx)


def test_epochs_of_training_are_those_of_one_device(blocks):
    for epoch in range(3):
        for seed in (10 * epoch, 10 * epoch + 5):
            y, dx = trip(blocks.two, seed)
            y1, dx1 = trip(blocks.one, seed)
            torch.testing.assert_close(y, y1, **CLOSE)
            torch.testing.assert_close(dx, dx1, **CLOSE)
        blocks.step_alike(epoch, 2 * 3 * 16)


def test_documents_are_kept_apart_on_every_device(blocks):
    x = numbers(3, 3, 16, 32)
    dy = numbers(4, 3, 16, 32)
    ends = (4, 5, 15, 40)
    one, two = (visit(side.math, x, dy, ends) for side in (blocks.one, blocks.two))
    for a, b in zip(two[:2], one[:2], strict=True):
        torch.testing.assert_close(floats(a), floats(b), **CLOSE)
    assert visit(blocks.one.math, x, dy)[0] != one[0]


def test_going_back_puts_the_former_parameters_on_every_device(blocks):
    x = numbers(1, 3, 16, 32)
    before = blocks.two.math.forward_only(read(x), False)[0].tobytes()
    more = {n: p * 1.5 for n, p in blocks.two.state.parameters().items()}
    blocks.two.state.adopt(more, Version(50))
    assert blocks.two.math.forward_only(read(x), False)[0].tobytes() != before
    blocks.two.state.roll_back()
    assert blocks.two.math.forward_only(read(x), False)[0].tobytes() == before


def test_unnamed_shares_and_reset_epochs_count_nowhere(blocks):
    trip(blocks.two, 70)
    blocks.two.gradients.reset()
    visit(blocks.two.math, numbers(71, 3, 16, 32), numbers(72, 3, 16, 32))  # never offered
    trip(blocks.two, 73)
    taken, tokens = blocks.two.gradients.whole()
    sums = dict(taken)
    assert tokens == 48
    whole = sum(t.nbytes for t in sums.values())
    assert sum(t.nbytes for t in vars(taken)["_parts"].values()) <= 0.55 * whole
    trip(blocks.one, 73)
    for name, gradient in blocks.one.gradients.whole()[0].items():
        torch.testing.assert_close(sums[name], gradient, rtol=1e-2, atol=1e-2)
    blocks.one.gradients.reset()
    blocks.two.gradients.reset()
    trip(blocks.two, 73)
    again, _ = blocks.two.gradients.whole()
    assert all(torch.equal(again[n], sums[n]) for n in sums)
    assert all(torch.equal(blocks.two.gradients.whole()[0][n], sums[n]) for n in sums), (
        "may be taken again"
    )
    blocks.two.gradients.reset()
    assert blocks.two.gradients.whole() == ({}, 0)
    trip(blocks.two, 74)
    assert all(torch.equal(taken[n], sums[n]) for n in sums), "an attempt may still read them"
    blocks.two.gradients.reset()


def test_what_is_freed_here_is_forgotten_there(blocks, monkeypatch):
    said: list[dict[str, Any]] = []
    real = blocks.ranks._tell
    monkeypatch.setattr(
        blocks.ranks, "_tell", lambda process, words: (said.append(words), real(process, words))[1]
    )
    work = arrived(numbers(2, 3, 16, 32))
    blocks.two.math.forward(work)
    kept = said[-1]["keep"]
    assert kept > 0
    work.free_graph()
    gc.collect()
    blocks.two.math.forward_only(read(numbers(3, 3, 16, 32)), False)
    assert kept in said[-1]["forget"]
    assert said[-1]["keep"] == 0


def test_bad_numbers_break_a_micro_batch_and_not_the_devices(blocks, monkeypatch):
    math = blocks.two.math
    x = numbers(5, 3, 16, 32)
    dy = numbers(6, 3, 16, 32)
    with pytest.raises(NotFinite):
        math.forward(arrived(x * float("nan")))
    with pytest.raises(ValueError, match="hidden states"):
        math.forward_only(read(numbers(4, 3, 16, 8)), False)
    work = arrived(x)
    math.forward(work)
    with pytest.raises(NotFinite):
        returned(math, work, dy * float("inf"))
    upstream, _ = returned(math, work, dy)  # by a graph that is made again
    assert upstream == visit(math, x, dy)[1]
    real = blocks.local.program._local
    monkeypatch.setattr(
        blocks.local.program, "_local", lambda name, gradient: real(name, gradient) * float("inf")
    )
    with pytest.raises(NotFinite, match="parameter gradient"):
        visit(math, x, dy)
    monkeypatch.undo()
    blocks.two.gradients.reset()
    trip(blocks.two, 8)
    assert blocks.lost == []


def test_the_graph_of_a_device_is_measured(blocks):
    fresh = blocks.local.math(blocks.local.module, "fp32", None)
    fresh.forward(arrived(numbers(9, 3, 16, 32)))
    alone = blocks.one.math.graph_bytes[3, 16, 32]
    assert 0.3 * alone < fresh.graph_bytes[3, 16, 32] < alone


def test_a_dead_process_is_reported_once_and_fails_later_calls(blocks):
    """Last in this file: the devices are gone after it."""
    os.kill(blocks.ranks._processes[0].pid, signal.SIGKILL)
    with pytest.raises(DeviceLost, match="local device 1 ended with code -9") as fault:
        blocks.two.math.forward(arrived(numbers(5, 3, 16, 32)))
    assert fault.value.code is ExitCode.RESTART_WANTED
    assert fault.value.next_step
    with pytest.raises(DeviceLost):
        blocks.two.state.adopt(blocks.two.state.parameters(), Version(99))
    parameters = blocks.two.state.parameters()
    with pytest.raises(DeviceLost):
        blocks.two.owner.step_parts(parameters, dict(parameters), 99)
    assert blocks.lost == [fault.value]
    blocks.ranks.close()
    assert not blocks.ranks._folder.exists()


def test_a_process_that_cannot_begin_reports_why_in_one_line():
    words = {
        "rank": 1,
        "size": 2,
        "device": "cuda:7",
        "store": "",
        "model": {},
        "stages": 1,
        "stage": 0,
        "threads": 1,
        "onednn": False,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "node.local.worker"],
        input=json.dumps(words) + "\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert "cuda:7" in ran.stderr
