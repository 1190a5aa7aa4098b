"""Reasons for which no epoch is under way, as leader and members know them. Pure.

A :class:`Wait` carries the reason as data. Its text names peers by their short ids; the code that
shows it to people adds names and the next step (:mod:`node.control.causes`).
"""

from dataclasses import dataclass
from enum import Enum

from node.core.ids import PeerId, short, stage_names


class Lack(Enum):
    """The thing that is missing."""

    ENDS = "ends"
    """No peer at the ends is in sight, so nobody leads."""
    PLAN = "plan"
    """The leader, ``peers[0]``, has not sent the next plan."""
    NEXT_LEADER = "next-leader"
    """This leader leaves, and the next one has not taken over."""
    PEERS = "peers"
    """``stages`` have too few peers."""
    SETTLING = "settling"
    """A new leader waits a moment, so that peers that start together can report."""
    WAYS = "ways"
    """Pairs of peers have not reached each other; ``detail`` names them."""
    EPOCH = "epoch"
    """No peer of ``stages`` holds the parameters of ``epoch``."""
    COMMON = "common"
    """No version is held by every stage. ``stages`` lack the nearest one, the version of
    ``epoch``."""
    SIDE = "side"
    """``peers[0]`` says that its side of a partitioned network has counted more tokens."""
    HISTORY = "history"
    """Other peers were asked for the plan behind ``epoch``."""
    VOTERS = "voters"
    """Too few voters report to this leader: ``here`` of ``of``. ``peers`` are the absent ones."""
    MEMORY = "memory"
    """The members cannot hold the optimizer's state; ``detail`` has the numbers."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A reason for waiting. The fields that belong to ``lack`` are set."""

    lack: Lack
    stages: tuple[int, ...] = ()
    peers: tuple[PeerId, ...] = ()
    epoch: int = 0
    here: int = 0
    of: int = 0
    detail: str = ""

    def __str__(self) -> str:
        stages = stage_names(self.stages)
        peer = short(self.peers[0]) if self.peers else ""
        match self.lack:
            case Lack.ENDS:
                return "a peer at the ends"
            case Lack.PLAN:
                return f"a plan from {peer}"
            case Lack.NEXT_LEADER:
                return "the next leader"
            case Lack.PEERS:
                return f"a peer for {stages}"
            case Lack.SETTLING:
                return "more peers"
            case Lack.WAYS | Lack.MEMORY:
                return self.detail
            case Lack.EPOCH:
                return f"a peer of {stages or 'every stage'} that holds epoch {self.epoch}"
            case Lack.COMMON:
                text = "a version that every stage holds"
                if stages:
                    text += f": nobody at {stages} has epoch {self.epoch} as the others have it"
                return text
            case Lack.SIDE:
                return f"the side of {peer}, which says it has counted more tokens"
            case Lack.HISTORY:
                return f"the history of epoch {self.epoch}"
            case Lack.VOTERS:
                absent = ", ".join(map(short, self.peers[:3]))
                if len(self.peers) > 3:
                    absent += f" and {len(self.peers) - 3} more"
                missing = f"; without {absent}" if absent else ""
                return f"more than half of the voters ({self.here} of {self.of} are here{missing})"
