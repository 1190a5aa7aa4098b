"""The lanes of a device that does not exist: computations and copies take a stated time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from node.model.lanes import Lanes, Mark

T = TypeVar("T")
SHORT = 1024
"""Numbers below which a copy takes no time: looks at a result, not the result."""


def _until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class Due:
    """A mark that is done at a moment of ``time.perf_counter``."""

    at: float

    def wait(self) -> None:
        _until(self.at)

    def done(self) -> bool:
        return time.perf_counter() >= self.at

    def since(self, earlier: "Due") -> float:
        """As torch's ``elapsed_time``, raises RuntimeError unless both are done."""
        if not (self.done() and earlier.done()):
            raise RuntimeError("both marks must be done")
        return self.at - earlier.at


class SlowLanes(Lanes):
    """A device that takes ``compute_s`` for the computations of a job and ``copy_s`` for a copy
    each way. Computations follow each other and go on while the thread that issued them does
    something else, as on a GPU; a copy holds its thread. The numbers are computed by the CPU, at
    once. ``beside``: copies run beside computations; otherwise every call returns when its work is
    done."""

    def __init__(self, compute_s: float, copy_s: float, *, beside: bool) -> None:
        super().__init__()
        self.beside = beside
        self._compute_s = compute_s
        self._copy_s = copy_s
        self._computed = 0.0
        """End of the computations that were issued."""

    def compute(self, work: Callable[[], T]) -> T:
        start = max(time.perf_counter(), self._computed)
        made = work()
        self._computed = start + self._compute_s
        if not self.beside:
            _until(self._computed)
        return made

    def mark(self) -> Due:
        return Due(max(time.perf_counter(), self._computed))

    def up(self, host: Tensor) -> Tensor:
        self._copy(host)
        return host

    def down(self, made: Tensor, after: Mark) -> Tensor:
        after.wait()
        self._copy(made)
        return made

    def _copy(self, tensor: Tensor) -> None:
        if tensor.numel() >= SHORT:
            time.sleep(self._copy_s)
