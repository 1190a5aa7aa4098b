"""Addresses as text: multiaddrs of p2p daemons, and host:port of gRPC servers. Checks the text of
strangers. And a book of where peers may be dialled."""

import contextlib
import ipaddress
import re
from collections.abc import Sequence

from node.core.addresses import in_turns
from node.core.addresses import join_host as join_host
from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.newest import Newest
from node.identity.faults import PEERS_KEPT

ADDRESS_LENGTH = 512
ADDRESSES_KEPT = 8
_PEER = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}")
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")


def split_multiaddr(text: str) -> tuple[str, PeerId]:
    """("/ip4/1.2.3.4/tcp/9", peer) of "/ip4/1.2.3.4/tcp/9/p2p/12D3Koo…". Raises WireError when it
    is not of that form."""
    address, mark, peer = text.strip().rpartition("/p2p/")
    if (
        not mark
        or len(text) > ADDRESS_LENGTH
        or not address.startswith("/")
        or not _PEER.fullmatch(peer)
    ):
        raise WireError(f"not a multiaddr with a PeerId at its end: {text[:80]!r}")
    return address, PeerId(peer)


def part_of(multiaddr: str, protocol: str) -> str:
    """The value behind ``protocol``, as "7001" for "tcp" in "/ip4/1.2.3.4/tcp/7001"; empty when it
    is not there."""
    words = multiaddr.split("/")
    if protocol not in words[:-1]:
        return ""
    return words[words.index(protocol) + 1]


def grpc_target(address: str) -> str:
    """Target that gRPC dials for an announced "host:port", "1.2.3.4:port" or "[v6]:port".

    Raises WireError for anything else: gRPC would also understand "unix:…" or "xds:…", which no
    peer may make us dial.
    """
    host, mark, port = address.rpartition(":")
    if (
        not mark
        or len(address) > 260
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise WireError(f"not an address: {address[:80]!r}")
    bare = host
    if host.startswith("[") and host.endswith("]"):
        bare = host[1:-1]
    try:
        version = ipaddress.ip_address(bare).version
    except ValueError:
        if not _HOST.fullmatch(host) or host.replace(".", "").isdigit():
            raise WireError(f"not an address: {address[:80]!r}") from None
        return f"dns:///{host}:{port}"
    if version == 4:
        return f"ipv4:{bare}:{port}"
    if "%" in bare or not host.startswith("["):
        raise WireError(f"not an address: {address[:80]!r}")
    return f"ipv6:[{bare}]:{port}"


def host_of_target(target: str) -> str:
    """The host in the answer of :func:`grpc_target`."""
    return target.partition(":")[2].rpartition(":")[0].strip("/[]")


def multiaddr(host: str, port: int, kind: str = "tcp") -> str:
    """ "/ip4/1.2.3.4/tcp/9"; ``kind`` "quic" gives "/ip4/1.2.3.4/udp/9/quic-v1"."""
    family = "dns"
    if ":" in host:
        family = "ip6"
    elif host.replace(".", "").isdigit():
        family = "ip4"
    if kind == "tcp":
        return f"/{family}/{host}/tcp/{port}"
    return f"/{family}/{host}/udp/{port}/quic-v1"


def is_quic(multiaddr: str) -> bool:
    """Return True for a multiaddr that is dialled over UDP."""
    return "/udp/" in multiaddr


def host_of(multiaddr: str) -> str:
    """The host of a multiaddr, "" where it names none."""
    words = multiaddr.split("/")
    if len(words) > 2 and words[1] in ("ip4", "ip6", "dns", "dns4", "dns6"):
        return words[2]
    return ""


def ip_of(multiaddr: str) -> tuple[str, int] | None:
    """(IP address, TCP port or 0) of a multiaddr that begins with an IP address; None of others,
    and of one with a zone, which may be any text."""
    try:
        host = str(ipaddress.ip_address(host_of(multiaddr)))
    except ValueError:
        return None
    if "%" in host:
        return None
    port = part_of(multiaddr, "tcp")
    if re.fullmatch("[0-9]{1,5}", port) and int(port) < 1 << 16:
        return host, int(port)
    return host, 0


class AddressBook:
    """Addresses to dial peers at: the newest eight of the 4096 peers learned last, some of each
    scope and family."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._pages: Newest[PeerId, tuple[str, ...]] = Newest(PEERS_KEPT)

    def learn(self, peer: PeerId, multiaddrs: Sequence[str]) -> None:
        """Remember multiaddrs that end in ``peer``; other text is ignored."""
        good = []
        for text in in_turns(multiaddrs, host_of)[:ADDRESSES_KEPT]:
            with contextlib.suppress(WireError):
                address, named = split_multiaddr(text)
                if named == peer:
                    good.append(address)
        if not good or peer == self._me:
            return
        old = [a for a in self._pages.get(peer, ()) if a not in good]
        self._pages[peer] = tuple((good + old)[:ADDRESSES_KEPT])

    def of(self, peer: PeerId) -> tuple[str, ...]:
        """Addresses without the PeerId, newest first."""
        return self._pages.get(peer, ())
