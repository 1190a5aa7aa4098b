"""Conduct of the members, as their leader has seen it: which peers are left out of plans, and for
how long. Pure.

Enters: members that were late, that differed from others or gave impossible parameters, and members
that did their part. Leaves: peers to leave out, and how heavy a fault is. Never: a clock, whether a
stage can do without a peer (:mod:`node.training.leader.roster`), what becomes of the epoch.

A peer that costs the others time is left out for a multiple of that time, twice as long after each
offence. So one peer costs a bounded share of the time. An honest peer that was only slow comes back
with its next word on the epoch that it missed.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from node.core.ids import PeerId
from node.core.newest import Newest

FIRST_S = 15.0
"""Shortest time, in seconds, for which a peer is left out."""
SHARE = 20.0
"""A late peer is left out for this many times the seconds that the others waited for it."""
MOST_S = 3600.0
"""Longest time, in seconds, for which a peer is left out that may only be slow."""
MOST_DOUBLINGS = 10
MOST_PATIENCE = 8
"""Most times as long that a peer is waited for which was late before."""
FORGIVEN_AFTER = 8
"""Epochs in a row, done in time and in agreement, after which one offence is forgotten."""
ABSENT_AFTER, ABSENT_S = 5, 90.0
"""Plans that need a peer and that it fails in a row; seconds for which it then counts as absent.
Its claim to hold the version is not believed meanwhile."""
DELIBERATE = 3
"""Offences without one good epoch between them that are no accident any more."""
PAIR_DISPUTES = 3
"""Disputes of the same two peers after which they never work at one stage together again."""
CAUSE, CAUSE_FOR_GOOD = 2, 3
"""A peer is taken for the cause of its disputes once it had some with this many peers that agree
with others; with the second number it is left out for good."""
PEERS_KEPT = 4096
"""Peers that are remembered; keys cost nothing."""


@dataclass(slots=True)
class Record:
    """One peer's conduct.

    ``offences``: not forgotten yet; ``in_a_row``: since the last good epoch. ``good_in_a_row``:
    good epochs since the last offence. ``agreed``: epochs after which another replica had made the
    same parameters. ``until``: time until which the peer is left out, ``absent_until``: until which
    it counts as absent. ``deaths``: in rounds, ``failures``: of plans that needed the peer, both
    since the last good epoch. ``missed``: hash of the plan whose end the peer missed. ``disputes``:
    number of disputes with each other peer. ``finished``: epochs that it did in time.
    """

    finished: int = 0
    offences: int = 0
    in_a_row: int = 0
    good_in_a_row: int = 0
    agreed: int = 0
    until: float = -math.inf
    absent_until: float = -math.inf
    deaths: int = 0
    failures: int = 0
    missed: str = ""
    disputes: dict[PeerId, int] = field(default_factory=dict)


class Conduct:
    """The records of all peers that this leader has worked with lately."""

    def __init__(self) -> None:
        self._records: Newest[PeerId, Record] = Newest(PEERS_KEPT)

    def _record(self, peer: PeerId) -> Record:
        found = self._records.get(peer) or Record()
        self._records[peer] = found
        return found

    # ----------------------------------------------------------- what is decided

    def left_out(self, now: float) -> frozenset[PeerId]:
        """Peers that are not to be planned with."""
        return frozenset(p for p, record in self._records.items() if now < record.until)

    def absent(self, now: float) -> frozenset[PeerId]:
        """Peers that count as absent, also where nobody else could start from a version."""
        return frozenset(p for p, record in self._records.items() if now < record.absent_until)

    def proven(self, peer: PeerId) -> bool:
        """Return True if the peer finished an epoch, and the last one that it was in."""
        record = self._records.get(peer)
        return record is not None and record.finished > 0 and not record.in_a_row

    def worked(self, peers: Iterable[PeerId]) -> None:
        """Record that these peers worked in an epoch that another peer led."""
        for peer in peers:
            record = self._record(peer)
            record.finished = max(1, record.finished)

    def patience(self, peers: Collection[PeerId]) -> float:
        """Times as long that peers are waited for which were late before. An honest peer that is
        slow gets through in the end, and one that is not is left out for longer in proportion."""
        known = [record for p in peers if (record := self._records.get(p)) is not None]
        in_a_row = max((record.in_a_row for record in known), default=0)
        return float(min(2**in_a_row, MOST_PATIENCE))

    def left_out_s(self, peer: PeerId, now: float) -> float:
        """Seconds for which the peer is still left out; 0 for none."""
        record = self._records.get(peer)
        return max(0.0, record.until - now) if record is not None else 0.0

    # ----------------------------------------------------------- what is seen

    def good(self, peer: PeerId, agrees: bool) -> None:
        """Record an epoch that the peer finished in time. ``agrees``: another replica made the same
        parameters."""
        record = self._record(peer)
        record.finished += 1
        record.agreed += agrees
        record.in_a_row = record.deaths = record.failures = 0
        record.good_in_a_row += 1
        if record.good_in_a_row >= FORGIVEN_AFTER:
            record.good_in_a_row = 0
            record.offences = max(0, record.offences - 1)

    def late(self, peer: PeerId, plan_hash: str, waited_s: float, now: float) -> float:
        """Record that the others waited for ``waited_s`` seconds in vain for the peer to finish the
        round of a plan. Returns the weight of its fault, 0 for what can be an accident."""
        record = self._offence(peer, SHARE * waited_s, now)
        record.missed = plan_hash
        return 1.0 if record.in_a_row >= DELIBERATE else 0.0

    def died(self, peer: PeerId, waited_s: float, now: float) -> None:
        """Record that the peer was found dead or frozen in the middle of a round, and that the
        others waited ``waited_s`` seconds. Any process may die once; a peer that dies in every
        epoch is left out."""
        record = self._record(peer)
        record.deaths += 1
        if record.deaths > 1:
            self._offence(peer, SHARE * waited_s, now)

    def failed(self, peer: PeerId, now: float) -> None:
        """Record that a plan was given up because its only member of a stage did not follow it."""
        record = self._record(peer)
        record.failures += 1
        if record.failures >= ABSENT_AFTER:
            record.failures = 0
            self._offence(peer, FIRST_S, now)
            record.absent_until = now + ABSENT_S

    def spoke(self, peer: PeerId, plan_hash: str) -> bool:
        """Record a late word of the peer on the end of a plan that it missed: it was slow, and is
        let in again if that was its only offence. Returns True if it is let in."""
        record = self._records.get(peer)
        if record is None or not plan_hash or record.missed != plan_hash:
            return False
        record.missed = ""
        if record.offences > 1:
            return False
        record.until = -math.inf
        return True

    def differed(self, peer: PeerId, now: float) -> float:
        """Record that the peer came to other parameters than most of its stage. The first time it
        only catches up: a bit of its memory may have flipped. Returns the weight of its fault."""
        record = self._record(peer)
        if not record.offences:
            record.offences = record.in_a_row = 1
            record.good_in_a_row = 0
            return 0.0
        record = self._offence(peer, FIRST_S, now)
        return 1.0 if record.in_a_row >= DELIBERATE else 0.0

    def refused(self, peer: PeerId, now: float) -> float:
        """Record that most members of its stage refused parameters that the peer gave as owner.
        Returns the weight of its fault."""
        self._offence(peer, 2 * FIRST_S, now)
        return 1.0

    def disputed(
        self, camps: Sequence[Collection[PeerId]], me: PeerId, now: float
    ) -> dict[PeerId, float]:
        """Record that these groups of replicas came to different parameters and none is a majority.
        Returns the peers that are left out from now on, with the weights of their faults.

        Peers that never had a dispute with each other begin the epoch again together: a flipped bit
        does not flip twice. Otherwise one camp stays: that of the leader ``me``, or else the one
        that had disputes with the fewest peers, then the one that agreed with others most often.
        """
        pairs: list[tuple[PeerId, PeerId]] = []
        for camp in camps:
            pairs += product(camp, _others(camps, camp))
        before = any(other in self._record(one).disputes for one, other in pairs)
        for one, other in pairs:
            disputes = self._record(one).disputes
            disputes[other] = disputes.get(other, 0) + 1
        if not before and all(self._partners(one) < CAUSE for one, _ in pairs):
            return {}
        stays = min(camps, key=lambda camp: (me not in camp, self._suspicion(camp)))
        return {peer: self._lost(peer, stays, now) for peer in _others(camps, stays)}

    def _lost(self, peer: PeerId, winners: Collection[PeerId], now: float) -> float:
        """Leave out a peer that lost a dispute; returns the weight of its fault."""
        record = self._offence(peer, 2 * FIRST_S, now)
        often = max(record.disputes.get(winner, 0) for winner in winners) >= PAIR_DISPUTES
        if often or self._partners(peer) >= CAUSE_FOR_GOOD:
            record.until = math.inf
        if self._partners(peer) < CAUSE:
            return 0.0
        # The peers that it had disputes with before were right.
        for other in record.disputes:
            if other in self._records and self._partners(other) < CAUSE:
                self._records[other].until = -math.inf
                self._records[other].disputes.pop(peer, None)
        return 1.0

    def _partners(self, peer: PeerId) -> int:
        """Peers with which this one had disputes and that have agreed with others. Disputes with
        peers that never did are no evidence: keys cost nothing."""
        records = [self._records.get(other) for other in self._record(peer).disputes]
        return sum(record is not None and record.agreed > 0 for record in records)

    def _suspicion(self, camp: Collection[PeerId]) -> tuple[int, int, list[PeerId]]:
        """Order of camps: the first one stays."""
        return (
            max(self._partners(peer) for peer in camp),
            -max(self._record(peer).agreed for peer in camp),
            sorted(camp),
        )

    def _offence(self, peer: PeerId, seconds: float, now: float) -> Record:
        """Count an offence, and leave the peer out for ``seconds`` or more, twice as long for each
        offence before it."""
        record = self._record(peer)
        doubled = 2.0 ** min(record.offences, MOST_DOUBLINGS)
        record.offences += 1
        record.in_a_row += 1
        record.good_in_a_row = 0
        record.until = max(record.until, now + min(MOST_S, max(FIRST_S, seconds) * doubled))
        return record


def _others(camps: Sequence[Collection[PeerId]], mine: Collection[PeerId]) -> list[PeerId]:
    """Peers of all other camps."""
    return [*chain.from_iterable(camp for camp in camps if camp is not mine)]
