"""Daemons on the hosts of an :class:`~testbed.networks.internet.Internet`, started as volunteers
start them."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from node.identity.keys import Identity
from node.manifest import Manifest
from testbed.daemons.fleet import Box, Hang, Peer, signed
from testbed.daemons.forks import Forks
from testbed.networks.internet import Internet

ROUTERS = ("open", "home", "symmetric", "noudp", "cgnat")

DEMO = {"training.min_replicas": 1, "training.epochs": 100_000}


def to_it(peer: Peer, key: str) -> str:
    """The path by which a daemon reaches another one."""
    return (
        next((line.path for line in peer.peers().peers if line.peer == key), "")
        if peer.status().state
        else ""
    )


@contextlib.contextmanager
def boxed(root: Path, forks: Forks | None = None) -> Iterator[Box]:
    """A box that ends its daemons before the network goes."""
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root, forks=forks)
    try:
        yield box
    finally:
        box.clean_up()


def founded(box: Box, stages: int) -> tuple[Path, Manifest]:
    """A signed manifest of a tiny swarm, owned by nobody who runs."""
    owner = Identity.load_or_create(box.root / "owner" / "identity.key")
    box.manifest = Manifest.parse(
        signed(owner, DEMO | {"pipeline.stages": stages, "model.layers": stages})
    )
    file = box.root / "swarm.toml"
    file.write_bytes(box.manifest.to_toml())
    return file, box.manifest


def daemon(box: Box, net: Internet, host: str, *words: str) -> Peer:
    """A daemon on a host, started; with the settings a volunteer has, but for one torch thread and
    its name."""
    child = box.child(host, words, net[host].through)
    made = box.made[host] = Peer(host, child.home, child)
    made.environment = {"TUTTI_THREADS": "1", "TUTTI_NAME": host}
    return made.start()


def hosting(peer: Peer) -> bool:
    """Return True if the daemon has built its stage."""
    return bool(peer.status().layers)


def printed(peer: Peer) -> str:
    """The invite that a daemon has printed."""
    found = re.search(r"tutti join (tutti2\w+)", peer.said())
    if found is None:
        raise Hang(f"{peer.label} prints no invite")
    return found[1]
