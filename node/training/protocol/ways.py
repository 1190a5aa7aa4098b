"""To whom a peer measures its way: whom it has to reach for its round and its paths, of more peers
than it can tell of. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from node.core.ids import PeerId
from node.training.protocol.pace import MOST_WAYS


def whom_to_measure(
    me: PeerId, stage: int, company: Mapping[PeerId, int], leader: PeerId | None
) -> list[PeerId]:
    """At most :data:`MOST_WAYS` peers of ``company`` (with their stages): all where they are no
    more, else the leader, replicas of the own stage, of each other stage as many. The leader itself
    measures all.

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
