"""The addresses of this machine, and its ports: the free ones, and the programs that hold others.
Enters: the kernel's tables of interfaces and sockets. Leaves: addresses, widest scope first; ports.
Never: a packet."""

import contextlib
import functools
import itertools
import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

import psutil

from node.core.addresses import Scope, scope
from node.core.errors import NetworkFault

TRIES = 64
"""Ports that are tried before giving up on finding one that is free in every family."""
LISTENING = range(20_000, 32_768)
"""Ports for servers: below the range that kernels give to outgoing connections (RFC 6056; Linux
begins at 32,768)."""
LOOK_S = 5.0
"""Seconds for which the interfaces are taken as they were: every dial and every list of addresses
asks for them, and looking takes 2 ms, beside a hundred containers 10 ms."""
NETWORKS = Path("/sys/class/net")
"""Linux's directory of interfaces."""
_TUNNELS = ("wireguard", "vxlan", "geneve", "gre", "tun")
"""Kinds (DEVTYPE) of interfaces that put packets inside other packets."""
_TUNNEL_TYPES = ("65534", "768", "769", "776", "778")
"""Hardware types (if_arp.h): none, IPv4 and IPv6 in IP, IPv6 in IPv4, GRE."""
_BRIDGE_NAMES = (
    *("docker", "br-", "veth", "virbr", "lxc", "lxd", "podman", "cni", "flannel", "cali"),
    *("vmnet", "vboxnet", "bridge"),
)
_TUNNEL_NAMES = ("tun", "tap", "wg", "tailscale", "zt", "utun", "feth")
"""First letters of interface names, used where nothing else tells the kind of an interface."""

T = TypeVar("T")


class InterfaceKind(IntEnum):
    """Networks behind an interface; smaller is more likely to be the network that other peers are
    in."""

    HARDWARE = 0
    """A network card, or a bond, a VLAN or a bridge above one."""
    OTHER = 1
    """An interface without hardware, as a container sees its only one."""
    TUNNEL = 2
    """A VPN or another tunnel."""
    BRIDGE = 3
    """A bridge for containers or virtual machines, which many machines have under the same
    address."""


Look = tuple[dict[str, InterfaceKind], frozenset[str]]
"""The kinds of :func:`address_kinds`, and the addresses of running interfaces."""


def kind_of(name: str, networks: Path = NETWORKS) -> InterfaceKind:
    """The kind of an interface, from Linux's directory of them; elsewhere by its name."""
    here = networks / name
    named = InterfaceKind.OTHER
    if name.startswith(_BRIDGE_NAMES):
        named = InterfaceKind.BRIDGE
    elif name.startswith(_TUNNEL_NAMES):
        named = InterfaceKind.TUNNEL
    if not here.is_dir():
        if named is InterfaceKind.OTHER:
            return InterfaceKind.HARDWARE
        return named
    if (here / "tun_flags").exists() or _devtype(here) in _TUNNELS:
        return InterfaceKind.TUNNEL
    if _has_hardware(here, networks):
        return InterfaceKind.HARDWARE
    if (here / "bridge").is_dir():
        return InterfaceKind.BRIDGE
    if _read(here / "type") in _TUNNEL_TYPES:
        return InterfaceKind.TUNNEL
    return named


def _has_hardware(here: Path, networks: Path, depth: int = 4) -> bool:
    """Return True for an interface of a device, and for one above such an interface."""
    if (here / "device").exists():
        return True
    lower = (networks / path.name.removeprefix("lower_") for path in here.glob("lower_*"))
    return depth > 0 and any(_has_hardware(one, networks, depth - 1) for one in lower)


def _devtype(here: Path) -> str:
    rows = _read(here / "uevent").splitlines()
    return next((row.partition("=")[2] for row in rows if row.startswith("DEVTYPE=")), "")


def _read(path: Path) -> str:
    """The content of a file, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``."""
    return scope(host) is Scope.LOOPBACK


def is_own(host: str) -> bool:
    """Return True for an address of this machine: of loopback, or of an interface that is up."""
    return is_loopback(host) or host in _look()[1]


def every_address() -> list[tuple[str, str, bool]]:
    """(interface, address without its zone, True for an interface that runs) of every interface of
    this machine. A bridge that no container uses does not run, and has its address all the same."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        (name, entry.address.partition("%")[0], name in up)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def interface_addresses() -> list[tuple[str, str]]:
    """(interface, address without its zone), of every interface of this machine that is up."""
    return [(name, address) for name, address, up in every_address() if up]


@functools.lru_cache(maxsize=1)
def _looked(_: int) -> Look:
    """A look at the interfaces, another one at each new number. Raises OSError."""
    kinds: dict[str, InterfaceKind] = {}
    running = set[str]()
    for name, address, up in every_address():
        if scope(address) >= Scope.LINK:
            continue
        kind = kind_of(name)
        kinds[address] = min(kind, kinds.get(address, kind))
        if up:
            running.add(address)
    return kinds, frozenset(running)


_newest_look: list[Look] = [({}, frozenset())]
"""The newest look that succeeded; nothing was seen before the first."""


def _look() -> Look:
    with contextlib.suppress(OSError):  # no descriptor is free: the last look stands
        _newest_look[0] = _looked(int(time.monotonic() // LOOK_S))
    return _newest_look[0]


def address_kinds() -> dict[str, InterfaceKind]:
    """The kind of interface that each address of this machine belongs to, without loopback and
    link-local ones: a host of containers has hundreds of interfaces with no other address. At most
    :data:`LOOK_S` old, older only while the system does not tell."""
    return _look()[0]


def own_addresses() -> tuple[str, ...]:
    """Addresses of this machine's interfaces that are up, without loopback and link-local ones;
    global ones first, addresses of bridges for containers and of tunnels last. At most
    :data:`LOOK_S` old."""
    kinds, running = _look()
    return tuple(sorted(running, key=lambda a: (scope(a), kinds[a], ":" in a, a)))


def without_own_bridges(addresses: Iterable[T], host: Callable[[T], str]) -> list[T]:
    """The addresses of a peer, without those that a bridge or a tunnel of this machine has too: a
    dial would end here, because packets to them never leave this machine. All addresses where there
    are no others, as for a peer on this machine. ``host``: the host of an address."""
    given = list(addresses)
    virtual = {a for a, kind in address_kinds().items() if kind >= InterfaceKind.TUNNEL}
    return [a for a in given if host(a).strip("[]") not in virtual] or given


def without_bridges(addresses: Iterable[T], host: Callable[[T], str]) -> list[T]:
    """Addresses of this machine for others, without those of its bridges: theirs have the same
    ones. All addresses where there are no others. ``host``: the host of an address."""
    given = list(addresses)
    bridges = {a for a, kind in address_kinds().items() if kind is InterfaceKind.BRIDGE}
    return [a for a in given if host(a).strip("[]") not in bridges] or given


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def leaves_from(host: str) -> str:
    """Our address towards an IP address, by the routing table; nothing is sent. Raises OSError for
    no way."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def wildcards() -> tuple[str, ...]:
    """Addresses to listen everywhere: "0.0.0.0", and "::" where this kernel speaks IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return ("0.0.0.0",)
    return ("0.0.0.0", "::")


def free_port(hosts: Sequence[str]) -> int:
    """A port that is free on all these hosts for TCP and UDP. Raises OSError when none is found.

    A port of :data:`LISTENING` is free until somebody asks for it; one that the kernel gives
    could belong to an outgoing connection of anybody before its owner listens on it."""
    for _ in range(TRIES):
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            port = random.choice(LISTENING)
            for host, kind in itertools.product(hosts, (socket.SOCK_STREAM, socket.SOCK_DGRAM)):
                one = taken.enter_context(socket.socket(family_of(host), kind))
                if ":" in host:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((host, port))
            return port
    raise OSError(f"no port is free on all of {', '.join(hosts)}")


def check_free(
    host: str, port: int, setting: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> None:
    """Return when ``host:port`` can be bound; asked before a server binds, because p2pd would share
    the port in silence. Port 0 always can.

    Raises NetworkFault that names the port, its holder where the system tells, and ``setting`` to
    change.
    """
    if port == 0:
        return
    with socket.socket(family_of(host), kind) as probe:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            option = f"--set {setting}=PORT"
            if setting == "transport.p2p_port":
                option = "--p2p-port PORT"
            raise taken(host, port, option, kind, e.strerror or str(e)) from e


def taken(host: str, port: int, option: str, kind: socket.SocketKind, why: str) -> NetworkFault:
    """The NetworkFault for a port that cannot be bound because of ``why``. ``option``: the one that
    names another PORT."""
    protocol = "udp"
    if kind == socket.SOCK_STREAM:
        protocol = "tcp"
    return NetworkFault(
        f"cannot listen on {protocol} port {port} of {host}: "
        f"{why.lower()}{_holder(port, protocol)}",
        f"see who has it with `ss -{protocol[0]}lnp 'sport = :{port}'` and stop that, or "
        f"take another port with  {option}  (0: any)",
    )


def _holder(port: int, protocol: str) -> str:
    # Another user's process, or a system that does not tell: the next step says how to look.
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind=protocol):
            if (
                connection.laddr
                and connection.laddr[1] == port
                and not connection.raddr
                and connection.pid
            ):
                return f", held by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
