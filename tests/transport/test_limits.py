"""The table of limits: complete, the same in the documentation, and enforced before anything is
parsed."""

import asyncio
import dataclasses
import re
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hivemind.dht.protocol import DHTProtocol

from node.core.errors import WireError
from node.dht.settings import DirectorySettings
from node.dht.topics import WRITERS as topics_of_the_directory
from node.transport import ask, handshake
from node.transport.limits import FAVOUR, KIB, LARGEST, NOTES, RPCS, SenderKind, limit_of, short
from node.transport.ways import bypass, relay, tunnel
from node.wire.limits import SIZES
from protos import training_pb2 as pb
from tests.transport.conftest import introduce, stream, tell, until

ROOT = Path(__file__).parents[2]
TELL = "/tutti.v1.Training/Tell"
OF_THE_OPERATOR = {"Control"}
"""Services on the unix socket of the daemon's own user."""
WITHOUT_PROTO = {"/tutti.v1.Link/Ping", "/tutti.v1.Link/Punch", "/tutti.v1.Link/Share"}
"""Calls served as bytes, without a proto."""


def methods() -> set[str]:
    """Every RPC between peers that is declared in protos/."""
    found = set[str]()
    for file in (ROOT / "protos").glob("*.proto"):
        service = package = ""
        for line in file.read_text().splitlines():
            if named := re.match(r"package ([\w.]+);", line):
                package = named[1]
            elif named := re.match(r"service (\w+)", line):
                service = named[1]
            elif named := re.match(r"\s+rpc (\w+)\(", line):
                found.add(f"/{package}.{service}/{named[1]}")
    return {m for m in found if m.split("/")[1].split(".")[-1] not in OF_THE_OPERATOR}


def written(anchor: str = "rpc-limits") -> dict[str, list[str]]:
    """The rows of a table in docs/protocol.md, by the first cell."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    table = text.split(f'<a id="{anchor}"></a>')[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def size(nbytes: int) -> str:
    return f"{nbytes // KIB} KiB" if nbytes < 1024 * KIB else f"{nbytes / 1024 / KIB:g} MiB"


def cells(row) -> list[str]:
    return [
        row.sender.value,
        size(row.size),
        f"{row.at_once}",
        f"{row.per_s:g}, {row.burst:g}",
        f"{row.within_s:g} s",
        f"{row.breach:g}",
    ]


def test_every_rpc_and_every_training_message_has_a_row() -> None:
    assert set(RPCS) == methods() | WITHOUT_PROTO
    kinds = {f.number: f.name for f in pb.Note.DESCRIPTOR.oneofs_by_name["say"].fields}
    assert {number: name for number, (name, _) in NOTES.items()} == kinds


def test_the_documentation_shows_the_same_table() -> None:
    rows = {short(m): row for m, row in RPCS.items()}
    shown = {name: cells(row) for name, row in rows.items()}
    for name, row in NOTES.values():
        together = ["", "", ""]
        shown[f"Training/Tell {name}"] = [
            row.sender.value,
            size(row.size),
            *together,
            f"{row.breach:g}",
        ]
    assert written() == shown


def test_the_documentation_says_what_every_call_may_hold() -> None:
    assert set(written("held")) == {short(method) for method in RPCS}


def test_the_documentation_has_every_stream_every_request_and_every_topic() -> None:
    streams = {handshake.STREAM, ask.STREAM, tunnel.STREAM, bypass.STREAM}
    streams |= {relay.RELAY, relay.RELAYED}
    in_code = {
        found[1]
        for file in (ROOT / "node" / "transport").rglob("*.py")
        for found in re.finditer(r'"(/tutti/\w+/\d+)"', file.read_text())
    }
    assert in_code == streams, "another stream"
    requests = {name.removeprefix("rpc_") for name in vars(DHTProtocol) if name[:4] == "rpc_"}
    rows = " ".join(written("stream-limits"))
    topics = {"peers", *topics_of_the_directory}
    assert not [name for name in streams | requests if name not in rows]
    assert not [topic for topic in topics if f"topic `{topic}" not in rows]


def test_the_documentation_says_how_many_strangers_a_topic_takes() -> None:
    most = {"peers": DirectorySettings().max_peers, **topics_of_the_directory}
    told = [(re.match(r"\w+", topic), row[-1]) for topic, row in written("topics").items()]
    assert {(kind[0], places) for kind, places in told if kind} == {
        (kind, str(places)) for kind, places in most.items()
    }
    kept = written("stream-limits")
    for kind, places in most.items():
        at_once = kept[f"topic `{kind}"][2]
        assert at_once.split(",")[0].split()[0] == str(places)


@pytest.mark.parametrize(("number", "kind"), [(n, kind) for n, (kind, _) in NOTES.items()])
def test_the_kind_of_a_training_message_is_read_without_parsing_it(number: int, kind: str) -> None:
    note = pb.Note(epoch=1 << 40, term=7)
    getattr(note, kind).SetInParent()
    name, row = limit_of(TELL, RPCS[TELL], note.SerializeToString())
    assert name == f"Training/Tell {kind}"
    assert row is NOTES[number][1]


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 9,
        b"\x52",  # a field without its length
        b"\x52\x05abc",  # a field that breaks off
        b"\x53",  # a group
        b"\x52\x00\x5a\x00",  # two kinds
        b"\x08\x01" * 17,  # more fields than any message has
        b"\x08" + b"\xff" * 10 + b"\x01",
    ],
    ids=["noise", "no length", "breaks off", "group", "two kinds", "many fields", "long number"],
)
def test_what_is_no_training_message_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        limit_of(TELL, RPCS[TELL], raw)


async def refused(call) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


async def test_a_method_without_a_row_is_not_served(swarm):
    a, b = introduce(await swarm(), await swarm())
    channel = await a.channel(b.peer_id)
    assert (await refused(channel.unary_unary("/tutti.v1.Training/Else")(b"")))[0] == (
        "UNIMPLEMENTED"
    )


async def test_a_message_that_does_not_come_loses_its_place(swarm):
    a, b = introduce(await swarm(), await swarm())
    b._auth.rows[TELL] = dataclasses.replace(RPCS[TELL], within_s=0.05)
    silent = (await a.channel(b.peer_id)).stream_stream(TELL)()
    code, why = await refused(silent.read())
    assert (code, why) == (
        "DEADLINE_EXCEEDED",
        "the message of Training/Tell did not come in time",
    )
    assert not b._auth._running
    assert b.refusals.lately()[0] == {"late": 1}
    b._auth.rows[TELL] = RPCS[TELL]
    assert await tell(a, b.peer_id) == a.peer_id


@pytest.mark.parametrize("kind", [k for k, row in NOTES.values() if row.size < LARGEST])
async def test_a_message_too_large_for_its_kind_is_never_parsed(swarm, kind: str):
    a, b = introduce(await swarm(), await swarm())
    number, row = next((n, row) for n, (name, row) in NOTES.items() if name == kind)
    raw = _varint(number << 3 | 2) + _varint(row.size) + b"\xff" * row.size
    call = (await a.channel(b.peer_id)).unary_unary(TELL)
    code, why = await refused(call(raw))
    assert code == "INVALID_ARGUMENT"
    assert f"Training/Tell {kind}" in why
    assert b._book.count(a.peer_id, 2.0, asyncio.get_running_loop().time()) > 0, "one fault before"


async def test_a_message_three_times_as_large_as_any_is_answered_with_a_ban(swarm):
    a, b = introduce(await swarm(), await swarm())
    number, row = next((n, row) for n, (name, row) in NOTES.items() if name == "ready")
    raw = _varint(number << 3 | 2) + _varint(3 * row.size) + b"\xff" * (3 * row.size)
    call = (await a.channel(b.peer_id)).unary_unary(TELL)
    assert (await refused(call(raw)))[0] == "INVALID_ARGUMENT"
    assert (await refused(call(b"")))[0] == "PERMISSION_DENIED"


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


async def test_plans_come_from_a_leader_or_are_not_read(swarm):
    a, b = introduce(await swarm(), await swarm())
    b.leads = lambda peer: False
    call = (await a.channel(b.peer_id)).unary_unary(TELL)
    number = next(n for n, (_, row) in NOTES.items() if row.sender is SenderKind.LEADER)
    raw = _varint(number << 3 | 2) + _varint(3) + b"\xff\xff\xff"
    answer = pb.NoteReply.FromString(await call(raw))
    assert (answer.accepted, answer.reason) == (False, "this peer follows another leader")
    for _ in range(11):
        await call(raw)
    assert (await refused(call(raw)))[0] == "PERMISSION_DENIED", "twelve times is no accident"


async def test_calls_of_a_stranger_are_counted_and_an_established_peer_has_more(swarm):
    a, b = introduce(await swarm(), await swarm())
    row = dataclasses.replace(RPCS[TELL], per_s=1e-9, burst=2)
    b._auth.rows[TELL] = row
    call = (await a.channel(b.peer_id)).unary_unary(TELL)
    for _ in range(2):
        await call(b"")
    assert (await refused(call(b"")))[0] == "RESOURCE_EXHAUSTED"
    b.established = lambda peer: True
    for _ in range(int(FAVOUR * 2)):
        await call(b"")
    assert (await refused(call(b"")))[0] == "RESOURCE_EXHAUSTED"
    assert b.refusals.lately() == ({"rate": 2}, 1)


async def test_a_stranger_with_few_calls_takes_the_place_of_one_with_many(swarm):
    a, b, c = introduce(await swarm(), await swarm(), await swarm())
    b._auth._places.total = 8
    b.source.gate.clear()
    held = [await stream(a, b.peer_id) for _ in range(4)]
    for call in held:
        await call.read()
    assert await tell(c, b.peer_id) == c.peer_id
    code, why = await refused(held[-1].read())
    assert code == "RESOURCE_EXHAUSTED"
    assert "a peer with fewer calls" in why
    b.source.gate.set()
    assert [len((await call.read()).data) for call in held[:-1]] == [1 << 16] * 3
    assert b.refusals.lately()[0] == {"place": 1}


async def test_strangers_share_the_memory_for_large_messages(swarm):
    a, b, c = introduce(await swarm(), await swarm(), await swarm())
    b._auth._large.total = 8
    calls = [(await a.channel(b.peer_id)).stream_stream(TELL)() for _ in range(4)]
    silent = [asyncio.ensure_future(call.read()) for call in calls]
    await until(lambda: len(b._auth._large) == 4, 10)
    assert await tell(c, b.peer_id) == c.peer_id
    code, _ = await refused(silent[3])
    assert code == "RESOURCE_EXHAUSTED"
    assert len(b._auth._large) == 3
    b.established = lambda peer: peer == c.peer_id
    assert await tell(c, b.peer_id) == c.peer_id
    for call in calls:
        call.cancel()
    await asyncio.gather(*silent, return_exceptions=True)


async def test_a_request_with_more_entries_than_any_is_a_fault_and_is_not_parsed(swarm):
    a, b = introduce(await swarm(), await swarm())
    call = (await a.channel(b.peer_id)).unary_unary(TELL)
    many = pb.Note(dead=pb.DeadNote(dead=[""] * 2000)).SerializeToString()
    code, why = await refused(call(many))
    assert (code, why) == (
        "INVALID_ARGUMENT",
        "v1.DeadNote.dead has 1025 entries, at most 1024 are read",
    )
    assert b._book.count(a.peer_id, 2.0, asyncio.get_running_loop().time()) > 0, "one fault before"


async def test_an_answer_beyond_its_bounds_reads_as_an_empty_one(
    swarm, monkeypatch: pytest.MonkeyPatch
):
    a, b = introduce(await swarm(), await swarm())
    assert await tell(a, b.peer_id) == a.peer_id
    monkeypatch.setitem(SIZES, "v1.NoteReply", 9)
    assert await tell(a, b.peer_id) == ""


async def test_a_call_that_ends_holds_nothing_while_its_caller_does_not_read(swarm, monkeypatch):
    a, b = introduce(await swarm(), await swarm())
    held = list[int]()

    def look(peer, why, weight=1.0):
        held.append(len(b._auth._running) + len(b._auth._places) + len(b._auth._large))

    monkeypatch.setattr(b._auth, "_callers", dataclasses.replace(b._auth._callers, fault=look))
    call = (await a.channel(b.peer_id)).unary_unary(TELL)
    assert (await refused(call(b"\xff" * 9)))[0] == "INVALID_ARGUMENT"
    assert held == [0], "what is no message, and is told before the caller reads"
