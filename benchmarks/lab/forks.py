"""Daemons that are forked from one process which has loaded the program already.

Loading torch takes most of a daemon's processor time until it trains, and tests start a hundred
daemons. Nothing else differs from a daemon that a command started: a process with a process group
of its own, its words, environment and output, that dies with the process which asked for it. A
``tutti join`` asks its questions in a process of its own first, for libp2p and hivemind cannot be
loaded together, and the process that was forked for it becomes the daemon.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import cli
from node.app.launch import Child
from node.transport.parent_watch import end_with

REPOSITORY = Path(__file__).resolve().parents[2]
LARGEST = 1 << 17
"""Bytes of a request, most of it the environment."""


class Forks:
    """Starts daemons. The process that forks them comes with the first and ends with this one.
    ``module``: the program of that process; it runs :func:`main`, or changes a daemon and then runs
    it."""

    def __init__(self, module: str = "benchmarks.lab.forks") -> None:
        self._module = module
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
                command = [sys.executable, "-m", self._module, str(theirs.fileno())]
                # In a process group of its own, where no Ctrl-C reaches it.
                self._server = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    cwd=REPOSITORY,
                    process_group=0,
                    # Modules that daemons load later are compiled once, not by each of them.
                    env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
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
    # A daemon that moves starts itself anew with its own command line.
    sys.orig_argv[1:] = ["-m", "cli", *asked["words"]]
    return asked["words"]


def main() -> int:
    """Fork daemons until the process that asks for them ends. In a daemon: its exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as cli.main, before grpc is loaded
    # What every daemon begins with, and what torch loads with its first backward. No thread has
    # been started.
    import torch.fx.experimental.symbolic_shapes

    import node.app.assembly

    del torch, node
    askers, door = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        askers.close()
        return ask(door)
    door.close()
    # Only now: the part of a join that asks has libp2p, which cannot be loaded beside hivemind.
    import node.app.daemon

    del node
    # A search for garbage writes to all that was loaded, and each daemon would get its own copy.
    gc.collect()
    gc.freeze()
    try:
        words = serve(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionError:  # what was told last has not been read
        return 0
    if words is not None and "join" in words:
        joined = join(words, askers)
        if isinstance(joined, int):
            return joined
        words = joined
    return 0 if words is None else cli.main(words)


def join(words: list[str], askers: socket.socket) -> list[str] | int:
    """Run the part of ``tutti join`` that comes before its daemon, in a process forked by the one
    at the other end of ``askers``. Returns the words of the daemon that it would replace itself
    with, or its exit code."""
    mine, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    with theirs:
        socket.send_fds(askers, [json.dumps(asked).encode()], [theirs.fileno(), 1, 2])
    asker = json.loads(mine.recv(LARGEST))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    passed_on = signal.SIGKILL

    def pass_on(number: int, _: Any) -> None:
        nonlocal passed_on
        passed_on = signal.Signals(number)
        os.kill(asker, number)

    for number in before:
        signal.signal(number, pass_on)
    said = mine.recv(LARGEST)
    for number, handler in before.items():
        signal.signal(number, handler)
    if not said:  # a signal has ended it, as it would have ended this process
        os.kill(os.getpid(), passed_on)
    became = json.loads(said)
    if isinstance(became, list):
        # A daemon that changes its place starts itself anew by what it was started with.
        sys.orig_argv[1:] = ["-m", "cli", *became]
    return became


def ask(door: socket.socket) -> int:
    """Fork a process for the first part of every ``tutti join`` that is asked for at ``door``,
    until its other end is closed. In such a process: its exit code."""
    import node.app.joining
    import node.control.observer

    del node
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these processes
    while True:
        said, descriptors, *_ = socket.recv_fds(door, LARGEST, 3)
        if not said:
            return 0
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    door.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    asked, daemon = json.loads(said), socket.socket(fileno=descriptors[0])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[2], 2)
    daemon.send(json.dumps(os.getpid()).encode())

    def become(program: str, command: list[str]) -> NoReturn:
        # The interpreter and the name of the program come before the words.
        daemon.send(json.dumps(command[2:]).encode())
        os._exit(0)

    def follow() -> None:
        daemon.recv(1)  # nothing is ever sent: the process that becomes the daemon has died
        os._exit(1)

    os.execv = become
    threading.Thread(target=follow, daemon=True).start()
    code = cli.main(asked["words"])
    daemon.send(json.dumps(code).encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
