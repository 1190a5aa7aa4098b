"""A share of the nodes of a directory, as a process of its own: nodes come, post their records,
read others', and leave.

    python -m benchmarks.peers.residents

Prints a line when it is ready, and reads its order, a line of JSON with the fields of
:class:`Order`. At the end one line of JSON with the fields of :class:`Told` comes out. All
processes of a swarm share the machine's monotonic clock.
"""

import asyncio
import gc
import hashlib
import json
import logging
import math
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import psutil
import uvloop

import node.core.bare  # noqa: F401  first: hivemind without its averager and optimizer

# isort: split
from hivemind.dht.node import DHTNode
from hivemind.utils.timed_storage import get_dht_time

from node.coordinator.presence import FEW, QUIET_MOST, Presence
from node.core.clock import SystemClock
from node.core.ids import CellId, PeerId, RunId
from node.core.version import VERSION
from node.dht.directory import Directory
from node.dht.record import PeerBody
from node.dht.record_store import Author
from node.dht.room import Company
from node.dht.settings import DirectorySettings
from node.dht.topics import cell_topic, key_of
from node.identity.keys import Identity
from node.identity.places import block_of
from node.telemetry.events import Journal
from testbed.networks.loopback import LoopbackP2P, address_of, multiaddr_of

RUN = RunId("11" * 32)
STAGES = 9
"""Block stages of a cell, hosted by two peers each."""
EPOCH_S = 30.0
"""Seconds of an epoch; its number stands in each record."""
LONGEST_READ_S = 10.0
"""Seconds after which a reading is given up."""
TRIES, TRY_S = 200, 0.1
"""Tries of a newcomer to meet somebody and to post its record, and the pause between two."""
WAYS = ("withdraws", "is killed", "falls silent")
"""Ways to leave, in turn: it takes down its record and closes; its connections are closed; it
answers nothing any more and its connections stay."""


@dataclass(frozen=True)
class Order:
    """``kind``: tutti or hivemind; ``worker`` of ``workers`` processes; ``nodes`` of the swarm in
    ``cells``; times are monotonic seconds, rates are those of the whole swarm."""

    kind: str
    worker: int
    workers: int
    nodes: int
    cells: int
    begin: float
    """The first node comes."""
    full: float
    """The last node has come, and others leave from now on."""
    measured: float
    """Readings count from now on."""
    end: float
    leave_per_min: float
    reads_per_s: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the directory's settings."""


@dataclass
class Told:
    """Events of one process. ``posted``: peer, cell, time at which its first record was stored,
    time at which it began to leave; ``reads``: begin, end, cell, peers found, and whether it was
    the first one of a newcomer."""

    posted: list[tuple[str, int, float, float]] = field(default_factory=list)
    reads: list[tuple[float, float, int, list[str], bool]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    """Processor seconds while readings counted."""
    bytes_each: float = 0.0
    """Memory that a node adds to its process."""
    late_s: float = 0.0
    """Longest time for which the loop did not come to a task that was due."""
    lives: int = 0
    links: int = 0


class Node(Protocol):
    """One node of a kind."""

    number: int
    identity: Identity
    body: "Body"
    p2p: LoopbackP2P

    async def join(self, seeds: list[PeerId]) -> None:
        """Come into the swarm, and post the own record. Raises TimeoutError, RuntimeError,
        OSError."""
        ...

    async def read(self, cell: int) -> list[PeerId]:
        """The peers of a cell."""
        ...

    async def leave(self, way: str) -> None:
        """Leave the swarm in one of the WAYS."""
        ...


def identity_of(number: int) -> Identity:
    """The identity of the node with this number, in every process."""
    return Identity.of_seed(hashlib.sha256(f"resident {number}".encode()).digest())


@lru_cache(maxsize=4096)
def _block(peer: PeerId) -> str:
    """Address block of a peer."""
    return block_of(address_of(peer)[0])


def cell_of(number: int) -> CellId:
    return CellId(f"{number:016x}")


class Body:
    """The record of a node, as a daemon in training makes it."""

    def __init__(self, identity: Identity, number: int, cells: int) -> None:
        self.cell = number % cells
        self._identity = identity
        self._place = number // cells
        self._started = time.time()
        self._speed = random.Random(number).uniform(1.0, 9.0)
        host, port = address_of(identity.peer_id)
        mark = f"/p2p/{identity.peer_id}"
        self._maddrs = (
            f"/ip4/{host}/tcp/{port}{mark}",
            f"/ip4/203.0.{port % 256}.7/tcp/{port}{mark}",
        )

    def make(self) -> PeerBody:
        """The record now."""
        stage = self._place % (STAGES + 1)
        role = "stage" if stage else "ends"
        leader = identity_of(self.cell).peer_id
        return PeerBody(
            stage=stage,
            role=role,
            state="training",
            epoch=int(time.time() / EPOCH_S),
            name=self._identity.name,
            version=VERSION,
            tokens_per_s=1234.5,
            speed=self._speed,
            maddrs=self._maddrs,
            started=self._started,
            leads=self._identity.peer_id == leader,
            reach="open",
            follows=leader,
            cell=cell_of(self.cell),
        )


class Tutti:
    """A daemon's directory and presence."""

    def __init__(self, order: Order, number: int) -> None:
        self.number = number
        self.identity = identity_of(number)
        self.body = Body(self.identity, number, order.cells)
        self.p2p = LoopbackP2P(self.identity.peer_id)
        settings = DirectorySettings(**order.settings)
        clock = SystemClock()
        members = {identity_of(n).peer_id for n in range(self.body.cell, order.nodes, order.cells)}
        self.directory = Directory(
            self.identity,
            settings,
            clock,
            RUN,
            Journal(),
            company=Company(members.__contains__, self._has_met, _block),
        )
        self.presence = Presence(
            self.identity.peer_id,
            self.directory,
            clock,
            settings.refresh_s,
            lambda peer, body: None,
        )

    def _has_met(self, peer: PeerId) -> bool:
        return peer in self.p2p.links

    async def join(self, seeds: list[PeerId]) -> None:
        await self.p2p.start()
        others: Any = self.p2p
        await self.directory.attach(others, [multiaddr_of(peer) for peer in seeds])
        topic = cell_topic(cell_of(self.body.cell))

        async def posted() -> bool:
            met = self.directory.neighbours > 0 or not seeds
            return met and await self.directory.publish(self.body.make(), 1.0, topic)

        await _eventually(posted)
        self.presence.enter(cell_of(self.body.cell))
        self.presence.announce(self.body.make)
        self.presence.start()

    async def read(self, cell: int) -> list[PeerId]:
        return list(await self.directory.read(cell_topic(cell_of(cell))))

    async def leave(self, way: str) -> None:
        if way == "falls silent":
            self.p2p.fall_silent()
        elif way == "is killed":
            await self.p2p.shutdown()
        await self.presence.close(stays=way != "withdraws")
        if way == "withdraws":
            await self.p2p.shutdown()


class Hivemind:
    """A node of hivemind's DHT as it comes, with the same record under a key for each cell."""

    def __init__(self, order: Order, number: int) -> None:
        self.number = number
        self.identity = identity_of(number)
        self.body = Body(self.identity, number, order.cells)
        self.p2p = LoopbackP2P(self.identity.peer_id)
        self._settings = DirectorySettings(**order.settings)
        self._author = Author(self.identity, RUN, self._settings)
        # The pace of a daemon whose cell has this number of records.
        self._times = min(QUIET_MOST, max(1.0, order.nodes / order.cells / FEW))
        self._node: Any = None
        self._posting: asyncio.Task[None] | None = None

    async def join(self, seeds: list[PeerId]) -> None:
        await self.p2p.start()
        others: Any = self.p2p
        addresses = [multiaddr_of(peer) for peer in seeds]
        self._node = await DHTNode.create(p2p=others, initial_peers=addresses)
        await _eventually(self._post)
        self._posting = asyncio.create_task(self._keep_posting())

    async def _keep_posting(self) -> None:
        while True:
            await asyncio.sleep(self._times * self._settings.refresh_s)
            await self._post()

    async def _post(self) -> bool:
        topic = cell_topic(cell_of(self.body.cell))
        now = get_dht_time()
        sealed, expires = self._author.seal(
            self.body.make().pack(), now, times=self._times, topic=topic
        )
        return await self._node.store(
            key_of(RUN, topic), sealed, expires, subkey=str(self.identity.peer_id)
        )

    async def read(self, cell: int) -> list[PeerId]:
        found = await self._node.get(key_of(RUN, cell_topic(cell_of(cell))), latest=True)
        if found is None:
            return []
        return [PeerId(peer) for peer in found.value]

    async def leave(self, way: str) -> None:
        if self._posting is not None:
            self._posting.cancel()
        if way == "falls silent":
            self.p2p.fall_silent()
        else:
            await self.p2p.shutdown()
        await self._node.shutdown()


KINDS: Mapping[str, Callable[[Order, int], Node]] = {"tutti": Tutti, "hivemind": Hivemind}


class House:
    """The nodes of this process. The first node stays to the end, and newcomers of all processes
    know it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._told = Told()
        self._dice = random.Random(order.worker)
        self._nodes: list[Node] = []
        """Nodes that have posted their record, the one that stays first."""
        self._posted: dict[int, float] = {}
        self._next = order.worker
        self._left = 0
        self._tasks = set[asyncio.Task[None]]()

    async def run(self) -> Told:
        """Let nodes come and go until the end."""
        order, told = self._order, self._told
        gc.collect()
        before = psutil.Process().memory_info().rss
        share = math.ceil((order.nodes - order.worker) / order.workers)
        spell = (order.full - order.begin) / share
        for i in range(share):
            await _until(order.begin + (i + order.worker / order.workers) * spell)
            self._spawn(self._come())
        await _until(order.full)
        self._spawn(self._churn())
        await _until(order.measured)
        self._spawn(self._read_on())
        self._spawn(self._watch())
        cpu = time.process_time()
        await _until(order.end)
        told.cpu_s = time.process_time() - cpu
        told.lives = len(self._nodes)
        told.links = sum(len(node.p2p.links) for node in self._nodes)
        for task in self._tasks:
            task.cancel()
        gc.collect()
        told.bytes_each = (psutil.Process().memory_info().rss - before) / max(1, told.lives)
        for resident in self._nodes:
            self._gone(resident, math.inf)
        return told

    def _spawn(self, job: Any) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _come(self) -> None:
        """Let the next node come, and read its cell."""
        order = self._order
        number = self._next
        self._next += order.workers
        node = KINDS[order.kind](order, number)
        seeds = [identity_of(n).peer_id for n in range(order.workers) if n < number]
        began = time.monotonic()
        try:
            await node.join(seeds)
        except (TimeoutError, RuntimeError, OSError) as e:
            self._told.failed.append(f"{number}: {e!r}")
            await node.p2p.shutdown()
            return
        self._posted[number] = time.monotonic()
        self._nodes.append(node)
        if seeds:
            await self._read(node, node.body.cell, began, first=True)

    async def _churn(self) -> None:
        """One leaves and one comes, again and again."""
        order = self._order
        spell = 60.0 * order.workers / (order.leave_per_min * order.nodes)
        at = order.full + spell * self._dice.random()
        while True:
            await _until(at)
            at += spell
            if len(self._nodes) > 1:
                node = self._nodes.pop(self._dice.randrange(1, len(self._nodes)))
                way = WAYS[self._left % len(WAYS)]
                self._left += 1
                self._gone(node, time.monotonic())
                self._spawn(node.leave(way))
            self._spawn(self._come())

    async def _read_on(self) -> None:
        order = self._order
        spell = order.workers / order.reads_per_s
        at = order.measured + spell * self._dice.random()
        while True:
            await _until(at)
            at += spell
            self._spawn(
                self._read(
                    self._dice.choice(self._nodes),
                    self._dice.randrange(order.cells),
                    time.monotonic(),
                )
            )

    async def _read(self, node: Node, cell: int, began: float, *, first: bool = False) -> None:
        """Let a node read a cell. ``first``: it began to join at ``began``."""
        found: list[PeerId] = []
        try:
            async with asyncio.timeout(LONGEST_READ_S):
                found = await node.read(cell)
        except TimeoutError:
            pass
        if node in self._nodes:
            read = began, time.monotonic(), cell, [short(peer) for peer in found], first
            self._told.reads.append(read)

    async def _watch(self) -> None:
        """Notice when this process is too busy to be fair to its nodes."""
        while True:
            due = time.monotonic() + 0.1
            await _until(due)
            self._told.late_s = max(self._told.late_s, time.monotonic() - due)

    def _gone(self, node: Node, at: float) -> None:
        posted = self._posted.pop(node.number)
        self._told.posted.append((short(node.identity.peer_id), node.body.cell, posted, at))


def short(peer: PeerId) -> str:
    """The end of a PeerId, which tells a swarm's peers apart."""
    return peer[-10:]


async def _eventually(done: Callable[[], Awaitable[bool]]) -> None:
    """Try until it is done. Raises TimeoutError."""
    for _ in range(TRIES):
        if await done():
            return
        await asyncio.sleep(TRY_S)
    raise TimeoutError


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.monotonic()))


def main() -> None:
    """Run the share of this process."""
    logging.disable(logging.CRITICAL)  # walks of hivemind leave tasks behind at the end
    # A p2pd inherits the standard output, and what it says there would be in the middle of ours.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as said:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        print("ready", file=said, flush=True)
        order = Order(**json.loads(sys.stdin.readline()))
        print(json.dumps(asdict(uvloop.run(House(order).run()))), file=said, flush=True)


if __name__ == "__main__":
    main()
