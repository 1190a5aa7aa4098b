"""The device that computes: its number format, its threads, its memory."""

import contextlib
import ctypes
import gc
import os
import re
import time
from dataclasses import dataclass
from statistics import median
from typing import Literal

import psutil
import torch
from torch import Tensor

from node.core.errors import OutOfResources, UsageFault
from node.core.memory import give_freed_back, most_resident
from node.core.numbers import several
from node.model.products import follow, prefer_faster
from node.telemetry import resources

Format = Literal["fp32", "bf16", "fp16"]
"""A number format of forward and backward."""
CONTEXT = 768 << 20
"""Bytes of a GPU that each process takes beside its tensors: the driver's context and the kernels
that are loaded. On an H100 with CUDA 13.0 they are 681 MiB (part a of ``benchmarks.gpu``)."""
PRODUCT = 512
"""Rows and columns of the matrix product by which a device's speed is first measured."""
PRODUCTS = 3
"""Products that are measured, after one that warms up."""
_entered = set[int]()
"""Numbers of the GPUs on which this process has a context. It stays there until the process
ends."""


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error of torch says that memory ran out, on a GPU or on the CPU."""
    # cuBLAS and cuDNN, which take memory of their own, say it by a status. A cuBLAS that has no
    # room for its handle says that it is not initialised; the driver says it in its own words.
    words = (
        "can't allocate memory",
        "STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_NOT_INITIALIZED",
        "CUDA error: out of memory",
    )
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )


def device_lost(error: BaseException) -> bool:
    """Return True if an error of torch says that a GPU is of no more use to this process: an
    illegal access, a failed assertion, a card that is gone. Every later call would fail too."""
    return isinstance(error, torch.AcceleratorError) and not out_of_memory(error)


def gpus() -> int:
    """How many GPUs torch can use here."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


class _Memory(ctypes.Structure):
    """``nvmlMemory_t`` of the driver's library, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def driver_memory(index: int) -> tuple[int, int] | None:
    """(free, total) bytes of a GPU by the driver's library, which needs no context on it; None
    where there is no such library, or it does not know the card."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    # The library numbers all cards of the machine, in an order of its own.
    name = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
    card = ctypes.c_void_p()
    memory = _Memory()
    failed = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(card))
        or nvml.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
    )
    if failed:
        return None
    return memory.free, memory.total


def _memory(index: int) -> tuple[int, int]:
    """(free, total) bytes of a GPU. torch makes a context to tell them, so the driver is asked
    where this process has none."""
    told = None
    if index not in _entered:
        told = driver_memory(index)
    if told is None:
        told = torch.cuda.mem_get_info(index)
        _entered.add(index)
    return told


def free_on(index: int) -> int:
    """Bytes of a GPU that a process could take, its context among them; 0 for a card that does not
    answer."""
    try:
        free, _ = _memory(index)
    except RuntimeError:
        return 0
    if index in _entered:
        free += CONTEXT
    return free


def has_kernels(index: int) -> bool:
    """Return True if this torch has kernels for a GPU: machine code of its generation and no later
    version, or code of any earlier one for the driver's compiler."""
    kinds = [re.match(r"(sm|compute)_(\d+)(\d)", name) for name in torch.cuda.get_arch_list()]
    made = [(kind[1], int(kind[2]), int(kind[3])) for kind in kinds if kind]
    if not made:
        return True  # a build that names its cards in another way
    card = torch.cuda.get_device_capability(index)
    return any(
        (major, minor) <= card and (form == "compute" or major == card[0])
        for form, major, minor in made
    )


def usable_gpus() -> list[int]:
    """Numbers of the GPUs for which this torch has kernels, the one with the most free memory
    first. No context is made where the driver tells the memory."""
    found = [index for index in range(gpus()) if has_kernels(index)]
    if len(found) > 1:
        found.sort(key=free_on, reverse=True)
    return found


def free_cached() -> None:
    """Give back unused memory: reference cycles, and torch's cache of a GPU's memory."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU is used


def give_all_back() -> None:
    """Give back what a stage leaves behind in this process: reference cycles, torch's cache of a
    GPU's memory and of page-locked memory, freed blocks of the C library. The context of a GPU
    stays until the process ends."""
    free_cached()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.accelerator.empty_host_cache()
    give_freed_back()


def brought(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; the copy is part of the device's computations, and nothing waits
    for it."""
    if device.type != "cuda" or host.is_cuda:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Device:
    """One torch device. A CPU and a GPU without units for bf16 compute in fp32, unless something
    else was measured to be faster; other GPUs, and all devices where parameters are bf16, in bf16
    under autocast, with fp32 logits."""

    device: torch.device

    @classmethod
    def pick(cls, name: str = "auto") -> "Device":
        """The device called ``name``: "auto" (the CUDA device with the most free memory, else the
        CPU), "cpu", "cuda", "cuda:N". Makes a context on a GPU, which takes time.

        Raises UsageFault for another name; OutOfResources for a device this machine does not have,
        for a GPU without kernels in this torch, and for one that gives no context.
        """
        wanted = name.strip().lower()
        if wanted == "cpu":
            return cls(torch.device("cpu"))
        usable: list[int] = []
        if wanted in ("auto", "cuda"):
            usable = usable_gpus()
        if wanted == "auto" and not usable:
            return cls(torch.device("cpu"))
        if not usable:
            usable = [gpu_number(name)]
        refused: list[str] = []
        for index in usable:
            why = refusal(index)
            if not why:
                return cls.numbered(index)
            refused.append(why)
        raise OutOfResources(
            "; ".join(refused),
            "choose another device, or device cpu; nvidia-smi lists the programs on a GPU",
        )

    @classmethod
    def numbered(cls, index: int) -> "Device":
        """A GPU by its number, on which no context is made."""
        return cls(torch.device("cuda", index))

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def context(self) -> int:
        """Bytes of the device that a process takes beside its tensors; 0 on the CPU."""
        return CONTEXT if self.is_cuda else 0

    def autocast(self, parameters: str = "fp32") -> contextlib.AbstractContextManager[object]:
        """The context of a forward in a number format that was not measured: :attr:`usual_format`,
        or bf16 for bf16 ``parameters``."""
        return self.computing_in("bf16" if parameters == "bf16" else self.usual_format)

    def computing_in(self, kind: Format) -> contextlib.AbstractContextManager[object]:
        """The context of a forward in a number format: autocast, nothing for fp32."""
        if kind == "fp32":
            return contextlib.nullcontext()
        dtype = torch.float16
        if kind == "bf16":
            dtype = torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype)

    @property
    def has_bf16(self) -> bool:
        """Return True for a GPU that has units for bf16, which NVIDIA's have from compute
        capability 8.0 on."""
        return self.is_cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)

    @property
    def older(self) -> bool:
        """Return True for a GPU before compute capability 8.0: it has no units for bf16, and torch
        no flash attention for it."""
        return self.is_cuda and not self.has_bf16

    @property
    def usual_format(self) -> Format:
        """The number format of forward and backward where nothing was measured."""
        return "bf16" if self.has_bf16 else "fp32"

    def describe(self) -> str:
        """One line for people, such as "cpu, 8 threads, 15.5 GiB (9.1 free)"."""
        free = self.memory_free()
        total = self.memory_limit()
        if self.is_cuda:
            what = f"{self.device} {torch.cuda.get_device_name(self.device)}"
        else:
            what = f"cpu, {several(torch.get_num_threads(), 'thread')}"
        return f"{what}, {total / 2**30:.1f} GiB ({free / 2**30:.1f} free)"

    def memory_used(self) -> int:
        """Bytes this process holds on the device: torch's reservation on CUDA, the resident set on
        the CPU."""
        if self.is_cuda:
            return torch.cuda.memory_reserved(self.device)
        return psutil.Process().memory_info().rss

    def memory_peak(self) -> int:
        """Most bytes that tensors took on a CUDA device, or that were resident on the CPU, since
        this process began; 0 where the system does not tell."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return most_resident(os.getpid())

    def memory_limit(self) -> int:
        """Bytes of the device, used or not; on the CPU no more than the lowest limit of a control
        group."""
        if self.is_cuda:
            return _memory(self.device.index)[1]
        return resources.memory_total()

    def memory_free(self) -> int:
        """Bytes that can still be taken."""
        if self.is_cuda:
            return _memory(self.device.index)[0]
        return resources.memory_free()

    def keep_within(self, limit: int) -> None:
        """Let tensors of this process take at most ``limit`` bytes of a CUDA device: beyond, torch
        gives back its cached memory, then raises OutOfMemoryError. Does nothing on the CPU."""
        if self.is_cuda:
            share = limit / self.memory_limit()
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)

    def tera_s(self) -> float:
        """Seconds that 10^12 operations of an fp32 product take here, by the middle one of a few;
        some 10 ms on a CPU."""
        a = torch.ones(PRODUCT, PRODUCT, device=self.device)
        seconds: list[float] = []
        for _ in range(PRODUCTS + 1):
            began = time.perf_counter()
            torch.mm(a, a)
            self.synchronise()
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:]) / (2 * PRODUCT**3) * 1e12

    def make_current(self) -> None:
        """Make this GPU the current one of the calling thread: torch asks it for its formats, and
        libraries launch their own kernels on it. Each thread begins with the first GPU.
        Does nothing on the CPU."""
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def synchronise(self) -> None:
        """Wait until the work given to the device is done; nothing to wait for on the CPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def set_threads(threads: int, onednn: bool | None = None) -> None:
    """Let torch use ``threads`` CPU threads, 0 for every core that this process may keep busy, and
    choose the library of their products (:mod:`node.model.products`). ``onednn``: the choice of
    another process, which is followed without a measurement.

    Daemons that share a machine should share its cores too: more threads than cores cost a factor,
    not a percentage.
    """
    torch.set_num_threads(threads or resources.cores())
    if onednn is None:
        prefer_faster(torch.get_num_threads())
    else:
        follow(onednn)


def gpu_number(name: str) -> int:
    """The number of the GPU that is called "cuda" or "cuda:N". Raises UsageFault for another name,
    OutOfResources for a GPU that is not there."""
    wanted = name.strip().lower()
    if wanted == "cuda":
        wanted = "cuda:0"
    kind, _, number = wanted.partition(":")
    if kind != "cuda" or not (number.isascii() and number.isdigit()):
        raise UsageFault(f"unknown device {name!r}", 'use "auto", "cpu" or "cuda:0"')
    there = gpus()
    if int(number) >= there:
        raise _absent(wanted, there)
    return int(number)


def refusal(index: int) -> str:
    """The reason why this process cannot compute on a GPU; "" if it can. Makes a context on it."""
    if not has_kernels(index):
        major, minor = torch.cuda.get_device_capability(index)
        return (
            f"cuda:{index} ({torch.cuda.get_device_name(index)}, compute capability "
            f"{major}.{minor}) needs a build of torch for another CUDA version: this one, for CUDA "
            f"{torch.version.cuda}, has kernels for {' '.join(torch.cuda.get_arch_list())}"
        )
    try:
        torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return f"cuda:{index} cannot be used by this process: {said}"
    _entered.add(index)
    return ""


def _absent(wanted: str, there: int) -> OutOfResources:
    """The fault for a CUDA device that this machine with ``there`` of them has not."""
    if there:
        why = "only cuda:0 is"
        if there > 1:
            why = f"cuda:0 to cuda:{there - 1} are"
        step = "choose one of these, or device auto"
    elif torch.version.cuda is None:
        why = "this torch is built without CUDA"
        step = "use device cpu, or install a CUDA build of torch"
    else:
        why = f"torch for CUDA {torch.version.cuda} sees no usable GPU"
        step = (
            "use device cpu, or check that nvidia-smi lists the GPU and its driver is recent enough"
        )
    return OutOfResources(f"there is no device {wanted} here: {why}", step)
