"""Recordings of a simulated swarm, one for each process that took part, and their replay."""

from collections.abc import Iterator
from dataclasses import replace

from node.coordinator.recording.player import Played, Player
from node.coordinator.recording.recorder import Recorder
from node.core.ids import PeerId
from node.sim.process import SimPeer
from node.sim.swarm import MachineFactory


class Tapes:
    """Recordings in memory, in the order in which the processes began."""

    def __init__(self) -> None:
        self.tapes: list[tuple[PeerId, list[bytes]]] = []

    def factory(self, make: MachineFactory | None = None) -> MachineFactory:
        """A factory of machines that are recorded here. Plain machines only: a recorded one does
        not come from the factory's own makers of leaders and members."""
        return replace(make or MachineFactory(), recorder=self._recorder)

    def replay(self) -> Iterator[tuple[PeerId, Played]]:
        """Play every recording into fresh machines."""
        for peer, lines in self.tapes:
            yield peer, Player().play(lines)

    def _recorder(self, peer: SimPeer) -> Recorder:
        lines: list[bytes] = []
        self.tapes.append((peer.name, lines))
        return Recorder(lines.append)
