"""Bytes that the windows of one stage keep at a peer, known before anything is loaded. Pure
arithmetic. Enters: [outer], the bytes of every part. Leaves: bytes in main memory and on the
device. Never: a change that the owner makes later."""

from collections.abc import Mapping
from dataclasses import dataclass

from node.averaging.strategies.keys import MOST_TOGETHER
from node.averaging.strategies.outer import OuterSettings


@dataclass(frozen=True, slots=True)
class OuterBytes:
    """Bytes in main memory, except ``device``. ``anchor``: anchor with outer momentum, and their
    successors until a version is settled; ``residual``: error-feedback residuals; ``sent``: the
    cell's own contribution to a window; ``served``: the contributions of the partners and the mean;
    ``device``: the parameters that the own contribution was made from."""

    anchor: int = 0
    residual: int = 0
    sent: int = 0
    served: int = 0
    device: int = 0

    @property
    def main(self) -> int:
        return self.anchor + self.residual + self.sent + self.served


def outer_bytes(s: OuterSettings, sizes: Mapping[str, int]) -> OuterBytes:
    """The most bytes that a peer keeps for the windows of a stage with parts of these ``sizes``
    (bytes in fp32). The contributed parameters stay on the device until the window is over; the
    contribution made from them, the partners' contributions and the mean are in main memory."""
    if not s.windows:
        return OuterBytes()
    stage = sum(sizes.values())
    most = 2
    if s.strategy == "moshpit":
        most = max(s.grid, default=2)
    elif s.strategy == "butterfly" or s.served:
        most = MOST_TOGETHER
    tensors = stage
    anchor = 0
    if s.carries in ("state", "deltas"):
        tensors = 2 * stage
        anchor = 4 * stage
    return OuterBytes(
        anchor=anchor,
        residual=3 * stage if s.feedback else 0,
        sent=tensors,
        served=most * tensors,
        device=stage,
    )
