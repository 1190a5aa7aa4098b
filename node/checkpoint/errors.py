"""Errors of a fetch. Kept apart from the state itself, so that a command that fetches nothing does
not load torch."""

from collections.abc import Mapping

from node.core.errors import PeerFault
from node.core.ids import PeerId


class NoDonor(PeerFault):
    """No donor could give the state whole. ``reasons``: the reason of each; verified pieces are
    kept for a retry."""

    def __init__(self, what: str, reasons: Mapping[PeerId, str]) -> None:
        said = "; ".join(f"{peer[-6:]}: {why}" for peer, why in reasons.items()) or "nobody to ask"
        super().__init__(next(iter(reasons), PeerId("")), f"no donor for {what} ({said})")
        self.reasons = dict(reasons)
