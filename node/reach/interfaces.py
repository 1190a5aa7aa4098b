"""The addresses of this machine, and ports of it: which are free, and who has one that is not.
Enters: what the kernel says of its interfaces and sockets. Leaves: addresses, widest scope first;
ports. Never: a packet."""

import contextlib
import itertools
import random
import socket
from collections.abc import Sequence

import psutil

from node.core.addresses import Scope, scope
from node.core.errors import NetworkFault

TRIES = 64
"""Ports that are tried before giving up on finding one that is free in every family."""
LISTENING = range(20_000, 32_768)
"""Ports for servers: below those that kernels give to outgoing connections (RFC 6056; Linux begins
at 32,768)."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    return scope(host) is Scope.LOOPBACK


def interface_addresses() -> list[tuple[str, str]]:
    """(interface, address without its zone), of every interface of this machine that is up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        (name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def own_addresses() -> tuple[str, ...]:
    """Addresses of this machine's interfaces that are up, without loopback and link-local ones;
    global ones first."""
    usable = {a for _, a in interface_addresses() if scope(a) in (Scope.PUBLIC, Scope.PRIVATE)}
    return tuple(sorted(usable, key=lambda a: (scope(a), ":" in a, a)))


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
    """What to bind to listen everywhere: "0.0.0.0", and "::" where this kernel speaks IPv6."""
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
            raise taken(host, port, setting, kind, e.strerror or str(e)) from e


def taken(host: str, port: int, setting: str, kind: socket.SocketKind, why: str) -> NetworkFault:
    """The NetworkFault for a port that cannot be bound because of ``why``."""
    protocol = "tcp" if kind == socket.SOCK_STREAM else "udp"
    return NetworkFault(
        f"cannot listen on {protocol} port {port} of {host}: "
        f"{why.lower()}{_holder(port, protocol)}",
        f"see who has it with `ss -{protocol[0]}lnp 'sport = :{port}'` and stop that, or set "
        f"{setting} to another port (0: any)",
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
