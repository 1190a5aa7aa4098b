"""Places at a relay: a newcomer's reservation and circuit while others hold all they can."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest

from node.core.ids import PeerId
from node.identity.faults import TokenBucket
from node.reach.settings import ReachSettings
from node.telemetry.events import LINES, Journal
from node.telemetry.metrics import Metrics
from node.transport.frames import parsed, read_frame, write_frame
from node.transport.ways import relay as relay_module
from node.transport.ways.relay import ASK_BYTES, CIRCUITS_PER_PAIR, UNUSED_S, Relay
from protos.reach_pb2 import Connect, RelayAnswer, RelayAsk, Relayed, Reserve
from tests.transport.conftest import until

MEMBER = PeerId("member")
NEWCOMER = PeerId("newcomer")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pair() -> tuple[Stream, Stream]:
    """Both ends of a stream."""
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


class Hub:
    """A relay without p2pd: streams are socket pairs. `brought`: the clients' ends of them."""

    def __init__(self, **limits: int) -> None:
        self.brought: list[Stream] = []
        self.blocks: dict[PeerId, str] = {}
        self.offers = True
        self.journal = Journal()
        self.relay = Relay(
            self,
            ReachSettings(**limits),
            lambda peer, ask: None,
            lambda: self.offers,
            self.journal,
            Metrics(),
            established=lambda peer: peer == MEMBER,
            block=lambda peer: self.blocks.get(peer, ""),
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def open_stream(
        self, peer: PeerId, name: str, timeout: float = 0.0, limit: int = 0
    ) -> Stream:
        here, there = await pair()
        self.brought.append(there)
        self._writers += [here[1], there[1]]
        return here

    async def ask(self, peer: PeerId, ask: RelayAsk) -> tuple[str, Stream]:
        """Ask the relay; returns the reason of a refusal, "" for none, and the asker's end of the
        stream."""
        here, there = await pair()
        self._writers += [here[1], there[1]]
        task = asyncio.create_task(self._serve(peer, here))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await write_frame(there[1], ask.SerializeToString())
        answer = parsed(RelayAnswer, await read_frame(there[0], ASK_BYTES), "an answer")
        if not answer.granted:
            there[1].close()
        return answer.reason, there

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        try:
            await self.relay.serve(peer, *stream)
        except (OSError, TimeoutError):
            pass
        finally:
            stream[1].close()

    async def reserve(self, peer: PeerId) -> tuple[str, Stream]:
        return await self.ask(peer, RelayAsk(reserve=Reserve()))

    async def connect(self, peer: PeerId, target: PeerId) -> tuple[str, Stream]:
        return await self.ask(peer, RelayAsk(connect=Connect(target=target, stream="x")))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    made = Hub(relay_clients=8, relay_circuits=32, relay_circuits_each=4)
    yield made
    await made.close()


def attackers(count: int) -> list[PeerId]:
    return [PeerId(f"attacker-{number}") for number in range(count)]


async def ended(stream: Stream) -> bool:
    """Wait until the relay hangs up."""
    async with asyncio.timeout(10):
        while await stream[0].read(1 << 16):
            pass
    return True


async def test_strangers_leave_places_to_members(hub: Hub) -> None:
    for peer in attackers(8):
        assert (await hub.reserve(peer))[0] == ""
    refused, _ = await hub.reserve(NEWCOMER)
    assert refused == "the 8 reservations for strangers are taken"
    assert (await hub.reserve(MEMBER))[0] == ""
    assert hub.relay.refusals["reservations"] == 1


async def test_a_newcomer_takes_a_reservation_from_a_crowded_block(hub: Hub) -> None:
    held = {}
    for peer in attackers(8):
        hub.blocks[peer] = "192.0.2.0/24"
        held[peer] = (await hub.reserve(peer))[1]
    hub.blocks[NEWCOMER] = "198.51.100.0/24"
    assert (await hub.reserve(NEWCOMER))[0] == ""
    assert hub.relay.clients == 8
    gone = [peer for peer in held if peer not in hub.relay._clients]
    assert len(gone) == 1
    assert await ended(held[gone[0]])


async def test_a_reservation_that_nobody_used_for_long_gives_way(hub: Hub) -> None:
    peers = attackers(8)
    held = {peer: (await hub.reserve(peer))[1] for peer in peers}
    long_ago = time.monotonic() - UNUSED_S - 1
    for peer in peers[2:4]:
        hub.relay._clients[peer].used = long_ago - (peer == peers[3])
    assert (await hub.connect(NEWCOMER, peers[3]))[0] == ""
    hub.relay._clients[peers[3]].used = long_ago - 1
    assert (await hub.reserve(NEWCOMER))[0] == "", "in the place of the third: the fourth is in use"
    assert await ended(held[peers[2]])
    assert {peers[3], NEWCOMER} < set(hub.relay._clients)
    assert (await hub.reserve(PeerId("another")))[0], "all others were used lately"


async def test_a_newcomer_gets_a_circuit_while_sixteen_keys_hold_all_others(hub: Hub) -> None:
    targets = attackers(8)
    for peer in targets:
        await hub.reserve(peer)
    await hub.reserve(MEMBER)
    held = [
        (await hub.connect(peer, targets[number % 8]))[1]
        for peer in (PeerId(f"caller-{n}") for n in range(8))
        for number in range(4)
    ]
    assert hub.relay.circuits == 32
    reason, (reader, writer) = await hub.connect(NEWCOMER, MEMBER)
    assert reason == ""
    assert hub.relay.circuits == 32
    word = parsed(Relayed, await read_frame(hub.brought[-1][0], ASK_BYTES), "a relayed stream")
    assert word.source == NEWCOMER
    writer.write(b"hello")
    assert await hub.brought[-1][0].readexactly(5) == b"hello"
    assert hub.relay.refusals["circuits"] == 1
    assert await ended(held[3]), "the newest of the first caller"
    for _ in range(4):
        assert (await hub.connect(MEMBER, targets[0]))[0] == "", "members have places of their own"
    assert (await hub.connect(MEMBER, targets[1]))[0] == "4 circuits of this peer are open"
    assert not reader.at_eof()


async def test_two_peers_have_few_circuits_between_them() -> None:
    hub = Hub(relay_circuits_each=100)
    try:
        one, other = attackers(2)
        await hub.reserve(one)
        await hub.reserve(other)
        for number in range(CIRCUITS_PER_PAIR):
            caller, target = (one, other) if number % 2 else (other, one)
            assert (await hub.connect(caller, target))[0] == ""
        reason, _ = await hub.connect(one, other)
        assert reason == f"{CIRCUITS_PER_PAIR} circuits between these two peers are open"
    finally:
        await hub.close()


async def test_a_circuit_lives_as_long_as_bytes_move(hub: Hub, monkeypatch) -> None:
    await hub.reserve(MEMBER)
    _, (_, writer) = await hub.connect(NEWCOMER, MEMBER)
    (circuit,) = hub.relay._open._holders
    before = circuit.alive.when()
    assert before is not None
    await read_frame(hub.brought[-1][0], ASK_BYTES)
    writer.write(b"x")
    await hub.brought[-1][0].readexactly(1)
    assert (circuit.alive.when() or 0.0) > before


async def test_a_silent_circuit_ends(hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr(relay_module, "CIRCUIT_SILENT_S", 0.05)
    await hub.reserve(MEMBER)
    _, stream = await hub.connect(NEWCOMER, MEMBER)
    assert await ended(stream)
    await until(lambda: not hub.relay.circuits, 10)
    assert not hub.relay._circuits


async def test_the_refused_are_told_the_true_reason(hub: Hub) -> None:
    assert (await hub.connect(NEWCOMER, MEMBER))[0] == "it is not connected to this relay"
    hub.offers = False
    assert (await hub.reserve(MEMBER))[0] == "this node does not relay"
    assert hub.relay.refusals == {"no client": 1, "not allowed": 1}


async def test_a_client_that_comes_again_and_again_gets_few_lines(hub: Hub) -> None:
    for _ in range(2 * LINES):
        await hub.reserve(MEMBER)
    told = [event for event in hub.journal.recent() if event.kind == "relay-client"]
    assert len(told) == LINES


async def test_a_question_too_many_of_a_stranger_is_refused_unread(hub: Hub, monkeypatch) -> None:
    hub.relay._strangers = TokenBucket(0.0, 1.0)
    assert (await hub.connect(NEWCOMER, MEMBER))[0] == "it is not connected to this relay"
    monkeypatch.setattr(relay_module, "parsed", None)
    assert (await hub.connect(NEWCOMER, MEMBER))[0] == "too many questions"
    monkeypatch.undo()
    assert (await hub.connect(MEMBER, NEWCOMER))[0] == "it is not connected to this relay"
    assert hub.relay.refusals == {"no client": 2, "questions": 1}


async def test_a_circuit_that_lost_its_place_ends_though_its_bytes_move_on() -> None:
    circuit = relay_module._Circuit(MEMBER, (MEMBER, NEWCOMER))
    begun = asyncio.Event()

    async def carries() -> None:
        async with circuit.alive:
            circuit.moved()
            begun.set()
            await asyncio.sleep(60)

    carrying = asyncio.create_task(carries())
    await begun.wait()
    circuit.end()
    circuit.moved()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(carrying, 30)
    assert circuit.alive.expired()
