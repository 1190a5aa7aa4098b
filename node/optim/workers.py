"""Run independent pieces of tensor work side by side, each with intra-operation threads of its own
number.

oneDNN multiplies one pair of bf16 matrices of 1024x1024 on one core however many threads torch has:
1.45 TFLOP/s with one thread and with two. Two such products on two threads run at 2.8. And threads
that never wait for each other within an operation lose least on a machine that does other things
too.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

from node.telemetry.resources import cores

T = TypeVar("T")


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads that stay, of this ``process`` (a fork inherits none): new ones would have to touch
    all their memory first."""
    return ThreadPoolExecutor(max(1, cores() - 1), f"optim-{process}")


def spread(acts: Sequence[Callable[[], T]], workers: int, each: int = 1) -> list[T]:
    """The results of ``acts`` in their order; an exception is raised when all have ended. Pass the
    longest first.

    The caller is one of the ``workers``. For the time of the call new threads of this process have
    ``each`` intra-operation threads; afterwards the former number. Gradients are recorded where the
    caller records them.
    """
    before = torch.get_num_threads()
    recording = torch.is_grad_enabled()
    waiting = deque(enumerate(acts))
    found = dict[int, T]()

    def work() -> None:
        torch.set_num_threads(each)
        with torch.set_grad_enabled(recording):
            while waiting:
                try:
                    i, act = waiting.popleft()
                except IndexError:  # another was faster
                    return
                found[i] = act()

    busy = [_pool(os.getpid()).submit(work) for _ in range(min(workers, len(acts)) - 1)]
    try:
        work()
    finally:
        running = [other for other in busy if not other.cancel()]
        wait(running)
        torch.set_num_threads(before)
    for other in running:
        other.result()
    return [found[i] for i in range(len(acts))]
