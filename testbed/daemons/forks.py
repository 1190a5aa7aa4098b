"""Daemons that are forked from one process which has loaded the program already.

Loading torch takes most of a daemon's processor time until it trains, and tests start a hundred
daemons. Nothing else differs from a daemon that a command started: a process with a process group
of its own, its words, environment and output, that dies with the process which asked for it. A
``tutti join`` asks its questions in a process of its own first, for libp2p and hivemind cannot be
loaded together, and the process that was forked for it becomes the daemon.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import cli
from node.app.launch import Child
from node.core import libraries
from node.transport.parent_watch import end_with
from testbed.daemons import namespaces

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = "cli"
LARGEST = 1 << 17
"""Bytes of a request, most of it the environment."""


@dataclass(frozen=True)
class Asked:
    """A process to fork: its words, environment, working directory and network namespace ("": the
    one of the process that forks it). ``log``: file of its output. ``program``: module with the
    ``main(words)`` to run."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    namespace: str
    log: str
    program: str = PROGRAM

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Asked":
        return cls(**json.loads(data))

    def enter(self) -> None:
        """Take over environment, working directory and network namespace. Raises OSError."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        if self.namespace:
            namespaces.enter(self.namespace)


class Forks:
    """Starts daemons. The process that forks them comes with the first and ends with this one.
    ``module``: the program of that process; it runs :func:`main`, or changes a daemon and then runs
    it."""

    def __init__(self, module: str = "testbed.daemons.forks") -> None:
        self._module = module
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}

    def start(
        self, words: list[str], log: Path, environment: dict[str, str], namespace: str = ""
    ) -> "Forked":
        """Run ``tutti`` with these words in a network namespace ("": the one of this process); its
        output goes to ``log``. Raises OSError when the process that forks has ended."""
        return self._fork(Asked(words, environment, os.getcwd(), namespace, str(log)), ())

    def talk(self, program: str, words: list[str], log: Path, namespace: str) -> "Forked":
        """Run ``main(words)`` of the module ``program`` with text pipes to its standard input and
        output; its errors go to ``log``. Raises OSError when the process that forks has ended."""
        asked = Asked(words, dict(os.environ), os.getcwd(), namespace, str(log), program)
        reads, told = os.pipe()
        hears, says = os.pipe()
        try:
            process = self._fork(asked, (reads, says))
        except BaseException:
            os.close(told)
            os.close(hears)
            raise
        finally:
            os.close(reads)
            os.close(says)
        process.stdin = os.fdopen(told, "w")
        process.stdout = os.fdopen(hears)
        return process

    def _fork(self, asked: Asked, ends: tuple[int, ...]) -> "Forked":
        """``ends``: its standard input and output; none: no input, and output to the log."""
        socket.send_fds(self._server_end(), [asked.encoded()], ends)
        while (pid := self._next()) is None:
            pass
        return Forked(self, pid, asked.words)

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
    """A daemon that is forked, unless it runs through a command that does more than to enter a
    network namespace."""

    forks: Forks = field(default_factory=Forks)

    def launch(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        namespace = namespaces.entered(self.through)
        if self.through and not namespace:
            return super().launch(words, environment)
        return self.forks.start(words, self.log, environment, namespace)


class Forked(subprocess.Popen[Any]):
    """A process of :class:`Forks`, to be treated as any other."""

    def __init__(self, forks: Forks, pid: int, words: list[str]) -> None:
        # Not Popen's own: that starts the process.
        self._forks = forks
        self.pid = pid
        self.args = words
        self.returncode = None
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


def serve(door: socket.socket) -> Asked | None:
    """Fork daemons until ``door`` is closed at its other end. In a daemon: the request for it."""
    server, running = os.getpid(), dict[int, int]()
    """``running``: process ids, by descriptors of the processes."""
    while True:
        for ready in select.select([door.fileno(), *running], [], [])[0]:
            if ready in running:
                pid = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                door.send(json.dumps([pid, code]).encode())
                continue
            said, ends, *_ = socket.recv_fds(door, LARGEST, 2)
            if not said:
                return None
            if pid := os.fork():
                running[os.pidfd_open(pid)] = pid
                for end in ends:
                    os.close(end)
                door.send(json.dumps([pid, None]).encode())
            else:
                door.close()
                for other in running:
                    os.close(other)
                asked = Asked.decode(said)
                _become(asked, ends, server)
                return asked


def _become(asked: Asked, ends: list[int], server: int) -> None:
    """Make this process, a child of ``server``, the one that was asked for."""
    end_with(server)
    asked.enter()
    out = os.open(asked.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 2)
    ends = ends or [os.open(os.devnull, os.O_RDONLY), os.dup(out)]
    os.close(out)
    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    # A daemon that moves starts itself anew with its own command line.
    sys.orig_argv[1:] = ["-m", asked.program, *asked.words]


def main() -> int:
    """Fork daemons until the process that asks for them ends. In a daemon: its exit code."""
    # As cli.main, before grpc and torch are loaded.
    libraries.prepare()
    # Modules of every daemon, and those that torch loads with its first backward. No thread has
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
        asked = serve(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionError:  # the last message has not been read
        return 0
    if asked is None:
        return 0
    if asked.program != PROGRAM:
        return importlib.import_module(asked.program).main(asked.words)
    if "join" not in asked.words:
        return cli.main(asked.words)
    joined = join(asked, askers)
    return joined if isinstance(joined, int) else cli.main(joined)


def join(asked: Asked, askers: socket.socket) -> list[str] | int:
    """Run the part of ``tutti join`` that comes before its daemon, in a process forked by the one
    at the other end of ``askers``. Returns the words of the daemon that it would replace itself
    with, or its exit code."""
    mine, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(askers, [asked.encoded()], [theirs.fileno(), 1, 2])
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
        # A daemon that changes its stage starts itself anew with the arguments it was started with.
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
    asked = Asked.decode(said)
    daemon = socket.socket(fileno=descriptors[0])
    asked.enter()
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
    code = cli.main(asked.words)
    daemon.send(json.dumps(code).encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
