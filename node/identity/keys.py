"""The identity key: its file, its signatures, and the lock that keeps two daemons from using it at
once.

The file is the libp2p protobuf of an Ed25519 private key, so p2pd reads the same file:
``08 01 12 40`` + 32 bytes of seed + 32 bytes of public key.

A PeerId contains the public key. It is base58btc of the identity multihash of the libp2p public
key, RFC "libp2p peer ids": ``00 24`` (identity hash, 36 bytes) + ``08 01 12 20`` (protobuf:
Ed25519, 32 bytes) + key. Always "12D3Koo…".
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shlex
import stat
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from node.core.errors import Refused, WireError, writing
from node.core.home import sync
from node.core.ids import PeerId
from node.core.interrupts import held

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
SIGNATURE_BYTES = 64
_HEADER = bytes((0x08, 0x01, 0x12, 0x40))
_FILE_BYTES = len(_HEADER) + 2 * KEY_BYTES
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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


class Signer(Protocol):
    """A peer's key: its PeerId, signatures under its name, and the check of others' signatures. An
    :class:`Identity`, or a stand-in for one."""

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, data: bytes, domain: str) -> bytes: ...

    def verify(self, peer: PeerId, data: bytes, signature: bytes, domain: str) -> None:
        """Return quietly when ``peer`` signed ``data`` in ``domain``. Raises WireError, Refused."""
        ...


def is_signed(signer: Signer, peer: PeerId, data: bytes, signature: bytes, domain: str) -> bool:
    """Return True if ``peer`` signed ``data`` in ``domain``, as ``signer`` checks it."""
    try:
        signer.verify(peer, data, signature, domain)
    except (Refused, WireError):
        return False
    return True


class Identity:
    """One Ed25519 key. ``peer_id`` and ``name`` derive from it; ``path`` is its file, None for an
    ephemeral one."""

    def __init__(self, key: Ed25519PrivateKey, path: Path | None) -> None:
        self._key = key
        self.path = path
        self.public = key.public_key().public_bytes_raw()
        """The raw public key, 32 bytes."""
        self.peer_id: PeerId = peer_id_of(self.public)
        self.name = name_of(self.peer_id)
        self._lock_fd: int | None = None

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def sign(self, data: bytes, domain: str) -> bytes:
        """64 bytes that say: this key said ``data`` in ``domain``. A signature of one domain is
        worth nothing in another."""
        return self._key.sign(labelled(data, domain))

    def verify(self, peer: PeerId, data: bytes, signature: bytes, domain: str) -> None:
        """As :func:`verify`."""
        verify(peer, data, signature, domain)

    def key_file_bytes(self) -> bytes:
        """Content of the key file, for handing the key to p2pd. Secret: write it 0600 or not at
        all."""
        return _HEADER + self._key.private_bytes_raw() + self.public

    def seed(self) -> bytes:
        """The 32 bytes the key is made of, for libraries that make it themselves. Secret."""
        return self._key.private_bytes_raw()

    @classmethod
    def ephemeral(cls) -> "Identity":
        """A new identity that is never written."""
        return cls(Ed25519PrivateKey.generate(), None)

    @classmethod
    def create(cls, path: Path) -> "Identity":
        """A new identity written to ``path``: mode 0600, flushed to disk, there whole or not at
        all.

        Raises Refused when the file exists or may not be written, OutOfResources when the disk is
        full.
        """
        made = cls(Ed25519PrivateKey.generate(), path)
        made.write_new(path)
        return made

    @classmethod
    def of_seed(cls, seed: bytes) -> "Identity":
        """The identity whose key is made of these 32 bytes; it has no file yet. Raises ValueError
        for another number of bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed), None)

    def write_new(self, path: Path) -> None:
        """Write the key to ``path``: mode 0600, flushed to disk, there whole or not at all.

        Raises Refused when the file exists or may not be written, OutOfResources when the disk is
        full.
        """
        with self._draft(path) as draft:
            try:
                os.link(draft, path)  # unlike a rename, refuses to replace a key that is there
            except FileExistsError as e:
                raise Refused(
                    f"{path} exists already", "use that key, or move it away first"
                ) from e
            sync(path.parent)

    def write_over(self, path: Path, before: Path) -> None:
        """Write the key over the one at ``path``, which stays as ``before``. A whole key is at
        ``path`` at any moment. Raises as :meth:`write_new`."""
        with self._draft(path) as draft:
            os.link(path, before)
            try:
                os.replace(draft, path)
            except OSError:
                before.unlink()
                raise
            sync(path.parent)

    @contextlib.contextmanager
    def _draft(self, path: Path) -> Iterator[Path]:
        """A file beside ``path`` with the key, mode 0600, flushed to disk. It is gone after the
        block. Raises Refused, OutOfResources; also for an OSError of the block."""
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        cannot = writing(path, f"make {path.parent} writable, or choose another home", Refused)
        with cannot, held():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    os.fchmod(fd, 0o600)  # a strange umask must not lock us out
                    file.write(self.key_file_bytes())
                    file.flush()
                    os.fsync(fd)
                yield draft
            finally:
                with contextlib.suppress(OSError):
                    draft.unlink()

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """The identity kept at ``path``.

        Raises Refused, with the next step, for a file that is missing, unreadable, readable by
        others than its owner, or not a whole Ed25519 key.
        """
        try:
            # Not blocking: opening a pipe somebody put there would wait for ever.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError as e:
            raise Refused(
                f"no identity key at {path}",
                "make one with  tutti id new , or restore it from your backup",
            ) from e
        except OSError as e:
            raise Refused(
                f"cannot read the identity key {path}: {e.strerror}", f"check the owner of {path}"
            ) from e
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{path} is not a file", "give the path of the key file itself")
            if status.st_mode & _OTHERS:
                raise Refused(
                    f"the identity key {path} is open to other users "
                    f"(mode {stat.S_IMODE(status.st_mode):04o})",
                    f"chmod 600 {shlex.quote(str(path))}",
                )
            raw = os.read(fd, _FILE_BYTES + 1)
        finally:
            os.close(fd)
        return cls(_parse(raw, path, status.st_size), path)

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """:meth:`load` when the file is there, else :meth:`create`; raises the same exceptions."""
        try:
            return cls.load(path)
        except Refused as e:
            if not isinstance(e.__cause__, FileNotFoundError):
                raise
        try:
            return cls.create(path)
        except Refused as e:
            if not isinstance(e.__cause__, FileExistsError):
                raise
        return cls.load(path)  # somebody was faster: then theirs is the key

    def lock(self) -> None:
        """Keep the key to this process until :meth:`unlock` or its end. Does nothing for an
        ephemeral identity.

        Raises Refused when another process holds it. The lock is an flock on the file beside the
        key, so it vanishes with its holder, however that dies.
        """
        if self.path is None or self._lock_fd is not None:
            return
        beside = self.path.with_name(self.path.name + ".lock")
        with writing(beside, f"make {beside.parent} writable, or choose another home", Refused):
            fd = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            holder = os.read(fd, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise Refused(
                f"identity {self.path} is in use by pid {holder}",
                f"stop that daemon (`kill {holder}`), or give this one its own home with --home",
            ) from e
        except OSError as e:
            os.close(fd)
            raise Refused(
                f"cannot lock {beside}: {e.strerror}", "keep the key on a local file system"
            ) from e
        with contextlib.suppress(OSError):  # a full disk costs the pid in the message, not the lock
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd

    def unlock(self) -> None:
        """Give the key back; safe to call at any time. The lock file stays: removing it would let
        two holders in."""
        if self._lock_fd is not None:
            fd = self._lock_fd
            self._lock_fd = None
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)


def verify(peer: PeerId, data: bytes, signature: bytes, domain: str) -> None:
    """Return quietly when ``peer`` signed ``data`` in ``domain``.

    Raises WireError if ``peer`` is no PeerId or ``signature`` has another length than a signature,
    Refused if the signature is wrong.
    """
    public = public_key_of(peer)
    if len(signature) != SIGNATURE_BYTES:
        raise WireError(f"a signature has {SIGNATURE_BYTES} bytes, not {len(signature)}")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, labelled(data, domain))
    except (InvalidSignature, ValueError) as e:
        raise Refused(f"the signature in {domain!r} is not by {peer}") from e


def labelled(data: bytes, label: str) -> bytes:
    """``data`` behind a label and its length, so that no other label and data are the same
    bytes."""
    name = label.encode()
    return struct.pack(">I", len(name)) + name + data


def _parse(raw: bytes, path: Path, size: int) -> Ed25519PrivateKey:
    again = "restore it from your backup, or move it away and make a new one with  tutti id new"
    if raw[:2] != _HEADER[: len(raw[:2])]:
        raise Refused(f"{path} is not a libp2p Ed25519 key", again)
    if len(raw) != _FILE_BYTES:
        raise Refused(
            f"the identity key {path} has {size} bytes, a whole one has {_FILE_BYTES}", again
        )
    seed = raw[len(_HEADER) : -KEY_BYTES]
    public = raw[-KEY_BYTES:]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if raw[: len(_HEADER)] != _HEADER or key.public_key().public_bytes_raw() != public:
        raise Refused(f"the identity key {path} is damaged: its two halves do not match", again)
    return key
