"""Places at a scarce resource (calls, connections, records, reservations, circuits): half of them
for established peers, the rest for strangers, who share it by address block and by key. Pure.

Keys cost nothing, and addresses little. So a stranger that finds the strangers' half full takes the
place of the holder that has most: first of the address block with most places, in it of the peer
with most. A newcomer with its first call is let in while a flood of others hold theirs.

Strangers can take turns besides, at places for a moment. A stranger without a place takes the
oldest place of the stranger with the most turns lately, once that place was held for
:data:`LONG_S`.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from node.core.ids import PeerId

H = TypeVar("H", bound=Hashable)

BLOCK_4 = 24
"""Bits of an IPv4 address that its block has."""
BLOCK_6 = 48
"""Bits of an IPv6 address that its block has: an end site (RFC 6177)."""
MORE = 2
"""Least ratio of the turns of two strangers at which the one with more gives way. The turn for
which the other asks counts."""
LONG_S = 1.0
"""Seconds for which a place is kept in any case: most messages are complete by then."""
REMEMBERED = 16
"""Turns that count, for each place."""


def block_of(address: str) -> str:
    """The block of an IP address, for example "192.0.2.0/24". Text that is no address is a block of
    its own."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    bits = BLOCK_4 if parsed.version == 4 else BLOCK_6
    return str(ipaddress.ip_network((parsed, bits), strict=False))


@dataclass(frozen=True, slots=True)
class Taken(Generic[H]):
    """The answer to a request for a place. ``refusal``: the reason there is none, "" for a place.
    ``evicted``: the holder that lost its place to it."""

    refusal: str = ""
    evicted: H | None = None

    def __bool__(self) -> bool:
        return not self.refusal


@dataclass
class _Block(Generic[H]):
    held: dict[PeerId, list[H]] = field(default_factory=dict)
    """Holders of each peer, oldest first."""

    @property
    def count(self) -> int:
        return sum(map(len, self.held.values()))


class PlacesByPeer(Generic[H]):
    """``total`` places, at most ``per_peer`` for each peer.

    ``established(peer)`` says if ``peer`` is a member of the run or has worked with this peer; it
    is asked when a place is taken. ``what`` names the places in refusals, for example "calls".
    ``by_turns``: strangers take turns, by the ``now`` of :meth:`take`.
    """

    def __init__(
        self,
        what: str,
        total: int,
        per_peer: int,
        established: Callable[[PeerId], bool] = lambda peer: False,
        *,
        by_turns: bool = False,
    ) -> None:
        self.what = what
        self.total = total
        self.per_peer = per_peer
        self.established = established
        self._holders: dict[H, tuple[PeerId, str | None]] = {}
        """Peer of each holder, and the block of a stranger; None for an established peer."""
        self._counts: dict[PeerId, int] = {}
        self._blocks: dict[str, _Block[H]] = {}
        self._strangers = 0
        self._by_turns = by_turns
        self._turns = Counter[PeerId]()
        """Places that each stranger had lately."""
        self._since: dict[H, float] = {}
        """Time at which each stranger's holder came; kept where strangers take turns."""

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, holder: H) -> bool:
        return holder in self._holders

    def held_by(self, peer: PeerId) -> int:
        """The number of places that ``peer`` holds."""
        return self._counts.get(peer, 0)

    @property
    def strangers(self) -> int:
        """The number of places that strangers hold."""
        return self._strangers

    def take(self, holder: H, peer: PeerId, block: str = "", now: float = 0.0) -> Taken[H]:
        """Give ``holder`` a place of ``peer`` until :meth:`leave`. ``block``: see :func:`block_of`;
        ``now``: monotonic seconds.

        The caller ends what ``evicted`` names; its place is gone already.
        """
        established = self.established(peer)
        found = self._found(peer, established, block, now)
        if not found:
            return found
        if established:
            self._enter(holder, peer, None, found.evicted)
            return found
        self._enter(holder, peer, block, found.evicted)
        if self._by_turns:
            self._since[holder] = now
            self._had_turn(peer)
        return found

    def has_room(self, peer: PeerId, block: str = "", now: float = 0.0) -> bool:
        """Return True if :meth:`take` would give ``peer`` a place."""
        return bool(self._found(peer, self.established(peer), block, now))

    def leave(self, holder: H) -> None:
        """Give a place back. A holder that has none, or lost it, changes nothing."""
        found = self._holders.pop(holder, None)
        if found is None:
            return
        peer, block = found
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
        if block is None:
            return
        self._strangers -= 1
        self._since.pop(holder, None)
        held = self._blocks[block].held
        held[peer].remove(holder)
        if not held[peer]:
            del held[peer]
        if not held:
            del self._blocks[block]

    def _found(self, peer: PeerId, established: bool, block: str, now: float) -> Taken[H]:
        """The answer to a request for a place; nothing is changed."""
        if self.held_by(peer) >= self.per_peer:
            return Taken(f"{self.per_peer} {self.what} of this peer are open")
        full = len(self._holders) >= self.total
        if established:
            if not full:
                return Taken()
            evicted = self._greediest()
            if evicted is None:
                return Taken(f"all {self.total} {self.what} are taken by peers of the run")
            return Taken(evicted=evicted)
        share = self.total // 2
        if self._strangers < share and not full:
            return Taken()
        evicted = self._greedier(peer, block)
        if evicted is None and self._by_turns:
            evicted = self._served(peer, block, now)
        if evicted is None:
            return Taken(f"the {share} {self.what} for strangers are taken")
        return Taken(evicted=evicted)

    def _enter(self, holder: H, peer: PeerId, block: str | None, evicted: H | None) -> None:
        if evicted is not None:
            self.leave(evicted)
        self._holders[holder] = peer, block
        self._counts[peer] = self.held_by(peer) + 1
        if block is not None:
            self._strangers += 1
            self._blocks.setdefault(block, _Block()).held.setdefault(peer, []).append(holder)

    def _had_turn(self, peer: PeerId) -> None:
        self._turns[peer] += 1
        if self._turns.total() > REMEMBERED * self.total:
            halves = {p: turns // 2 for p, turns in self._turns.items()}
            self._turns = +Counter(halves)

    def _greediest(self) -> H | None:
        """The newest holder of the stranger with most places, in the block with most."""
        if not self._blocks:
            return None
        most = max(self._blocks.values(), key=lambda block: block.count)
        return max(most.held.values(), key=len)[-1]

    def _greedier(self, peer: PeerId, block: str) -> H | None:
        """A holder with clearly more than ``peer`` in ``block`` has; None when all have as little.

        A holder with a single place more than the newcomer keeps it: they would only change
        places.
        """
        if not self._blocks:
            return None
        most = max(self._blocks.values(), key=lambda b: b.count)
        own = self._blocks.get(block, _Block[H]())
        if most.count > own.count + 1:
            return max(most.held.values(), key=len)[-1]
        richest = max(own.held.values(), key=len, default=[])
        if len(richest) > len(own.held.get(peer, ())) + 1:
            return richest[-1]
        return None

    def _served(self, peer: PeerId, block: str, now: float) -> H | None:
        """The oldest holder of the peer of the block with the most turns. None if that peer had not
        clearly more turns than ``peer``, if the holder came within :data:`LONG_S`, or if ``peer``
        has a place already."""
        held = self._blocks.get(block, _Block[H]()).held
        if peer in held:
            return None
        old = {
            p: holders[0] for p, holders in held.items() if now - self._since[holders[0]] >= LONG_S
        }
        served = max(old, key=lambda p: self._turns[p], default=None)
        if served is None or self._turns[served] < MORE * (self._turns[peer] + 1):
            return None
        return old[served]
