"""One string that brings somebody into a run.

An invite is ``tutti1`` + base32 (lower case, no padding) of: run id 32 bytes, the owner's public key 32, admission
(length u16, bytes), addresses (count u8, each length u16 and text), and 4 bytes of sha256 over all that.
It survives line breaks, spaces and capitals of the mail it came in.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from node.core.errors import UsageFault, WireError
from node.core.ids import PeerId, RunId
from node.identity.admission import MAX_ADMISSION
from node.identity.peers import KEY_BYTES, peer_id_of, public_key_of

PREFIX = "tutti1"
MAX_ADDRESSES = 8
MAX_ADDRESS = 256
MAX_TEXT = 8192

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_CHECKSUM = 4
_AGAIN = "ask for a fresh invite, and copy all of it"


@dataclass(frozen=True)
class Invite:
    """Where a run can be joined. ``owner`` signs its manifest; every address ends in ``/p2p/PEERID``.

    Raises UsageFault when made from values that are none.
    """

    run_id: RunId
    owner: PeerId
    addresses: tuple[str, ...]
    admission: bytes = b""

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.run_id):
            raise UsageFault(f"not a run id: {self.run_id[:80]!r}", "a run id is 64 hexadecimal digits, see the manifest")
        try:
            public_key_of(self.owner)
        except WireError as e:
            raise UsageFault(f"the owner is not a peer: {e}", _AGAIN) from e
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise UsageFault(f"an invite names 1 to {MAX_ADDRESSES} addresses, not {len(self.addresses)}", _AGAIN)
        for address in self.addresses:
            peer_of_address(address)
        if len(self.admission) > MAX_ADMISSION:
            raise UsageFault(f"an admission token of {len(self.admission)} bytes is too long", _AGAIN)

    def encode(self) -> str:
        """The string to hand out: "tutti1…"."""
        parts = [bytes.fromhex(self.run_id), public_key_of(self.owner), _sized(self.admission), bytes([len(self.addresses)])]
        payload = b"".join([*parts, *(_sized(a.encode()) for a in self.addresses)])
        return PREFIX + base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()

    @classmethod
    def decode(cls, text: str) -> Invite:
        """The invite in ``text``. Raises UsageFault that says what is wrong with it."""
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
        payload, checksum = raw[:-_CHECKSUM], raw[-_CHECKSUM:]
        if checksum != _checksum(payload):
            raise UsageFault("the invite is damaged or cut off: its checksum does not match", _AGAIN)
        return cls._parse(payload)

    @classmethod
    def _parse(cls, payload: bytes) -> Invite:
        reader = _Reader(payload)
        try:
            run_id, owner = RunId(reader.take(32).hex()), peer_id_of(reader.take(KEY_BYTES))
            admission = reader.sized()
            addresses = tuple(reader.sized().decode("ascii") for _ in range(reader.take(1)[0]))
        except ValueError as e:
            raise UsageFault(f"the invite does not hold what it should: {e}", "it may be of another version of tutti") from e
        if reader.left:
            raise UsageFault(f"the invite holds {reader.left} bytes too many", "it may be of another version of tutti")
        return cls(run_id, owner, addresses, admission)


def peer_of_address(address: str) -> PeerId:
    """The peer a multiaddr leads to: its last ``/p2p/PEERID``. Raises UsageFault for a text that does not end in one."""
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


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, n: int) -> bytes:
        if n > self.left:
            raise ValueError("it ends early")
        self._at += n
        return self._data[self._at - n : self._at]

    def sized(self) -> bytes:
        return self.take(struct.unpack(">H", self.take(2))[0])


def _sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode() + payload).digest()[:_CHECKSUM]


def _not_an_invite(text: str) -> UsageFault:
    if not text:
        return UsageFault("the invite is empty", "paste the string that starts with tutti1")
    if text.startswith("/"):
        return UsageFault("that is an address, not an invite", "give addresses with --join")
    if re.match("tutti[0-9]", text):
        return UsageFault(
            f"an invite of version {text[5]}, this tutti reads version 1", "use the same version of tutti as its maker"
        )
    return UsageFault(f"not an invite: {text[:20]!r}", "an invite starts with tutti1")


def fitting_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """The first addresses that fit into an invite, in order, without repeats and without what is no address of a peer."""
    kept: list[str] = []
    for address in addresses:
        try:
            peer_of_address(address)
        except UsageFault:
            continue
        if address not in kept and len(kept) < MAX_ADDRESSES:
            kept.append(address)
    return tuple(kept)
