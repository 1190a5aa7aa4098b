"""Time the ways of multiplying on this machine's processor, for ``kernel_rule.py`` to decide by.

On one thread, in its processor time: while other programs run, a clock on the wall tells how busy
the machine is. Of each way the shortest time counts, and ways that are compared take turns. Large
matrices are worked one to a thread, and small ones as stacks that torch shares out, so one thread's
times hold for several.
"""

import threading
import time
from collections.abc import Callable

import torch

from node.model.device import Device, Format
from node.model.settings import ModelSettings
from node.model.stages import build
from node.optim.gram import SIMPLE, standard, symmetric
from node.optim.kernel_rule import KernelTrial, Times, following
from node.optim.scratch import reuse
from node.optim.workers import spread

GROUP_S = 0.25
"""Processor time for the trials that are compared with each other; all together take about two
seconds."""
HEAD = 64
"""Width of a head in the layers that are tried."""
LEAST_ROUNDS = 2
MOST_ROUNDS = 100


def measure(stop: threading.Event, clock: Callable[[], float] = time.thread_time) -> Times:
    """Times of all that a rule needs; of a part of it when ``stop`` is set meanwhile.

    ``clock``: seconds of processor time of the calling thread.
    """
    return spread([lambda: _measure(stop, clock)], 1)[0]


def _measure(stop: threading.Event, clock: Callable[[], float]) -> Times:
    times: dict[KernelTrial, float] = {}
    with torch.no_grad():
        while not stop.is_set() and (group := following(times)):
            times.update(_timed(group, stop, clock))
    return times


def _timed(
    group: list[KernelTrial], stop: threading.Event, clock: Callable[[], float]
) -> dict[KernelTrial, float]:
    """The shortest time of each; nothing when it was stopped."""
    acts = {trial: _act(trial) for trial in group}
    found: dict[KernelTrial, list[float]] = {trial: [] for trial in group}
    spent = 0.0
    for turn in range(MOST_ROUNDS + 1):
        if turn > LEAST_ROUNDS and spent >= GROUP_S:
            break
        for trial, act in acts.items():
            if stop.is_set():
                return {}
            began = clock()
            act()
            took = clock() - began
            if turn:  # in the first one a library makes its kernel
                found[trial].append(took)
                spent += took
    return {trial: min(times) for trial, times in found.items()}


def layer_pass(device: Device, width: int, tokens: int, kind: Format) -> Callable[[], None]:
    """Forward and backward of one layer on a device in a number format."""
    heads = max(1, width // HEAD)
    shape = ModelSettings(
        layers=1, d_model=width, heads=heads, kv_heads=heads, d_ff=3 * width, seq_len=tokens
    )
    layer = build(shape, 1, 1).to(device.device)
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))
    inputs = [x.to(device.device).requires_grad_(), *layer.parameters()]

    def act() -> None:
        with torch.enable_grad():
            with device.computing_in(kind):
                y = layer(inputs[0])
            torch.autograd.grad(y.sum(), inputs)
        device.synchronise()

    return act


def _act(trial: KernelTrial) -> Callable[[], None]:
    rows, cols, many, precision, form = trial
    if form == "layer":
        return layer_pass(Device(torch.device("cpu")), rows, cols, precision)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    x = (
        torch.randn(many, rows, cols, generator=torch.Generator().manual_seed(0))
        .div_((rows * cols) ** 0.5)
        .to(kind)
    )
    if many == 1:
        out = x.new_empty(rows, rows)
        panels = int(form == "panels")
        return lambda: symmetric(x[0], x[0].mT, out, panels)
    xs = [x] if form == "stack" else list(x.unbind())

    def act() -> None:
        with reuse():
            for one in xs:  # one step leaves such a matrix as it is
                standard(one, [SIMPLE])

    return act
