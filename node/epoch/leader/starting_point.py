"""The version that the next plan starts from and the voters on its result, or the reason to wait
first. Pure. Enters: the roster, the tokens counted so far, the plan before, the time. Leaves: a
version and an electorate, or the missing things in a few words. Never: the context of a version
(:mod:`node.epoch.plan_context`).

Among the versions that every stage can start from, a version with a majority of its voters
throughout its history comes first, then the one with the most counted tokens. Going back costs
epochs. So before the swarm goes back, or drops the work of the larger side of a partitioned network
because few peers of that side are here yet, the leader waits a while for the missing peers.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from node.consensus.voters import decide, is_majority
from node.core.ids import PeerId
from node.core.journey import Electorate, Plan, Version
from node.epoch.facts import RunFacts
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
RIPE = 10
"""Number of epochs in a row as a current member after which a peer votes: keys cost nothing."""
FEW = 5
"""Number of voters below which all current members vote: the next death must not end the run."""
ALONE_S = 60.0
"""Seconds to wait for enough voters. Then the peers that are present go on as orphans."""
ALONE_EPOCHS = 5.0
"""Epochs to wait for them, if that is longer."""


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

    def choose(self, roster: Roster, tokens: int, now: float) -> Version | Wait:
        """The version to start from, the best of :meth:`Roster.startable`; else the reason to wait.
        ``tokens``: counted in our history.

        Peers that claim a better history get a moment to bring the rest of their side.
        """
        best = next(iter(roster.startable()), None)
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
            if roster.base is not None:
                lacking = tuple(roster.bare(roster.base))
                return Wait(Lack.EPOCH, stages=lacking, epoch=roster.base.epoch)
            return self._nothing_in_common(roster)
        return best or self._nothing_in_common(roster)

    @staticmethod
    def _nothing_in_common(roster: Roster) -> Wait:
        """The wait that names the stages without the nearest version, which the fewest stages
        lack."""
        nearest, lacking = roster.nearest()
        epoch = 0
        if nearest is not None:
            epoch = nearest.epoch
        return Wait(Lack.COMMON, stages=tuple(lacking), epoch=epoch)

    @staticmethod
    def _ends_orphan(roster: Roster, best: Version) -> bool:
        """Return True if the version agreed on went on without a majority of its voters, and
        ``best`` always had one."""
        base = roster.base
        return base is not None and roster.certain(base) is False and roster.certain(best) is True

    def found(self) -> None:
        """The context of the version is known too: the leader no longer waits."""
        self._stuck_since = math.inf

    def joined(self) -> None:
        """The swarm goes on from a richer history: the peer that claimed it was right, and the next
        claim is heard soon again."""
        self._courtesy_every = COURTESY_S / 2

    def drop_agreement(self, roster: Roster, now: float) -> tuple[int, ...]:
        """Drop agreed digests that are lost for good, once patience is over, so that the swarm goes
        on from the parameters that are left. Returns the stages concerned, mostly none."""
        if now - self._stuck_since < self._facts.waits.patience_s or roster.startable():
            return ()
        return roster.drop_agreement()

    def count_undone(self, roster: Roster, now: float) -> bool:
        """Let versions count on which replicas did not agree, once patience is over, if nobody can
        go back to the version before: one replica's parameters are better than a swarm that never
        goes on. Return True if the swarm can start from one now."""
        if now - self._stuck_since < self._facts.waits.patience_s or roster.startable():
            return False
        undone = roster.undone
        roster.undone = set()
        if roster.startable():
            return True
        roster.undone = undone
        return False

    def fall_back(self, roster: Roster, now: float) -> dict[int, Version]:
        """Let each stage that nobody holds at the newest version go on from the version of most of
        its peers, if every such stage has one and nothing else helps. Returns that version for each
        stage; mostly empty."""
        base = roster.base
        if base is None or now - self._stuck_since < LOST_S or roster.startable():
            return {}
        bare = roster.bare(base)
        if len(bare) > self._facts.stages or not all(
            0 < (roster.older(s) or base).epoch < base.epoch for s in bare
        ):
            return {}
        return {s: held for s in bare if (held := roster.fall_back(s)) is not None}

    def _around(self, roster: Roster, tokens: int, now: float) -> Version | None:
        """The version to start from without the stages that nobody holds it at, if plans may leave
        out that many stages.

        A peer that is here with an older version of such a stage gets a moment to find a newer one;
        then the stage goes on from the older one.
        """
        facts = self._facts
        if not facts.spare:
            return None
        able = roster.startable(facts.spare)
        base = roster.base
        if base not in able:
            base = next(iter(able), None)
        if base is None or counted(roster, base, tokens) < tokens:
            return None
        here = roster.replicas()
        bare = roster.bare(base)
        self.bare = {s: self.bare.get(s, now) for s in [*bare, *(-s for s in bare if here[s])]}
        if any(now - self.bare[s] < MISSED_S for s in bare):
            return None
        for s in bare:
            if now - self.bare.get(-s, now) >= facts.waits.patience_s and base == roster.base:
                roster.fall_back(s)
        # A run that is complete has all of its stages.
        if base.epoch >= facts.epochs and roster.bare(base):
            return None
        return base

    def _richer(self, roster: Roster, best: Version, tokens: int, now: float) -> Wait | None:
        """The wait for the side of a partitioned network that claims more tokens; None without
        one."""
        claims = roster.richer(max(counted(roster, best, tokens), tokens), best)
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
    if version == roster.base:
        return tokens
    return max(0, roster.tokens_of(version))


def without(e: Electorate, gone: Collection[PeerId]) -> Electorate:
    """``e`` without the peers of ``gone``, which vote elsewhere from now on, or nowhere."""
    return replace(
        e,
        voters=tuple(p for p in e.voters if p not in gone),
        elders=tuple(p for p in e.elders if p not in gone),
    )


class Voting:
    """Chooses the voters, for the leader ``me``."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._worked: dict[PeerId, int] = {}
        self._decided = ""
        """Hash of the plan that made the version committed last."""
        self._lacking = math.inf

    def committed(self, plan: Plan, by: Collection[PeerId]) -> bool:
        """These members have committed. Return True if that is enough for the version to count."""
        if not decide(plan.electorate, by):
            return False
        self._decided = plan.hash
        current = [m.peer for m in plan.members if m.current]
        self._worked = {p: self._worked.get(p, 0) + 1 for p in current}
        return True

    def electorate(
        self, before: Plan | None, current: Sequence[PeerId], left: Collection[PeerId]
    ) -> Electorate:
        """The electorate of the next plan. ``before``: the plan that made the version which the
        next plan starts from, or an earlier attempt from the same version; None if it is not known,
        or the run begins. ``current``: possible current members, in any order; ``left``: peers that
        leave or were revoked, and do not vote."""
        order = sorted(current, key=lambda p: (p != self._me, p))
        if before is None or not before.electorate.voters:
            return Electorate(tuple(order))
        e = before.electorate
        if before.parent:
            return Electorate(tuple(p for p in e.voters if p in current) or tuple(order))
        e = without(e, left)
        if before.hash != self._decided:
            return e
        voters = [p for p in e.voters if p in current]
        voters += [p for p in order if p not in voters and self._worked.get(p, 0) >= RIPE]
        if len(voters) < FEW:
            voters += [p for p in order if p not in voters]
        first = [self._me] if self._me in voters else []
        after = e.elders if e.orphan else e.voters
        still = e.orphan and not is_majority(e.elders, voters)
        return Electorate(tuple(dict.fromkeys([*first, *voters])), after, still)

    def planned(self) -> None:
        """A plan was made: the wait for absent voters starts from zero again."""
        self._lacking = math.inf

    def lacks(
        self, e: Electorate, here: Collection[PeerId], now: float, epoch_s: float
    ) -> Wait | Electorate:
        """The electorate to plan with: ``e`` if enough of its voters are ``here``, or an orphan one
        after :data:`ALONE_S`; until then the wait for the others. ``epoch_s``: seconds of an
        epoch, 0 for unknown."""
        if decide(e, here):
            self._lacking = math.inf
            return e
        self._lacking = min(self._lacking, now)
        if now - self._lacking >= max(ALONE_S, ALONE_EPOCHS * epoch_s):
            voters = tuple(sorted(here, key=lambda p: (p != self._me, p)))
            after = e.elders if e.orphan else e.voters
            return Electorate(voters, after, True)
        lacking = e.elders if is_majority(e.voters, here) else e.voters
        absent = tuple(p for p in lacking if p not in here)
        present = len(lacking) - len(absent)
        return Wait(Lack.VOTERS, peers=absent, here=present, of=len(lacking))
