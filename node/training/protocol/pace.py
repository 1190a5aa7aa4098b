"""How often peers send heartbeats to their leader, the shortest times that they wait for each
other, in seconds, and to whom they measure their ways. Pure.

How much longer a wait is follows from measurements: :mod:`node.core.patience` for answers,
:mod:`node.training.leader.deadlines` for work.
"""

import math
from collections.abc import Collection, Mapping

from node.core.ids import PeerId
from node.identity.faults import TokenBucket

HEARTBEAT_S = 1.0
"""Between two heartbeats to the leader. A peer that misses some (Waits.late_s) is probed, and
counts as dead if the probe is not answered either."""
ASK_AFTER = 0.6
"""Share of the silence that means death after which a silent peer is asked whether it lives."""
STANDS_S = 30.0
"""For an answer over a connection that stands: the transport's own probes are answered there by a
process that is alive, however busy it is, and end the connection of one that is not."""
CALM_AFTER_S, CALM_BEAT_S = 10.0, 4.0
"""After so many seconds in which nothing happened and nothing is new: the time between two
heartbeats then."""
COMPANY = 24
"""With more peers that answer each other the time between two heartbeats is longer in proportion to
their number, up to :data:`CALM_BEAT_S`: one leader takes them all."""
BEAT_AT_MOST_S = 0.1
"""The shortest time between two heartbeats, however urgent the next one is."""
TICK_S = 0.25
"""Between two looks at the clock."""
TELL_TIMEOUT_S = 10.0
"""For a note whose receiver may have to load a checkpoint first, where there is no connection
yet."""
TELL_TRIES = 3
"""Attempts to tell the leader something that it must hear."""
PROBE_TIMEOUT_S = 1.5
"""For a sign of life over a new connection."""
REDIAL_TIMEOUT_S = 1.0
"""Seconds, beside the usual time of a dial, for an answer over a new connection after the previous
one broke. The transport closes a connection only after one of its own probes was not answered, so
the peer is probably dead."""
REDIAL_MOST_S = 3.0
"""Most seconds for such an answer, the dial included."""
CLAIM_S = 5.0
"""A heartbeat to a peer that does not lead shows that its sender has lost its leader. It counts as
evidence for this time."""
PROBE_WAYS_S, PROBE_AGAIN_S, PROBE_FAILED_S = 0.5, 120.0, 5.0
"""Between two checks of which connections to measure, between two measurements of one connection,
and after a measurement that failed."""
RECALL_FROM, RECALL_S = 4, 2.0
"""Peers that are asked, one after another, for the plan behind a version, and for one of them to
tell what it remembers."""
WAY_TIMEOUT_S, WAYS_AT_ONCE = 15.0, 4
"""For a way that may have to be found first (a relay, a punched hole), and how many are measured at
the same time."""
MOST_WAYS = 64
"""Peers to which a way is measured and told."""
STRANGERS_PER_S = 2.0
STRANGERS_AT_ONCE = 64.0
"""Sustained rate and burst of the strangers to which a way is measured. A record of the directory
costs its writer one signature, and a way that does not exist costs milliseconds here."""
FEW_STRANGERS = 8
"""Strangers that do not answer, up to which they are shown as peers without a way."""
SEARCH_S = 0.3
"""CPU that the leader may spend on better paths for the next epoch, in a thread."""
ACCUSE_EVERY_S = 0.5
"""One peer is accused at most so often."""


def beat_s(peers: int, calm: bool) -> float:
    """Seconds until the next heartbeat. ``peers``: others that answer; ``calm``: nothing has
    happened for long, and nothing is new."""
    if calm:
        return CALM_BEAT_S
    return min(CALM_BEAT_S, HEARTBEAT_S * max(1.0, peers / COMPANY))


class StrangerTurns:
    """Turns of the strangers to which a way is measured: peers in the directory that this one
    neither works with nor has met. Pure."""

    def __init__(self) -> None:
        self._rate = TokenBucket(STRANGERS_PER_S, STRANGERS_AT_ONCE)
        self._tried: dict[PeerId, float] = {}

    def next(self, strangers: Collection[PeerId], most: int, now: float) -> list[PeerId]:
        """At most ``most`` of ``strangers`` whose turn it is at monotonic second ``now``: the one
        tried longest ago first."""
        self._tried = {p: at for p, at in self._tried.items() if p in strangers}
        waiting = sorted(strangers, key=lambda p: (self._tried.get(p, -math.inf), p))
        found: list[PeerId] = []
        for peer in waiting:
            if len(found) >= most or now - self._tried.get(peer, -math.inf) < PROBE_FAILED_S:
                break
            if not self._rate.allow(_ALL, now):
                break
            self._tried[peer] = now
            found.append(peer)
        return found


_ALL = PeerId("")
"""The name under which all strangers share one bucket."""


def whom_to_measure(
    me: PeerId, stage: int, company: Mapping[PeerId, int], leader: PeerId | None
) -> list[PeerId]:
    """Whom a peer has to reach for its round and its paths: at most :data:`MOST_WAYS` of
    ``company`` (peers with their stages). All where they are no more, else the leader, replicas of
    the own stage, of each other stage as many. The leader itself measures all.

    A pair is of use only if both measure it. So of a larger stage those choose each other that
    follow each other in the order of PeerIds, and of two stages those at the same place of theirs.
    """
    if me == leader or len(company) <= MOST_WAYS:
        return sorted(company.keys() - {me})
    found = dict.fromkeys([leader] if leader is not None and leader in company else ())
    stages: dict[int, list[PeerId]] = {}
    for peer, at in sorted({**company, me: stage}.items()):
        stages.setdefault(at, []).append(peer)
    mates = stages.pop(stage)
    here, most = mates.index(me), MOST_WAYS * 3 // 4
    first = here // most * most
    found |= dict.fromkeys(p for p in mates[first : first + most] if p != me)
    place = (here + 0.5) / len(mates)
    each = (MOST_WAYS - len(found)) // max(1, len(stages))
    for peers in stages.values():
        begin = round(place * len(peers) - each / 2)
        begin = max(0, min(begin, len(peers) - each))
        found |= dict.fromkeys(peers[begin : begin + each])
    return list(found)[:MOST_WAYS]
