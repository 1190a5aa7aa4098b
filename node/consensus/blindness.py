"""Blindness of a leader: it sees nobody in the directory, and its cell waits for it. Pure. Enters:
what the leader sees, time. Leaves: the time for which it lets another peer lead. Never: the choice
of the next leader (:mod:`node.consensus.election`)."""

import math

BLIND_S = 10.0
"""Seconds that a leader that cannot plan has to see nobody before it lets another peer lead."""
BLIND_FOR_S = 60.0
"""Seconds for which it lets another peer lead while it sees nobody. Then it may be alone."""


class Blindness:
    """The blindness of one peer. Its clock may be wrong, so that the records of others have expired
    for it, and its own for them."""

    def __init__(self) -> None:
        self._since: float | None = None
        """Time since which this peer has held up others and seen nobody."""
        self._until = -math.inf
        """Time until which another peer may lead instead."""

    def look(self, now: float, *, sees: bool, holds_up: bool) -> bool:
        """Take a look at the directory. ``sees``: it shows another peer; ``holds_up``: others wait
        for this peer, which leads. Return True if another peer may lead instead, for
        :data:`BLIND_FOR_S` from now on."""
        if sees:
            self._until = -math.inf
        if sees or not holds_up:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < BLIND_S:
            return False
        self._until = now + BLIND_FOR_S
        return True

    def lasts(self, now: float) -> bool:
        """Return True while another peer may lead instead."""
        return now < self._until
