"""Directories over real p2pd processes and over the in-process wall, behind one interface."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2P

from node.core.clock import SystemClock
from node.core.ids import RunId
from node.dht.directory import Directory
from node.dht.record import PeerBody
from node.dht.record_store import Admit
from node.dht.settings import DirectorySettings
from node.identity.keys import Identity
from node.telemetry.events import Journal
from testbed.fakes.clock import HeldClock
from testbed.fakes.memory_directory import MemoryDirectory, Wall

RUN = RunId("ab" * 32)


def make_body(name: str = "calm-otter", **changes: Any) -> PeerBody:
    fields: dict[str, Any] = {
        "stage": 1,
        "role": "stage",
        "state": "ready",
        "epoch": 3,
        "name": name,
        "version": "0.1.0",
    }
    return PeerBody(**(fields | changes))


@pytest.fixture
def body() -> Callable[..., PeerBody]:
    return make_body


async def eventually(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Return the first true answer of `check`, which may be awaitable; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            answer = check()
            if answer := await answer if inspect.isawaitable(answer) else answer:
                return answer
            await asyncio.sleep(0.02)


class Swarm:
    """Real nodes: identities with a key file, a p2pd each, and directories attached to them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.p2ps: list[P2P] = []
        self.directories: list[Directory] = []

    async def p2p(self, identity: Identity, **options: Any) -> P2P:
        assert identity.path is not None
        options = {
            "host_maddrs": ("/ip4/127.0.0.1/tcp/0",),
            "nat_port_map": False,
            "auto_nat": False,
        } | options
        p2p = await P2P.create(
            identity_path=str(identity.path), check_if_identity_free=False, **options
        )
        self.p2ps.append(p2p)
        return p2p

    def identity(self) -> Identity:
        return Identity.create(self.home / f"key{len(list(self.home.iterdir()))}")

    def directory(
        self,
        identity: Identity,
        clock: SystemClock | None = None,
        journal: Journal | None = None,
        admit: Admit | None = None,
        admission: bytes = b"",
        **settings: Any,
    ) -> Directory:
        knobs: dict[str, Any] = {
            "rejoin_s": 0.05,
            "rejoin_max_s": 0.2,
            "lookup_timeout_s": 20.0,
        } | settings
        directory = Directory(
            identity,
            DirectorySettings(**knobs),
            clock or SystemClock(),
            RUN,
            journal or Journal(),
            admit=admit,
            admission=admission,
        )
        self.directories.append(directory)
        return directory

    async def node(
        self, seeds: Sequence[str] = (), identity: Identity | None = None, **options: Any
    ) -> tuple[Directory, P2P]:
        identity = identity or self.identity()
        directory = self.directory(identity, **options)
        p2p = await self.p2p(identity)
        await directory.attach(p2p, seeds)
        return directory, p2p

    async def close(self) -> None:
        for directory in self.directories:
            await directory.close()
        for p2p in self.p2ps:
            await p2p.shutdown()


async def addresses(p2p: P2P) -> tuple[str, ...]:
    return tuple(str(a) for a in await p2p.get_visible_maddrs(latest=True))


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    await swarm.close()


@pytest.fixture(params=["memory", "hivemind"])
async def three(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    """Three peers of one run with clocks that can be moved, over either kind of directory."""
    clocks = [HeldClock() for _ in range(3)]
    settings = DirectorySettings(rejoin_s=0.05, rejoin_max_s=0.2)
    if request.param == "memory":
        wall = Wall()
        made = [MemoryDirectory(Identity.ephemeral(), settings, c, RUN, wall) for c in clocks]
        yield SimpleNamespace(directories=made, clocks=clocks)
        return
    swarm = Swarm(tmp_path)
    seeds: tuple[str, ...] = ()
    for clock in clocks:
        _, p2p = await swarm.node(seeds, clock=clock)
        seeds = seeds or await addresses(p2p)
    yield SimpleNamespace(directories=swarm.directories, clocks=clocks)
    await swarm.close()
