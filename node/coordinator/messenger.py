"""Messages from this peer to others, with time limits that fit the connection. Enters: a message
and its receiver. Leaves: the receiver's refusal, or a fault. Never: the reason for a message."""

import contextlib
from collections.abc import Callable
from typing import Any

from node.coordinator.credit.shared_note import Sent, encoded
from node.coordinator.vitals import Vitals
from node.core.clock import Clock
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.epoch.pace import PROBE_TIMEOUT_S, REDIAL_MOST_S, REDIAL_TIMEOUT_S, STANDS_S
from node.transport.port import TransportPort, answers
from protos import training_pb2 as pb

BROKEN_S = 60.0
"""Seconds after which a broken connection no longer suggests that its peer is dead."""
TELL = "/tutti.v1.Training/Tell"
CARRIED_OUT = ("plan", "takeover", "round")
"""Messages that are carried out before they are answered; all others are answered at once."""


class Unheard(PeerFault):
    """No answer from a peer, not even over a new connection; the attempt began at ``since`` of the
    own clock."""

    def __init__(self, fault: PeerFault, since: float) -> None:
        super().__init__(fault.peer, fault.reason, fault.weight)
        self.since = since


async def tell(channel: Any, note: Sent, timeout: float) -> pb.NoteReply:
    """Send a note over a channel. Raises AioRpcError."""
    # A stub of the generated module takes whole messages only.
    call = channel.unary_unary(
        TELL,
        request_serializer=encoded,
        response_deserializer=pb.NoteReply.FromString,
        _registered_method=True,
    )
    return await call(note, timeout=timeout)


class Messenger:
    """Sends messages. ``heartbeat_answered(peer, reply)`` is told of replies to heartbeats."""

    def __init__(
        self,
        transport: TransportPort,
        clock: Clock,
        vitals: Vitals,
        heartbeat_answered: Callable[[PeerId, pb.NoteReply], None],
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._vitals = vitals
        self._heartbeat_answered = heartbeat_answered
        self._broken: dict[PeerId, float] = {}
        """Time of the break, for each broken connection to a peer that has not answered since."""

    def heard(self, peer: PeerId) -> None:
        """``peer`` sent or answered something just now."""
        self._broken.pop(peer, None)
        self._vitals.alive(peer, self._clock.now())

    def lost(self, peer: PeerId) -> None:
        """The connection to ``peer`` broke."""
        now = self._clock.now()
        self._broken = {p: at for p, at in self._broken.items() if now - at < BROKEN_S}
        self._broken[peer] = now
        self._vitals.doubt(peer, now)

    async def send_with_retry(
        self, peer: PeerId, note: Sent, floor_s: float, stands_s: float = STANDS_S
    ) -> str | None:
        """Send as :meth:`send` does, with a time limit that depends on the connection. An open
        connection shows that the process lives, so over it the answer may take ``stands_s``. Over a
        new one it has ``floor_s``, or longer if this peer's answers were measured to take longer;
        where a connection has just broken, at most :meth:`_redial_s`. Raises Unheard when no answer
        came."""
        patience = self._transport.patience
        what = ("word", peer)
        broken = self._clock.now() - self._broken.get(peer, -BROKEN_S) < BROKEN_S
        if self._transport.path(peer):
            with contextlib.suppress(PeerFault):
                limit = patience.within(what, stands_s, self._clock.now())
                return await self.send(peer, note, limit)
            self._vitals.doubt(peer, self._clock.now())
            self._transport.forget(peer)
            broken = True
        began = self._clock.now()
        limit = patience.within(what, floor_s, began)
        if broken and note.WhichOneof("say") not in CARRIED_OUT:
            limit = min(limit, self._redial_s(peer))
        try:
            return await self.send(peer, note, limit)
        except PeerFault as e:
            self._vitals.doubt(peer, self._clock.now())
            raise Unheard(e, began) from e

    def _redial_s(self, peer: PeerId) -> float:
        """Seconds for an answer over a new connection, after the previous one broke. They are
        bounded: a cell must go on soon even if its leader answered slowly before it died."""
        patience = self._transport.patience
        now = self._clock.now()
        usual = REDIAL_TIMEOUT_S + patience.usual(("dial", peer))
        within = patience.within(("word", peer), usual, now)
        return min(within, REDIAL_MOST_S + patience.slack(now))

    async def send(self, peer: PeerId, note: Sent, timeout: float) -> str | None:
        """Send a note. Returns None if the peer accepted, else its reason. Raises PeerFault when it
        did not answer in time."""
        patience = self._transport.patience
        began = patience.running(self._clock.now())
        async with answers(peer, timeout):
            reply = await tell(await self._transport.channel(peer), note, timeout)
        self.heard(peer)
        says = note.WhichOneof("say")
        if says == "ready":
            self._heartbeat_answered(peer, reply)
        # Answers to other notes take as long as the work that they ask for.
        if says in (None, "ready"):
            patience.took(("word", peer), patience.running(self._clock.now()) - began)
        if reply.accepted:
            return None
        return reply.reason

    async def notify(self, peer: PeerId, note: pb.Note) -> None:
        """Send a note that may get lost: a peer that misses it finds out by itself."""
        with contextlib.suppress(PeerFault):
            await self.send_with_retry(peer, note, PROBE_TIMEOUT_S)
