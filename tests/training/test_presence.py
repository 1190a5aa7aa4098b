"""Presence of peers from their records: leaders, hosts of stages, and peers about to come."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.coordinator.presence import FEW, HASTE_S, QUIET_MOST, REST, Presence
from node.core.ids import NO_CELL, CellId, RunId
from node.dht.record import PeerBody
from node.dht.settings import DirectorySettings
from node.dht.topics import PEERS, cell_topic
from node.identity.keys import Identity
from node.scheduler.choosing import Placed
from testbed.fakes.clock import VirtualClock
from testbed.fakes.memory_directory import MemoryDirectory, Wall

RUN = RunId("ab" * 32)
STAGES = 3


class Board:
    """A directory of one process, with the records posted there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.wall = Wall()
        self.clock = VirtualClock()

    def directory(self, name: str) -> MemoryDirectory:
        identity = Identity.load_or_create(self.home / name)
        return MemoryDirectory(identity, DirectorySettings(), self.clock, RUN, self.wall)

    async def post(self, name: str, stage: int, role: str, state: str, **more: object) -> str:
        directory = self.directory(name)
        about: dict[str, Any] = {"epoch": 0, "name": name, "version": "1", **more}
        body = PeerBody(stage, role, state, **about)
        await directory.publish(body, topic=cell_topic(CellId(body.cell)) if body.cell else PEERS)
        return directory.me

    async def seen(self, cell: CellId = NO_CELL) -> Presence:
        """Presence as a peer of this cell sees it after one reading."""
        directory = self.directory("reader")
        found = Presence(directory.me, directory, self.clock, 5.0, lambda peer, maddrs: None)
        found.enter(cell)
        found.start()
        await found.company.wait()
        return found


async def test_the_view_shows_hosts_and_peers_about_to_come(tmp_path: Path) -> None:
    record_store = Board(tmp_path)
    await record_store.post("relay", 0, "rendezvous", "ready")
    leaver = await record_store.post("leaver", 2, "stage", "draining", open_to="stage")
    host = await record_store.post("host", 2, "stage", "training", speed=3.0)
    free = await record_store.post("free", 1, "stage", "ready", open_to="auto")
    chooses = await record_store.post(
        "chooses", 0, "auto", "choosing", open_to="stage", settled=False
    )
    claims = await record_store.post("claims", 0, "ends", "starting", open_to="auto", settled=False)
    fetches = await record_store.post("fetches", 3, "stage", "joining", open_to="stage")
    presence = await record_store.seen()
    assert presence.view.placed(STAGES) == {
        host: Placed(2, range(0), True, 3.0),
        free: Placed(1, range(4)),
        chooses: Placed(None, range(1, 4), False),
        claims: Placed(0, range(4), False),
        fetches: Placed(3, range(1, 4)),
    }
    assert set(presence.view.hosts) == {host, free, fetches, leaver}, "nobody else answers yet"
    assert presence.view.coming == {chooses: None, claims: 0, fetches: 3}
    assert presence.view.ends == {}, "nobody leads before it has built what it claims"
    await presence.close()


async def test_only_peers_of_other_cells_are_not_read(tmp_path: Path) -> None:
    record_store = Board(tmp_path)
    a = CellId("a" * 16)
    b = CellId("b" * 16)
    chief = await record_store.post("chief", 0, "ends", "training", cell=a, leads=True)
    comes = await record_store.post("comes", 2, "stage", "joining", cell=a)
    goes = await record_store.post("goes", 1, "stage", "stopping", cell=a)
    await record_store.post("waits", 0, "ends", "ready", cell=b, leads=True)
    relay = await record_store.post("relay", 0, "rendezvous", "ready")
    presence = await record_store.seen(a)
    assert set(presence.view.everybody) == {chief, comes, goes, relay}
    assert (sorted(presence.view.stages()), presence.view.led()) == ([0, 2], True)
    assert set(presence.view.ends) == {chief}
    await presence.close()
    presence = await record_store.seen(b)
    assert (presence.view.stages(), presence.view.led()) == ([0], False), "it waits"
    await presence.close()


async def test_a_peer_that_changes_its_cell_is_seen_in_the_new_one_only(tmp_path: Path) -> None:
    record_store = Board(tmp_path)
    there = [CellId("a" * 16), CellId("b" * 16)]
    mover = record_store.directory("mover")
    other = record_store.directory("other")
    for cell in there:
        body = PeerBody(1, "stage", "training", 0, "mover", "1", cell=cell)
        assert await mover.publish(body, topic=cell_topic(cell))
    assert not await other.read(cell_topic(there[0]))
    assert set(await other.read(cell_topic(there[1]))) == {mover.me}
    assert not await other.read()
    await mover.withdraw()
    assert not await other.read(cell_topic(there[1]))


async def test_news_while_the_directory_is_read_is_posted_at_once(tmp_path: Path) -> None:
    record_store = Board(tmp_path)
    bodies = [PeerBody(2, "stage", "starting", 0, "me", "1")]
    await record_store.post("other", 1, "stage", "ready")
    directory = record_store.directory("me")
    posted = asyncio.Event()
    presence = Presence(
        directory.me, directory, record_store.clock, 60.0, lambda peer, maddrs: None
    )
    read = directory.read
    publish = directory.publish

    async def reads(*args: Any) -> Any:
        found = await read(*args)
        if len(bodies) == 1:
            bodies.append(replace(bodies[0], state="training"))
            presence.changed()
        return found

    async def publishes(body: PeerBody, *args: Any) -> bool:
        if body.state == "training":
            posted.set()
        return await publish(body, *args)

    directory.read, directory.publish = reads, publishes  # type: ignore[method-assign]
    presence.announce(lambda: bodies[-1])
    presence.start()
    async with asyncio.timeout(30):
        await posted.wait()
    await presence.close()


async def test_a_record_is_withdrawn_unless_a_successor_follows(tmp_path: Path) -> None:
    for stays in (True, False):
        record_store = Board(tmp_path)
        mover = record_store.directory("mover")
        presence = Presence(mover.me, mover, record_store.clock, 5.0, lambda peer, maddrs: None)
        presence.announce(lambda: PeerBody(2, "stage", "starting", 0, "mover", "1"))
        presence.start()
        await (await record_store.seen()).close()
        await presence.close(stays=stays)
        assert (mover.me in await record_store.directory("other").read()) == stays


class Paced(Presence):
    """Records the length of each pause, and pauses until the event loop has gone round once."""

    def __init__(self, board: Board, read_s: float, directory: MemoryDirectory) -> None:
        super().__init__(directory.me, directory, board.clock, 5.0, lambda peer, body: None)
        self.pauses: list[float] = []
        self.posts = 0
        self._readings = 0
        self._enough = asyncio.Event()
        read = directory.read
        publish = directory.publish
        clock = board.clock

        async def reads(*args: Any) -> Any:
            clock.advance(read_s)
            return await read(*args)

        async def publishes(*args: Any) -> bool:
            self.posts += 1
            return await publish(*args)

        directory.read, directory.publish = reads, publishes  # type: ignore[method-assign]

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) >= self._readings:
            self._enough.set()
        await asyncio.sleep(0)

    async def after(self, readings: int) -> None:
        self.announce(lambda: PeerBody(2, "stage", "starting", 0, "me", "1"))
        self._readings = readings
        self.start()
        await self._enough.wait()
        await self.close()


async def test_a_peer_that_reads_in_haste_does_not_post_the_same_record_again(
    tmp_path: Path,
) -> None:
    board = Board(tmp_path)
    await board.post("other", 1, "stage", "ready")
    presence = Paced(board, 0.1, board.directory("me"))
    presence.pace.hasty = True
    await presence.after(readings=40)
    assert presence.pauses[0] == HASTE_S
    assert presence.posts == 1, "4 s have passed"
    presence = Paced(board, 0.1, board.directory("again"))
    presence.pace.hasty = True
    await presence.after(readings=400)
    assert presence.posts == 3, (
        "40 s have passed, and a post is due every 20 s where nothing changes"
    )


async def test_slow_readings_are_farther_apart(tmp_path: Path) -> None:
    board = Board(tmp_path)
    await board.post("other", 1, "stage", "ready")
    presence = Paced(board, 0.4, board.directory("me"))
    presence.pace.hasty = True
    await presence.after(readings=3)
    assert presence.pauses == pytest.approx([REST * 0.4] * 3)


async def test_among_many_peers_readings_and_posts_are_rarer(tmp_path: Path) -> None:
    for others, pause in ((FEW - 1, 5.0), (2 * FEW - 1, 10.0), (9 * FEW - 1, 5.0 * QUIET_MOST)):
        board = Board(tmp_path)
        for number in range(others):
            await board.post(f"other-{number}", 1, "stage", "ready")
        presence = Paced(board, 0.1, board.directory("me"))
        await presence.after(readings=2)
        assert presence.pauses[-1] == pytest.approx(pause)
