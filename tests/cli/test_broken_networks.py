"""Networks that are broken in eight ways: who cannot join is told which one it is, in time.

A rendezvous listens on all addresses of a public host; each case is a host of its own that cannot
reach it, or should not start. All of it in network namespaces of this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.fleet import REPOSITORY, START_S, Box, Peer
from benchmarks.lab.internet import Internet, why_not
from node.core.errors import ExitCode
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.launch import Child
from node.manifest import Manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]

PORT = 31337
LIMIT_S = 10.0
"""What a command may take of its own time, measured inside."""
LATE_S = 40.0
"""Python's start and imports on a busy machine on top of that: then something hangs."""
HOUR_OFF = """
import time

_true = time.time
time.time = lambda: _true() + 3600.0
"""


@dataclass
class Lab:
    """A rendezvous on "founder", a peer of its swarm on "friend", and hosts that want to join."""

    net: Internet
    box: Box
    manifest: Manifest
    founder: str
    """PeerId of the rendezvous."""
    friend: Path
    """Home of the other peer."""

    def address(self, transport: str = f"tcp/{PORT}", host: str = "") -> str:
        return f"/{host or 'ip4/' + self.net['founder'].address}/{transport}/p2p/{self.founder}"

    def invite(self, *addresses: str) -> str:
        quic = self.address(f"udp/{PORT}/quic-v1")
        owner = self.manifest.swarm.owner
        return Invite(self.manifest.run_id, owner, addresses or (self.address(), quic)).encode()

    def home(self, name: str, key: Path | None = None) -> Path:
        """An empty home, with a copy of the key of another."""
        made = self.box.root / name
        made.mkdir(mode=0o700)
        if key is not None:
            shutil.copy(key / "identity.key", made / "identity.key")
        return made

    def both(self, host: str, home: Path, invite: str, **env: str) -> tuple[Tried, Tried]:
        """``tutti join`` and ``tutti doctor net`` on a host, at the same time."""
        verbs = ("join", "--yes", "--no-start"), ("doctor", "net", "--json")
        started = [
            self.net.popen(
                host,
                [*("env", *(f"{key}={value}" for key, value in env.items())),
                 sys.executable, "-m", "cli", "--home", str(home), *words, invite],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
            )
            for words in verbs
        ]  # fmt: skip
        joined, examined = (Tried(*one.communicate(timeout=LATE_S), one.wait()) for one in started)
        return joined, examined


@dataclass
class Tried:
    """What a command printed and ended with."""

    stdout: str
    stderr: str
    code: int

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.stdout)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = {"founder": "open", "friend": "open", "joiner": "home", "cut": "home", "six": "home"}
    box = Box(tmp_path_factory.mktemp("broken"))
    with Internet(hosts, families=(4, 6)) as net:
        try:
            owner = Identity.load_or_create(box.root / "owner" / "identity.key")
            manifest = Manifest.parse(Manifest.default_demo().owned_by(owner.peer_id).sign(owner))
            file = box.root / "swarm.toml"
            file.write_bytes(manifest.to_toml())
            key = Identity.load_or_create(box.root / "founder" / "identity.key").peer_id
            made = Lab(net, box, manifest, key, box.root / "friend")
            words = ("bootstrap", "--swarm", str(file), "--listen", "0.0.0.0", "--port", str(PORT))
            started = []
            for label, more in (("founder", ()), ("friend", ("--join", made.address()))):
                home = box.root / label
                child = Child(label, home, (*words, *more), net[label].through)
                box.made[label] = Peer(label, home, child)
                started.append(box.made[label].start())
            for peer in started:
                box.wait("a friend", lambda p=peer: len(known(p)) > 1, START_S, must_run=(peer,))
            yield made
        finally:
            box.clean_up()


def known(peer: Peer) -> list[str]:
    """The PeerIds a daemon shows."""
    return [line.peer for line in peer.peers().peers] if peer.status().state else []


@pytest.fixture(autouse=True)
def _open(lab: Lab) -> Iterator[None]:
    yield
    lab.net.filter("founder")


def fails(
    lab: Lab,
    code: ExitCode,
    host: str,
    home: Path,
    invite: str,
    *says: str,
    **env: str,
) -> dict[str, Any]:
    """Both commands end with ``code`` in time and say so; what the doctor found."""
    joined, examined = lab.both(host, home, invite, **env)
    assert joined.code == code, joined.stderr
    assert examined.code == code, examined.stdout + examined.stderr
    found = examined.document
    assert found["verdict"]["code"] == code
    assert found["seconds"] <= LIMIT_S
    assert joined.stderr.startswith("tutti: ")
    assert found["verdict"]["fix"]
    assert found["verdict"]["fix"] in joined.stderr
    for words in says:
        assert words in joined.stderr
        assert words in examined.stdout
    assert not (home / "swarms").exists(), "nothing is remembered of a swarm that was not joined"
    print(f"{code.name}: {found['seconds']} s")
    return found


def works(lab: Lab, host: str, home: Path, invite: str) -> dict[str, Any]:
    joined, examined = lab.both(host, home, invite)
    assert joined.code == 0, joined.stderr
    assert (home / "swarms").exists()
    assert examined.code == 0, examined.stdout + examined.stderr
    found = examined.document
    assert found["seconds"] <= LIMIT_S
    return found


def test_an_invite_that_works(lab: Lab) -> None:
    found = works(lab, "joiner", lab.home("fine"), lab.invite())
    assert [f["ok"] for f in found["findings"]] == [True, True]
    assert found["verdict"]["code"] == 0
    assert abs(found["machine"]["clock_s"]) < 60
    assert found["machine"]["routes"] == {
        "ipv4": lab.net["joiner"].address,
        "ipv6": lab.net["joiner"].address6,
    }


def test_quic_carries_a_joiner_where_tcp_is_dropped(lab: Lab) -> None:
    lab.net.filter("founder", "input meta l4proto tcp drop")
    found = works(lab, "joiner", lab.home("quic"), lab.invite())
    assert [f["layer"] for f in found["findings"]] == ["connect", "answer"]


def test_udp_that_is_dropped_is_a_warning_where_tcp_works(lab: Lab) -> None:
    lab.net.filter("founder", "input meta l4proto udp drop")
    found = works(lab, "joiner", lab.home("warned"), lab.invite())
    assert (found["verdict"]["ok"], found["verdict"]["code"]) == (True, ExitCode.UDP_BLOCKED)


def test_no_route(lab: Lab) -> None:
    lab.net.no_route("cut")
    lab.net.run("cut", ["ip", "-6", "route", "del", "default"])
    found = fails(lab, ExitCode.NO_ROUTE, "cut", lab.home("cut"), lab.invite(), "no default route")
    assert found["machine"]["routes"] == {"ipv4": None, "ipv6": None}
    assert found["seconds"] < 5


def test_a_wrong_port(lab: Lab) -> None:
    wrong = lab.invite(lab.address(f"tcp/{PORT + 1}"), lab.address(f"udp/{PORT + 1}/quic-v1"))
    said, home = f"TCP port {PORT + 1}", lab.home("port")
    found = fails(lab, ExitCode.PORT_CLOSED, "joiner", home, wrong, said)
    assert {f["code"] for f in found["findings"]} == {ExitCode.PORT_CLOSED}


def test_a_name_that_is_none(lab: Lab) -> None:
    named = lab.invite(lab.address(host="dns4/founder.invalid"))
    fails(lab, ExitCode.NAME_NOT_FOUND, "joiner", lab.home("name"), named, "founder.invalid")


def test_a_firewall_that_drops_what_comes_in(lab: Lab) -> None:
    lab.net.filter("founder", f"input tcp dport {PORT} drop", f"input udp dport {PORT} drop")
    fails(lab, ExitCode.NO_ANSWER, "joiner", lab.home("drop"), lab.invite(), f"TCP port {PORT}")


def test_udp_that_is_dropped_and_nothing_but_quic(lab: Lab) -> None:
    lab.net.filter("founder", "input meta l4proto udp drop")
    quic = lab.invite(lab.address(f"udp/{PORT}/quic-v1"))
    fails(lab, ExitCode.UDP_BLOCKED, "joiner", lab.home("udp"), quic, "over UDP")


def test_ipv6_here_and_ipv4_there(lab: Lab) -> None:
    lab.net.run("six", ["ip", "-4", "addr", "flush", "dev", "eth0"])
    fails(
        lab,
        ExitCode.NO_COMMON_FAMILY,
        "six",
        lab.home("six"),
        lab.invite(),
        "no IPv4 address, only IPv6",
    )


def test_a_clock_an_hour_off(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOUR_OFF)
    shifted = {"PYTHONPATH": str(tmp_path)}
    found = fails(
        lab,
        ExitCode.CLOCK_WRONG,
        "joiner",
        lab.home("clock"),
        lab.invite(),
        "1h00m ahead of",
        **shifted,
    )
    assert found["machine"]["clock_s"] == pytest.approx(3600, abs=60)


def test_a_key_that_is_in_use_elsewhere(lab: Lab) -> None:
    home = lab.home("copied", key=lab.friend)
    fails(
        lab,
        ExitCode.IDENTITY_IN_USE,
        "joiner",
        home,
        lab.invite(),
        "in use elsewhere",
        "refreshes its record",
    )


def test_the_key_of_the_very_peer_that_answers(lab: Lab) -> None:
    home = lab.home("founders", key=lab.box.root / "founder")
    fails(lab, ExitCode.IDENTITY_IN_USE, "joiner", home, lab.invite(), "the peer that answers")
