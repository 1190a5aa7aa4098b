import asyncio
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cli
from node.config import NodeConfig
from node.control.diagnose import Diagnosis, Machine, verdict
from node.control.doctor import Checkup
from node.control.service import ControlService
from testbed.fakes.canned_window import CannedWindow

ROOT = Path(cli.__file__).parent


def started(
    home: Path,
    *words: str,
    program: Sequence[str] = (str(ROOT / "tutti.py"),),
    environment: Mapping[str, str] | None = None,
    **how: Any,
) -> subprocess.Popen[bytes]:
    """A command in a process of its own; both outputs are read unless `how` says otherwise."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, *program, "--home", str(home), *words],
        env={**os.environ, **(environment or {})},
        **(streams | how),
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def ours(home: Path) -> NodeConfig:
    """Configuration of this home."""
    return NodeConfig.load({"home": home}, {})


@dataclass
class Shown:
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str

    def good(self) -> str:
        """Return the command's stdout; fails unless it exited with 0."""
        assert self.returncode == 0, self.stderr
        return self.stdout


def refused(shown: Shown, code: int, *says: str) -> None:
    """One block on stderr: what failed and the next step, with all of these words in it."""
    assert shown.returncode == code, (shown.returncode, shown.stderr)
    what, *rest = shown.stderr.strip().splitlines()
    assert what.startswith("tutti: ")
    assert rest
    assert "Traceback" not in shown.stderr
    for word in says:
        assert word in shown.stderr, shown.stderr


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python process of its own and return its exit code and output."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(cli.__file__).parent,
        timeout=120,
    )


class Waits:
    """Double of :mod:`time` for a joiner that waits: the clock shows the sum of all pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses = list[float]()
        self.woken: Callable[[], None] = lambda: None
        """Called at the end of every pause."""

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def strftime(self, form: str) -> str:
        return "12:00:00"

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        self.woken()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """A joiner waits in virtual time."""
    made = Waits()
    monkeypatch.setattr("node.app.joining.time", made)
    return made


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Replace the look at the network: every command finds these findings and nothing else.

    Returns the list of requests, each (addresses, keyword arguments), which fills as commands ask.
    """

    def answers(*findings: Diagnosis) -> list[Any]:
        asked = []

        def examine(addresses: Sequence[str], **how: Any) -> Checkup:
            asked.append((addresses, how))
            return Checkup(Machine((), {}), findings, verdict(findings), 0.5)

        monkeypatch.setattr("node.app.joining.examine", examine)
        return asked

    return answers


@pytest.fixture
def tutti(
    home: Path,
    network: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Shown]:
    """Run a command line in its own home, without a terminal. In this process: starting Python each
    time takes longer.

    Nobody is asked over the network before joining: what asks cannot be loaded beside hivemind."""
    for name in [n for n in os.environ if n.startswith("TUTTI_")]:
        monkeypatch.delenv(name)
    # Not by --home, which all advice would repeat.
    monkeypatch.setenv("TUTTI_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(home.parent)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    network()

    def run(*words: str) -> Shown:
        capsys.readouterr()
        code = cli.main(words)
        return Shown(code, *capsys.readouterr())

    return run


@pytest.fixture
def daemon(home: Path) -> Iterator[CannedWindow]:
    """A canned daemon that listens in ``home`` from a thread with a loop of its own."""
    ready = threading.Event()
    made = []

    async def serve() -> None:
        window = CannedWindow()
        service = ControlService(
            window, NodeConfig.load({"home": str(home)}, {}).prepare_control_socket()
        )
        await service.start()
        made.append((window, asyncio.get_running_loop()))
        ready.set()
        await window.stopped.wait()
        await service.close(0.1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    window, loop = made[0]
    yield window
    if thread.is_alive():
        loop.call_soon_threadsafe(window.stopped.set)
    thread.join(10)
