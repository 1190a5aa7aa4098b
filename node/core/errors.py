"""Two families of failure, mapped once where they enter the program.

* :class:`PeerFault`   somebody else failed: route around it, count it.
* :class:`LocalFault`  we failed, or were asked for the impossible: stop, say why, say the next
                       step.
"""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from node.core.ids import PeerId, short


class ExitCode(IntEnum):
    """Exit codes of the command line, stable for scripts and service managers
    (docs/operating.md)."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_RUNNING = 3
    NETWORK = 4
    REFUSED = 5
    PROTOCOL = 6
    RESOURCES = 7
    TIMED_OUT = 8
    DEGRADED = 9
    RESTART_WANTED = 10
    NO_ROUTE = 20
    PORT_CLOSED = 21
    NAME_NOT_FOUND = 22
    NO_ANSWER = 23
    UDP_BLOCKED = 24
    NO_COMMON_FAMILY = 25
    CLOCK_WRONG = 26
    IDENTITY_IN_USE = 27
    OTHER_SERVICE = 28
    VERSIONS_UNFIT = 30
    DEVICE_UNFIT = 31
    DISK_UNFIT = 32
    DATA_UNFIT = 33
    SERVICE_UNFIT = 34
    INTERRUPTED = 130
    READER_GONE = 141


class TuttiError(Exception):
    """Root of every error this project raises on purpose."""


class PeerFault(TuttiError):
    """Another peer failed, lied, or could not be reached. Never stops this daemon.

    ``peer``: the peer at fault; ``reason``: one sentence; ``weight``: its count towards a ban
    (0: nobody's fault, such as a closed connection; 1: garbage).
    """

    def __init__(self, peer: PeerId, reason: str, weight: float = 0.0) -> None:
        super().__init__(f"peer {short(peer)}: {reason}")
        self.peer = peer
        self.reason = reason
        self.weight = weight


class WireError(TuttiError, ValueError):
    """Bytes from outside that do not parse or exceed a limit; raised before anything is allocated
    for them."""


class OversizedMessage(WireError):
    """A message beyond the size of its kind. ``times``: its size over the largest allowed one."""

    def __init__(self, name: str, nbytes: int, most: int) -> None:
        super().__init__(f"{name} of {nbytes} bytes, at most {most} are read")
        self.times = nbytes / most


class LocalFault(TuttiError):
    """This daemon or its user must act. ``next_step`` says how, ``code`` becomes the exit code.

    ``details``: more facts for readers of the error as JSON.
    """

    code: ExitCode = ExitCode.UNEXPECTED

    def __init__(
        self,
        what: str,
        next_step: str = "",
        code: ExitCode | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step
        self.details = details or {}
        if code is not None:
            self.code = code


class UsageFault(LocalFault):
    """A value the user gave cannot be used (a wrong invite, a bad manifest field, an unknown
    flag)."""

    code = ExitCode.USAGE


def refuse(*faults: tuple[object, str, str]) -> None:
    """Raises UsageFault for the first fault that is true. ``faults``: for each, a value that is
    true if it is there, the sentence on it, and the next step."""
    for wrong, what, next_step in faults:
        if wrong:
            raise UsageFault(what, next_step)


class TooNew(UsageFault):
    """The user's input was made by a newer tutti, and this one must be updated to it."""

    code = ExitCode.PROTOCOL


class Removed(UsageFault):
    """The user's input names something that tutti had once. ``next_step`` names its replacement."""


class NotRunning(LocalFault):
    """The command needs a daemon and none answers on the control socket."""

    code = ExitCode.NOT_RUNNING


class NetworkFault(LocalFault):
    """No bootstrap peer answers, a port is taken, or nothing can be reached."""

    code = ExitCode.NETWORK


class Refused(LocalFault):
    """A signature, a hash, a key file's permissions or an admission rule says no."""

    code = ExitCode.REFUSED


class ProtocolMismatch(LocalFault):
    """The other side speaks another version of the protocol."""

    code = ExitCode.PROTOCOL


class OutOfResources(LocalFault):
    """Disk full, memory too small for the stage, no device."""

    code = ExitCode.RESOURCES


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(
    what: object,
    next_step: str,
    kind: type[LocalFault] = LocalFault,
    errors: tuple[type[Exception], ...] = (OSError,),
) -> Iterator[None]:
    """Context for writing ``what``: an error of the writer is raised as OutOfResources if the disk
    is full, as ``kind`` with ``next_step`` otherwise. ``errors``: exceptions of the writer."""
    try:
        yield
    except errors as e:
        # safetensors tells the number in its text only
        if any(getattr(e, "errno", 0) == n or f"os error {n})" in str(e) for n in DISK_FULL):
            raise OutOfResources(f"no space to write {what}", "free some space on that disk") from e
        raise kind(f"cannot write {what}: {getattr(e, 'strerror', 0) or e}", next_step) from e


class StepFault(LocalFault):
    """An optimizer step, or state for one, that cannot be: another shape, numbers that are not
    finite, an epoch that is over."""


class DeviceLost(LocalFault):
    """One of the devices of this box is gone, or its process, and its memory with it: the daemon
    must start again."""

    code = ExitCode.RESTART_WANTED


class TimedOut(LocalFault):
    """The awaited event did not happen in time."""

    code = ExitCode.TIMED_OUT
