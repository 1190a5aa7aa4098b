"""The service around the state machine of orders: looks into the directory, reads and posts orders,
keeps the orders that hold on the disk, and tells the daemon which order is in force.

Enters: texts of orders, from peers and from the operator. Leaves: calls of ``obey``. Never: the
work that an order stops; :mod:`node.app.daemon` does that.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from node.core.clock import Clock
from node.core.errors import LocalFault, Refused
from node.core.ids import PeerId, RunId
from node.dht.record import DirectoryPort
from node.dht.topics import ORDERS
from node.orders.machine import (
    LIFE_S,
    Keep,
    Looked,
    Obey,
    OrderEvent,
    Orders,
    PostOrders,
    Tick,
    Told,
)
from node.orders.order import Order, Verb, read, read_all, together
from node.telemetry.events import Journal

LOOK_S = 5.0
"""Seconds between two looks into the directory."""
BLAME = 1.0
"""Weight of the fault of a peer that posts something other than an order of the owner."""


@dataclass(frozen=True, slots=True)
class OrderPorts:
    """The keeper's ports. ``keep``: writes the text of orders to the disk, and raises LocalFault if
    it cannot; ``obey``: an order is in force; ``fault``: counts a fault of a peer; ``pace``:
    factor of the pause between two looks, 1 or more, so that a crowd looks more rarely."""

    directory: DirectoryPort
    clock: Clock
    journal: Journal
    keep: Callable[[str], None]
    obey: Callable[[Order], None]
    fault: Callable[[PeerId, str, float], None]
    pace: Callable[[], float] = lambda: 1.0


class OrderKeeper:
    """The orders of one run's owner at one peer. ``kept``: the text that the disk has, empty for
    none. An order on the disk is in force at once."""

    def __init__(
        self, me: PeerId, run_id: RunId, owner: str, ports: OrderPorts, kept: str = ""
    ) -> None:
        self.orders = Orders(me)
        self._run_id = run_id
        self._owner = owner
        self._ports = ports
        self._blamed: dict[PeerId, bytes] = {}
        """The posting for which a peer was blamed last: it is read again with every look."""
        self._news = asyncio.Event()
        self._seen: dict[bytes, tuple[Order, ...]] = {}
        """Postings of the last look, which several peers make alike, and the orders in them."""
        self._to_post: tuple[Order, ...] = ()
        """Orders that the machine wants posted."""
        if kept:
            try:
                for order in self._read_all(kept):
                    self._feed(Told(order, kept=True))
            except Refused as e:
                ports.journal.emit("daemon", "order-ignored", f"on the disk: {e}", "warning")

    # ----------------------------------------------------------- looking

    @property
    def known(self) -> Order | None:
        """The order that outranks the others; None before the first one."""
        return self.orders.known

    @property
    def number(self) -> int:
        """The largest number of an order that holds; 0 before the first one."""
        return max((order.number for order in self.orders.held), default=0)

    @property
    def text(self) -> str:
        """The text of all orders that hold, for other peers."""
        return together(self.orders.held)

    @property
    def paused(self) -> bool:
        """True while the owner's pause is in force."""
        return self._is_in_force(Verb.PAUSE)

    @property
    def ended(self) -> bool:
        """True once the owner has ended the run."""
        return self._is_in_force(Verb.END)

    def _is_in_force(self, verb: Verb) -> bool:
        return any(order.verb is verb for order in self.orders.obeyed)

    # ----------------------------------------------------------- orders in

    def read(self, text: str) -> Order:
        """The order in a text. Raises Refused."""
        return read(self._run_id, self._owner, text)

    def _read_all(self, text: str) -> tuple[Order, ...]:
        return read_all(self._run_id, self._owner, text)

    def give(self, text: str) -> Order:
        """Take an order from the operator of this daemon, and return it. Raises Refused for an
        order that the owner did not sign for this run, and for an order that no longer counts."""
        order = self.read(text)
        held = self.orders.of_kind(order)
        if held is not None and order != held and not order.outranks(held):
            what = f"order {order.number} is older than order {held.number}, which is known here"
            raise Refused(what, "see  tutti status")
        if self.ended and order != held:
            raise Refused("the run was ended, and an end is final", "see  tutti status")
        if self.paused and order.verb is Verb.PAUSE and order.begins > self._ports.clock.wall():
            # It would replace the pause that holds, and peers that join would work until then.
            raise Refused("the run is paused already", "let it go on first:  tutti swarm resume")
        self._feed(Told(order))
        return order

    def hear(self, text: str) -> None:
        """Take orders that another peer has told; a text that holds none is ignored."""
        try:
            for order in self._read_all(text):
                self._feed(Told(order))
        except Refused as e:
            self._ports.journal.emit("daemon", "order-ignored", str(e), "warning")

    async def look(self) -> None:
        """Look into the directory once. A peer that posts something other than an order of the
        owner is blamed once for each posting."""
        found = await self._ports.directory.look(ORDERS)
        orders: dict[PeerId, tuple[Order, ...]] = {}
        for peer, posting in found.items():
            try:
                held = self._seen.get(posting.body)
                if held is None:
                    held = self._read_all(posting.body.decode("ascii"))
                    self._seen[posting.body] = held
                orders[peer] = held
            except (Refused, UnicodeDecodeError) as e:
                if self._blamed.get(peer) != posting.body:
                    self._ports.fault(peer, f"posts an order that is none: {e}", BLAME)
                self._blamed[peer] = posting.body
        self._blamed = {peer: body for peer, body in self._blamed.items() if peer in found}
        there = {posting.body for posting in found.values()}
        self._seen = {body: held for body, held in self._seen.items() if body in there}
        self._feed(Looked(orders))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._wait()
            if self.orders.due_s(self._ports.clock.wall()) == 0.0:
                self._feed(Tick())
                continue
            await self.look()
            await self._post()

    async def _wait(self) -> None:
        """Wait until the next look, an order that is due, or one that is to be posted."""
        seconds = LOOK_S * self._ports.pace()
        due_s = self.orders.due_s(self._ports.clock.wall())
        if due_s is not None:
            seconds = min(seconds, due_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()
        await self._post()

    # ----------------------------------------------------------- the machine

    def _feed(self, event: OrderEvent) -> None:
        clock = self._ports.clock
        for action in self.orders.handle(event, clock.now(), clock.wall()):
            match action:
                case Keep(order, held):
                    self._keep(order, held)
                case Obey(order):
                    self._ports.obey(order)
                case PostOrders(held):
                    self._to_post = held
                    self._news.set()

    async def _post(self) -> None:
        orders = self._to_post
        if not orders:
            return
        stored = await self._ports.directory.post(ORDERS, together(orders).encode(), LIFE_S)
        # A posting that no node has stored is repeated after the next look.
        if stored and self._to_post is orders:
            self._to_post = ()

    def _keep(self, order: Order, held: tuple[Order, ...]) -> None:
        journal = self._ports.journal
        wall = self._ports.clock.wall()
        text = f"{order.verb} of the run, {order.words(wall)}"
        journal.emit("daemon", "order", text, number=order.number, verb=order.verb.value)
        try:
            self._ports.keep(together(held))
        except LocalFault as e:
            text = f"a restart forgets the order of the run's owner: {e}"
            journal.emit("daemon", "order-not-kept", text, "warning")
