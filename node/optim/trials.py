"""Time the ways of multiplying on this machine's processor, or on a GPU of it, for
``kernel_rule.py`` to decide by.

On a processor in one thread, in its processor time: while other programs run, a clock on the wall
tells how busy the machine is. On a GPU by the wall, to the end of the work given to it. Of each way
the shortest time counts, and ways that are compared take turns. Large matrices are worked one to a
thread, and small ones as stacks that torch shares out, so one thread's times hold for several.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from node.model.device import Device, Format, device_lost, free_cached, out_of_memory
from node.model.settings import ModelSettings
from node.model.stages import build
from node.optim.gram import SIMPLE, gram, standard, symmetric
from node.optim.kernel_rule import (
    NEVER_S,
    ON_CPU,
    ON_CUDA,
    KernelTrial,
    Times,
    TrialMenu,
    following,
)
from node.optim.scratch import reuse
from node.optim.workers import spread

GROUP_S = 0.25
"""Time for the trials that are compared with each other; all together take about two seconds."""
PROCESSOR = Device(torch.device("cpu"))
HEAD = 64
"""Width of a head in the layers that are tried."""
STEPS = 5
"""Steps of a whole iteration."""
LEAST_ROUNDS = 2
MOST_ROUNDS = 100


def menu_of(device: Device) -> TrialMenu:
    """The trials for a kind of device."""
    return ON_CUDA if device.is_cuda else ON_CPU


def clock_of(device: Device) -> Callable[[], float]:
    """Seconds by which a device is timed: on a processor those of the calling thread."""
    return time.perf_counter if device.is_cuda else time.thread_time


def measure(
    stop: threading.Event,
    device: Device = PROCESSOR,
    clock: Callable[[], float] | None = None,
    menu: TrialMenu | None = None,
) -> Times:
    """Times of all that a rule needs; of a part of it when ``stop`` is set meanwhile, or when the
    device has no memory for a trial. ``clock``, ``menu``: instead of those of the device."""
    trials = _Trials(device, stop, clock or clock_of(device), menu or menu_of(device))
    return spread([trials.measure], 1)[0]


@dataclass(frozen=True)
class _Trials:
    """The trials of a menu on a device."""

    device: Device
    stop: threading.Event
    clock: Callable[[], float]
    menu: TrialMenu

    def measure(self) -> Times:
        """As :func:`measure`."""
        times: dict[KernelTrial, float] = {}
        with torch.no_grad():
            while not self.stop.is_set() and (group := following(times, self.menu)):
                found = self._timed(group)
                if not found:
                    break
                times.update(found)
        return times

    def _timed(self, group: list[KernelTrial]) -> dict[KernelTrial, float]:
        """The shortest time of each; nothing when it was stopped, or memory ran out."""
        try:
            return self._in_turns({trial: _act(trial, self.device) for trial in group})
        except RuntimeError as e:
            if not out_of_memory(e):
                raise
        free_cached()  # not in the handler: the exception keeps the tensors alive
        return {}

    def _in_turns(self, acts: Mapping[KernelTrial, Callable[[], None]]) -> dict[KernelTrial, float]:
        """The shortest time of each; nothing when it was stopped."""
        found: dict[KernelTrial, list[float]] = {trial: [] for trial in acts}
        spent = 0.0
        for turn in range(MOST_ROUNDS + 1):
            if turn > LEAST_ROUNDS and spent >= GROUP_S:
                break
            for trial, act in acts.items():
                if self.stop.is_set():
                    return {}
                took = self._seconds(act)
                if turn:  # in the first one a library makes its kernel
                    found[trial].append(took)
                    spent += took
        return {trial: min(times) for trial, times in found.items()}

    def _seconds(self, act: Callable[[], None]) -> float:
        """Seconds until the work is done; :data:`NEVER_S` for a format that the device refuses."""
        began = self.clock()
        try:
            act()
        except RuntimeError as e:
            if out_of_memory(e) or device_lost(e):
                raise
            return NEVER_S
        self.device.synchronise()
        return self.clock() - began


def layer_pass(device: Device, width: int, tokens: int, kind: Format) -> Callable[[], None]:
    """Forward and backward of one layer on a device in a number format."""
    heads = max(1, width // HEAD)
    shape = ModelSettings(
        layers=1, d_model=width, heads=heads, kv_heads=heads, d_ff=3 * width, seq_len=tokens
    )
    layer = build(shape, 1, 1).to(device.device)
    layer.keep_copies()  # as a stage does: micro-batches share one cast of the weights
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))
    inputs = [x.to(device.device).requires_grad_(), *layer.parameters()]

    def act() -> None:
        with torch.enable_grad():
            with device.computing_in(kind):
                y = layer(inputs[0])
            torch.autograd.grad(y.sum(), inputs)
        device.synchronise()

    return act


def _act(trial: KernelTrial, device: Device) -> Callable[[], None]:
    """A trial's work, which is given to the device and not waited for."""
    rows, cols, many, precision, form = trial
    if form == "layer":
        return layer_pass(device, rows, cols, precision)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    x = (
        torch.randn(many, rows, cols, generator=torch.Generator().manual_seed(0))
        .div_((rows * cols) ** 0.5)
        .to(device.device, kind)
    )
    if form in ("standard", "gram"):
        iterate = gram if form == "gram" else standard

        def orthogonalise() -> None:
            with reuse():
                iterate(x[0].clone(), [SIMPLE] * STEPS)

        return orthogonalise
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
