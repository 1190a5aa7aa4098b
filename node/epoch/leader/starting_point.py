"""The version that the next plan starts from, or the reason to wait first. Pure. Enters: the
roster, the tokens counted so far, the time. Leaves: a version, or the missing things in a few
words. Never: the context of a version (:mod:`node.epoch.plan_context`), the voters
(:mod:`node.epoch.leader.voting`).

Among the versions that every stage can start from, a version with a majority of its voters
throughout its history comes first, then the one with the most counted tokens. Going back costs
epochs. So before the swarm goes back, or drops the work of the larger side of a partitioned network
because few peers of that side are here yet, the leader waits a while for the missing peers.
"""

import math

from node.core.journey import Version
from node.epoch.events import RecordFact
from node.epoch.facts import RunFacts
from node.epoch.leader import reports
from node.epoch.leader.proofs import Proofs
from node.epoch.leader.roster import Roster
from node.epoch.waiting import Lack, Wait

COURTESY_S = 60.0
"""Seconds between two waits for peers that claim a better history."""
COURTESY_MOST_S = 3600.0
"""Longest such interval: it doubles while such claims come to nothing."""
MISSED_S = 3.0
"""Seconds without any peer after which a stage is left out, where the run allows it: a new leader
may not have heard of all peers yet."""

LOST_S = 60.0
"""Seconds without a common version of all stages after which some stages go on from an older one
than the others. The peers with the newer one had time to come back, and only the epochs of these
stages are lost. Nothing else would end the waiting."""


class StartingPoint:
    """The choice of the version, and the time for which the leader has waited for a better one."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self.bare: dict[int, float] = {}
        """Block stages that nobody holds at the version to start from, with the time since when.
        Under the negative number of the stage: the time since when a peer there holds an older
        version."""
        self._stuck_since = math.inf
        self._courtesy = -math.inf
        self._courtesy_every = COURTESY_S / 2
        self.proofs = Proofs()

    def choose(self, roster: Roster, tokens: int, now: float) -> Version | Wait:
        """The version to start from, or the reason for waiting. ``tokens``: counted in our history.
        The leader first asks for the certificate of a version that few peers can have committed,
        and passes the version over if nobody could show one a moment ago."""
        proofs = self.proofs
        roster.versions.look_again(lambda version: proofs.doubts(version, roster, now))
        while True:
            base = self._best(roster, tokens, now)
            if isinstance(base, Wait) or proofs.may_be_asked(now):
                return base
            if not proofs.doubts(base, roster, now):
                return base
            roster.versions.pass_over(base)

    def _best(self, roster: Roster, tokens: int, now: float) -> Version | Wait:
        """The version to start from, the best of :meth:`Versions.startable`; else the reason to
        wait.

        Peers that claim a better history get a moment to bring the rest of their side.
        """
        best = next(iter(roster.versions.startable()), None)
        if best is not None and (
            counted(roster, best, tokens) >= tokens or self._ends_orphan(roster, best)
        ):
            self.bare = {}
            return self._richer(roster, best, tokens, now) or best
        if (around := self._around(roster, tokens, now)) is not None:
            return around
        self._stuck_since = min(self._stuck_since, now)
        # Going back costs epochs, so a swarm that has lost a whole stage first gives it a chance to
        # return.
        if tokens and now - self._stuck_since < self._facts.waits.patience_s:
            if roster.versions.base is not None:
                lacking = tuple(roster.versions.bare(roster.versions.base))
                return Wait(Lack.EPOCH, stages=lacking, epoch=roster.versions.base.epoch)
            return self._nothing_in_common(roster)
        return best or self._nothing_in_common(roster)

    @staticmethod
    def _nothing_in_common(roster: Roster) -> Wait:
        """The wait that names the stages without the nearest version, which the fewest stages
        lack."""
        nearest, lacking = roster.versions.nearest()
        epoch = 0
        if nearest is not None:
            epoch = nearest.epoch
        return Wait(Lack.COMMON, stages=tuple(lacking), epoch=epoch)

    @staticmethod
    def _ends_orphan(roster: Roster, best: Version) -> bool:
        """Return True if the version agreed on went on without a majority of its voters, and
        ``best`` always had one."""
        versions = roster.versions
        base = versions.base
        if base is None:
            return False
        return versions.certain(base) is False and versions.certain(best) is True

    def found(self) -> None:
        """The context of the version is known too: the leader no longer waits."""
        self._stuck_since = math.inf

    def turn(self, roster: Roster, base: Version, claimed: int, tokens: int) -> list[RecordFact]:
        """The swarm goes on from ``base``. Returns the fact to record if that is not the version
        agreed on. ``claimed``: tokens in the context of ``base``. A peer that claimed a richer
        history was right then, and the next claim is heard soon again."""
        was = roster.versions.base
        if was is None or base == was:
            return []
        if counted(roster, base, tokens) > tokens:
            self._courtesy_every = COURTESY_S / 2
            return [reports.history_changed(base, was, claimed, tokens)]
        return [reports.went_back(base, was)]

    def go_on_from_less(self, roster: Roster, now: float) -> RecordFact | None:
        """Give up agreed digests, the verdict on a disputed version, or the newest parameters of
        some stages, if nothing else lets the swarm start. Returns the fact to record, None while
        waiting may still help."""
        if lost := self._drop_agreement(roster, now):
            return reports.agreement_lost(lost)
        if self._count_undone(roster, now):
            return reports.undone_counted()
        if fallen := self._fall_back(roster, now):
            return reports.stage_fell_back(fallen)
        return None

    def _drop_agreement(self, roster: Roster, now: float) -> tuple[int, ...]:
        """Drop agreed digests that are lost for good, once patience is over, so that the swarm goes
        on from the parameters that are left. Returns the stages concerned, mostly none."""
        if now - self._stuck_since < self._facts.waits.patience_s or roster.versions.startable():
            return ()
        return roster.versions.drop_agreement()

    def _count_undone(self, roster: Roster, now: float) -> bool:
        """Let versions count on which replicas did not agree, once patience is over, if nobody can
        go back to the version before: one replica's parameters are better than a swarm that never
        goes on. Return True if the swarm can start from one now."""
        if now - self._stuck_since < self._facts.waits.patience_s or roster.versions.startable():
            return False
        return roster.versions.redo()

    def _fall_back(self, roster: Roster, now: float) -> dict[int, Version]:
        """Let each stage that nobody holds at the newest version go on from the version of most of
        its peers, if every such stage has one and nothing else helps. Returns that version for each
        stage; mostly empty."""
        base = roster.versions.base
        if base is None or now - self._stuck_since < LOST_S or roster.versions.startable():
            return {}
        bare = roster.versions.bare(base)
        if len(bare) > self._facts.stages or not all(
            0 < (roster.versions.older(s) or base).epoch < base.epoch for s in bare
        ):
            return {}
        return {s: held for s in bare if (held := roster.versions.fall_back(s)) is not None}

    def _around(self, roster: Roster, tokens: int, now: float) -> Version | None:
        """The version to start from without the stages that nobody holds it at, if plans may leave
        out that many stages.

        A peer that is here with an older version of such a stage gets a moment to find a newer one;
        then the stage goes on from the older one.
        """
        facts = self._facts
        if not facts.spare:
            return None
        able = roster.versions.startable(facts.spare)
        base = roster.versions.base
        if base not in able:
            base = next(iter(able), None)
        if base is None or counted(roster, base, tokens) < tokens:
            return None
        here = roster.participants.by_stage()
        bare = roster.versions.bare(base)
        self.bare = {s: self.bare.get(s, now) for s in [*bare, *(-s for s in bare if here[s])]}
        if any(now - self.bare[s] < MISSED_S for s in bare):
            return None
        agreed = base == roster.versions.base
        for s in bare:
            if agreed and now - self.bare.get(-s, now) >= facts.waits.patience_s:
                roster.versions.fall_back(s)
        # A run that is complete has all of its stages.
        if base.epoch >= facts.epochs and roster.versions.bare(base):
            return None
        return base

    def _richer(self, roster: Roster, best: Version, tokens: int, now: float) -> Wait | None:
        """The wait for the side of a partitioned network that claims more tokens; None without
        one."""
        claims = roster.versions.richer(max(counted(roster, best, tokens), tokens), best)
        if not claims:
            return None
        # A claim costs nothing to make: a peer that repeats one which comes to nothing is waited
        # for ever more rarely.
        if now - self._courtesy > self._courtesy_every:
            self._courtesy = now
            self._courtesy_every = min(2 * self._courtesy_every, COURTESY_MOST_S)
        waits = now - self._courtesy < self._facts.waits.patience_s
        if not waits:
            return None
        return Wait(Lack.SIDE, peers=(claims[0],))


def counted(roster: Roster, version: Version, tokens: int) -> int:
    """Tokens in the history of a version; for the version committed last it is ``tokens``, our own
    count."""
    if version == roster.versions.base:
        return tokens
    return max(0, roster.versions.tokens_of(version))
