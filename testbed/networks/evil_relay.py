"""Relays that attack the streams they carry, as any stranger may: pose as the client, read, alter,
replay, stall, cut."""

import asyncio
from typing import Any

from node.core.errors import PeerFault, Refused, WireError
from node.core.ids import PeerId
from node.identity.keys import Identity
from node.reach import secure
from node.reach.secure import make_certificate
from node.transport import handshake
from node.transport.frames import write_frame
from node.transport.service import Transport
from node.transport.ways import relay, tunnel
from node.transport.ways.relay import Relay
from protos.reach_pb2 import RelayAnswer, RelayAsk, Relayed

KINDS = ("poses", "reads", "alters", "replays", "stalls", "cuts")
GOOD_BYTES = 1 << 16
"""Carried honestly on a circuit before it is altered, stalled or cut."""


class EvilRelay(Relay):
    """Relay with the attack `kind`, one of :data:`KINDS`. `seen`: bytes it has read; `answers`:
    answers to the bytes it replayed."""

    def __init__(self, *made: Any, kind: str, identity: Identity, run_id: str) -> None:
        super().__init__(*made)
        if kind not in KINDS:
            raise ValueError(f"no kind {kind!r}")
        self.kind = kind
        self._identity = identity
        self._run_id = run_id
        self.seen = bytearray()
        self.recorded: list[bytes] = []
        self.answers: list[bytes] = []
        self.active = True
        self._shown = make_certificate()

    async def _carry(
        self,
        peer: PeerId,
        ask: RelayAsk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if not self.active:
            return await super()._carry(peer, ask, reader, writer)
        if self.kind == "poses" and ask.connect.stream == handshake.STREAM:
            return await self._pose(peer, PeerId(ask.connect.target), reader, writer)
        target = PeerId(ask.connect.target)
        far_reader, far_writer = await self._streams.open_stream(
            target, relay.RELAYED, relay.OPEN_S
        )
        await write_frame(
            far_writer, Relayed(source=peer, stream=ask.connect.stream).SerializeToString()
        )
        await write_frame(writer, RelayAnswer(granted=True).SerializeToString())
        one_tunnel = ask.connect.stream == tunnel.STREAM

        async def pump(
            source: asyncio.StreamReader, sink: asyncio.StreamWriter, outward: bool
        ) -> None:
            moved = 0
            while piece := await source.read(1 << 16):
                if self.kind == "reads":
                    self.seen += piece
                if self.kind == "replays" and outward and one_tunnel:
                    self.recorded.append(piece)
                    if len(self.recorded) == 1:
                        asyncio.get_running_loop().call_later(
                            1.0, lambda: asyncio.ensure_future(self._replay(peer, target))
                        )
                if moved > GOOD_BYTES and one_tunnel:
                    if self.kind == "stalls":
                        await asyncio.Event().wait()
                    if self.kind == "cuts":
                        break
                    if self.kind == "alters":
                        piece = bytes([piece[0] ^ 0xFF]) + piece[1:]
                moved += len(piece)
                sink.write(piece)
                await sink.drain()
            writer.close()
            far_writer.close()

        await asyncio.gather(
            pump(reader, far_writer, True), pump(far_reader, writer, False), return_exceptions=True
        )

    async def _pose(
        self,
        peer: PeerId,
        target: PeerId,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Answer in the place of the client, with a key that is not its."""
        await write_frame(writer, RelayAnswer(granted=True).SerializeToString())
        posing = Identity(self._identity._key, None)
        posing.peer_id = target
        try:
            _, stream = await secure.answer(reader, writer, posing, self._shown, self._run_id)
            self.seen += await stream.readexactly(1 << 12)
        except (WireError, Refused, OSError, EOFError, asyncio.IncompleteReadError):
            pass

    async def _replay(self, source: PeerId, target: PeerId) -> None:
        """Send a client again the bytes of an earlier caller, and keep its answer."""
        try:
            reader, writer = await self._streams.open_stream(target, relay.RELAYED, relay.OPEN_S)
            await write_frame(
                writer, Relayed(source=source, stream=tunnel.STREAM).SerializeToString()
            )
            for piece in self.recorded[:8]:
                writer.write(piece)
            async with asyncio.timeout(3.0):
                self.answers.append(await reader.read(1 << 16))
        except (PeerFault, OSError, TimeoutError):
            self.answers.append(b"")


def corrupt(transport: Transport, kind: str, identity: Identity, run_id: str) -> EvilRelay:
    """Make the relay of a transport that is not started yet an evil one."""
    old = transport.relay
    made = EvilRelay(
        old._streams,
        old._settings,
        old._allow,
        old._offers,
        transport._journal,
        old._metrics,
        kind=kind,
        identity=identity,
        run_id=run_id,
    )
    transport.relay = made
    return made
