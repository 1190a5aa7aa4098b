"""A Ctrl-C at several moments of every verb: exit code 130, one line, nothing left behind."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.core.errors import ExitCode
from testbed.fakes.canned_window import CannedWindow
from tests.cli.conftest import ROOT, started

HARNESS = str(Path(__file__).with_name("interrupt_at.py"))
VERBS = (
    ("status",),
    ("peers",),
    ("cells",),
    ("ps",),
    ("ping", "b7Lq3d"),
    ("logs",),
    ("doctor", "net"),
    ("generate", "hello"),
    ("chat",),
    ("eval",),
    ("export", "out"),
    ("swarm", "init", "mine.toml", "--force"),
    ("swarm", "validate", "there.toml"),
    ("swarm", "inspect", "there.toml"),
    ("swarm", "revoke", "b7Lq3d"),
    ("id", "new"),
    ("config",),
    ("help",),
    ("join", "tutti2abcdefgh"),
)
MOMENTS = 4
"""Moments of each verb at which a Ctrl-C comes."""
ONE_LINE = "interrupted\n"
Run = tuple[int, str, str]


@pytest.fixture
def interrupted(tmp_path: Path) -> Callable[..., list[Run]]:
    """Exit code, stdout and stderr of a command line for each milestone (see the harness)."""
    folder = tmp_path / "harness"
    for path in (folder, tmp_path / "tmp"):
        path.mkdir()

    def run(milestones: list[Any], *words: str) -> list[Run]:
        done = subprocess.run(
            [sys.executable, HARNESS, folder, json.dumps(milestones), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()
        return [(code, out, err) for code, out, err in json.loads(done.stdout)]

    return run


def left(tmp_path: Path) -> list[Path]:
    """Files that are half done, and all that is left in the directory for temporary files."""
    hidden = [p for p in tmp_path.rglob(".*") if p.is_file()]
    return hidden + list((tmp_path / "tmp").iterdir())


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_verb_ends_in_order_at_any_moment(tmp_path, tutti, home, interrupted, words):
    tutti("swarm", "init", "there.toml", "--no-open").good()
    draw = random.Random(" ".join(words))
    shares = [draw.uniform(0, 0.98) for _ in range(MOMENTS)]
    (whole, *_), *runs = interrupted(shares, "--home", str(home), *words)
    assert whole in set(ExitCode) - {ExitCode.UNEXPECTED, ExitCode.INTERRUPTED}
    ended = [run for run in runs if run[0] == ExitCode.INTERRUPTED]
    # A later run has less to do where the first one has left something to use again.
    assert {code for code, _, _ in runs} <= {whole, ExitCode.INTERRUPTED}
    assert ended
    for _, _, complaint in ended:
        assert complaint.splitlines()[-1:] == ["interrupted"]
        assert not [w for w in ("Traceback", "ignored", "unexpected") if w in complaint], complaint
    assert not left(tmp_path)


@pytest.mark.parametrize(
    ("words", "milestones"),
    [
        (("start",), ["import torch._C", "import torch.nn.functional", "import uvloop"]),
        (("simulate", "--small"), ["import torch._C", "import node.sim.swarm"]),
    ],
    ids=lambda p: p[0],
)
def test_one_while_the_engines_are_loaded(tmp_path, home, interrupted, words, milestones):
    """Raised inside the loading of torch, it would abort the process."""
    for code, _, complaint in interrupted(milestones, "--home", str(home), *words):
        assert (code, complaint) == (ExitCode.INTERRUPTED, ONE_LINE)
    assert not left(tmp_path)


def test_a_demo_leaves_neither_daemons_nor_a_directory(tmp_path, interrupted):
    # A process that forks the daemons, and requests for the first and the second of them.
    milestones = [
        "subprocess.Popen:1",
        "tempfile.mkdtemp:1",
        "socket.sendmsg:1",
        "socket.sendmsg:2",
    ]
    for code, _, complaint in interrupted(milestones, "demo", "--stages", "1", "--replicas", "1"):
        assert (code, complaint.splitlines()[-1]) == (ExitCode.INTERRUPTED, "interrupted")
        assert "stopping every daemon" in complaint
        assert "Traceback" not in complaint
    assert not left(tmp_path)
    found = psutil.process_iter(["cmdline", "environ"])
    told = [
        f"{one.info['cmdline']} {one.info['environ']}" for one in found if one.pid != os.getpid()
    ]
    assert not [line for line in told if str(tmp_path) in line]


def never(window: CannedWindow) -> None:
    """Let the daemon say that it begins to drain, and drain for ever."""

    async def drain(timeout_s: float) -> None:
        window.journal.emit("daemon", "draining", "finishing the epoch under way")
        await window.stopped.wait()

    window.drain = drain


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("drain",), "the drain goes on;  tutti --home {home} stop  ends the daemon now\n"),
        (("stop",), "the daemon goes on stopping;  tutti --home {home} stop  waits for it again\n"),
    ],
    ids=lambda p: p[0],
)
def test_a_wait_for_the_daemon_says_what_goes_on(home, daemon, words, says):
    """Interrupted after its first line. The canned daemon is in this process, which does not
    end."""
    never(daemon)
    daemon.stop = lambda: None
    with started(home, *words) as process:
        assert process.stderr is not None
        assert process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().decode() == says.format(home=home)
    assert process.returncode == ExitCode.INTERRUPTED


@pytest.mark.parametrize("words", [("logs", "-f"), ("status", "--watch")], ids=" ".join)
def test_what_goes_on_for_ever_ends_with_one_line(home, daemon, words):
    daemon.journal.emit("training", "k", "something happens")
    with started(home, *words, environment={"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read().decode() == ONE_LINE
    assert process.returncode == ExitCode.INTERRUPTED
