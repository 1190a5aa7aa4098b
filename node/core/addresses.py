"""From where an IP address can be reached. Standard library only."""

import ipaddress
from enum import IntEnum


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


def join_host(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"
