"""Who and which: the identifiers that travel between packages."""

from __future__ import annotations

from typing import NamedTuple, NewType

PeerId = NewType("PeerId", str)
"""base58 of the identity multihash of an Ed25519 public key, "12D3Koo…"; contains the key
itself."""

RunId = NewType("RunId", str)
"""Lower-case hex sha256 of the manifest's immutable part: the name of one training run."""

CellId = NewType("CellId", str)
"""The name of a cell: peers that hold every stage of the model between them."""

ENDS = 0
"""Stage number of the ends (embedding, final norm, head, data). Block stages are 1..S."""


class RoundId(NamedTuple):
    """One attempt at averaging. ``attempt`` grows with every repair inside an epoch."""

    epoch: int
    term: int
    attempt: int


def short(peer: PeerId) -> str:
    """Last six characters, enough to tell the peers of a swarm apart on a screen."""
    return peer[-6:]
