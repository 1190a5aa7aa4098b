"""A member of the epoch. Pure: events and time in, actions out.

    IDLE     a plan arrives                                   -> RUN
    RUN      the leader closes the epoch                      -> AVERAGE
             another leader takes the epoch over              -> RUN
    AVERAGE  every fresh part is here: adopt, tell the leader -> DONE
             parts are missing: tell the leader, wait         -> AVERAGE (next attempt) or COPY
    DONE     the plan of the next version settles this one; a plan of the same version undoes it

An update is *adopted* at the end of the round and *settled* by the next plan. Between the two the
old version is kept, so that an epoch that fails in another cell can be undone everywhere.
"""

from enum import Enum
from typing import Any

from node.consensus.admission import Holdings, unfollowable
from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.plan_context import PastPlan, makes

FETCH_S = 8.0
"""Longest fetch of the parameters that a plan begins from, in seconds: twice the longest that a
leader expects. Meanwhile no later plan is heard."""


class MemberState(Enum):
    """The stage of the epoch that this member has reached."""

    IDLE = "idle"
    RUN = "run"
    AVERAGE = "average"
    COPY = "copy"
    DONE = "done"
    FINISHED = "finished"


class Member:
    """The state machine of one member. ``at``: the version in place; ``tokens``: counted in its
    history; ``before``: the version that an undo returns to, None without one; ``checkpoints``:
    versions on the disk that can be put in place."""

    def __init__(
        self,
        me: PeerId,
        at: Version,
        checkpoints: tuple[Version, ...] = (),
        tokens: int = 0,
    ) -> None:
        self.me = me
        self.at = at
        self.checkpoints = checkpoints
        self.tokens = tokens
        self.before: Version | None = None
        self.state = MemberState.IDLE
        self.plan: Plan | None = None
        self.leader: PeerId | None = None
        """The leader of the plan in force: the one that made it, or one that took its epoch over.
        None without a plan."""
        self.term = 0
        self.orphan = False
        """True if the lineage of ``at`` went on without a majority of its voters."""
        self._newest_round: ev.RoundArrived | None = None
        """The leader's newest round of the plan in force."""
        self._older: list[tuple[Plan, tuple[int, ...]]] = []

    @property
    def busy(self) -> bool:
        """True while an epoch is under way here."""
        return self.state in (MemberState.RUN, MemberState.AVERAGE, MemberState.COPY)

    @property
    def sample(self) -> str:
        """Seed of the micro-batches of which this member reports sketches, from its newest
        round."""
        if self._newest_round is None:
            return ""
        return self._newest_round.tally.sample

    @property
    def _under_way(self) -> ev.RoundArrived | None:
        """The round that this member takes part in; None if it takes part in none."""
        if self.state in (MemberState.AVERAGE, MemberState.COPY):
            return self._newest_round
        return None

    @property
    def reachable(self) -> tuple[Version, ...]:
        """Versions other than ``at`` that this peer can put in place at once."""
        versions = {*self.checkpoints}
        if self.before is not None:
            versions.add(self.before)
        return tuple(sorted(versions - {self.at}))

    @property
    def dropped(self) -> tuple[int, ...]:
        """Micro-batches of the plan in force that do not count, by the leader's newest round."""
        if self._newest_round is None:
            return ()
        return self._newest_round.dropped

    @property
    def followed(self) -> PastPlan | None:
        """The plan in force, or followed last."""
        if self.plan is None:
            return None
        return PastPlan(self.plan, self.dropped)

    def remembers(self, version: Version) -> tuple[Plan | None, tuple[int, ...]]:
        """The newest plan known here that starts from ``version`` or made it, with its dropped
        micro-batches; (None, ()) if there is none.

        A peer keeps the plan of every version that it can put in place, unless the version came
        from the disk or from other peers: a leader from another side of a partition does not know
        these plans and asks for them.
        """
        known = [*self._older]
        if self.plan is not None:
            known.insert(0, (self.plan, self.dropped))
        return next((k for k in known if version in (k[0].base, makes(*k))), (None, ()))

    def _remember(self) -> None:
        """Keep the current plan and the newest plan of every version that can be put in place,
        before a new plan replaces the current one. The current plan is kept because its result may
        still be on its way to the disk."""
        kept = {} if self.plan is None else {self.plan.term: (self.plan, self.dropped)}
        for version in (self.at, *self.checkpoints):
            plan, dropped = self.remembers(version)
            if plan is not None:
                kept[plan.term] = (plan, dropped)
        self._older = [kept[term] for term in sorted(kept, reverse=True)]

    def handle(self, event: ev.MemberEvent, now: float) -> list[ev.MemberAction]:
        """Handle one event and return the actions. An event that is stale or of the wrong term is
        refused or ignored."""
        match event:
            case ev.PlanArrived(plan, digest):
                return self._planned(plan, digest)
            case ev.TakenOver(leader, plan_hash):
                return self._taken_over(leader, plan_hash)
            case ev.RoundArrived():
                return self._round(event)
            case ev.RoundEnded():
                return self._ended(event)
            case ev.Adopted():
                return self._adopted(event)
            case ev.VersionPlaced():
                self._placed(event)
            case ev.CheckpointsKept(versions):
                self.checkpoints = versions
        return []

    def _placed(self, e: ev.VersionPlaced) -> None:
        self.at = e.at
        self.checkpoints = e.checkpoints
        self.tokens = e.tokens
        self.term = max(self.term, e.term)
        self.before = None
        self.state = MemberState.IDLE

    def _planned(self, plan: Plan, digest: str) -> list[Any]:
        if self.plan is not None and plan.hash == self.plan.hash:
            # Told twice, because the first answer was lost on its way.
            if self.state is MemberState.IDLE and not plan.parent:
                return [ev.RefuseCaller("its version could not be put in place here")]
            return []
        held = Holdings(self.at, self.before, self.checkpoints, self.term, digest)
        if why := unfollowable(plan, self.me, held):
            return [ev.RefuseCaller(why)]
        me = plan.member(self.me)
        current = me is not None and me.current
        if me is not None and current and self._lacks(plan, me.stage):
            donors = tuple(m.peer for m in plan.stage(me.stage) if m.current and m.peer != self.me)
            digest = plan.digests[me.stage]
            return [ev.FetchBase(plan.base, donors, digest, min(FETCH_S, plan.deadline_s))]
        behind = None if current else (self.at, self.tokens)
        done: list[Any] = []
        if me is not None and me.current:
            done = self._moves(plan, me.stage)
        elif self.before is not None:
            # A listener's last update was not the swarm's: its optimizer state must not count.
            done.append(ev.GoTo(self.before, "roll-back"))
            self.at = self.before
        if current:
            self.at = plan.base
            self.tokens = plan.tokens
        self.before = None
        self._remember()
        self.plan = plan
        self.leader = plan.leader
        self.term = plan.term
        self._newest_round = None
        if current:
            self.orphan = plan.electorate.orphan
        if plan.parent:
            self.state = MemberState.IDLE
            return [*done, ev.EnterCell(plan)]
        if plan.last:
            self.state = MemberState.FINISHED
            return [*done, ev.Finish(plan)]
        self.state = MemberState.RUN
        done.append(ev.BeginEpoch(plan, behind))
        if plan.outer:
            # There is nothing to run: the plan itself opens the round.
            done += self._round(
                ev.RoundArrived(
                    plan.leader,
                    plan.epoch,
                    plan.term,
                    plan.hash,
                    attempt=0,
                    dead=(),
                    owners={},
                    sources=(),
                    dropped=(),
                    deadline_s=plan.deadline_s,
                )
            )
        return done

    def _lacks(self, plan: Plan, stage: int) -> bool:
        """Return True if the parameters from which a plan begins cannot be put in place here
        without other peers."""
        return plan.base not in (self.at, *self.reachable) and stage not in plan.stood

    def _moves(self, plan: Plan, stage: int) -> list[Any]:
        """The moves of a current member to the base of a plan that it can follow."""
        base = plan.base
        if base == self.at:
            if self.before is None:
                return []
            return [ev.Settle(plan.epoch)]
        if base == self.before:
            return [ev.GoTo(base, "roll-back")]
        if base in self.checkpoints:
            return [ev.GoTo(base, "checkpoint")]
        # The stage was left out since this version, so the base has the same parameters of it.
        held = plan.stood[stage]
        done: list[Any] = []
        if held != self.at:
            how = "roll-back" if held == self.before else "checkpoint"
            done.append(ev.GoTo(held, how))
        elif self.before is not None:
            done.append(ev.Settle(held.epoch))
        if base != held:
            done.append(ev.GoTo(base, "left out"))
        return done

    def _taken_over(self, leader: PeerId, plan_hash: str) -> list[Any]:
        """Follow another leader in the plan in force. Only before its epoch is closed: a member
        that averages for one leader, or has voted, does not begin again for another."""
        plan = self.plan
        begun = (MemberState.RUN, MemberState.AVERAGE, MemberState.COPY, MemberState.DONE)
        if plan is None or plan.hash != plan_hash or self.state not in begun:
            return [ev.RefuseCaller("this plan is not under way here")]
        if self.state is not MemberState.RUN and leader == self.leader:
            return []  # told twice, because the first answer was lost on its way
        if self.state is not MemberState.RUN:
            return [ev.RefuseCaller("the micro-batches of this plan have ended here")]
        self.leader = leader
        return [ev.ReportAgain(plan)]

    def _round(self, r: ev.RoundArrived) -> list[Any]:
        plan = self.plan
        if plan is None or (r.epoch, r.term) != (plan.epoch, plan.term) or r.plan_hash != plan.hash:
            return [ev.RefuseCaller("this round belongs to a plan that is not in force here")]
        if r.leader != self.leader:
            return [ev.RefuseCaller("only the leader of this epoch opens its rounds")]
        under_way = self._under_way
        if self.state is MemberState.DONE or (
            under_way is not None and r.attempt == under_way.attempt
        ):
            return []  # told twice, because the first answer was lost on its way
        fresh = self.state is MemberState.RUN and r.attempt >= 0
        if not fresh and not (under_way is not None and r.attempt > under_way.attempt):
            return [ev.RefuseCaller(f"attempt {r.attempt} is over")]
        if self.me in r.dead:
            return [ev.RefuseCaller("the leader counts this peer as dead")]
        me = plan.member(self.me)
        self._newest_round = r
        self.state = MemberState.COPY if r.sources else MemberState.AVERAGE
        return [ev.StartRound(plan, r, me is not None and not me.current)]

    def _ended(self, e: ev.RoundEnded) -> list[Any]:
        plan = self.plan
        under_way = self._under_way
        if plan is None or under_way is None:
            return []
        if (e.epoch, e.term, e.attempt) != (plan.epoch, plan.term, under_way.attempt):
            return []
        if e.missing:
            return [ev.TellIncomplete(plan, e)]
        return [ev.AdoptParts(plan, e)]

    def _adopted(self, e: ev.Adopted) -> list[Any]:
        plan = self.plan
        ended = e.ended
        under_way = self._under_way
        if plan is None or under_way is None:
            return []
        if (ended.epoch, ended.term) != (plan.epoch, plan.term):
            return []
        me = plan.member(self.me)
        # A listener never held the version before, so it has nothing to go back to.
        self.before = None
        if me is not None and me.current:
            self.before = plan.base
        self.at = makes(plan, self.dropped)
        self.orphan = plan.electorate.orphan
        self.tokens = plan.tokens + under_way.tally.tokens
        self.state = MemberState.DONE
        return [ev.TellCommitted(plan, ended.attempt, e.digest)]
