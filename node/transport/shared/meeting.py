"""Exchange of regions between two daemons of one machine, over a Unix socket that a call between
them names.

The asking daemon listens under a random name, and sends this name and a secret to its peer in a
call. The asked one connects. Each proves that it knows the secret before the other hands over a
descriptor, and the kernel tells each that the other belongs to the same user. The socket stays open
as long as the regions are used. The exchange itself blocks, with a time limit, and belongs on a
thread.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from node.core.errors import WireError
from node.transport.shared.region import NAME, Inbox, Outbox

ADDRESS = 16
"""Bytes of the name of a socket."""
SECRET = 32
"""Bytes of a secret."""
TIMEOUT_S = 10.0
"""Seconds for each message of an exchange."""
ACCEPT_AGAIN_S = 0.1
"""Seconds until a connection is accepted again that could not be."""
_ASKING = b"asking"
_ASKED = b"asked"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""
_PROOF = 32
"""Bytes of HMAC-SHA256."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A finished exchange: the socket to the other daemon, the region that we write to, and the one
    that it writes to."""

    socket: socket.socket
    outbox: Outbox
    inbox: Inbox

    def close(self) -> None:
        """Give everything back."""
        self.socket.close()
        self.outbox.close()
        self.inbox.close()


class Invitation:
    """The asking side: a listener for the holder of a secret."""

    def __init__(self) -> None:
        """Raises OSError if the system provides no such socket."""
        self.address = secrets.token_bytes(ADDRESS)
        self.secret = secrets.token_bytes(SECRET)
        self._listener = _socket()
        self._listener.bind(_path(self.address))
        self._listener.listen()
        self._listener.setblocking(False)

    async def meet(self) -> Meeting:
        """Wait for the holder of the secret, exchange regions with it, and listen no more. Others
        that connect are hung up on."""
        with self._listener:
            while True:
                try:
                    made, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                except OSError:  # out of descriptors
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                with contextlib.suppress(WireError, OSError):
                    return await asyncio.to_thread(self._exchange, made)

    def _exchange(self, made: socket.socket) -> Meeting:
        with _ends(made):
            _check_user(made)
            made.settimeout(TIMEOUT_S)
            made.send(_proof(self.secret, _ASKING, b""))
            inbox = _receive(made, self.secret, _ASKED)
            with _ends(inbox):
                return Meeting(made, _hand_over(made, self.secret, _ASKING), inbox)


def accept(address: bytes, secret: bytes) -> Meeting:
    """The asked side: connect, and exchange regions. Raises OSError if nobody listens on this
    machine under this name or the exchange takes too long, and WireError for a process of another
    user, and for one that does not know the secret or hands over anything but a region."""
    made = _socket()
    with _ends(made):
        made.settimeout(TIMEOUT_S)
        made.connect(_path(address))
        _check_user(made)
        if not hmac.compare_digest(made.recv(_PROOF), _proof(secret, _ASKING, b"")):
            raise WireError("the other end of the socket does not know the secret")
        outbox = _hand_over(made, secret, _ASKED)
        with _ends(outbox):
            return Meeting(made, outbox, _receive(made, secret, _ASKING))


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _path(address: bytes) -> bytes:
    """The socket's name in the kernel's own namespace, in which there are no files. The prefix
    keeps a peer from naming another program's socket."""
    return b"\0tutti-shared-" + address.hex().encode()


def _check_user(made: socket.socket) -> None:
    """Raises WireError unless the process at the other end belongs to our user."""
    raw = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise WireError("the other end of the socket belongs to another user")


def _proof(secret: bytes, side: bytes, region: bytes) -> bytes:
    """Proof of ``side`` that it knows the secret, for the region that it hands over."""
    return hmac.digest(secret, side + b"/" + region, "sha256")


def _hand_over(made: socket.socket, secret: bytes, side: bytes) -> Outbox:
    """Make a region of ``side``, and send it with a proof."""
    outbox = Outbox()
    with _ends(outbox):
        message = outbox.name + _proof(secret, side, outbox.name)
        socket.send_fds(made, [message], [outbox.fd])
    return outbox


def _receive(made: socket.socket, secret: bytes, side: bytes) -> Inbox:
    """The region of ``side``. Raises WireError without a proof, and for anything but a region."""
    message, found, _, _ = socket.recv_fds(made, NAME + _PROOF, 1, socket.MSG_CMSG_CLOEXEC)
    name = message[:NAME]
    if len(found) == 1 and hmac.compare_digest(message[NAME:], _proof(secret, side, name)):
        return Inbox(name, found[0])
    for fd in found:
        os.close(fd)
    raise WireError("the other end of the socket handed over no region, or no proof")


@contextlib.contextmanager
def _ends(thing: socket.socket | Outbox | Inbox) -> Iterator[None]:
    """A context manager that closes ``thing`` if the block raises."""
    try:
        yield
    except BaseException:
        thing.close()
        raise
