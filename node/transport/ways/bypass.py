"""TCP connections between two peers that libp2p arranges and does not carry. Enters: questions of
proven peers. Leaves: sockets, joined to gRPC at both ends. Never: trust in a socket: it carries TLS
with the certificate and the token of the handshake, as a direct connection does.

call back: caller --ask, ticket--> callee; callee --TCP, ticket--> caller's arrivals
relay:     relay --a ticket for each--> both; both --TCP, ticket--> relay's arrivals
punch:     both learn the public address of a port of theirs, tell it, and connect at once from it
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from node.core.addresses import Scope, scope
from node.core.errors import NetworkFault, PeerFault, WireError
from node.core.ids import PeerId
from node.core.tasks import Tasks
from node.identity.faults import TokenBucket
from node.reach.interfaces import family_of
from node.transport.addresses import multiaddr
from node.transport.frames import (
    Streams,
    converse,
    parsed,
    read_frame,
    see_off,
    write_frame,
)
from node.transport.port import printable
from node.transport.ways import arrivals, punch
from node.transport.ways.arrivals import TICKET_BYTES, WayListener
from node.transport.ways.join import join
from node.transport.ways.tunnel import TunnelEnd
from protos.reach_pb2 import BypassAnswer, BypassAsk

STREAM = "/tutti/bypass/1"
ASK_BYTES = 4096
FIRST_WORD_S = 5.0
"""Seconds for the question of a stream that a peer has opened."""
ANSWER_S = 10.0
"""Seconds for the answer, within which the asked side connects, or looks at itself from outside."""
SEE_OFF_S = 3.0
ASKS_PER_S = 0.5
ASKS_AT_ONCE = 6.0
"""Questions of one peer that are answered: ``ASKS_PER_S`` a second, and ``ASKS_AT_ONCE`` in a
burst."""
OBSERVERS = 2
"""Peers that are asked for the address of a port."""


class Bypass:
    """``host_of(peer)``: address of the peer's end of the libp2p connection to it, PeerFault where
    there is none to dial; ``outside()``: the port of ``mine`` as others dial it; ``observers()``:
    arrivals of others, of which one tells how it sees us; ``may_punch()``: whether sockets are
    opened together with a peer that asks for it. ``end`` takes the sockets of others."""

    def __init__(
        self,
        streams: Streams,
        mine: WayListener,
        end: TunnelEnd,
        host_of: Callable[[PeerId], Awaitable[str]],
        outside: Callable[[], int],
        observers: Callable[[], Sequence[tuple[str, int]]],
        may_punch: Callable[[], bool],
    ) -> None:
        self._streams = streams
        self._arrivals = mine
        self._end = end
        self._host_of = host_of
        self._outside = outside
        self._observers = observers
        self._may_punch = may_punch
        self._rate = TokenBucket(ASKS_PER_S, ASKS_AT_ONCE)
        self._tasks = Tasks("bypass")

    async def close(self) -> None:
        """End the attempts under way."""
        await self._tasks.close()

    # ----------------------------------------------------------- reaching others

    async def call_back(self, peer: PeerId, near: socket.socket) -> None:
        """Carry a connection of gRPC over a socket that ``peer`` opens to us. Raises PeerFault."""
        with self._arrivals.expect() as expected:
            await self._ask(peer, BypassAsk(ticket=expected.ticket, port=self._outside()))
            try:
                far = await expected.arrival()
            except TimeoutError as e:
                raise PeerFault(peer, "it says that it called back, and nobody came") from e
        await join(near, far)

    async def punch(self, peer: PeerId, near: socket.socket) -> None:
        """Carry a connection of gRPC over a socket that both sides open at the same moment. Raises
        PeerFault."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        try:
            async with self._observed() as (port, mine):
                answer = await self._ask(peer, BypassAsk(ticket=ticket, addresses=mine))
                targets = punch.candidates(answer.addresses)
                far = await punch.open_connection(port, targets, self._tasks)
        except (NetworkFault, OSError) as e:
            raise PeerFault(peer, str(e)) from e
        with far:
            await arrivals.say(far, ticket)
            await join(near, far)

    async def from_relay(
        self, relay: PeerId, port: int, ticket: bytes, timeout: float = arrivals.ARRIVE_S
    ) -> socket.socket:
        """A socket to the arrivals of ``relay``. Raises PeerFault."""
        if len(ticket) != TICKET_BYTES or not 0 < port < 1 << 16:
            raise PeerFault(relay, "it joins no sockets of others")
        try:
            return await arrivals.dial(await self._host_of(relay), port, ticket, timeout)
        except (OSError, TimeoutError) as e:
            raise PeerFault(relay, f"no connection to its port {port}: {e or 'no answer'}") from e

    async def _ask(self, peer: PeerId, ask: BypassAsk) -> BypassAnswer:
        """The answer of a peer that accepts. Raises PeerFault."""
        said = ask.SerializeToString()
        raw = await converse(self._streams, peer, STREAM, said, ASK_BYTES, ANSWER_S)
        try:
            answer = parsed(BypassAnswer, raw, "an answer")
        except WireError as e:
            raise PeerFault(peer, f"{STREAM}: {e}", 1.0) from e
        if not answer.accepted:
            raise PeerFault(peer, printable(answer.reason)[:200] or "refused")
        return answer

    # ----------------------------------------------------------- being reached

    async def serve(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one question, and carry the connection that comes of it. Raises WireError or
        TimeoutError when there is none."""
        async with asyncio.timeout(FIRST_WORD_S):
            ask = parsed(BypassAsk, await read_frame(reader, ASK_BYTES), "a question for a socket")
        if why := self._refusal(peer, ask):
            await _refuse(reader, writer, why)
        elif ask.addresses:
            await self._meet(peer, ask, reader, writer)
        else:
            await self._call(peer, ask, reader, writer)

    def _refusal(self, peer: PeerId, ask: BypassAsk) -> str:
        """The reason to refuse a question, "" for none."""
        refusals = {
            "shake hands first": not self._end.welcomes(peer),
            "no ticket was given": len(ask.ticket) != TICKET_BYTES,
            "no port was given": not ask.addresses and not 0 < ask.port < 1 << 16,
            "no public address was given": bool(ask.addresses)
            and not punch.candidates(ask.addresses),
            "hole punching is off here": bool(ask.addresses) and not self._may_punch(),
        }
        why = next((why for why, is_so in refusals.items() if is_so), "")
        if not why and not self._rate.allow(peer, time.monotonic()):
            return "too soon after the last questions"
        return why

    async def _call(
        self,
        peer: PeerId,
        ask: BypassAsk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Connect to the asker. Only the address of its libp2p connection is dialled, so no peer
        can make us dial others."""
        try:
            far = await arrivals.dial(await self._host_of(peer), ask.port, ask.ticket)
        except (PeerFault, OSError, TimeoutError) as e:
            await _refuse(reader, writer, f"no connection to port {ask.port}: {e or 'no answer'}")
            return
        with far:
            await write_frame(writer, BypassAnswer(accepted=True).SerializeToString())
            await self._end.carry(peer, far)

    async def _meet(
        self,
        peer: PeerId,
        ask: BypassAsk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Open a connection together with the asker. Raises NetworkFault if none opens."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                port, mine = await stack.enter_async_context(self._observed())
            except (NetworkFault, OSError) as e:
                await _refuse(reader, writer, str(e))
                return
            answer = BypassAnswer(accepted=True, addresses=mine)
            await write_frame(writer, answer.SerializeToString())
            targets = punch.candidates(ask.addresses)
            far = await punch.open_connection(port, targets, self._tasks)
        with far:
            async with asyncio.timeout(arrivals.SHOW_S):
                shown = await arrivals.read_exactly(far, TICKET_BYTES)
            if hmac.compare_digest(shown, ask.ticket):
                await self._end.carry(peer, far)

    @contextlib.asynccontextmanager
    async def _observed(self) -> AsyncIterator[tuple[int, list[str]]]:
        """A TCP port of this machine, and the public addresses as which its connections are seen.
        The connections to the observers stay open meanwhile, and so does the router's mapping.
        Raises NetworkFault, OSError."""
        with contextlib.ExitStack() as held:
            anchor = held.enter_context(_sharing(0, socket.AF_INET))
            port = anchor.getsockname()[1]
            found = list[str]()
            for host, at in self._observers()[:OBSERVERS]:
                with contextlib.suppress(OSError, TimeoutError):
                    made = held.enter_context(_sharing(port, family_of(host)))
                    async with asyncio.timeout(arrivals.SHOW_S):
                        await asyncio.get_running_loop().sock_connect(made, (host, at))
                        seen = await arrivals.seen_from(made)
                    if seen is not None and scope(seen[0]) is Scope.PUBLIC:
                        found.append(multiaddr(*seen))
            if not found:
                raise NetworkFault("no peer has told our public address", "see tutti doctor net")
            yield port, found


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, why: str) -> None:
    await write_frame(writer, BypassAnswer(reason=why).SerializeToString())
    await see_off(reader, SEE_OFF_S)


def _sharing(port: int, family: socket.AddressFamily) -> socket.socket:
    """A socket bound to a port that others of this process are bound to as well; 0: any port."""
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setblocking(False)
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made
