"""How much of us one stranger may take: seats for things that last, a rate for things that happen. Pure."""

from __future__ import annotations

from node.core.ids import PeerId
from node.identity.rates import PEERS_KEPT, Rate

__all__ = ["PEERS_KEPT", "Rate", "Seats"]


class Seats:
    """Concurrent holds, limited for each peer and in all."""

    def __init__(self, per_peer: int, total: int) -> None:
        self.per_peer, self.total = per_peer, total
        self._held: dict[PeerId, int] = {}
        self._all = 0

    def free(self, peer: PeerId) -> bool:
        """Whether :meth:`take` would succeed."""
        return self._all < self.total and self._held.get(peer, 0) < self.per_peer

    def take(self, peer: PeerId) -> bool:
        """Hold a seat until :meth:`leave`; False when there is none."""
        if not self.free(peer):
            return False
        self._held[peer] = self._held.get(peer, 0) + 1
        self._all += 1
        return True

    def leave(self, peer: PeerId) -> None:
        """Give one seat back. Raises ValueError when the peer holds none."""
        left = self._held.get(peer, 0) - 1
        if left < 0:
            raise ValueError("gave back a seat that was not taken")
        self._all -= 1
        if left:
            self._held[peer] = left
        else:
            del self._held[peer]
