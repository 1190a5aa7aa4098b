import json
from dataclasses import asdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from node.core.errors import WireError
from node.dht.record import MAX_BODY, MAX_PAUSED, PeerBody


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ({}, {}),
        ({"open_to": "everything", "settled": 7}, {}),
        ({"open_to": ["auto"], "settled": None}, {}),
        ({"open_to": "auto", "settled": False}, {"open_to": "auto", "settled": False}),
        ({"protocols": [2, 4]}, {"protocols": (2, 4)}),
    ],
)
def test_fields_that_older_software_does_not_write_are_optional(body, told, meant) -> None:
    assert PeerBody.parse(body(**meant).pack()) == body(**meant)
    optional = ("open_to", "settled", "protocols")
    fields = {k: v for k, v in asdict(body()).items() if k not in optional} | told
    assert PeerBody.parse(json.dumps(fields).encode()) == body(**meant)


def test_a_paused_peer_says_why(body) -> None:
    said = body(role="rendezvous", state="paused", paused="outside its hours")
    assert PeerBody.parse(said.pack()) == said
    for wrong in ("x" * (MAX_PAUSED + 1), "a\x1bb", 7, None):
        with pytest.raises(WireError, match="paused"):
            PeerBody.parse(json.dumps(asdict(body()) | {"paused": wrong}).encode())
    before = {k: v for k, v in asdict(body()).items() if k != "paused"}
    assert PeerBody.parse(json.dumps(before).encode()).paused == ""


def test_only_as_many_addresses_travel_as_fit(body) -> None:
    many = tuple(f"/ip4/10.0.0.{i}/tcp/4001/" + "x" * 180 for i in range(20))
    raw = body(maddrs=many).pack()
    kept = PeerBody.parse(raw).maddrs
    assert MAX_BODY - 250 < len(raw) <= MAX_BODY
    assert kept == many[: len(kept)]


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": -1},
        {"stage": 2**16},
        {"stage": True},
        {"stage": 1.0},
        {"stage": None},
        {"epoch": 2**63},
        {"epoch": "3"},
        {"role": "Ends"},
        {"role": ""},
        {"state": "x" * 17},
        {"state": ["ready"]},
        {"name": "x" * 65},
        {"name": "\x1b[2J"},
        {"version": "1\n2"},
        {"version": 1},
        {"tokens_per_s": float("inf")},
        {"tokens_per_s": float("nan")},
        {"speed": -1},
        {"speed": float("inf")},
        {"speed": 10**400},
        {"speed": "1"},
        {"started": 1e16},
        {"maddrs": "/ip4/1.2.3.4"},
        {"maddrs": [1]},
        {"maddrs": ["no slash"]},
        {"maddrs": ["/a b"]},
        {"maddrs": ["/" + "x" * 256]},
        {"maddrs": ["/a"] * 17},
        {"protocols": [2, 1]},
        {"protocols": [1]},
        {"protocols": [1, 2.0]},
        {"protocols": [1, 1 << 16]},
        {"protocols": "1"},
        {"protocols": None},
        {"role": "Boss"},
    ],
)
def test_an_implausible_field_is_refused(body, changes: dict) -> None:
    with pytest.raises(WireError):
        PeerBody.parse(json.dumps(asdict(body()) | changes).encode())


@pytest.mark.parametrize(
    "missing", ["stage", "role", "state", "epoch", "name", "version", "speed", "maddrs", "started"]
)
def test_a_missing_field_is_refused(body, missing: str) -> None:
    fields = asdict(body())
    del fields[missing]
    with pytest.raises(WireError, match=missing):
        PeerBody.parse(json.dumps(fields).encode())


@example(b"")
@example(b"[]")
@example(b"7")
@example(b"\xff")
@example(b"{")
@example(b"[" * 2000)
@example(b" " * (MAX_BODY + 1))
@example(b'{"epoch":' + b"9" * 2000 + b"}")
@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(
        lambda v: json.dumps(v).encode()
    )
)
def test_what_is_no_record_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        PeerBody.parse(raw)


def test_a_body_others_would_refuse_is_not_packed(body) -> None:
    with pytest.raises(WireError, match="role"):
        body(role="Boss").pack()
