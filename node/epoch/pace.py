"""Times between heartbeats, the shortest times for which peers wait for each other, in seconds, and
the peers to which connections are measured. Pure.

Measurements make a wait longer: :mod:`node.core.patience` for answers,
:mod:`node.epoch.leader.deadlines` for work.
"""

import math
from collections.abc import Mapping, Sequence, Set

from node.core.ids import PeerId
from node.identity.faults import TokenBucket

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats to the leader. A peer that misses some (Waits.late_s) is probed,
and counts as dead if it does not answer the probe either."""
ASK_AFTER = 0.6
"""Share of the silence that means death after which a silent peer is asked whether it lives."""
STANDS_S = 30.0
"""Seconds for an answer over an open connection. The transport's own probes are answered there by a
living process, however busy it is; they end the connection of a dead one."""
CALM_AFTER_S = 10.0
"""Seconds without an event or news after which heartbeats slow down."""
CALM_BEAT_S = 4.0
"""Seconds between two heartbeats of a peer that has nothing new to say."""
COMPANY = 24
"""Number of peers that answer above which the time between two heartbeats grows in proportion to
their number, up to :data:`CALM_BEAT_S`: one leader receives them all."""
BEAT_AT_MOST_S = 0.1
"""Least seconds between two heartbeats, however urgent the next one is."""
TICK_S = 0.25
"""Seconds between two looks at the clock of a leader."""
IDLE_TICK_S = 0.9
"""The same for a peer that does not lead, which has nothing to decide by the clock; less than the
gap that counts as a delay of the process (:data:`node.core.patience.GAP_S`)."""
TELL_TIMEOUT_S = 10.0
"""Seconds for a note whose receiver may have to load a checkpoint first, if there is no connection
yet."""
TELL_TRIES = 3
"""Attempts to tell the leader something that it must hear."""
PROBE_TIMEOUT_S = 1.5
"""Seconds for a sign of life over a new connection."""
REDIAL_TIMEOUT_S = 1.0
"""Seconds, beside the usual time of a dial, for an answer over a new connection after the previous
one broke. The transport closes a connection only after one of its own probes was not answered, so
the peer is probably dead."""
REDIAL_MOST_S = 3.0
"""Most seconds for such an answer, the dial included."""
PROBE_WAYS_S = 0.5
"""Seconds between two checks of which connections to measure."""
WAYS_REST_S = 5.0
"""Seconds without such a check after one that found nothing to measure, while the peers in sight
and the leader stay the same."""
PROBE_AGAIN_S = 120.0
"""Seconds between two measurements of one connection."""
PROBE_FAILED_S = 5.0
"""Seconds until the next measurement after one that failed."""
RECALL_FROM = 4
"""Peers that are asked, one after another, for the plan behind a version."""
RECALL_S = 2.0
"""Seconds that each of them has to answer."""
WAY_TIMEOUT_S = 15.0
"""Seconds to measure a connection that may have to be found first (a relay, a punched hole)."""
WAYS_AT_ONCE = 4
"""Connections measured at the same time."""
MOST_WAYS = 64
"""Peers to which connections are measured and reported."""
ALL_OWN = 8
"""Replicas of a stage up to which all own parts of it. In a larger stage those do that every other
replica reaches: a new replica takes part as soon as it reaches the owners, and ways between all
pairs are found meanwhile."""
MOST_LACKING = 64
"""Peers that a leader names to one that does not reach them."""
LARGE_STAGE = 16
"""Peers of a stage up to which a way to each is found at once."""
FACING = 8
"""Peers of another, large stage to which ways are found at once."""
SPARE_WAY_S = 20.0
"""Seconds between two measurements of new ways that are spare: nothing waits for them. In a crowd
of newcomers, connections between all pairs would take most of their machines' time."""
STRANGERS_PER_S = 2.0
STRANGERS_AT_ONCE = 64.0
"""Sustained rate and burst of the strangers to which a way is measured. A record of the directory
costs its writer one signature, and a way that does not exist costs milliseconds here."""
FEW_STRANGERS = 8
"""Strangers that do not answer, up to which they are shown as peers without a way."""
SEARCH_S = 0.3
"""Seconds of CPU time that the leader may spend on better paths for the next epoch, in a thread."""
ACCUSE_EVERY_S = 0.5
"""Least seconds between two accusations of the same peer."""


def beat_s(peers: int, calm: bool) -> float:
    """Seconds until the next heartbeat. ``peers``: number of others that answer; ``calm``: nothing
    has happened for long, and nothing is new."""
    if calm:
        return CALM_BEAT_S
    return min(CALM_BEAT_S, HEARTBEAT_S * max(1.0, peers / COMPANY))


class StrangerTurns:
    """Turns of the strangers to which a way is measured: peers in the directory that this one
    neither works with nor has met. Pure."""

    def __init__(self) -> None:
        self._rate = TokenBucket(STRANGERS_PER_S, STRANGERS_AT_ONCE)
        self._tried: dict[PeerId, float] = {}

    def next(
        self, strangers: Set[PeerId], measuring: Set[PeerId], slots: int, now: float
    ) -> list[PeerId]:
        """Strangers whose turn it is at monotonic second ``now``, the one tried longest ago first.
        ``measuring``: the peers to which a way is being measured; ``slots``: how many more may be.
        One of :data:`WAYS_AT_ONCE` is left for peers that were met: strangers that do not answer
        hold the others for :data:`WAY_TIMEOUT_S`."""
        self._tried = {peer: at for peer, at in self._tried.items() if peer in strangers}
        most = min(slots, WAYS_AT_ONCE - 1 - len(measuring & strangers))
        waiting = sorted(
            strangers - measuring, key=lambda peer: (self._tried.get(peer, -math.inf), peer)
        )
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
    """Peers that ``me`` has to reach for its round and its paths: at most :data:`MOST_WAYS` of
    ``company`` (peers with their stages). All of them if they are no more than that, else the
    leader, replicas of the own stage, and an equal number of every other stage. The leader itself
    measures all.

    A pair is of use only if both peers measure it. So in a large stage the peers form consecutive
    blocks in PeerId order and measure within their block; between two stages, peers at the same
    relative place in the order measure each other.
    """
    if me == leader or len(company) <= MOST_WAYS:
        return sorted(company.keys() - {me})
    found = dict.fromkeys([leader] if leader is not None and leader in company else ())
    stages: dict[int, list[PeerId]] = {}
    for peer, at in sorted({**company, me: stage}.items()):
        stages.setdefault(at, []).append(peer)
    mates = stages.pop(stage)
    here = mates.index(me)
    most = MOST_WAYS * 3 // 4
    first = here // most * most
    found |= dict.fromkeys(p for p in mates[first : first + most] if p != me)
    each = (MOST_WAYS - len(found)) // max(1, len(stages))
    for peers in stages.values():
        found |= dict.fromkeys(facing(me, mates, peers, each))
    return list(found)[:MOST_WAYS]


def facing(
    me: PeerId, mates: Sequence[PeerId], peers: Sequence[PeerId], count: int
) -> Sequence[PeerId]:
    """At most ``count`` of the ``peers`` of another stage: those at about the same relative place
    in their order as ``me`` among its ``mates``, so that most pairs choose each other."""
    place = (mates.index(me) + 0.5) / len(mates)
    begin = round(place * len(peers) - count / 2)
    begin = max(0, min(begin, len(peers) - count))
    return peers[begin : begin + count]
