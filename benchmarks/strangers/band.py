"""A band of attackers as one process: each with a key of its own and the real transport, none with
a daemon.

argv: one JSON object {home, manifest, victims: {PeerId: [multiaddr, ...]}, targets: {PeerId:
HOST:PORT}, keys}; the targets are gRPC servers. Prints {peers: [...]} when all have met every
victim that lets them, then reads one command:

    {"attack": NAME, "seconds": s}
        -> {met, sent, calls, refused, heard: {answer: times}}, or {error}

``met``: handshakes before the attack. One that failed is heard, but no refusal of the attack.

NAME is "module:function" of this package; the function takes the band. A band attacks
addresses of this machine's loopback only, sends at most :data:`RATE` bytes a second for each key,
and ends by itself.
"""

import asyncio
import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from node.core.errors import PeerFault, UsageFault
from node.core.ids import PeerId
from node.core.version import VERSION
from node.identity.keys import Identity
from node.manifest import Manifest
from node.reach.interfaces import is_loopback
from node.reach.settings import ReachSettings
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.telemetry.sinks import JsonlSink
from node.transport.addresses import host_of
from node.transport.handshake import Acquaintance, Facts
from node.transport.port import answers
from node.transport.service import Transport
from node.transport.settings import TransportSettings

RATE = 4 << 20
"""Bytes a second that one attacker sends at most."""
MOST_KEYS = 20
HANDSHAKE = "handshake: "
"""Prefix of the answers to handshakes, which come before the attack."""
WORDLESS = ("no answer in time", "broke off", "StreamEnded")
"""What a transport says of a call that ended without a word of the other side."""
ANSWER_S = 10.0
MEET_S = 15.0
LONGEST_S = 900
"""Seconds after which a band that is told nothing ends by its own alarm."""
SPARE_S = 60
"""Seconds after the end of its attack after which a band ends by the same alarm."""
NICE = 5
"""The attackers leave the processors to the daemons: the harm of their messages is measured."""


class Attacker:
    """One key with its transport. ``victims``: the peers it attacks."""

    def __init__(self, home: Path, manifest: Manifest, victims: list[PeerId]) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.identity = Identity.ephemeral()
        self.me = self.identity.peer_id
        self.manifest = manifest
        self.victims = victims
        self.journal = Journal([JsonlSink(home / "events.jsonl")])
        self._due = time.monotonic()
        self.transport = Transport(
            self.identity,
            TransportSettings(host="127.0.0.1"),
            self.journal,
            Metrics(),
            lambda: Facts(manifest.run_id, home.name, VERSION),
            lambda peer, hello: math.inf,
            reach=ReachSettings(map_ports=False, lan=False, punch=False, relay=False),
        )
        # Streams that a relay brings are taken, and held.
        self.transport.relays.serve = _hold_open

    async def pace(self, count: int) -> None:
        """Wait until ``count`` bytes more may be sent."""
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + count / RATE
        await asyncio.sleep(max(0.0, self._due - now))

    async def meet(self, victim: PeerId) -> Acquaintance:
        """The result of a handshake, with the addresses and the token. Raises PeerFault."""
        return (await self.transport.lines.get(victim)).met


async def _hold_open(
    relay: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Say nothing until the relay hangs up."""
    del relay, writer
    while await reader.read(1 << 16):
        pass


class Band:
    """All attackers of one process, and what their victims answered."""

    def __init__(self, asked: dict[str, Any]) -> None:
        if not 1 <= asked["keys"] <= MOST_KEYS:
            raise UsageFault(f"{asked['keys']} keys", f"give 1 to {MOST_KEYS}")
        self.manifest = Manifest.parse(Path(asked["manifest"]).read_bytes())
        self.home = Path(asked["home"])
        self.addresses: dict[PeerId, list[str]] = {}
        for victim, maddrs in asked["victims"].items():
            for maddr in maddrs:
                check_loopback(host_of(maddr))
            self.addresses[PeerId(victim)] = maddrs
        self.targets: dict[PeerId, str] = {}
        for victim, target in asked["targets"].items():
            check_loopback(target.rpartition(":")[0])
            self.targets[PeerId(victim)] = target
        victims = list(self.addresses)
        self.all = [
            Attacker(self.home / str(number), self.manifest, victims)
            for number in range(asked["keys"])
        ]
        self.heard: Counter[str] = Counter()
        self.met = 0
        self.sent = 0
        self.calls = 0
        self.until = math.inf

    @property
    def over(self) -> bool:
        """True when the time of the attack has passed."""
        return time.monotonic() >= self.until

    async def start(self) -> None:
        """Start all transports, a few at a time, and meet every victim."""
        await gather(self.all, self._begin, at_once=4)

    async def _begin(self, one: Attacker) -> None:
        await one.transport.start()
        for victim, maddrs in self.addresses.items():
            one.transport.learn(victim, maddrs)
        for victim in one.victims:
            try:
                async with answers(victim, MEET_S):
                    await one.meet(victim)
                self.met += 1
            except PeerFault as e:
                self.heard[f"{HANDSHAKE}{e.reason}"[:140]] += 1

    async def attack(self, name: str, seconds: float) -> dict[str, Any]:
        """Run one attack for at most ``seconds``. Returns the answers that were heard."""
        module, _, function = name.partition(":")
        run = getattr(importlib.import_module(f"benchmarks.strangers.{module}"), function)
        self.until = time.monotonic() + seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await run(self)
                await asyncio.Event().wait()  # all that is open stays open until the end
        except TimeoutError:
            if not limit.expired():
                raise
        refused = sum(count for answer, count in self.heard.items() if is_reason(answer))
        return {
            "met": self.met,
            "sent": self.sent,
            "calls": self.calls,
            "refused": refused,
            "heard": dict(self.heard.most_common(8)),
        }

    async def end(self) -> None:
        """Hang up everywhere."""
        await gather(self.all, lambda one: one.transport.close(), at_once=MOST_KEYS)

    async def each(self, attack: Callable[[Attacker], Awaitable[None]]) -> None:
        """Run ``attack`` for all attackers at once."""
        await gather(self.all, attack, at_once=MOST_KEYS)

    async def everywhere(self, attack: Callable[[Attacker, PeerId], Awaitable[None]]) -> None:
        """Run ``attack`` for every attacker at every victim, all at once."""
        pairs = [(one, victim) for one in self.all for victim in one.victims]
        await asyncio.gather(*(attack(one, victim) for one, victim in pairs))

    async def rounds(self, one: Attacker) -> AsyncIterator[PeerId]:
        """The victims in turn, again and again until the attack is over."""
        at = self.all.index(one)
        while not self.over:
            yield one.victims[at % len(one.victims)]
            at += 1
            await asyncio.sleep(0)

    async def call(
        self, one: Attacker, victim: PeerId, method: str, request: bytes
    ) -> bytes | None:
        """The answer to a unary call with these bytes; None after a refusal, which is counted."""
        await one.pace(len(request))
        self.calls += 1
        try:
            async with answers(victim, ANSWER_S):
                channel = await one.transport.channel(victim)
                self.sent += len(request)
                return await channel.unary_unary(method)(request, timeout=ANSWER_S)
        except PeerFault as e:
            self.refusal(e)
            return None

    def refusal(self, error: PeerFault) -> None:
        """Count a failed call under its reason."""
        self.heard[error.reason[:140]] += 1


async def gather(all: list[Any], work: Callable[[Any], Awaitable[None]], *, at_once: int) -> None:
    """Run ``work`` for each, at most ``at_once`` at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(what: Any) -> None:
        async with places:
            await work(what)

    await asyncio.gather(*map(one, all))


def is_reason(answer: str) -> bool:
    """True for a refusal of the attack that says why."""
    if not answer or answer.startswith(HANDSHAKE):
        return False
    return not any(text in answer for text in WORDLESS)


def check_loopback(host: str) -> None:
    """Raises UsageFault for a host that is not this machine's loopback."""
    if not is_loopback(host):
        raise UsageFault(f"{host} is not on the loopback", "attack daemons of this machine only")


async def main() -> None:
    asked = json.loads(sys.argv[1])
    signal.alarm(LONGEST_S)
    os.nice(NICE)
    band = Band(asked)
    await band.start()
    print(json.dumps({"peers": [one.me for one in band.all]}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        signal.alarm(math.ceil(order["seconds"]) + SPARE_S)
        try:
            said = await band.attack(order["attack"], order["seconds"])
        except Exception:  # noqa: BLE001  whatever it is, it is told
            said = {"error": traceback.format_exc()[-1500:]}
        print(json.dumps(said), flush=True)
        await band.end()
        return


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
