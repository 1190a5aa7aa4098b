"""Environment variables that libraries read when they are first imported."""

import os

SPINS = 1000
"""Turns of a thread of libgomp (torch's threads on a CPU) in its wait for work, some 50 us; then it
gives its core away. libgomp's default is 300,000 turns. With it, three processes with two threads
each on two cores did half of their work, because waiting threads of one held the cores of the
others. Alone, a process loses 3 to 5 % with single tokens, and nothing with micro-batches."""


def prepare() -> None:
    """Set the variables of grpc and of torch's threads. The user's own values stay. Must come
    before the import of grpc and torch."""
    # grpc's own log lines would land between ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # grpc's own handlers of a fork crash the child where other threads are inside grpc, and the
    # child is p2pd, which is started again while this process serves.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
