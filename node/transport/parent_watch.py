"""Runs a program that must not outlive its parent: ``parent_watch.py PARENT_PID PROGRAM
ARGUMENT…``.

The kernel kills it when its parent dies, whatever the parent died of, and a Ctrl-C typed at the
parent's terminal does not reach it, so that the parent can still say goodbye through it. Replaces
itself by the program (same pid). Standard library only and started as a script: this runs in the
child.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Put this process in a group of its own, and let it be killed when ``parent``, the process id
    of its parent, ends."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent died before the kernel knew that its death concerns this process.
        sys.exit(1)


def main() -> None:
    parent = int(sys.argv[1])
    program = sys.argv[2:]
    end_with(parent)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
