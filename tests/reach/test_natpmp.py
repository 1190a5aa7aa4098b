import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import WireError
from node.reach import natpmp
from node.reach.gateway import Gateway, GatewayProtocol, Mapping, Port, RouterFault
from node.reach.natpmp import (
    MapAnswer,
    NatPmp,
    Pcp,
    exchange,
    pcp_announce,
    pcp_map,
    pmp_address,
    pmp_map,
    read_pcp,
    read_pmp,
    state_lost,
)
from testbed.fakes.routers import FakeRouter

NONCE = bytes(range(12))
HERE = Gateway("127.0.0.1", "127.0.0.1")
PORTS = (("tcp", 31337), ("udp", 31337), ("tcp", 31338))
V4 = "00000000000000000000ffff"


# ------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (pmp_address(), "0000"),
        (pmp_map(("udp", 31337), 31338, 3600), "0001 0000 7a69 7a6a 00000e10"),
        (pmp_map(("tcp", 31337), 31338, 3600), "0002 0000 7a69 7a6a 00000e10"),
        # Requests that remove a mapping: RFC 6886, 3.4, and RFC 6887, 15.
        (pmp_map(("tcp", 31337), 31338, 0), "0002 0000 7a69 0000 00000000"),
        (pcp_announce("10.0.0.2"), f"0200 0000 00000000 {V4}0a000002"),
        (
            pcp_map("10.0.0.2", NONCE, ("tcp", 31337), 31338, "203.0.113.7", 3600),
            f"0201 0000 00000e10 {V4}0a000002 {NONCE.hex()} 06000000 7a69 7a6a {V4}cb007107",
        ),
        (
            pcp_map("10.0.0.2", NONCE, ("udp", 31337), 31338, "203.0.113.7", 0),
            f"0201 0000 00000000 {V4}0a000002 {NONCE.hex()} 11000000 7a69 0000 {V4}00000000",
        ),
    ],
)
def test_a_request_has_the_bytes_of_the_rfcs(made: bytes, expected: str) -> None:
    assert made == bytes.fromhex(expected)


PCP_HEAD = f"0281 0000 00000e10 0000000b {'00' * 12} {NONCE.hex()} 06000000 7a69 7a6a"
PCP_MAPPED = MapAnswer(1, 0, 11, "203.0.113.7", 31337, 31338, 3600, NONCE, "tcp")


@pytest.mark.parametrize(
    ("read", "data", "answer"),
    [
        (read_pmp, "0080 0000 0000000b cb007107", MapAnswer(0, 0, 11, "203.0.113.7")),
        (
            read_pmp,
            "0082 0000 0000000b 7a69 7a6a 00000e10",
            MapAnswer(2, 0, 11, "", 31337, 31338, 3600),
        ),
        pytest.param(read_pmp, "0082 0002 0000000b", MapAnswer(2, 2, 11), id="a short refusal"),
        (read_pcp, f"{PCP_HEAD} {V4}cb007107", PCP_MAPPED),
        pytest.param(read_pcp, f"{PCP_HEAD} {V4}cb007107 {'00' * 8}", PCP_MAPPED, id="options"),
        (
            read_pcp,
            f"0281 0002 0000001e 0000000b {'00' * 12}",
            MapAnswer(1, 2, 11, lifetime=30),
        ),
    ],
)
def test_an_answer_is_read_as_the_rfcs_lay_it_out(read, data: str, answer: MapAnswer) -> None:
    assert read(bytes.fromhex(data)) == answer


def test_a_mapping_of_ipv6_is_refused() -> None:
    with pytest.raises(WireError, match="IPv4"):
        read_pcp(bytes.fromhex(f"{PCP_HEAD} 20010db8{'00' * 12}"))


@pytest.mark.parametrize(
    ("read", "whole", "cut"),
    [
        *((read_pcp, f"{PCP_HEAD} {V4}cb007107", cut) for cut in range(60)),
        *((read_pmp, "0082 0000 0000000b 7a69 7a6a 00000e10", cut) for cut in range(16)),
    ],
)
def test_an_answer_that_ends_early(read, whole: str, cut: int) -> None:
    with pytest.raises(WireError):
        read(bytes.fromhex(whole)[:cut])


answers = st.one_of(
    st.binary(max_size=1200),
    st.builds(
        lambda head, body: head + body,
        st.sampled_from([bytes([v, op, 0, 0]) for v in (0, 2) for op in (0x80, 0x81, 0x82)]),
        st.integers(0, 270).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n)),
    ),
)


@given(answers)
def test_whatever_comes_it_is_an_answer_or_a_wire_error(data: bytes) -> None:
    for read in (read_pmp, read_pcp):
        with contextlib.suppress(WireError):
            answer = read(data)
            assert 0 <= answer.internal < 1 << 16
            assert 0 <= answer.external < 1 << 16
            assert not answer.host or socket.inet_aton(answer.host)


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        ((0.0, 100), (20.0, 120), False),
        pytest.param((0.0, 100), (20.0, 118), False, id="two seconds are nothing"),
        pytest.param((0.0, 100), (0.5, 99), False, id="nor is one back"),
        pytest.param((0.0, 100), (20.0, 15), True, id="it restarted"),
        pytest.param((0.0, 10), (1000.0, 900), True, id="it counts on from a lower number"),
        pytest.param((0.0, 100), (20.0, 200), True, id="it counts on from a higher one"),
    ],
)
def test_an_epoch_shows_whether_the_router_lost_its_state(before, now, lost: bool) -> None:
    assert state_lost(before, now) == lost


# ------------------------------------------------------------ the exchange


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(natpmp, "WAITS_S", (0.05, 0.05, 0.05, 5.0))


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    made = await FakeRouter("pcp", "natpmp").start()
    yield made
    made.close()


async def test_a_request_is_sent_again(router: FakeRouter, quick: None) -> None:
    router.lose = 3
    answer = await exchange(pmp_address(), read_pmp, "127.0.0.1", router.port)
    assert answer.host == "203.0.113.7"
    assert router.heard == [pmp_address()] * 4


async def test_a_closed_port_is_a_router_fault() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    with pytest.raises(RouterFault, match="closed"):
        await exchange(pmp_address(), read_pmp, "127.0.0.1", port)


async def test_no_way_to_the_router() -> None:
    with pytest.raises(RouterFault, match="cannot be asked"):
        await exchange(pmp_address(), read_pmp, "255.255.255.255", 5351)


async def test_without_a_free_descriptor_the_router_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none_is_free = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(natpmp.socket, "socket", none_is_free)
    with pytest.raises(RouterFault, match="Too many open files"):
        await exchange(pmp_address(), read_pmp, "127.0.0.1", 5351)


async def test_only_the_gateway_is_heard(router: FakeRouter, quick: None) -> None:
    router.lose = 99
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stranger.bind(("127.0.0.2", 0))
    hear = Mock(wraps=read_pmp)
    asked = asyncio.ensure_future(exchange(pmp_address(), hear, "127.0.0.1", router.port))
    with stranger:
        await router.asked.wait()
        stranger.sendto(bytes.fromhex("0080 0000 0000000b 0b000001"), next(iter(router.peers)))
        router.lose = 0
        assert (await asked).host == "203.0.113.7"
    hear.assert_called_once_with(bytes.fromhex("0080 0000 000003e8 cb007107"))


async def test_malformed_answers_are_passed_over(router: FakeRouter) -> None:
    router.before = [b"", b"\xff" * 60, b"\x02\x81" + bytes(3)]
    way = Pcp(HERE, NONCE, router.port)
    await way.probe()
    assert await way.map(PORTS[:1]) == (
        (Mapping("tcp", 31337, "203.0.113.7", 31337, "PCP"),),
        3600.0,
    )


# ------------------------------------------------------------ the two ways


@pytest.fixture(params=["PCP", "NAT-PMP"])
async def way(request: pytest.FixtureRequest, router: FakeRouter) -> GatewayProtocol:
    router.speaks = {"pcp"} if request.param == "PCP" else {"natpmp"}
    made = Pcp(HERE, NONCE, router.port) if request.param == "PCP" else NatPmp(HERE, router.port)
    await made.probe()
    return made


async def test_map_check_renew_change_remove(way: GatewayProtocol, router: FakeRouter) -> None:
    mapped, lease = await way.map(PORTS)
    assert mapped == tuple(Mapping(*p, "203.0.113.7", p[1], way.name) for p in PORTS)
    assert (lease, set(router.table)) == (3600, set(PORTS))
    assert await way.check()
    assert await way.map(PORTS) == (mapped, lease)
    await way.map(PORTS[2:])
    assert set(router.table) == {PORTS[2]}
    await way.remove()
    assert not router.table
    assert not way.held


async def test_another_port_outside_and_a_shorter_lease(
    way: GatewayProtocol, router: FakeRouter
) -> None:
    router.taken = {31337}
    router.longest = 120
    mapped, lease = await way.map(PORTS[:1])
    assert (mapped[0].external, lease) == (31338, 120)
    router.taken = set()
    router.longest = 7200
    router.restart()
    again, _ = await way.map(PORTS[:1])
    assert again == mapped, "it asks for the port it had"


async def test_state_that_is_lost_is_noticed(way: GatewayProtocol, router: FakeRouter) -> None:
    await way.map(PORTS)
    router.restart()
    assert not await way.check()
    await way.map(PORTS)
    assert set(router.table) == set(PORTS)
    assert await way.check()


async def test_another_address_is_noticed(way: GatewayProtocol, router: FakeRouter) -> None:
    await way.map(PORTS)
    router.address = "100.64.3.4"
    assert not await way.check()
    mapped, _ = await way.map(PORTS)
    assert {m.host for m in mapped} == {"100.64.3.4"}, "private is none of its business"
    assert await way.check()


@pytest.mark.parametrize(
    ("result", "says"), [(2, "the router refuses: mapping is not allowed"), (99, "result 99")]
)
async def test_a_refusal_names_its_reason_and_ends_no_lease(
    way: GatewayProtocol, router: FakeRouter, result: int, says: str
) -> None:
    await way.map(PORTS)
    router.result = result
    with pytest.raises(RouterFault, match=says):
        await way.map(PORTS)
    assert set(router.table) == set(PORTS), "what was mapped before keeps its lease"
    router.result = 0
    await way.remove()
    assert not router.table


@pytest.mark.parametrize(("field", "value"), [("longest", 0), ("address", "0.0.0.0")])
async def test_a_router_that_maps_nothing(
    way: GatewayProtocol, router: FakeRouter, field: str, value: object
) -> None:
    setattr(router, field, value)
    probed = field == "address" and way.name == "NAT-PMP"
    with pytest.raises(RouterFault, match="no address outside" if probed else "maps nothing"):
        await (way.probe() if probed else way.map(PORTS))


async def test_removing_ends_though_nobody_answers(
    way: GatewayProtocol,
    router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await way.map(PORTS)
    monkeypatch.setattr("node.reach.gateway.REMOVE_S", 0.2)
    monkeypatch.setattr(natpmp, "WAITS_S", (1000.0,))
    router.lose = 99
    before = len(router.heard)
    await way.remove()
    assert len(router.heard) == before + len(PORTS), "it asked for all at once"


@pytest.mark.parametrize(("speaks", "other"), [("NAT-PMP", "PCP"), ("PCP", "NAT-PMP")])
async def test_a_router_of_the_other_protocol_is_named(router, speaks: str, other: str) -> None:
    router.speaks = {speaks.replace("-", "").lower()}
    way = Pcp(HERE, NONCE, router.port) if other == "PCP" else NatPmp(HERE, router.port)
    with pytest.raises(RouterFault, match=f"speaks {speaks}, but not {other}"):
        await way.probe()


async def test_pcp_knows_its_own_answers_by_the_nonce(router: FakeRouter, quick: None) -> None:
    way = Pcp(HERE, NONCE, router.port)
    other = await FakeRouter("pcp").start()
    await Pcp(HERE, bytes(12), other.port).map(PORTS[:1])
    other.close()
    router.before = [other._pcp(pcp_map("127.0.0.1", bytes(12), PORTS[0], 5, "0.0.0.0", 77))]
    mapped, lease = await way.map(PORTS[:1])
    assert (mapped[0].external, lease) == (31337, 3600)


async def refusing(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, but: Port) -> NatPmp:
    """A way by NAT-PMP to a router that refuses this port."""
    way = NatPmp(HERE, router.port)
    await way.probe()
    ask = way._ask

    async def all_but_one(port: Port) -> tuple[Mapping, float]:
        if port == but:
            raise RouterFault("not this one")
        return await ask(port)

    monkeypatch.setattr(way, "_ask", all_but_one)
    return way


async def test_a_udp_port_that_is_refused_is_left_out(
    router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = await refusing(router, monkeypatch, PORTS[1])
    mapped, _ = await way.map(PORTS)
    assert [(m.protocol, m.internal) for m in mapped] == [PORTS[0], PORTS[2]]
    with pytest.raises(RouterFault, match="not this one"):
        await way.map(PORTS[1:2])


async def test_a_tcp_port_that_is_refused_leaves_nothing(
    router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = await refusing(router, monkeypatch, PORTS[2])
    with pytest.raises(RouterFault, match="not this one"):
        await way.map(PORTS)
    assert not router.table
    await way.map(PORTS[:2])
    with pytest.raises(RouterFault, match="not this one"):
        await way.map(PORTS)
    assert set(router.table) == set(PORTS[:2]), "what was mapped before keeps its lease"


async def test_a_mapping_whose_answer_is_lost_is_removed(
    way: GatewayProtocol,
    router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(natpmp, "WAITS_S", (0.05,))
    router.mute = True
    with pytest.raises(RouterFault, match="does not answer"):
        await way.map(PORTS)
    assert len(router.heard) > 2
    assert not router.table


async def test_natpmp_knows_its_own_answers_by_opcode_and_port(router: FakeRouter) -> None:
    way = NatPmp(HERE, router.port)
    await way.probe()
    router.before = [
        bytes.fromhex("0082 0000 000003e8 7a6a 1234 00000e10"),
        bytes.fromhex("0081 0000 000003e8 7a69 1234 00000e10"),
    ]
    mapped, _ = await way.map(PORTS[:1])
    assert mapped[0].external == 31337
