"""Which versions a simulated peer has stood at, and what it says of them, as
``node.training.protocol.past`` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from node.core.ids import PeerId
from node.core.journey import Version
from node.sim.world import HEAD, Call
from node.training.protocol import events as ev

if TYPE_CHECKING:
    from node.sim.peer import SimPeer

ASK_S = 2.0
REMEMBERED = 64


class SimPast:
    """One peer's memory of histories."""

    def __init__(self, peer: SimPeer) -> None:
        self.peer = peer
        self._stood: deque[tuple[Version, int]] = deque(maxlen=REMEMBERED)

    def stood(self, version: Version, tokens: int) -> None:
        """This peer has begun an epoch from ``version``."""
        while self._stood and self._stood[-1][0].epoch >= version.epoch:
            self._stood.pop()
        self._stood.append((version, tokens))

    def recall(
        self, version: Version, holders: list[PeerId], then: Callable[[ev.Recalled], None]
    ) -> None:
        """Ask one after the other; without a plan when none knows it."""
        if not holders:
            then(ev.Recalled(version))
            return
        holder, rest = holders[0], holders[1:]

        def got(found: tuple[Any, ...] | None) -> None:
            if found is None or found[0] is None:
                self.recall(version, rest, then)
            else:
                then(ev.Recalled(version, found[0], found[1]))

        self._ask(holder, version, got)

    def give_up(self, at: Version, tokens: int, leader: PeerId) -> None:
        """The swarm goes on from elsewhere: what does that cost?"""
        if at.epoch == 0 or leader == self.peer.name:
            return

        def got(found: tuple[Any, ...] | None) -> None:
            if found is None:
                return
            theirs = {v: t for v, t in found[2]}
            if at in theirs:
                return
            common = next(((v, t) for v, t in reversed(self._stood) if v in theirs), None)
            if common is not None:
                self.peer.swarm.watch.gave_up(
                    self.peer, at.epoch - common[0].epoch, max(0, tokens - common[1])
                )

        self._ask(leader, at, got)

    def _ask(
        self, holder: PeerId, version: Version, then: Callable[[tuple[Any, ...] | None], None]
    ) -> None:
        def serve(there: SimPeer, call: Call) -> None:
            call.say((*there.member.remembers(version), tuple(there.past._stood)), HEAD + 4096)

        def hear(found: tuple[Any, ...]) -> None:
            call.end()
            then(found)

        call = self.peer.call(holder, HEAD, serve, hear, lambda why: then(None), ASK_S)
