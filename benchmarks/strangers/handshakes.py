"""Handshakes again and again, to take the tokens of others."""

from benchmarks.strangers.band import ANSWER_S, Attacker, Band
from node.core.errors import PeerFault
from node.core.ids import PeerId

HELLO_BYTES = 4096


async def repeat(band: Band) -> None:
    """Shake hands with every victim as often as it answers."""
    await band.each(lambda one: _repeat(band, one))


async def _repeat(band: Band, one: Attacker) -> None:
    async for victim in band.rounds(one):
        await one.pace(HELLO_BYTES)
        band.calls += 1
        band.sent += HELLO_BYTES
        await _greet(band, one, victim)


async def _greet(band: Band, one: Attacker, victim: PeerId) -> None:
    handshake = one.transport._handshake  # pyright: ignore[reportPrivateUsage]
    try:
        await handshake.greet(victim, ANSWER_S)
        band.heard[""] += 1
    except PeerFault as e:
        band.refusal(e)
