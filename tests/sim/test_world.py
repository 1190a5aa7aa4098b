"""Virtual time, processes, calls over the simulated network, the directory, disk and device."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from node.checkpoint.settings import CheckpointSettings
from node.core.errors import PeerFault, Refused, WireError
from node.core.ids import PeerId
from node.dht.record import PeerBody
from node.dht.settings import DirectorySettings
from node.identity.faults import FaultBook
from node.pipeline.device import Priority
from node.sim.setup import LinkProfile, Setup
from node.sim.swarm import SimSwarm
from node.sim.world.directory import SimDht, SimDirectory
from node.sim.world.loop import ProcessLoop, SimDevice, VirtualTime, quiet
from node.sim.world.network import (
    DIAL_S,
    EOF,
    PROBE_S,
    SILENT_S,
    SimLinks,
    SimNet,
    SimTransport,
    Wall,
)
from node.sim.world.values import DiskStore, SimDisk
from testbed.fakes.clock import VirtualClock

A = PeerId("a")
B = PeerId("b")
METHOD = "/test/Ask"


class TimeIsUp(BaseException):
    """Error that a signal raises wherever the program is, like the end of a test's time."""


class Host:
    """A process with a transport and a record of its events."""

    def __init__(self, net: SimNet, name: PeerId) -> None:
        self.world = net.world
        self.loop = ProcessLoop(net.world)
        self.transport = SimTransport(net, name, self.loop, FaultBook())
        self.said: list[tuple[Any, float]] = []
        self.transport.on_lost(lambda peer: self.say(f"lost {peer}"))
        handlers = {
            "Ask": grpc.unary_unary_rpc_method_handler(self._answer),
            "Talk": grpc.stream_stream_rpc_method_handler(self._talk),
        }
        generic = grpc.method_handlers_generic_handler("test", handlers)
        self.transport.server.add_generic_rpc_handlers((generic,))
        self.transport.serving = True
        self.answers = True

    def say(self, what: Any) -> None:
        self.said.append((what, round(self.world.now, 3)))

    async def _answer(self, request: Any, context: Any) -> Any:
        self.say(f"asked by {self.transport.caller(context)}")
        try:
            if not self.answers:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.say("gone")
            raise
        if request == "time is up":
            raise TimeIsUp
        if request == "no":
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        return request

    async def _talk(self, requests: Any, context: Any) -> None:
        async for message in requests:
            await context.write(message)

    def do(self, coro: Coroutine[Any, Any, Any]) -> None:
        self.world.push(0.0, lambda: self.loop.create_task(coro), loop=self.loop)

    def ask(self, request: str = "yes", timeout: float = 30.0) -> None:
        async def asking() -> None:
            try:
                channel = await self.transport.channel(B)
                self.say(await channel.unary_unary(METHOD)(request, timeout=timeout))
            except PeerFault as e:
                self.say(e.reason)
            except grpc.aio.AioRpcError as e:
                self.say(e.code())

        self.do(asking())

    def ask_until(self, end: float, request: str = "yes", timeout: float = 30.0) -> None:
        """Ask a question, and let time pass."""
        self.ask(request, timeout)
        self.world.run(end)


CALM = LinkProfile(0.1, 0.0)


def pair(**changes: float) -> tuple[VirtualTime, SimLinks, Host, Host]:
    world = VirtualTime(0)
    links = SimLinks(random.Random(0), replace(CALM, **changes))
    net = SimNet(world, links)
    return world, links, Host(net, A), Host(net, B)


def kill(host: Host) -> None:
    host.loop.kill()
    host.transport.net.lost(host.transport.peer_id)


def test_a_call_dials_once_and_takes_the_way_there_and_back() -> None:
    _, _, a, b = pair()
    a.ask_until(1.0)
    a.ask_until(2.0, "no")
    assert a.said == [("yes", 0.4), (grpc.StatusCode.NOT_FOUND, 1.2)]
    assert b.said == [("asked by a", 0.3), ("asked by a", 1.1)]


def test_a_stream_brings_its_messages_in_order_and_then_its_end() -> None:
    world, _, a, _ = pair(jitter_s=0.1)

    async def talk() -> None:
        channel = await a.transport.channel(B)
        call = channel.stream_stream("/test/Talk")(iter([1, 2, 3]))
        while (message := await call.read()) is not EOF:
            a.say(message)

    a.do(talk())
    world.run(3.0)
    assert [what for what, _ in a.said] == [1, 2, 3]


def test_transfers_on_a_line_queue() -> None:
    links = SimLinks(random.Random(0), LinkProfile(0.1, 0.0, 8000.0, 0.0))
    assert round(links.travel(A, B, 1000, 0.0), 3) == 1.1
    assert round(links.travel(A, B, 1000, 0.0), 3) == 2.1
    assert round(links.travel(B, A, 1000, 0.0), 3) == 1.1, "the other direction is its own"
    assert round(links.travel(A, B, 0, 0.0), 3) == 0.1


def test_a_lost_message_comes_later() -> None:
    links = SimLinks(random.Random(0), LinkProfile(0.1, 0.0, 0.0, 1.0))
    assert links.travel(A, B, 0, 0.0) > 0.3


def test_a_call_to_the_dead_is_refused_and_a_pending_one_reset() -> None:
    world, _, a, b = pair()
    b.answers = False
    a.ask_until(0.5)
    kill(b)
    world.run(1.0)
    assert a.said == [("lost b", 0.6), (grpc.StatusCode.UNAVAILABLE, 0.6)]
    a.ask_until(2.0)
    assert a.said[-1] == ("connection refused", 1.2)


def test_a_partition_fails_dials_in_time_and_connections_later() -> None:
    _, links, a, _ = pair()
    wall = Wall(frozenset({A}), frozenset({B}))
    links.walls.append(wall)
    a.ask_until(5.0)
    assert a.said == [("no answer in time", DIAL_S)]
    links.walls.remove(wall)
    a.ask_until(6.0)
    links.walls.append(wall)
    a.ask(timeout=1.0)
    a.ask_until(20.0, timeout=60.0)
    answered = a.said[1][1]
    assert a.said[2:] == [
        (grpc.StatusCode.DEADLINE_EXCEEDED, 7.0),
        ("lost b", answered + SILENT_S),
        (grpc.StatusCode.UNAVAILABLE, answered + SILENT_S),
    ]


def test_what_waits_before_a_wall_arrives_when_it_falls() -> None:
    world, links, a, _ = pair()
    a.ask_until(1.0)
    wall = Wall(frozenset({B}), frozenset({A}))
    links.walls.append(wall)
    a.ask_until(1.0 + SILENT_S / 2, "later")
    links.walls.remove(wall)
    world.run(1.0 + SILENT_S)
    assert [what for what, _ in a.said] == ["yes", "later"]


def test_a_peer_that_stands_still_hears_everything_when_it_goes_on() -> None:
    world, _, a, b = pair()
    a.ask_until(1.0)
    world.push(0.5, b.say, "beat", loop=b.loop)
    b.loop.frozen = True
    a.ask("soon", timeout=0.3)
    a.ask_until(3.0, "late")
    assert b.said == [("asked by a", 0.3)]
    b.loop.thaw()
    world.run(4.0)
    assert a.said[1:] == [(grpc.StatusCode.DEADLINE_EXCEEDED, 1.3), ("late", 3.1)]
    assert ("beat", 3.0) in b.said


def test_a_process_that_stands_still_loses_its_connections() -> None:
    """A call that was under way before ends too, though nothing more is sent."""
    world, _, a, b = pair()
    b.answers = False
    a.ask_until(1.0, timeout=60.0)
    b.loop.frozen = True
    world.run(30.0)
    assert [what for what, _ in a.said] == ["lost b", grpc.StatusCode.UNAVAILABLE]
    assert a.said[0][1] <= 1.0 + SILENT_S


def test_a_process_that_stands_still_for_a_moment_keeps_its_connections() -> None:
    world, _, a, b = pair()
    b.answers = False
    a.ask_until(1.0, timeout=60.0)
    b.loop.frozen = True
    world.run(1.0 + PROBE_S - 0.5)
    b.loop.thaw()
    world.run(30.0)
    assert a.said == []


def test_a_caller_that_hangs_up_ends_the_handler() -> None:
    _, _, a, b = pair()
    b.answers = False
    a.ask_until(3.0, timeout=1.0)
    assert b.said[-1] == ("gone", 1.3)


@pytest.mark.parametrize("walled", [False, True])
def test_the_handler_of_a_dead_callers_call_ends(walled: bool) -> None:
    """Behind a wall no news of the death arrives, until the connection counts as silent."""
    world, links, a, b = pair()
    b.answers = False
    a.ask_until(0.5)
    if walled:
        links.walls.append(Wall(frozenset((A,)), frozenset()))
    kill(a)
    world.run(1.0 + SILENT_S)
    assert b.said == [("asked by a", 0.3), ("gone", 0.5 + SILENT_S if walled else 0.6)]


def test_a_peer_that_is_banned_is_neither_called_nor_heard() -> None:
    _, _, a, b = pair()
    b.transport.fault(A, "three times as bad", 3.0)
    a.ask_until(1.0)
    assert a.said == [("refuses us", 0.2)]
    a.transport.fault(B, "as bad", 3.0)
    a.ask_until(2.0)
    assert "is refused for" in a.said[-1][0]


def test_dead_processes_do_nothing() -> None:
    world, _, a, _ = pair()
    seen: list[float] = []
    a.loop.call_later(1.0, lambda: seen.append(world.now))
    a.loop.call_later(2.0, lambda: seen.append(world.now))
    world.run(1.5)
    a.loop.kill()
    world.run(3.0)
    assert (seen, world.now) == ([1.0], 3.0)


def test_an_error_halts_the_world_and_is_raised_where_it_runs() -> None:
    world, _, _, _ = pair()
    world.push(1.0, world.halt, ValueError("first"))
    world.push(2.0, world.halt, ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        world.run(5.0)
    assert world.now == 1.0


async def _raises() -> None:
    raise TimeIsUp


async def _raises_aside() -> None:
    def job() -> None:
        raise TimeIsUp

    await asyncio.to_thread(job)


def test_a_time_limit_raised_in_a_handler_ends_the_run() -> None:
    world, _, a, _ = pair()
    with pytest.raises(TimeIsUp):
        a.ask_until(60.0, "time is up")
    assert round(world.now, 3) == 0.3


@pytest.mark.parametrize("work", [_raises, _raises_aside])
def test_a_time_limit_raised_in_a_task_ends_the_run(
    work: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    swarm = SimSwarm(Setup())
    peer = swarm.peers[PeerId("e00-000")]

    def begin() -> None:
        peer.world.push(0.0, lambda: peer.tasks.spawn(work(), "work"), loop=peer.loop)

    swarm.world.push(1.0, begin)
    with pytest.raises(TimeIsUp):
        swarm.world.run(60.0)
    assert swarm.world.now < 2.0


def body(state: str = "training", **more: Any) -> PeerBody:
    return PeerBody(1, "stage", state, 3, "name", "sim", **more)


def test_simulated_records_arrive_late_and_stop_at_partitions() -> None:
    links = SimLinks(random.Random(0), LinkProfile(0.0, 0.0, 0.0, 0.0))
    at = [0.0]
    record_store = SimDht(links, DirectorySettings(), 1.0, lambda: at[0])
    record_store.post(A, body(), 0.0)
    assert set(record_store.read(A, 0.0)) == {A}, "one's own is known at once"
    assert not record_store.read(B, 0.5)
    at[0] = 1.0
    assert set(record_store.read(B, 1.0)) == {A}
    assert not record_store.read(B, 1000.0), "a reader that is ahead takes it for expired"
    links.walls.append(Wall(frozenset({A}), frozenset({B})))
    at[0] = 2.0
    record_store.post(A, body("draining"), 2.0)
    at[0] = 4.0
    assert record_store.read(B, 4.0)[A].body.state == "training", "the newer one never reached it"
    links.walls.clear()
    record_store.withdraw(A, 4.0)
    at[0] = 6.0
    assert not record_store.read(B, 6.0)


def test_a_directory_counts_by_its_own_wall_clock() -> None:
    links = SimLinks(random.Random(0), LinkProfile(0.0, 0.0, 0.0, 0.0))
    record_store = SimDht(links, DirectorySettings(), 0.0, lambda: 1.0)
    ahead = SimDirectory(record_store, A, VirtualClock(1.0, skew=100.0))
    asyncio.run(ahead.publish(body()))
    assert not record_store.read(B, 1.0 - DirectorySettings().max_ttl_s)
    assert record_store.read(B, 1.0)[A].not_after == 101.0 + DirectorySettings().ttl_s
    assert asyncio.run(ahead.post("cells/00", b"leads", 30.0))
    found = asyncio.run(SimDirectory(record_store, B, VirtualClock(1.0)).look("cells/00"))
    assert (found[A].not_after, found[A].seq) == (131.0, 101_000)


def test_simulated_postings_end_and_junk_is_refused() -> None:
    links = SimLinks(random.Random(0), LinkProfile(0.0, 0.0, 0.0, 0.0))
    at = [0.0]
    board = SimDht(links, DirectorySettings(), 1.0, lambda: at[0])
    pair = "outer/1/all"
    board.put(pair, A, b"1", 0.0, 60.0)
    at[0] = 1.0
    assert board.look(pair, B, 1.0)[A].body == b"1"
    assert not board.look("outer/2/all", B, 1.0)
    assert not board.read(B, 1.0), "a posting is no peer's record"
    assert not board.look(pair, B, -600.0), "one that is far behind for too long-lived"
    at[0] = 2.0
    board.put(pair, A, b"3", 2.0, 10.0)
    board.put(pair, B, b"4", 2.0, 5.0)
    at[0] = 3.0
    seen = board.look(pair, B, 3.0)
    assert [(peer, p.body) for peer, p in seen.items()] == [(A, b"3"), (B, b"4")]
    assert seen[A].seq > 1000
    assert set(board.look(pair, B, 8.0)) == {A}
    assert not board.look(pair, B, 70.0)
    for topic in ("x", "peers", "outer/01/all"):
        with pytest.raises(WireError):
            board.put(topic, A, b"1", 3.0, 60.0)
        with pytest.raises(WireError):
            board.look(topic, A, 3.0)
    with pytest.raises(WireError):
        board.put(pair, A, bytes(2049), 3.0, 60.0)


def store(disk: SimDisk, now: list[float]) -> DiskStore:
    return DiskStore(disk, CheckpointSettings(0.0, 1, 2), "run", lambda: now[0], lambda found: None)


def test_a_disk_keeps_the_newest_and_no_half_written_checkpoint() -> None:
    disk = SimDisk(0.5)
    now = [0.0]
    writer = store(disk, now)
    tensors = {"p": torch.ones(4)}
    for epoch in (1, 2, 3):
        writer.save(1, epoch, tensors, {}, {"epoch": epoch})
        now[0] += 1.0
    assert [writer.blocked(), writer.blocked()] == [0.5, 0.0]
    assert writer.epochs(1) == [2, 3]
    now[0] = 10.0
    writer.save(1, 4, tensors, {}, {})
    disk.died(10.2)
    assert store(disk, now).epochs(1) == [2, 3]
    writer.save(1, 4, tensors, {}, {})
    disk.died(10.6)
    assert store(disk, now).epochs(1) == [3, 4]
    assert torch.equal(store(disk, now).load(1, 4).parameters["p"], tensors["p"])
    with pytest.raises(Refused):
        store(disk, now).load(1, 2)


def test_a_device_runs_one_job_at_a_time_by_their_turns() -> None:
    world = VirtualTime(0)
    device = SimDevice(ProcessLoop(world), slowness=2.0)
    done: list[tuple[str, float]] = []

    def job(name: str, turn: float, seconds: float) -> None:
        future = device.enqueue(Priority.VISIT, lambda: device.spend(seconds), turn=turn)
        future.add_done_callback(lambda _: done.append((name, world.now)))

    job("first", 9.0, 0.5)
    job("later", 2.0, 0.25)
    job("sooner", 1.0, 0.25)
    world.run(5.0)
    assert done == [("first", 1.0), ("sooner", 1.5), ("later", 2.0)]
    assert (device.busy_s, device.idle_s) == (2.0, 3.0)


def test_the_set_up_of_a_connection_is_no_part_of_a_way(monkeypatch):
    ping = SimTransport.ping
    met = set()

    async def slow_at_first(self, peer, timeout=5.0):
        first = (self, peer) not in met
        met.add((self, peer))
        return await ping(self, peer, timeout) + first

    monkeypatch.setattr(SimTransport, "ping", slow_at_first)
    with quiet():
        swarm = SimSwarm(Setup(links=LinkProfile(0.02, 0.02)), 0)
        swarm.world.run(30.0)
    measured = [p.work.engines.pipeline.timing.ways(swarm.world.now) for p in swarm.live()]
    trips = [trip for ways in measured for _, trip in ways.values() if trip]
    assert trips
    assert max(trips) < 0.2
