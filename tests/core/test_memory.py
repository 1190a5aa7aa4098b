"""Freed memory is there for the next round."""

import platform
import resource
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from node.core.memory import keep_freed
# PR_SET_THP_DISABLE: of huge pages a round takes too few to tell
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
assert keep_freed() if sys.argv[1] == "kept" else True
def round():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (4 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
round(), round()
print(round())
"""
PAGES = 16 * (4 << 20) // resource.getpagesize()


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no such knobs"
)
def test_a_second_round_takes_no_new_pages():
    kept, given_back = (
        int(
            subprocess.run(
                [sys.executable, "-c", FAULTS, how], check=True, capture_output=True, timeout=60
            ).stdout
        )
        for how in ("kept", "given back")
    )
    assert kept < PAGES / 50
    assert given_back > PAGES / 50, "else the allocator needs no telling"


HOLES = """
from node.core.memory import give_freed_back, keep_freed, resident
import os
keep_freed()
kept = []
blocks = []
for number in range(64 << 4):
    blocks.append(bytearray(64 << 10))
    kept.append(bytearray(100))
del blocks
before = resident(os.getpid())
assert give_freed_back()
print(before - resident(os.getpid()))
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no such knobs"
)
def test_freed_memory_between_blocks_in_use_is_given_back():
    done = subprocess.run(
        [sys.executable, "-c", HOLES], check=True, capture_output=True, timeout=60
    )
    assert int(done.stdout) > 32 << 20
