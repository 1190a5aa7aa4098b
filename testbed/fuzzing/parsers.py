"""Every parser of bytes that somebody else wrote, with valid messages to mutate.

:data:`PARSERS` is the list that the fuzzer (``benchmarks/fuzzing.py``, ``tests/fuzz``) walks over.
A parser takes bytes and returns, or raises one of its typed errors; anything else is a bug.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from node.app import change
from node.averaging.exchange import parcel
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.archive.place import FILES
from node.checkpoint.archive.place import CopyRecord as ArchivePage
from node.checkpoint.store import FileEntry
from node.consensus.rules import Rules
from node.coordinator import notes
from node.coordinator.credit import book
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.statement import Signed, Statement
from node.core.errors import LocalFault, Refused, UsageFault, WireError
from node.core.ids import RunId, first_cell
from node.core.journey import (
    Electorate,
    Hop,
    Host,
    Partner,
    Path,
    Plan,
    PlanMember,
    Version,
    Window,
)
from node.data.chat import BadTemplate, Misfit, Template, conversations
from node.data.confined import rows
from node.data.confined.rows import Unfit
from node.data.tokenizer_files import TokenizerFiles
from node.dht import guard, topics
from node.dht.record import PeerBody, unwrap, wrap
from node.identity.admission import admission_token, check_admission
from node.identity.invites import Invite, endpoint_of
from node.identity.keys import Identity
from node.identity.records import open_record, seal
from node.manifest import Manifest
from node.orders import order
from node.outer import census, postings
from node.outer import notes as cell_notes
from node.pipeline.events import Claim
from node.pipeline.frames import FrameReader, FrameShape, loose_shape, parse_head
from node.pipeline.frames import frames as pipeline_frames
from node.reach import natpmp, nearby
from node.reach.secure import check_certificate, make_certificate
from node.transport import addresses, handshake
from node.transport import limits as transport_limits
from node.transport.handshake import Facts, Handshake, Tokens
from node.transport.shared.region import Place
from node.transport.ways import punch
from node.wire import bounds
from node.wire.limits import NAME, SIZES
from node.wire.tensors import TensorReader, expected_head
from protos import (
    ask_pb2,
    averaging_pb2,
    cells_pb2,
    control_pb2,
    handshake_pb2,
    pipeline_pb2,
    reach_pb2,
    state_pb2,
    training_pb2,
)
from testbed.fakes.encoded import encode_measured


class Parser(NamedTuple):
    """A parser of a stranger's bytes, and its bounds.

    `read` takes the bytes; `allowed` are the only errors it may raise; `calls` is the number of
    functions, C functions included, that it may call, and `calls_per_byte` the number of further
    ones for each byte; `bytes_per_byte`: bytes that it may allocate for each byte, beside a fixed
    number for any message.
    """

    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...] = (WireError,)
    calls: int = 20_000
    calls_per_byte: int = 4
    bytes_per_byte: int = 64
    """JSON makes a list of 56 bytes of two brackets."""


ME = Identity(Ed25519PrivateKey.from_private_bytes(b"m" * 32), None)
PEER = ME.peer_id
OTHER = Identity(Ed25519PrivateKey.from_private_bytes(b"o" * 32), None).peer_id
RUN = RunId("ab" * 32)
CELL = first_cell(RUN)
LINEAGE = "0123456789abcdef" * 2
DIGEST = "fedcba9876543210" * 4
SHAPE = FrameShape(sequences=2, length=8, width=4, wire="fp32", stages=3, masked=True)
MADDR = "/ip4/192.0.2.7/tcp/7001"
NOW = 2e9
"""Unix seconds of the messages here, so that the same seed of the fuzzer gives the same bytes."""
TELL = "/tutti.v1.Training/Tell"
LONGEST_MDNS = 9000
"""Bytes of a message of multicast DNS (RFC 6762, section 17)."""

_TEXTS = {
    "lineage": LINEAGE,
    "digest": DIGEST,
    "mean": DIGEST,
    "anchor": DIGEST,
    "plan_hash": DIGEST,
    "voters": PEER,
    "cell": CELL,
    "caller": CELL,
    "giver": CELL,
    "taker": CELL,
    "key": "0.1",
    "peer": PEER,
    "leader": PEER,
    "run_id": RUN,
    "addresses": MADDR,
    "mapped": "192.0.2.7:7002",
    "maddrs": MADDR,
    "name": "layers.0.attention.q.weight",
}
"""Plausible texts of fields of messages, by the name of the field."""


_PROTOS = (
    ask_pb2,
    averaging_pb2,
    cells_pb2,
    control_pb2,
    handshake_pb2,
    pipeline_pb2,
    reach_pb2,
    state_pb2,
    training_pb2,
)


# ----------------------------------------------------------- messages


def message_kinds() -> dict[str, type[Message]]:
    """Every message that a peer sends by itself, by its name in ``limits.SIZES``."""
    found = {}
    for file in _PROTOS:
        for name, kind in file.DESCRIPTOR.message_types_by_name.items():
            key = f"{file.DESCRIPTOR.package.removeprefix('tutti.')}.{name}"
            if key in SIZES:
                found[key] = GetMessageClass(kind)
    return found


def filled(kind: type[Message], choice: int = 0) -> Message:
    """A message of ``kind`` with a plausible value in every field; of a oneof, its field number
    ``choice``, counted around."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.fields[choice % len(oneof.fields)].name != field.name:
            continue
        _fill(made, field)
    return made


def _fill(made: Any, field: Any) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        entry: Any = GetMessageClass(kind)()
        for part in kind.fields:
            _fill(entry, part)
        if entry.DESCRIPTOR.fields_by_name["value"].message_type is None:
            getattr(made, field.name)[entry.key] = entry.value
    elif kind is not None:
        inner = filled(GetMessageClass(kind))
        at = getattr(made, field.name)
        if field.is_repeated:
            at.append(inner)
        else:
            at.CopyFrom(inner)
    elif field.is_repeated:
        getattr(made, field.name).append(_value(field))
    else:
        setattr(made, field.name, _value(field))


def _value(field: Any) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return _TEXTS.get(field.name, PEER if field.name in ("dead", "sources") else "text")
        case FieldDescriptor.TYPE_BYTES:
            return bytes(range(64))
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return 1.5
        case FieldDescriptor.TYPE_BOOL:
            return True
        case _:
            return 1


def _variants(kind: type[Message]) -> Iterator[Message]:
    count = max((len(o.fields) for o in kind.DESCRIPTOR.oneofs), default=1)
    return (filled(kind, choice) for choice in range(count))


# ----------------------------------------------------------- what follows the message


def _note(raw: bytes) -> None:
    transport_limits.limit_of(TELL, transport_limits.RPCS[TELL], raw)
    note = bounds.parse(training_pb2.Note, raw)
    notes.leader_event(note, PEER)
    if note.HasField("round"):
        notes.round_event(note, PEER)
    if note.HasField("plan"):
        notes.parse_warrant(note.plan)
        notes.parse_plan(note.plan)


def _history(raw: bytes) -> None:
    reply = bounds.parse(training_pb2.HistoryReply, raw)
    notes.parse_history(Version(3, LINEAGE), reply)


def _frame(raw: bytes) -> None:
    incoming = parse_head(bounds.parse(pipeline_pb2.Frame, raw), SHAPE)
    loose_shape(incoming, SHAPE)
    FrameReader(incoming.head, (2, 8, 4), "fp32", masked=True)


def _blocks(raw: bytes) -> None:
    shape = (2, 8, 4)
    reader = TensorReader([expected_head("", shape, "int4")], [("", shape)], "int4")
    reader.feed(raw)
    reader.rms()
    reader.numbers(torch.device("cpu"))


def _contribution(raw: bytes) -> None:
    head = bounds.parse(averaging_pb2.Contribution, raw).head
    parcel.ParcelReader(list(head.tensors), [("a", (2, 2))], "int8")


def _fresh(raw: bytes) -> None:
    head = bounds.parse(averaging_pb2.Fresh, raw).head
    parcel.ParcelReader(list(head.tensors), [("a", (2, 2))], "bf16")


def _cells_note(raw: bytes) -> None:
    cell_notes.parse_note(bounds.parse(cells_pb2.CellsNote, raw))


def _cells_reply(raw: bytes) -> None:
    cell_notes.parse_acceptance(bounds.parse(cells_pb2.CellsReply, raw).acceptance)


def _punch(raw: bytes) -> None:
    punch.candidates(bounds.parse(reach_pb2.PunchAsk, raw).addresses)


@cache
def _handshake() -> Handshake:
    facts = Facts(RUN, "test", "0")
    nothing: Any = None
    return Handshake(
        nothing,
        Tokens(),
        lambda: facts,
        lambda: ([], []),
        b"",
        lambda peer, hello: math.inf,
    )


def _hello(raw: bytes) -> None:
    frame = handshake._parse(raw)
    if frame.HasField("farewell"):
        _handshake()._parted(PEER, frame.farewell)
    else:
        _handshake()._check(PEER, frame.hello)


def _special() -> Mapping[str, Parser]:
    return {
        "v1.Note": Parser(_note),
        "v1.HistoryReply": Parser(_history),
        "v1.Frame": Parser(_frame),
        "averaging.v1.Contribution": Parser(_contribution),
        "averaging.v1.Fresh": Parser(_fresh),
        "v1.CellsNote": Parser(_cells_note),
        "v1.CellsReply": Parser(_cells_reply),
        "v1.PunchAsk": Parser(_punch),
        "v1.HandshakeFrame": Parser(_hello, (WireError, LocalFault)),
    }


# ----------------------------------------------------------- texts, records and files


def _text(read: Callable[[str], object], raw: bytes) -> object:
    return read(raw.decode("utf-8", "replace"))


def _addresses(text: str) -> None:
    """Addresses are fields of messages, which are bounded before."""
    text = text[:NAME]
    addresses.host_of(text)
    addresses.ip_of(text)
    addresses.part_of(text, "tcp")
    endpoint_of(text)
    addresses.split_multiaddr(text)


def _records(raw: bytes) -> None:
    for read in (census.cells_in, census.counts_in, partial(census.region_in, 0)):
        read([raw])


def _record(raw: bytes) -> None:
    opened = open_record(
        raw, key="tutti", writer=PEER, now_wall=NOW, max_ttl_s=600.0, max_bytes=4096
    )
    unwrap(opened.body)


def _announced(raw: bytes) -> None:
    parts = raw[:LONGEST_MDNS].split(b"\0")
    keys = [key.encode() for key in nearby._KEYS]
    nearby.found_of(PEER, dict(zip(keys, parts, strict=False)), ("192.0.2.7",), 7001)


@cache
def manifest() -> Manifest:
    """A signed manifest, of which the changes and invites here are."""
    return Manifest.parse(Manifest.default_demo().sign(ME))


def plan() -> Plan:
    """A small plan with every part that a plan can have."""
    hosts = {1: (Host(OTHER, (f"{MADDR}/p2p/{OTHER}",)),)}
    return Plan(
        epoch=3,
        term=9,
        leader=PEER,
        members=(PlanMember(PEER, 0, 2.0), PlanMember(OTHER, 1, 1.0, current=False)),
        paths=tuple(Path(i, PEER, (2 * i, 2 * i + 1), (Hop(1, OTHER),)) for i in range(3)),
        owners={"head.weight": PEER, "layers.0.weight": OTHER},
        moved={"head.weight": OTHER},
        digests={0: DIGEST, 1: DIGEST},
        lineage=LINEAGE,
        stood={1: Version(2, LINEAGE)},
        cell_id=CELL,
        window=Window(
            4,
            (Partner(CELL, PEER, hosts),),
            3.0,
            {1: DIGEST},
        ),
        electorate=Electorate((PEER, OTHER), (PEER,)),
    )


def _body() -> PeerBody:
    return PeerBody(1, "stage", "ready", 3, "otter", "0.2.0", maddrs=(f"{MADDR}/p2p/{PEER}",))


def _facts() -> postings.CellFacts:
    hosts = {0: (Host(PEER, (MADDR,)),), 1: (Host(OTHER, (MADDR,)),)}
    return postings.CellFacts(CELL, Version(3, LINEAGE), hosts, DIGEST, 1, (MADDR,))


def _order() -> bytes:
    run = manifest().run_id
    return order.signed(
        run, ME.peer_id, ME, order.Verb.PAUSE, number=7, begins=1.8e9, reason="moving disks"
    ).encode()


def _archive_page() -> bytes:
    files = {name: FileEntry(9, 64 * "a") for name in FILES}
    return ArchivePage(manifest().run_id, PEER, 1, 4, files).encode()


def _change() -> bytes:
    changed = change.under(manifest(), Rules(0, OuterSettings()))
    return change.signed(manifest(), changed, 1, ME, {"0123456789abcdef"}).encode()


def _pcp_answer() -> bytes:
    """A router's answer to a request for a mapping, which repeats its body."""
    asked = natpmp.pcp_map("192.0.2.1", bytes(12), ("tcp", 7001), 7001, "192.0.2.9", 3600)
    head = bytes((asked[0], asked[1] | natpmp.ANSWER, 0, 0)) + asked[4:8]
    return head + bytes(16) + asked[24:]


def _dictionary() -> bytes:
    found = guard.DictionaryDHTValue()
    with found.freeze():
        found.store(str(PEER), seal(ME, "tutti", b"body", 1, NOW + 60), NOW + 60)
    return guard.MSGPackSerializer.dumps(found)


_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_CONSTANTS = "{{ 'ab' * 10 ** 8 }}{% if 'a' | center(10 ** 8) %}{% endif %}"
_CHAT_ROWS = (
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b", "tools": "[]"},
)


def _conversation(raw: bytes) -> object:
    row = rows._parsed(raw)
    return conversations(row, "text", Template(_TEMPLATE, {}))


def _table(raw: bytes) -> object:
    found = rows._table_rows(rows._decoded([raw]), {"form": "csv", "name": "x"})
    return sum(1 for _ in found)  # rows are read one after the other


def _model_files(raw: bytes) -> None:
    names = ("tokenizer_config.json", "generation_config.json")
    TokenizerFiles(dict.fromkeys(names, raw), raw).check()


def _model_json() -> bytes:
    return json.dumps(
        {
            "eos_token": {"content": "b"},
            "eos_token_id": [1, 2],
            "added_tokens": [{"id": 1, "content": "a"}],
            "added_tokens_decoder": {"1": {"content": "a"}},
            "chat_template": [{"name": "default", "template": "{{ messages }}"}],
            "model": {"vocab": {"b": 2}},
        }
    ).encode()


def _work() -> Statement:
    made = Version(4, LINEAGE)
    return Statement(CELL, made, 40, b"\1" * 32, (0, 3), (16, 24), (0, 1), (1, 2))


def _receipts() -> bytes:
    signed = Signed(PEER, _work().said(), b"\2" * 64)
    return EpochRecord(RUN, plan(), (3,), 40, None, (signed,)).encoded()


def _texts() -> dict[str, tuple[Parser, Callable[[], Sequence[bytes]]]]:
    """Parsers of everything that is no message of protobuf, and valid bytes of each."""
    cell_record = census.CellRecord(CELL, Version(3, LINEAGE), (2, 1), True, 9.5)
    local = (UsageFault, Refused)
    token = partial(admission_token, ME, RUN, None, NOW + 60)
    return {
        "plan": (Parser(Plan.parse), lambda: [plan().canonical()]),
        "manifest": (
            Parser(Manifest.parse, (UsageFault,)),
            lambda: [Manifest.default_demo().sign(ME), manifest().to_toml()],
        ),
        "invite": (
            Parser(partial(_text, Invite.decode), (UsageFault,)),
            lambda: [Invite(RUN, PEER, (f"{MADDR}/p2p/{PEER}",)).encode().encode()],
        ),
        "order": (
            Parser(
                partial(_text, lambda text: order.read(manifest().run_id, ME.peer_id, text)), local
            ),
            lambda: [_order()],
        ),
        "archive page": (Parser(ArchivePage.parse, local), lambda: [_archive_page()]),
        "change": (
            Parser(partial(_text, lambda text: change.read(manifest(), text)), local),
            lambda: [_change()],
        ),
        "admission": (
            Parser(
                lambda raw: check_admission(raw, run_id=RUN, owner=PEER, peer=OTHER, now_wall=NOW),
                (Refused,),
            ),
            lambda: [token(), admission_token(ME, RUN, OTHER, NOW + 60)],
        ),
        "peer record": (Parser(PeerBody.parse), lambda: [_body().pack()]),
        "cell record": (Parser(census.CellRecord.parse), lambda: [cell_record.pack()]),
        "cell records": (
            Parser(_records),
            lambda: [
                cell_record.pack(),
                census.pack_count(1, 2),
                census.pack_region(0, (1,) * 16),
            ],
        ),
        "cell posting": (
            Parser(postings.parse_posting),
            lambda: [postings.pack_posting(_facts())],
        ),
        "sealed record": (
            Parser(_record),
            lambda: [seal(ME, "tutti", wrap(b"", _body().pack()), 1, NOW + 60)],
        ),
        "topic": (Parser(topics.unwrap), lambda: [topics.wrap(topics.CENSUS, b"sealed")]),
        "dictionary of records": (
            Parser(guard.RecordSerializer.loads, (ValueError,)),
            lambda: [_dictionary(), guard.MSGPackSerializer.dumps(str(PEER))],
        ),
        "packed value": (
            Parser(lambda raw: guard._unpack_flat(raw, 4096)),
            lambda: [guard.MSGPackSerializer.dumps(b"sealed")],
        ),
        "certificate": (
            Parser(check_certificate),
            lambda: [make_certificate().pem],
        ),
        "address": (
            Parser(partial(_text, _addresses)),
            lambda: [f"{MADDR}/p2p/{PEER}".encode(), b"/dns4/example.org/udp/9/quic-v1"],
        ),
        "place in shared memory": (
            Parser(Place.read),
            lambda: [bytes(8) + b"\0\1" + bytes(7) + b"\1\0\1\0\0"],
        ),
        "dialled address": (
            Parser(partial(_text, addresses.grpc_target)),
            lambda: [b"192.0.2.7:7001", b"[2001:db8::1]:7001", b"example.org:7001"],
        ),
        "NAT-PMP answer": (
            Parser(natpmp.read_pmp),
            lambda: [bytes.fromhex("00820000000000011b591b5900000e10")],
        ),
        "PCP answer": (Parser(natpmp.read_pcp), lambda: [_pcp_answer()]),
        "LAN announcement": (
            Parser(_announced),
            lambda: ["\0".join((nearby.VERSION, RUN, "demo", PEER, PEER, "otter", "3")).encode()],
        ),
        "conversation": (
            Parser(_conversation, (Misfit,)),
            lambda: [json.dumps(row).encode() for row in _CHAT_ROWS],
        ),
        "chat template": (
            # Names that are compared in a row take 4,080 bytes and 145 calls for each byte, most
            # templates half of that.
            Parser(
                partial(_text, lambda text: Template(text, {})),
                (BadTemplate,),
                calls_per_byte=200,
                bytes_per_byte=5000,
            ),
            lambda: [_TEMPLATE.encode(), _CONSTANTS.encode()],
        ),
        "rows of JSON": (
            Parser(lambda raw: len(list(rows._json_rows(rows._decoded([raw]), "x"))), (Unfit,)),
            lambda: [json.dumps(_CHAT_ROWS).encode(), b'{"rows": [{"text": "a"}]}', b"{} {}"],
        ),
        "rows of a table": (
            Parser(_table, (Unfit,)),
            lambda: [b'id,text\n1,"a ""b""\nc"\n', b"id;text\r\n1;a\r\n"],
        ),
        "files of a model": (
            Parser(_model_files, (UsageFault,)),
            lambda: [_model_json()],
        ),
        "statement of work": (Parser(Statement.parse), lambda: [_work().said()]),
        "record of receipts": (
            # A plan of a few KiB is compressed to a sixth.
            Parser(EpochRecord.parse, calls_per_byte=40, bytes_per_byte=1000),
            lambda: [_receipts()],
        ),
        "file of receipts": (
            Parser(lambda raw: len(list(book.records(raw)))),
            lambda: [book.framed(_receipts()) * 3],
        ),
        "parcel": (
            Parser(parcel.payload),
            lambda: [averaging_pb2.Contribution(chunk=b"numbers").SerializeToString()],
        ),
        "numbers in blocks": (
            Parser(_blocks),
            lambda: [bytes(encode_measured(torch.ones(2, 8, 4), "int4", measure=False)[0])],
        ),
    }


def _more_seeds() -> Mapping[type[Message], Callable[[], list[Message]]]:
    """Valid messages where a field depends on another one."""

    def acceptance() -> cells_pb2.AcceptanceNote:
        accepting = cell_notes.Accepting(ME, RUN)
        return cell_notes.acceptance_note(accepting.accept(_facts(), 4, "0.1", CELL))

    def frames() -> list[Message]:
        hops = (Hop(0, PEER), Hop(1, OTHER), Hop(0, PEER))
        claim = Claim(3, DIGEST, 1, hops, 1)
        numbers = bytes(2 * 8 * 4 * 4)
        made = pipeline_frames(claim, pipeline_pb2.TRAIN, 5.0, (2, 8, 4), numbers, SHAPE, (3, 7))
        return list(made)

    def contributions() -> list[Message]:
        head = averaging_pb2.ContributionHead(tensors=[expected_head("a", (2, 2), "int8")])
        return [averaging_pb2.Contribution(head=head)]

    def fresh() -> list[Message]:
        made = [averaging_pb2.Made(tensors=1, tokens=9, contributors=[PEER])]
        head = averaging_pb2.FreshHead(tensors=[expected_head("a", (2, 2), "bf16")], made=made)
        return [averaging_pb2.Fresh(head=head)]

    return {
        training_pb2.Note: lambda: [notes.plan_note(plan(), bytes(64))],
        training_pb2.HistoryReply: lambda: [
            notes.history_reply(replace(plan(), epoch=3, lineage=LINEAGE), (), ())
        ],
        pipeline_pb2.Frame: frames,
        averaging_pb2.Contribution: contributions,
        averaging_pb2.Fresh: fresh,
        cells_pb2.CellsNote: lambda: [
            cell_notes.group_note(4, "0.1", CELL, [cell_notes.parse_acceptance(acceptance())])
        ],
        cells_pb2.CellsReply: lambda: [cells_pb2.CellsReply(accepts=True, acceptance=acceptance())],
    }


def _messages() -> dict[str, tuple[Parser, Callable[[], Sequence[bytes]]]]:
    special = _special()

    def seeds(kind: type[Message]) -> list[bytes]:
        more = _more_seeds().get(kind, list)()
        return [m.SerializeToString(deterministic=True) for m in (*_variants(kind), *more)]

    return {
        name: (special.get(name, Parser(partial(bounds.parse, kind))), partial(seeds, kind))
        for name, kind in sorted(message_kinds().items())
    }


_ALL = {**_messages(), **_texts()}
PARSERS: Mapping[str, Parser] = {name: parser for name, (parser, _) in _ALL.items()}
"""Every parser of foreign bytes, by the name of the bytes."""


@cache
def seeds_of(name: str) -> tuple[bytes, ...]:
    """Valid bytes for a parser."""
    return tuple(_ALL[name][1]())


def kind_of_message(name: str) -> type[Message] | None:
    """The protobuf message that a parser reads, None for other bytes."""
    return message_kinds().get(name)
