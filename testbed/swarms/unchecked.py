"""A recorder of simulated swarms that checks nothing."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from node.averaging.exchange.machine import RoundMachine
from node.epoch.leader.leader import Leader
from node.epoch.member import Member
from node.pipeline.machine import PipelineMachine
from node.sim.process import SimPeer
from node.sim.watch import HistoryRecorder


class Unchecked(HistoryRecorder):
    """Checks nothing: checkers cost more than the swarm. Errors still end the run."""

    def leader(self, peer: SimPeer, machine: Leader) -> Leader:
        return machine

    def member(self, peer: SimPeer, machine: Member) -> Member:
        return machine

    def pipeline(self, peer: SimPeer, machine: PipelineMachine) -> PipelineMachine:
        return machine

    def round(self, peer: SimPeer, machine: RoundMachine) -> RoundMachine:
        return machine

    def gave(
        self, peer: SimPeer, samples: tuple[int, ...], sums: Mapping[str, Tensor], tokens: int
    ) -> int:
        return tokens

    def _nothing(self, *args: Any, **more: Any) -> None:
        """Not checked."""

    began = step = stepping = settling = restored = accept = _nothing
