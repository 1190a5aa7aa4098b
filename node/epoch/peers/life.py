"""Signs of life of the peers, and of the leader's own process. Pure. Enters: the times at which
peers were heard or probed, ticks of the clock. Leaves: peers that are silent for unusually long.
Never: a judgement that a peer is dead, which is the leader's."""

import math

from node.core.ids import PeerId
from node.epoch.pace import ASK_AFTER, STANDS_S

HALF_LIFE_S = 60.0
"""Seconds after which a remembered silence counts half."""
PAUSES = 2.0
"""Multiple of a peer's longest recent silence after which a new one is too long."""
MOST_PAUSE_S = 30.0
"""Most seconds of that longest silence that count."""
UNANSWERED_S = 3 * STANDS_S
"""Seconds after which a probe without any result counts as failed."""


class SignsOfLife:
    """The last sign of life of each peer that is here. ``late_s``: seconds of silence that mean
    death, for a peer that is heard regularly."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self.heard: dict[PeerId, float] = {}
        """Time of the last sign of life of each peer."""
        self._pauses: dict[PeerId, float] = {}
        """The longest recent silence of each peer, which counts half after :data:`HALF_LIFE_S`."""
        self._probed: dict[PeerId, float] = {}
        """Silent peers that are being probed, and the time since when."""
        self._ticked = math.inf

    def ticked(self, now: float) -> float:
        """The clock has ticked. Returns the time of the tick before, infinite for the first."""
        before = self._ticked
        self._ticked = now
        return before

    def alive(self, peer: PeerId, now: float) -> None:
        """A sign of life of a peer that is here."""
        silent = now - self.heard.get(peer, now)
        pause = self._pauses.get(peer, 0.0) * 0.5 ** (silent / HALF_LIFE_S)
        self._pauses[peer] = max(silent, pause)
        self.heard[peer] = now

    def is_late(self, peer: PeerId, now: float) -> bool:
        """Return True if the silence of a peer that is here would mean death, if it were heard
        regularly."""
        return now - self.heard[peer] > self._late_s

    def probe(self, peer: PeerId, now: float) -> bool:
        """Return True if a silent peer is not being probed yet; from now on it is."""
        if peer in self._probed:
            return False
        self._probed[peer] = now
        return True

    def is_unanswered(self, peer: PeerId, now: float) -> bool:
        """Return True if the probe of a peer has had no result for :data:`UNANSWERED_S`."""
        return now - self._probed[peer] > UNANSWERED_S

    def probed(self, peer: PeerId) -> None:
        """The probe of a peer has ended, or is of no use any more."""
        self._probed.pop(peer, None)

    def forget(self, peer: PeerId) -> None:
        """The peer is here no more."""
        self.heard.pop(peer, None)
        self._pauses.pop(peer, None)
        self._probed.pop(peer, None)

    def silent_s(self, peer: PeerId, now: float) -> float:
        """Seconds since the last sign of life of a peer that is silent for longer than usual, 0 for
        any other peer."""
        heard = self.heard.get(peer)
        if heard is not None and self._is_silent(peer, now):
            return now - heard
        return 0.0

    def silent(self, now: float, slack: float) -> list[PeerId]:
        """Peers that are silent for longer than usual, in the order in which they came. ``slack``:
        seconds by which messages of others are heard late."""
        return [peer for peer in self.heard if self._is_silent(peer, now, slack)]

    def _is_silent(self, peer: PeerId, now: float, slack: float = 0.0) -> bool:
        # A peer on a busy machine is heard less regularly.
        pause = PAUSES * min(self._pauses[peer], MOST_PAUSE_S)
        return now - self.heard[peer] > ASK_AFTER * (max(self._late_s, pause) + slack)
