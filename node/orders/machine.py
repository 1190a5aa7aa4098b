"""The state machine that decides which order of the run's owner is in force at a peer, and whether
the peer posts it for others.

Enters: orders whose signatures were checked, looks at the directory, and time. Leaves:
:class:`Keep`, :class:`Obey`, :class:`Post`. Never: a clock, a signature, a stage.

An order is in force from its own moment on, which all peers know before: so they finish the same
epoch. Every peer may post the order that it knows, and the first few in PeerId order do, so that
an owner who is away is not needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from node.core.ids import PeerId
from node.orders.order import Order

POSTERS = 6
"""Peers that post an order when all know it."""
LIFE_S = 600.0
"""Life of a posting in seconds, the longest that the directory takes."""
RENEW_S = 150.0
"""Seconds after which a posting is posted again."""


@dataclass(frozen=True, slots=True)
class Told:
    """An order that the operator hands in, that another peer has told, or that the disk has."""

    order: Order
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Looked:
    """The orders in the directory, by the peer that has posted each. The own one may be there."""

    orders: Mapping[PeerId, Order]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


OrderEvent = Told | Looked | Tick


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a newer order to the disk."""

    order: Order


@dataclass(frozen=True, slots=True)
class Obey:
    """An order is in force from now on."""

    order: Order


@dataclass(frozen=True, slots=True)
class Post:
    """Post an order for :data:`LIFE_S` seconds."""

    order: Order


OrderAction = Keep | Obey | Post


class Orders:
    """The machine. ``known``: the order that counts, None before the first one; ``in_force``: the
    one that was obeyed last."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.known: Order | None = None
        self.in_force: Order | None = None
        self._posted: tuple[Order, float] | None = None
        """The order that this peer posted last, and the time of the posting."""

    def handle(self, event: OrderEvent, now: float, wall: float) -> list[OrderAction]:
        """Handle one event. ``now``: seconds of a clock that nobody sets; ``wall``: Unix
        seconds."""
        done: list[OrderAction] = []
        match event:
            case Told(order, kept):
                done += self._learn(order, kept)
                if done and not kept:
                    done += self._post(now)
            case Looked(orders):
                for order in orders.values():
                    done += self._learn(order, False)
                if self._should_post(orders, now):
                    done += self._post(now)
            case Tick():
                pass
        return done + self._due(wall)

    def due_s(self, wall: float) -> float | None:
        """Seconds until the known order is in force; None if it is, or there is none."""
        if self.known is None or self.known == self.in_force:
            return None
        return max(0.0, self.known.begins - wall)

    def _learn(self, order: Order, kept: bool) -> list[OrderAction]:
        if not order.outranks(self.known):
            return []
        self.known = order
        if kept:
            return []
        return [Keep(order)]

    def _due(self, wall: float) -> list[OrderAction]:
        known = self.known
        if known is None or known == self.in_force or known.begins > wall:
            return []
        self.in_force = known
        return [Obey(known)]

    def _should_post(self, orders: Mapping[PeerId, Order], now: float) -> bool:
        """Return True if too few peers before this one post the known order, and this peer has not
        posted it a short time ago."""
        known = self.known
        if known is None:
            return False
        before = [peer for peer, order in orders.items() if order == known and peer < self.me]
        if len(before) >= POSTERS:
            return False
        if self._posted is None or self._posted[0] != known or self.me not in orders:
            return True
        return now - self._posted[1] >= RENEW_S

    def _post(self, now: float) -> list[OrderAction]:
        if self.known is None:
            return []
        self._posted = self.known, now
        return [Post(self.known)]
