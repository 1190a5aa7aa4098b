"""The socket between the command line and the daemon: its listener, and the metadata of its
answers."""

import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

from node.core.errors import ExitCode, Refused

# Trailing metadata that carries a LocalFault to the command line whole.
CODE_KEY = "tutti-exit-code"
NEXT_KEY = "tutti-next-step-bin"
CHANNEL = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_http_proxy", 0),
    # A screen sees within a second that the daemon is back: gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Options of a channel to the daemon."""


def carried(error: Any, otherwise: ExitCode) -> tuple[str, ExitCode] | None:
    """Next step and exit code of the LocalFault that an RpcError carries, None where it carries
    none. ``otherwise`` stands for a code that is unknown here."""
    extra: dict[str, Any] = {str(key): value for key, value in error.trailing_metadata() or ()}
    codes = {str(int(code)): code for code in ExitCode}
    step = bytes(extra.get(NEXT_KEY, b"")).decode(errors="replace")
    if CODE_KEY not in extra:
        return None
    return (step, codes.get(extra[CODE_KEY], otherwise))


def clear_stale(path: Path) -> None:
    """Remove a socket nobody listens on. Refused when somebody does (naming the process), it is no
    socket, or its directory is closed to this user."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return  # the code that makes the directory reports a file in its place
    except PermissionError as e:
        raise _foreign(path) from e
    if not stat.S_ISSOCK(status.st_mode):
        raise Refused(f"{path} is in the way and is not a socket", "move it away")
    pid = listener(path)
    if pid is not None:
        what = "a daemon is already running here"
        if pid:
            what += f", pid {pid}"
        raise Refused(
            what,
            "see  tutti status ; end it with  tutti stop ; or use another --home",
        )
    path.unlink(missing_ok=True)


def listener(path: Path) -> int | None:
    """Pid of the process that listens on a unix socket, 0 when the system does not tell, None when
    nobody does. Raises Refused for the socket of another user, except root: its answers cannot
    be trusted."""
    try:
        user, pid = _peer(path)
    except PermissionError as e:
        raise _foreign(path) from e
    except OSError:
        return None
    if user not in (os.getuid(), 0):
        raise _foreign(path)
    return pid


def _peer(path: Path) -> tuple[int, int]:
    """User and process of the listener; the process is 0 where the system does not tell it. Raises
    OSError when nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (TimeoutError, BlockingIOError):
            return path.stat().st_uid, 0  # it exists but is too busy to take us: alive
        if not hasattr(socket, "SO_PEERCRED"):
            return path.stat().st_uid, 0
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("iII", raw)
        return user, pid


def _foreign(path: Path) -> Refused:
    return Refused(
        f"{path} is another user's",
        "run tutti as that user, or name a directory of yours with  --home DIR",
    )
