"""The finding that is reported among many, with its code and words; and the search for another user
of an identity."""

import errno
import json
import os
import socket
from collections.abc import Callable, Sequence
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.control import diagnose, doctor
from node.control.diagnose import (
    Diagnosis,
    Machine,
    failed,
    fault_of,
    identity_in_use,
    no_way,
    not_tried,
    refused,
    silent,
    stranded,
    this_machine,
    unresolved,
    verdict,
    watch_identity,
)
from node.core.clock import CLOCK_S
from node.core.errors import ExitCode, NetworkFault, Refused
from node.core.ids import PeerId
from node.identity.keys import Identity
from protos.ask_pb2 import PeerLine, PeersAnswer
from protos.control_pb2 import ReachReport, WayLine
from testbed.fakes.clock import VirtualClock

# The same keys in every process, since they stand in a test's parameters.
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in (1, 2, 3)]
ONE, TWO, THREE = (Identity(key, None).peer_id for key in KEYS)
TCP = f"/ip4/11.0.0.1/tcp/4001/p2p/{ONE}"
QUIC = f"/ip4/11.0.0.1/udp/4001/quic-v1/p2p/{ONE}"
QUIC_TWO = f"/ip4/11.0.0.2/udp/4001/quic-v1/p2p/{TWO}"
SIX = f"/ip6/2a09:8280:1::1/tcp/4001/p2p/{ONE}"
LAN = f"/ip4/192.168.1.5/tcp/4001/p2p/{ONE}"
LOOP = f"/ip4/127.0.0.1/tcp/4001/p2p/{ONE}"
NAMED = f"/dns4/swarm.example/tcp/4001/p2p/{ONE}"
OTHER = f"/ip4/11.0.0.2/tcp/4001/p2p/{TWO}"
THIRD = f"/ip4/11.0.0.3/tcp/4001/p2p/{THREE}"
RELAYED = f"/ip4/11.0.0.9/tcp/1/p2p/{TWO}/p2p-circuit/p2p/{ONE}"
LO = ("lo", "127.0.0.1", "loopback")
FOUR = Machine((LO, ("eth0", "192.168.7.2", "private")), {4: "192.168.7.2", 6: ""})
NONE = Machine((LO, ("eth0", "fe80::2", "link-local")), {4: "", 6: ""})


def good(address: str, clock_s: float | None = 0.1) -> Diagnosis:
    return Diagnosis(address, "answer", True, "answered", clock_s=clock_s)


def closed(address: str) -> Diagnosis:
    return refused(address, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))


def routeless(address: str) -> Diagnosis:
    return refused(address, OSError(errno.ENETUNREACH, "Network is unreachable"))


def familyless(address: str) -> Diagnosis:
    found = no_way(address, "2a09:8280:1::1", FOUR)
    assert found is not None
    return found


def nameless(address: str) -> Diagnosis:
    return unresolved(address, "swarm.example", "does not exist")


Code = ExitCode
IN_USE = identity_in_use(PeerId(ONE), "it answers")
TABLE = [
    ("nothing to try", [], Code.OK, True),
    ("no way out at all", [stranded()], Code.NO_ROUTE, False),
    ("no route", [routeless(TCP)], Code.NO_ROUTE, False),
    ("wrong port", [closed(TCP)], Code.PORT_CLOSED, False),
    ("wrong UDP port", [closed(QUIC)], Code.PORT_CLOSED, False),
    ("no such name", [nameless(NAMED)], Code.NAME_NOT_FOUND, False),
    ("silence", [silent(TCP, 8)], Code.NO_ANSWER, False),
    ("silence over UDP only", [silent(QUIC, 8)], Code.UDP_BLOCKED, False),
    ("silence over both", [silent(QUIC, 8), silent(TCP, 8)], Code.NO_ANSWER, False),
    ("no common family", [familyless(SIX)], Code.NO_COMMON_FAMILY, False),
    ("somebody else", [failed(TCP, "proof", Code.NETWORK, "another")], Code.NETWORK, False),
    ("nothing that can be tried", [not_tried(RELAYED)], Code.NETWORK, False),
    # Several addresses: the one where an attempt came furthest tells most.
    ("closed tells more than silent", [silent(TCP, 8), closed(OTHER)], Code.PORT_CLOSED, False),
    ("silent tells more than no route", [routeless(OTHER), silent(TCP, 8)], Code.NO_ANSWER, False),
    ("no route tells more than no family", [familyless(SIX), routeless(TCP)], Code.NO_ROUTE, False),
    ("no family before no name", [nameless(NAMED), familyless(SIX)], Code.NO_COMMON_FAMILY, False),
    ("closed TCP, silent QUIC", [silent(QUIC, 8), closed(TCP)], Code.PORT_CLOSED, False),
    ("silent QUIC, no family for TCP", [silent(QUIC, 8), familyless(SIX)], Code.UDP_BLOCKED, False),
    ("not tried tells nothing", [not_tried(RELAYED), nameless(NAMED)], Code.NAME_NOT_FOUND, False),
    # The answer at a private address may come from another machine of this network.
    ("public before private", [closed(LAN), silent(TCP, 8)], Code.NO_ANSWER, False),
    ("a private one before loopback", [closed(LOOP), silent(LAN, 8)], Code.NO_ANSWER, False),
    ("no family before private", [silent(LAN, 8), familyless(SIX)], Code.NO_COMMON_FAMILY, False),
    ("private ones when there is nothing else", [closed(LAN)], Code.PORT_CLOSED, False),
    # Somebody answers.
    ("one answer is enough", [closed(TCP), nameless(NAMED), good(OTHER)], Code.OK, True),
    ("UDP silent while TCP works", [good(TCP), silent(QUIC, 3)], Code.UDP_BLOCKED, True),
    ("UDP closed while TCP works", [good(TCP), closed(QUIC)], Code.OK, True),
    ("UDP works somewhere", [good(TCP), silent(QUIC, 3), good(QUIC_TWO)], Code.OK, True),
    ("clock ahead", [good(TCP, 3600.0)], Code.CLOCK_WRONG, False),
    ("clock behind", [good(TCP, -61.0)], Code.CLOCK_WRONG, False),
    ("clock nearly right", [good(TCP, CLOCK_S)], Code.OK, True),
    ("clock of one peer wrong", [good(TCP, 3600), good(OTHER), good(THIRD)], Code.OK, True),
    ("peers count once", [good(TCP, 99), good(SIX, 99), good(OTHER), good(THIRD)], Code.OK, True),
    ("clock not told", [good(TCP, None)], Code.OK, True),
    ("identity in use", [good(TCP), IN_USE], Code.IDENTITY_IN_USE, False),
    ("clock before identity", [good(TCP, 3600), IN_USE], Code.CLOCK_WRONG, False),
    ("identity before UDP", [good(TCP), silent(QUIC, 3), IN_USE], Code.IDENTITY_IN_USE, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("findings", "code", "ok"),
    [pytest.param(*row[1:], id=row[0]) for row in TABLE],
)
def test_the_verdict_names_the_cause_in_any_order_of_addresses(
    findings: list[Diagnosis], code: ExitCode, ok: bool
) -> None:
    chosen = verdict(findings)
    assert (chosen.code, chosen.ok) == (code, ok)
    assert chosen.exit_code == (ExitCode.OK if ok else code)
    assert chosen.cause
    assert bool(chosen.effect) == bool(chosen.fix) == (code != ExitCode.OK)
    # The order of the addresses may only decide between equals.
    assert verdict(findings[::-1]).code == code


@pytest.mark.parametrize(
    ("ahead", "says"),
    [
        (3600.0, "1h00m ahead of that of the peer"),
        (-7200.0, "2h00m behind that of the peer"),
        (90.0, "1m ahead of"),
    ],
)
def test_a_wrong_clock_is_reported_with_amount_and_direction(ahead: float, says: str) -> None:
    chosen = verdict([good(TCP, ahead)])
    assert says in chosen.cause
    assert chosen.clock_s == ahead
    assert "2 peers" in verdict([good(TCP, ahead), good(OTHER, ahead)]).cause


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (closed(TCP).cause + closed(TCP).fix, "TCP port 4001"),
        (closed(QUIC).cause, "UDP port 4001"),
        (silent(TCP, 8).fix, "let TCP port 4001 in"),
        (silent(QUIC, 8).fix, "UDP port 4001"),
        (familyless(SIX).cause, "only IPv4"),
        (familyless(SIX).fix, "IPv4 address"),
        (familyless(SIX).fix, "get IPv6"),
    ],
)
def test_the_words_name_transport_port_and_family(text: str, says: str) -> None:
    assert says in text


@pytest.mark.parametrize(
    ("number", "layer", "code"),
    [
        (errno.ECONNREFUSED, "connect", ExitCode.PORT_CLOSED),
        (errno.ENETUNREACH, "route", ExitCode.NO_ROUTE),
        (errno.EADDRNOTAVAIL, "route", ExitCode.NO_ROUTE),
        (errno.EHOSTUNREACH, "connect", ExitCode.NO_ANSWER),
        (errno.ETIMEDOUT, "connect", ExitCode.NO_ANSWER),
        (errno.EPERM, "route", ExitCode.NETWORK),
        (errno.EMFILE, "connect", ExitCode.NETWORK),
    ],
)
def test_each_system_error_maps_to_a_layer_and_exit_code(
    number: int, layer: str, code: ExitCode
) -> None:
    found = refused(TCP, OSError(number, os.strerror(number)))
    assert (found.layer, found.code, found.ok) == (layer, code, False)
    assert all((found.cause, found.effect, found.fix))


@pytest.mark.parametrize(
    ("host", "here", "found"),
    [
        ("192.168.7.9", FOUR, None),
        ("11.0.0.1", FOUR, ("route", ExitCode.NO_ROUTE)),
        ("2a09:8280:1::1", FOUR, ("family", ExitCode.NO_COMMON_FAMILY)),
        ("192.168.7.9", NONE, ("route", ExitCode.NO_ROUTE)),
        ("127.0.0.1", NONE, None),
        # The other IP version is of no use when nothing leads out with it either.
        (
            "2a09:8280:1::1",
            Machine(FOUR.addresses, {4: "", 6: ""}),
            ("route", ExitCode.NO_ROUTE),
        ),
    ],
)
def test_family_and_route_come_from_this_machine(
    monkeypatch: pytest.MonkeyPatch, host: str, here: Machine, found: tuple[str, int] | None
) -> None:
    def leaves_from(host: str) -> str:
        if host.startswith("11."):
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return "192.168.7.2"

    monkeypatch.setattr(diagnose, "leaves_from", leaves_from)
    way = no_way(TCP, host, here)
    assert (way and (way.layer, way.code)) == found


def test_this_machine_knows_loopback() -> None:
    here = this_machine()
    assert ("127.0.0.1", "loopback") in [one[1:] for one in here.addresses]
    assert set(here.routes) == {4, 6}
    assert here.versions <= {4, 6}
    assert no_way(LOOP, "127.0.0.1", here) is None


def test_a_verdict_becomes_an_error() -> None:
    fault = fault_of(IN_USE, [good(TCP), IN_USE])
    assert isinstance(fault, Refused)
    assert fault.code is ExitCode.IDENTITY_IN_USE
    assert "--home" in fault.next_step
    assert len(fault.details["findings"]) == 2


# ------------------------------------------------------------ identity in use


class Swarm:
    """A swarm whose peer shows the record of ONE, refreshed at given times."""

    def __init__(
        self,
        refreshed: Sequence[float],
        state: str = "ready",
        ahead: float = 0.0,
        path: str = "",
    ) -> None:
        self.clock = VirtualClock(100.0)
        self.asked = 0
        self._refreshed = refreshed
        self._state = state
        self._ahead = ahead
        self._path = path

    def peers(self) -> PeersAnswer:
        self.asked += 1
        self.clock.advance(0.3)
        now = self.clock.now()
        answer = PeersAnswer(peers=[PeerLine(peer=TWO, state="ready", path="self")])
        last = max((t for t in self._refreshed if t <= now), default=None)
        if last is not None:
            seen = max(0.0, now - last - self._ahead)
            state = self._state
            line = PeerLine(peer=ONE, name="calm-otter", state=state, seen_s=seen, path=self._path)
            answer.peers.append(line)
        return answer

    def watch(self, ask: Callable[[], PeersAnswer] | None = None) -> Diagnosis | None:
        now = self.clock.now
        sleep = self.clock.advance
        return watch_identity(PeerId(ONE), ask or self.peers, 6.5, now, sleep)


def test_a_record_refreshed_meanwhile_is_of_another_process() -> None:
    for phase in range(5):
        swarm = Swarm([95.0 + phase, 100.0 + phase, 105.0 + phase])
        found = swarm.watch()
        assert found.code is ExitCode.IDENTITY_IN_USE
        assert "calm-otter" in found.cause
        assert swarm.clock.now() <= 107.5


def test_a_peer_that_answers_is_seen_however_old_its_record() -> None:
    answer = Swarm([85.0]).peers()
    answer.called = True
    assert "calm-otter of the swarm answers" in Swarm([]).watch(ask=lambda: answer).cause


def test_a_record_that_a_dead_daemon_left_is_nobody() -> None:
    for age in (0.0, 1.0, 12.0):
        swarm = Swarm([100.0 - age])
        assert swarm.watch() is None
        assert swarm.clock.now() <= 107.5


def test_a_peer_that_is_not_listed_or_lost_is_not_watched() -> None:
    for swarm in (Swarm([]), Swarm([99.0], state="lost"), Swarm([99.0], state="left")):
        assert swarm.watch() is None
        assert swarm.asked == 1


def test_the_peer_that_answers_may_be_it() -> None:
    assert "the peer that answers" in Swarm([100.0], path="self").watch().cause


def test_a_dead_writer_with_a_fast_clock_is_not_taken_for_alive() -> None:
    """The clock of a dead daemon of this machine is ahead: its record looks new, then ages."""
    for ahead in (2.0, 4.0, 60.0):
        assert Swarm([100.0], ahead=ahead).watch() is None


def test_a_swarm_that_stops_answering_proves_nothing() -> None:
    swarm = Swarm([99.0, 104.0])
    assert swarm.watch(ask=Mock(side_effect=[swarm.peers(), NetworkFault("gone")])) is None


# ------------------------------------------------------------ the report


def test_a_checkup_is_for_people_and_for_machines() -> None:
    findings = (good(TCP, 3600.0), closed(NAMED), IN_USE)
    found = doctor.Checkup(FOUR, findings, verdict(findings), 2.345)
    document = json.loads(json.dumps(doctor.checkup_document(found)))
    assert list(document) == ["machine", "findings", "verdict", "seconds"]
    assert document["machine"]["routes"] == {"ipv4": "192.168.7.2", "ipv6": None}
    assert document["machine"]["addresses"][1] == {
        "interface": "eth0",
        "address": "192.168.7.2",
        "scope": "private",
    }
    assert document["machine"]["clock_s"] == 3600.0
    assert [f["layer"] for f in document["findings"]] == ["answer", "connect", "identity"]
    assert (document["verdict"]["code"], document["verdict"]["exit_code"], document["seconds"]) == (
        26,
        26,
        2.35,
    )
    fields = {"address", "layer", "ok", "cause", "effect", "fix", "code"}
    assert fields <= set(document["findings"][0])

    text = "\n".join(doctor.checkup_lines(found))
    for words in (
        "this machine",
        "IPv6       no way out",
        "1h00m ahead of",
        TCP,
        NAMED,
        "refused",
        "timedatectl",
        "fault",
    ):
        assert words in text


def test_without_an_address_the_machine_itself_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "this_machine", lambda: FOUR)
    assert doctor.examine([]).verdict.exit_code is ExitCode.OK
    monkeypatch.setattr(doctor, "this_machine", lambda: NONE)
    assert doctor.examine([]).verdict.exit_code is ExitCode.NO_ROUTE


def test_no_family_of_sockets_is_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
    monkeypatch.setattr(socket, "socket", Mock(side_effect=unsupported))
    assert this_machine().routes == {4: "", 6: ""}


@pytest.mark.parametrize(
    ("paths", "ok"), [(["direct", ""], True), (["", ""], False), ([], False)], ids=str
)
def test_a_machine_without_a_way_out_is_fine_beside_connected_peers(paths: list[str], ok: bool):
    found = doctor.Checkup(doctor.this_machine(), (stranded(),), stranded(), 0.1)
    report = ReachReport(ways=[WayLine(peer=f"p{i}", path=p) for i, p in enumerate(paths)])
    shown = doctor.beside_peers(found, report)
    assert shown.verdict.ok is ok
    assert shown.verdict.exit_code == (Code.OK if ok else Code.NO_ROUTE)
    text = "\n".join(doctor.checkup_lines(shown))
    assert ("1 peer connected all the same" in text) is ok
    assert ("\nnote " in text) is ok
    assert ("\nfault " in text) is not ok


def test_a_fault_of_an_address_stays_one_beside_connected_peers():
    fault = failed("", "clock", Code.CLOCK_WRONG, "this clock is wrong")
    found = doctor.Checkup(doctor.this_machine(), (fault,), fault, 0.1)
    report = ReachReport(ways=[WayLine(peer="p", path="direct")])
    assert doctor.beside_peers(found, report) is found
