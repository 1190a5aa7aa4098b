"""Messages beyond their bounds are refused on their raw bytes; the largest honest ones are read."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message

from node.core.errors import WireError
from node.transport.limits import NOTES, RPCS
from node.wire import bounds
from node.wire.limits import (
    CELL_ADDRESSES,
    CELL_HOSTS,
    CELLS,
    FIELDS,
    LIMITS,
    MOST_RESULTS,
    PARTS,
    PEERS,
    SEEN,
    SIZES,
    UNKNOWN,
)
from protos import ask_pb2, averaging_pb2, cells_pb2, pipeline_pb2, state_pb2
from protos import training_pb2 as pb
from testbed.fuzzing.parsers import filled, message_kinds

OPERATOR = "tutti.v1.Control"
"""Service for the daemon's own operator, on a socket that nobody else can open."""
STREAMS = {
    "v1.Ask",
    "v1.Answer",
    "v1.HandshakeFrame",
    "v1.RelayAsk",
    "v1.RelayAnswer",
    "v1.Relayed",
    "v1.PunchAsk",
    "v1.PunchAnswer",
    "v1.BypassAsk",
    "v1.BypassAnswer",
    "v1.ShareAsk",
    "v1.ShareAnswer",
}
"""Messages of libp2p streams, and of calls that are registered by hand."""
SIGNED = {"v1.WorkNote", "v1.EpochReceipts"}
"""Messages inside others' bytes: a statement of work, and the record of a file."""
PEER = "12D3KooW" + "a" * 44


def services() -> Iterator[tuple[str, set[str]]]:
    """Services that peers call, and the messages of each."""
    for kind in message_kinds().values():
        for name, service in kind.DESCRIPTOR.file.services_by_name.items():
            if service.full_name != OPERATOR:
                both = {m.input_type for m in service.methods}
                both |= {m.output_type for m in service.methods}
                yield name, {t.full_name.removeprefix("tutti.") for t in both}
    ends = Default().FindServiceByName("tutti.v1.Ends")
    yield (
        "Ends",
        {
            t.full_name.removeprefix("tutti.")
            for m in ends.methods
            for t in (m.input_type, m.output_type)
        },
    )


def fields() -> dict[str, FieldDescriptor]:
    """Every field of every message that comes from a peer, those inside others included."""
    found: dict[str, FieldDescriptor] = {}
    waiting: list[Descriptor] = [kind.DESCRIPTOR for kind in message_kinds().values()]
    while waiting:
        for field in waiting.pop().fields:
            name = field.full_name.removeprefix("tutti.")
            if name not in found and field.message_type is not None:
                waiting.append(field.message_type)
            found[name] = field
    return found


def test_every_message_of_a_peer_has_a_size() -> None:
    import protos.ends_pb2  # noqa: F401

    called = set[str]().union(*(messages for _, messages in services()))
    assert called | STREAMS | SIGNED == SIZES.keys()
    assert {"Training", "State", "Pipeline", "Averaging", "Cells", "Ends"} == dict(
        services()
    ).keys()


def test_every_field_that_repeats_has_a_bound_and_every_row_a_field() -> None:
    found = fields()
    assert {name for name, field in found.items() if field.is_repeated} <= LIMITS.keys()
    assert LIMITS.keys() <= found.keys()


def test_a_call_has_room_for_what_is_read_of_it() -> None:
    """The table of calls and the table of messages agree."""
    for kind in message_kinds().values():
        for service in kind.DESCRIPTOR.file.services_by_name.values():
            for method in service.methods if service.full_name != OPERATOR else ():
                row = RPCS[f"/{service.full_name}/{method.name}"]
                assert row.size >= SIZES[method.input_type.full_name.removeprefix("tutti.")]
    for name, row in NOTES.values():
        assert row.size >= LIMITS[f"v1.Note.{name}"].nbytes


@pytest.mark.parametrize("name", SIZES)
def test_a_message_with_every_field_is_read(name: str) -> None:
    kind = message_kinds()[name]
    for choice in range(16):
        made = filled(kind, choice)
        assert bounds.parse(kind, made.SerializeToString()) == made


def peers(count: int) -> list[str]:
    return [f"12D3KooW{i:044d}" for i in range(count)]


def largest() -> dict[str, Message]:
    """The messages of an honest peer in a run of the largest size."""
    version = pb.VersionNote(epoch=1 << 30, lineage="f" * 32)
    vote = pb.VoteNote(
        cell="c" * 16, term=1 << 40, attempt=9, version=version, voters="v" * 32, stage=4096
    )
    vote.digest = "d" * 64
    vote.signature = bytes(64)
    double = pb.DoubleVoteNote(peer=PEER, one=vote, other=vote)
    parts = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(PARTS)]
    hosts = [
        cells_pb2.StageHost(peer=p, maddrs=[f"/ip4/192.0.2.1/tcp/7001/p2p/{p}"] * CELL_ADDRESSES)
        for p in peers(CELL_HOSTS)
    ]
    acceptance = cells_pb2.AcceptanceNote(cell="c" * 16, leader=PEER, signature=bytes(64))
    acceptance.hosts.extend(cells_pb2.StageHosts(stage=s, peers=hosts[:2]) for s in range(110))
    return {
        "heartbeat": pb.Note(
            ready=pb.ReadyNote(
                stage=4096,
                at=version,
                digest="d" * 64,
                reachable=[version] * 64,
                seen=dict.fromkeys(peers(SEEN), 1.5),
                change="é" * 2000,
                doubles=[double] * 8,
                costs=pb.CostNote(
                    ways=dict.fromkeys(peers(SEEN), 1 << 18),
                    rates=dict.fromkeys(peers(SEEN), 1 << 40),
                ),
                supports=bytes(64),
            )
        ),
        "results": pb.Note(
            finished=pb.FinishedNote(
                plan_hash="h" * 64,
                results=[
                    pb.MicroBatchResult(index=1 << 17, counted=True, loss_sum=1e6, tokens=1 << 30)
                ]
                * MOST_RESULTS,
            )
        ),
        "round": pb.Note(
            round=pb.RoundNote(
                dead=peers(512),
                owners=dict.fromkeys(parts[:16_000], PEER),
                sources=peers(512),
                dropped=range(100_000),
            )
        ),
        "plan": pb.Note(
            plan=pb.PlanNote(
                plan=bytes((4 << 20) - (140 << 10)),
                certificate=pb.CertificateNote(
                    voters=peers(512),
                    ballots=[
                        pb.BallotNote(peer=p, stage=4096, digest="d" * 64, signature=bytes(64))
                        for p in peers(512)
                    ],
                ),
            )
        ),
        "incomplete": pb.Note(incomplete=pb.IncompleteNote(holds=parts, failed=peers(512))),
        "dead": pb.Note(dead=pb.DeadNote(plan_hash="h" * 64, dead=peers(PEERS))),
        "group": cells_pb2.CellsNote(
            window=1 << 40,
            caller="c" * 16,
            key="all",
            named=cells_pb2.GroupNote(members=[acceptance] * CELLS),
        ),
        "chunk": averaging_pb2.Contribution(chunk=bytes(1 << 21)),
        "activation": pipeline_pb2.Frame(chunk=bytes(1 << 20)),
        "journey": pipeline_pb2.Frame(
            head=pipeline_pb2.FrameHead(
                journey=[pipeline_pb2.PathHop(stage=s, peer=PEER) for s in range(4098)],
                document_ends=range(1 << 17),
            )
        ),
        "state": state_pb2.StateManifest(
            tensors=[
                state_pb2.StateTensor(
                    head={"name": n, "shape": [4096, 4096], "nbytes": 1 << 26},
                    hashes=bytes(32 * 64),
                )
                for n in parts[:1800]
            ]
        ),
        "peers": ask_pb2.Answer(
            peers=ask_pb2.PeersAnswer(
                peers=[ask_pb2.PeerLine(peer=p, name="n" * 64, version="0.2.0") for p in peers(513)]
            )
        ),
    }


@pytest.mark.parametrize("name", largest())
def test_the_largest_honest_message_is_read(name: str) -> None:
    made = largest()[name]
    assert bounds.parse(type(made), made.SerializeToString()) == made


def varint(value: int) -> bytes:
    more = []
    while value > 127:
        more.append(value & 127 | 128)
        value >>= 7
    return bytes((*more, value))


def tagged(number: int, raw: bytes) -> bytes:
    """Encoding of a length-delimited field."""
    return varint(number << 3 | 2) + varint(len(raw)) + raw


NOTE = pb.Note.DESCRIPTOR.fields_by_name
BEYOND: dict[str, tuple[type[Message], bytes, str]] = {
    "size": (pb.Note, bytes(SIZES["v1.Note"] + 1), "at most"),
    "size of a kind": (
        pb.Note,
        tagged(NOTE["ready"].number, bytes(1 << 17)),
        "v1.Note.ready has 131072 bytes",
    ),
    "empty results": (
        pb.Note,
        tagged(NOTE["finished"].number, b"\x12\0" * (MOST_RESULTS + 1)),
        "v1.FinishedNote.results has 16385 entries",
    ),
    "empty names": (
        pb.Note,
        tagged(NOTE["round"].number, b"\x1a\0" * (PEERS + 1)),
        "v1.RoundNote.dead has 1025 entries",
    ),
    "neighbours": (
        pb.Note,
        pb.Note(ready=pb.ReadyNote(seen=dict.fromkeys(peers(65), 1.0))).SerializeToString(),
        "v1.ReadyNote.seen has 65 entries",
    ),
    "packed numbers": (
        pb.Note,
        tagged(NOTE["round"].number, tagged(6, bytes(1 << 19))),
        "v1.RoundNote.dropped has 524288 entries",
    ),
    "numbers one by one": (
        pb.Note,
        tagged(NOTE["round"].number, b"\x30\0" * (FIELDS + 1)),
        f"more than {FIELDS} fields",
    ),
    "a long name": (
        pb.Note,
        pb.Note(dead=pb.DeadNote(dead=["a" * 600])).SerializeToString(),
        "v1.DeadNote.dead has 600 bytes",
    ),
    "two kinds": (
        pb.Note,
        tagged(NOTE["move"].number, b"") + tagged(NOTE["lead"].number, b""),
        "v1.Note.lead has 2 entries",
    ),
    "a number twice": (pb.Note, b"\x08\1\x08\1", "v1.Note.epoch has 2 entries"),
    "unknown fields": (pb.Note, b"\xf8\x7f\1" * (UNKNOWN + 1), "unknown fields"),
    "a text as a number": (ask_pb2.Ask, tagged(1, b"\x08\1"), "another type"),
    "cells": (
        cells_pb2.CellsNote,
        tagged(11, tagged(1, b"") * 64),
        "v1.GroupNote.members has 33 entries",
    ),
    "dimensions": (
        averaging_pb2.Contribution,
        tagged(1, tagged(7, tagged(2, bytes(9)))),
        "v1.TensorHead.shape has 9 entries",
    ),
    "a group": (pb.Note, b"\x0b\x0c", "wire type"),
    "a cut length": (pb.Note, b"\x5a\xff", "ends inside"),
    "a cut value": (pb.Note, b"\x5a\x05\0", "ends inside"),
    "an entry behind its message": (pb.Note, tagged(11, b"\x0a\x05a") + b"    ", "behind|inside"),
    "a number without end": (pb.Note, b"\x08" + b"\xff" * 11 + b"\0", "too many bytes"),
    "no text": (pb.Note, tagged(NOTE["lead"].number, tagged(1, b"\xff")), "not v1.Note"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_message_beyond_its_bounds_is_refused(name: str) -> None:
    kind, raw, why = BEYOND[name]
    with pytest.raises(WireError, match=why):
        bounds.parse(kind, raw)


def test_nothing_is_made_of_a_message_beyond_its_bounds() -> None:
    class Kind:
        DESCRIPTOR = pb.Note.DESCRIPTOR

        @staticmethod
        def FromString(raw: bytes) -> bytes:
            made.append(raw)
            return raw

    made = list[bytes]()
    kind: Any = Kind
    good = pb.Note(dead=pb.DeadNote(dead=[""])).SerializeToString()
    assert bounds.parse(kind, good) == good
    assert made == [good]
    with pytest.raises(WireError):
        bounds.parse(kind, pb.Note(dead=pb.DeadNote(dead=[""] * 5000)).SerializeToString())
    assert made == [good]


def test_fields_of_a_newer_software_are_passed_over() -> None:
    raw = pb.Note(epoch=3).SerializeToString() + tagged(30, b"new") + b"\xf8\x7f\1"
    assert bounds.parse(pb.Note, raw).epoch == 3


def test_an_answer_beyond_its_bounds_reads_as_an_empty_one() -> None:
    read = bounds.lenient(pb.NoteReply.FromString)
    assert read(pb.NoteReply(accepted=True).SerializeToString()).accepted
    assert read(pb.NoteReply(lost=[PEER] * 17).SerializeToString()) == pb.NoteReply()
    assert read(b"\xff") == pb.NoteReply()


@pytest.mark.parametrize("wrap", [bounds.strict, bounds.lenient])
def test_a_deserialiser_of_other_bytes_stays_as_it_is(wrap: Callable[[Any], Any]) -> None:
    assert wrap(str) is str
