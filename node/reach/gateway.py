"""The IPv4 gateway of this host's default route, and the local address towards it.
Enters: the kernel's table of routes. Leaves: two addresses, or None when there is no such gateway.
Never: a packet, an interface of another address family."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from node.reach.interfaces import is_loopback, leaves_from

ROUTES = Path("/proc/net/route")
_UP, _GATEWAY = 1, 2  # RTF_UP, RTF_GATEWAY


@dataclass(frozen=True, slots=True)
class Gateway:
    """``address`` of the default gateway, ``local`` this host's towards it; IPv4 as text."""

    address: str
    local: str


def default_gateway(routes: str) -> str | None:
    """The gateway of the default route with the lowest metric in the text of /proc/net/route.

    None when there is none: routes without a gateway (point-to-point links) and over loopback do
    not count, lines that cannot be read are passed over.
    """
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        try:
            interface, target, gateway, flags, metric, mask = *fields[:4], fields[6], fields[7]
            numbers = [int(text, 16) for text in (target, gateway, flags, mask)]
            order = int(metric)
        except (ValueError, IndexError):
            continue
        to, via, bits, within = numbers
        default = to == within == 0 and bits & _UP and bits & _GATEWAY
        if default and interface != "lo" and 0 < via < 1 << 32:
            # The table shows addresses as numbers of this machine, not of the network.
            found.append((order, str(IPv4Address(socket.htonl(via)))))
    return min(found, key=lambda route: route[0])[1] if found else None


def find_gateway() -> Gateway | None:
    """The gateway now; None without one or a way to it, and where the kernel has no such table (it
    is Linux's)."""
    try:
        address = default_gateway(ROUTES.read_text())
        local = leaves_from(address) if address else ""
    except OSError:
        return None
    return Gateway(address, local) if address and not is_loopback(local) else None
