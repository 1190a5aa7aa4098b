"""Whole daemons as processes on this machine: real p2pd, real TLS, a model so small that an epoch takes a fraction of a second."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from node.config import NodeConfig
from node.control.client import ControlClient
from node.core.errors import LocalFault, NotRunning
from node.identity.keys import Identity
from node.launch import Child
from node.manifest import Manifest, amended
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import Snapshot

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 90.0
"""Bound of every wait for daemons that start: each loads torch and hivemind, several at once, on two busy cores."""
MOVE_S = 60.0
"""Bound of every wait for a swarm that should go on."""
TINY: dict[str, Any] = {
    "model.layers": 2, "model.d_model": 32, "model.heads": 2, "model.kv_heads": 1, "model.d_ff": 64, "model.seq_len": 32,
    "pipeline.stages": 2, "pipeline.micro_batch": 4, "training.target_batch": 16, "training.eval_every": 5,
    "training.eval_batches": 2, "training.min_replicas": 2, "optimizer.warmup": 2, "data.source": "synthetic:7",
}  # fmt: skip


@dataclass
class Peer:
    """One daemon: its home, its words, its control window."""

    label: str
    home: Path
    child: Child
    _client: ControlClient | None = None
    _client_pid: int = 0

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def running(self) -> bool:
        return self.child.running

    @property
    def key(self) -> str:
        return Identity.load(self.home / "identity.key").peer_id

    def start(self) -> Peer:
        # Not nice: these tests have bounds, and the machine may be busy.
        with pytest.MonkeyPatch.context() as m:
            for name, value in {"TUTTI_NICE": "0", "TUTTI_DIRECTORY_REFRESH_S": "1"}.items():
                m.setenv(name, value)
            self.child.start()
        return self

    def client(self) -> ControlClient:
        """Its control window. Raises NotRunning."""
        if self._client is None or self._client_pid != self.pid:
            self.close()
            self._client, self._client_pid = ControlClient(self.config.control_socket, 10.0), self.pid
        return self._client

    @property
    def config(self) -> NodeConfig:
        return NodeConfig.load({"home": str(self.home)}, {})

    def status(self) -> Snapshot:
        """Its snapshot; an empty one while it cannot be asked."""
        try:
            return self.client().status()
        except LocalFault:
            self.close()
            return Snapshot()

    def peers(self) -> PeersAnswer:
        return self.client().peers(everybody=True)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.child.kill()
        self.close()

    def end(self, seconds: float = 30.0) -> int:
        """SIGTERM; its exit code."""
        assert self.child.process is not None
        self.child.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 30.0) -> int:
        assert self.child.process is not None
        code = self.child.process.wait(seconds)
        self.close()
        return code

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What its event file tells, oldest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.home / "log" / "events.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if not kind or event["kind"] == kind:
                        found.append(event)
        return found

    def said(self) -> str:
        with contextlib.suppress(OSError):
            return (self.home / "daemon.out").read_text(errors="replace")
        return ""

    def p2pd(self) -> psutil.Process | None:
        """The p2p daemon that is its child; None while there is none."""
        found = [p for p in psutil.Process(self.pid).children() if p.name() == "p2pd"]
        assert len(found) <= 1, f"{self.label} has {len(found)} p2pd"
        return found[0] if found else None


@dataclass
class Box:
    """A directory of homes and every process that was started in it."""

    root: Path
    made: dict[str, Peer] = field(default_factory=dict)
    manifest: Manifest = field(default_factory=Manifest.default_demo)
    port: int = 0

    # ------------------------------------------------------------ making

    def swarm(self, nodes: tuple[int, ...], **changes: Any) -> list[Peer]:
        """Peers of a new swarm, not started: ``nodes`` of the ends, then of each block stage."""
        chief = Identity.load_or_create(self.root / "ends-0" / "identity.key")
        self.manifest = Manifest.parse(signed(chief, changes))
        (self.root / "swarm.toml").write_bytes(self.manifest.to_toml())
        self.port = free_port()
        return [self.member(stage, str(i)) for stage, count in enumerate(nodes) for i in range(count)]

    def member(self, stage: int, number: str, *more: str) -> Peer:
        """One more daemon of the swarm, not started yet."""
        label = f"stage-{stage}-{number}" if stage else f"ends-{number}"
        role = ("--role", "stage", "--stage", str(stage)) if stage else ("--role", "ends")
        where = ("--p2p-port", str(self.port)) if label == "ends-0" else ("--join", self.door)
        return self.peer(label, "start", str(self.root / "swarm.toml"), *role, *where, *more)

    def peer(self, label: str, *words: str) -> Peer:
        """A daemon started by ``tutti`` and these words, not started yet."""
        if words[0] == "start":
            words = (*words, "--listen", "127.0.0.1", "--threads", "1", "--name", label, "--set", "checkpoint.every=5")
        return self.bare(label, *words)

    def bare(self, label: str, *words: str) -> Peer:
        """A daemon started with these words and nothing else."""
        home = self.root / label
        found = self.made[label] = Peer(label, home, Child(label, home, words))
        return found

    @property
    def door(self) -> str:
        """The multiaddr of the first ends peer."""
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.manifest.swarm.owner}"

    def tutti(
        self, *words: str, home: Path | str = "nobody", timeout: float = 60.0, **extra: str
    ) -> subprocess.CompletedProcess:
        """The command line, in a process of its own."""
        command = [sys.executable, "-m", "cli", "--home", str(self.root / home), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **extra},
        )  # fmt: skip

    # ------------------------------------------------------------ watching

    @property
    def live(self) -> list[Peer]:
        return [p for p in self.made.values() if p.running]

    def wait(self, what: str, condition: Callable[[], T], seconds: float = MOVE_S, must_run: tuple[Peer, ...] = ()) -> T:
        """The first true value of ``condition()``; fails after ``seconds``, and at once when one of ``must_run`` ends."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            for peer in must_run:
                assert peer.running, f"{peer.label} ended while waiting for {what}"
            assert time.monotonic() < deadline, f"{what}: not in {seconds:.0f} s"
            time.sleep(0.1)
        return value

    def start(self, *peers: Peer) -> None:
        """Start these together and wait until all take part in the epochs."""
        for peer in peers:
            peer.start()
        self.until_training(*peers)

    def until_training(self, *peers: Peer) -> None:
        for peer in peers:
            self.wait(
                f"{peer.label} in a plan",
                lambda p=peer: p.status().state in ("training", "finished"),
                START_S,
                must_run=(peer,),
            )

    def epoch(self) -> int:
        """Of whoever is furthest."""
        return max((p.status().epoch for p in self.live), default=0)

    def goes_on(self, epochs: int = 3, seconds: float = MOVE_S) -> int:
        """Wait until ``epochs`` more are committed; the epoch then."""
        begin = self.epoch()
        return self.wait(f"epoch {begin + epochs}", lambda: (now := self.epoch()) >= begin + epochs and now, seconds)

    def digests_equal(self) -> None:
        """Wait until two replicas of every stage say the same digest at one epoch, and fail when any two ever differ."""
        seen: dict[tuple[int, int], dict[str, str]] = {}
        cells = {
            stage: [p for p in self.live if p.status().stage == stage] for stage in range(self.manifest.pipeline.stages + 1)
        }

        def compared() -> bool:
            for peer in self.live:
                s = peer.status()
                if s.digest and s.state in ("training", "finished", "ready"):
                    seen.setdefault((s.stage, s.epoch), {})[peer.label] = s.digest
            for (stage, epoch), said in seen.items():
                # At the very end of an epoch some have the next version in place and some do not, but versions have numbers.
                assert len(set(said.values())) == 1, f"stage {stage}, epoch {epoch}: {said}"
            met = {stage for (stage, _), said in seen.items() if len(said) > 1}
            return met >= {stage for stage, peers in cells.items() if len(peers) > 1}

        self.wait("replicas to be compared", compared)
        assert not any(p.status().digest_mismatches for p in self.live)

    def story(self) -> str:
        """The last words and events of every daemon."""
        parts = []
        for peer in self.made.values():
            code = peer.child.process.poll() if peer.child.process else "never started"
            parts.append(f"==== {peer.label} (exit {code})\n{peer.child.tail(25)}")
            for e in peer.events()[-25:]:
                moment = time.strftime("%H:%M:%S", time.localtime(e["at"]))
                parts.append(
                    f"  {moment}.{int(e['at'] % 1 * 1000):03d} {e['level']:7} {e['room']}/{e['kind']}: {e['text'][:200]}"
                )
        return "\n".join(parts)

    # ------------------------------------------------------------ ending

    def family(self) -> list[psutil.Process]:
        """Every running daemon and its descendants."""
        found = []
        for peer in self.live:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(peer.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def stop_all(self, seconds: float = 30.0) -> dict[str, int]:
        """SIGTERM to all at once; their exit codes."""
        peers = self.live
        for peer in peers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer.pid, signal.SIGTERM)
        return {peer.label: peer.wait(seconds) for peer in peers}

    def clean_up(self) -> None:
        """Nothing that was started here outlives the test, whatever happened in it."""
        family = self.family()
        for peer in self.live:
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer.pid, signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=10.0)
        for process in left:
            print("still there:", process, file=sys.stderr)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5.0)
        for peer in self.made.values():
            peer.close()


def signed(chief: Identity, changes: Mapping[str, Any]) -> bytes:
    """The tiny swarm's manifest with these fields changed."""
    fields = {key.replace("__", "."): value for key, value in changes.items()}
    return amended(Manifest.default_demo().owned_by(chief.peer_id), {**TINY, **fields}).sign(chief)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fault_block(done: subprocess.CompletedProcess) -> tuple[str, list[str]]:
    """The error a command ended with: what failed, and the lines below it. Fails unless it is one clear block."""
    lines = done.stderr.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("tutti: ")]
    assert len(heads) == 1, f"not one block:\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    block = lines[heads[0] :]
    rest = [line for line in block[1:] if line.startswith("  ")]
    assert rest, f"no next step:\n{done.stderr}"
    return block[0].removeprefix("tutti: "), [line.strip() for line in rest]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """An empty box; its processes end with the module."""
    made = Box(tmp_path_factory.mktemp("swarm"))
    yield made
    made.clean_up()


@pytest.fixture(scope="module")
def fault() -> Callable[[subprocess.CompletedProcess], tuple[str, list[str]]]:
    return fault_block


@pytest.fixture(scope="module")
def sign() -> Callable[[Identity, Mapping[str, Any]], bytes]:
    return signed


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that failed shows what its daemons said."""
    outcome = yield
    report = outcome.get_result()
    found = getattr(item, "funcargs", {}).get("box")
    if report.failed and isinstance(found, Box):
        report.sections.append(("daemons", found.story()))


__all__ = ["Box", "NotRunning", "Peer"]
