"""Daemons that are forked from one process which has loaded the program already, as the demo starts
them (:mod:`node.app.demo.forks`): here also in network namespaces, with another program, and by
``tutti join``.

A ``tutti join`` asks its questions in a process of its own first, for libp2p and hivemind cannot be
loaded together, and the process that was forked for it becomes the daemon.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import cli
from node.app.demo import forks
from node.app.demo.forks import LARGEST, Forked, load_daemon, load_torch, serve
from node.app.launch import Child
from testbed.daemons import namespaces

PROGRAM = "cli"


@dataclass(frozen=True)
class Asked(forks.ForkOrder):
    """A process to fork. ``namespace``: its network namespace, "": the one of the process that
    forks it; ``program``: module with the ``main(words)`` to run."""

    namespace: str = ""
    program: str = PROGRAM

    def enter(self) -> None:
        """Take over environment, working directory and network namespace. Raises OSError."""
        super().enter()
        if self.namespace:
            namespaces.enter(self.namespace)

    def command(self) -> list[str]:
        return ["-m", self.program, *self.words]


class Forks(forks.Forks):
    """Starts daemons. The process that forks them comes with the first and ends with this one.
    ``module``: the program of that process; it runs :func:`main`, or changes a daemon and then runs
    it."""

    def __init__(self, module: str = "testbed.daemons.forks") -> None:
        super().__init__()
        self._module = module

    def start(
        self, words: list[str], log: Path, environment: dict[str, str], namespace: str = ""
    ) -> Forked:
        """Run ``tutti`` with these words in a network namespace ("": the one of this process); its
        output goes to ``log``. Raises OSError when the process that forks has ended."""
        return self.fork(Asked(words, environment, os.getcwd(), str(log), namespace), ())

    def talk(self, program: str, words: list[str], log: Path, namespace: str) -> Forked:
        """Run ``main(words)`` of the module ``program`` with text pipes to its standard input and
        output; its errors go to ``log``. Raises OSError when the process that forks has ended."""
        asked = Asked(words, dict(os.environ), os.getcwd(), str(log), namespace, program)
        reads, told = os.pipe()
        hears, says = os.pipe()
        try:
            process = self.fork(asked, (reads, says))
        except BaseException:  # also a Ctrl-C
            os.close(told)
            os.close(hears)
            raise
        finally:
            os.close(reads)
            os.close(says)
        process.stdin = os.fdopen(told, "w")
        process.stdout = os.fdopen(hears)
        return process

    def server_command(self, door: int) -> list[str]:
        return [sys.executable, "-m", self._module, str(door)]


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


def main() -> int:
    """Fork daemons until the process that asks for them ends. In a daemon: its exit code."""
    load_torch()
    askers, door = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        askers.close()
        return ask(door)
    door.close()
    # Only now: the part of a join that asks has libp2p, which cannot be loaded beside hivemind.
    load_daemon()
    try:
        asked = serve(socket.socket(fileno=int(sys.argv[1])), Asked)
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
