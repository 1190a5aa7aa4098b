"""The key of a peer in a file for another machine, locked with a passphrase.

The file is JSON. scrypt (RFC 7914) makes a key of the passphrase, ChaCha20-Poly1305 (RFC 8439)
seals the 32 bytes of the seed with it; both are of the library ``cryptography``. Everything else in
the file is authenticated with the seed:

    {"tutti_identity": 1, "peer": PEERID, "kdf": "scrypt", "n": N, "r": 8, "p": 1, "salt": hex,
     "cipher": "chacha20-poly1305", "nonce": hex, "sealed": hex}

Enters: an identity, a passphrase. Leaves: the text. Never: a key that is not sealed.
"""

import json
import secrets
import unicodedata
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from node.core.errors import Refused, TooNew, UsageFault
from node.core.version import UPDATE
from node.identity.keys import KEY_BYTES, Identity

FORMAT = 1
MOST_BYTES = 4096
"""Bytes of a file that are read; a whole one has some 400."""
LEAST_PASSPHRASE = 10
"""Characters of a passphrase. The file may be copied and guessed at for years."""
COST = 1 << 17
"""N of scrypt, with r = 8: 128 MiB of memory and about a third of a second for each guess."""
MOST_COST = 1 << 19
"""N of a file that is opened: 512 MiB of memory."""
_R = 8
_P = 1
_SALT_BYTES = 16
_NONCE_BYTES = 12
_TAG_BYTES = 16
_KIND = "tutti_identity"
_AGAIN = "copy it again, or export it again:  tutti id export FILE"


def seal(identity: Identity, passphrase: str, cost: int = COST) -> bytes:
    """The key of ``identity``, locked with ``passphrase``. Raises UsageFault for a passphrase that
    is too short. ``cost``: N of scrypt."""
    check_passphrase(passphrase)
    head: dict[str, Any] = {
        _KIND: FORMAT,
        "peer": identity.peer_id,
        "kdf": "scrypt",
        "n": cost,
        "r": _R,
        "p": _P,
        "salt": secrets.token_bytes(_SALT_BYTES).hex(),
        "cipher": "chacha20-poly1305",
        "nonce": secrets.token_bytes(_NONCE_BYTES).hex(),
    }
    box = ChaCha20Poly1305(_key(head, passphrase))
    sealed = box.encrypt(bytes.fromhex(head["nonce"]), identity.seed(), _bound(head))
    return json.dumps(head | {"sealed": sealed.hex()}, indent=1).encode() + b"\n"


def open_sealed(raw: bytes, passphrase: str) -> Identity:
    """The identity in a file that :func:`seal` has made. Raises UsageFault for a file of another
    kind, TooNew for one of a later format, Refused for a wrong passphrase and for a file that was
    changed."""
    head = _parsed(raw)
    sealed = bytes.fromhex(head.pop("sealed"))
    box = ChaCha20Poly1305(_key(head, passphrase))
    try:
        seed = box.decrypt(bytes.fromhex(head["nonce"]), sealed, _bound(head))
    except InvalidTag as e:
        raise Refused(
            "the passphrase is wrong, or the file was changed", f"type it again, or {_AGAIN}"
        ) from e
    identity = Identity.of_seed(seed)
    if identity.peer_id != head.get("peer"):
        raise Refused("the file holds another key than it says", _AGAIN)
    return identity


def check_passphrase(passphrase: str) -> None:
    """Raises UsageFault for a passphrase that is too short."""
    if len(passphrase) < LEAST_PASSPHRASE:
        raise UsageFault(
            f"the passphrase has {len(passphrase)} characters",
            f"take {LEAST_PASSPHRASE} or more, such as four words that have nothing in common",
        )


def _key(head: dict[str, Any], passphrase: str) -> bytes:
    kdf = Scrypt(
        salt=bytes.fromhex(head["salt"]), length=KEY_BYTES, n=head["n"], r=head["r"], p=head["p"]
    )
    # Two keyboards may write one letter in two ways.
    spelled = unicodedata.normalize("NFC", passphrase)
    return kdf.derive(spelled.encode(errors="surrogateescape"))


def _bound(head: dict[str, Any]) -> bytes:
    """The bytes that are authenticated with the seed."""
    return json.dumps(head, sort_keys=True, separators=(",", ":")).encode()


def _parsed(raw: bytes) -> dict[str, Any]:
    """The fields of a file, of which each can be used: sizes are checked before memory is taken for
    them. Raises UsageFault and TooNew."""
    if len(raw) > MOST_BYTES:
        raise UsageFault("that file is too large for an exported identity", _AGAIN)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise UsageFault("that is no exported identity", _AGAIN) from e
    if not isinstance(found, dict) or _KIND not in found:
        raise UsageFault("that is no exported identity", _AGAIN)
    if found[_KIND] != FORMAT:
        raise TooNew("the identity was exported by a newer tutti", UPDATE)
    sizes = {"salt": _SALT_BYTES, "nonce": _NONCE_BYTES, "sealed": KEY_BYTES + _TAG_BYTES}
    fits = (
        found.get("kdf") == "scrypt"
        and found.get("cipher") == "chacha20-poly1305"
        and type(found.get("n")) is int
        and 2 <= found["n"] <= MOST_COST
        and found["n"].bit_count() == 1
        and (found.get("r"), found.get("p")) == (_R, _P)
        and all(_is_hex(found.get(name), nbytes) for name, nbytes in sizes.items())
    )
    if not fits:
        raise UsageFault("the exported identity is damaged", _AGAIN)
    return found


def _is_hex(value: object, nbytes: int) -> bool:
    if not isinstance(value, str) or len(value) != 2 * nbytes:
        return False
    return all(c in "0123456789abcdef" for c in value)
