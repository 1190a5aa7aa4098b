"""Virtual time: a queue of events, hosts that can die or stand still, calls between them that can
fail.

A call is one remote procedure: the request goes over, any number of messages come back, either side
may end it. Its messages keep their order; messages of different calls need not. A host that stands
still (SIGSTOP) hears everything when it goes on; a dead one resets its connections; behind a wall,
messages are sent again and again until the call is given up.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from node.core.ids import PeerId
from node.sim.links import RETRANSMIT_S, Links
from node.transport.settings import TransportSettings

SILENT_S = TransportSettings.keepalive_s + TransportSettings.keepalive_timeout_s
"""A connection over which nothing can be heard is given up after so long (gRPC keepalive)."""
LONGEST_RETRY_S = 3.0
HEAD = 256
"""Bytes of a message without tensors."""


class Host:
    """Something with an address that can die, come back and stand still."""

    def __init__(self, world: World, name: PeerId) -> None:
        self.world, self.name = world, name
        self.alive, self.paused, self.life = True, False, 0
        self.since = 0.0
        self.inbox: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.calls: dict[Call, None] = {}
        self.skew = 0.0

    def after(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        """Do it then, unless this host has died by then; a host that stands still does it when it
        goes on."""
        world = self.world
        world.number += 1
        heapq.heappush(world.queue, (world.now + seconds, world.number, self, self.life, do, args))

    @property
    def wall(self) -> float:
        """This host's wall clock, seconds."""
        return self.world.now + self.skew

    def call(
        self,
        peer: PeerId,
        nbytes: int,
        serve: Callable[[Any, Call], object],
        hear: Callable[[Any], object],
        lost: Callable[[str], object],
        timeout: float,
        bulk: int = 0,
    ) -> Call:
        """Begin a call: ``serve(host, call)`` runs there, ``hear(message)`` here for every answer,
        ``lost(why)`` at most once, when the call fails. ``bulk`` bytes follow the head of
        ``nbytes``; ``call.bulk_s`` says how much later."""
        call = Call(self, peer, hear, lost)
        target = self.world.hosts.get(peer)
        if target is None:
            self.after(0.0, call.fail, "nobody is known by that name")
            return call
        call.target, call.life = target, target.life
        self.calls[call] = None
        target.calls[call] = None
        if bulk:
            call.bulk_s = self.world.links.travel(self.name, peer, bulk, self.world.now)
        self.after(timeout, call.fail, "no answer in time")
        call.carry(self, target, nbytes, call.arrive, (serve,), 0)
        return call

    def connection_lost(self, peer: PeerId) -> None:
        """The connection to a peer was reset."""


class Call:
    """See :meth:`Host.call`. ``gone``, set by the side that serves, is told when the caller has
    hung up."""

    __slots__ = (
        "_last_back",
        "bulk_s",
        "gone",
        "hear",
        "life",
        "lost",
        "over",
        "source",
        "source_life",
        "stuck",
        "target",
    )

    def __init__(
        self,
        source: Host,
        peer: PeerId,
        hear: Callable[[Any], object],
        lost: Callable[[str], object],
    ) -> None:
        self.source, self.hear, self.lost = source, hear, lost
        self.source_life, self.life = source.life, 0
        self.target: Host | None = None
        self.over = self.stuck = False
        self.bulk_s = 0.0
        self.gone: Callable[[], object] | None = None
        self._last_back = 0.0

    def say(self, message: Any, nbytes: int = HEAD) -> None:
        """From the side that serves to the caller."""
        if not self.over and self.target is not None:
            self.carry(self.target, self.source, nbytes, self._heard, (message,), 0)

    def end(self) -> None:
        """The caller hangs up: nothing more is heard of this call on its side."""
        if not self.over:
            self.over = True
            self.source.calls.pop(self, None)
            self._tell_gone()

    def fail(self, why: str) -> None:
        """The caller's side gives the call up."""
        if not self.over:
            self.end()
            self.lost(why)

    def arrive(self, serve: Callable[[Any, Call], object]) -> None:
        serve(self.target, self)

    def carry(
        self,
        a: Host,
        b: Host,
        nbytes: int,
        do: Callable[..., object],
        args: tuple[Any, ...],
        tries: int,
    ) -> None:
        """Bring a message from ``a`` to ``b``; behind a wall, try again later."""
        if self.over:
            return
        world = self.source.world
        if world.links.cut(a.name, b.name):
            if not self.stuck:
                self.stuck = True
                self.source.after(SILENT_S, self._silent)
            world.push(
                min(RETRANSMIT_S * 2**tries, LONGEST_RETRY_S),
                None,
                self.carry,
                (a, b, nbytes, do, args, tries + 1),
            )
            return
        seconds = world.links.travel(a.name, b.name, nbytes, world.now)
        if b is self.source:
            # Messages of one stream come in order.
            seconds = max(seconds, self._last_back - world.now)
            self._last_back = world.now + seconds
        world.push(seconds, None, self._land, (a, b, nbytes, do, args))

    def _land(
        self, a: Host, b: Host, nbytes: int, do: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if self.over:
            return
        world = self.source.world
        if world.links.cut(a.name, b.name):
            self.carry(a, b, nbytes, do, args, 1)
            return
        self.stuck = False
        if b is self.target:
            if not b.alive or b.life != self.life:
                world.push(
                    world.links.travel(b.name, a.name, 0, world.now),
                    self.source,
                    self.fail,
                    ("connection refused",),
                )
                return
            if b.paused:
                self.source.after(SILENT_S, self._unheard, world.now)
        elif not b.alive or b.life != self.source_life:
            return
        if b.paused:
            b.inbox.append((do, args))
        else:
            do(*args)

    def _heard(self, message: Any) -> None:
        if not self.over:
            self.hear(message)

    def _silent(self) -> None:
        if self.stuck:
            self.fail("the connection is silent")

    def _unheard(self, since: float) -> None:
        if self.target is not None and self.target.paused and self.target.since <= since:
            self.fail("the connection is silent")

    def _tell_gone(self) -> None:
        target = self.target
        if target is None:
            return
        target.calls.pop(self, None)
        if self.gone is not None and target.alive and target.life == self.life:
            gone, self.gone = self.gone, None
            world = self.source.world
            cut = world.links.cut(self.source.name, target.name)
            target.after(
                SILENT_S
                if cut
                else world.links.travel(self.source.name, target.name, 0, world.now),
                gone,
            )


class World:
    """``after_event`` is called when an event is done."""

    def __init__(self, seed: int, links: Links | None = None) -> None:
        self.rng = random.Random(seed)
        self.links = links or Links(random.Random(seed + 1), 0.02, 0.0, 0.0, 0.0)
        self.now = 0.0
        self.events = 0
        self.hosts: dict[PeerId, Host] = {}
        self.queue: list[
            tuple[float, int, Host | None, int, Callable[..., object], tuple[Any, ...]]
        ] = []
        self.number = 0

    def push(
        self,
        seconds: float,
        host: Host | None,
        do: Callable[..., object],
        args: tuple[Any, ...] = (),
    ) -> None:
        """Do it ``seconds`` from now, if ``host`` (None: nobody's) still lives then."""
        self.number += 1
        heapq.heappush(
            self.queue, (self.now + seconds, self.number, host, host.life if host else 0, do, args)
        )

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Go on until that time, until nothing is left to happen, or until ``stop()``, which is
        asked now and then."""
        queue = self.queue
        while queue and queue[0][0] <= until:
            when, _, host, life, do, args = heapq.heappop(queue)
            if host is not None:
                if not host.alive or host.life != life:
                    continue
                if host.paused:
                    host.inbox.append((do, args))
                    continue
            self.now = when
            self.events += 1
            do(*args)
            if stop is not None and not self.events & 63 and stop():
                return
        if not queue or queue[0][0] > until:
            self.now = max(self.now, until)

    # ----------------------------------------------------------- what happens to hosts

    def kill(self, host: Host) -> None:
        """SIGKILL: connections are reset, nothing it holds in memory is left."""
        if not host.alive:
            return
        host.alive, host.paused = False, False
        host.inbox.clear()
        calls, host.calls = list(host.calls), {}
        for call in calls:
            if call.target is host:
                call.source.calls.pop(call, None)
                if not self.links.cut(host.name, call.source.name):
                    self.push(
                        self.links.travel(host.name, call.source.name, 0, self.now),
                        call.source,
                        call.fail,
                        ("connection reset",),
                    )
            else:
                call.end()
        for other in self.hosts.values():
            if (
                other.alive
                and self.links.used(host.name, other.name)
                and not self.links.cut(host.name, other.name)
            ):
                self.push(
                    self.links.travel(host.name, other.name, 0, self.now),
                    other,
                    other.connection_lost,
                    (host.name,),
                )

    def pause(self, host: Host) -> None:
        """SIGSTOP."""
        if host.alive and not host.paused:
            host.paused, host.since = True, self.now

    def resume(self, host: Host) -> None:
        """SIGCONT: everything that came meanwhile is heard now, in order."""
        if not host.alive or not host.paused:
            return
        host.paused = False
        inbox, host.inbox = host.inbox, []
        for do, args in inbox:
            self.push(0.0, host, do, args)
