"""Is a port free, and if not, who has it? Asked before a server binds, because p2pd would share it
in silence."""

from __future__ import annotations

import socket

import psutil

from node.core.errors import NetworkFault


def check_free(
    host: str, port: int, setting: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> None:
    """Return when ``host:port`` can be bound. Port 0 always can.

    Raises NetworkFault that names the port, its holder where the system tells, and ``setting`` to
    change.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, kind) as probe:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise taken(host, port, setting, kind, e.strerror or str(e)) from e


def taken(host: str, port: int, setting: str, kind: socket.SocketKind, why: str) -> NetworkFault:
    """The NetworkFault for a port that cannot be bound because of ``why``."""
    protocol = "tcp" if kind == socket.SOCK_STREAM else "udp"
    flag = "t" if protocol == "tcp" else "u"
    return NetworkFault(
        f"cannot listen on {protocol} port {port} of {host}: "
        f"{why.lower()}{_holder(port, protocol)}",
        f"see who has it with `ss -{flag}lnp 'sport = :{port}'` and stop that, or set {setting} to "
        "another port (0: any)",
    )


def _holder(port: int, protocol: str) -> str:
    try:
        for connection in psutil.net_connections(kind=protocol):
            if (
                connection.laddr
                and connection.laddr[1] == port
                and not connection.raddr
                and connection.pid
            ):
                return f", held by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        # Another user's process, or a system that does not tell: the next step says how to look.
        pass
    return ""
