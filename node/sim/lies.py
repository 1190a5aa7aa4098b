"""Lying peers: their services are the product's, except for the methods replaced here. Their
messages go over the network as those of all peers, and the services' checks are what should stop
most of them."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

from node.core.ids import PeerId
from node.core.journey import Version
from node.scheduler.costs import LinkCost, Measured
from node.sim.process import SimPeer
from node.training.protocol import events as ev

LIES = {
    "tokens": "gives its gradients with a thousand times their tokens",
    "epoch": "says that it holds epoch 2**62",
    "speed": "says that it does 1e11 micro-batches a second and that no way costs anything",
    "digest": "says another digest than it holds",
    "accusation": "accuses every healthy peer once a second",
    "parts": "says that it holds parts it does not have",
    "history": "says that its history counted more tokens than anybody's",
}


def puts_on(peer: SimPeer) -> None:
    """From now on its heartbeats lie while the peer does."""
    training = peer.training
    true = training._heartbeat

    def said(leader: PeerId | None = None) -> ev.Heartbeat:
        return heard(peer, true(leader)) if peer.lie else true(leader)

    setattr(training, "_heartbeat", said)  # noqa: B010 - a liar has other code


def heard(peer: SimPeer, h: ev.Heartbeat) -> ev.Heartbeat:
    """The heartbeat of a liar."""
    match peer.lie:
        case "epoch":
            return replace(h, at=Version(2**62, "f" * 32), tokens=2**62)
        case "speed":
            return replace(
                h,
                speed=1e11,
                costs=Measured(
                    1e-6,
                    1e-6,
                    1e-6,
                    1 << 31,
                    tuple((p, LinkCost(1e-6, 1e-6)) for p, _ in h.costs.ways),
                ),
            )
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
            for m in plan.members if plan else ():
                if m.peer != peer.name:
                    peer.training.accuse(m.peer)
    return h


def tokens(peer: SimPeer, true: int) -> int:
    """Behind the gradients it gives."""
    return true * 1000 if peer.lie == "tokens" else true


def told(peer: SimPeer, action: Any) -> Any:
    """What its member tells the leader of an epoch."""
    match action:
        case ev.TellCommitted() if peer.lie == "digest":
            return replace(action, digest=_false(action.digest))
        case ev.TellIncomplete() if peer.lie == "parts":
            names = tuple(peer.swarm.setup.names[peer.stage])
            return replace(action, ended=replace(action.ended, holds=names, failed=()))
    return action


def _false(digest: str) -> str:
    return blake2b(digest.encode(), digest_size=32).hexdigest()
