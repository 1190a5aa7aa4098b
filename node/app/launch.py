"""Daemons on this machine as processes: children, for the demo and for a solo swarm that hosts
every stage itself, and a fresh image of one that has changed its place."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from node.config import MOVED, NodeConfig, config_document
from node.transport import parent_watch

PATIENCE_S = 85.0
"""A child that was asked to end and has not ended by then is killed. It writes a checkpoint first,
for at most :data:`node.app.peer.KEEP_S`."""
OWN_PORTS = {"transport.p2p_port": 0, "transport.grpc_port": 0, "transport.announce": ""}
"""Settings that daemons on one machine cannot share, whatever their environment says."""
NOT_HANDED_ON = ("swarm", "data", "tokenizer", "weights", "admission")
"""Settings of a parent that are none of its children's."""


def for_child(config: NodeConfig, name: str, stage: int, join: str) -> dict[str, Any]:
    """Settings of a child that hosts a block stage: what was set for its parent, and its own."""
    said = config_document(config).items()
    given = {k: one["value"] for k, one in said if one["source"] and k not in NOT_HANDED_ON}
    own = {"name": name, "role": "stage", "stage": stage, "join": join, "threads": 1}
    # The parent reads the last words of a child that ends.
    return given | own | {"metrics_port": -1, "log_format": "text"} | OWN_PORTS


def as_flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as words of a command line."""
    said = {k: ",".join(v) if isinstance(v, list | tuple) else v for k, v in settings.items()}
    return tuple(w for name, value in said.items() for w in ("--set", f"{name}={value}"))


@dataclass
class Child:
    """One daemon: its home, what it was started with, the process. ``through``: a command that runs
    it, and keeps its pid."""

    label: str
    home: Path
    arguments: tuple[str, ...]
    through: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default=Path())

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def start(self) -> None:
        """Run ``tutti start`` with this child's home. Its words go to ``daemon.out`` in that
        home."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log = self.home / "daemon.out"
        words = ["--home", str(self.home), *self.arguments]
        self.process = self.launch(words, {**os.environ, "PYTHONUNBUFFERED": "1", MOVED: ""})

    def launch(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """A process that runs ``tutti`` with these words. It dies when its parent is killed, and a
        Ctrl-C reaches the parent alone, which ends its children in order."""
        watch = (sys.executable, "-I", "-S", parent_watch.__file__, str(os.getpid()))
        command = [*self.through, *watch, sys.executable, "-m", "cli", *words]
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
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


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


def again(stage: int | None) -> NoReturn:
    """Become this program anew, with the arguments it was started with, to host ``stage``; None: as
    these say. The process id, the identity, the ports, the parent that it ends with and the event
    file stay. Close everything before."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[MOVED] = "-" if stage is None else str(stage)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
