"""A stranger in the simulated swarm: an ends peer by its own word, with a PeerId below everybody's,
that says what ends a run if it is believed. It holds no parameters, and what it says goes through
the same checks as what any peer says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Member, Path, Plan, Version
from node.sim.directory import Body
from node.sim.world import HEAD, Call, Host
from node.training.protocol import events as ev

if TYPE_CHECKING:
    from node.sim.peer import SimPeer
    from node.sim.swarm import Swarm

EVERY_S = 0.5
FAKE = "f" * 32


class Stranger(Host):
    """Says, in turns, that a plan of term 2^62 is in force, that the run is over, that it holds a
    history of 2^53 tokens, and again what a leader said before; and in the directory, that it
    leads."""

    def __init__(self, swarm: Swarm, name: PeerId) -> None:
        super().__init__(swarm.world, name)
        self.swarm, self._turn = swarm, 0
        self._heard: Plan | None = None
        self.after(0.0, self._speak)

    def hear(self, peer: PeerId, note: Any, answer: Callable[[str | None], None]) -> None:
        """It agrees to everything."""
        answer(None)

    def _speak(self) -> None:
        if not self.alive:
            return
        body = Body(ENDS, "training", 10**6, leads=True, speed=1e6, follows=self.name)
        self.swarm.directory.post(self.name, body, self.world.now, self.wall)
        for peer in self.swarm.live():
            self._tell(peer.name, self._word(peer))
            self._heard = self._heard or peer.member.plan
        self._turn += 1
        self.after(EVERY_S, self._speak)

    def _word(self, peer: SimPeer) -> Any:
        match self._turn % 4:
            case 0:
                return ev.PlanArrived(self._plan(peer, 2**62))
            case 1:
                return ev.PlanArrived(self._plan(peer, peer.member.term + 1, ends=True))
            case 2:
                at = Version(self.swarm.setup.epochs, FAKE)
                return ev.Heard(self.name, ENDS, at, "d", 1.0, term=2**40, tokens=2**53)
        return ev.PlanArrived(self._heard or self._plan(peer, peer.member.term + 1))

    def _plan(self, peer: SimPeer, term: int, ends: bool = False) -> Plan:
        at = peer.member.at
        members = tuple(Member(p.name, p.stage) for p in self.swarm.live())
        hops = tuple(
            Hop(s, self.swarm.live(s)[0].name)
            for s in range(1, self.swarm.setup.stages + 1)
            if self.swarm.live(s)
        )
        paths = () if ends else (Path(0, self.name, (0,), hops),)
        owners = {n: p.name for p in self.swarm.live() for n in p.labour.names}
        return Plan(at.epoch, term, self.name, members, paths, owners, lineage=at.lineage)

    def _tell(self, peer: PeerId, note: Any) -> None:
        def serve(there: SimPeer, call: Call) -> None:
            there.hear(self.name, note, call.say)

        call = self.call(peer, HEAD, serve, lambda reason: call.end(), lambda why: None, 5.0)
