"""Peers that do not tell the truth: lying peers, and strangers. Their messages go over the same
network to the same services as the messages of any peer, and the services' checks should stop most
of them.

The services of a lying peer are the product's, except for the methods replaced here.
"""

import asyncio
import contextlib
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import Any

import grpc.aio
from torch import Tensor

from node.consensus.votes import signing_domain
from node.coordinator import notes
from node.core.errors import PeerFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember, Version
from node.core.tasks import Tasks
from node.dht.record import PeerBody
from node.epoch import events as ev
from node.identity.faults import FaultBook
from node.scheduler.costs import LinkCost, Measured
from node.sim.process import SimPeer, SimSigner, Swarm
from node.sim.world.loop import ProcessLoop
from node.sim.world.network import SimTransport
from protos import training_pb2 as pb
from protos import training_pb2_grpc as rpc

EVERY_S = 0.5
FAKE = "f" * 32
LIES = {
    "tokens": "gives its gradients with a thousand times their tokens",
    "epoch": "says that it holds epoch 2**62",
    "speed": "says that it does 1e11 micro-batches a second and that no way costs anything",
    "digest": "says another digest than it holds",
    "accusation": "accuses every healthy peer once a second",
    "parts": "says that it holds parts it does not have",
    "history": "says that its history counted more tokens than anybody's",
}
SILENT = "silent"
"""Lie that is a fault of its own: to do nothing in a round."""
OVERSTEP = "overstep"
"""Lie that is a fault of its own: to give parameters, as owner, that moved further than a step
goes."""
BEYOND = 1.0
"""Added to every number that such an owner gives."""


def puts_on(peer: SimPeer) -> None:
    """From now on its heartbeats lie while the peer does."""
    report = peer.training.reporting.own
    true = report.heartbeat

    def said(leader: PeerId | None = None) -> ev.Heartbeat:
        return heard(peer, true(leader)) if peer.lie else true(leader)

    setattr(report, "heartbeat", said)  # noqa: B010 - a liar has other code


def heard(peer: SimPeer, h: ev.Heartbeat) -> ev.Heartbeat:
    """The heartbeat of a liar."""
    match peer.lie:
        case "epoch":
            return replace(h, at=Version(2**62, FAKE), tokens=2**62)
        case "speed":
            costs = Measured(
                1e-6,
                1e-6,
                1e-6,
                1 << 31,
                tuple((p, LinkCost(1e-6, 1e-6)) for p, _ in h.capacity.costs.ways),
            )
            return replace(h, capacity=replace(h.capacity, speed=1e11, costs=costs))
        case "digest":
            return replace(h, digest=_false(h.digest))
        case "history":
            return replace(
                h,
                at=Version(h.at.epoch + 1, _false(h.at.lineage)[:32]),
                tokens=h.tokens + 10**6,
            )
        case "accusation":
            plan = peer.member.plan
            if plan:
                for m in plan.members:
                    if m.peer != peer.name:
                        peer.training.accuse(m.peer)
    return h


def tokens(peer: SimPeer, true: int) -> int:
    """Behind the gradients it gives."""
    return true * 1000 if peer.lie == "tokens" else true


def stepped(peer: SimPeer, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that it gives as owner."""
    if peer.lie != OVERSTEP:
        return fresh
    return {name: tensor + BEYOND for name, tensor in fresh.items()}


def told(peer: SimPeer, action: Any) -> Any:
    """Action of the member of a liar, instead of the true one; None for no action."""
    match action:
        case ev.StartRound() if peer.lie == SILENT:
            return None
        case ev.TellCommitted() if peer.lie == "digest":
            return replace(action, digest=_false(action.digest))
        case ev.TellIncomplete() if peer.lie == "parts":
            names = tuple(peer.swarm.setup.names[peer.stage])
            return replace(action, ended=replace(action.ended, holds=names, failed=()))
    return action


def _false(digest: str) -> str:
    return blake2b(digest.encode(), digest_size=32).hexdigest()


class Stranger(rpc.TrainingServicer):
    """A peer that claims to be an ends peer, with a PeerId below everybody's and without
    parameters, and sends messages that would end a run if they were believed: in turns, that a plan
    of term 2^62 is in force, that the run is over, that it holds a history of 2^53 tokens, and
    again what a leader said before; and in the directory, that it leads."""

    def __init__(self, swarm: Swarm, name: PeerId) -> None:
        self.swarm = swarm
        self.name = name
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
                heard = ev.Heartbeat(
                    self.name, ENDS, at, "d", ev.Capacity(1.0), term=2**40, tokens=2**53
                )
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
