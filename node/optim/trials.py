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

from node.optim.gram import SIMPLE, standard, symmetric
from node.optim.kernel_rule import KernelTrial, Times, following
from node.optim.scratch import reuse
from node.optim.workers import spread

GROUP_S = 0.25
"""Processor time for the trials that are compared with each other; all together take about two
seconds."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 100


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


def _act(trial: KernelTrial) -> Callable[[], None]:
    rows, cols, many, precision, form = trial
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    x = (
        torch.randn(many, rows, cols, generator=torch.Generator().manual_seed(0))
        .div_((rows * cols) ** 0.5)
        .to(kind)
    )
    if many == 1:
        out, panels = x.new_empty(rows, rows), int(form == "panels")
        return lambda: symmetric(x[0], x[0].mT, out, panels)
    xs = [x] if form == "stack" else list(x.unbind())

    def act() -> None:
        with reuse():
            for one in xs:  # which one step leaves as it is
                standard(one, [SIMPLE])

    return act
