"""Run independent pieces of tensor work on threads of their own, each with one intra-operation thread.

oneDNN multiplies one pair of bf16 matrices of 1024x1024 on one core however many threads torch has: 1.45 TFLOP/s with one thread
and with two. Two such products on two threads run at 2.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def spread(acts: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """What each gives, in order; the first exception is raised when all have ended. Give the longest first.

    For the time of the call new threads of this process have one intra-operation thread; afterwards ``threads`` again, which
    the caller had. Gradients are recorded where the caller records them.
    """
    if not acts:
        return []
    recording = torch.is_grad_enabled()

    def run(act: Callable[[], T]) -> T:
        with torch.set_grad_enabled(recording):
            return act()

    try:
        with ThreadPoolExecutor(min(threads, len(acts)), "optim", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(run, acts))
    finally:
        torch.set_num_threads(threads)
