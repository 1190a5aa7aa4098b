"""Environment variables that libraries read when they are first imported."""

import os

SPINS = 1000
"""Turns, some 50 us, for which a thread of libgomp (torch's threads on a CPU) waits for work before
it gives its core away. By default it waits 300,000 turns: three daemons of one machine with two
threads each did less than half of their work, because threads of one waited on the cores of the
others. A process alone loses nothing that can be measured."""


def prepare() -> None:
    """Set what has to be set before grpc and torch are imported, unless the user has set it."""
    # grpc's own log lines would land between ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # grpc's own handlers of a fork crash the child where other threads are inside grpc, and the
    # child is p2pd, which is started again while this process serves.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
