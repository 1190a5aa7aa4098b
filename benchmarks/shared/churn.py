"""Death and arrival without end: now and then a peer is killed, and a stranger with a new identity
joins in its place.

A newcomer comes as a volunteer would: by an invite, choosing its stage itself. The last replica of
a stage in the newest plan is never killed, since the swarm would rightly stand still.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from testbed.daemons.fleet import WORKING, Hang, Peer
from testbed.swarms.arena import Arena


@dataclass
class Churn:
    """``protected``: labels that are never killed. ``leading``: nobody dies but the leader.
    ``invites``: newcomers that join by one invite. ``given_up``: newcomers that ended before they
    took part."""

    arena: Arena
    seed: int = 0
    protected: Sequence[str] = ()
    leading: bool = False
    invites: int = 1
    kills: list[tuple[float, str]] = field(default_factory=list)
    """Time and label of each killed peer."""
    postponed: int = 0
    leaders: int = 0
    arrived_s: list[float] = field(default_factory=list)
    """Seconds from a newcomer's start to its place in a plan."""
    given_up: list[str] = field(default_factory=list)
    _waiting: dict[str, float] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._invite = ""

    def strike(self) -> str:
        """Kill one peer and send for another; returns the victim's label, "" when no peer could be
        spared."""
        victim = self._choose()
        if victim is None:
            self.postponed += 1
            return ""
        with contextlib.suppress(Hang):
            self.leaders += self.arena.leader() is victim
        self.kills.append((time.time(), victim.label))
        victim.kill()
        self.arena.forget(victim.label)
        self._replace(victim.label)
        return victim.label

    def mind(self) -> None:
        """Record newcomers that have arrived; one that ended is replaced by another."""
        for label, began in list(self._waiting.items()):
            peer = self.arena.peers.get(label)
            if peer is None or peer.status().state in WORKING:
                del self._waiting[label]
                if peer is not None:
                    self.arrived_s.append(time.monotonic() - began)
            elif not peer.running:
                del self._waiting[label]
                self.given_up.append(f"{label}: {peer.child.tail(3)}")
                self.arena.forget(label)
                self._invite = ""
                self._replace(label)

    def _choose(self) -> Peer | None:
        standing = {
            label: s for label, p in self.arena.peers.items() if (s := p.status()).state in WORKING
        }
        most = max((s.epoch for s in standing.values()), default=0)
        standing = {label: s for label, s in standing.items() if s.epoch >= most - 1}
        count = Counter(s.stage for s in standing.values())
        able = sorted(
            label
            for label, s in standing.items()
            if count[s.stage] > 1 and label not in self.protected
        )
        if self.leading:
            chief = self.arena.leader()
            able = [label for label in able if self.arena.peers[label] is chief]
        return self.arena.peers[self._dice.choice(able)] if able else None

    def _replace(self, dead: str) -> None:
        """Send for a newcomer; its host is that of the dead peer."""
        box = self.arena.box
        if self._number % self.invites == 0 or not self._invite:
            self._invite = self._invited()
        self._number += 1
        label = f"new-{self._number}"
        box.move(label, box.host(dead))
        self.arena.add(box.invited(label, self._invite)).start()
        self._waiting[label] = time.monotonic()

    def _invited(self) -> str:
        """An invite of any living peer. Raises Hang."""
        givers = [p for p in self.arena.peers.values() if p.status().state in WORKING]
        for giver in self._dice.sample(givers, len(givers)):
            with contextlib.suppress(Hang):
                return self.arena.box.invite(giver)
        raise Hang("nobody gives an invite")
