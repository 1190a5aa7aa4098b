"""Invites that survive mail and say what is wrong."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import ExitCode, UsageFault
from node.core.ids import PeerId, RunId
from node.identity.invites import (
    MAX_ADDRESSES,
    PREFIX,
    Invite,
    _checksum,
    fitting_addresses,
    peer_of_address,
)
from node.identity.keys import Identity

# The same keys in every process, because they stand in the tests' names, which two workers have to agree on.
OWNER, STRANGER = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32), None) for seed in (1, 2))
RUN = RunId("0123456789abcdef" * 4)
HERE = f"/ip4/203.0.113.9/tcp/31337/p2p/{OWNER.peer_id}"
RELAYED = f"/dns4/relay.example/udp/9/quic-v1/p2p/{STRANGER.peer_id}/p2p-circuit/p2p/{OWNER.peer_id}"
INVITE = Invite(RUN, OWNER.peer_id, (HERE, RELAYED), b"token")


def forged(payload: bytes) -> str:
    return PREFIX + base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()


def test_an_invite_comes_back() -> None:
    text = INVITE.encode()
    assert text.startswith("tutti1")
    assert text == text.lower()
    assert text.isalnum()
    assert Invite.decode(text) == INVITE


def test_mail_does_not_hurt_it() -> None:
    text = INVITE.encode().upper()
    wrapped = "  " + "\r\n".join(text[i : i + 40] for i in range(0, len(text), 40)) + "\n"
    assert Invite.decode(wrapped) == INVITE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("hello", "not an invite"),
        (HERE, "address, not an invite"),
        ("tutti2abc", "version 2"),
        ("tutti1", "cut off"),
        ("tutti1a", "cut off"),
        (INVITE.encode()[:-1], "cut off"),
        (INVITE.encode()[:60], "cut off"),
        (INVITE.encode() + "aa", "cut off|checksum"),
        (INVITE.encode()[:30] + "0" + INVITE.encode()[31:], "no '0'"),
        ("tutti1" + "é" * 10, "no 'é'"),
        ("tutti1" + "a" * 9000, "too many"),
        (" " * 100_000, "too many"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(UsageFault, match=says) as caught:
        Invite.decode(text)
    assert caught.value.next_step
    assert caught.value.code is ExitCode.USAGE


@given(st.data())
def test_one_wrong_letter_is_noticed(data: st.DataObject) -> None:
    text = INVITE.encode()
    at = data.draw(st.integers(len(PREFIX), len(text) - 2))  # the last letter may hold bits that mean nothing
    letter = data.draw(st.sampled_from([c for c in "abcdefghijklmnopqrstuvwxyz234567" if c != text[at]]))
    with pytest.raises(UsageFault):
        Invite.decode(text[:at] + letter + text[at + 1 :])


@given(st.binary(max_size=400))
def test_a_checksum_alone_makes_no_invite(payload: bytes) -> None:
    with pytest.raises(UsageFault):
        Invite.decode(forged(payload))


@given(st.text(max_size=200) | st.text("abcdefghijklmnopqrstuvwxyz234567", max_size=300).map(PREFIX.__add__))
def test_any_text_is_refused_in_one_way(text: str) -> None:
    with pytest.raises(UsageFault):
        Invite.decode(text)


def test_a_payload_with_something_behind_it_is_refused() -> None:
    raw = base64.b32decode(INVITE.encode()[len(PREFIX) :].upper() + "=" * (-len(INVITE.encode()[len(PREFIX) :]) % 8))
    assert Invite.decode(forged(raw[:-4])) == INVITE
    with pytest.raises(UsageFault, match="1 bytes too many"):
        Invite.decode(forged(raw[:-4] + b"\0"))


@pytest.mark.parametrize(
    "values",
    [
        (RunId("abc"), OWNER.peer_id, (HERE,)),
        (RunId("A" * 64), OWNER.peer_id, (HERE,)),
        (RUN, PeerId("QmNobody"), (HERE,)),
        (RUN, OWNER.peer_id, ()),
        (RUN, OWNER.peer_id, (HERE,) * (MAX_ADDRESSES + 1)),
        (RUN, OWNER.peer_id, (HERE,), b"x" * 513),
        (RUN, OWNER.peer_id, ("/ip4/1.2.3.4/tcp/5",)),
    ],
)
def test_no_invite_is_made_of_values_that_are_none(values: tuple) -> None:
    with pytest.raises(UsageFault):
        Invite(*values)


def test_an_address_leads_to_its_last_peer() -> None:
    assert peer_of_address(HERE) == peer_of_address(RELAYED) == OWNER.peer_id


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "not a multiaddr"),
        ("host:1234", "not a multiaddr"),
        (HERE[1:], "not a multiaddr"),
        (HERE + "\n", "not a multiaddr"),
        (HERE.replace("tcp", "t cp"), "not a multiaddr"),
        ("/ip4/1.2.3.4/tcp/5", "which peer"),
        (HERE + "/", "which peer"),
        ("/ip4/1.2.3.4/tcp/5/p2p/nobody", "PeerId"),
        ("/" + "x" * 300 + HERE, "too long"),
    ],
)
def test_addresses_that_lead_nowhere(address: str, says: str) -> None:
    with pytest.raises(UsageFault, match=says):
        peer_of_address(address)


def test_only_addresses_that_fit_go_into_an_invite() -> None:
    many = [f"/ip4/10.0.0.{i}/tcp/1/p2p/{OWNER.peer_id}" for i in range(20)]
    assert fitting_addresses([HERE, "/ip4/1.2.3.4/tcp/5", HERE, RELAYED]) == (HERE, RELAYED)
    assert fitting_addresses(many) == tuple(many[:MAX_ADDRESSES])
