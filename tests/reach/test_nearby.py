"""Packets that any host may send on a LAN, and a browser's reading of them."""

import asyncio
import dataclasses
import ipaddress
import logging
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import DNSCache, ServiceInfo
from zeroconf._handlers.record_manager import RecordManager
from zeroconf._protocol.incoming import DNSIncoming
from zeroconf._protocol.outgoing import DNSOutgoing

from node.core.errors import ExitCode, NetworkFault
from node.identity.keys import peer_id_of, public_key_of
from node.reach import nearby
from node.reach.nearby import TYPE, Advert, Found, Nearby, found_of, text_of
from node.telemetry.events import Journal

OWNER, PEER = (peer_id_of(bytes([n]) * 32) for n in (1, 2))
ADVERT = Advert("0123456789abcdef" * 4, "garden", OWNER, PEER, "Küche", 3, 4001)
HOSTS = ["192.168.9.10", "fd77:7::10"]
GOODBYE = 0
ANSWER = 0x8400


def raw(advert: Advert) -> dict[bytes, bytes]:
    return {k.encode(): str(v).encode() for k, v in text_of(advert).items()}


def found(advert: Advert = ADVERT, hosts: list[str] = HOSTS, **text: bytes) -> Found | None:
    properties = raw(advert) | {k.encode(): v for k, v in text.items()}
    return found_of(advert.peer, properties, hosts, advert.port)


# ------------------------------------------------------------ one record


def test_what_is_announced_is_what_is_found():
    assert found() == Found(
        run_id=ADVERT.run_id,
        swarm="garden",
        owner=OWNER,
        peer=PEER,
        name="Küche",
        stages=3,
        addresses=(
            f"/ip4/192.168.9.10/tcp/4001/p2p/{PEER}",
            f"/ip6/fd77:7::10/tcp/4001/p2p/{PEER}",
        ),
    )


def test_a_long_name_is_clipped_between_characters():
    assert found(dataclasses.replace(ADVERT, name="木" * 100)).name == "木" * (
        nearby.TEXT_BYTES // 3
    )


@pytest.mark.parametrize(
    "text",
    [
        {"v": b"2"},
        {"v": b""},
        {"run": b"A" * 64},
        {"run": b"a" * 63},
        {"owner": b""},
        {"owner": OWNER.lower().encode()},
        {"peer": OWNER.encode()},
        {"swarm": b""},
        {"swarm": b"x" * 161},
        {"name": b"\x1b[2J"},
        {"name": "\u202eevil".encode()},
        {"name": b"\xff"},
        {"stages": b"0"},
        {"stages": b"4097"},
        {"stages": b"-1"},
        {"stages": "٣".encode()},
    ],
)
def test_a_record_with_one_bad_value_is_nothing(text):
    assert found(**text) is None


def test_addresses_that_cannot_be_dialled_are_left_out():
    bad = ["127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.251", "ff02::fb", "255.255.255.255"]
    bad += ["fe80::1", "fe80::1%eth0", "::ffff:127.0.0.1", "host.local.", ""]
    assert found(hosts=bad) is None
    assert len(found(hosts=[*bad, *HOSTS, *HOSTS]).addresses) == 2
    many = [f"10.0.0.{n}" for n in range(1, 100)]
    assert len(found(hosts=many).addresses) == nearby.ADDRESSES


values = st.one_of(
    st.binary(max_size=255),
    st.text(max_size=60).map(str.encode),
    st.sampled_from([*raw(ADVERT).values(), b"4096", b"4097", OWNER.encode()]),
)
texts = st.one_of(
    st.binary(max_size=1200),
    st.builds(
        lambda changed: ServiceInfo(TYPE, f"x.{TYPE}", properties=raw(ADVERT) | changed).text,
        st.dictionaries(st.sampled_from(list(raw(ADVERT))), values, max_size=3),
    ),
)
names = st.one_of(st.sampled_from([PEER, OWNER]), st.text(max_size=70))
hosts = st.lists(st.one_of(st.sampled_from(HOSTS), st.ip_addresses().map(str), st.text(max_size=9)))


@given(names, texts, hosts, st.one_of(st.none(), st.integers(-1, 70_000)))
def test_hostile_records_give_a_peer_that_can_be_used_or_none(peer, text, hosts, port):
    properties = ServiceInfo(TYPE, f"x.{TYPE}", properties=text).properties
    seen = found_of(peer, properties, hosts, port)
    if seen is None:
        return
    public_key_of(seen.peer)
    public_key_of(seen.owner)
    assert len(bytes.fromhex(seen.run_id)) == 32
    assert (seen.swarm + seen.name).isprintable()
    assert max(len(seen.swarm.encode()), len(seen.name.encode())) <= nearby.TEXT_BYTES
    assert 1 <= seen.stages <= nearby.STAGES
    assert 1 <= len(seen.addresses) <= nearby.ADDRESSES
    for address in seen.addresses:
        _, kind, host, _, number, _, end = address.split("/")
        assert kind == f"ip{ipaddress.ip_address(host).version}"
        assert 0 < int(number) < 65536
        assert end == peer


# ------------------------------------------------------------ many records


class Air:
    """The cache of zeroconf without its sockets: packets come in by hand, queries are kept."""

    def __init__(self) -> None:
        self.cache = DNSCache()
        self.asked: list[bytes] = []
        self.asked_again = asyncio.Event()
        self.journal = Journal()
        self.calls: list[Found] = []
        self.nearby = Nearby(self.journal, self.calls.append)
        self._records = RecordManager(self)
        self.async_add_listener = self._records.async_add_listener

    def async_notify_all(self) -> None:
        pass

    def async_send(self, out: DNSOutgoing) -> None:
        self.asked += out.packets()
        self.asked_again.set()

    def receive(self, *packets: bytes) -> None:
        for packet in packets:
            message = DNSIncoming(packet)
            assert message.valid
            self._records.async_updates_from_response(message)

    def found(self) -> list[str]:
        return [f.peer for f in self.nearby.found]


@pytest.fixture
async def air():
    air = Air()
    air.nearby._listen(air, ())
    yield air
    await air.nearby.close()


def packets(advert: Advert, ttl: int | None = None, *, apart: bool = False) -> list[bytes]:
    """Multicast packets that announce it; with a TTL of 0, that withdraw it."""
    info = ServiceInfo(
        TYPE,
        f"{advert.peer}.{TYPE}",
        port=advert.port,
        properties=text_of(advert),
        server=f"{advert.peer}.local.",
        parsed_addresses=HOSTS,
    )
    records = [info.dns_pointer(ttl), info.dns_service(ttl), info.dns_text(ttl)]
    records += info.dns_addresses(ttl)
    outs = []
    for those in ([r] for r in records) if apart else (records,):
        outs.append(DNSOutgoing(ANSWER))
        for record in those:
            outs[-1].add_answer_at_time(record, 0)
    return [packet for out in outs for packet in out.packets()]


def pointer(label: bytes) -> bytes:
    """An answer that points to the instance ``label``, whatever its bytes are."""
    kind = b"\6_tutti\4_tcp\5local\0"
    data = bytes([len(label)]) + label + b"\xc0\x0c"
    return (
        struct.pack(">6H", 0, ANSWER, 0, 1, 0, 0)
        + kind
        + struct.pack(">HHIH", 12, 1, 4500, len(data))
        + data
    )


async def test_a_nearby_peer_is_reported_once_and_again_when_changed(air):
    air.receive(*packets(ADVERT), *packets(ADVERT))
    assert air.calls == [found()]
    renamed = dataclasses.replace(ADVERT, name="other")
    air.receive(*packets(renamed))
    assert air.calls == [found(), found(renamed)]
    assert air.nearby.found == (found(renamed),)
    air.receive(*packets(renamed, GOODBYE))
    assert air.nearby.found == ()


@pytest.mark.parametrize("order", [1, -1], ids=["pointer first", "pointer last"])
async def test_a_peer_is_found_when_its_last_record_comes(air, order):
    for packet in packets(ADVERT, apart=True)[::order]:
        air.receive(packet)
    assert air.nearby.found == (found(),)


async def test_a_bounded_number_of_peers_is_kept_the_newest(air):
    many = [peer_id_of(n.to_bytes(32, "big")) for n in range(nearby.REMEMBERED + 50)]
    for peer in many:
        air.receive(*packets(dataclasses.replace(ADVERT, peer=peer)))
    assert ([f.peer for f in air.calls], air.found()) == (many, many[50:])


async def test_one_name_that_is_no_utf8_does_not_end_the_queries(air, monkeypatch):
    monkeypatch.setattr(nearby.random, "uniform", lambda low, high: 0.0)
    air.receive(pointer(b"\xff" * 63), *packets(ADVERT))
    await asyncio.wait_for(air.asked_again.wait(), 10)
    (query,) = air.asked
    assert [a.alias for a in DNSIncoming(query).answers()] == [f"{PEER}.{TYPE}"], "the known one"
    assert air.found() == [PEER]


async def test_a_flood_of_names_leaves_few_events(air):
    for n in range(1000):
        air.receive(pointer(b"nobody%d" % n))
    events = [e for e in air.journal.recent() if e.kind == "lan-ignored"]
    assert [e.fields["times"] for e in events] == [2**n for n in range(10)]
    assert ({e.level for e in events}, (air.calls, air.found())) == ({"debug"}, ([], []))


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8), st.integers())
def test_damaged_packets_raise_nothing(damage, cut):
    async def body() -> None:
        air = Air()
        air.nearby._listen(air, ())
        packet = bytearray(packets(ADVERT)[0])
        for place, value in damage:
            packet[place % len(packet)] = value
        message = DNSIncoming(bytes(packet[: cut % len(packet)] if cut > 0 else packet))
        if message.valid:
            air._records.async_updates_from_response(message)
        for peer in air.found():
            public_key_of(peer)
        await air.nearby.close()

    asyncio.run(body())


# ------------------------------------------------------------ without a network


async def test_no_interface_is_one_event_and_nothing_else(monkeypatch):
    looks = iter(range(1000))
    looked = asyncio.Event()

    def none() -> nearby.Interfaces:
        if next(looks) > 3:
            looked.set()
        return (), ()

    monkeypatch.setattr(nearby, "_interfaces", none)
    monkeypatch.setattr(nearby, "RESCAN_S", 0.01)
    journal = Journal()
    errors = []
    here = Nearby(journal, lambda found: None, lambda name, error: errors.append(error), ADVERT)
    await here.start()
    await asyncio.wait_for(looked.wait(), 10)
    await here.close()
    assert [(e.kind, e.level) for e in journal.recent()] == [("lan-unavailable", "info")]
    assert errors == []
    with pytest.raises(NetworkFault) as e:
        await nearby.look(0.05)
    assert (e.value.code, bool(e.value.next_step)) == (ExitCode.NETWORK, True)


async def test_complaints_of_zeroconf_are_one_debug_event_each(monkeypatch, caplog):
    log = logging.getLogger("zeroconf")
    before = list(log.handlers)
    opened = asyncio.Event()

    def refuse(**_: object) -> SimpleNamespace:
        log.warning("socket %d is odd", 7)
        opened.set()
        raise OSError("multicast is not allowed")

    monkeypatch.setattr(nearby, "_interfaces", lambda: (("192.168.9.10",), ("192.168.9.10",)))
    monkeypatch.setattr(nearby, "AsyncZeroconf", refuse)
    journal = Journal()
    here = Nearby(journal, lambda found: None, advert=ADVERT)
    await here.start()
    await asyncio.wait_for(opened.wait(), 10)
    await here.close()
    assert [(e.kind, e.level, e.text) for e in journal.recent()] == [
        ("log", "debug", "socket 7 is odd"),
        ("lan-unavailable", "info", "no discovery on the LAN: multicast is not allowed"),
    ]
    assert (caplog.records, log.handlers) == ([], before)
