"""The time between two epochs: the reason for waiting, and requests to peers to change their stage.
Pure. Enters: the roster, the peers that come and go. Leaves: requests, the reason for waiting.
Never: a plan, the version that it starts from (:mod:`node.epoch.leader.starting_point`)."""

from collections.abc import Mapping, Sequence
from statistics import median

from node.core.errors import OutOfResources
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Plan, Version
from node.epoch import events as ev
from node.epoch.facts import RunFacts, WorkSizes
from node.epoch.leader import reports
from node.epoch.leader.attempt import EpochAttempt
from node.epoch.leader.balance import Balance
from node.epoch.leader.roster import Roster
from node.epoch.leader.starting_point import LOST_S, StartingPoint
from node.epoch.leader.takeover import Takeover
from node.epoch.plan_context import GENESIS, PastPlan
from node.epoch.waiting import Lack, Wait
from node.scheduler.placement import Move
from node.scheduler.proven import NoWay

SETTLES = 10
"""Multiple of ``settle_s`` after which a young swarm stops waiting for more peers, though peers
still come and go."""


class Gathering:
    """The wait of one leader, and its requests to peers that could end it. ``past``: the plan that
    it followed last."""

    def __init__(self, facts: RunFacts, past: PastPlan | None = None) -> None:
        self._facts = facts
        self.starting = StartingPoint(facts)
        self.takeover = Takeover(past)
        self._balance = Balance(
            facts.stages, facts.waits.rebalance_every_s, facts.waits.download_s, facts.scheduler
        )
        self.waiting: Wait | None = Wait(Lack.SETTLING)
        """The reason why no epoch is planned; None when one is."""
        self._thin: tuple[int, ...] = ()
        """Stages with too few peers, which the next plan may leave out."""
        self._coming: Mapping[PeerId, int | None] = {}
        """Peers that are about to take part, with their stage; None while they choose one."""
        self._changed: float | None = None
        """Time at which a peer came or went last."""
        self._complete: float | None = None
        """Time since when every stage has had enough peers."""
        self._memory = ""
        """The lack of memory that was reported last."""
        self._resigning = False
        """True to plan no other epoch: another peer is to lead."""
        self._told_end: set[PeerId] = set()
        """Members of the last plan of the run that have been here ever since."""

    # ----------------------------------------------------------- peers come and go

    def changed(self, now: float) -> None:
        """A peer has come or gone, or an attempt was given up."""
        self._changed = now

    def gone(self, peer: PeerId, now: float) -> None:
        """A peer is here no more."""
        self._changed = now
        self._told_end.discard(peer)

    def expect(self, coming: Mapping[PeerId, int | None]) -> None:
        """These peers are about to take part."""
        self._coming = coming

    def stays(self, peer: PeerId, now: float) -> None:
        """A peer does not change its stage."""
        self._balance.refused(peer, now)

    def resign(self, resigns: bool) -> None:
        """Plan no other epoch; False takes that back."""
        self._resigning = resigns

    def resigns(self) -> bool:
        """Return True, with the reason for waiting, if another peer is to lead."""
        if self._resigning:
            self.waiting = Wait(Lack.NEXT_LEADER)
        return self._resigning

    # ----------------------------------------------------------- the reason for waiting

    def wait(self, wait: Wait) -> None:
        """No epoch is planned for this reason."""
        self.waiting = wait

    def lacks_version(self, wait: Wait) -> None:
        """No version is found for this reason. If stages lack peers, that is the deeper one."""
        self.waiting = wait
        if self._thin:
            self.waiting = Wait(Lack.PEERS, stages=self._thin)

    def lacks_memory(self, e: OutOfResources) -> list[ev.RecordFact]:
        """The members' memory does not hold the optimizer's state. Returns the fact to record, once
        for each lack."""
        said = self._memory
        self._memory = str(e)
        self.waiting = Wait(Lack.MEMORY, detail=f"memory for the optimizer's state: {e}")
        if said != self._memory:
            return [reports.out_of_room(e)]
        return []

    def over(self) -> None:
        """Nothing is waited for any more."""
        self.waiting = None

    def planned(self, plan: Plan) -> None:
        """A plan was made, or taken over."""
        self._memory = ""
        self.takeover.planned(plan)

    # ----------------------------------------------------------- the end of the run

    def finished(self, plan: Plan) -> None:
        """This is the last plan of the run."""
        self._told_end = {m.peer for m in plan.members}

    def missed_the_end(self, e: ev.Heartbeat, roster: Roster) -> bool:
        """Return True if a peer holds the final version and is not in the last plan: one more plan
        lets it serve too."""
        if e.at != roster.versions.base or e.peer in self._told_end:
            return False
        return e.peer in roster.participants.by_stage().get(e.stage, ())

    # ----------------------------------------------------------- enough peers

    def look(
        self, roster: Roster, history: Plan | None, now: float
    ) -> list[ev.LeaderAction] | None:
        """Look whether enough peers take part. Returns None if so, else the requests to peers that
        could help. ``history``: the newest plan known."""
        stages = roster.participants.by_stage()
        here = roster.peers.candidates
        young = roster.versions.base is None and all(
            here[p].at == GENESIS for p in roster.participants.all()
        )
        need = self._facts.min_replicas if young else 1
        thin = [s for s, peers in stages.items() if len(peers) < (need if s != ENDS else 1)]
        self._thin = tuple(thin)
        if thin and (young or ENDS in thin or len(thin) > self._facts.spare):
            nobody = Wait(Lack.PEERS, stages=self._thin)
            self.waiting = self._not_joined(roster, thin, need) or nobody
            self._complete = None
            return self._mend(roster, thin, now)
        if self._complete is None:
            self._complete = now
        self._mend(roster, (), now)
        if self._settles(roster, history, now):
            self.waiting = Wait(Lack.SETTLING)
            return []
        return None

    def _settles(self, roster: Roster, history: Plan | None, now: float) -> bool:
        """Return True while the first plan of this leader waits a moment for more peers: in a young
        swarm, so that peers that start together are in it together; else for members of the
        previous leader's plan that have not reported yet."""
        settle_s = self._facts.waits.settle_s
        if roster.versions.base is not None or self._changed is None or self._complete is None:
            return False
        if history is not None:
            members = {m.peer for m in history.members} - {history.leader}
            if members and members <= roster.peers.candidates.keys():
                return False
        return now - self._changed < settle_s and now - self._complete < SETTLES * settle_s

    @staticmethod
    def _not_joined(roster: Roster, thin: Sequence[int], need: int) -> Wait | None:
        """The wait for pairs that have not reached each other, if stages have enough peers but not
        enough that reach the others; None if that is not the reason."""
        here = roster.peers.present()
        full = [s for s in thin if len(here[s]) >= (need if s != ENDS else 1)]
        stage = {p: c.stage for p, c in roster.peers.candidates.items()}
        pairs = [(a, b) for a, b in roster.participants.apart() if stage[a] in full]
        if not pairs:
            return None
        no_way = NoWay([(Hop(stage[a], a), Hop(stage[b], b)) for a, b in pairs])
        return Wait(Lack.WAYS, peers=no_way.peers, detail=str(no_way))

    # ----------------------------------------------------------- changes of stage

    def rebalance(
        self, roster: Roster, plan: Plan, run_s: float, now: float
    ) -> list[ev.LeaderAction]:
        """As the epoch of a plan closes after ``run_s``: ask peers to change to the stages that
        hold the others up. Peers that wait for the next epoch come first, then, at intervals,
        members. A member that is asked now finishes the round, and the next plan is made without
        it; but one that is asked when a plan is made would be in that plan."""
        if plan.epoch + 1 >= self._facts.epochs or self.starting.bare:
            return []
        dealt = self._balance.deal(
            roster,
            {m.peer for m in plan.members},
            now,
            run_s,
            coming=self._coming,
            fetch_s=_fetch_s(self._facts.sizes, roster),
        )
        return _all_asked(dealt) + self.look_again(roster, plan.base, now, run_s)

    def look_again(
        self, roster: Roster, base: Version, now: float, run_s: float = 0.0
    ) -> list[ev.LeaderAction]:
        """At intervals: ask peers of stages that can spare them to change to the stage that holds
        the others up. Also where no epoch closes, because none is planned or none succeeds."""
        if base.epoch >= self._facts.epochs or self.starting.bare:
            return []
        moves = self._balance.look(
            roster,
            base,
            now,
            run_s,
            coming=self._coming,
            fetch_s=_fetch_s(self._facts.sizes, roster),
        )
        return _all_asked(moves)

    def outgrown(self, roster: Roster, attempt: EpochAttempt, now: float) -> bool:
        """Return True if an epoch under way should begin anew, for the many peers that wait."""
        return not self._resigning and self._balance.outgrown(roster, attempt, now)

    def _mend(self, roster: Roster, thin: Sequence[int], now: float) -> list[ev.LeaderAction]:
        """Ask a peer of a stage that can spare one to move to a stage that has too few to plan an
        epoch."""
        # A peer from another stage brings no parameters, so the peers that had them get time to
        # return.
        begun = any(c.at.epoch for c in roster.peers.candidates.values())
        patience = LOST_S if begun else self._facts.waits.lacks_s
        me = roster.peers.leader
        move = self._balance.mend(roster, me, thin, self._coming, patience, now)
        if move is None:
            return []
        return _asked(move, reports.help_asked(move))


def _fetch_s(sizes: WorkSizes, roster: Roster) -> dict[int, float]:
    """Expected seconds in which a peer with a usual line fetches the parameters of each stage;
    empty if too little is known."""
    costs = [c.capacity.costs for c in roster.peers.candidates.values()]
    bodies = [m.body_s for m in costs if m.body_s > 0]
    if not bodies or not sizes.tensor:
        return {}
    byte_s = median(bodies) / sizes.tensor
    return {stage: size * byte_s for stage, size in enumerate(sizes.parameters)}


def _all_asked(moves: Sequence[Move]) -> list[ev.LeaderAction]:
    """The requests of a choice of moves, with the facts that record them."""
    done: list[ev.LeaderAction] = []
    for move in moves:
        done += _asked(move, reports.move_asked(move))
    return done


def _asked(move: Move, fact: ev.RecordFact) -> list[ev.LeaderAction]:
    """The request to a peer to change its stage, and the fact that records it."""
    return [ev.RequestMove(move.peer, move.target), fact]
