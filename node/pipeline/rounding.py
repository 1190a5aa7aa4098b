"""Errors of the tensors that were sent, by the peer that got them: the price of the number format.
Pure: measurements in.

An error is relative: the 2-norm of the differences between the numbers that were computed and those
that the receiver reads, over the 2-norm of the computed ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from node.core.ids import PeerId
from node.core.newest import Newest

ALPHA = 0.1
"""Weight of a new measurement; the first ones weigh more."""
PEERS_KEPT = 256
"""Peers whose errors are kept: those that got a tensor last."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """``wire``: the number format of the newest tensor to a peer; ``error``: the moving average of
    the relative errors in it; ``measured``: tensors behind the average."""

    wire: str
    error: float = 0.0
    measured: int = 0


NOTHING_SENT = Rounding("")
"""Of a peer that has got no tensor."""


class SentRounding:
    """The newest format and its error, by peer."""

    def __init__(self) -> None:
        self._peers = Newest[PeerId, Rounding](PEERS_KEPT)

    def sent(self, peer: PeerId, wire: str, error: float | None) -> None:
        """``peer`` has got a tensor in the format ``wire``, with this relative error; None where it
        was not measured. An average is of one format: another one begins anew."""
        before = self._peers.get(peer)
        if before is None or before.wire != wire:
            before = Rounding(wire)
        if error is not None:
            count = before.measured + 1
            weight = max(1 / count, ALPHA)
            before = Rounding(wire, before.error + weight * (error - before.error), count)
        self._peers[peer] = before

    def peers(self) -> Mapping[PeerId, Rounding]:
        """The newest format and its error of every peer that has got a tensor."""
        return dict(self._peers)
