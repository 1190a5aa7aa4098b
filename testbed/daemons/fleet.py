"""Whole daemons as processes: real p2pd, real TLS, on this machine's loopback or on the hosts of a
:class:`Wan`.

A :class:`Peer` is one daemon with its home, its words and its control window; a :class:`Box` is a
directory of homes and everything that was started in it. The model is so small that an epoch takes
about a second.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from node.app.launch import Child
from node.config import NodeConfig
from node.control.client import ControlClient
from node.control.text import compare_digests
from node.core.errors import LocalFault
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.reach.interfaces import free_port
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import Snapshot
from testbed.daemons.forks import ForkedChild, Forks
from testbed.daemons.told import Told, read_told

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 90.0
"""Bound of every wait for daemons that start: each loads torch and hivemind, several at once, on
two busy cores."""
MOVE_S = 60.0
"""Bound of every wait for a swarm that should go on."""
TINY: dict[str, Any] = {
    "model.layers": 2,
    "model.d_model": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.d_ff": 64,
    "model.seq_len": 32,
    "pipeline.stages": 2,
    "pipeline.micro_batch": 4,
    "training.target_batch": 16,
    "training.eval_every": 5,
    "training.eval_batches": 2,
    "training.min_replicas": 2,
    "optimizer.warmup": 2,
    "data.source": "synthetic:7",
}
HASTE = {"TUTTI_NICE": "0", "TUTTI_DIRECTORY_REFRESH_S": "1"}
"""Environment of every daemon: normal niceness, since the waits have bounds, and a quick
directory."""
WORKING = ("training", "finished")


class Hang(AssertionError):
    """Something that was waited for did not come in time."""


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that is removed afterwards."""
    made = Path(tempfile.mkdtemp(prefix="tutti-bench-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@dataclass(frozen=True)
class Host:
    """Where a daemon runs: the address it listens at ("": where it does by default), and the
    command that runs another there."""

    address: str = "127.0.0.1"
    through: tuple[str, ...] = ()


@dataclass
class Peer:
    """One daemon: its home, its words, its control window."""

    label: str
    home: Path
    child: Child
    environment: Mapping[str, str] = field(default_factory=dict)
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

    def start(self) -> "Peer":
        """Run it, again if need be. Does not wait."""
        mine = {**HASTE, **self.environment}
        before = {name: os.environ.get(name) for name in mine}
        os.environ.update(mine)
        try:
            self.child.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        return self

    def client(self) -> ControlClient:
        """Its control window. Raises NotRunning."""
        if self._client is None or self._client_pid != self.pid:
            self.close()
            self._client, self._client_pid = (
                ControlClient(self.config.control_socket, 10.0),
                self.pid,
            )
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
        """SIGTERM; its exit code. Raises Hang if it has not ended after ``seconds``."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 30.0) -> int:
        """Its exit code, once it has ended. Raises Hang if it has not after ``seconds``."""
        if self.child.process is None:
            raise ValueError(f"{self.label} was never started")
        try:
            code = self.child.process.wait(seconds)
        except subprocess.TimeoutExpired as e:
            raise Hang(f"{self.label} has not ended in {seconds:.0f} s") from e
        self.close()
        return code

    def signal(self, number: int, *, family: bool = False) -> None:
        """Send a signal to the daemon, and with `family` to its child processes too; a process that
        has gone is skipped."""
        if not self.running:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for one in [process, *(process.children(recursive=True) if family else ())]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Events of its event file, oldest first."""
        return [told.raw for told in self.told() if not kind or told.kind == kind]

    def told(self) -> list[Told]:
        return read_told(self.label, self.events_path)

    @property
    def events_path(self) -> Path:
        return self.home / "log" / "events.jsonl"

    def said(self) -> str:
        with contextlib.suppress(OSError):
            return (self.home / "daemon.out").read_text(errors="replace")
        return ""

    def p2pd(self) -> psutil.Process | None:
        """The p2p daemon that is its child; None while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [p for p in psutil.Process(self.pid).children() if p.name() == "p2pd"]
            if len(found) > 1:
                raise Hang(f"{self.label} has {len(found)} p2pd")
            return found[0] if found else None
        return None


@dataclass
class Box:
    """A directory of homes and every process that was started in it. ``hosts``: where the peers of
    :meth:`swarm` run; ``forks``: the process that starts them there, unless they run through a
    command that does more than to enter a network namespace."""

    root: Path
    hosts: tuple[Host, ...] = ()
    settings: tuple[str, ...] = ("checkpoint.every=5",)
    made: dict[str, Peer] = field(default_factory=dict)
    manifest: Manifest = field(default_factory=Manifest.default_demo)
    forks: Forks | None = None
    doors: dict[str, str] = field(default_factory=dict)
    """The multiaddr of every ends peer of the swarm, by its label."""
    _where: dict[str, Host] = field(default_factory=dict)

    # ----------------------------------------------------------- making

    def swarm(self, nodes: tuple[int, ...], **changes: Any) -> list[Peer]:
        """Peers of a new swarm, not started: ``nodes`` of the ends, then of each block stage."""
        labels = [named(stage, str(i)) for stage, count in enumerate(nodes) for i in range(count)]
        self.place(labels)
        for label in labels[: nodes[0]]:
            key = Identity.load_or_create(self.root / label / "identity.key").peer_id
            self.doors[label] = (
                f"/ip4/{self.host(label).address}/tcp/{free_port(['127.0.0.1'])}/p2p/{key}"
            )
        chief = Identity.load(self.root / labels[0] / "identity.key")
        self.manifest = Manifest.parse(signed(chief, changes))
        (self.root / "swarm.toml").write_bytes(self.manifest.to_toml())
        return [
            self.member(stage, str(i)) for stage, count in enumerate(nodes) for i in range(count)
        ]

    def member(self, stage: int, number: str, *more: str) -> Peer:
        """One more daemon of the swarm, not started yet."""
        label = named(stage, number)
        role = ("--role", "stage", "--stage", str(stage)) if stage else ("--role", "ends")
        where = [
            word
            for other, door in self.doors.items()
            if other != label
            for word in ("--join", door)
        ]
        if label in self.doors:
            where += ["--p2p-port", self.doors[label].split("/")[4]]
        return self.peer(label, "start", str(self.root / "swarm.toml"), *role, *where, *more)

    def newcomer(self, label: str, giver: Peer, *words: str) -> Peer:
        """A stranger with an identity of its own that joins by an invite of ``giver``, not started
        yet."""
        return self.newcomers([label], giver, *words)[0]

    def newcomers(self, labels: Sequence[str], giver: Peer, *words: str) -> list[Peer]:
        """Strangers that join by one invite of ``giver``, not started yet."""
        invite = self.invite(giver)
        return [self.invited(label, invite, *words) for label in labels]

    def invite(self, giver: Peer) -> str:
        """An invite of ``giver``, for any number of strangers. Raises Hang."""
        made = self.tutti("swarm", "invite", home=giver.home)
        if made.returncode:
            raise Hang(f"no invite from {giver.label}: {made.stderr}")
        return made.stdout.strip()

    def invited(self, label: str, invite: str, *words: str) -> Peer:
        """A stranger with an identity of its own that joins by an invite, not started yet."""
        more = ("--name", label, *words, *self._set("threads=1"))
        return self.bare(label, "join", invite, "--yes", *more)

    def peer(self, label: str, *words: str) -> Peer:
        """A daemon started by ``tutti`` and these words, not started yet."""
        if words[0] == "start":
            words = (*words, "--threads", "1", "--name", label, *self._set())
        return self.bare(label, *words)

    def bare(self, label: str, *words: str) -> Peer:
        """A daemon started with these words and nothing else."""
        home = self.root / label
        host = self.host(label)
        # A daemon's measurements of the machine are kept for this box alone.
        where = {"XDG_CACHE_HOME": str(self.root / "cache")} | (
            {"TUTTI_LISTEN": host.address} if host.address else {}
        )
        child = self.child(label, words, host.through)
        found = self.made[label] = Peer(label, home, child, where)
        return found

    def child(self, label: str, words: tuple[str, ...], through: tuple[str, ...] = ()) -> Child:
        """The process of a daemon, not started yet; forked if this box has :attr:`forks`."""
        home = self.root / label
        if self.forks is None:
            return Child(label, home, words, through)
        return ForkedChild(label, home, words, through, forks=self.forks)

    def place(self, labels: Sequence[str]) -> None:
        """The peers of these labels run on :attr:`hosts`, in order."""
        self._where = dict(zip(labels, self.hosts, strict=False))

    def move(self, label: str, host: Host) -> None:
        """The peer of this label, made after this call, runs on ``host``."""
        self._where[label] = host

    def host(self, label: str) -> Host:
        return self._where.get(label, Host())

    def _set(self, *more: str) -> tuple[str, ...]:
        return tuple(word for setting in (*self.settings, *more) for word in ("--set", setting))

    @property
    def door(self) -> str:
        """The multiaddr of the first ends peer."""
        return next(iter(self.doors.values()))

    def tutti(
        self, *words: str, home: Path | str = "nobody", timeout: float = 60.0, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """The command line, in a process of its own. Raises Hang if it has not ended after
        ``timeout`` seconds."""
        command = [sys.executable, "-m", "cli", "--home", str(self.root / home), *words]
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **extra},
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise Hang(f"tutti {' '.join(words)} has not ended in {timeout:.0f} s") from e

    # ----------------------------------------------------------- watching

    @property
    def live(self) -> list[Peer]:
        return [p for p in self.made.values() if p.running]

    def wait(
        self,
        what: str,
        condition: Callable[[], T | None],
        seconds: float = MOVE_S,
        must_run: tuple[Peer, ...] = (),
        every: float = 0.1,
    ) -> T:
        """Return the first true value of `condition()`, which is called every `every` seconds.
        Raises Hang after `seconds`, and at once when one of `must_run` ends."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            for peer in must_run:
                if not peer.running:
                    raise Hang(f"{peer.label} ended while waiting for {what}")
            if time.monotonic() >= deadline:
                raise Hang(f"{what}: not in {seconds:.0f} s")
            time.sleep(every)
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
                lambda p=peer: p.status().state in WORKING,
                START_S,
                must_run=(peer,),
            )

    def epoch(self) -> int:
        """Of whoever is furthest."""
        return max((p.status().epoch for p in self.live), default=0)

    def goes_on(self, epochs: int = 3, seconds: float = MOVE_S) -> int:
        """Wait until ``epochs`` more are committed; the epoch then."""
        begin = self.epoch()
        return self.wait(
            f"epoch {begin + epochs}",
            lambda: (now := self.epoch()) >= begin + epochs and now,
            seconds,
        )

    def digests_equal(self) -> None:
        """Wait until two replicas of every stage that has two say the same digest at one epoch, and
        fail when any two ever differ. Peers may change their stages meanwhile."""
        seen: dict[tuple[int, int], dict[str, str]] = {}

        def compared() -> bool:
            replicas = Counter[int]()
            for peer in self.live:
                s = peer.status()
                replicas[s.stage] += 1
                if s.digest and s.state in (*WORKING, "ready"):
                    seen.setdefault((s.stage, s.epoch), {})[peer.label] = s.digest
            for (stage, epoch), said in seen.items():
                # At the very end of an epoch some have the next version in place and some do not,
                # but versions have numbers.
                if len(set(said.values())) > 1:
                    raise Hang(f"replicas differ: stage {stage}, epoch {epoch}: {said}")
            met = {stage for (stage, _), said in seen.items() if len(said) > 1}
            return met >= {stage for stage, count in replicas.items() if count > 1}

        self.wait("replicas to be compared", compared)
        if found := [p.label for p in self.live if p.status().digest_mismatches]:
            raise Hang(f"digests differed at some time, say {found}")

    def agree(self, seconds: float = MOVE_S, of: Sequence[Peer] | None = None) -> bool:
        """Return True if all live replicas (or these) of every stage come to report one digest at
        one epoch, however they differed before.

        A stage with one replica has nothing to compare and agrees with itself.
        """
        peers = list(self.live if of is None else of)
        deadline = time.monotonic() + seconds
        met = set[int]()
        while time.monotonic() < deadline:
            now = [s for p in peers if (s := p.status()).state in WORKING]
            cells = {
                stage: [s for s in now if s.stage == stage]
                for stage in range(self.manifest.pipeline.stages + 1)
            }
            for stage, said in cells.items():
                compared, unequal = compare_digests(said)
                alone = len(said) == 1
                if (
                    not unequal
                    and (alone or compared == len(said) > 0)
                    and len({s.epoch for s in said}) == 1
                ):
                    met.add(stage)
            if len(now) == len(peers) and met == cells.keys():
                return True
            time.sleep(0.05)
        return False

    def story(self) -> str:
        """The last words and events of every daemon."""
        parts = []
        for peer in self.made.values():
            code = peer.child.process.poll() if peer.child.process else "never started"
            parts.append(f"==== {peer.label} (exit {code})\n{peer.child.tail(25)}")
            parts += [f"  {told}" for told in peer.told()[-25:]]
        return "\n".join(parts)

    # ----------------------------------------------------------- ending

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
            peer.signal(signal.SIGTERM)
        return {peer.label: peer.wait(seconds) for peer in peers}

    def clean_up(self) -> None:
        """Nothing that was started here outlives the box, whatever happened in it."""
        family = self.family()
        for peer in self.live:
            peer.signal(signal.SIGCONT, family=True)
            peer.signal(signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=10.0)
        for process in left:
            print("still there:", process, file=sys.stderr)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5.0)
        for peer in self.made.values():
            peer.close()


def named(stage: int, number: str) -> str:
    """The label of a member."""
    return f"stage-{stage}-{number}" if stage else f"ends-{number}"


def signed(chief: Identity, changes: Mapping[str, Any]) -> bytes:
    """The tiny swarm's manifest with these fields changed."""
    fields = {key.replace("__", "."): value for key, value in changes.items()}
    return amended(Manifest.default_demo().owned_by(chief.peer_id), {**TINY, **fields}).sign(chief)
