"""The state machine that decides which order of the run's owner is in force at a peer, and whether
the peer posts it for others.

Enters: orders whose signatures were checked, looks at the directory, and time. Leaves:
:class:`Keep`, :class:`Obey`, :class:`PostOrders`. Never: a clock, a signature, a stage.

An order is in force from its own moment on, which all peers know before: so they finish the same
epoch. One order of each kind is kept, so a pause holds until an end that comes later. Every peer
may post the orders that it knows, and the first few in PeerId order do, so that an owner who is
away is not needed.
"""

from collections.abc import Mapping, Sequence
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
    """The orders in the directory, by the peer that has posted them. The own ones may be there."""

    orders: Mapping[PeerId, Sequence[Order]]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


OrderEvent = Told | Looked | Tick


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the orders that hold to the disk; ``newer`` is one of them."""

    newer: Order
    orders: tuple[Order, ...]


@dataclass(frozen=True, slots=True)
class Obey:
    """An order is in force from now on."""

    order: Order


@dataclass(frozen=True, slots=True)
class PostOrders:
    """Post the orders that hold for :data:`LIFE_S` seconds."""

    orders: tuple[Order, ...]


OrderAction = Keep | Obey | PostOrders


class Orders:
    """The machine. ``held``: the order that counts of each kind, an end last; ``obeyed``: held
    orders that are in force."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.held: tuple[Order, ...] = ()
        self.obeyed: frozenset[Order] = frozenset()
        self._posted: tuple[tuple[Order, ...], float] | None = None
        """The orders that this peer posted last, and the time of the posting."""

    @property
    def known(self) -> Order | None:
        """The order that outranks the others; None before the first one."""
        if not self.held:
            return None
        return self.held[-1]

    @property
    def in_force(self) -> Order | None:
        """The order in force that outranks the others; None for none."""
        return next((order for order in reversed(self.held) if order in self.obeyed), None)

    def of_kind(self, order: Order) -> Order | None:
        """The order held of the same kind as this one."""
        return next((held for held in self.held if held.is_final is order.is_final), None)

    def handle(self, event: OrderEvent, now: float, wall: float) -> list[OrderAction]:
        """Handle one event. ``now``: seconds of a clock that nobody sets; ``wall``: Unix
        seconds."""
        done: list[OrderAction] = []
        match event:
            case Told(order, kept):
                done += self._learn(order, kept)
                if done and not kept:
                    done += self._post(now)
            case Looked(told):
                for orders in told.values():
                    for order in orders:
                        done += self._learn(order, False)
                if self._should_post(told, now):
                    done += self._post(now)
            case Tick():
                pass
        return done + self._due(wall)

    def due_s(self, wall: float) -> float | None:
        """Seconds until a held order is in force; None if all are."""
        waiting = [order.begins for order in self._waiting()]
        if not waiting:
            return None
        return max(0.0, min(waiting) - wall)

    def _waiting(self) -> list[Order]:
        """The held orders that are not in force yet; none once an end is in force."""
        if any(order.is_final for order in self.obeyed):
            return []
        return [order for order in self.held if order not in self.obeyed]

    def _learn(self, order: Order, kept: bool) -> list[OrderAction]:
        if not order.outranks(self.of_kind(order)):
            return []
        if any(held.is_final for held in self.obeyed):
            return []
        others = [held for held in self.held if held.is_final is not order.is_final]
        self.held = tuple(sorted([*others, order], key=lambda o: o.is_final))
        self.obeyed &= {*self.held}
        if kept:
            return []
        return [Keep(order, self.held)]

    def _due(self, wall: float) -> list[OrderAction]:
        due = [order for order in self._waiting() if order.begins <= wall]
        if not due:
            return []
        if due[-1].is_final:
            due = due[-1:]
        self.obeyed |= {*due}
        return [Obey(order) for order in due]

    def _should_post(self, told: Mapping[PeerId, Sequence[Order]], now: float) -> bool:
        """Return True if too few peers before this one post the held orders, and this peer has not
        posted them a short time ago."""
        held = self.held
        if not held:
            return False
        before = [p for p, orders in told.items() if tuple(orders) == held and p < self.me]
        if len(before) >= POSTERS:
            return False
        if self._posted is None or self._posted[0] != held or self.me not in told:
            return True
        return now - self._posted[1] >= RENEW_S

    def _post(self, now: float) -> list[OrderAction]:
        if not self.held:
            return []
        self._posted = self.held, now
        return [PostOrders(self.held)]
