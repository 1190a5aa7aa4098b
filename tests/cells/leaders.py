"""Leaders of cells in virtual time: the daemon's service over the simulated network, a directory
that takes its time, and clocks that differ."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from node.averaging.strategies.group_forming import TIMES
from node.averaging.strategies.strategy import rank
from node.core.ids import CellId, PeerId
from node.core.journey import Host, Version
from node.dht.record import Posting
from node.dht.settings import DirectorySettings
from node.dht.topics import outer_topic
from node.identity.faults import FaultBook
from node.outer import notes
from node.outer.board import WindowBoard
from node.outer.forming import CellGroup, GroupFinder
from node.outer.notes import Acceptance, Accepting
from node.outer.postings import CellFacts, pack_posting
from node.sim.process import SimClock, SimSigner
from node.sim.setup import LinkProfile
from node.sim.world.directory import SimDht, SimDirectory
from node.sim.world.loop import ProcessLoop, VirtualTime
from node.sim.world.network import SimLinks, SimNet, SimTransport
from node.telemetry.events import Event, Journal
from protos import cells_pb2 as pb
from protos import cells_pb2_grpc as rpc

WALL = 1_700_000_000.0
RUN = "run"
WINDOW = 7
KEY = "all"
START = 20.0
"""Start of the first window in seconds of the world's clock."""
LIFE_S = 300.0
"""Seconds for which a posting stays in the directory."""


def cell_id(number: int) -> CellId:
    return CellId(f"{number:016x}")


def by_turn(cells: Sequence[CellId], window: int = WINDOW, key: str = KEY) -> list[CellId]:
    """Cells in the order of their turns."""
    return sorted(cells, key=lambda cell: rank(PeerId(cell), f"{window}:{key}"))


def facts(cell: CellId, **more: Any) -> CellFacts:
    hosts = {s: (Host(PeerId(f"s{s}-{cell}"), (f"/ip4/10.0.0.{s}/tcp/1",)),) for s in range(3)}
    return CellFacts(cell, Version(3, "ab" * 16), hosts, **more)


@dataclass
class World:
    """``delay``: seconds that the directory takes, from and to."""

    seed: int = 0
    delay: tuple[float, float] = (0.5, 2.0)
    down: bool = False
    time: VirtualTime = field(init=False)
    net: SimNet = field(init=False)
    dht: SimDht = field(init=False)

    def __post_init__(self) -> None:
        self.time = VirtualTime(self.seed)
        self.dice = random.Random(self.seed)
        links = SimLinks(self.dice, LinkProfile(0.05, 0.05))
        self.net = SimNet(self.time, links)
        self.dht = SimDht(links, DirectorySettings(), 0.0, lambda: WALL + self.time.now)

    def write(self, topic: str, peer: PeerId, body: bytes, at: float) -> None:
        """A posting that every peer can read now, written at second ``at`` of the world's clock."""
        self.dht.put(topic, peer, body, WALL + at, LIFE_S)

    def reads(self, peer: PeerId) -> int:
        """Readings of the directory by this peer."""
        return sum(count for (reader, _), count in self.dht.reads.items() if reader == peer)

    def run(self, until: float = START + 200.0) -> None:
        self.time.run(until)


class SlowDirectory(SimDirectory):
    """The directory as one peer uses it, with the world's delays."""

    def __init__(self, world: World, me: PeerId, clock: SimClock) -> None:
        super().__init__(world.dht, me, clock)
        self.world = world
        self.lives: list[float] = []
        """Seconds for which each posting was to stay."""

    async def post(self, topic: str, body: bytes, life_s: float) -> bool:
        self.lives.append(life_s)
        wall = self._clock.wall()
        delay = self.world.dice.uniform(*self.world.delay)
        if self.world.down:
            return False
        self.world.time.push(delay, self.world.dht.put, topic, self._me, body, wall, life_s)
        return True

    async def look(self, topic: str) -> dict[PeerId, Posting]:
        await asyncio.sleep(self.world.dice.uniform(*self.world.delay))
        return {} if self.world.down else await super().look(topic)


class Peer:
    """A process with a clock that is ``skew`` seconds off."""

    def __init__(self, world: World, name: str, skew: float = 0.0) -> None:
        self.world = world
        self.me = PeerId(name)
        self.loop = ProcessLoop(world.time)
        self.faults: list[tuple[PeerId, str]] = []
        self.transport = SimTransport(
            world.net,
            self.me,
            self.loop,
            FaultBook(),
            accused=lambda peer, why: self.faults.append((peer, why)),
        )
        self.transport.serving = True
        self.clock = SimClock(world.time)
        self.clock.skew = WALL + skew
        self.signer = SimSigner(self.me)
        self.journal = Journal(clock=self.clock)
        self.directory = SlowDirectory(world, self.me, self.clock)
        self.board = WindowBoard(self.directory, self.clock, self.journal, TIMES)
        self.errors: list[BaseException] = []

    def do(self, coro: Coroutine[Any, Any, Any], at: float = 0.0) -> asyncio.Future[Any]:
        """Run `coro` in this process from time `at` of the world on, and return a future of its
        result."""
        done: asyncio.Future[Any] = self.loop.create_future()

        async def run() -> None:
            done.set_result(await coro)

        after = max(at - self.world.time.now, 0.0)
        self.world.time.push(after, lambda: self.loop.create_task(run()), loop=self.loop)
        return done

    async def tell(
        self, peer: PeerId, note: pb.CellsNote, patience_s: float = 10.0
    ) -> pb.CellsReply | grpc.StatusCode:
        channel = await self.transport.channel(peer)
        try:
            return await rpc.CellsStub(channel).Tell(note, timeout=patience_s)
        except grpc.aio.AioRpcError as e:
            return e.code()

    def posts(self, about: CellFacts, at: float, window: int = WINDOW, key: str = KEY) -> None:
        """A posting of this peer, written at that wall-clock second of the window."""
        self.world.write(outer_topic(window, key), self.me, pack_posting(about), START + at)

    def events(self, kind: str) -> list[Event]:
        return [e for e in self.journal.recent() if e.kind == kind]


class Leader(Peer):
    """Leads a cell, and looks for groups."""

    finds: type[GroupFinder] = GroupFinder

    def __init__(self, world: World, number: int, skew: float = 0.0, **about: Any) -> None:
        super().__init__(world, f"leader-{number}", skew)
        self.cell = cell_id(number)
        self.facts = facts(self.cell, **about)
        self.learned: dict[PeerId, Sequence[str]] = {}
        """Addresses of other leaders."""
        self.finder = self.finds(
            self.signer,
            RUN,
            self.transport,
            self.board,
            self.learned.__setitem__,
            lambda name, error: self.errors.append(error),
        )

    def looks(
        self,
        most: int = 4,
        window: int = WINDOW,
        keys: Sequence[str] = (KEY,),
        start: float = START,
        lead_s: float = 10.0,
        together: bool = False,
    ) -> asyncio.Future[CellGroup | None]:
        """Look for a group, from ``lead_s`` seconds before the window's start on."""
        return self.do(
            self.finder.find(self.facts, window, keys, most, WALL + start, together),
            start - lead_s,
        )


class Recorder(Peer, rpc.CellsServicer):
    """Peer that keeps the messages it gets, and refuses each of them as busy."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.heard: list[pb.CellsNote] = []
        rpc.add_CellsServicer_to_server(self, self.transport.server)

    async def Tell(self, request: pb.CellsNote, context: Any) -> pb.CellsReply:
        self.heard.append(request)
        return pb.CellsReply(accepts=False, reason="busy")


class Accepter(Recorder):
    """Accepts every offer for its cell after ``slow`` seconds."""

    def __init__(self, world: World, number: int, slow: float = 0.0) -> None:
        super().__init__(world, f"accepter-{number}")
        self.facts = facts(cell_id(number))
        self.slow = slow
        self.posts(self.facts, -5)

    async def Tell(self, request: pb.CellsNote, context: Any) -> pb.CellsReply:
        self.heard.append(request)
        if request.WhichOneof("say") != "offer":
            return pb.CellsReply(accepts=True)
        await asyncio.sleep(self.slow)
        note = notes.acceptance_note(self.says(request))
        return pb.CellsReply(accepts=True, acceptance=note)

    def says(self, request: pb.CellsNote) -> Acceptance:
        return Accepting(self.signer, RUN).accept(
            self.facts, request.window, request.key, CellId(request.caller)
        )

    @property
    def told(self) -> list[str | None]:
        return [note.WhichOneof("say") for note in self.heard]
