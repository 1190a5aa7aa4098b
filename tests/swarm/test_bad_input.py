"""Mistakes of people: each ends with its exit code and one clear block, and costs nothing on the
disk."""

import hashlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from node.identity.keys import Identity
from testbed.daemons.fleet import Box

pytestmark = pytest.mark.swarm
Run = Callable[[Box, Path, Sequence[str]], CompletedProcess[str]]


@pytest.fixture(scope="module")
def swarm(box):
    """A signed manifest and its owner's home; nothing runs."""
    box.swarm((1,))
    return box


@pytest.fixture
def owner(swarm, request) -> Path:
    """A home of its own with the owner's key and some data that must survive."""
    home = swarm.root / f"home-{len(list(swarm.root.iterdir()))}"
    home.mkdir(mode=0o700)
    key = home / "identity.key"
    key.write_bytes((swarm.root / "ends-0" / "identity.key").read_bytes())
    key.chmod(0o600)
    (home / "swarms").mkdir()
    (home / "swarms" / "kept").write_text("an old run")
    return home


def manifest(swarm, sign, **changes) -> Path:
    raw = sign(Identity.load(swarm.root / "ends-0" / "identity.key"), changes)
    path = swarm.root / f"{hashlib.sha256(raw).hexdigest()[:8]}.toml"
    path.write_bytes(raw)
    return path


def command(swarm, home: Path, words: Sequence[str]) -> CompletedProcess[str]:
    """Run a command as a person does."""
    return swarm.tutti(*words, home=home, timeout=90.0, TUTTI_NICE="0")


def forked(swarm, home: Path, words: Sequence[str]) -> CompletedProcess[str]:
    """Run a daemon to its end; `stderr` has all of its output."""
    peer = swarm.bare(home.name, *words)
    peer.environment = {**peer.environment, "NO_COLOR": "1", "COLUMNS": "200"}
    return CompletedProcess(words, peer.start().wait(90.0), "", peer.said())


def refused(swarm, fault, home: Path, code: int, *words: str, run: Run = forked) -> tuple[str, str]:
    """Run a command that must end with `code` and one block, and leave key and data as they were.
    Returns (failure, next steps)."""
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()} if home.is_dir() else {}
    done = run(swarm, home, words)
    assert done.returncode == code, (done.returncode, done.stderr)
    what, rest = fault(done)
    for path, content in before.items():
        assert path.read_bytes() == content, path
    assert not (home / "ctl.sock").exists()
    return what, " ".join(rest)


# ----------------------------------------------------------- found before anything heavy is loaded


def test_a_torn_key_is_refused_and_left_alone(swarm, owner, fault):
    key = owner / "identity.key"
    key.write_bytes(key.read_bytes()[:20])
    start = ("start", str(swarm.root / "swarm.toml"))
    what, rest = refused(swarm, fault, owner, 5, *start, run=command)
    assert "identity" in what
    assert rest


def test_a_home_that_cannot_be_made(swarm, fault):
    (swarm.root / "a-file").write_text("in the way")
    start = ("start", str(swarm.root / "swarm.toml"))
    what, rest = refused(swarm, fault, swarm.root / "a-file" / "home", 5, *start, run=command)
    assert "a-file" in what
    assert rest


# ----------------------------------------------------------- found by the daemon, which is forked


@pytest.mark.parametrize("flag", ["--p2p-port", "--grpc-port", "--metrics-port"])
def test_a_port_that_is_taken(swarm, owner, fault, flag: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        what, rest = refused(
            swarm, fault, owner, 4, "start", str(swarm.root / "swarm.toml"), flag, str(port)
        )
    assert str(port) in what
    assert rest


def test_data_that_is_not_there(swarm, owner, fault, sign):
    gone = manifest(swarm, sign, data__source=f"file:{swarm.root}/gone.txt")
    what, rest = refused(swarm, fault, owner, 2, "start", str(gone), "--role", "ends")
    assert "gone.txt" in what
    assert rest


def test_data_that_is_other_data(swarm, owner, fault, sign):
    text = swarm.root / "text.txt"
    text.write_text("the quick brown fox " * 1000)
    other = manifest(swarm, sign, data__source=f"file:{text}", data__sha256="0" * 64)
    what, rest = refused(swarm, fault, owner, 5, "start", str(other), "--role", "ends")
    assert hashlib.sha256(text.read_bytes()).hexdigest()[:16] in what
    assert "block stage" in rest
