"""Errors of a fetch. Kept apart from the state itself, so that a command that fetches nothing does
not load torch."""

from collections.abc import Mapping

from node.core.errors import PeerFault
from node.core.ids import PeerId

NOT_HELD = "not held here"
"""The refusal of a donor without the state that was asked for."""


class NoDonor(PeerFault):
    """No donor could give the state whole. ``reasons``: the reason of each; verified pieces are
    kept for a retry."""

    def __init__(self, what: str, reasons: Mapping[PeerId, str]) -> None:
        said = "; ".join(f"{peer[-6:]}: {why}" for peer, why in reasons.items()) or "nobody to ask"
        super().__init__(next(iter(reasons), PeerId("")), f"no donor for {what} ({said})")
        self.reasons = dict(reasons)

    def holds_nothing(self, peer: PeerId) -> bool:
        """Return True if this peer said that it has nothing of the state. After any other reason it
        may have it: it was busy, or out of reach for a while."""
        return self.reasons.get(peer, "").endswith(f": {NOT_HELD}")
