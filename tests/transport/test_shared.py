"""Memory shared by daemons of one machine: what goes through it, and what no neighbour can do."""

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.version import SHARED_SINCE, Protocols
from node.telemetry.events import Journal
from node.transport.service import Transport
from node.transport.shared import meeting, sharing
from node.transport.shared.meeting import Invitation, Meeting, accept
from node.transport.shared.region import (
    BLOCK,
    BLOCKS,
    HEADER,
    LEAST,
    NUMBER,
    REUSE_S,
    SIZE,
    SUPPORTED,
    Inbox,
    Outbox,
    Place,
)
from protos.reach_pb2 import ShareAnswer, ShareAsk
from tests.transport.conftest import PeerProcess, introduce, until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="no unnamed files that can be sealed")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def region():
    """A region's outbox and inbox."""
    outbox = Outbox()
    inbox = Inbox(outbox.name, os.dup(outbox.fd))
    yield outbox, inbox
    outbox.close()
    inbox.close()


def file_in_memory(size: int, seals: int) -> int:
    """A descriptor of an unnamed file."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_files() -> int:
    """Number of descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def open_regions() -> int:
    """Number of descriptors of regions of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "memfd:tutti" in os.readlink(f"/proc/self/fd/{name}")
    return found


# ------------------------------------------------------------ a region


def left(outbox: Outbox, data: bytes, now: float = 0.0) -> Place:
    """The place of bytes that were left in a region."""
    raw = outbox.put(memoryview(data), now)
    assert raw is not None
    return Place.read(raw)


def taken(inbox: Inbox, place: Place) -> bytes:
    """The bytes at a place."""
    into = bytearray(place.length + 64)
    length = inbox.take(place, memoryview(into))
    assert not any(into[length:])
    return bytes(into[:length])


def test_pieces_are_taken_in_any_order_and_make_room(region):
    outbox, inbox = region
    sizes = (LEAST, BLOCK - NUMBER, BLOCK - NUMBER + 1, 5 * BLOCK, 2 << 20)
    sent = [os.urandom(size) for size in sizes]
    for _ in range(50):
        places = [left(outbox, data) for data in sent]
        assert len({place.block for place in places}) == len(places)
        for place, data in reversed(list(zip(places, sent, strict=True))):
            assert taken(inbox, place) == data


def test_a_slow_reader_gets_no_further_pieces_and_loses_none(region):
    outbox, inbox = region
    data = os.urandom(1 << 20)
    places = []
    while (raw := outbox.put(memoryview(data), 0.0)) is not None:
        places.append(Place.read(raw))
    assert len(places) == 7
    assert outbox.put(memoryview(data), REUSE_S) is None
    assert [taken(inbox, place) == data for place in places] == [True] * 7
    assert outbox.put(memoryview(data), REUSE_S) is not None


def test_a_region_takes_no_more_than_its_size():
    outbox = Outbox()
    for size in (SIZE, SIZE - HEADER, SIZE - HEADER - NUMBER + 1):
        assert outbox.put(memoryview(bytes(size)), 0.0) is None
    assert outbox.put(memoryview(bytes(SIZE - HEADER - NUMBER)), 0.0) is not None
    assert os.fstat(outbox.fd).st_size == SIZE
    outbox.close()


def test_the_place_of_a_piece_that_nobody_takes_is_used_again(region):
    outbox, inbox = region
    first = left(outbox, os.urandom(SIZE // 2))
    data = os.urandom(SIZE // 2)
    second = left(outbox, data, REUSE_S + 1)
    assert second.block == first.block
    with pytest.raises(WireError, match="not in its region"):
        taken(inbox, first)
    assert taken(inbox, second) == data


def test_a_piece_that_is_withdrawn_makes_room_and_cannot_be_taken(region):
    outbox, inbox = region
    first = left(outbox, os.urandom(SIZE // 2))
    outbox.withdraw(first._replace(number=first.number + 1))
    outbox.withdraw(first._replace(block=1))
    assert outbox.put(memoryview(bytes(SIZE // 2)), 0.0) is None
    outbox.withdraw(first)
    outbox.withdraw(first)
    data = os.urandom(SIZE // 2)
    second = left(outbox, data)
    assert second.block == first.block
    with pytest.raises(WireError, match="not in its region"):
        taken(inbox, first)
    assert taken(inbox, second) == data


@pytest.mark.parametrize(
    "changes",
    [
        {"block": BLOCKS},
        {"block": (1 << 16) - 1},
        {"length": 0},
        {"length": SIZE},
        {"length": 1 << 24},
        {"block": BLOCKS - 1, "length": BLOCK - NUMBER + 1},
        {"number": 0},
        {"number": (1 << 64) - 1},
        {"block": 1},
    ],
)
def test_a_place_without_a_piece_is_refused(region, changes):
    outbox, inbox = region
    place = left(outbox, bytes(LEAST))
    with pytest.raises(WireError):
        taken(inbox, place._replace(**changes))
    assert taken(inbox, place) == bytes(LEAST), "the piece is still there"


def test_a_piece_larger_than_the_room_for_it_is_refused_before_it_is_read(region):
    outbox, inbox = region
    place = left(outbox, os.urandom(LEAST))
    into = bytearray(LEAST - 1)
    with pytest.raises(WireError, match=f"a piece of {LEAST} bytes"):
        inbox.take(place, memoryview(into))
    assert not any(into)


def test_a_place_has_one_length():
    outbox = Outbox()
    raw = outbox.put(memoryview(bytes(LEAST)), 0.0)
    outbox.close()
    assert raw is not None
    for wrong in (b"", raw[:-1], raw + b"\0"):
        with pytest.raises(WireError):
            Place.read(wrong)


def test_only_a_sealed_file_in_memory_is_a_region(tmp_path: Path):
    def on_disk() -> int:
        fd = os.open(tmp_path / "region", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, SIZE)
        return fd

    doubtful: dict[str, Callable[[], int]] = {
        "may shrink": lambda: file_in_memory(SIZE, SEALS & ~fcntl.F_SEAL_SHRINK),
        "may grow": lambda: file_in_memory(SIZE, SEALS & ~fcntl.F_SEAL_GROW),
        "short": lambda: file_in_memory(SIZE - 1, SEALS),
        "long": lambda: file_in_memory(SIZE + 1, SEALS),
        "on a disk": on_disk,
        "a device": lambda: os.open("/dev/zero", os.O_RDWR),
        "a socket": lambda: socket.socket(socket.AF_UNIX).detach(),
        "cannot be written": lambda: file_in_memory(SIZE, SEALS | fcntl.F_SEAL_WRITE),
    }
    before = open_files()
    for what, opened in doubtful.items():
        with pytest.raises(WireError):
            Inbox(b"", opened())
        assert open_files() == before, what
    Inbox(b"", file_in_memory(SIZE, SEALS)).close()


def test_a_region_cannot_be_truncated_and_a_hole_in_it_is_no_piece(region):
    outbox, inbox = region
    place = left(outbox, os.urandom(LEAST))
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(outbox.fd, size)
    os.pwrite(outbox.fd, bytes(NUMBER), HEADER + place.block * BLOCK)
    with pytest.raises(WireError, match="not in its region"):
        taken(inbox, place)


# ------------------------------------------------------------ a meeting


class Inviting:
    """An invitation whose guest is waited for."""

    def __init__(self) -> None:
        self.invitation = Invitation()
        self.address = self.invitation.address
        self.secret = self.invitation.secret
        self.met = asyncio.ensure_future(self.invitation.meet())

    async def accept(self) -> tuple[Meeting, Meeting]:
        """The meetings of both sides, this one first."""
        there = await asyncio.to_thread(accept, self.address, self.secret)
        return await self.met, there


def close(meetings: tuple[Meeting, ...]) -> None:
    for each in meetings:
        each.close()


async def test_both_sides_get_the_region_that_the_other_writes_to():
    before = open_regions()
    here, there = await Inviting().accept()
    assert open_regions() == before + 4
    for giver, taker in ((here, there), (there, here)):
        data = os.urandom(LEAST)
        place = left(giver.outbox, data)
        assert place.region == taker.inbox.name
        assert taken(taker.inbox, place) == data
    close((here, there))
    assert open_regions() == before


async def test_nobody_without_the_secret_gets_a_region():
    before = open_regions()
    inviting = Inviting()
    with pytest.raises(WireError, match="secret"):
        await asyncio.to_thread(accept, inviting.address, bytes(len(inviting.secret)))

    def intrude() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(meeting._path(inviting.address))
            greeting, found, _, _ = socket.recv_fds(stranger, 64, 4)
            assert not found
            assert inviting.secret not in greeting
            bait = file_in_memory(SIZE, SEALS)
            socket.send_fds(stranger, [bytes(40)], [bait])
            os.close(bait)
            assert socket.recv_fds(stranger, 64, 4)[:2] == (b"", [])

    await asyncio.to_thread(intrude)
    close(await inviting.accept())
    assert open_regions() == before


async def test_who_listens_under_the_name_must_know_the_secret():
    inviting = Inviting()
    close(await inviting.accept())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as thief:
        thief.bind(meeting._path(inviting.address))
        thief.listen()
        caught: list[bytes] = []

        def serve() -> None:
            made, _ = thief.accept()
            with made:
                made.send(bytes(32))
                caught.append(made.recv(64))

        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        with pytest.raises(WireError, match="secret"):
            await asyncio.to_thread(accept, inviting.address, inviting.secret)
        await serving
    assert caught == [b""], "something was sent to a process that proved nothing"


async def test_who_hands_over_anything_but_a_region_is_hung_up_on(monkeypatch):
    inviting = Inviting()

    class Unsealed(Outbox):
        def __init__(self) -> None:
            super().__init__()
            self.close()
            self.fd = file_in_memory(SIZE, fcntl.F_SEAL_GROW)

    with monkeypatch.context() as lying:
        lying.setattr(meeting, "Outbox", Unsealed)
        with pytest.raises((WireError, OSError)):
            await asyncio.to_thread(accept, inviting.address, inviting.secret)
    assert not inviting.met.done()
    close(await inviting.accept())


def test_an_address_elsewhere_is_refused_at_once():
    with pytest.raises(ConnectionRefusedError):
        accept(os.urandom(meeting.ADDRESS), os.urandom(meeting.SECRET))


SOMEBODY = """
import os, socket, sys
os.setuid(65534)
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.settimeout(20)
path = bytes.fromhex(sys.argv[2])
"""
"""Begin of a program of another user."""
CONNECTS = f"""{SOMEBODY}
end.connect(path)
got = b""
try:
    got = end.recv(64)
except ConnectionError:
    pass
sys.exit(bool(got))
"""
LISTENS = f"""{SOMEBODY}
end.bind(path)
end.listen()
print("up", flush=True)
made, _ = end.accept()
got = b""
try:
    made.send(bytes.fromhex(sys.argv[1]))
    got = made.recv(64)
except ConnectionError:
    pass
sys.exit(bool(got))
"""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


async def somebody(program: str, address: bytes, greeting: bytes = b"") -> Process:
    """A program of another user, that connects to a socket or listens there."""
    words = (greeting.hex(), meeting._path(address).hex())
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *words, stdout=asyncio.subprocess.PIPE
    )


@only_root
async def test_another_user_is_hung_up_on():
    inviting = Inviting()
    process = await somebody(CONNECTS, inviting.address)
    assert await process.wait() == 0
    close(await inviting.accept())


@only_root
async def test_a_socket_of_another_user_gets_nothing():
    address = os.urandom(meeting.ADDRESS)
    secret = os.urandom(meeting.SECRET)
    process = await somebody(LISTENS, address, meeting._proof(secret, b"asking", b""))
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    with pytest.raises(WireError, match="another user"):
        await asyncio.to_thread(accept, address, secret)
    assert await process.wait() == 0


# ------------------------------------------------------------ peers


def said(transport, kind: str) -> list[str]:
    """Texts of a peer's events of one kind."""
    return [e.text for e in transport._journal.recent() if e.kind == kind]


async def ask(here: Transport, peer: PeerId, method: str, request: bytes) -> bytes:
    """Call a peer's Shelf."""
    call = (await here.channel(peer)).unary_unary(f"/test.Shelf/{method}")
    return await call(request, timeout=20)


async def begin(here: Transport, peer: PeerId) -> None:
    """Open a connection, and share memory if both want to."""
    await here.ping(peer)
    here.leave(peer, memoryview(bytes(LEAST)))
    shared = here.sharing
    await until(
        lambda: shared.shares(peer) or (shared._tried and not shared._asking),
        20,
    )


async def sharing_pair(swarm, **options):
    """Two peers that share memory."""
    a, b = introduce(await swarm(), await swarm(**options))
    await begin(a, b.peer_id)
    await until(lambda: a.sharing.shares(b.peer_id) and b.sharing.shares(a.peer_id), 20)
    return a, b


def given(giver: Transport, taker: Transport, data: bytes) -> bytes | None:
    """Bytes that one peer has left and another one has taken; None if they were not left."""
    place = giver.leave(taker.peer_id, memoryview(data))
    if place is None:
        return None
    into = bytearray(len(data))
    assert taker.fetch(giver.peer_id, place, memoryview(into)) == len(data)
    return bytes(into)


async def test_bytes_go_to_another_process_and_come_from_it(swarm, processes):
    a = await swarm()
    there = await processes().ready()
    b = PeerId(there["peer"])
    a.learn(b, there["multiaddrs"])
    await begin(a, b)
    assert a.sharing.shares(b)
    for _ in range(20):
        data = os.urandom(1 << 20)
        place = a.leave(b, memoryview(data))
        assert place is not None
        assert await ask(a, b, "Take", place) == data
        assert await ask(a, b, "Take", place[:8] + bytes(len(place) - 8)) == b""
        place = await ask(a, b, "Leave", data)
        into = bytearray(len(data))
        assert a.fetch(b, place, memoryview(into)) == len(data)
        assert into == data
    assert a.leave(b, memoryview(bytes(LEAST - 1))) is None
    assert len(said(a, "memory-shared")) == 1


async def test_a_process_that_is_killed_while_it_writes_leaves_nothing(swarm, processes):
    a = await swarm()
    before = open_regions()
    litter = set(os.listdir("/dev/shm"))
    for _ in range(2):
        process: PeerProcess = processes()
        there = await process.ready()
        b = PeerId(there["peer"])
        a.learn(b, there["multiaddrs"])
        await begin(a, b)
        writing = [asyncio.ensure_future(ask(a, b, "Leave", bytes(1 << 20))) for _ in range(20)]
        place = await writing[0]
        os.kill(process.process.pid, signal.SIGKILL)
        ended = await asyncio.gather(*writing, return_exceptions=True)
        assert all(isinstance(e, bytes | grpc.aio.AioRpcError) for e in ended)
        await until(lambda b=b: not a.sharing.shares(b), 20)
        assert a.leave(b, memoryview(bytes(LEAST))) is None
        assert a.fetch(b, place, memoryview(bytearray(1 << 20))) == 1 << 20, "it came before"
        for key in list(a.sharing._inboxes):
            a.sharing._forget(key)
        assert open_regions() == before
    assert set(os.listdir("/dev/shm")) == litter


async def test_pieces_of_a_peer_that_left_can_still_be_read(swarm):
    a, b = await sharing_pair(swarm)
    place = b.leave(a.peer_id, memoryview(b"x" * LEAST))
    assert place is not None
    b.sharing.end(a.peer_id)
    await until(lambda: not a.sharing.shares(b.peer_id), 20)
    into = bytearray(LEAST)
    assert a.fetch(b.peer_id, place, memoryview(into)) == LEAST
    assert into == b"x" * LEAST


async def test_places_of_an_ended_call_are_used_again(swarm):
    a, b = await sharing_pair(swarm)
    for _ in range(20):
        data = memoryview(os.urandom(1 << 20))
        places = [place for _ in range(7) if (place := a.leave(b.peer_id, data))]
        assert len(places) == 7
        assert a.leave(b.peer_id, data) is None
        a.withdraw(b.peer_id, places)
    a.sharing.end(b.peer_id)
    a.withdraw(b.peer_id, places)


async def test_a_place_counts_for_the_peer_that_left_bytes_there_alone(swarm):
    a, b = await sharing_pair(swarm)
    c = await swarm()
    place = b.leave(a.peer_id, memoryview(b"x" * LEAST))
    assert place is not None
    into = memoryview(bytearray(LEAST))
    for here, peer in ((a, c.peer_id), (c, b.peer_id), (b, a.peer_id)):
        with pytest.raises(WireError, match="not shared"):
            here.fetch(peer, place, into)
    assert a.fetch(b.peer_id, place, into) == LEAST


async def test_peers_that_ask_each_other_share_one_pair(swarm):
    a, b = introduce(await swarm(), await swarm())
    await a.ping(b.peer_id)
    await b.ping(a.peer_id)
    await asyncio.gather(begin(a, b.peer_id), begin(b, a.peer_id))
    await until(lambda: a.sharing.shares(b.peer_id) and b.sharing.shares(a.peer_id), 20)
    for here, there in ((a, b), (b, a)):
        data = os.urandom(LEAST)
        assert given(here, there, data) == data
        assert not said(here, "memory-not-shared")


async def test_memory_is_shared_though_a_descriptor_is_missing_for_a_moment(swarm, monkeypatch):
    loop = asyncio.get_running_loop()
    failed = list[int]()
    accepts = loop.sock_accept

    async def accept_later(listener: socket.socket):
        if not failed:
            failed.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return await accepts(listener)

    monkeypatch.setattr(meeting, "asyncio", SimpleNamespace(**vars(asyncio)))
    meeting.asyncio.get_running_loop = lambda: SimpleNamespace(sock_accept=accept_later)
    await sharing_pair(swarm)
    assert failed


async def test_a_peer_whose_ask_is_being_accepted_is_not_asked(swarm, monkeypatch):
    """Two pairs would come about, and each side might keep another one."""
    a, b = introduce(await swarm(), await swarm())
    await a.ping(b.peer_id)
    waits = threading.Event()
    taken = sharing.accept

    def late(address: bytes, secret: bytes) -> Meeting:
        waits.wait(20)
        return taken(address, secret)

    monkeypatch.setattr(sharing, "accept", late)
    asks = asyncio.create_task(begin(b, a.peer_id))
    await until(lambda: a.sharing._accepting, 20)
    assert a.leave(b.peer_id, memoryview(bytes(LEAST))) is None
    assert not a.sharing._asking
    waits.set()
    await asks
    await until(lambda: a.sharing.shares(b.peer_id) and b.sharing.shares(a.peer_id), 20)
    assert not a.sharing._accepting


async def test_who_does_not_want_it_is_sent_bytes_as_before(swarm):
    a, b = introduce(await swarm(), await swarm(shared_memory="off"))
    for _ in range(2):
        await begin(a, b.peer_id)
        assert given(a, b, bytes(LEAST)) is None
        asked_at, why = a.sharing._tried[b.peer_id]
        a.sharing._tried[b.peer_id] = asked_at - sharing.AGAIN_S, why
    await until(lambda: not a.sharing._asking, 20)
    (text,) = said(a, "memory-not-shared")
    assert text.endswith("it refuses: shared memory is off here")


async def test_software_without_it_is_not_asked(swarm):
    old = Protocols(7, SHARED_SINCE - 1)
    a, b = introduce(await swarm(), await swarm(protocols=old))
    await a.ping(b.peer_id)
    assert given(a, b, bytes(LEAST)) is None
    assert not a.sharing._asking


async def test_peers_through_libp2p_are_not_asked(swarm):
    a, b = introduce(await swarm(), await swarm(force_tunnel=True))
    await a.ping(b.peer_id)
    assert given(a, b, bytes(LEAST)) is None
    assert not a.sharing._asking


async def test_memory_is_shared_with_few_peers(swarm, monkeypatch):
    monkeypatch.setattr(sharing, "PEERS", 1)
    a, b = await sharing_pair(swarm)
    c = await swarm()
    introduce(a, c)
    await begin(c, a.peer_id)
    (text,) = said(c, "memory-not-shared")
    assert "memory is shared with" in text
    assert not c.sharing.shares(a.peer_id)
    assert given(b, a, b"x" * LEAST) == b"x" * LEAST


@pytest.mark.parametrize(
    "ask", [ShareAsk(), ShareAsk(address=bytes(16)), ShareAsk(secret=bytes(32))]
)
async def test_a_malformed_ask_is_refused(swarm, ask):
    a = await swarm(started=False)
    assert "not the name" in (await a.sharing.asked(PeerId("x"), ask)).reason


async def test_an_ask_that_leads_nowhere_is_refused_and_no_fault_of_this_daemon():
    """Whoever asked may be gone by now, or may never have listened."""
    errors: list[tuple[str, BaseException]] = []

    async def call(peer: PeerId, asked: ShareAsk) -> ShareAnswer:
        raise PeerFault(peer, "nobody is asked here")

    here = sharing.Sharing(
        True,
        PeerId("me"),
        lambda peer: True,
        call,
        Journal(),
        lambda name, error: errors.append((name, error)),
    )
    nowhere = ShareAsk(address=os.urandom(meeting.ADDRESS), secret=bytes(meeting.SECRET))
    answer = await here.asked(PeerId("gone"), nowhere)
    assert not answer.accepted
    assert answer.reason
    await here.close()
    assert not errors


async def test_a_banned_peer_shares_no_memory(swarm):
    a, b = await sharing_pair(swarm)
    for _ in range(20):
        a.fault(b.peer_id, "garbage", 1.0)
    assert not a.sharing.shares(b.peer_id)
    await until(lambda: not b.sharing.shares(a.peer_id), 20)


async def test_all_is_given_back(swarm):
    before = open_regions()
    a, b = await sharing_pair(swarm)
    assert open_regions() == before + 4
    await a.close()
    await until(lambda: not b.sharing.shares(a.peer_id), 20)
    await b.close()
    assert open_regions() == before
