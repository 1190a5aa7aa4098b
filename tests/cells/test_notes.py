"""Notes and postings as others write them: whole ones come back, all others are refused."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from node.averaging.strategies.outer import MOST_MEMBERS
from node.core.errors import WireError
from node.core.ids import CellId, PeerId
from node.core.journey import Host, Version
from node.identity.keys import Identity
from node.outer import notes
from node.outer.postings import MAX_BODY, CellFacts, pack_posting, parse_posting
from protos import cells_pb2 as pb

A = CellId("a" * 16)
B = CellId("b" * 16)
VERSION = Version(7, "0f" * 16)
HOSTS = {0: (Host(PeerId("p"), ("/ip4/1.2.3.4/tcp/5", "/dns4/x/tcp/6")), Host(PeerId("q")))}
SHOWN = {c: notes.Acceptance(c, PeerId("p"), HOSTS, bytes(64)) for c in (A, B)}


def whole() -> pb.CellsNote:
    return notes.group_note(3, "1.2", A, SHOWN.values())


def test_notes_come_back_as_they_were():
    assert notes.parse_note(pb.CellsNote.FromString(whole().SerializeToString())) == SHOWN
    assert notes.parse_note(notes.offer_note(3, "4", B)) == {}
    assert notes.parse_note(notes.release_note(3, B)) == {}


Spoil = Callable[[pb.CellsNote], object]
first: Callable[[pb.CellsNote], pb.AcceptanceNote] = lambda n: n.named.members[0]  # noqa: E731
SPOILED: dict[str, Spoil] = {
    "window": lambda n: setattr(n, "window", 2**60),
    "caller": lambda n: setattr(n, "caller", "A" * 16),
    "no caller": lambda n: setattr(n, "caller", ""),
    "key": lambda n: setattr(n, "key", "../x"),
    "long key": lambda n: setattr(n, "key", "1" * 33),
    "nothing said": lambda n: n.ClearField("named"),
    "a cell twice": lambda n: setattr(first(n), "cell", B),
    "members": lambda n: [n.named.members.append(first(n)) for _ in range(MOST_MEMBERS)],
    "leader": lambda n: setattr(first(n), "leader", ""),
    "leader's name": lambda n: setattr(first(n), "leader", "p" * 65),
    "signature": lambda n: setattr(first(n), "signature", bytes(65)),
    "no signature": lambda n: setattr(first(n), "signature", b""),
    "no hosts": lambda n: first(n).ClearField("hosts"),
    "stage": lambda n: setattr(first(n).hosts[0], "stage", 1 << 16),
    "a stage twice": lambda n: first(n).hosts.append(first(n).hosts[0]),
    "stages": lambda n: [
        first(n).hosts.add(stage=s, peers=[pb.StageHost(peer="p")]) for s in range(1, 257)
    ],
    "no peers": lambda n: first(n).hosts[0].ClearField("peers"),
    "peers": lambda n: [first(n).hosts[0].peers.add(peer="p") for _ in range(notes.MAX_PEERS)],
    "peer": lambda n: setattr(first(n).hosts[0].peers[0], "peer", "\n"),
    "addresses": lambda n: first(n).hosts[0].peers[0].maddrs.extend(["/a"] * 4),
    "address": lambda n: first(n).hosts[0].peers[1].maddrs.append("no address"),
    "long address": lambda n: first(n).hosts[0].peers[1].maddrs.append("/" * 257),
    "bytes of hosts": lambda n: [
        first(n).hosts.add(
            stage=s, peers=[pb.StageHost(peer="p", maddrs=["/" * 256] * 4) for _ in range(8)]
        )
        for s in range(1, 20)
    ],
    "bytes": lambda n: setattr(first(n), "leader", "p" * notes.MAX_NOTE),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_note_with_one_thing_wrong_is_refused(spoil: Spoil):
    note = whole()
    notes.parse_note(note)
    spoil(note)
    with pytest.raises(WireError):
        notes.parse_note(note)


def test_hosts_are_cut_to_what_a_note_has_room_for():
    many = tuple(Host(PeerId(f"{'p' * 50}{n:02}"), ("/" + "x" * 200,) * 9) for n in range(20))
    for stages in (1, 12, 200, 256):
        hosts = notes.fitted({s: many for s in range(stages)} | {999: ()})
        assert list(hosts) == list(range(stages))
        shown = notes.Acceptance(A, PeerId("p"), hosts, bytes(64))
        assert notes.parse_acceptance(notes.acceptance_note(shown)) == shown
    assert notes.fitted({0: many})[0] == tuple(Host(h.peer, h.maddrs[:4]) for h in many[:8])
    odd = {0: (Host(PeerId("p"), ("no address", "/ok")),)}
    assert notes.fitted(odd) == {0: (Host(PeerId("p"), ("/ok",)),)}


def test_an_acceptance_names_all_that_it_is_for():
    identity = Identity.ephemeral()
    other = Identity.ephemeral()
    mine = notes.Accepting(identity, "run")
    shown = mine.accept(CellFacts(A, VERSION, HOSTS), 3, "4", B)
    mine.check(shown, 3, "4", B)
    notes.Accepting(other, "run").check(shown, 3, "4", B)
    moved = {1: HOSTS[0]}
    for run, what, window, key, caller in (
        ("another", shown, 3, "4", B),
        ("run", shown, 4, "4", B),
        ("run", shown, 3, "l", B),
        ("run", shown, 3, "4", A),
        ("run", notes.Acceptance(B, identity.peer_id, HOSTS, shown.signature), 3, "4", B),
        ("run", notes.Acceptance(A, other.peer_id, HOSTS, shown.signature), 3, "4", B),
        ("run", notes.Acceptance(A, identity.peer_id, moved, shown.signature), 3, "4", B),
        ("run", notes.Acceptance(A, PeerId("nobody"), HOSTS, shown.signature), 3, "4", B),
    ):
        with pytest.raises(WireError):
            notes.Accepting(identity, run).check(what, window, key, caller)


def test_postings_come_back_and_are_checked():
    about = CellFacts(A, VERSION, {}, "ab" * 32, 4)
    raw = pack_posting(replace(about, hosts=HOSTS))
    assert parse_posting(raw) == about, "without the hosts"
    body = json.loads(raw)
    older = {**body, "hosts": {"0": [["p", ["/ip4/1.2.3.4/tcp/1"]]]}}
    assert parse_posting(json.dumps(older).encode()) == about, "a field that was is read over"
    for name, wrong in {
        "cell": ["", "A" * 16, 3, None],
        "epoch": [-1, 1.0, True, 2**53, "7"],
        "lineage": ["x", 3, None],
        "anchor": ["xy", "a" * 65, None],
        "change": [-1, None],
    }.items():
        for value in wrong:
            with pytest.raises(WireError):
                parse_posting(json.dumps({**body, name: value}).encode())
    for bad in (b"", b"[]", b"{", b"\xff", b"[" * 500, b" " * MAX_BODY + raw):
        with pytest.raises(WireError):
            parse_posting(bad)
    with pytest.raises(WireError):
        pack_posting(replace(about, anchor="no hash"))
    for key in ("", "A", "a b", "pairs", "1" * 33, "a/b", "ä"):
        with pytest.raises(WireError):
            notes.parse_note(notes.offer_note(3, key, A))
