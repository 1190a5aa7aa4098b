"""Daemons that are forked from one process which has loaded the program already.

Loading torch takes most of a daemon's processor time until it trains, and a swarm on one machine
starts many daemons at once. Nothing else differs from a daemon that a command started: a process
with a process group of its own, its words, environment and output, that dies with the process which
asked for it. Linux only.
"""

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from node.app.launch import PROGRAM, Child
from node.core import libraries
from node.core.errors import TimedOut
from node.transport.parent_watch import end_with

LARGEST = 1 << 17
"""Upper bound on the bytes of a request, most of which are the environment."""
ANSWER_S = 120.0
"""Longest wait, in seconds, for the process that forks, which loads torch first, and for the end of
a daemon if no other limit is given."""
LOADED = "import sys; sys.path.insert(0, sys.argv[1]); import cli; from node.app.demo import forks"
"""Beginning of the program that forks. Not ``-m``, which would look for it in the working
directory."""
SERVER = f"{LOADED}; sys.exit(forks.main(int(sys.argv[2]), cli.main))"


@dataclass(frozen=True)
class ForkOrder:
    """A process to fork: its words, environment and working directory. ``log``: file of its
    output."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    log: str

    def encoded(self) -> bytes:
        """The request as it is sent."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The request that was sent by the process that asks, which is our own."""
        return cls(**json.loads(data))

    def enter(self) -> None:
        """Take over environment and working directory. Raises OSError."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)

    def command(self) -> list[str]:
        """The command line after the interpreter, with which the daemon would start itself anew."""
        return [PROGRAM, *self.words]


Kind = TypeVar("Kind", bound=ForkOrder)


class Forks:
    """Starts daemons. The process that forks them starts with the first daemon and ends with this
    process. Only one thread may use it, because answers are read in turn."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}
        self._gone = False

    def start(self, words: list[str], log: Path, environment: dict[str, str]) -> "Forked":
        """Run ``tutti`` with these words; its output goes to ``log``. Raises as :meth:`fork`."""
        return self.fork(ForkOrder(words, environment, os.getcwd(), str(log)), ())

    def fork(self, asked: ForkOrder, ends: tuple[int, ...]) -> "Forked":
        """``ends``: its standard input and output; none: no input, and output to the log. Raises
        OSError when the process that forks has ended or the request is too large, and TimedOut when
        it does not answer: then it has been killed."""
        data = asked.encoded()
        if len(data) > LARGEST:
            raise OSError(errno.E2BIG, f"words and environment of {len(data)} bytes")
        end = time.monotonic() + ANSWER_S
        door = self._server_end()
        if not select.select([], [door], [], ANSWER_S)[1]:
            raise self._given_up()
        socket.send_fds(door, [data], ends)
        while self._told(end):
            if (pid := self._next()) is not None:
                return Forked(self, pid, asked.words)
        raise self._given_up()

    def _given_up(self) -> TimedOut:
        """The fault of a forking process that does not answer. The process is killed, because a
        late answer would be taken for the next one."""
        self.close()
        return TimedOut(
            f"the process that starts daemons did not answer in {ANSWER_S:.0f} s",
            "try again when this machine has less to do",
        )

    def _told(self, end: float) -> bool:
        """Wait for a byte from the process that forks. Returns False if none arrives by ``end``, in
        monotonic seconds."""
        left = max(0.0, end - time.monotonic())
        return bool(select.select([self._server_end()], [], [], left)[0])

    def load(self) -> None:
        """Start the process that forks, which begins to load the program."""
        self._server_end()

    def close(self) -> None:
        """End the process that forks. Its daemons, which should have ended, die with it."""
        if self._socket is None or self._server is None:
            return
        self._gone = True
        self._socket.close()
        self._socket = None
        # It may still load the program.
        self._server.kill()
        self._server.wait()

    def code(self, pid: int, seconds: float) -> int | None:
        """How the daemon has ended, as subprocess has it, or None: it still runs ``seconds`` from
        now."""
        end = time.monotonic() + seconds
        while pid not in self._codes:
            if self._gone:
                # The kernel has killed its daemons.
                return -signal.SIGKILL
            if not self._told(end):
                return None
            try:
                self._next()
            except ConnectionError:
                self._gone = True
        return self._codes[pid]

    def server_command(self, door: int) -> list[str]:
        """The command of the process that forks. ``door``: its end of the socket."""
        root = str(Path(PROGRAM).parent)
        return [sys.executable, "-P", "-c", SERVER, root, str(door)]

    def _server_end(self) -> socket.socket:
        """The socket to the process that forks, which is started if there is none. Raises
        ConnectionError if it was closed."""
        if self._gone:
            raise ConnectionResetError("the process that forks daemons has ended")
        if self._socket is None:
            self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                # In a process group of its own, where no Ctrl-C reaches it.
                self._server = subprocess.Popen(
                    self.server_command(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    cwd=Path(PROGRAM).parent,
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
    """A daemon that is forked, unless it runs through another command or the process that forks has
    ended."""

    forks: Forks = field(default_factory=Forks)

    def launch(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        if self.through:
            return super().launch(words, environment)
        try:
            return self.forks.start(words, self.log, environment)
        except OSError:
            return super().launch(words, environment)


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
            self.returncode = self._forks.code(self.pid, ANSWER_S if timeout is None else timeout)
        if self.returncode is None and timeout is None:
            raise TimedOut(
                f"process {self.pid} has not ended in {ANSWER_S:.0f} s",
                "see if this machine has memory and processor time left",
            )
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            # It may have ended since.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


def serve(door: socket.socket, kind: type[Kind]) -> Kind | None:
    """Fork daemons until ``door`` is closed at its other end. In a daemon: the request for it, of
    this ``kind``."""
    server = os.getpid()
    running: dict[int, int] = {}
    """Process ids, by descriptors of the processes."""
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
                asked = kind.decode(said)
                _become(asked, ends, server)
                return asked


def _become(asked: ForkOrder, ends: list[int], server: int) -> None:
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
    sys.orig_argv[1:] = asked.command()


def load_daemon() -> None:
    """Load the modules of every daemon. No thread is started."""
    import node.app.daemon

    del node
    # A search for garbage writes to all that was loaded, and each daemon would get its own copy.
    gc.collect()
    gc.freeze()


def load_torch() -> None:
    """Load torch, and the modules that torch loads at its first backward."""
    # As cli.main, before grpc and torch are loaded.
    libraries.prepare()
    import torch.fx.experimental.symbolic_shapes

    import node.app.assembly

    del torch, node


def main(door: int, run: Callable[[Sequence[str]], int]) -> int:
    """Fork daemons until the process that asks for them ends. In a daemon: the exit code of ``run``
    with its words."""
    load_torch()
    load_daemon()
    try:
        asked = serve(socket.socket(fileno=door), ForkOrder)
    except ConnectionError:  # the last message has not been read
        return 0
    if asked is None:
        return 0
    return run(asked.words)
