"""p2pd under supervision: it comes back as the same peer, and it never outlives us."""

import asyncio
import os
import signal

import psutil
import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from node.core.errors import PeerFault
from node.reach.ladder import Rung
from node.transport import p2p
from protos import ask_pb2
from tests.transport.conftest import introduce, stream, until

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


async def ping(source, peer) -> bytes:
    return (await source.ask(peer, ask_pb2.Ask(ping=ask_pb2.AskPing(nonce=b"n")))).ping.nonce


async def test_a_killed_p2pd_restarts_while_direct_calls_continue(swarm):
    a, b = introduce(await swarm(), await swarm())
    ups: asyncio.Queue = asyncio.Queue()

    b.p2p.on_up.append(ups.put)
    before, old, pid = b.p2p.addresses(), b.p2p.p2p, b.p2p.pid
    b.source.gate.clear()
    call = await stream(a, b.peer_id)
    assert len((await call.read()).data) == 1 << 16

    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(ups.get(), 10) is b.p2p.p2p is not old
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
    a, b = await swarm(), await swarm()
    assert (await b.p2p.connect([a.p2p.addresses()[0]])) == {a.p2p.addresses()[0]: ""}
    assert await ping(a, b.peer_id) == b"n", "a never learned an address of b"
    with pytest.raises(PeerFault):
        await a.p2p.open_stream(b.peer_id, "/test/unheard-of/1", timeout=5)
    with pytest.raises(PeerFault):
        await a.p2p.open_stream("12D3KooWnonsense0", "/tutti/ask/1", timeout=5)


async def test_a_punched_connection_that_takes_long_counts_as_one(swarm, monkeypatch):
    monkeypatch.setattr(p2p, "LINKS_EVERY_S", 0.1)
    a, b = await swarm(), await swarm()
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
            # any daemon that starts meanwhile sweeps too, so what a killed one left may be gone
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
    peer, calls = PeerID.from_base58(b.peer_id), control._pending_calls
    late = asyncio.create_task(control.call_unary_handler(peer, "nobody", b""))
    await asyncio.sleep(0)
    (number,) = calls
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    calls[number] = cancelled  # as it is between the cancellation and what it wakes
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
