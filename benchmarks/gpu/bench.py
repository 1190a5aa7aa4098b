"""The device that parts b to e measure on: its clock, its context for a forward, its memory."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from node.model.device import Device
from node.pipeline.frames import FrameReader
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from testbed.models.visits import arrived, read

T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """``name`` is what a daemon is told of the device; ``rehearse``: tiny shapes, on a CPU."""

    name: str
    device: Device
    rehearse: bool

    @classmethod
    def on(cls, name: str, rehearse: bool) -> "Bench":
        """The device called ``name``. Raises OutOfResources where it is not there."""
        if rehearse:
            torch.set_num_threads(1)  # tiny products gain nothing of more
        return cls(name, Device.pick(name), rehearse)

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which a stage with fp32 parameters computes on a GPU; a rehearsal has it
        too."""
        return torch.autocast(self.device.device.type, dtype=torch.bfloat16)

    def seconds(self, act: Callable[[], object], rounds: int = 7) -> float:
        """Median time of ``act`` until the device has done it, after one call that warms up."""
        return self.seconds_with(lambda: None, lambda _: act(), rounds)

    def seconds_with(
        self, prepare: Callable[[], T], act: Callable[[T], object], rounds: int = 7
    ) -> float:
        """As :meth:`seconds`; ``act`` gets the result of ``prepare``, which is not timed."""
        found: list[float] = []
        for _ in range(rounds + 1):
            prepared = prepare()
            self.device.synchronise()
            began = time.perf_counter()
            act(prepared)
            self.device.synchronise()
            found.append(time.perf_counter() - began)
        return median(found[1:])

    def seconds_of_visit(self, math: StageMath, x: Tensor, dy: Tensor) -> float:
        """Median seconds of the device thread for one visit, after the activation `x` and the
        gradient `dy` (B, T, D) have arrived."""

        def prepare() -> tuple[VisitBuffers, FrameReader]:
            locked = math.on_gpu
            return arrived(x, locked=locked), read(dy, locked=locked)

        def act(prepared: tuple[VisitBuffers, FrameReader]) -> None:
            work, gradient = prepared
            work.gradient = gradient
            math.forward(work)
            math.backward(work)

        return self.seconds_with(prepare, act)

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Measure the most bytes that tensors made in the block take at once; the list has the
        number at the end of the block. On a GPU as torch's allocator counts them, on a CPU by the
        storages that operations give back."""
        found: list[int] = []
        if self.device.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device.device)
            before = torch.cuda.memory_allocated(self.device.device)
            yield found
            found.append(torch.cuda.max_memory_allocated(self.device.device) - before)
            return
        with TensorBytes() as counted:
            yield found
        found.append(counted.most)

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Numbers from a bell curve, the same on every device."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is entered; ``most``: at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _counts(t)}
        for tensor in tree_leaves(found):
            if _counts(tensor) and id(tensor.untyped_storage()) not in given | self._known:
                self._took(tensor.untyped_storage())
        return found

    def _took(self, storage: torch.UntypedStorage) -> None:
        # torch keeps the Python object of a storage as long as the storage.
        self._known.add(id(storage))
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._gave, id(storage), storage.nbytes())

    def _gave(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self._now -= size


def _counts(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def differs(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference| in fp64 on the CPU; not finite where a number is not."""
    a = found.detach().double().cpu()
    b = reference.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
