"""Networks that are broken in eight ways, each on a host that wants to join a rendezvous on a
public one."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.core.errors import ExitCode
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest
from testbed.daemons.fleet import REPOSITORY, START_S, Box, Peer
from testbed.daemons.forks import Forks
from testbed.networks.internet import Internet

PORT = 31337
LATE_S = 120.0
"""Bound in s of a command with Python's start and imports on a busy machine; a longer one hangs."""
HOSTS = {"founder": "open", "friend": "open", "joiner": "home", "cut": "home", "six": "home"}
HOUR_OFF = """
import time

_true = time.time
time.time = lambda: _true() + 3600.0
"""


@dataclass
class Tried:
    """A command's output, exit code, and total time."""

    stdout: str
    stderr: str
    code: int
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.stdout)


class BrokenLab:
    """A rendezvous on "founder", a peer of its swarm on "friend", and hosts that want to join. A
    context. ``forks``: as in :class:`~testbed.daemons.fleet.Box`; ``program``: the module that is
    run as the command line."""

    def __init__(self, root: Path, forks: Forks | None = None, program: str = "cli") -> None:
        self.net = Internet(HOSTS, families=(4, 6))
        self.box = Box(root, forks=forks)
        self.friend = root / "friend"
        self.program = program
        owner = Identity.load_or_create(root / "owner" / "identity.key")
        self.manifest = Manifest.parse(Manifest.default_demo().owned_by(owner.peer_id).sign(owner))
        self.founder = Identity.load_or_create(root / "founder" / "identity.key").peer_id

    def __enter__(self) -> "BrokenLab":
        self.net.__enter__()
        try:
            file = self.box.root / "swarm.toml"
            file.write_bytes(self.manifest.to_toml())
            words = ("bootstrap", "--swarm", str(file), "--port", str(PORT))
            started = []
            for label, more in (("founder", ()), ("friend", ("--join", self.address()))):
                home = self.box.root / label
                child = self.box.child(label, (*words, *more), self.net[label].through)
                peer = Peer(label, home, child, {"TUTTI_TRANSPORT_QUIC": "true"})
                self.box.made[label] = peer
                started.append(peer.start())
            for peer in started:
                self.box.wait(
                    "a friend", lambda p=peer: len(known(p)) > 1, START_S, must_run=(peer,)
                )
        except BaseException:  # also a Ctrl-C: no daemon stays
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.box.clean_up()
        self.net.close()

    def address(self, transport: str = f"tcp/{PORT}", host: str = "") -> str:
        """A multiaddr of the founder."""
        return f"/{host or 'ip4/' + self.net['founder'].address}/{transport}/p2p/{self.founder}"

    def invite(self, *addresses: str) -> str:
        """Invite with these addresses; without any, with the ones that work."""
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
        begin = time.monotonic()
        started = [
            self.net.popen(
                host,
                [
                    *("env", *(f"{key}={value}" for key, value in env.items())),
                    sys.executable,
                    "-m",
                    self.program,
                    "--home",
                    str(home),
                    *words,
                    invite,
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
            )
            for words in verbs
        ]
        joined, examined = (
            Tried(*one.communicate(timeout=LATE_S), one.wait(), time.monotonic() - begin)
            for one in started
        )
        return joined, examined

    @contextlib.contextmanager
    def dropping(self, *rules: str) -> Iterator[None]:
        """The founder's packet filter has these rules meanwhile."""
        self.net.filter("founder", *rules)
        try:
            yield
        finally:
            self.net.filter("founder")


@dataclass(frozen=True)
class Case:
    """One broken network: the exit code of both commands there, and words in the output of both.
    `run` returns their outputs."""

    name: str
    code: ExitCode
    says: tuple[str, ...]
    run: Callable[[BrokenLab], tuple[Tried, Tried]]


def _no_route(lab: BrokenLab) -> tuple[Tried, Tried]:
    lab.net.no_route("cut")
    lab.net.run("cut", ["ip", "-6", "route", "del", "default"])
    return lab.both("cut", lab.home("cut"), lab.invite())


def _wrong_port(lab: BrokenLab) -> tuple[Tried, Tried]:
    wrong = lab.invite(lab.address(f"tcp/{PORT + 1}"), lab.address(f"udp/{PORT + 1}/quic-v1"))
    return lab.both("joiner", lab.home("port"), wrong)


def _no_such_name(lab: BrokenLab) -> tuple[Tried, Tried]:
    return lab.both(
        "joiner", lab.home("name"), lab.invite(lab.address(host="dns4/founder.invalid"))
    )


def _inbound_dropped(lab: BrokenLab) -> tuple[Tried, Tried]:
    with lab.dropping(f"input tcp dport {PORT} drop", f"input udp dport {PORT} drop"):
        return lab.both("joiner", lab.home("drop"), lab.invite())


def _udp_dropped(lab: BrokenLab) -> tuple[Tried, Tried]:
    with lab.dropping("input meta l4proto udp drop"):
        return lab.both("joiner", lab.home("udp"), lab.invite(lab.address(f"udp/{PORT}/quic-v1")))


def _six_only(lab: BrokenLab) -> tuple[Tried, Tried]:
    lab.net.run("six", ["ip", "-4", "addr", "flush", "dev", "eth0"])
    return lab.both("six", lab.home("six"), lab.invite())


def _clock_off(lab: BrokenLab) -> tuple[Tried, Tried]:
    shim = lab.box.root / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(HOUR_OFF)
    return lab.both("joiner", lab.home("clock"), lab.invite(), PYTHONPATH=str(shim))


def _key_in_use(lab: BrokenLab) -> tuple[Tried, Tried]:
    return lab.both("joiner", lab.home("copied", key=lab.friend), lab.invite())


CASES = (
    Case("no route", ExitCode.NO_ROUTE, ("no default route",), _no_route),
    Case("wrong port", ExitCode.PORT_CLOSED, (f"TCP port {PORT + 1}",), _wrong_port),
    Case("name not found", ExitCode.NAME_NOT_FOUND, ("founder.invalid",), _no_such_name),
    Case("inbound dropped", ExitCode.NO_ANSWER, (f"TCP port {PORT}",), _inbound_dropped),
    Case("UDP dropped, only QUIC", ExitCode.UDP_BLOCKED, ("over UDP",), _udp_dropped),
    Case(
        "IPv6 here, IPv4 there",
        ExitCode.NO_COMMON_FAMILY,
        ("no IPv4 address, only IPv6",),
        _six_only,
    ),
    Case("clock an hour off", ExitCode.CLOCK_WRONG, ("1h00m ahead of",), _clock_off),
    Case(
        "identity in use elsewhere",
        ExitCode.IDENTITY_IN_USE,
        ("in use elsewhere",),
        _key_in_use,
    ),
)


def known(peer: Peer) -> list[str]:
    """The PeerIds a daemon shows."""
    return [line.peer for line in peer.peers().peers] if peer.status().state else []
