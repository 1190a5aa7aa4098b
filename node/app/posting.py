"""What a peer's record says: the one word for its state, and the whole body. Enters: the daemon, or
who stands for one. Leaves: a word, a body. Never: a decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from node.app.ports import PeerPort
from node.core.ids import ENDS
from node.dht.record import PeerBody
from node.training.member import MemberState

if TYPE_CHECKING:
    from node.app.moving import Mover
    from node.app.placing import Placing

_POSTED = {"waiting": "ready", "moving": "starting"}
"""What others need to know of a state that is this peer's own business; a mover is one to come."""


class PostedPeer(PeerPort, Protocol):
    """A peer that says of itself where it is, and whether it goes elsewhere."""

    mover: Mover
    placing: Placing


def state_of(d: PostedPeer) -> str:
    """One word for the screen and for the peer's record."""
    a = d.assembled
    if d.ending and not d.mover.done:
        return "stopping"
    if d.draining:
        return "draining"
    if d.mover.going:
        return "moving"
    if d.role == "rendezvous":
        return "ready"
    if a is None:
        return "choosing" if d.manifest and d.placing.stage is None else "starting"
    if a.work.fetching < 1.0:
        return "joining"
    state, waits = a.training.member.state, a.training.waiting_for()
    if state is MemberState.FINISHED:
        return "finished"
    if waits and (state is MemberState.IDLE or a.training.leader is not None):
        return "waiting"
    return "ready" if state is MemberState.IDLE else "training"


def body_of(d: PostedPeer) -> PeerBody:
    """What a peer's record in the directory says."""
    a, state, reach, stage = d.assembled, state_of(d), d.reach(), d.placing.stage
    to = d.mover.cell
    return PeerBody(
        stage=stage or ENDS,
        role=d.role if stage is None else "stage" if stage else "ends",
        state="choosing" if to is not None else _POSTED.get(state, state),
        open_to=d.placing.open_to,
        settled=d.placing.settled,
        epoch=max(0, a.stage.version.epoch) if a else 0,
        name=d.name[:64],
        version=d.version,
        tokens_per_s=a.meter.tokens_per_s if a else 0.0,
        speed=a.work.speed() if a else 0.0,
        maddrs=tuple(reach.maddrs),
        started=d.started_at,
        leads=a is not None and a.training.leader is not None and to is None,
        reach=reach.standing,
        relays=reach.relays,
        room=reach.room,
        rate=reach.rate,
        follows=(a.training.following or "") if a and to is None else "",
        protocols=(d.protocols().oldest, d.protocols().newest),
        cell=to or (d.presence.cell if d.presence else ""),
    )
