"""p2pd under supervision: it comes back as the same peer, and it never outlives us."""

import asyncio
import gc
import os
import signal
import uuid
from dataclasses import replace
from unittest.mock import Mock

import psutil
import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo, StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError, write_pbmsg
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from node.core.errors import OutOfResources, PeerFault, WireError
from node.core.ids import PeerId
from node.identity.keys import Identity
from node.identity.places import PlacesByPeer
from node.reach.ladder import Rung
from node.telemetry.events import LINES, Journal
from node.transport import links, p2p
from node.transport.settings import TransportSettings
from protos import ask_pb2
from tests.transport.conftest import introduce, stream, until

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


async def ping(source, peer) -> bytes:
    return (await source.ask(peer, ask_pb2.Ask(ping=ask_pb2.AskPing(nonce=b"n")))).ping.nonce


async def test_a_killed_p2pd_restarts_while_direct_calls_continue(swarm):
    a, b = introduce(await swarm(), await swarm())
    ups: asyncio.Queue = asyncio.Queue()

    b.p2p.on_up.append(ups.put)
    before = b.p2p.addresses()
    old = b.p2p.p2p
    pid = b.p2p.pid
    b.source.gate.clear()
    call = await stream(a, b.peer_id)
    assert len((await call.read()).data) == 1 << 16

    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(ups.get(), 60) is b.p2p.p2p is not old
    assert (b.p2p.restarts, b.p2p.addresses()) == (1, before), "same PeerId, same ports"
    assert b.p2p.pid != pid

    b.source.gate.set()
    assert len((await call.read()).data) == 1 << 16, "the call in flight did not notice"
    assert await ping(b, a.peer_id) == b"n"
    assert await ping(a, b.peer_id) == b"n", "the handlers are back"
    a.forget(b.peer_id)
    await a.channel(b.peer_id)


async def test_dead_initial_peers_neither_stop_the_start_nor_hide(swarm):
    a = await swarm()
    b = await swarm(peers=[NOBODY, a.p2p.addresses()[0]])
    assert set(b.p2p.bootstrap.results) == {NOBODY, a.p2p.addresses()[0]}
    result = await b.p2p.connect([NOBODY, a.p2p.addresses()[0], "/ip4/127.0.0.1/tcp/1", "nonsense"])
    assert result[a.p2p.addresses()[0]] == ""
    assert result[NOBODY]
    assert "not a multiaddr" in result["/ip4/127.0.0.1/tcp/1"]
    assert a.peer_id in await b.p2p.look()


async def test_a_peer_without_an_address_is_reached_by_its_connection(swarm):
    a = await swarm()
    b = await swarm()
    assert (await b.p2p.connect([a.p2p.addresses()[0]])) == {a.p2p.addresses()[0]: ""}
    assert await ping(a, b.peer_id) == b"n", "a never learned an address of b"
    with pytest.raises(PeerFault):
        await a.p2p.open_stream(b.peer_id, "/test/unheard-of/1", timeout=5)
    with pytest.raises(PeerFault):
        await a.p2p.open_stream("12D3KooWnonsense0", "/tutti/ask/1", timeout=5)


async def test_a_punched_connection_that_takes_long_counts_as_one(swarm, monkeypatch):
    monkeypatch.setattr(p2p, "LINKS_EVERY_S", 0.1)
    a = await swarm()
    b = await swarm()
    a.p2p.punched.add(b.peer_id)
    assert b.peer_id not in await a.p2p.look(), "it is under way"
    assert (await b.p2p.connect([a.p2p.addresses()[0]])) == {a.p2p.addresses()[0]: ""}
    assert b.peer_id in await a.p2p.look()
    assert a.p2p.how(b.peer_id) is Rung.PUNCHED
    await b.close()
    await until(lambda: b.peer_id not in a.p2p.links, 10)
    assert not a.p2p.punched, "the next connection is another one"


async def test_p2pd_ends_with_its_daemon_whether_killed_or_closed(processes):
    for orderly, peer in zip((False, True), [processes(), processes()], strict=True):
        facts = await peer.ready()
        child = psutil.Process(facts["p2pd"])
        assert "p2pd" in child.name()
        assert os.getpgid(child.pid) == child.pid, "a Ctrl-C at the terminal must not reach it"
        if orderly:
            assert await peer.end() == 0
        else:
            peer.process.kill()
            peer.process.wait(10)
        await asyncio.to_thread(child.wait, 10)
        if not orderly:
            # any daemon that starts meanwhile sweeps too, so the files of a killed one may be gone
            p2p.RuntimeDirectory().close()
        assert not os.access(facts["runtime"], os.F_OK), (
            "the next daemon sweeps what a killed one left"
        )
        assert not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE


async def test_the_runtime_directory_is_private_and_goes_away(swarm):
    a = await swarm()
    assert a.p2p.runtime.stat().st_mode & 0o777 == 0o700
    assert list(a.p2p.runtime.glob("p2pd-*.sock"))
    p2p.RuntimeDirectory().close()
    assert a.p2p.runtime.exists(), "of the living nothing is swept"
    await a.close()
    assert not a.p2p.runtime.exists()


def test_a_directory_that_is_being_made_is_not_swept(monkeypatch):
    def swept(lock, how, flock=p2p.fcntl.flock):
        monkeypatch.undo()
        p2p.RuntimeDirectory().close()
        flock(lock, how)

    monkeypatch.setattr(p2p.fcntl, "flock", swept)
    made = p2p.RuntimeDirectory()
    assert made.path.exists()
    made.close()
    assert not made.path.exists()


async def test_a_call_that_is_cancelled_as_its_answer_comes_ends_no_other_call(swarm):
    a, b = introduce(await swarm(), await swarm())
    assert await ping(a, b.peer_id) == b"n"
    control = a.p2p.p2p._client.control
    peer = PeerID.from_base58(b.peer_id)
    calls = control._pending_calls
    late = asyncio.create_task(control.call_unary_handler(peer, "nobody", b""))
    await asyncio.sleep(0)
    (number,) = calls
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    calls[number] = cancelled  # the state between the cancellation and the wake-up of its waiter
    with pytest.raises(P2PDaemonError):
        await asyncio.wait_for(control.call_unary_handler(peer, "nobody", b""), 20)
    late.cancel()
    assert a.p2p.restarts == 0


async def test_a_p2pd_that_is_not_listened_to_any_more_is_replaced(swarm):
    a = await swarm()
    ups: asyncio.Queue = asyncio.Queue()
    a.p2p.on_up.append(ups.put)
    a.p2p.p2p._client.control._read_task.cancel()
    assert await asyncio.wait_for(ups.get(), 30) is a.p2p.p2p
    assert a.p2p.restarts == 1


async def test_a_p2pd_that_stands_still_is_replaced_and_then_one_that_dies(swarm, monkeypatch):
    monkeypatch.setattr(p2p, "HEALTH_EVERY_S", 0.1)
    a = await swarm()
    ups: asyncio.Queue = asyncio.Queue()
    a.p2p.on_up.append(ups.put)
    addresses = a.p2p.addresses()
    pid = a.p2p.pid
    monkeypatch.setattr(p2p, "HEALTH_TIMEOUT_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    assert await asyncio.wait_for(ups.get(), 60) is a.p2p.p2p
    monkeypatch.undo()
    assert not psutil.pid_exists(pid)
    os.kill(a.p2p.pid, signal.SIGKILL)
    assert await asyncio.wait_for(ups.get(), 60) is a.p2p.p2p
    assert a.p2p.addresses() == addresses
    b = await swarm()
    introduce(a, b)
    assert await ping(a, b.peer_id) == b"n"
    assert await ping(b, a.peer_id) == b"n", "the handlers are back"


async def test_a_p2pd_that_holds_too_much_memory_is_replaced(swarm, monkeypatch):
    monkeypatch.setattr(p2p, "MEMORY_EVERY_S", 0.1)
    a = await swarm()
    pid = a.p2p.pid
    settings = a.p2p._settings
    a.p2p._settings = replace(settings, p2pd_memory=1 << 20)
    await until(lambda: a.p2p.outgrown, 10)
    a.p2p._settings = settings
    await until(lambda: a.p2p.up and a.p2p.pid != pid, 20)
    (died,) = [e for e in a._journal.recent() if e.kind == "p2pd-died"][:1]
    assert "of memory, 1 are allowed" in died.text


async def test_short_of_memory_a_p2pd_hangs_up_on_strangers_only(swarm, monkeypatch):
    monkeypatch.setattr(p2p, "LINKS_EVERY_S", 0.1)
    monkeypatch.setattr(p2p, "MEMORY_EVERY_S", 0.1)
    a = await swarm()
    stranger = await swarm()
    member = await swarm()
    a.p2p.established = lambda peer: peer == member.peer_id
    for other in (stranger, member):
        await other.p2p.connect([a.p2p.addresses()[0]])
    await until(lambda: {stranger.peer_id, member.peer_id} <= set(a.p2p.links), 10)
    most = a.p2p._settings.p2pd_memory
    pid = a.p2p.pid
    monkeypatch.setattr(p2p, "resident", lambda of: most * 19 // 20 if of == pid else 0)
    await until(lambda: set(a.p2p.links) == {member.peer_id}, 10)
    assert a.p2p.refusals["memory"] >= 1
    assert not a.p2p.restarts


async def test_a_connection_of_a_stranger_that_nobody_uses_ends(swarm, monkeypatch):
    a = await swarm()
    stranger = await swarm()
    await stranger.p2p.connect([a.p2p.addresses()[0]])
    await until(lambda: stranger.peer_id in a.p2p.links, 10)
    monkeypatch.setattr(links, "IDLE_S", 0.0)
    monkeypatch.setattr(p2p, "LINKS_EVERY_S", 0.1)
    await until(lambda: not a.p2p.links, 10)
    assert not a.p2p.refusals, "that is no refusal"
    assert await ping(stranger, a.peer_id) == b"n", "it is welcome again"


async def test_streams_of_strangers_share_half_of_the_places(swarm):
    a = await swarm(started=False)
    greedy = await swarm()
    newcomer = await swarm()
    held = asyncio.Event()

    async def hold(peer, reader, writer):
        await held.wait()

    a.p2p._streams = PlacesByPeer("streams", 8, 4)
    a.p2p.add_stream("/test/hold/1", hold)
    await a.start()
    for other in (greedy, newcomer):
        other.learn(a.peer_id, a.p2p.addresses())
    streams = [await greedy.p2p.open_stream(a.peer_id, "/test/hold/1") for _ in range(5)]
    await until(lambda: a.p2p.refusals["streams"] == 1, 10)
    assert a.p2p._incoming == {greedy.peer_id: 4}, "the fifth of one peer"
    mine, _ = await newcomer.p2p.open_stream(a.peer_id, "/test/hold/1")
    await until(lambda: a.p2p._incoming == {greedy.peer_id: 3, newcomer.peer_id: 1}, 10)
    await until(lambda: sum(reader.at_eof() for reader, _ in streams) == 2, 10)
    assert not mine.at_eof()
    assert a.p2p.refusals == {"streams": 2}
    held.set()
    await until(lambda: not len(a.p2p._streams) and not a.p2p._incoming, 10)


async def test_a_stream_that_loses_its_place_before_it_is_handled_is_closed(swarm):
    """As when p2pd brings several streams at once."""
    a = await swarm(started=False)
    held = asyncio.Event()

    async def hold(peer, reader, writer):
        await held.wait()

    a.p2p._streams = PlacesByPeer("streams", 4, 4)
    a.p2p.add_stream("/test/hold/1", hold)
    enter = a.p2p._entrances["/test/hold/1"]
    greedy, newcomer = (PeerID.from_base58(Identity.ephemeral().peer_id) for _ in range(2))
    writers = [Mock(asyncio.StreamWriter) for _ in range(3)]
    for peer, writer in zip((greedy, greedy, newcomer), writers, strict=True):
        info = StreamInfo(peer, Multiaddr("/ip4/192.0.2.1/tcp/1"), "/test/hold/1")
        await enter(info, asyncio.StreamReader(), writer)
    there = {PeerId(greedy.to_base58()): 1, PeerId(newcomer.to_base58()): 1}
    await until(lambda: a.p2p._incoming == there, 10)
    assert [writer.close.called for writer in writers] == [False, True, False]
    held.set()
    await until(lambda: not a.p2p._incoming, 10)
    assert all(writer.close.called for writer in writers)


async def test_streams_that_one_key_opens_and_ends_get_few_lines():
    journal = Journal()
    daemon = p2p.P2pDaemon(Identity.ephemeral(), TransportSettings(), journal)
    peer = PeerID.from_base58(Identity.ephemeral().peer_id)
    info = StreamInfo(peer, Multiaddr("/ip4/192.0.2.1/tcp/1"), "/test/1")

    async def end(*_: object) -> None:
        raise WireError("the stream ended")

    daemon.add_stream("/test/1", end)
    writer = Mock(asyncio.StreamWriter)
    times = 10
    at_once = p2p.STREAMS_PER_PEER
    for _ in range(times):
        for _ in range(at_once):
            await daemon._entrances["/test/1"](info, asyncio.StreamReader(), writer)
        await until(lambda: not daemon._incoming, 10)
    streams = times * at_once
    await daemon.close()
    *told, last = journal.recent(streams)
    assert [event.kind for event in told] == ["stream-failed"] * LINES
    assert (last.kind, last.fields["lines"]) == ("kept-back", streams - LINES)


async def test_a_request_is_measured_before_it_is_parsed(swarm):
    a = await swarm()
    b = await swarm()
    handled = []

    async def answer(request, context):
        handled.append(request)
        return dht_pb2.PingResponse()

    await a.p2p.p2p.add_protobuf_handler("Test.rpc", answer, dht_pb2.StoreRequest)
    await b.p2p.connect([a.p2p.addresses()[0]])

    async def call(nbytes: int):
        return await b.p2p.p2p.call_protobuf_handler(
            PeerID.from_base58(a.peer_id),
            "Test.rpc",
            dht_pb2.StoreRequest(values=[bytes(nbytes)]),
            dht_pb2.PingResponse,
        )

    await call(p2p.UNARY_BYTES - 100)
    with pytest.raises(P2PHandlerError, match="262144 are allowed"):
        await call(p2p.UNARY_BYTES)
    assert len(handled) == 1
    assert a.p2p.refusals == {"requests": 1}


async def test_a_peer_that_sends_too_many_bytes_of_requests_is_refused_alone(swarm, monkeypatch):
    monkeypatch.setattr(p2p, "UNARY_BYTES_PER_S", 0.0)
    a = await swarm()
    greedy = await swarm()
    other = await swarm()
    handled = []

    async def answer(request, context):
        handled.append(context.remote_id.to_base58())
        return dht_pb2.PingResponse()

    await a.p2p.p2p.add_protobuf_handler("Test.rpc", answer, dht_pb2.StoreRequest)

    async def call(peer):
        await peer.p2p.connect([a.p2p.addresses()[0]])
        await peer.p2p.p2p.call_protobuf_handler(
            PeerID.from_base58(a.peer_id),
            "Test.rpc",
            dht_pb2.StoreRequest(keys=[b""] * (p2p.UNARY_BYTES // 3)),
            dht_pb2.PingResponse,
        )

    await call(greedy)
    with pytest.raises(P2PHandlerError, match="bytes of requests"):
        await call(greedy)
    await call(other)
    assert handled == [greedy.peer_id, other.peer_id]
    assert a.p2p.refusals == {"requests": 1}


async def test_the_bytes_of_a_call_count_as_sent_here_and_as_received_there(swarm):
    a = await swarm()
    b = await swarm()

    async def answer(request, context):
        return dht_pb2.StoreRequest(values=[bytes(50_000)])

    await a.p2p.p2p.add_protobuf_handler("Test.rpc", answer, dht_pb2.StoreRequest)
    await b.p2p.connect([a.p2p.addresses()[0]])
    for transport in (a, b):
        transport._count_p2pd()
    before = {
        transport: (transport.traffic.sent, transport.traffic.received) for transport in (a, b)
    }
    for _ in range(10):
        await b.p2p.p2p.call_protobuf_handler(
            PeerID.from_base58(a.peer_id),
            "Test.rpc",
            dht_pb2.StoreRequest(values=[bytes(20_000)]),
            dht_pb2.StoreRequest,
        )
    for transport, sent, received in ((a, 500_000, 200_000), (b, 200_000, 500_000)):
        transport._count_p2pd()
        assert sent <= transport.traffic.sent - before[transport][0] < 1.2 * sent
        assert received <= transport.traffic.received - before[transport][1] < 1.2 * received


def request(protocol: str, nbytes: int = 1) -> p2pd_pb2.CallUnaryRequest:
    data = dht_pb2.StoreRequest(values=[bytes(nbytes)]).SerializeToString()
    return p2pd_pb2.CallUnaryRequest(peer=b"peer", proto=protocol, data=data)


def from_p2pd(*messages: tuple[uuid.UUID, dict]) -> asyncio.StreamReader:
    """A connection on which p2pd has said all of this, and ended."""
    reader = asyncio.StreamReader()
    for call, fields in messages:
        message = p2pd_pb2.PersistentConnectionResponse(callId=call.bytes, **fields)
        said = message.SerializeToString()
        length = len(said)
        while length > 127:
            reader.feed_data(bytes([length & 127 | 128]))
            length >>= 7
        reader.feed_data(bytes([length]) + said)
    reader.feed_eof()
    return reader


async def test_an_answer_that_is_cancelled_before_it_begins_is_not_kept():
    control = ControlClient(DaemonConnector(), _initialized_with_create=True)
    control._handler_tasks = p2p._HandlerTasks()
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    answered = []

    async def answer(request: bytes, peer: PeerID) -> bytes:
        await asyncio.sleep(0)
        answered.append(len(request))
        return b""

    control.unary_handlers["Test.rpc"] = answer
    ended, twice = uuid.uuid4(), uuid.uuid4()
    said = from_p2pd(
        (ended, {"requestHandling": request("Test.rpc", 1 << 20)}),
        (ended, {"cancel": p2pd_pb2.Cancel()}),
        (uuid.uuid4(), {"requestHandling": request("Test.other")}),
        (twice, {"requestHandling": request("Test.rpc")}),
        (twice, {"requestHandling": request("Test.rpc")}),
    )
    await control._read_from_persistent_conn(said)
    assert len(control._handler_tasks) == 3
    await until(lambda: not control._handler_tasks and not control._handler_tasks._under_way, 10)
    gc.collect()
    assert len(answered) == 2, "two requests with one id are two requests"
    assert not complaints


async def test_requests_of_strangers_leave_nothing_behind(swarm):
    a = await swarm()
    stranger = await swarm()
    go = asyncio.Event()
    begun = []

    async def answer(request, context):
        begun.append(request)
        await go.wait()
        return dht_pb2.PingResponse()

    await a.p2p.p2p.add_protobuf_handler("Test.rpc", answer, dht_pb2.StoreRequest)
    await stranger.p2p.connect([a.p2p.addresses()[0]])
    under_way = a.p2p.p2p._client.control._handler_tasks

    async def send(protocol: str, call: uuid.UUID, nbytes: int = 1) -> asyncio.StreamWriter:
        _, writer = await stranger.p2p.open_stream(a.peer_id, "Test.rpc")
        asked = p2pd_pb2.PersistentConnectionRequest(
            callId=call.bytes, callUnary=request(protocol, nbytes)
        )
        await write_pbmsg(writer, asked)
        return writer

    same = uuid.uuid4()
    writers = [await send("Test.rpc", same), await send("Test.rpc", same)]
    await until(lambda: len(begun) == 2, 10)
    go.set()
    writers += [await send("Test.other", uuid.uuid4()) for _ in range(3)]
    for _ in range(10):
        (await send("Test.rpc", uuid.uuid4(), 200_000)).close()
    await asyncio.sleep(0.5)
    await until(lambda: not under_way, 10)
    lines = [*a._journal.recent(), *stranger._journal.recent()]
    assert not [line for line in lines if "not supported" in line.text]
    for writer in writers:
        writer.close()


async def test_an_address_that_cannot_be_read_ends_nothing(swarm, monkeypatch):
    """A stranger may be connected by a protocol that p2pd knows and hivemind does not."""
    monkeypatch.setattr(p2p, "LINKS_EVERY_S", 0.1)
    webtransport = b"\xd1\x03"
    plain = Multiaddr("/ip4/192.0.2.1/udp/1/quic-v1")
    strange = Multiaddr(plain.to_bytes() + webtransport)
    with pytest.raises(ValueError, match="Unknown Protocol"):
        str(strange)
    a = await swarm(started=False)
    held = asyncio.Event()

    async def hold(peer, reader, writer):
        await held.wait()

    a.p2p.add_stream("/test/hold/1", hold)
    await a.start()
    one, other = (PeerId(Identity.ephemeral().peer_id) for _ in range(2))
    links_of = {one: [strange], other: [strange, plain]}

    async def list_peers():
        return [PeerInfo(PeerID.from_base58(peer), at) for peer, at in links_of.items()]

    monkeypatch.setattr(a.p2p.p2p, "list_peers", list_peers)
    await until(lambda: a.p2p.links == {one: (), other: (str(plain),)}, 10)
    await asyncio.sleep(0.3)
    assert "p2p.links" in {task.get_name() for task in a.p2p._tasks._tasks}, "it still looks"

    info = StreamInfo(PeerID.from_base58(one), strange, "/test/hold/1")
    await a.p2p._entrances["/test/hold/1"](info, asyncio.StreamReader(), Mock(asyncio.StreamWriter))
    assert a.p2p._incoming == {one: 1}
    held.set()

    before = a.p2p.addresses()
    identify = a.p2p.p2p._client.identify

    async def with_another():
        peer, found = await identify()
        return peer, (strange, *found)

    monkeypatch.setattr(a.p2p.p2p._client, "identify", with_another)
    await a.p2p._identify(a.p2p.p2p)
    assert a.p2p.addresses() == before


async def test_p2pd_relays_for_nobody(swarm):
    a = await swarm()
    b = await swarm()
    b.learn(a.peer_id, a.p2p.addresses())
    _, stream_of_ours = await b.p2p.open_stream(a.peer_id, "/tutti/ask/1")
    stream_of_ours.close()
    with pytest.raises(PeerFault, match="protocols not supported"):
        await b.p2p.open_stream(a.peer_id, "/libp2p/circuit/relay/0.2.0/hop")


async def test_p2pd_starts_again_after_a_cleaner_of_temporary_files(swarm):
    a = await swarm()
    ups: asyncio.Queue = asyncio.Queue()
    a.p2p.on_up.append(ups.put)
    (a.p2p.runtime / p2p.CONFIGURATION).unlink()
    os.kill(a.p2p.pid, signal.SIGKILL)
    await asyncio.wait_for(ups.get(), 60)


async def test_a_runtime_directory_that_cannot_be_written_is_named(swarm):
    a = await swarm(started=False)
    (a.p2p.runtime / p2p.CONFIGURATION).mkdir()
    with pytest.raises(OutOfResources, match=f"{a.p2p.runtime}.* cannot be written: Is a dir"):
        await a.start()


async def test_without_quic_nothing_is_dialled_over_udp(swarm):
    a = await swarm()
    b = await swarm(quic=True)
    over_udp = f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{b.peer_id}"
    assert "transport.quic is off" in (await a.p2p.connect([over_udp]))[over_udp]
    assert "transport.quic" not in (await b.p2p.connect([over_udp]))[over_udp]
    over_tcp = b.p2p.addresses()[0]
    assert a.p2p.dialable([over_udp, over_tcp]) == [over_tcp]
    assert a.p2p.dialable([over_udp]) == [over_udp], "so that the reason is told"
    a.learn(b.peer_id, [over_udp, over_tcp])
    assert await ping(a, b.peer_id) == b"n"


def test_p2pd_listens_on_udp_only_for_quic():
    assert p2p.listen_addresses(["0.0.0.0", "::"], 7, None) == [
        "/ip4/0.0.0.0/tcp/7",
        "/ip6/::/tcp/7",
    ]
    assert p2p.listen_addresses(["0.0.0.0"], 7, 8) == [
        "/ip4/0.0.0.0/tcp/7",
        "/ip4/0.0.0.0/udp/8/quic-v1",
    ]
