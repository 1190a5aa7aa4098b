"""A stranger in the simulated swarm: an ends peer by its own word, with a PeerId below everybody's,
that says what ends a run if it is believed. It holds no parameters, and what it says goes over the
same network to the same services as what any peer says."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import count
from typing import Any

import grpc.aio

from node.core.errors import PeerFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember, Version
from node.core.tasks import Tasks
from node.dht.record import PeerBody
from node.identity.faults import FaultBook
from node.sim.process import SimPeer, Swarm
from node.sim.world.loop import ProcessLoop
from node.sim.world.network import SimTransport
from node.sim.world.signing import SimSigner
from node.training.protocol import events as ev
from node.training.protocol import notes
from node.training.protocol.votes import signing_domain
from protos import training_pb2 as pb
from protos import training_pb2_grpc as rpc

EVERY_S = 0.5
FAKE = "f" * 32


class Stranger(rpc.TrainingServicer):
    """Says, in turns, that a plan of term 2^62 is in force, that the run is over, that it holds a
    history of 2^53 tokens, and again what a leader said before; and in the directory, that it
    leads."""

    def __init__(self, swarm: Swarm, name: PeerId) -> None:
        self.swarm, self.name = swarm, name
        self.loop = ProcessLoop(swarm.world)
        # It never refuses anybody.
        self._transport = SimTransport(swarm.net, name, self.loop, FaultBook(threshold=1e9))
        self._signer = SimSigner(name)
        self._domain = signing_domain("plan", swarm.manifest.run_id)
        self._heard: Plan | None = None
        self._tasks = Tasks("stranger")
        rpc.add_TrainingServicer_to_server(self, self._transport.server)
        self._transport.serving = True
        swarm.world.push(0.0, lambda: self._tasks.spawn(self._speak(), "speak"), loop=self.loop)

    async def Tell(self, request: pb.Note, context: Any) -> pb.NoteReply:
        """It agrees to everything."""
        return pb.NoteReply(accepted=True)

    def kill(self) -> None:
        """It is gone."""
        self.loop.kill()
        self.swarm.net.lost(self.name)

    async def _speak(self) -> None:
        for turn in count():
            body = PeerBody(
                ENDS,
                "ends",
                "training",
                10**6,
                "stranger",
                "sim",
                leads=True,
                speed=1e6,
                follows=self.name,
            )
            self.swarm.record_store.post(self.name, body, self.swarm.world.now)
            for peer in self.swarm.live():
                if peer.ready:
                    self._tasks.spawn(self._tell(peer.name, self._word(peer, turn)), "tell")
                    self._heard = self._heard or peer.member.plan
            await asyncio.sleep(EVERY_S)

    def _word(self, peer: SimPeer, turn: int) -> pb.Note:
        match turn % 4:
            case 0:
                return self._planned(self._plan(peer, 2**62))
            case 1:
                return self._planned(self._plan(peer, peer.member.term + 1, ends=True))
            case 2:
                at = Version(self.swarm.setup.epochs, FAKE)
                heard = ev.Heartbeat(self.name, ENDS, at, "d", 1.0, term=2**40, tokens=2**53)
                return notes.ready_note(heard)
        return self._planned(self._heard or self._plan(peer, peer.member.term + 1))

    def _planned(self, plan: Plan) -> pb.Note:
        return notes.plan_note(plan, self._signer.sign(plan.canonical(), self._domain))

    def _plan(self, peer: SimPeer, term: int, ends: bool = False) -> Plan:
        at = peer.member.at
        live = [p for p in self.swarm.live() if p.ready]
        members = tuple(PlanMember(p.name, p.stage) for p in live)
        hops = tuple(
            Hop(s, self.swarm.live(s)[0].name)
            for s in range(1, self.swarm.setup.stages + 1)
            if self.swarm.live(s)
        )
        paths = () if ends else (Path(0, self.name, (0,), hops),)
        owners = {n: p.name for p in live for n in self.swarm.setup.names[p.stage]}
        return Plan(at.epoch, term, self.name, members, paths, owners, lineage=at.lineage)

    async def _tell(self, peer: PeerId, note: pb.Note) -> None:
        with contextlib.suppress(PeerFault, grpc.aio.AioRpcError):
            stub = rpc.TrainingStub(await self._transport.channel(peer))
            await stub.Tell(note, timeout=5.0)
