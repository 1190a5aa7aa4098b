"""The rule for Newton-Schulz and for the format of layers on this machine, for its processor or a
GPU: measured at the first start, read from a file at later ones.

The file holds times, not the rule made of them, under a name that encodes the processor with its
limits or the GPU, and torch's build. A file that is damaged or of another machine is measured anew
and written over.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from node.config import write_atomically
from node.core.home import user_dir
from node.core.memory import give_freed_back
from node.manifest import Manifest
from node.model.device import Device, Format
from node.model.precision import Precision
from node.model.shapes import parameter_shapes
from node.optim.kernel_rule import (
    GAIN,
    LAYER_TOKENS,
    MEASURED_FROM,
    ON_CPU,
    KernelRule,
    KernelTrial,
    Times,
    TrialMenu,
    following,
    layer_format,
    rule_from,
)
from node.optim.newton_schulz import follow, followed
from node.optim.parts import method_of
from node.optim.trials import HEAD, PROCESSOR, clock_of, layer_pass, measure, menu_of
from node.telemetry.events import Journal
from node.telemetry.resources import bf16_units

LOCK = "kernels.lock"
FORMAT = 4
MOST_BYTES = 1 << 16
"""Largest size of a file of times that is read; a whole one has 2 KiB."""
CARD_WIDTH = 1024
"""Largest width of the layer by which a GPU is measured."""
CARD_PASSES = 3
FIRST_TOKENS = 16
"""Tokens of the layer that is computed before the memory of the process is measured."""
FP16: Format = "fp16"
WAIT_S = 60.0
"""Seconds to wait for another process that is measuring. After that, this one measures too."""
TELLING = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU part",
    "Features",
)
"""Fields of /proc/cpuinfo that name the processor and the instructions it may use."""
LIMITS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
"""Environment that changes which instructions the libraries use."""


@dataclass(frozen=True)
class Tuned:
    """``rule`` is the rule in force in this process; ``seconds``: time of measuring it (on a
    processor its own), 0 when it was read. ``problem``: why the times could not be kept, or ""."""

    rule: KernelRule
    seconds: float
    problem: str = ""


def worth(manifest: Manifest, stage: int, device: torch.device) -> bool:
    """Return True for a peer of ``stage`` that a measured rule may make faster: by the matrices
    that it steps, or on a processor by the format of its layers."""
    if device.type == "cpu" and manifest.training.mixed_precision and bf16_units():
        return True
    ours = (
        math.prod(shape)
        for name, shape in parameter_shapes(manifest.model, manifest.pipeline.stages, stage).items()
        if method_of(name, shape, manifest.optimizer) == "muon"
    )
    return max(ours, default=0) >= MEASURED_FROM


def first_work(device: Device) -> None:
    """Do a small forward and backward on a processor. It loads the libraries' parts for both, so a
    later measurement of the process includes them."""
    formats: tuple[Format, ...] = ("fp32",)
    if bf16_units():
        formats = ("fp32", "bf16")
    for kind in formats:
        layer_pass(device, HEAD, FIRST_TOKENS, kind)()
    # A stage's backward begins with a gradient that it is given.
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(2 * x, x, torch.ones(1))


def precision_of(manifest: Manifest, device: Device) -> Precision:
    """The number format in which a stage of the run computes on a device. On a processor it follows
    the rule that was measured there, if the manifest allows it; a GPU without units for bf16 is
    measured now."""
    parameters = manifest.optimizer.parameters
    width = manifest.model.d_model
    if device.is_cuda:
        if device.has_bf16:
            kind = device.usual_format
        else:
            kind = card_format(device, width, parameters)
        return Precision(device, parameters, lambda: kind)
    if not manifest.training.mixed_precision:
        return Precision(device, parameters)
    return Precision(device, parameters, lambda: layer_format(width, followed()))


def card_format(device: Device, width: int, parameters: str) -> Format:
    """The fastest format of a GPU without units for bf16, by the time of a layer of about this
    width. fp32, or for bf16 ``parameters`` emulated bf16, unless fp16 is faster by
    :data:`~node.optim.kernel_rule.GAIN`. A format that the card refuses is not taken."""
    usual: Format = "fp32"
    if parameters == "bf16":
        usual = "bf16"
    side = max(HEAD, min(width, CARD_WIDTH) // HEAD * HEAD)
    seconds = {kind: _card_seconds(device, side, kind) for kind in (usual, FP16)}
    if GAIN * seconds[FP16] < seconds[usual]:
        return FP16
    return usual


def _card_seconds(device: Device, width: int, kind: Format) -> float:
    """Shortest time of a few passes after one that warms up; infinite if the card refuses."""
    found: list[float] = []
    try:
        act = layer_pass(device, width, LAYER_TOKENS, kind)
        for _ in range(CARD_PASSES + 1):
            began = time.perf_counter()
            act()
            found.append(time.perf_counter() - began)
    except RuntimeError:
        return math.inf
    return min(found[1:])


async def tune_meanwhile(journal: Journal, device: Device = PROCESSOR) -> None:
    """:func:`tune` beside all else: measuring takes seconds, on a busy machine minutes, and steps
    can be made before."""
    stop = threading.Event()
    try:
        found = await asyncio.get_running_loop().run_in_executor(None, tune, None, stop, device)
    finally:
        stop.set()
    how = "as measured before"
    if found.seconds:
        how = f"measured in {found.seconds:.1f} s"
    kind = "fp32"
    if found.rule.bf16_from:
        kind = f"bf16 from {found.rule.bf16_from} numbers on"
    journal.emit(
        "optim", "kernels-tuned", f"matrices are stepped in {kind}, {how}", **asdict(found.rule)
    )
    if found.problem:
        journal.emit(
            "optim",
            "kernels-not-kept",
            f"{found.problem}; the next start measures again",
            "warning",
        )


def tune(
    folder: Path | None = None,
    stop: threading.Event | None = None,
    device: Device = PROCESSOR,
    measured: Callable[[threading.Event, Device], Times] = measure,
) -> Tuned:
    """Make this process follow the rule for a device of the machine, measuring it when ``folder``
    (the user's cache) has no good file of it.

    Setting ``stop`` ends it soon, with nothing kept. Never fails for a file: times that cannot be
    read are measured, and a failure to write them is reported in the answer.
    """
    stop = stop or threading.Event()
    if folder is None:
        folder = user_dir("cache")
    menu = menu_of(device)
    clock = clock_of(device)
    machine = this_machine(device)
    path = folder / f"kernels-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
    times = read_times(path, machine, menu)
    seconds = 0.0
    problem = ""
    if times is None:
        with _alone(folder, stop):
            times = read_times(path, machine, menu)  # of the process that was waited for
            if times is None:
                began = clock()
                times = measured(stop, device)
                seconds = clock() - began
                # Layers of many widths were built and are gone: 100 MiB that nobody takes again.
                torch.cuda.empty_cache()
                give_freed_back()
                if not following(times, menu):
                    problem = write_times(path, machine, times)
    rule = rule_from(times, menu)
    follow(rule, device.device.type)
    return Tuned(rule, seconds, problem)


def read_times(path: Path, machine: str, menu: TrialMenu = ON_CPU) -> Times | None:
    """Times of a menu that :func:`write_times` wrote; None for anything else, times of another
    machine and incomplete ones included."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        found = json.loads(raw) if len(raw) <= MOST_BYTES else {}
        content = _content(machine, found["times"])
        if found != {**content, "digest": _digest(content)}:
            return None
        times = {KernelTrial(*trial): seconds for *trial, seconds in found["times"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    sound = all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in times.values())
    if sound and not following(times, menu):
        return times
    return None


def write_times(path: Path, machine: str, times: Times) -> str:
    """Whole or not at all: why they could not be written; "" when they were."""
    content = _content(machine, [[*trial, seconds] for trial, seconds in times.items()])
    try:
        write_atomically(path, json.dumps({**content, "digest": _digest(content)}).encode())
    except OSError as e:
        return f"cannot write {path}: {e.strerror or e}"
    return ""


def this_machine(device: Device = PROCESSOR) -> str:
    """Key of the times: the processor and the limits put on it, or the GPU; and the build of torch
    and its libraries."""
    if device.is_cuda:
        card = torch.cuda.get_device_properties(device.device)
        said = f"{card.name}, {card.major}.{card.minor}, {card.multi_processor_count} processors"
        return "\n".join((said, torch.__config__.show()))
    processor = _cpuinfo() or f"{platform.machine()} {platform.processor()}"
    limits = ", ".join(f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name))
    return "\n".join((processor, limits, torch.__config__.show()))


def _cpuinfo() -> str:
    """Description of the first core by /proc/cpuinfo; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except (OSError, ValueError):
        return ""
    fields = (
        (name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)
    )
    return "\n".join(f"{name}: {value}" for name, value in fields if name in TELLING)


def _content(machine: str, times: object) -> dict[str, object]:
    return {"format": FORMAT, "machine": machine, "times": times}


def _digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _alone(folder: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the lock that lets one process measure at a time; go on without it where the lock cannot
    be had."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(folder / LOCK, "ab"))
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline and not stop.is_set():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    stop.wait(0.1)
        yield
