"""Admission to a private run: the owner's signed permission, as it is handed out and as it is
shown.

A *token* names one peer and is worth nothing to anybody else, so it may be shown to any asker. A
*grant* is for the holder of the invite: it carries a secret key that the owner vouches for, never
leaves the holder's machine, and makes a token for the peer there. Layouts, integers big
endian, ``not_after`` u64 in Unix milliseconds:

    token for a peer    01 · not_after · the peer's key 32 · the owner's signature 64
    grant               02 · not_after · secret seed 32 · the owner's signature over the public half
                        64
    token from a grant  03 · not_after · the grant's public key 32 · the owner's signature 64 · the
                        grant's, over the peer 64

Every signature covers the run id as well.
"""

import math
import secrets
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.core.errors import Refused, WireError
from node.core.ids import PeerId, RunId
from node.core.newest import Newest
from node.identity.keys import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    public_key_of,
    verify,
)
from node.identity.records import milliseconds

MAX_ADMISSION = 512
"""Bytes of a token that are looked at."""
KEPT = 4096
"""Tokens that are remembered, so that their signatures are not checked again."""

_HEAD = struct.Struct(f">BQ{KEY_BYTES}s")  # kind, not_after, key or seed
_FOR_PEER = 1
_GRANT = 2
_BY_GRANT = 3
_DOMAIN = "tutti/admission/1"
_DOMAIN_OF_GRANT = "tutti/admission/granted/1"
_LENGTHS = {
    _FOR_PEER: _HEAD.size + SIGNATURE_BYTES,
    _GRANT: _HEAD.size + SIGNATURE_BYTES,
    _BY_GRANT: _HEAD.size + 2 * SIGNATURE_BYTES,
}
_STEP = "ask the owner of the run for a new invite"


def admission_token(owner: Identity, run_id: RunId, peer: PeerId | None, not_after: float) -> bytes:
    """Sign the owner's permission for ``peer`` to take part in ``run_id`` until ``not_after``.
    Return a token for ``peer``, or a grant if ``peer`` is None.

    ``not_after`` in Unix seconds. Raises ValueError if ``not_after`` is no time, WireError if
    ``peer`` is no PeerId.
    """
    if peer is not None:
        head = _HEAD.pack(_FOR_PEER, milliseconds(not_after), public_key_of(peer))
        return head + owner.sign(run_id.encode() + head, _DOMAIN)
    seed = secrets.token_bytes(KEY_BYTES)
    until = milliseconds(not_after)
    vouched = _HEAD.pack(_GRANT, until, _key_of(seed).public)
    return _HEAD.pack(_GRANT, until, seed) + owner.sign(run_id.encode() + vouched, _DOMAIN)


def shown(admission: bytes, me: Identity, run_id: RunId) -> bytes:
    """Return the token that ``me`` shows to others. ``admission``: what came with the invite, a
    token, which is shown as it is, or a grant, which makes a token for this peer."""
    if not is_grant(admission):
        return admission
    _, until, seed = _HEAD.unpack_from(admission)
    key = _key_of(seed)
    head = _HEAD.pack(_BY_GRANT, until, key.public)
    return (
        head
        + admission[_HEAD.size :]
        + key.sign(run_id.encode() + head + me.public, _DOMAIN_OF_GRANT)
    )


def ends_at(admission: bytes) -> float:
    """Unix time at which a token or a grant ends by its own words, which are not checked here; 0.0
    for bytes that are neither."""
    if not _kind(admission):
        return 0.0
    return _HEAD.unpack_from(admission)[1] / 1000


def is_grant(admission: bytes) -> bool:
    """Return True for a grant, a secret that makes tokens, and False for a token."""
    return _kind(admission) == _GRANT


class Permission(NamedTuple):
    """The owner's permission for one peer. ``until``: Unix time; ``invite``: the key of the grant
    that made the token, as a PeerId, None for a token for this peer alone."""

    until: float
    invite: PeerId | None


def key_of(grant: bytes) -> PeerId:
    """The key of a grant, as a PeerId: it stands for the invite where it is revoked."""
    return _key_of(_HEAD.unpack_from(grant)[2]).peer_id


def check_admission(
    token: bytes, *, run_id: RunId, owner: PeerId, peer: PeerId, now_wall: float
) -> Permission:
    """The permission that ``owner`` gave ``peer`` for ``run_id``. Raises Refused, with the reason,
    for every other token."""
    if not token:
        raise Refused("this run is private and no admission token was shown", _STEP)
    kind = _kind(token)
    if kind not in (_FOR_PEER, _BY_GRANT):
        raise Refused("that is no admission token", _STEP)
    head = token[: _HEAD.size]
    signature = token[_HEAD.size : _HEAD.size + SIGNATURE_BYTES]
    _, until_ms, public = _HEAD.unpack(head)
    vouched = head
    if kind != _FOR_PEER:
        vouched = _HEAD.pack(_GRANT, until_ms, public)
    try:
        verify(owner, run_id.encode() + vouched, signature, _DOMAIN)
        bearer = public_key_of(peer)
    except (Refused, WireError) as e:
        raise Refused(
            "the admission token was not signed by this run's owner for this run", _STEP
        ) from e
    if kind == _FOR_PEER and public != bearer:
        raise Refused("the admission token is for another peer", _STEP)
    if kind == _BY_GRANT:
        try:
            verify(
                peer_id_of(public),
                run_id.encode() + head + bearer,
                token[_HEAD.size + SIGNATURE_BYTES :],
                _DOMAIN_OF_GRANT,
            )
        except (Refused, WireError) as e:
            raise Refused("the admission token is for another peer", _STEP) from e
    if until_ms / 1000 <= now_wall:
        raise Refused("the admission token has expired", _STEP)
    invite = None
    if kind == _BY_GRANT:
        invite = peer_id_of(public)
    return Permission(until_ms / 1000, invite)


class Gate:
    """Admission to one run. An open run admits every peer; a private run admits its owner and peers
    that show a token. With ``chosen`` every peer may take part, but only the owner and peers with a
    token may lead. Revoked peers, and tokens from revoked invites, are refused everywhere.

    The signatures of a token are checked once for each peer that shows it; the newest ``KEPT``
    checks are remembered.
    """

    def __init__(self, run_id: RunId, owner: PeerId, private: bool, chosen: bool = False) -> None:
        self.run_id = run_id
        self.owner = owner
        self.private = private
        self.chosen = chosen
        self.revoked: Callable[[PeerId], bool] = lambda key: False
        """Return True for a peer, or the key of an invite, that the owner has revoked."""
        self._known: Newest[tuple[PeerId, bytes], Permission] = Newest(KEPT)
        self._invites: Newest[PeerId, PeerId] = Newest(KEPT)
        """The key of the invite that made the last token of each peer."""
        self._leaders: Newest[PeerId, float] = Newest(KEPT)
        """Unix time until which each peer that has shown a token may lead; only with ``chosen``."""

    def admit(self, peer: PeerId, token: bytes, now_wall: float) -> float:
        """The Unix time until which ``peer`` may take part, infinity for no end. Raises Refused
        with the reason."""
        if peer == self.owner:
            return math.inf
        if self.revoked(peer):
            raise Refused("the owner of the run has revoked this peer", _STEP)
        if self.private:
            return self._until(peer, token, now_wall)
        if self.chosen and token:
            with suppress(Refused):  # who shows a bad one takes part as those without
                self._leaders[peer] = self._until(peer, token, now_wall)
        return math.inf

    def may_lead(self, peer: PeerId, now_wall: float) -> bool:
        """Return True if this peer's plans may be followed, by the tokens that it has shown."""
        if self.private or not self.chosen or peer == self.owner:
            return True
        invite = self._invites.get(peer)
        if self.revoked(peer) or (invite is not None and self.revoked(invite)):
            return False
        return self._leaders.get(peer, -math.inf) > now_wall

    def invite_of(self, peer: PeerId) -> PeerId | None:
        """The key of the invite for anybody with which this peer came; None if it showed a token
        for itself, or none yet."""
        return self._invites.get(peer)

    def _until(self, peer: PeerId, token: bytes, now_wall: float) -> float:
        permission = self._known.get((peer, token))
        if permission is None or permission.until <= now_wall:
            self._known.pop((peer, token), None)
            permission = check_admission(
                token, run_id=self.run_id, owner=self.owner, peer=peer, now_wall=now_wall
            )
            self._known[peer, token] = permission
        self._invites.pop(peer, None)
        if permission.invite is not None:
            self._invites[peer] = permission.invite
            if self.revoked(permission.invite):
                raise Refused("the owner of the run has revoked the invite of this peer", _STEP)
        return permission.until


def _kind(admission: bytes) -> int:
    """1, 2 or 3; 0 for bytes that are none of them."""
    return admission[0] if admission and _LENGTHS.get(admission[0]) == len(admission) else 0


def _key_of(seed: bytes) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(seed), None)
