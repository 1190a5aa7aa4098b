"""Conduct of the members, as their leader has seen it: peers on probation, and for how long. Pure.

Enters: seconds that a peer cost the others, epochs that it did in time, and peers that lied about
tensors. Leaves: peers on probation, facts and faults to report, and how much longer than usual a
peer is waited for. Never: a clock, or an epoch.

A peer that costs the others time is on probation for a multiple of that time, and a liar for
:data:`LIAR_S`. A peer on probation owns no part, gets no micro-batch, and nobody waits for it,
unless nobody else of its stage could start. It is in no plan where its stage has two others that
work.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from node.core.ids import PeerId
from node.core.journey import Plan
from node.core.newest import Newest
from node.epoch.events import CountFault, LeaderAction
from node.epoch.leader import reports
from node.epoch.leader.inspection import Inspection
from node.epoch.peers.observations import observe
from node.pipeline.events import VisitSketches

MULTIPLE = 20.0
"""Times the seconds that a peer cost the others for which it is on probation."""
LEAST_S = 15.0
"""Shortest probation, in seconds."""
MOST_S = 3600.0
"""Longest probation, in seconds."""
LIAR_S = 3600.0
"""Probation of a peer for its first lie about a tensor, in seconds; it doubles with each lie."""
MOST_DOUBLINGS = 10
"""Doublings of a probation, and of the time that a peer is waited for."""
DELIBERATE = 3
"""Offences in a row that are no accident any more."""
PEERS_KEPT = 4096
"""Peers that are remembered; keys cost nothing."""


@dataclass(slots=True)
class Record:
    """One peer's conduct. ``epochs``: number of epochs that it did in time; ``offences``: number of
    offences since the last such epoch; ``until``: end of its probation; ``missed``: hash of the
    plan that it did not report on in time; ``excused_until``: time before which it is not excused
    again; ``lies``: number of times that it was found to lie about tensors; ``lied_until``: end of
    its probation for that, which no late report ends."""

    epochs: int = 0
    offences: int = 0
    until: float = -math.inf
    missed: str = ""
    excused_until: float = -math.inf
    lies: int = 0
    lied_until: float = -math.inf


class Conduct:
    """The records of the peers that this leader has worked with lately. ``before``: records of an
    earlier leader at the same peer; they are copied."""

    def __init__(self, before: Mapping[PeerId, Record] | None = None) -> None:
        self.inspection = Inspection()
        self._records: Newest[PeerId, Record] = Newest(PEERS_KEPT)
        for peer, record in (before or {}).items():
            self._records[peer] = replace(record)

    @property
    def records(self) -> Mapping[PeerId, Record]:
        """The records by peer, the newest last."""
        return self._records

    def on_probation(self, now: float) -> frozenset[PeerId]:
        """Peers on probation at ``now``."""
        return frozenset(p for p, record in self._records.items() if now < record.until)

    def probation_s(self, peer: PeerId, now: float) -> float:
        """Seconds of probation that are left; 0 for none."""
        record = self._records.get(peer)
        if record is None:
            return 0.0
        return max(0.0, record.until - now)

    def epochs(self, peer: PeerId) -> int:
        """Number of epochs that the peer did in time: keys cost nothing, and work does."""
        record = self._records.get(peer)
        if record is None:
            return 0
        return record.epochs

    def patience(self, peers: Iterable[PeerId]) -> float:
        """Factor by which these peers are waited for longer than usual. It doubles with each
        offence, so that an honest peer that has become slow gets through in the end."""
        known = [record.offences for p in peers if (record := self._records.get(p)) is not None]
        return 2.0 ** min(max(known, default=0), MOST_DOUBLINGS)

    def good(self, peer: PeerId) -> None:
        """Record an epoch that the peer did in time, as a current member."""
        record = self._record(peer)
        record.epochs += 1
        record.offences = 0

    def cost(self, peer: PeerId, seconds: float, now: float, missed: str = "") -> float:
        """Record an offence that cost the others ``seconds``. ``missed``: hash of the plan that the
        peer did not report on in time. Returns the weight of its fault, 0 if it can be an
        accident."""
        record = self._record(peer)
        probation_s = max(LEAST_S, MULTIPLE * seconds) * 2.0 ** min(record.offences, MOST_DOUBLINGS)
        record.offences += 1
        record.until = max(record.until, now + min(MOST_S, probation_s))
        record.missed = missed
        return 1.0 if record.offences >= DELIBERATE else 0.0

    def blame(
        self,
        peers: Collection[PeerId],
        why: str,
        seconds: float,
        now: float,
        missed: str = "",
    ) -> list[LeaderAction]:
        """Put on probation the peers that cost the others ``seconds``. ``missed`` as for
        :meth:`cost`."""
        done: list[LeaderAction] = []
        for peer in sorted(peers):
            weight = self.cost(peer, seconds, now, missed)
            done.append(reports.on_probation(peer, why, self.probation_s(peer, now)))
            if weight:
                done.append(CountFault(peer, why, weight))
        return done

    def inspect(
        self,
        plan: Plan,
        leader: PeerId,
        seed: str,
        sketches: Mapping[PeerId, Sequence[VisitSketches]],
        now: float,
    ) -> list[LeaderAction]:
        """Inspect the tensors of an epoch by the sketches of its members, and put liars on
        probation. ``leader``: this leader; ``seed``: that of
        :func:`~node.epoch.peers.observations.sampled`."""
        done: list[LeaderAction] = []
        for liar in self.inspection.judge(observe(plan, seed, sketches), plan.epoch, leader):
            record = self._record(liar.peer)
            probation_s = LIAR_S * 2.0 ** min(record.lies, MOST_DOUBLINGS)
            record.lies += 1
            record.until = max(record.until, now + probation_s)
            record.lied_until = record.until
            record.missed = ""  # late work excuses a slow peer only
            done.append(reports.lied(liar.peer, liar.why, probation_s))
            done.append(CountFault(liar.peer, liar.why, 1.0))
        return done

    def excuse(self, peer: PeerId, plan_hash: str, now: float) -> list[LeaderAction]:
        """End the probation of a peer that reports late."""
        if self.reported(peer, plan_hash, now):
            return [reports.excused(peer)]
        return []

    def losers(self, camps: Sequence[frozenset[PeerId]], me: PeerId) -> set[PeerId]:
        """Members of all camps but one. The camp of ``me`` stays, or else the largest one, or the
        one with the member that did the most epochs."""
        stays = max(
            camps,
            key=lambda camp: (me in camp, len(camp), max(map(self.epochs, camp))),
        )
        return {*chain.from_iterable(camps)} - stays

    def reported(self, peer: PeerId, plan_hash: str, now: float) -> bool:
        """Record a report of the peer on the work of a plan. Returns True if this ends its
        probation: it did the work, and was only slow. It is excused once in the time that a
        probation lasts; otherwise a peer that always reports late would cost time for ever."""
        record = self._records.get(peer)
        if record is None or not plan_hash or record.missed != plan_hash:
            return False
        record.missed = ""
        if now < record.excused_until:
            return False
        record.excused_until = record.until
        record.until = record.lied_until
        return now >= record.until

    def _record(self, peer: PeerId) -> Record:
        found = self._records.get(peer) or Record()
        self._records[peer] = found
        return found
