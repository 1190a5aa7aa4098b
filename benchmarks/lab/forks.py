"""Daemons that are forked from one process which has loaded the program already.

Loading torch is most of what a daemon takes of a core until it trains, and tests start a hundred.
Nothing else differs from a daemon that a command started: a process with a process group of its
own, its words, environment and output, that dies with the process which asked for it.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cli
from node.app.launch import Child
from node.transport.parent_watch import end_with

REPOSITORY = Path(__file__).resolve().parents[2]
LARGEST = 1 << 17
"""Bytes of a request, most of it the environment."""


class Forks:
    """Starts daemons. The process that forks them comes with the first and ends with this one."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}

    def start(self, words: list[str], log: Path, environment: dict[str, str]) -> "Forked":
        """Run ``tutti`` with these words; what it says goes to ``log``. Raises OSError when the
        process that forks has ended."""
        asked = {"words": words, "environment": environment, "log": str(log)}
        self._server_end().send(json.dumps({**asked, "folder": os.getcwd()}).encode())
        while (pid := self._next()) is None:
            pass
        return Forked(self, pid, words)

    def code(self, pid: int, seconds: float | None) -> int | None:
        """How the daemon has ended, as subprocess has it, or None: it still runs ``seconds`` from
        now. None waits for its end."""
        end = time.monotonic() + (seconds or 0.0)
        while pid not in self._codes:
            left = None if seconds is None else max(0.0, end - time.monotonic())
            if not any(select.select([self._server_end()], [], [], left)):
                return None
            self._next()
        return self._codes[pid]

    def _server_end(self) -> socket.socket:
        """The way to the process that forks, which is started when there is none."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", "benchmarks.lab.forks", str(theirs.fileno())]
                # In a process group of its own, where no Ctrl-C reaches it.
                self._server = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], cwd=REPOSITORY, process_group=0
                )
        return self._socket

    def _next(self) -> int | None:
        """The pid of a daemon that was started; None after the end of one."""
        if not (said := self._server_end().recv(LARGEST)):
            raise ConnectionResetError("the process that forks daemons has ended")
        pid, code = json.loads(said)
        if code is None:
            self._codes.pop(pid, None)
            return pid
        self._codes[pid] = code
        return None


@dataclass
class ForkedChild(Child):
    """A daemon that is forked, unless it runs through another command."""

    forks: Forks = field(default_factory=Forks)

    def launch(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        if self.through:
            return super().launch(words, environment)
        return self.forks.start(words, self.log, environment)


class Forked(subprocess.Popen[bytes]):
    """A daemon of :class:`Forks`, to be treated as any other process."""

    def __init__(self, forks: Forks, pid: int, words: list[str]) -> None:
        # Not Popen's own: that starts the process.
        self._forks, self.pid, self.args, self.returncode = forks, pid, words, None
        self.stdin = self.stdout = self.stderr = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._forks.code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def serve(door: socket.socket) -> list[str] | None:
    """Fork daemons until ``door`` is closed at its other end. In a daemon: its words."""
    server, running = os.getpid(), dict[int, int]()
    """``running``: process ids, by descriptors of the processes."""
    while True:
        for ready in select.select([door.fileno(), *running], [], [])[0]:
            if ready in running:
                pid = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                door.send(json.dumps([pid, code]).encode())
            elif not (said := door.recv(LARGEST)):
                return None
            elif pid := os.fork():
                running[os.pidfd_open(pid)] = pid
                door.send(json.dumps([pid, None]).encode())
            else:
                door.close()
                for other in running:
                    os.close(other)
                return _become(json.loads(said), server)


def _become(asked: dict[str, Any], server: int) -> list[str]:
    """Make this process, a child of ``server``, the one that was asked for."""
    end_with(server)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    out = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(old, new)
    os.close(out)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    # A daemon that changes its place starts itself anew by what it was started with.
    sys.orig_argv[1:] = ["-m", "cli", *asked["words"]]
    return asked["words"]


def main() -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as cli.main, before grpc is loaded
    # What every daemon begins with: no thread has been started, and neither hivemind nor libp2p is
    # loaded, for one that joins asks its questions with the one before it loads the other.
    import node.app.assembly  # noqa: F401  # pyright: ignore[reportUnusedImport]

    try:
        words = serve(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionError:  # what was told last has not been read
        return 0
    return 0 if words is None else cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
