"""Choice of the bytes that go through shared memory, and of the peers with which this daemon shares
any: daemons of the same machine and user, to which it sends tensors.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId, short
from node.core.newest import Newest
from node.core.tasks import Tasks
from node.identity.faults import PEERS_KEPT
from node.telemetry.events import Journal
from node.transport.port import printable
from node.transport.shared import meeting
from node.transport.shared.meeting import ADDRESS, SECRET, Invitation, Meeting, accept
from node.transport.shared.region import LEAST, PEERS, SUPPORTED, Inbox, Place
from protos.reach_pb2 import ShareAnswer, ShareAsk

AGAIN_S = 300.0
"""Seconds between two attempts to share memory with the same peer."""
LINGER_S = 60.0
"""Seconds for which pieces of a daemon that has ended can still be read."""
_READY = b"\1"
_FULL = f"memory is shared with {PEERS} others"


@dataclass(eq=False)
class _Pair:
    """The regions shared with one peer. ``ready``: it reads what is left in the outbox."""

    met: Meeting
    ready: bool


class Sharing:
    """Regions shared with peers. ``on``: False to share nothing. ``near(peer)``: True for a peer to
    which there is a direct connection within this machine, and that knows of shared memory.
    ``call(peer, ask)`` asks it over that connection, and raises PeerFault."""

    def __init__(
        self,
        on: bool,
        me: PeerId,
        near: Callable[[PeerId], bool],
        call: Callable[[PeerId, ShareAsk], Awaitable[ShareAnswer]],
        journal: Journal,
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.on = on and SUPPORTED
        self.carried = 0
        """Bytes that were left in shared memory."""
        self._me = me
        self._near = near
        self._call = call
        self._journal = journal
        self._tasks = Tasks("sharing", on_error)
        self._pairs: dict[PeerId, _Pair] = {}
        self._inboxes: dict[tuple[PeerId, bytes], Inbox] = {}
        """Regions that peers write to, by the peer and the region's name."""
        self._asking: set[PeerId] = set()
        self._accepting: set[PeerId] = set()
        """Peers in an exchange that they began. A second exchange with the same peer would create
        two pairs, and the two sides might keep different ones."""
        self._tried: Newest[PeerId, tuple[float, str]] = Newest(PEERS_KEPT)
        """When a peer was asked last, and why memory is not shared with it, "" if it is."""

    # ----------------------------------------------------------- pieces

    def leave(self, peer: PeerId, data: memoryview) -> bytes | None:
        """See ``TransportPort.leave``. If no memory is shared with the peer, it is asked for some,
        for later pieces."""
        if len(data) < LEAST:
            return None
        pair = self._pairs.get(peer)
        if pair is None:
            self._want(peer)
            return None
        if not pair.ready:
            return None
        place = pair.met.outbox.put(data, time.monotonic())
        if place is not None:
            self.carried += len(data)
        return place

    def withdraw(self, peer: PeerId, places: Sequence[bytes]) -> None:
        """See ``TransportPort.withdraw``."""
        pair = self._pairs.get(peer)
        for place in map(Place.read, places):
            if pair is not None and place.region == pair.met.outbox.name:
                pair.met.outbox.withdraw(place)

    def fetch(self, peer: PeerId, place: bytes, into: memoryview) -> int:
        """See ``TransportPort.fetch``."""
        wanted = Place.read(place)
        inbox = self._inboxes.get((peer, wanted.region))
        if inbox is None:
            raise WireError("a place in memory that is not shared")
        return inbox.take(wanted, into)

    # ----------------------------------------------------------- peers

    def shares(self, peer: PeerId) -> bool:
        """Return True if bytes for the peer go through shared memory."""
        pair = self._pairs.get(peer)
        return pair is not None and pair.ready

    async def asked(self, peer: PeerId, ask: ShareAsk) -> ShareAnswer:
        """Answer a peer that wants to share memory."""
        refusals = {
            "shared memory is off here": not self.on,
            "not the name of a socket, and a secret": len(ask.address) != ADDRESS
            or len(ask.secret) != SECRET,
            _FULL: self._full(peer),
        }
        why = next((why for why, is_so in refusals.items() if is_so), "")
        crossed = peer in self._asking and self._me < peer
        if why or crossed:
            return ShareAnswer(reason=why)
        # A task of its own, because the call may be cancelled while descriptors are handed over.
        why = await asyncio.shield(self._tasks.spawn(self._accept(peer, ask), short(peer)))
        return ShareAnswer(accepted=not why, reason=why)

    def end(self, peer: PeerId) -> None:
        """Share no memory with the peer any more. Pieces that it has left can still be read for a
        while: it may have sent their places before it ended."""
        pair = self._pairs.pop(peer, None)
        if pair is None:
            return
        made = pair.met.socket
        asyncio.get_running_loop().remove_reader(made.fileno())
        made.close()
        pair.met.outbox.close()
        key = peer, pair.met.inbox.name
        asyncio.get_running_loop().call_later(LINGER_S, self._forget, key)

    async def close(self) -> None:
        """Give all memory back. Safe to call twice."""
        self.on = False
        await self._tasks.close()
        for peer in list(self._pairs):
            self.end(peer)
        for key in list(self._inboxes):
            self._forget(key)

    def _full(self, peer: PeerId) -> bool:
        """Return True if there is no memory to share with the peer."""
        return peer not in self._pairs and len(self._pairs) >= PEERS

    def _forget(self, key: tuple[PeerId, bytes]) -> None:
        inbox = self._inboxes.pop(key, None)
        if inbox is not None:
            inbox.close()

    def _want(self, peer: PeerId) -> None:
        """Ask a peer to share memory, if that may succeed and was not tried a moment ago."""
        if not self.on or peer in self._asking | self._accepting or not self._near(peer):
            return
        now = time.monotonic()
        if now - self._tried.get(peer, (-AGAIN_S, ""))[0] < AGAIN_S:
            return
        self._asking.add(peer)
        self._tasks.spawn(self._ask(peer, now), f"ask {short(peer)}")

    async def _ask(self, peer: PeerId, now: float) -> None:
        _, said = self._tried.get(peer, (now, ""))
        why = ""
        try:
            await self._exchange(peer)
        except PeerFault as e:
            why = e.reason
        except (OSError, WireError) as e:
            why = str(e) or "no answer in time"
        finally:
            self._asking.discard(peer)
            self._tried[peer] = now, why
        if why and why != said:
            text = f"tensors for {short(peer)} stay on its connection: {why}"
            self._journal.emit("transport", "memory-not-shared", text, peer=peer)

    async def _exchange(self, peer: PeerId) -> None:
        """Exchange regions with a peer. Raises PeerFault, OSError or WireError."""
        if self._full(peer):
            raise WireError(_FULL)
        invitation = Invitation()
        waiting = self._tasks.spawn(invitation.meet(), f"meet {short(peer)}")
        try:
            ask = ShareAsk(address=invitation.address, secret=invitation.secret)
            answer = await self._call(peer, ask)
            if answer.accepted:
                async with asyncio.timeout(meeting.TIMEOUT_S):
                    met = await waiting
                self._keep(peer, met, ready=True)
                met.socket.send(_READY)
        finally:
            waiting.cancel()
        # Without a reason: the peer asks this one at the same time, and its ask counts.
        if not answer.accepted and answer.reason:
            raise PeerFault(peer, f"it refuses: {printable(answer.reason)}")

    async def _accept(self, peer: PeerId, ask: ShareAsk) -> str:
        """The asked side of an exchange; returns why it failed, "" if it did not."""
        self._accepting.add(peer)
        try:
            met = await asyncio.to_thread(accept, ask.address, ask.secret)
            self._keep(peer, met, ready=False)
        except (OSError, WireError) as e:
            return str(e) or "no answer in time"
        finally:
            self._accepting.discard(peer)
        return ""

    def _keep(self, peer: PeerId, met: Meeting, *, ready: bool) -> None:
        """Use the regions of a meeting, in place of former ones of the same peer. Raises WireError
        if others came first."""
        if self._full(peer):
            met.close()
            raise WireError(_FULL)
        self.end(peer)
        for key in [key for key in self._inboxes if key[0] == peer]:
            self._forget(key)
        pair = _Pair(met, ready)
        self._pairs[peer] = pair
        self._inboxes[peer, met.inbox.name] = met.inbox
        met.socket.setblocking(False)
        asyncio.get_running_loop().add_reader(met.socket.fileno(), self._heard, peer, pair)
        text = f"tensors to and from {short(peer)} go through shared memory"
        self._journal.emit("transport", "memory-shared", text, peer=peer)

    def _heard(self, peer: PeerId, pair: _Pair) -> None:
        """The other end of a socket said that it reads what it is left, or has ended."""
        said = b""
        with contextlib.suppress(ConnectionError):
            try:
                said = pair.met.socket.recv(len(_READY))
            except BlockingIOError:
                return
        if said and not pair.ready:
            pair.ready = True
        else:
            self.end(peer)
