"""Reservations and circuits of a relay, held for nothing."""

import asyncio
from functools import partial

from benchmarks.strangers.band import Attacker, Band
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.transport.frames import parsed, read_frame, write_frame
from node.transport.port import printable
from node.transport.ways.relay import ASK_BYTES, RELAY
from protos.reach_pb2 import Connect, RelayAnswer, RelayAsk, Reserve

OPEN_S = 6.0
BEAT_S = 2.0
AGAIN_S = 1.0
CIRCUITS = 16
"""Circuits that one key may open at one relay."""


async def hold(band: Band) -> None:
    """Every attacker reserves a place at every victim, and opens circuits to another attacker on
    which nothing is ever said."""
    await band.everywhere(partial(_reserve_and_connect, band))


async def _reserve_and_connect(band: Band, one: Attacker, relay: PeerId) -> None:
    number = band.all.index(one)
    other = band.all[(number + 1) % len(band.all)]
    circuits = [_circuit(band, one, relay, other.me) for _ in range(CIRCUITS)]
    await asyncio.gather(_reservation(band, one, relay), *circuits)


async def _reservation(band: Band, one: Attacker, relay: PeerId) -> None:
    while not band.over:
        found = await ask(band, one, relay, RelayAsk(reserve=Reserve()))
        if found is not None:
            reader, writer = found
            try:
                while not reader.at_eof():
                    writer.write(b".")
                    await writer.drain()
                    await asyncio.sleep(BEAT_S)
            except OSError:
                pass
            band.heard["reservation ended by the relay"] += 1
            writer.close()
        await asyncio.sleep(AGAIN_S)


async def _circuit(band: Band, one: Attacker, relay: PeerId, target: PeerId) -> None:
    while not band.over:
        await asyncio.sleep(AGAIN_S)
        question = RelayAsk(connect=Connect(target=target, stream="/tutti/tunnel/1"))
        found = await ask(band, one, relay, question)
        if found is not None:
            reader, writer = found
            await reader.read(1)
            band.heard["circuit ended by the relay"] += 1
            writer.close()


async def ask(
    band: Band, one: Attacker, relay: PeerId, question: RelayAsk
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """A stream on which the relay has agreed; None after a refusal, which is counted."""
    question.run_id = band.manifest.run_id
    await one.pace(question.ByteSize())
    band.calls += 1
    band.sent += question.ByteSize()
    try:
        async with asyncio.timeout(OPEN_S):
            reader, writer = await one.transport.p2p.open_stream(relay, RELAY, OPEN_S)
            await write_frame(writer, question.SerializeToString())
            raw = await read_frame(reader, ASK_BYTES)
    except PeerFault as e:
        band.refusal(e)
        return None
    except (WireError, OSError, TimeoutError) as e:
        band.heard[f"stream: {type(e).__name__}: {e}"[:140]] += 1
        return None
    answer = parsed(RelayAnswer, raw, "an answer")
    band.heard[f"relay: {printable(answer.reason, 120)}" if not answer.granted else ""] += 1
    if answer.granted:
        return reader, writer
    writer.close()
    return None
