"""From the settings of a peer to a stage on several devices: which devices, how many threads each,
and the processes of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from node.core.errors import DeviceLost
from node.local.program import Program
from node.local.ranks import Ranks
from node.local.stage import LocalStage
from node.model.device import Device
from node.model.settings import ModelSettings


def device_names(name: str, count: int) -> list[str]:
    """``count`` devices from the one called ``name`` on: GPUs in the order of their numbers, or so
    many times the CPU.

    "auto" takes GPUs where there are any. Raises UsageFault for another name, OutOfResources for
    more than this machine has.
    """
    wanted = name.strip().lower()
    if wanted == "cpu" or (
        wanted == "auto" and not (torch.cuda.is_available() and torch.cuda.device_count())
    ):
        return ["cpu"] * count
    _, _, number = (
        "cuda:0" if wanted in ("auto", "cuda") else str(Device.pick(wanted).device)
    ).partition(":")
    names = [f"cuda:{int(number) + i}" for i in range(count)]
    Device.pick(names[-1])
    return names


def threads_each(threads: int, devices: Sequence[str]) -> int:
    """CPU threads of each device's process: as many as were asked for, else the cores shared
    between them."""
    return threads or max(1, len(os.sched_getaffinity(0)) // len(devices))


async def open_stage(
    devices: Sequence[str],
    device: Device,
    threads: int,
    module: nn.Module,
    model: ModelSettings,
    stages: int,
    stage: int,
    folder: Path,
    on_error: Callable[[str, BaseException], None],
) -> LocalStage:
    """Start the processes and cut ``stage`` over them; ``module`` is the whole of it, ``device``
    this process's, the first.

    ``on_error`` is called on this loop when a device is gone. Raises DeviceLost when one does not
    come up. Call it on the main thread: a process ends with the thread that started it.
    """
    loop = asyncio.get_running_loop()

    def lost(fault: DeviceLost) -> None:
        loop.call_soon_threadsafe(on_error, "local devices", fault)

    ranks = Ranks(folder, lost)
    try:
        ranks.start(devices, model, stages, stage, threads)
        here = await loop.run_in_executor(None, ranks.meet, device)
        program = await loop.run_in_executor(None, Program, here, model, stages, stage)
        return LocalStage(ranks, program, module, model)
    except BaseException:
        await asyncio.to_thread(ranks.close)
        raise
