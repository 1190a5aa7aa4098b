"""Daemons on this machine as processes: children, for the demo and for a solo swarm that hosts
every stage itself; and a fresh image of a daemon that has changed its place."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import node
from node.config import MOVED, NodeConfig, config_document
from node.core import interrupts
from node.core.errors import (
    ExitCode,
    LocalFault,
    OutOfResources,
    Refused,
    TimedOut,
    UsageFault,
    writing,
)
from node.core.interrupts import held, raising
from node.transport import parent_watch

PROGRAM = str(Path(node.__file__).parents[1] / "tutti.py")
"""The file to start. Not ``-m``, which would first look for it in the working directory."""
PROGRAMS = ("tutti", "tutti.py", "cli.py")
"""Names of the files that start it: the installed command, and those in a checkout."""
FAULT = "tutti: "
"""Beginning of the fault that a daemon prints at its end."""
LAST_LINES = 100
"""Number of last lines of output that are searched for the fault."""
LAST_BYTES = 256 << 10
"""Bytes at the end of an output in which its last lines are looked for."""
LOG = "daemon.out"
"""Output of a daemon that has no terminal, in its home. The daemon bounds it: it has to be opened
for appending."""
LEAST_FREE = 1 << 20
"""Bytes that are free on a disk which is not full."""
QUIET_S = 2.0
"""Seconds of waiting for a daemon in the background before a line says so."""
LOOK_S = 0.1
"""Seconds between two looks at whether the daemon answers."""
START_S = 180.0
"""Longest wait for a daemon in the background, in seconds."""
PATIENCE_S = 85.0
"""A child that was asked to end and has not ended by then is killed. It writes a checkpoint first,
for at most :data:`node.app.peer.KEEP_S`."""
OWN_PORTS = {
    "transport.p2p_port": 0,
    "transport.grpc_port": 0,
    "transport.bypass_port": 0,
    "transport.announce": "",
}
"""Settings that daemons on one machine cannot share, whatever their environment says."""
OF_PARENT = {
    "availability.idle_only": 0,
    "availability.hours": "",
    "availability.max_load": 0,
    "tensorboard": "",
}
"""Settings of a parent alone, whatever their environment says: it stops its children when it
pauses, and writes the curves of the run."""
NOT_HANDED_ON = ("swarm", "data", "data_hosts", "tokenizer", "weights", "admission")
"""Settings of a parent that are none of its children's."""
BY_ENVIRONMENT = {"checkpoint.to": "TUTTI_CHECKPOINT_TO", "restore": "TUTTI_RESTORE"}
"""Settings that children get by these variables, because an address may hold a password and others
can read command lines."""


def for_child(config: NodeConfig, name: str, stage: int, join: str) -> dict[str, Any]:
    """Settings of a child that hosts a block stage: its parent's explicit ones, and its own."""
    said = config_document(config).items()
    apart = (*NOT_HANDED_ON, *BY_ENVIRONMENT)
    given = {k: one["value"] for k, one in said if one["source"] and k not in apart}
    own = {"name": name, "role": "stage", "stage": stage, "join": join, "threads": 1}
    # The parent reads the last words of a child that ends.
    return given | own | {"metrics_port": -1, "log_format": "text"} | OWN_PORTS | OF_PARENT


def environment_of_child(config: NodeConfig) -> dict[str, str]:
    """Variables with the settings of a parent that no command line may show."""
    said = config_document(config)
    return {variable: str(said[name]["value"]) for name, variable in BY_ENVIRONMENT.items()}


def as_flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as words of a command line."""
    said = {k: ",".join(v) if isinstance(v, list | tuple) else v for k, v in settings.items()}
    return tuple(w for name, value in said.items() for w in ("--set", f"{name}={value}"))


def tied(words: Sequence[str]) -> list[str]:
    """The command that runs ``tutti`` with these words, and ends with this process."""
    watch = (sys.executable, "-I", "-S", parent_watch.__file__, str(os.getpid()))
    return [*watch, sys.executable, PROGRAM, *words]


@dataclass
class Child:
    """One daemon: its home, its arguments, its process. ``through``: a command that runs the
    daemon, and keeps its pid."""

    label: str
    home: Path
    arguments: tuple[str, ...]
    through: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default=Path())
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its own, besides those of this process."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        if self.process is None:
            return 0
        return self.process.pid

    def start(self) -> None:
        """Run ``tutti start`` with this child's home. Its words go to ``daemon.out`` in that
        home."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log = self.home / LOG
        words = ["--home", str(self.home), *self.arguments]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", MOVED: "", **self.environment}
        self.process = self.launch(words, variables)

    def launch(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """A process that runs ``tutti`` with these words. It dies when its parent is killed, and a
        Ctrl-C reaches the parent alone, which ends its children in order."""
        command = [*self.through, *tied(words)]
        with self.log.open("ab") as out:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
            )

    def kill(self) -> None:
        """SIGKILL, as a crash would: no goodbye."""
        if self.running and self.process is not None:
            self.process.kill()
            self.process.wait()

    def tail(self, lines: int = 12) -> str:
        """The last words of a child that failed."""
        return tail(self.log, lines)


def ask_to_end(children: Sequence[Child]) -> None:
    """Ask all to end, and do not wait."""
    for child in children:
        if child.running and child.process is not None:
            child.process.send_signal(signal.SIGTERM)


def stop_all(children: Sequence[Child]) -> list[Child]:
    """Ask all to end, then wait; kill and return those that do not end in :data:`PATIENCE_S`."""
    killed: list[Child] = []
    ask_to_end(children)
    deadline = time.monotonic() + PATIENCE_S
    for child in children:
        if child.process is None:
            continue
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            killed.append(child)
    return killed


def tail(log: Path, lines: int) -> str:
    """The last lines of a file, in its last :data:`LAST_BYTES`; "" for one that cannot be read."""
    try:
        said = end_of(log, LAST_BYTES)
    except OSError:
        return ""
    return "\n".join(said.splitlines()[-lines:])


def end_of(path: Path, most: int) -> str:
    """The last whole lines of a file, ``most`` bytes at most. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        raw = file.read(most)
    if size > most:
        raw = raw.partition(b"\n")[2]
    return raw.decode("utf-8", "replace")


def in_background(words: Sequence[str], log: Path, answers: Callable[[int], bool]) -> int:
    """Start ``tutti`` with ``words`` in a session of its own, where no terminal reaches it, and
    return its process id as soon as the process of that id ``answers``. Its output goes to ``log``;
    the output of the start before is kept beside it, until the daemon begins ``log`` anew for its
    size.

    Raises the fault that it ended with, TimedOut, and Refused or OutOfResources for a ``log`` that
    cannot be written. A Ctrl-C meanwhile ends it.
    """
    step = f"make {log.parent} a directory that you may write, or choose another with --home"
    with writing(log, step, Refused):
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            os.replace(log, log.with_name(f"{log.name}.1"))
        out = log.open("ab")
    with held(), out:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            with raising():
                _wait_answer(process, log, answers)
        except KeyboardInterrupt:
            _end(process)
            print(f"the daemon, pid {process.pid}, was ended", file=sys.stderr)
    return process.pid


def _wait_answer(
    process: subprocess.Popen[bytes], log: Path, answers: Callable[[int], bool]
) -> None:
    begin = time.monotonic()
    told = False
    while not answers(process.pid):
        try:
            code = process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            raise last_words(log, code)
        passed = time.monotonic() - begin
        if passed > QUIET_S and not told:
            told = True
            print(f"waiting for the daemon, pid {process.pid}, to answer", file=sys.stderr)
        if passed > START_S:
            raise TimedOut(
                f"the daemon, pid {process.pid}, does not answer after {START_S:.0f} s",
                f"it goes on starting; its output is in {log}",
            )


def last_words(log: Path, code: int) -> LocalFault:
    """The fault that a daemon ended with, as it wrote it. On a full disk it could not."""
    said = tail(log, LAST_LINES).splitlines()
    if not said and _is_full(log.parent):
        return OutOfResources(
            f"the daemon ended with code {code}, and could not write why: the disk of {log.parent} "
            "is full",
            "free some space on that disk",
        )
    known = ExitCode.UNEXPECTED
    if code in set(ExitCode):
        known = ExitCode(code)
    begins = [at for at, line in enumerate(said) if line.startswith(FAULT)]
    if not begins:
        return LocalFault(f"the daemon ended with code {code}", f"its output is in {log}", known)
    what, *steps = said[begins[-1] :]
    step = "\n".join(line.strip() for line in steps)
    return LocalFault(what.removeprefix(FAULT), step or f"its output is in {log}", known)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < LEAST_FREE
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Started:
    """Arguments, working directory and settings (``TUTTI_*``) of a running daemon."""

    arguments: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    background: bool

    @classmethod
    def of(cls, pid: int) -> "Started":
        """Raises LocalFault where the system does not tell, or it cannot be started again."""
        import psutil

        try:
            process = psutil.Process(pid)
            arguments = arguments_of(process.cmdline())
            folder = Path(process.cwd())
            environment = process.environ()
            background = process.terminal() is None
        except (psutil.Error, OSError) as e:
            raise LocalFault(
                f"what the daemon, pid {pid}, was started with is not known: {e}",
                "stop it and start it again:  tutti stop ;  tutti start",
            ) from e
        if not folder.is_dir():
            raise UsageFault(
                f"the daemon, pid {pid}, runs in {folder}, which is gone",
                "stop it and start it in another directory:  tutti stop ;  tutti start",
            )
        settings = {k: v for k, v in environment.items() if k.startswith("TUTTI_") and k != MOVED}
        return cls(arguments, folder, settings, background)

    def enter(self) -> None:
        """Take over the working directory and the settings."""
        for name in [n for n in os.environ if n.startswith("TUTTI_")]:
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.folder)


def arguments_of(command: Sequence[str]) -> tuple[str, ...]:
    """Arguments of ``tutti`` in the command line of a process. Raises LocalFault if the process is
    another program."""
    for at, word in enumerate(command[1:], 1):
        program = command[at - 1] == "-m" or os.path.basename(word) in PROGRAMS
        if program and os.path.splitext(os.path.basename(word))[0] in ("tutti", "cli"):
            return tuple(command[at + 1 :])
    raise LocalFault(
        f"the daemon was not started by tutti: {shlex.join(command)[:200]}",
        "start it again as you started it",
    )


def again(stage: int | None, run_id: str) -> NoReturn:
    """Become this program anew, with the arguments it was started with, to host ``stage``; None: as
    these say. Where they name no run it is ``run_id``: the user may have joined another one since,
    for the next start. The process id, the identity, the ports, the parent that it ends with and
    the event file stay. Close everything before."""
    place = "-"
    if stage is not None:
        place = str(stage)
    os.environ[MOVED] = f"{place} {run_id}"
    become(sys.orig_argv[1:])


def become(words: Sequence[str]) -> NoReturn:
    """Replace this process by a Python that runs ``words``, the words of a daemon. A Ctrl-C or a
    SIGTERM meanwhile counts there."""
    sys.stdout.flush()
    sys.stderr.flush()
    interrupts.block(signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, *words])
