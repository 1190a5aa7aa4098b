"""From where an IP address can be reached. Standard library only."""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TypeVar

T = TypeVar("T")


class Scope(IntEnum):
    """The peers that can dial an address; a smaller value is a wider scope."""

    PUBLIC = 0
    """Every peer. Host names count as public, because their addresses are not known here."""
    RELAYED = 1
    """Every peer, through a libp2p relay."""
    PRIVATE = 2
    """Peers in the same private network, or behind the same provider (100.64.0.0/10, RFC 6598)."""
    LINK = 3
    """Peers on the same link."""
    LOOPBACK = 4
    """This machine only."""

    @property
    def word(self) -> str:
        """Word for people."""
        if self is Scope.LINK:
            return "link-local"
        return self.name.lower()


def scope(host: str) -> Scope:
    """The scope of an IP address, perhaps in brackets or with a zone, or of a host name."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        if host == "localhost":
            return Scope.LOOPBACK
        return Scope.PUBLIC
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if address.is_loopback or address.is_unspecified:
        return Scope.LOOPBACK
    if address.is_link_local:
        return Scope.LINK
    if isinstance(address, ipaddress.IPv6Address) and address.sixtofour:
        # Some releases of Python 3.11 call all addresses of 6to4 private.
        address = address.sixtofour
    # The library calls 100.64.0.0/10 neither private nor global, and documentation ranges, where no
    # packet finds its way, private.
    if address.is_global:
        return Scope.PUBLIC
    return Scope.PRIVATE


def in_turns(addresses: Iterable[T], host: Callable[[T], str]) -> list[T]:
    """The addresses in another order: scopes and families take turns, so that whoever keeps only
    the first few has some of each. A machine with privacy extensions (RFC 8981) has eight public
    IPv6 addresses after a week. ``host``: the host of an address."""
    turns = Counter[tuple[Scope, bool]]()
    waiting: list[tuple[int, T]] = []
    for address in addresses:
        name = host(address)
        kind = scope(name), ":" in name
        waiting.append((turns[kind], address))
        turns[kind] += 1
    return [address for _, address in sorted(waiting, key=lambda one: one[0])]


def join_host(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"
