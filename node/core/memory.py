"""Memory of a process in bytes, and settings of this process's C allocator.

Freed memory is kept, because the next round takes the same amount again. glibc gives blocks above a
threshold, and the end of its heaps, back to the system at once; taking them anew, a page at a time,
was a quarter of the processor time of averaging 64 MiB. The price is memory that stays with an idle
process: the amount of its busiest moment, and the holes.
"""

import asyncio
import contextlib
import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Parameters of mallopt(3).
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
ARENA_MAX = -8
LARGEST = 1 << 25
"""Size in bytes below which freed blocks are kept; glibc allows no larger threshold."""
SCARCE = 1 << 20
"""The same threshold where memory is scarce. A block that is mapped by itself leaves no hole in a
heap. At ``LARGEST``, holes doubled the memory of a stage of 16 MiB and its activations. At this
value, forward, backward and step of that stage took a third longer."""


def keep_freed(below: int = LARGEST) -> bool:
    """Keep freed blocks of less than ``below`` bytes. Call it early: threads get heaps of their own
    as they first allocate, and memory that one freed is of no use to another.

    False, and nothing has changed, where the C library has no such knobs (musl, macOS).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(what, value)
        for what, value in (
            (ARENA_MAX, 1),
            (MMAP_THRESHOLD, below),
            (TRIM_THRESHOLD, (1 << 31) - 1),
        )
    )


def give_freed_back() -> bool:
    """Give freed memory back to the system, after work that does not come again. Return True if
    there was any; False too where the C library cannot (musl, macOS)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(0))


_FREEING = ThreadPoolExecutor(1, "frees memory")
"""A thread of its own: work of others may fill the event loop's executor for minutes, and memory
that nobody frees is missing for the next micro-batches."""


def let_go(held: list[Any], nbytes: int = SCARCE) -> None:
    """Empty a list and free the memory of its entries, unless something else still holds them.
    ``nbytes``: size of that memory. On an event loop, another thread frees large blocks: unmapping
    128 MiB takes 18 ms."""
    if nbytes >= SCARCE:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().run_in_executor(_FREEING, held.clear)
            return
    held.clear()


def resident(pid: int) -> int:
    """Bytes of a process that are in main memory, 0 where the system does not tell."""
    return _of_status(pid, "VmRSS")


def of_files(pid: int) -> int:
    """Bytes of :func:`resident` that are pages of files, for the most part of libraries: processes
    that run the same program have them once, together. 0 where the system does not tell."""
    return _of_status(pid, "RssFile")


def most_resident(pid: int) -> int:
    """The most bytes that a process had in main memory, 0 where the system does not tell."""
    return _of_status(pid, "VmHWM")


def _of_status(pid: int, row: str) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return 1024 * next((int(line.split()[1]) for line in file if line.startswith(row)), 0)
    return 0
