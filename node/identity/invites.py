"""One string that brings somebody into a run.

An invite is ``tutti2`` + base32 (lower case, no padding) of: run id 32 bytes, the owner's public
key 32, admission (length u16, bytes), peers (count u8), each with its public key 32 and its
addresses (count u8), and 4 bytes of sha256 over all that. An address begins with its kind, one
byte: in the low four bits ip4, ip6, dns4, dns6 or dns, 1 to 5, above them 0x10 for TCP and 0x20 for
QUIC on the same host and port; then the host (4 bytes, 16 bytes, or length u8 and name) and the
port u16. Kind 0 is any other multiaddr (length u16, text without its last /p2p/PEERID). It survives
line breaks, spaces and capitals of the mail it came in.
"""

import base64
import hashlib
import ipaddress
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO

from node.core.addresses import Scope, scope
from node.core.errors import TooNew, UsageFault, WireError
from node.core.ids import PeerId, RunId
from node.core.version import UPDATE
from node.identity.admission import MAX_ADMISSION
from node.identity.keys import KEY_BYTES, peer_id_of, public_key_of

VERSION = 2
PREFIX = f"tutti{VERSION}"
MAX_ADDRESSES = 16
MAX_PEERS = 8
MAX_ADDRESS = 256
MAX_TEXT = 8192

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_CHECKSUM = 4
_AGAIN = "ask for a fresh invite, and copy all of it"
_FAMILIES = ("", "ip4", "ip6", "dns4", "dns6", "dns")
_IPS = {"ip4": (ipaddress.IPv4Address, 4), "ip6": (ipaddress.IPv6Address, 16)}
"""Class of a host of each family, and the host's bytes in an invite."""
_FAMILY_BITS = 0x0F
_TRANSPORTS = {0x10: "/tcp/{port}", 0x20: "/udp/{port}/quic-v1"}
_PLAIN = re.compile(
    r"/(?P<family>ip4|ip6|dns4|dns6|dns)/(?P<host>[^/%]+)"
    r"/(?:tcp/(?P<tcp>[0-9]{1,5})|udp/(?P<udp>[0-9]{1,5})/quic-v1)"
)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True)
class HostPort:
    """Host, port and protocol of a plain multiaddr. ``family`` as it is written there: ip4, ip6,
    dns4, dns6, dns; TCP or QUIC."""

    family: str
    host: str
    port: int
    quic: bool

    @property
    def version(self) -> int:
        """4 or 6: the only version of IP that it can be dialled with; 0: either, by the addresses
        behind the name."""
        return {"4": 4, "6": 6}.get(self.family[-1], 0)

    @property
    def named(self) -> bool:
        """True if the host is a name that has to be looked up."""
        return self.family.startswith("dns")

    def __str__(self) -> str:
        """The multiaddr, without a PeerId."""
        return f"/{self.family}/{self.host}" + _TRANSPORTS[0x20 if self.quic else 0x10].format(
            port=self.port
        )


@dataclass(frozen=True)
class Invite:
    """Addresses at which a run can be joined. ``owner`` signs its manifest; every address is a
    multiaddr ending in ``/p2p/PEERID``.

    Addresses are kept as they come out of the string: without repeats, grouped by peer, TCP before
    QUIC. Raises UsageFault when made from invalid values.
    """

    run_id: RunId
    owner: PeerId
    addresses: tuple[str, ...]
    admission: bytes = b""

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.run_id):
            raise UsageFault(
                f"not a run id: {self.run_id[:80]!r}",
                "a run id is 64 hexadecimal digits, see the manifest",
            )
        try:
            public_key_of(self.owner)
        except WireError as e:
            raise UsageFault(f"the owner is not a peer: {e}", _AGAIN) from e
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise UsageFault(
                f"an invite names 1 to {MAX_ADDRESSES} addresses, not {len(self.addresses)}", _AGAIN
            )
        if (peers := len({peer_of_address(address) for address in self.addresses})) > MAX_PEERS:
            raise UsageFault(f"an invite names at most {MAX_PEERS} peers, not {peers}", _AGAIN)
        object.__setattr__(self, "addresses", _unpacked(BytesIO(_packed(self.addresses))))
        if len(self.admission) > MAX_ADMISSION:
            raise UsageFault(
                f"an admission token of {len(self.admission)} bytes is too long", _AGAIN
            )

    def encode(self) -> str:
        """The string to hand out: "tutti2…"."""
        run = bytes.fromhex(self.run_id)
        owner = public_key_of(self.owner)
        payload = run + owner + _sized(self.admission) + _packed(self.addresses)
        return PREFIX + base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()

    @classmethod
    def decode(cls, text: str) -> "Invite":
        """The invite in ``text``. Raises UsageFault that names the error in ``text``."""
        if len(text) > 2 * MAX_TEXT or len(packed := "".join(text.split()).lower()) > MAX_TEXT:
            raise UsageFault(f"{len(text)} characters are too many for an invite", _AGAIN)
        if not packed.startswith(PREFIX):
            raise _not_an_invite(packed)
        coded = packed[len(PREFIX) :]
        strange = next((c for c in coded if c not in _ALPHABET), None)
        if strange is not None:
            raise UsageFault(f"an invite has no {strange!r}: it is a to z and 2 to 7", _AGAIN)
        try:
            raw = base64.b32decode(coded.upper() + "=" * (-len(coded) % 8))
        except ValueError as e:
            raise UsageFault("the invite is cut off", _AGAIN) from e
        payload = raw[:-_CHECKSUM]
        checksum = raw[-_CHECKSUM:]
        if checksum != _checksum(payload):
            raise UsageFault(
                "the invite is damaged or cut off: its checksum does not match", _AGAIN
            )
        return cls._parse(payload)

    @classmethod
    def _parse(cls, payload: bytes) -> "Invite":
        reader = BytesIO(payload)
        try:
            run_id = RunId(_take(reader, 32).hex())
            owner = peer_id_of(_take(reader, KEY_BYTES))
            admission = _take_sized(reader)
            addresses = _unpacked(reader)
        except ValueError as e:
            raise UsageFault(
                f"the invite does not hold what it should: {e}",
                "it may be of another version of tutti",
            ) from e
        if rest := reader.read():
            raise UsageFault(
                f"the invite holds {len(rest)} bytes too many",
                "it may be of another version of tutti",
            )
        return cls(run_id, owner, addresses, admission)


def is_invite(text: str) -> bool:
    """Return True if ``text`` is meant as an invite, of any version, whole or not; else it may be a
    file or an address."""
    return re.match("tutti[0-9]", text.strip().lower()) is not None and not text.endswith(".toml")


def endpoint_of(address: str) -> HostPort | None:
    """Endpoint of a multiaddr, with or without /p2p/PEERID; an IP address in its usual spelling.

    None unless it is a host with TCP or QUIC and nothing more.
    """
    found = _PLAIN.fullmatch(re.sub("/p2p/[^/]*$", "", address))
    if found is None or not 0 < (port := int(found["tcp"] or found["udp"])) < 65536:
        return None
    try:
        host = _usual(found["family"], found["host"])
    except ValueError:
        return None
    return HostPort(found["family"], host, port, found["udp"] is not None)


def peer_of_address(address: str) -> PeerId:
    """The peer a multiaddr leads to: its last ``/p2p/PEERID``. Raises UsageFault for a text that
    does not end in one."""
    step = "write it as /ip4/ADDRESS/tcp/PORT/p2p/PEERID, as the other peer prints it"
    if len(address) > MAX_ADDRESS:
        raise UsageFault(f"an address of {len(address)} characters is too long", step)
    words = address.split("/")
    if words[0] or len(words) < 3 or not re.fullmatch(r"[!-~]+", address):
        raise UsageFault(f"not a multiaddr: {address!r}", step)
    if words[-2] != "p2p":
        raise UsageFault(f"the address {address!r} does not say which peer it leads to", step)
    try:
        public_key_of(words[-1])
    except WireError as e:
        raise UsageFault(f"the address {address!r} does not end in a PeerId", step) from e
    return PeerId(words[-1])


def scope_of(address: str) -> Scope:
    """Reach of a multiaddr: the peers that can dial it. A name, or text that is no plain multiaddr,
    counts as public."""
    found = re.match("/ip[46]/([^/]+)", address)
    wide = scope(found[1]) if found else Scope.PUBLIC
    if "/p2p-circuit" in address:
        return max(wide, Scope.RELAYED)
    return wide


def only_on(addresses: Iterable[str], closed: PeerId | None = None) -> str:
    """The only place where an invite with these addresses can be used: this "machine", or its
    "network"; "" for anywhere. ``closed``: a peer that nobody could dial at a public address."""
    there = [a for a in addresses if scope_of(a) > Scope.RELAYED or peer_of_address(a) != closed]
    widest = min(map(scope_of, there), default=Scope.PRIVATE)
    if widest <= Scope.RELAYED:
        return ""
    return "machine" if widest is Scope.LOOPBACK else "network"


def _take(reader: BytesIO, n: int) -> bytes:
    taken = reader.read(n)
    if len(taken) < n:
        raise ValueError("it ends early")
    return taken


def _take_sized(reader: BytesIO) -> bytes:
    return _take(reader, struct.unpack(">H", _take(reader, 2))[0])


def _sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode() + payload).digest()[:_CHECKSUM]


def _not_an_invite(text: str) -> UsageFault:
    if not text:
        return UsageFault("the invite is empty", f"paste the string that starts with {PREFIX}")
    if text.startswith("/"):
        return UsageFault("that is an address, not an invite", "give addresses with --join")
    if found := re.match("tutti([0-9])", text):
        what = f"an invite of version {found[1]}, this tutti reads version {VERSION}"
        if int(found[1]) > VERSION:
            return TooNew(what, UPDATE)
        return UsageFault(what, "ask for a fresh invite, made by a newer tutti")
    return UsageFault(f"not an invite: {text[:20]!r}", f"an invite starts with {PREFIX}")


def _packed(addresses: Iterable[str]) -> bytes:
    """Peers with their addresses; TCP and QUIC on the same host and port are one entry."""
    peers: dict[PeerId, dict[bytes, int]] = {}
    for address in addresses:
        peer = peer_of_address(address)
        plain = address.removesuffix(f"/p2p/{peer}")
        transport = 0
        place = endpoint_of(plain)
        if place is None or str(place) != plain:
            entry = b"\0" + _sized(plain.encode())
        else:
            transport = 0x20 if place.quic else 0x10
            entry = (
                bytes([_FAMILIES.index(place.family)])
                + _host_bytes(place)
                + struct.pack(">H", place.port)
            )
        entries = peers.setdefault(peer, {})
        entries[entry] = entries.get(entry, 0) | transport
    packed = bytearray([len(peers)])
    for peer, entries in peers.items():
        packed += public_key_of(peer) + bytes([len(entries)])
        for entry, transports in entries.items():
            packed += bytes([entry[0] | transports]) + entry[1:]
    return bytes(packed)


def _unpacked(reader: BytesIO) -> tuple[str, ...]:
    """Inverse of :func:`_packed`. Raises ValueError for parts that this version does not know."""
    addresses: dict[str, None] = {}
    for _ in range(_take(reader, 1)[0]):
        peer = peer_id_of(_take(reader, KEY_BYTES))
        for _ in range(_take(reader, 1)[0]):
            kind = _take(reader, 1)[0]
            family = kind & _FAMILY_BITS
            transports = [t for t in _TRANSPORTS if kind & t]
            if kind == 0:
                addresses[f"{_take_sized(reader).decode('ascii')}/p2p/{peer}"] = None
                continue
            if (
                not 0 < family < len(_FAMILIES)
                or kind != family + sum(transports)
                or not transports
            ):
                raise ValueError(f"an address of the unknown kind {kind}")
            host = _host_text(_FAMILIES[family], reader)
            (port,) = struct.unpack(">H", _take(reader, 2))
            for transport in transports:
                place = HostPort(_FAMILIES[family], host, port, transport == 0x20)
                addresses[f"{place}/p2p/{peer}"] = None
    return tuple(addresses)


def _host_bytes(place: HostPort) -> bytes:
    if place.named:
        return bytes([len(place.host)]) + place.host.encode()
    return ipaddress.ip_address(place.host).packed


def _host_text(family: str, reader: BytesIO) -> str:
    if family in _IPS:
        return _usual(family, _take(reader, _IPS[family][1]))
    return _usual(family, _take(reader, _take(reader, 1)[0]).decode("ascii"))


def _usual(family: str, host: str | bytes) -> str:
    """A host in its usual spelling; an IP address may be given as its bytes. Raises ValueError if
    it is no host of this family."""
    if family in _IPS:
        return str(_IPS[family][0](host))
    if not isinstance(host, str) or not _NAME.fullmatch(host):
        raise ValueError(f"not a name: {host!r}")
    return host


def fitting_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """The addresses that others can use best, up to the limits of an invite: public ones, then
    relayed ones, then private networks'. Loopback and link-local addresses only when there is
    nothing else."""
    ranked = sorted(within_limits(addresses, most=None), key=scope_of)
    useful = [a for a in ranked if scope_of(a) < Scope.LINK]
    return within_limits(useful or ranked)


def within_limits(addresses: Iterable[str], most: int | None = MAX_ADDRESSES) -> tuple[str, ...]:
    """The first addresses of peers that fit into an invite, in order and without repeats. Other
    text is left out.

    ``most`` None: all addresses of all peers.
    """
    kept: dict[str, None] = {}
    peers: set[PeerId] = set()
    for address in addresses:
        try:
            peer = peer_of_address(address)
        except UsageFault:
            continue
        if most is None or (len(kept) < most and len(peers | {peer}) <= MAX_PEERS):
            kept[address] = None
            peers.add(peer)
    return tuple(kept)
