"""Names that stand for keys: a signature only its own signer can make, without the arithmetic."""

from __future__ import annotations

from hashlib import blake2b

from node.core.errors import Refused
from node.core.ids import PeerId


class SimSigner:
    """Of one peer. Nobody in a simulation makes another one's."""

    def __init__(self, peer: PeerId) -> None:
        self.peer_id = peer

    def sign(self, data: bytes, domain: str) -> bytes:
        return _signature(self.peer_id, data, domain)

    def verify(self, peer: PeerId, data: bytes, signature: bytes, domain: str) -> None:
        if signature != _signature(peer, data, domain):
            raise Refused(f"the signature in {domain!r} is not by {peer}")


def _signature(peer: PeerId, data: bytes, domain: str) -> bytes:
    return blake2b(data, digest_size=32, key=f"{peer} {domain}".encode()[:64]).digest()
