"""The daemons of a demo: their homes, their command lines, their latest snapshots."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.app.demo.forks import ForkedChild, Forks
from node.app.launch import OWN_PORTS, Child, as_flags
from node.control.client import ControlClient
from node.core.errors import LocalFault, UsageFault
from node.core.home import control_socket
from node.core.ids import ENDS
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.reach.interfaces import free_port
from protos.control_pb2 import Snapshot

SETTINGS = {
    "training.epochs": 150,
    "training.target_batch": 64,
    "optimizer.decay": 0.5,
    "optimizer.floor": 0.0,
}
"""Changes of the manifest's defaults for a run of two minutes: more and smaller steps, and a rate
that falls to nothing. One process on the same samples is at 1.22 nats per byte after 1.3 M tokens
with them, and at 1.57 with steps twice as large at twice the rate (docs/benchmarks/history.md)."""

ChildMaker = Callable[[str, Path, tuple[str, ...]], Child]
"""Makes a daemon of a label, a home and words; does not start it."""


@dataclass(frozen=True)
class DemoOptions:
    """``nodes``: peers of the ends, then of each block stage. ``epochs`` 0: the manifest's;
    ``seconds`` 0: no limit. With ``kill`` it lasts until the replacement is in a plan, at most
    :data:`node.app.demo.play.START_S` after the kill.

    ``rendezvous``: everybody meets at a peer that holds no part of the model, as in
    docker-compose.yml. ``page``: auto (in a browser, where there is one), always (the page is
    served, and its address said), never.
    """

    nodes: tuple[int, ...] = (1, 2, 2, 2)
    kill: bool = False
    json: bool = False
    epochs: int = 0
    seconds: float = 0.0
    home: Path | None = None
    keep: bool = False
    manifest: Manifest | None = None
    sample: bool = True
    rendezvous: bool = False
    page: str = "never"


def spread(ends: int, stages: int, replicas: int, peers: int) -> tuple[int, ...]:
    """Peers of the ends and of each block stage: ``replicas`` of each, or ``peers`` in all. Raises
    UsageFault for too few."""
    if not peers:
        return (ends, *([replicas] * stages))
    each, more = divmod(peers - ends, stages)
    if each < 1:
        raise UsageFault(
            f"{peers} peers are too few",
            f"{ends} at the ends and one for each of {stages} block stages",
        )
    return (ends, *(each + (i < more) for i in range(stages)))


@contextlib.contextmanager
def child_maker() -> Iterator[ChildMaker]:
    """Makes daemons that share one loading of the program, where the system can. Seven daemons load
    torch for ten seconds of two cores else, and the picture is empty meanwhile."""
    if sys.platform != "linux":
        yield Child
        return
    forks = Forks()
    try:
        forks.load()
        yield partial(ForkedChild, forks=forks)
    finally:
        forks.close()


class DemoSwarm:
    """The daemons of one demo and their latest snapshots. ``make``: :func:`child_maker`."""

    def __init__(self, home: Path, options: DemoOptions, make: ChildMaker = Child) -> None:
        self.home = home
        self.options = options
        self._make = make
        chief = Identity.load_or_create(home / "ends-0" / "identity.key")
        base = options.manifest or amended(Manifest.default_demo(), SETTINGS)
        changes = {
            "training.min_replicas": min(options.nodes[1:]),
            "training.epochs": options.epochs or base.training.epochs,
            "pipeline.stages": len(options.nodes) - 1,
        }
        self.manifest = Manifest.parse(amended(base, changes).sign(chief))
        self.swarm_toml = home / "swarm.toml"
        self.swarm_toml.write_bytes(self.manifest.to_toml())
        self._port = free_port(["127.0.0.1"])
        host = chief
        if options.rendezvous:
            host = Identity.load_or_create(home / "rendezvous" / "identity.key")
        self.join = f"/ip4/127.0.0.1/tcp/{self._port}/p2p/{host.peer_id}"
        self.children: list[Child] = []
        self.snapshots: dict[str, Snapshot] = {}
        if options.rendezvous:
            meet = (
                "bootstrap",
                "--listen",
                "127.0.0.1",
                "--swarm",
                str(self.swarm_toml),
                *as_flags(OWN_PORTS | {"transport.p2p_port": self._port}),
            )
            self.children.append(make("rendezvous", home / "rendezvous", meet))
        for stage, count in enumerate(options.nodes):
            for i in range(count):
                self.add(stage, i)

    def add(self, stage: int, number: int) -> Child:
        """One more daemon, not started yet."""
        label = f"ends-{number}"
        role = ("--role", "ends")
        if stage != ENDS:
            label = f"stage-{stage}-{number}"
            role = ("--role", "stage", "--stage", str(stage))
        first = stage == ENDS and number == 0 and not self.options.rendezvous
        where = {"transport.p2p_port": self._port} if first else {"join": self.join}
        arguments = (
            "start",
            str(self.swarm_toml),
            *role,
            *as_flags(OWN_PORTS | where),
            "--listen",
            "127.0.0.1",
            "--threads",
            "1",
            "--name",
            label,
        )
        child = self._make(label, self.home / label, arguments)
        self.children.append(child)
        return child

    def client(self, label: str, timeout_s: float = 5.0) -> ControlClient:
        """A conversation with a daemon that runs. Raises NotRunning."""
        return ControlClient(control_socket(self.home / label), timeout_s=timeout_s)

    @property
    def chiefs(self) -> list[Child]:
        """Daemons of the ends."""
        return [child for child in self.children if child.label.startswith("ends-")]

    def chief(self) -> str:
        """Label of a daemon of the ends that runs. Raises LocalFault if none does."""
        for child in self.chiefs:
            if child.running:
                return child.label
        first = self.chiefs[0]
        raise LocalFault(
            "every daemon at the ends has ended",
            f"the end of the output of {first.label}:\n{first.tail()}",
        )

    def poll(self) -> list[Snapshot]:
        """Ask every daemon for its snapshot; one that has died is remembered as lost."""
        for child in self.children:
            if child.running:
                with contextlib.suppress(LocalFault), self.client(child.label) as client:
                    self.snapshots[child.label] = client.status()
            elif child.label in self.snapshots:
                self.snapshots[child.label].state = "lost"
        return [self.snapshots[c.label] for c in self.children if c.label in self.snapshots]
