"""One peer without a model, as a process: the daemon's transport, directory and presence, and a
source of bytes to fetch.

argv: one JSON object {home, settings: {...TransportSettings}, reach: {...ReachSettings}, join:
[multiaddr, ...], refresh_s, evil: a kind of evil_relay.KINDS}. Prints one JSON object {peer,
addresses} when it runs, then one for every command read from its standard input:

    {"do": "look"}                                -> {others: {peer: {reach, relays, room}}, links:
                                                  {peer: path}, standing}
    {"do": "way", "peer": P}                      -> {path, via, bypass, rtt_s, tried} or {error}
    {"do": "fetch", "peer": P, "bytes": n}        -> {seconds, digest, bytes, path} or {error}
    {"do": "fetch_all", "peers": [...], "bytes": n} -> {by peer: the same, all at the same time}
    {"do": "evil", "active": b}                   -> {seen, answers}; its relay is evil from now on,
                                                  or honest
    {"do": "reads", "seconds": s}                 -> {reads: [seconds of each reading of the
                                                  directory]}
"""

import asyncio
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc.aio
import uvloop

from node.coordinator.presence import Presence
from node.core.clock import SystemClock
from node.core.errors import PeerFault, TuttiError
from node.core.ids import PeerId, RunId
from node.dht.directory import Directory
from node.dht.record import PeerBody
from node.dht.settings import DirectorySettings
from node.identity.keys import Identity
from node.reach.settings import ReachSettings
from node.reach.standing import Standing
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.telemetry.sinks import JsonlSink
from node.transport.handshake import Facts
from node.transport.port import translate
from node.transport.service import Transport
from node.transport.settings import TransportSettings
from protos import state_pb2, state_pb2_grpc
from testbed.networks.evil_relay import corrupt

RUN = RunId("7" * 64)
PIECE = bytes(range(256)) * 4096
"""1 MiB."""


class Source(state_pb2_grpc.StateServicer):
    """Sends the requested number of bytes."""

    async def Fetch(self, request: Any, context: Any) -> Any:
        for offset in range(0, request.length, len(PIECE)):
            yield state_pb2.StateChunk(offset=offset, data=PIECE[: request.length - offset])


class Peer:
    """See the module."""

    def __init__(self, asked: dict[str, Any]) -> None:
        home = Path(asked["home"])
        self.identity = Identity.load_or_create(home / "identity.key")
        self.journal = Journal([JsonlSink(home / "events.jsonl")])
        self.clock = SystemClock()
        self.transport = Transport(
            self.identity,
            TransportSettings(**asked.get("settings", {})),
            self.journal,
            Metrics(),
            lambda: Facts(str(RUN), home.name, "0"),
            lambda peer, hello: math.inf,
            None,
            ReachSettings(**asked.get("reach", {})),
        )
        state_pb2_grpc.add_StateServicer_to_server(Source(), self.transport.server)
        evil = asked.get("evil")
        self.evil = corrupt(self.transport, evil, self.identity, str(RUN)) if evil else None
        self.join = list(asked.get("join", ()))
        self.name = home.name
        self.directory = Directory(
            self.identity,
            DirectorySettings(refresh_s=asked.get("refresh_s", 2.0)),
            self.clock,
            RUN,
            self.journal,
        )
        self.presence = Presence(
            self.identity.peer_id,
            self.directory,
            self.clock,
            asked.get("refresh_s", 2.0),
            self._learn,
            lambda name, error: self.journal.emit("lab", "failed", f"{name}: {error!r}", "error"),
        )

    async def start(self) -> None:
        await self.transport.start(self.join)
        reachable = self.transport.reachable

        def serving() -> bool:
            return reachable.standing is Standing.OPEN or (
                reachable.standing is Standing.UNKNOWN and not self.join
            )

        async def moved() -> None:
            await self.directory.serve(serving())
            self.presence.changed()

        pending = set[asyncio.Task[None]]()

        def tell() -> None:
            task = asyncio.get_running_loop().create_task(moved())
            pending.add(task)
            task.add_done_callback(pending.discard)

        await self.directory.serve(serving())
        await self.directory.attach(self.transport.p2p.p2p, self.join)
        reachable.on_change.append(tell)
        self.transport.relays.on_change = tell
        self.presence.start()
        self.presence.announce(self.body)

    def body(self) -> PeerBody:
        t = self.transport
        return PeerBody(
            0,
            "stage",
            "ready",
            0,
            self.name,
            "0",
            maddrs=tuple(t.reachable.multiaddrs()),
            reach=t.reachable.standing.value,
            relays=t.relays.held,
            room=t.relay.room,
            rate=t.relay.rate_left,
        )

    def _learn(self, peer: PeerId, body: PeerBody) -> None:
        relays = [PeerId(r) for r in body.relays]
        self.transport.learn(
            peer, body.maddrs, standing=Standing(body.reach), relays=relays, room=body.room
        )

    async def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One command."""
        try:
            return await getattr(self, f"do_{asked.pop('do')}")(**asked)
        except TuttiError as e:
            return {"error": str(e)}

    async def do_look(self) -> dict[str, Any]:
        others = {
            p: {
                "name": e.body.name,
                "reach": e.body.reach,
                "relays": list(e.body.relays),
                "room": e.body.room,
                "at": e.body.maddrs,
            }
            for p, e in self.presence.view.everybody.items()
        }
        t = self.transport
        return {
            "others": others,
            "links": {p: t.p2p.how(p).word for p in t.p2p.links},
            "standing": t.reachable.standing.value,
            "at": t.reachable.multiaddrs(),
            "seen": t.reachable.seen(),
            "held": t.relays.held,
            "mapped": [list(vars_of(m)) for m in t.reachable.mapper.mappings],
            "neighbours": self.directory.neighbours,
        }

    async def do_way(self, peer: str) -> dict[str, Any]:
        who = PeerId(peer)
        try:
            rtt = await self.transport.ping(who, 10.0)
        except PeerFault as e:
            return {"error": str(e), "tried": self.transport.lines.tried(who)}
        link = self.transport.peers()[who]
        line = self.transport.lines.open.get(who)
        token = line.met.token if line is not None else ""
        return {
            "path": link.path,
            "via": link.via,
            "rtt_s": rtt,
            "tried": self.transport.lines.tried(who),
            "token": token,
            "bypass": line is not None and line.bypass,
        }

    async def do_fetch(self, peer: str, bytes: int) -> dict[str, Any]:
        who = PeerId(peer)
        digest = hashlib.sha256()
        count = 0
        stub = state_pb2_grpc.StateStub(await self.transport.channel(who))
        path = self.transport.path(who)
        began = time.monotonic()
        try:
            async for chunk in stub.Fetch(state_pb2.FetchRequest(length=bytes), timeout=300):
                digest.update(chunk.data)
                count += len(chunk.data)
        except grpc.aio.AioRpcError as e:
            raise translate(who, e) from e
        seconds = time.monotonic() - began
        return {"seconds": seconds, "bytes": count, "digest": digest.hexdigest(), "path": path}

    async def do_fetch_all(self, peers: list[str], bytes: int) -> dict[str, Any]:
        async def one(peer: str) -> dict[str, Any]:
            return await self.do({"do": "fetch", "peer": peer, "bytes": bytes})

        return dict(zip(peers, await asyncio.gather(*map(one, peers)), strict=True))

    async def do_evil(self, active: bool) -> dict[str, Any]:
        if self.evil is None:
            return {"error": "this relay is an honest one"}
        self.evil.active = active
        return {
            "seen": self.evil.seen.hex()[:200_000],
            "answers": [len(a) for a in self.evil.answers],
        }

    async def do_reads(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        found = []
        while time.monotonic() < end:
            began = time.monotonic()
            await self.directory.read()
            found.append(time.monotonic() - began)
            await asyncio.sleep(1.0)
        return {"reads": found}


def vars_of(mapping: Any) -> tuple[Any, ...]:
    return mapping.protocol, mapping.internal, mapping.host, mapping.external, mapping.how


async def serve(asked: dict[str, Any]) -> None:
    peer = Peer(asked)
    await peer.start()
    print(
        json.dumps(
            {"peer": peer.identity.peer_id, "addresses": peer.transport.reachable.multiaddrs()}
        ),
        flush=True,
    )
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await peer.do(json.loads(line))), flush=True)
    await peer.presence.close()
    await peer.transport.close()


def main(words: list[str]) -> int:
    """Run the peer of one JSON object until its standard input ends."""
    uvloop.run(serve(json.loads(words[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
