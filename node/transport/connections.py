"""Incoming gRPC connections, and the choice of the ones to end.

Enters: the connections that the kernel knows, and the calls that came over them. Leaves:
connections to end. gRPC itself only bounds their number, so a peer that opens all of them would
keep all others out.

A connection ends if no call with a token came over it for :data:`UNKNOWN_S`; a stranger's ends
after :data:`IDLE_S` without a call, from the end of the last one. Half of the places is for
established peers; strangers share the other half by address block and by key, as with calls.
"""

import os
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from node.core.ids import PeerId
from node.core.newest import Newest
from node.identity.places import PlacesByPeer, block_of

UNKNOWN_S = 60.0
"""Seconds within which a connection has to show a token. A peer that has opened a better way may
make its next call over it only then."""
IDLE_S = 120.0
"""Seconds without a call after which a stranger's connection ends."""
PER_PEER = 64
"""Connections of one peer, and of one address without a token."""

MOST_CALLED = 4096
"""Connections whose last calls are remembered until the next look at the open connections."""

Remote = tuple[str, int]
"""Address and port of the other end."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An incoming connection: its descriptor in this process, and the other end."""

    fd: int
    remote: Remote


@dataclass(slots=True)
class _Seen:
    since: float
    peer: PeerId | None = None
    used: float = 0.0


class Connections:
    """The incoming connections of one server, at most ``total``. Times are monotonic seconds."""

    def __init__(self, total: int, established: Callable[[PeerId], bool]) -> None:
        self._places = PlacesByPeer[Remote]("connections", total, PER_PEER, established)
        self._established = established
        self._seen: dict[Remote, _Seen] = {}
        self._called: Newest[Remote, tuple[PeerId, float]] = Newest(MOST_CALLED)
        """Calls since the last look: the caller, and when. While there are few connections nobody
        looks."""

    def called(self, where: str, peer: PeerId, now: float) -> None:
        """``peer`` makes a call over a connection, or its call goes on; ``where`` is gRPC's name
        for the other end."""
        if (remote := remote_of(where)) is not None:
            self._called[remote] = peer, now

    def look(self, present: Iterable[Connection], now: float) -> list[Connection]:
        """Return the connections to end. ``present``: all that are open now."""
        by_remote = {c.remote: c for c in present}
        for remote in self._seen.keys() - by_remote.keys():
            self._places.leave(remote)
            del self._seen[remote]
        ended = list[Remote]()
        for remote in by_remote:
            seen = self._seen.setdefault(remote, _Seen(now, used=now))
            peer, seen.used = self._called.get(remote, (seen.peer, seen.used))
            if peer != seen.peer or remote not in self._places:
                seen.peer = peer
                self._places.leave(remote)
                ended += self._place(remote, peer or PeerId(f"at {remote[0]}"))
        self._called.clear()
        ended += [r for r, seen in self._seen.items() if self._is_idle(seen, now)]
        return [by_remote[r] for r in dict.fromkeys(ended) if r in by_remote]

    def _place(self, remote: Remote, peer: PeerId) -> list[Remote]:
        """Give a connection a place. Returns the connection that has none instead, if any."""
        taken = self._places.take(remote, peer, block_of(remote[0]))
        if not taken:
            return [remote]
        if taken.evicted is None:
            return []
        return [taken.evicted]

    def _is_idle(self, seen: _Seen, now: float) -> bool:
        if seen.peer is None:
            return now - seen.since > UNKNOWN_S
        return now - seen.used > IDLE_S and not self._established(seen.peer)


def remote_of(where: str) -> Remote | None:
    """Address and port in gRPC's name for the other end of a connection, for example
    "ipv4:192.0.2.1:5000" or "ipv6:%5B::1%5D:5000"; None for another kind."""
    kind, _, address = where.partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not (port.isascii() and port.isdigit()):
        return None
    return _plain(host.replace("%5B", "").replace("%5D", "")), int(port)


def descriptors() -> list[int]:
    """Open descriptors of this process. Some may be closed by the time they are looked at."""
    return [int(name) for name in os.listdir("/dev/fd") if name.isdigit()]


def incoming(port: int) -> list[Connection]:
    """The connections to a TCP port of this process, except connections that this process opened to
    itself.

    Asks each descriptor for its ends. The kernel's tables would name them too, but hold the
    connections of every process of the machine.
    """
    there = list[Connection]()
    own = set[Remote]()
    for fd in descriptors():
        ends = _ends_of(fd)
        if ends is None:
            continue
        local, remote = ends
        if local[1] == port:
            there.append(Connection(fd, remote))
        else:
            own.add(local)
    return [c for c in there if c.remote not in own]


def _ends_of(fd: int) -> tuple[Remote, Remote] | None:
    """This end and the other end of a TCP connection; None for another kind of descriptor."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        with socket.socket(fileno=os.dup(fd)) as its:
            if its.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if its.type != socket.SOCK_STREAM:
                return None
            here = its.getsockname()
            there = its.getpeername()
    except OSError:
        return None
    return (_plain(here[0]), here[1]), (_plain(there[0]), there[1])


def hang_up(connection: Connection) -> bool:
    """End a connection of gRPC, which then closes its descriptor. Return False if the descriptor
    belongs to something else by now."""
    try:
        with socket.socket(fileno=os.dup(connection.fd)) as its:
            host, port = its.getpeername()[:2]
            if (_plain(host), port) != connection.remote:
                return False
            its.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _plain(host: str) -> str:
    """An address without the prefix of IPv4 in IPv6, and without its zone."""
    return host.removeprefix("::ffff:").partition("%")[0]
