"""What a lying peer says. Its words go through the daemon's own notes, whose checks are what should
stop most of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from node.core.ids import PeerId
from node.core.journey import Version
from node.scheduler.costs import Measured, Way
from node.sim.values import Share, mark_of
from node.training.protocol import events as ev

if TYPE_CHECKING:
    from node.sim.peer import SimPeer

LIES = {
    "tokens": "gives its gradients with a thousand times their tokens",
    "epoch": "says that it holds epoch 2**62",
    "speed": "says that it does 1e11 micro-batches a second and that no way costs anything",
    "digest": "says another digest than it holds",
    "accusation": "accuses every healthy peer once a second",
    "parts": "says that it holds parts it does not have",
    "history": "says that its history counted more tokens than anybody's",
}


def heard(peer: SimPeer, h: ev.Heard) -> ev.Heard:
    """The heartbeat of a liar."""
    match peer.lie:
        case "epoch":
            return replace(h, at=Version(2**62, "f" * 32), tokens=2**62)
        case "speed":
            return replace(
                h,
                speed=1e11,
                costs=Measured(
                    1e-6, 1e-6, 1e-6, 1 << 31, tuple((p, Way(1e-6, 1e-6)) for p, _ in h.costs.ways)
                ),
            )
        case "digest":
            return replace(h, digest=mark_of("false", h.digest))
        case "history":
            return replace(
                h,
                at=Version(h.at.epoch + 1, mark_of("false", h.at.lineage) * 2),
                tokens=h.tokens + 10**6,
            )
        case "accusation":
            plan = peer.member.plan
            for m in plan.members if plan else ():
                if m.peer != peer.name:
                    peer.accuse(m.peer, "forged")
    return h


def digest(peer: SimPeer, true: str) -> str:
    """What it reports of what it adopted."""
    return mark_of("false", true) if peer.lie == "digest" else true


def share(peer: SimPeer, true: Share) -> Share:
    """What it gives to owners."""
    return true._replace(tokens=true.tokens * 1000) if peer.lie == "tokens" else true


def note(peer: SimPeer, said: Any) -> Any:
    """A word to the leader."""
    if peer.lie == "parts" and isinstance(said, ev.Incomplete):
        return replace(said, holds=tuple(peer.labour.names), failed=())
    return said


def over_the_wire(sender: PeerId, said: Any) -> Any:
    """The word as the leader's daemon reads it. Raises WireError where its notes do."""
    from node.training.protocol import notes

    match said:
        case ev.Heard():
            return notes.leader_event(notes.ready_note(said), sender)
        case _:
            return said
