"""Paths of one peer's files, the daemon's socket, writes that survive a power cut, and temporary
files that survive their process. Only this module and the settings read the environment."""

import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from node.core.errors import UsageFault

MAX_SOCKET_PATH = 100
"""Bytes of a unix socket's path that every system takes (Linux 107, macOS 103)."""


def home_named(given: str | None, env: Mapping[str, str] | None = None) -> Path | None:
    """The directory that ``--home`` or TUTTI_HOME names, absolute; None when neither does. Raises
    UsageFault."""
    named = given or (os.environ if env is None else env).get("TUTTI_HOME")
    if not named:
        return None
    return expanded(named).absolute()


ABOUT_A_HOME = (
    *("bugreport", "cells", "chat", "config", "data", "doctor", "drain", "eval", "export"),
    *("generate", "id", "join", "ledger", "logs", "monitor", "pause", "peers", "ping", "restart"),
    *("resume", "serve", "service", "start", "status", "stop", "swarm", "web"),
)
"""Verbs of commands that are about the files or the daemon of one home."""
_COMMAND = re.compile(rf"\btutti (?=(?:{'|'.join(ABOUT_A_HOME)})\b(?! -h\b)(?![^;,:]* --home\b))")
"""Such a command in the middle of a sentence, unless it names a home already."""


def pasteable(text: str, home_flag: str) -> str:
    """The text with the home named in its commands. ``home_flag``: " --home DIR", "" for the
    default one."""
    if not home_flag:
        return text
    return _COMMAND.sub(lambda found: f"tutti{home_flag} ", text)


class _CommandLine:
    """The command line of this process. ``home_flag``: as for :func:`pasteable`."""

    home_flag = ""


def name_home(home_flag: str) -> None:
    """Name the home in the advice of this process from now on, as its user has named it."""
    _CommandLine.home_flag = home_flag


def advice(text: str) -> str:
    """The text with the home of this process's command line named in its commands, as everything
    is shown that a command says."""
    return pasteable(text, _CommandLine.home_flag)


def expanded(named: str | Path) -> Path:
    """A path that a user gave, which may begin with ``~``. Raises UsageFault for an unknown
    user."""
    try:
        return Path(named).expanduser()
    except RuntimeError as e:
        raise UsageFault(f"{named}: there is no such user", "write the whole path") from e


def sync(path: Path) -> None:
    """Write a file, or the names in a directory, to the disk, so that a power cut leaves them.
    Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_file(path: Path) -> int:
    """Make a file and return a descriptor to write it. For as long as that is open,
    :func:`remove_stale` leaves the file alone, in this process and in others. Raises OSError, also
    if something is there."""
    while True:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if _hold(fd, path):
            return fd


def new_directory(path: Path) -> int:
    """Make a directory and return a descriptor of it. For as long as that is open,
    :func:`remove_stale` leaves the directory alone. Raises OSError, also if something is there."""
    while True:
        path.mkdir(0o755)
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _hold(fd, path):
                return fd


def _hold(fd: int, path: Path) -> bool:
    """Lock the new file or directory at ``path``. Return False, and close it, if another process
    has taken it for stale and removed it before it was locked."""
    with suppress(OSError):  # where nothing can be locked, nothing is stale
        fcntl.flock(fd, fcntl.LOCK_EX)
    if path.exists():
        return True
    os.close(fd)
    return False


def remove_stale(path: Path) -> None:
    """Remove a file of :func:`new_file` or a directory of :func:`new_directory` whose process has
    ended. Follows no link, and raises nothing where something cannot be removed."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # A lock goes with its holder, however that ends. This one is shared, because NFS gives
            # no other for a file that is open to be read.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(fd)


def user_dir(kind: str) -> Path:
    """The directory of this user for "data", "config" or "cache", where no home is named: of the
    XDG base directories, which on macOS stand for two directories unless they are set. Raises
    UsageFault."""
    variable, usual, mac = {
        "data": ("XDG_DATA_HOME", "~/.local/share", "Application Support"),
        "config": ("XDG_CONFIG_HOME", "~/.config", "Application Support"),
        "cache": ("XDG_CACHE_HOME", "~/.cache", "Caches"),
    }[kind]
    if sys.platform == "darwin":
        usual = f"~/Library/{mac}"
    return expanded(os.environ.get(variable, "").strip() or usual) / "tutti"


def control_socket(home: Path) -> Path:
    """Path of the control service's socket: in ``home``, or in a short private directory if no
    socket can be reached there."""
    here = home / "ctl.sock"
    if fits_socket(here):
        return here
    tag = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    return Path(_runtime_dir()) / f"tutti-{os.getuid()}-{tag}" / "ctl.sock"


def fits_socket(path: Path, more: int = 0) -> bool:
    """Return True if a unix socket at ``path`` can be bound by every system and dialled by gRPC,
    also with ``more`` bytes behind it."""
    # gRPC takes a comma for the end of one address and the beginning of another, even as "%2C".
    raw = os.fsencode(path)
    return len(raw) + more <= MAX_SOCKET_PATH and b"," not in raw


def socket_target(path: Path) -> str:
    """gRPC's name of a unix socket that :func:`fits_socket`: a URI, in which "#", "?" and "%" have
    a meaning and only ASCII is allowed."""
    return f"unix:{quote(os.fsencode(path))}"


def _runtime_dir() -> str:
    """A short directory for sockets: the session's, or /tmp when that is missing or unsuitable."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    fits = bool(session) and fits_socket(Path(session), MAX_SOCKET_PATH - 40)
    if fits and os.path.isdir(session):
        return session
    return "/tmp"
