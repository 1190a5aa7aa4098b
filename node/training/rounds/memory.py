"""What outer rounds keep of one stage at a peer, in bytes, so that it is known before anything is
loaded. Pure arithmetic. Enters: [outer], the bytes of every part, how many cells a stage has at
least. Leaves: bytes in main memory and on the device. Never: what exists while tensors travel (the
round's own; no activations are stashed then), a change that the owner makes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.averaging.strategies.keys import MOST_TOGETHER
from node.averaging.strategies.outer import OuterSettings
from node.training.protocol.meetings import pieces


@dataclass(frozen=True, slots=True)
class OuterBytes:
    """Main memory but for ``device``: ``anchor`` with outer momentum, ``undone``: what takes their
    place until a version is settled, ``owed``: debts of error feedback and late words of a quorum,
    ``sent``: a fragment's deltas that are under way, or what a cell gives in a window,
    ``served``: a server's values and the answers that it keeps, or the partners' parameters and the
    mean. ``device``: the parameters that a fragment, or what a cell gives, was taken from."""

    anchor: int = 0
    undone: int = 0
    residual: int = 0
    sent: int = 0
    served: int = 0
    device: int = 0

    @property
    def main(self) -> int:
        return self.anchor + self.undone + self.residual + self.sent + self.served


def outer_bytes(s: OuterSettings, sizes: Mapping[str, int], cells: int) -> OuterBytes:
    """The most that a peer keeps of a stage with parts of these ``sizes`` (bytes in fp32), whatever
    is asked of it: any member may speak for its cell, average any part in its turn, and serve.
    ``cells``: of the stage; more make a server keep more."""
    if s.windows:
        return _in_windows(s, sum(sizes.values()))
    if not s.every or s.carries not in ("deltas", "state"):
        return OuterBytes()
    stage = sum(sizes.values())
    under_way = (
        max(sum(sizes[name] for name in piece) for piece in pieces(sizes, s.fragments))
        if s.overlap
        else 0
    )
    # A part is served whole. The value before the round stays until its version is settled; every
    # cell's answer is another one.
    share = max(-(-stage // s.shards), *sizes.values()) if s.pushes else 0
    return OuterBytes(
        anchor=2 * stage,
        undone=2 * stage,
        residual=stage * (2 * s.feedback + (s.quorum > 0)),  # words and means; late words
        sent=under_way,
        served=(1 + cells) * share,
        device=under_way,
    )


def _in_windows(s: OuterSettings, stage: int) -> OuterBytes:
    """Of cells that lead themselves: the parameters that are given stay on the device until the
    window is over; what is given of them, the partners' and the mean are in main memory."""
    most = {"moshpit": max(s.grid, default=2), "butterfly": MOST_TOGETHER}.get(s.strategy, 2)
    state = s.carries in ("state", "deltas")
    tensors = stage * (2 if state else 1)
    anchor = 2 * stage if state else 0
    return OuterBytes(
        anchor=anchor,
        undone=anchor,
        residual=3 * stage if s.feedback else 0,
        sent=tensors,
        served=most * tensors,
        device=stage,
    )
