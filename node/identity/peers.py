"""A PeerId contains the public key: from one to the other, and to a name people can say.

PeerId = base58btc of the identity multihash of the libp2p public key, RFC "libp2p peer ids": ``00
24`` (identity hash, 36 bytes) + ``08 01 12 20`` (protobuf: Ed25519, 32 bytes) + key. Always
"12D3Koo…".
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import base58

from node.core.errors import WireError
from node.core.ids import PeerId

_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
KEY_BYTES = 32
_LONGEST = 64  # characters worth decoding; a PeerId has 52

_ADJECTIVES = (
    "agile amber ample azure bold brave breezy bright brisk calm candid cheery civil clever cosmic "
    "cosy crisp curious "
    "dapper daring deft eager early easy fabled fair fancy fleet fond frank fresh gentle giddy "
    "glad golden grand happy "
    "hardy hasty humble ivory jolly keen kind lively lucid lucky mellow merry mighty misty modest "
    "neat noble patient "
    "plucky polite proud quick quiet rapid ready sunny"
).split()
_ANIMALS = (
    "alpaca badger bat bear beaver bison boar camel cat cheetah cobra condor coyote crane cricket "
    "crow deer dingo dolphin "
    "dove duck eagle egret elk falcon ferret finch fox gecko gibbon goose hare hawk heron ibex "
    "jackal jaguar kestrel koala "
    "lark lemur lion llama lynx magpie marten mole moose newt ocelot orca osprey otter owl panda "
    "puffin quail raven robin "
    "seal sloth stoat tapir toad"
).split()


def peer_id_of(public: bytes) -> PeerId:
    """The PeerId of a raw Ed25519 public key. Raises ValueError unless it has 32 bytes."""
    if len(public) != KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public)}")
    return PeerId(base58.b58encode(_PREFIX + public).decode())


@lru_cache(maxsize=4096)  # a swarm hears the same few peers all day
def public_key_of(peer: str) -> bytes:
    """The 32 bytes of the key inside a PeerId. Raises WireError for anything but the one spelling
    of an Ed25519 PeerId."""
    if len(peer) > _LONGEST:
        raise WireError(f"{len(peer)} characters are no PeerId")
    try:
        raw = base58.b58decode(peer)
    except ValueError as e:
        raise WireError(f"not a PeerId: {peer!r}") from e
    public = raw[len(_PREFIX) :]
    if raw[: len(_PREFIX)] != _PREFIX or len(public) != KEY_BYTES or peer_id_of(public) != peer:
        raise WireError(f"not the PeerId of an Ed25519 key: {peer!r}")
    return public


def name_of(peer: PeerId) -> str:
    """ "adjective-animal", the same on every machine. One of 4096: for people, never for telling
    peers apart in code."""
    hashed = hashlib.sha256(peer.encode()).digest()
    return f"{_ADJECTIVES[hashed[0] % len(_ADJECTIVES)]}-{_ANIMALS[hashed[1] % len(_ANIMALS)]}"
