"""Both uses of relays: being reached through them, and reaching a peer through one. Enters: relays
that others offer, streams that relays bring. Leaves: streams, after the other end has proven its
identity. Never: a stream that is used before that, whatever its relay says."""

import asyncio
import contextlib
import hashlib
import hmac
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from node.core.errors import PeerFault, Refused, WireError
from node.core.ids import PeerId, short
from node.core.newest import Newest
from node.core.tasks import Tasks
from node.identity.faults import PEERS_KEPT
from node.identity.keys import Identity
from node.reach import secure
from node.reach.reserve import WANTED, Reservations
from node.telemetry.events import Journal
from node.transport import handshake
from node.transport.frames import StreamEnded, Streams, parsed, read_frame, write_frame
from node.transport.ways import bypass, tunnel
from node.transport.ways.bypass import Bypass
from node.transport.ways.join import join
from node.transport.ways.relay import ASK_BYTES, FIRST_WORD_S, RELAY
from protos.reach_pb2 import Connect, RelayAnswer, RelayAsk, Relayed, Reserve

LOOK_S = 1.0
"""Seconds between two looks whether a reservation is wanted."""
BEAT_S = 2.0
"""Seconds between two bytes to a relay that holds a reservation."""
BEAT_TIMEOUT_S = 4.0
"""Seconds for the echo of a byte by a relay."""
OPEN_S = 6.0
"""Seconds for a relay to bring a stream to its client."""
BLAME_S = 600.0
"""Seconds for which a relay over which a connection broke comes after the others."""
NONCES = 4096
"""Preambles of relayed tunnels that cannot be used again."""
_ENDED = "it has ended the reservation"
_NONCE = 16
_LABELS = {
    tunnel.STREAM: b"tutti/relayed/tunnel/1",
    bypass.STREAM: b"tutti/relayed/bypass/1",
}
"""Beginnings of the proofs of callers, by the stream that they open."""


class Relays:
    """``run_id()`` and ``admission()``: the run and the token that are shown to relays;
    ``offers()``: relays that would take a client. ``meet(peer, stream)`` answers a handshake of a
    proven peer; ``end`` takes tunnels of others, ``past`` opens sockets to
    relays."""

    def __init__(
        self,
        streams: Streams,
        identity: Identity,
        shown: secure.ServerCertificate,
        tokens: handshake.Tokens,
        run_id: Callable[[], str],
        admission: Callable[[], bytes],
        offers: Callable[[], Iterable[PeerId]],
        meet: Callable[[PeerId, secure.Secured], Awaitable[None]],
        end: tunnel.TunnelEnd,
        past: Bypass,
        journal: Journal,
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._streams = streams
        self._identity = identity
        self._shown = shown
        self._tokens = tokens
        self._run_id = run_id
        self._admission = admission
        self._offers = offers
        self._meet = meet
        self._end = end
        self._bypass = past
        self._journal = journal
        self._choice = Reservations(secrets.token_bytes(16))
        self._of: Newest[PeerId, tuple[PeerId, ...]] = Newest(PEERS_KEPT)
        self._used: Newest[bytes, None] = Newest(NONCES)
        self._blamed: dict[PeerId, float] = {}
        self._tasks = Tasks("relays", on_error)
        self.on_change: Callable[[], None] = lambda: None
        """Told when a reservation is made or lost."""

    # ----------------------------------------------------------- being reached

    @property
    def held(self) -> tuple[PeerId, ...]:
        """Relays through which this peer can be reached now."""
        return tuple(sorted(self._choice.held))

    def start(self) -> None:
        """Begin to keep the wanted number of reservations."""
        self._tasks.spawn(self._keep(), "keep", eternal=True)

    async def close(self) -> None:
        await self._tasks.close()

    def want(self, wanted: bool) -> None:
        """Set whether others should reach this peer through relays. Reservations that are no longer
        wanted end within ``BEAT_S``."""
        self._choice.wanted = WANTED if wanted else 0

    async def _keep(self) -> None:
        while True:
            for relay in self._choice.due(self._offers(), time.monotonic()):
                self._tasks.spawn(self._reserve(relay), f"reserve {short(relay)}")
            await asyncio.sleep(LOOK_S)

    async def _reserve(self, relay: PeerId) -> None:
        """Hold one reservation until it ends, whatever the reason."""
        try:
            async with asyncio.timeout(OPEN_S):
                reader, writer, _ = await self._ask(relay, RelayAsk(reserve=Reserve()))
        except (PeerFault, TimeoutError) as e:
            self._journal.emit(
                "transport",
                "relay-refused",
                f"no reservation at relay {short(relay)}: {e}",
                "debug",
                peer=relay,
            )
            self._choice.lost(relay, time.monotonic())
            return
        self._choice.granted(relay)
        self._journal.emit(
            "transport",
            "relay-held",
            f"others can reach this peer through {short(relay)}",
            peer=relay,
        )
        self.on_change()
        try:
            await self._beat(reader, writer)
        except (OSError, TimeoutError, StreamEnded) as e:
            # A relay that comes to its end is no trouble of the network.
            self._journal.emit(
                "transport",
                "relay-lost",
                f"relay {short(relay)} is lost: {str(e) or 'no answer'}",
                "info" if isinstance(e, StreamEnded) else "warning",
                peer=relay,
            )
        finally:
            writer.close()
            self._choice.lost(relay, time.monotonic())
            self.on_change()

    async def _beat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._choice.wanted:
            writer.write(b".")
            await writer.drain()
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                if not await reader.read(1):
                    raise StreamEnded(_ENDED)
            await asyncio.sleep(BEAT_S)
            if reader.at_eof():  # before a write that would fail
                raise StreamEnded(_ENDED)

    async def serve(
        self, relay: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A stream that ``relay`` brings. Raises WireError, TimeoutError, Refused for one that
        proves nothing."""
        if relay not in self._choice.held:
            return
        async with asyncio.timeout(FIRST_WORD_S):
            word = parsed(Relayed, await read_frame(reader, ASK_BYTES), "a relayed stream")
        if word.stream == handshake.STREAM:
            async with asyncio.timeout(FIRST_WORD_S):
                peer, stream = await secure.answer(
                    reader, writer, self._identity, self._shown, self._run_id()
                )
            await self._meet(peer, stream)
        elif word.stream == tunnel.STREAM:
            peer = await self._opener(word, reader)
            await self._end.serve(peer, reader, writer)
        elif word.stream == bypass.STREAM:
            peer = await self._opener(word, reader)
            far = await self._bypass.from_relay(relay, word.port, word.ticket)
            await self._end.carry(peer, far)

    async def _opener(self, word: Relayed, reader: asyncio.StreamReader) -> PeerId:
        """The proven opener of a relayed stream. Raises Refused without a proof."""
        async with asyncio.timeout(FIRST_WORD_S):
            nonce = await reader.readexactly(_NONCE)
            shown = await reader.readexactly(hashlib.sha256().digest_size)
        peer = PeerId(word.source)
        said = _preamble(word.stream, nonce, self._identity.peer_id)
        if nonce in self._used or not self._tokens.proves(peer, said, shown):
            raise Refused(f"a relayed tunnel that {short(peer)} did not open")
        self._used[nonce] = None
        return peer

    # ----------------------------------------------------------- reaching others

    def learn(self, peer: PeerId, relays: Sequence[PeerId]) -> None:
        """Take in the relays through which ``peer`` says it can be reached."""
        self._of.pop(peer, None)
        if relays:
            self._of[peer] = tuple(relays[:WANTED])

    def of(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Relays of ``peer``; relays over which a connection broke lately come last. This very peer
        and the target are left out."""
        known = [r for r in self._of.get(peer, ()) if r not in (self._identity.peer_id, peer)]
        return tuple(sorted(known, key=lambda r: self._blamed.get(r, -math.inf)))

    def blame(self, relay: PeerId, now: float) -> None:
        """A connection over this relay broke; if that was not its client, it may happen again."""
        self._blamed = {r: at for r, at in self._blamed.items() if now - at < BLAME_S} | {
            relay: now
        }

    async def private(self, relay: PeerId, peer: PeerId) -> secure.Secured:
        """A stream to the handshake of ``peer`` through ``relay``, both ends proven. Raises
        PeerFault."""
        try:
            async with asyncio.timeout(OPEN_S):
                reader, writer, _ = await self._connect(relay, peer, handshake.STREAM)
                try:
                    return await secure.call(reader, writer, self._identity, peer, self._run_id())
                except BaseException:  # also cancelled
                    writer.close()
                    raise
        except TimeoutError as e:
            raise PeerFault(peer, f"no answer through relay {short(relay)} in {OPEN_S:g} s") from e

    async def open_tunnel(
        self, relay: PeerId, token: str, peer: PeerId, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream through ``relay`` to the end of a tunnel at ``peer``, with the proof that its
        opener holds ``token``, which the peer gave us (hex). Raises PeerFault."""
        reader, writer, _ = await self._proven(relay, token, peer, tunnel.STREAM, timeout)
        return reader, writer

    async def carry(
        self, relay: PeerId, token: str, peer: PeerId, timeout: float, near: socket.socket
    ) -> None:
        """Carry a connection of gRPC over a socket that ``relay`` joins to one of ``peer``; see
        :meth:`open_tunnel`. Raises PeerFault."""
        _, writer, answer = await self._proven(relay, token, peer, bypass.STREAM, timeout)
        try:
            far = await self._bypass.from_relay(relay, answer.port, answer.ticket)
            await join(near, far)
        finally:
            writer.close()

    async def _proven(
        self, relay: PeerId, token: str, peer: PeerId, stream: str, timeout: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, RelayAnswer]:
        try:
            async with asyncio.timeout(timeout):
                reader, writer, answer = await self._connect(relay, peer, stream)
        except TimeoutError as e:
            raise PeerFault(peer, f"no stream through relay {short(relay)} in {timeout:g} s") from e
        nonce = secrets.token_bytes(_NONCE)
        key = bytes.fromhex(token)
        with contextlib.suppress(OSError):
            writer.write(nonce + hmac.digest(key, _preamble(stream, nonce, peer), "sha256"))
        return reader, writer, answer

    async def _connect(
        self, relay: PeerId, peer: PeerId, stream: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, RelayAnswer]:
        try:
            return await self._ask(relay, RelayAsk(connect=Connect(target=peer, stream=stream)))
        except PeerFault as e:
            raise PeerFault(peer, f"relay {short(relay)}: {e.reason}") from e

    async def _ask(
        self, relay: PeerId, ask: RelayAsk
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, RelayAnswer]:
        """A stream to ``relay`` on which it has said yes, and its answer. Raises PeerFault with its
        reason."""
        ask.run_id = self._run_id()
        ask.admission = self._admission()
        reader, writer = await self._streams.open_stream(relay, RELAY, OPEN_S)
        try:
            await write_frame(writer, ask.SerializeToString())
            answer = parsed(RelayAnswer, await read_frame(reader, ASK_BYTES), "an answer")
            if not answer.granted:
                raise PeerFault(relay, handshake.printable(answer.reason) or "refused")
        except BaseException as e:  # also cancelled
            writer.close()
            if isinstance(e, WireError | OSError):
                raise PeerFault(relay, f"the relay broke off: {e}") from e
            raise
        return reader, writer, answer


def _preamble(stream: str, nonce: bytes, callee: PeerId) -> bytes:
    return _LABELS[stream] + nonce + callee.encode()
