"""Invites that survive mail, and whose errors say what is wrong."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import ExitCode, TooNew, UsageFault
from node.core.ids import PeerId, RunId
from node.identity.invites import (
    MAX_ADDRESS,
    MAX_ADDRESSES,
    MAX_PEERS,
    PREFIX,
    HostPort,
    Invite,
    _checksum,
    endpoint_of,
    fitting_addresses,
    is_invite,
    only_on,
    peer_of_address,
    within_limits,
)
from node.identity.keys import Identity

# The same keys in every process, because they stand in the tests' names, which two workers have to
# agree on.
OWNER, STRANGER = (
    Identity(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32), None) for seed in (1, 2)
)
RUN = RunId("0123456789abcdef" * 4)
HERE = f"/ip4/203.0.113.9/tcp/31337/p2p/{OWNER.peer_id}"
RELAYED = (
    f"/dns4/relay.example/udp/9/quic-v1/p2p/{STRANGER.peer_id}/p2p-circuit/p2p/{OWNER.peer_id}"
)
INVITE = Invite(RUN, OWNER.peer_id, (HERE, RELAYED), b"token")
OTHERS = [
    Identity(Ed25519PrivateKey.from_private_bytes(bytes([9, seed]) * 16), None).peer_id
    for seed in range(9)
]


def forged(payload: bytes) -> str:
    return PREFIX + base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()


def payload_of(invite: Invite) -> bytes:
    text = invite.encode()[len(PREFIX) :]
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))[:-4]


ODD = [
    f"/ip4/192.0.2.1/tcp/1/ws/p2p/{OWNER.peer_id}",
    f"/ip4/192.0.2.1/tcp/0/p2p/{OWNER.peer_id}",
    f"/ip4/192.0.2.1/tcp/70000/p2p/{OWNER.peer_id}",
    f"/ip4/192.0.2.1/tcp/007/p2p/{OWNER.peer_id}",
    f"/ip4/192.0.2.300/tcp/7/p2p/{OWNER.peer_id}",
    f"/ip6/2001:DB8::1/tcp/7/p2p/{OWNER.peer_id}",
    f"/ip6/fe80::1%eth0/tcp/7/p2p/{OWNER.peer_id}",
    f"/ip6zone/eth0/ip6/fe80::1/tcp/7/p2p/{OWNER.peer_id}",
    f"/ip4/192.0.2.1/udp/7/quic-v1/webtransport/p2p/{OWNER.peer_id}",
    f"/ip4/192.0.2.1/udp/7/quic/p2p/{OWNER.peer_id}",
    f"/dns4/{'x' * 150}{'_' * 20}!/tcp/7/p2p/{OWNER.peer_id}",
    f"/dnsaddr/swarm.example/p2p/{OWNER.peer_id}",
    f"/onion3/abc:1/p2p/{OWNER.peer_id}",
    f"/p2p/{OWNER.peer_id}/p2p/{OWNER.peer_id}",
    RELAYED,
]
PLAIN = [
    f"/{host}/{transport}/p2p/{peer}"
    for peer in (OWNER.peer_id, STRANGER.peer_id)
    for host in (
        "ip4/198.51.100.7",
        "ip6/2001:db8::7",
        "dns4/a.example",
        "dns6/b.example",
        "dns/c-d_e.example",
    )
    for transport in ("tcp/31337", "udp/31337/quic-v1", "tcp/1", "udp/65535/quic-v1")
]


@pytest.mark.parametrize("address", [*PLAIN, *ODD])
def test_no_multiaddr_of_a_peer_makes_an_invite_impossible(address: str) -> None:
    made = Invite(RUN, OWNER.peer_id, (address,))
    assert (made.addresses, Invite.decode(made.encode())) == ((address,), made)


@given(st.lists(st.sampled_from([*PLAIN, *ODD]), min_size=1, max_size=MAX_ADDRESSES))
def test_an_invite_round_trips_with_a_peers_addresses_together(addresses: list[str]) -> None:
    made = Invite(RUN, OWNER.peer_id, tuple(addresses))
    assert Invite.decode(made.encode()) == made
    assert sorted(made.addresses) == sorted(set(addresses))
    assert list(dict.fromkeys(map(peer_of_address, made.addresses))) == list(
        dict.fromkeys(map(peer_of_address, addresses))
    )


@given(
    st.text(
        st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=MAX_ADDRESS - 60
    )
)
def test_whatever_stands_before_the_peer_comes_back(text: str) -> None:
    address = f"/{text}/p2p/{OWNER.peer_id}"
    made = Invite(RUN, OWNER.peer_id, (address,))
    assert (made.addresses, Invite.decode(made.encode())) == ((address,), made)


def test_a_usual_invite_fits_a_chat_message() -> None:
    me = OWNER.peer_id
    friend = STRANGER.peer_id
    usual = Invite(
        RUN,
        me,
        (
            f"/ip4/198.51.100.7/tcp/31337/p2p/{me}",
            f"/ip4/198.51.100.7/udp/31337/quic-v1/p2p/{me}",
            f"/ip4/192.168.178.23/tcp/31337/p2p/{me}",
            f"/ip4/192.168.178.23/udp/31337/quic-v1/p2p/{me}",
            f"/ip6/2001:db8:1:2::7/tcp/31337/p2p/{me}",
            f"/ip4/203.0.113.80/tcp/4001/p2p/{friend}",
        ),
    )
    assert len(usual.encode()) <= 320
    assert usual.encode().isalnum()


def test_the_largest_invite_can_be_read() -> None:
    long = [
        f"/dnsaddr/{'x' * 180}{i:02}/p2p/{peer}" for i, peer in enumerate(OTHERS[:MAX_PEERS] * 2)
    ]
    assert len(long) == MAX_ADDRESSES
    made = Invite(RUN, OWNER.peer_id, tuple(long), b"x" * 512)
    assert Invite.decode(made.encode()) == made


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (INVITE.encode(), True),
        (INVITE.encode().upper(), True),
        ("\n" + INVITE.encode(), True),
        *((text, True) for text in ("tutti1abc", "tutti9!")),
        *(
            (text, False)
            for text in (HERE, "swarm.toml", "tutti", "tutti2.toml", "tuttifrutti", "")
        ),
    ],
)
def test_what_begins_as_an_invite_is_taken_for_one(text: str, taken: bool) -> None:
    assert is_invite(text) is taken


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
        ("tutti1abc", "an invite of version 1, this tutti reads version 2"),
        ("tutti3abc", "version 3"),
        ("tutti2", "cut off"),
        ("tutti2a", "cut off"),
        (INVITE.encode()[:-1], "cut off"),
        (INVITE.encode()[:60], "cut off"),
        (INVITE.encode() + "aa", "cut off|checksum"),
        (INVITE.encode()[:30] + "0" + INVITE.encode()[31:], "no '0'"),
        ("tutti2" + "é" * 10, "no 'é'"),
        ("tutti2" + "a" * 9000, "too many"),
        (" " * 100_000, "too many"),
    ],
)
def test_an_invalid_invite_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(UsageFault, match=says) as caught:
        Invite.decode(text)
    assert caught.value.next_step
    newer = isinstance(caught.value, TooNew)
    assert newer == text.startswith("tutti3")
    assert caught.value.code is (ExitCode.PROTOCOL if newer else ExitCode.USAGE)


@given(st.data())
def test_one_wrong_letter_is_noticed(data: st.DataObject) -> None:
    text = INVITE.encode()
    # the last letter may hold bits that mean nothing
    at = data.draw(st.integers(len(PREFIX), len(text) - 2))
    others = "abcdefghijklmnopqrstuvwxyz234567".replace(text[at], "")
    with pytest.raises(UsageFault):
        Invite.decode(text[:at] + data.draw(st.sampled_from(others)) + text[at + 1 :])


@given(st.binary(max_size=400))
def test_a_checksum_alone_makes_no_invite(payload: bytes) -> None:
    with pytest.raises(UsageFault):
        Invite.decode(forged(payload))


@given(
    st.text(max_size=200)
    | st.text("abcdefghijklmnopqrstuvwxyz234567", max_size=300).map(PREFIX.__add__)
)
def test_any_text_is_refused_in_one_way(text: str) -> None:
    with pytest.raises(UsageFault):
        Invite.decode(text)


def test_a_payload_with_something_behind_it_is_refused() -> None:
    payload = payload_of(INVITE)
    assert Invite.decode(forged(payload)) == INVITE
    with pytest.raises(UsageFault, match="1 bytes too many"):
        Invite.decode(forged(payload + b"\0"))


@pytest.mark.parametrize("kind", [0x01, 0x06, 0x10, 0x16, 0x41, 0x51, 0x91, 0xFF])
def test_an_address_of_a_kind_that_is_not_known_is_refused(kind: int) -> None:
    raw = bytearray(payload_of(Invite(RUN, OWNER.peer_id, (HERE,))))
    assert (raw[-7], Invite.decode(forged(bytes(raw))).addresses) == (0x11, (HERE,))
    raw[-7] = kind
    with pytest.raises(UsageFault, match=f"unknown kind {kind}|ends early|bytes too many"):
        Invite.decode(forged(bytes(raw)))


def test_a_name_on_the_wire_is_no_way_to_write_another_address() -> None:
    raw = payload_of(Invite(RUN, OWNER.peer_id, (f"/dns4/a.example/tcp/1/p2p/{OWNER.peer_id}",)))
    with pytest.raises(UsageFault, match="not a name"):
        Invite.decode(forged(raw.replace(b"a.example", b"a/example")))


@pytest.mark.parametrize(
    "values",
    [
        (RunId("abc"), OWNER.peer_id, (HERE,)),
        (RunId("A" * 64), OWNER.peer_id, (HERE,)),
        (RUN, PeerId("QmNobody"), (HERE,)),
        (RUN, OWNER.peer_id, ()),
        (RUN, OWNER.peer_id, (HERE,) * (MAX_ADDRESSES + 1)),
        (RUN, OWNER.peer_id, tuple(f"/ip4/192.0.2.1/tcp/1/p2p/{peer}" for peer in OTHERS)),
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
def test_an_address_that_leads_nowhere_is_refused(address: str, says: str) -> None:
    with pytest.raises(UsageFault, match=says):
        peer_of_address(address)


def test_an_endpoint_is_what_can_be_dialled() -> None:
    assert (
        endpoint_of(HERE)
        == endpoint_of("/ip4/203.0.113.9/tcp/31337")
        == HostPort("ip4", "203.0.113.9", 31337, False)
    )
    assert endpoint_of("/ip6/2001:DB8::0001/udp/9/quic-v1") == HostPort(
        "ip6", "2001:db8::1", 9, True
    )
    named = endpoint_of("/dns/a.example/tcp/9")
    assert (named.named, named.version, str(named)) == (True, 0, "/dns/a.example/tcp/9")
    assert [
        endpoint_of(address)
        for address in ODD
        if "/tcp/007/" not in address and "DB8" not in address
    ] == [None] * 13


LOOP, LINK, LAN, ULA, CGNAT, FOUR, SIX, NAME = (
    f"/{host}/tcp/1/p2p/{OWNER.peer_id}"
    for host in (
        "ip4/127.0.0.1",
        "ip6/fe80::1",
        "ip4/192.168.1.5",
        "ip6/fd00::5",
        "ip4/100.64.1.2",
        "ip4/11.0.0.1",
        "ip6/2a09:8280:1::1",
        "dns4/a.example",
    )
)
MANY = [f"/ip4/10.0.0.{i}/tcp/1/p2p/{OWNER.peer_id}" for i in range(20)]


@pytest.mark.parametrize(
    ("addresses", "named"),
    [
        (
            [LOOP, LINK, LAN, RELAYED, ULA, CGNAT, FOUR, SIX, NAME],
            (FOUR, SIX, NAME, RELAYED, LAN, ULA, CGNAT),
        ),
        ([LOOP, LINK], (LINK, LOOP)),
        ([LOOP, LOOP, LAN, "nonsense", "/ip4/1.2.3.4/tcp/5"], (LAN,)),
        ([], ()),
        ([*MANY, FOUR], (FOUR, *MANY[: MAX_ADDRESSES - 1])),
    ],
)
def test_an_invite_names_what_others_can_use(addresses, named) -> None:
    assert fitting_addresses(addresses) == named


def test_within_the_limits_order_is_kept() -> None:
    assert within_limits([HERE, "/ip4/1.2.3.4/tcp/5", HERE, RELAYED]) == (HERE, RELAYED)
    assert within_limits(MANY) == tuple(MANY[:MAX_ADDRESSES])
    strangers = [f"/ip4/10.0.0.1/tcp/1/p2p/{peer}" for peer in OTHERS]
    kept = within_limits([*strangers, HERE.replace(OWNER.peer_id, OTHERS[0])])
    assert kept == (*strangers[:MAX_PEERS], HERE.replace(OWNER.peer_id, OTHERS[0]))
    Invite(RUN, OWNER.peer_id, kept)


@pytest.mark.parametrize(
    ("hosts", "closed", "where"),
    [
        (("11.0.0.7", "192.168.1.2"), False, ""),
        (("11.0.0.7", "192.168.1.2"), True, "network"),
        (("192.168.1.2", "100.64.0.9"), False, "network"),
        (("127.0.0.1",), False, "machine"),
    ],
)
def test_an_invite_is_known_to_be_good_only_nearby(hosts, closed, where):
    me = Identity.ephemeral().peer_id
    addresses = [f"/ip4/{host}/tcp/1/p2p/{me}" for host in hosts]
    assert only_on(addresses, me if closed else None) == where
    other = f"/ip4/11.0.0.8/tcp/1/p2p/{Identity.ephemeral().peer_id}"
    assert only_on([*addresses, other], me) == ""
