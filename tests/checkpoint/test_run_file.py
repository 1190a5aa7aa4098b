"""A file that the manifest names by its hash, from whichever peer has it."""

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from node.checkpoint import run_file, service
from node.checkpoint.errors import NoDonor
from node.checkpoint.run_file import fetch_file
from node.checkpoint.service import FileReader, FileReaders, StateService
from node.checkpoint.settings import CheckpointSettings
from node.core.errors import UsageFault
from node.core.ids import PeerId
from protos import state_pb2, state_pb2_grpc
from testbed.fakes.memory_net import MemoryNet
from tests.transport.conftest import until

CONTENT = bytes(range(256)) * 3000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Before(state_pb2_grpc.StateServicer):
    """A peer of the same protocol version that does not know the question."""


class Sends(state_pb2_grpc.StateServicer):
    """A peer that sends pieces of its choice, (offset, data) each, then ends the call or breaks
    it."""

    def __init__(
        self, pieces: Callable[[int], list[tuple[int, bytes]]], breaks: bool = False
    ) -> None:
        self.pieces = pieces
        self.breaks = breaks
        self.asked: list[int] = []

    async def File(self, request: state_pb2.FileRequest, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request.offset)
        for offset, data in self.pieces(request.offset):
            yield state_pb2.StateChunk(offset=offset, data=data)
        if self.breaks:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


class Lab:
    def __init__(self) -> None:
        self.net = MemoryNet()
        self.me = self.net.transport("asker")

    async def peer(self, name: str, servicer: state_pb2_grpc.StateServicer) -> PeerId:
        transport = self.net.transport(name)
        state_pb2_grpc.add_StateServicer_to_server(servicer, transport.server)
        await transport.start()
        return PeerId(name)

    async def donor(self, name: str, files: Callable[[str], bytes | None] | None) -> PeerId:
        transport = self.net.transport(name)
        StateService(transport, None, CheckpointSettings(), files=files)  # type: ignore[arg-type]
        await transport.start()
        return PeerId(name)

    async def fetch(self, *donors: PeerId) -> bytes:
        return await fetch_file(self.me, donors, "the file", SHA256)


def holding(sha256: str) -> bytes | None:
    return CONTENT if sha256 == SHA256 else None


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    made = Lab()
    await made.me.start()
    yield made
    await made.net.close()


async def test_peers_without_it_refuse_and_another_is_asked(lab: Lab) -> None:
    older = await lab.peer("older", Before())
    without = await lab.donor("without", lambda sha256: None)
    never = await lab.donor("never", None)
    has = await lab.donor("has", holding)
    assert await lab.fetch(older, without, never, PeerId("dead"), has) == CONTENT
    assert lab.me.faults == []
    with pytest.raises(NoDonor, match="no donor for the file") as raised:
        await lab.fetch(older, without, never, PeerId("dead"))
    said = raised.value.reasons
    assert "does not offer this call" in said[older]
    assert "not held here" in said[without]
    assert "not held here" in said[never]
    assert "cannot be reached" in said[PeerId("dead")]


async def test_only_what_the_manifest_names_is_given(lab: Lab) -> None:
    has = await lab.donor("has", holding)
    for asked in ("", "0" * 64, "../../etc/passwd"):
        with pytest.raises(NoDonor, match="not held here"):
            await fetch_file(lab.me, [has], "it", asked)

    def unreadable(sha256: str) -> bytes:
        raise UsageFault("/home/owner/secret", "")

    silent = await lab.donor("silent", unreadable)
    with pytest.raises(NoDonor, match="cannot be read here") as raised:
        await lab.fetch(silent)
    assert "secret" not in str(raised.value)


async def test_the_next_donor_goes_on_where_one_broke_off(lab: Lab) -> None:
    half = len(CONTENT) // 2
    broken = Sends(lambda at: [(at, CONTENT[at:half])] if at < half else [], breaks=True)
    rest = Sends(lambda at: [(at, CONTENT[at:])])
    first = await lab.peer("first", broken)
    second = await lab.peer("second", rest)
    assert await lab.fetch(first, second) == CONTENT
    assert (broken.asked, rest.asked) == ([0], [half])
    assert lab.me.faults == []


async def test_a_false_beginning_spoils_nothing(lab: Lab) -> None:
    false = await lab.peer("false", Sends(lambda at: [(at, b"x" * 1000)], breaks=True))
    honest = Sends(lambda at: [(at, CONTENT[at:])])
    other = await lab.peer("honest", honest)
    assert await lab.fetch(false, other) == CONTENT
    assert honest.asked == [1000, 0]
    assert lab.me.faults == [], "nobody can say which of the two it was"


async def test_a_false_beginning_beyond_the_end_spoils_nothing(lab: Lab) -> None:
    false = await lab.peer("false", Sends(lambda at: [(at, CONTENT + b"x")], breaks=True))
    has = await lab.donor("has", holding)
    assert await lab.fetch(false, has) == CONTENT
    assert lab.me.faults == []


@pytest.mark.parametrize(
    ("sends", "why"),
    [
        (lambda at: [(0, b"another file")], "another file"),
        (lambda at: [(0, CONTENT[:1000])], "another file"),
        (lambda at: [(5, CONTENT[5:])], "out of order"),
        (lambda at: [(0, b"")], "out of order"),
        (lambda at: [(n << 20, bytes(1 << 20)) for n in range(4)], "beyond"),
    ],
)
async def test_a_liar_is_blamed_and_another_is_asked(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, sends: Any, why: str
) -> None:
    monkeypatch.setattr(run_file, "LARGEST_FILE", 2 << 20)
    liar = await lab.peer("liar", Sends(sends))
    with pytest.raises(NoDonor, match=why):
        await lab.fetch(liar)
    assert [(peer, weight) for peer, _, weight in lab.me.faults] == [(liar, 1.0)]
    assert await lab.fetch(liar, await lab.donor("has", holding)) == CONTENT


async def test_a_silent_donor_is_left(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "STALL_S", 0.05)
    frozen = await lab.donor("frozen", holding)
    lab.net.mute(frozen)
    with pytest.raises(NoDonor, match="no answer in time"):
        await lab.fetch(frozen)


async def test_a_donor_gives_no_file_beyond_the_limit_and_few_at_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LARGEST_FILE", len(CONTENT) - 1)
    has = await lab.donor("has", holding)
    with pytest.raises(NoDonor, match="not held here"):
        await lab.fetch(has)
    monkeypatch.setattr(service, "LARGEST_FILE", len(CONTENT))
    assert await lab.fetch(has) == CONTENT
    monkeypatch.setattr(service, "FILES", 0)
    full = await lab.donor("full", holding)
    with pytest.raises(NoDonor, match="over its limits"):
        await lab.fetch(full)


async def test_one_peer_that_reads_slowly_leaves_others_their_file(lab: Lab) -> None:
    large = bytes(48 << 20)  # more than gRPC takes ahead of its reader
    sha256 = hashlib.sha256(large).hexdigest()
    has = await lab.donor("has", {sha256: large}.get)
    slow = lab.net.transport("slow")
    await slow.start()
    stub = state_pb2_grpc.StateStub(await slow.channel(has))
    request = state_pb2.FileRequest(sha256=sha256)
    call = stub.File(request)
    assert isinstance(await call.read(), state_pb2.StateChunk)
    for _ in range(service.FILES):
        with pytest.raises(grpc.aio.AioRpcError, match="files of this peer"):
            await stub.File(request).read()
    assert await fetch_file(lab.me, [has], "the file", sha256) == large
    call.cancel()


async def test_a_reader_that_does_not_read_a_file_leaves_its_place(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UNREAD_S", 0.5)
    large = bytes(16 << 20)
    sha256 = hashlib.sha256(large).hexdigest()
    transport = lab.net.transport("has")
    nothing: Any = None
    state = StateService(transport, nothing, CheckpointSettings(), files={sha256: large}.get)
    await transport.start()
    stub = state_pb2_grpc.StateStub(await lab.me.channel(transport.peer_id))
    call = stub.File(state_pb2.FileRequest(sha256=sha256))
    assert isinstance(await call.read(), state_pb2.StateChunk)
    await until(lambda: not state._taking._readers, 20)
    assert not state._opened, "its bytes are given back"
    assert await fetch_file(lab.me, [transport.peer_id], "the file", sha256) == large
    call.cancel()


def test_readers_of_files_that_do_not_get_on_give_way() -> None:
    """Four identities that read a byte now and then hold the places of strangers for a while."""
    taking = FileReaders(lambda peer: False)
    ended: list[FileReader] = []

    class Ends:
        def __init__(self) -> None:
            self.reader: FileReader

        def expired(self) -> bool:
            return False

        def reschedule(self, when: float) -> None:
            ended.append(self.reader)

    def reader(now: float) -> FileReader:
        ends = Ends()
        ends.reader = FileReader(ends, now, total=1000)  # type: ignore[arg-type]
        return ends.reader

    four = [reader(0.0) for _ in range(service.FILES // 2)]
    for number, each in enumerate(four):
        assert not taking.enter(each, PeerId(f"p{number}"), "block")
        each.got = 1 if number else 900
    assert taking.enter(reader(1.0), PeerId("newcomer"), "block"), "they have only begun"
    late = reader(service.UNREAD_S + 1)
    assert not taking.enter(late, PeerId("newcomer"), "block")
    assert ended == [four[1]]
    taking.leave(four[1])
    assert taking._readers == [four[0], *four[2:], late]
