"""What a peer's machine remembers of its part in one micro-batch: two legs, each with a step and a
delivery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from node.core.ids import PeerId
from node.core.journey import Hop
from node.pipeline.delivery import Delivery
from node.pipeline.events import Claim, Direction
from node.pipeline.route import skipped


class Step(IntEnum):
    """How far one direction of a visit is."""

    ABSENT = 0
    HELD = 1
    """The tensor is here."""
    COMPUTED = 2
    PASSED = 3
    """The next peer ACCEPTED the result."""
    SETTLED = 4
    """The next peer is DONE with it."""


@dataclass(slots=True)
class Leg:
    """One direction of a visit: its step, and the delivery of its result."""

    step: Step = Step.ABSENT
    told: bool = False
    delivery: Delivery | None = None
    target: PeerId | None = None
    """Whom the attempt under way goes to; None between attempts and after giving up."""


@dataclass(slots=True)
class Visit:
    """This peer's part in one micro-batch. ``journey`` is what it knows of the others."""

    journey: list[Hop]
    forward: Leg = field(default_factory=Leg)
    backward: Leg = field(default_factory=Leg)
    gradient_from: PeerId | None = None
    named: bool = False
    """The origin says that this peer counts."""
    committed: bool = False
    """Decided: its share was counted, or thrown away."""

    def leg(self, way: Direction) -> Leg:
        return self.forward if way is Direction.FORWARD else self.backward

    def same_way(self, claim: Claim) -> bool:
        """Whether the claim's tensor, or the activation it is the gradient of, came over the stages
        ours came over."""
        return skipped(self.journey, claim.position) == skipped(claim.journey, claim.position)

    def learn(self, way: Direction, claim: Claim) -> None:
        """Take over the sender's journey on its side of this peer: the sender knows it best."""
        here, journey = claim.position, claim.journey
        if way is Direction.FORWARD:
            self.journey[:here] = journey[:here]
        else:
            self.journey[here + 1 :] = journey[here + 1 :]

    def undecided(self, position: int) -> bool:
        """Whether a gradient was given on from this block stage and the origin has not said yet if
        the share counts."""
        back = self.backward
        given = back.step >= Step.PASSED or (back.step is Step.COMPUTED and back.target is not None)
        return given and not self.committed and 0 < position < len(self.journey) - 1

    def open_ways(self) -> Sequence[Direction]:
        """Directions in which a peer waits for our DONE."""
        return [
            w for w in Direction if self.leg(w).step is not Step.ABSENT and not self.leg(w).told
        ]
