"""The leader of the epoch: plan, run, close, round, commit. Pure: events and time in, actions out.

    GATHER  every stage has a live peer that can start from one version  -> plan        -> RUN
            nobody here knows the plan behind that version               -> recall      -> GATHER
    RUN     every micro-batch has an outcome, or the deadline has passed  -> close      -> ROUND
    ROUND   every live member has committed                               -> next version -> GATHER
            a member lacks parts and nobody is still averaging            -> repair      -> ROUND

It is a coordinator, never a data path. Whatever it knows it can learn again from what peers say every second,
so the next leader starts in GATHER with a higher term and loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from node.averaging.outer import OuterSettings
from node.core.errors import OutOfResources, Refused
from node.core.ids import ENDS, PeerId, short
from node.core.journey import Path, Plan, Unit, Version
from node.scheduler.router import Router
from node.training import events as ev
from node.training.attempt import Attempt
from node.training.balance import Balance
from node.training.draft import draft
from node.training.meetings import Meetings
from node.training.memory import GENESIS, Cursor, Memory, Past
from node.training.roster import Roster, majority
from node.training.routing import Routing
from node.training.rules import LEVEL, Read, Rules

COURTESY_S, COURTESY_MOST_S = 60.0, 3600.0
"""Once in so long, planning waits for those who claim to have counted more tokens than we."""
NOTHING_IN_COMMON = "stages that hold one version in common"
RECALL_FROM = 4
"""Peers that are asked for the plan behind a version."""
MISSED_S = 3.0
"""A stage without anybody for so long is left out, where the run allows it: a new leader may not have heard of all yet."""
DEPART_S = 15.0
"""Who left still gives what it held for about so long."""


class Phase(Enum):
    """Where the epoch is."""

    GATHER = "gather"
    EVALUATE = "evaluate"
    RUN = "run"
    ROUND = "round"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunFacts:
    """What the manifest fixes, and the pure functions the plan is made of.

    ``assign(stage, ((peer, speed), …), previous owners, room of each peer) -> owners`` places the parts of one stage; nobody's
    room is given where none is known. Raises OutOfResources when the state does not fit;
    ``assign_paths(origins, stages, samples) -> paths`` routes the micro-batches where ``router()`` makes no router;
    ``sizes``: bytes of the parameters of each stage, ``tensor``: of a micro-batch on its way; ``probe_every_s``:
    between two small messages that only measure a way, 0 for none;
    ``sampler(cursor)`` gives a sampler at that position; ``cursor(sampler)`` reads it back;
    ``recall(version)`` is what a checkpoint says goes with it, None without one.
    ``sequence``: tokens of a sample, which bounds what may be reported of one; 0 for no bound.
    ``settle_s``: a young swarm waits so long for company; ``late_s``: silence that means death;
    ``patience_s``: wait for a lost version before an older one is taken. ``rebalance_every_s``: between two changes of
    stage, 0 for none; ``download_s``: what a change costs. ``spare``: block stages that a plan may leave out when nobody holds them. ``cell``: most peers of a cell, 0 for all of a stage;
    ``meetings``: how cells average with each other, None when there is one only. ``read(change)``: what the owner's change says
    instead, and ``meet(settings)`` the meetings by it.
    """

    stages: int
    epochs: int
    target_batch: int
    micro_batch: int
    min_replicas: int
    epoch_timeout_s: float
    round_timeout_s: float
    eval_every: int
    assign: Callable[..., dict[str, PeerId]]
    assign_paths: Callable[..., tuple[Path, ...]]
    sampler: Callable[[Cursor], Any]
    cursor: Callable[[Any], Cursor]
    recall: Callable[[Version], Past | None] = lambda version: None
    router: Callable[[], Router | None] = lambda: None
    probe_every_s: float = 0.0
    sizes: tuple[int, ...] = ()
    tensor: int = 0
    run_id: str = ""
    sequence: int = 0
    settle_s: float = 1.0
    late_s: float = 4.0
    patience_s: float = 10.0
    recall_s: float = 5.0
    rebalance_every_s: float = 0.0
    download_s: float = 15.0
    cell: int = 0
    meetings: Meetings | None = None
    spare: int = 0
    read: Read = lambda change: Rules()
    meet: Callable[[OuterSettings], Meetings | None] = lambda outer: None


class Leader:
    """The machine. ``history`` is the newest plan this peer took part in, if any, and ``dropped`` what of it did not
    count: they carry cursor and owners over. ``rules``: the owner's newest change that this peer knows."""

    def __init__(
        self, me: PeerId, facts: RunFacts, *, term: int = 0, history: Plan | None = None, dropped: Sequence[int] = (),
        rules: Rules | None = None,
    ) -> None:  # fmt: skip
        self.me, self.facts, self.term = me, facts, term
        self.phase = Phase.GATHER
        self.roster = Roster(facts.stages)
        self.waiting_for, self._lacking = "peers", ""
        self.loss = history.loss if history else 0.0
        self.loss_val = history.loss_val if history else 0.0
        self.tokens = history.tokens if history else 0
        self.spread = history.spread if history else {}
        self.rules = rules or facts.read("")
        self.repaired = self.failed_rounds = self.mismatches = self.moves = 0
        self._epoch: Attempt | None = None
        self.memory = Memory(facts.sampler, facts.cursor, facts.recall, history, dropped)
        self.routing = Routing(facts.router(), facts.sizes or (0,) * (facts.stages + 1), facts.tensor, history, dropped)
        self.roster.stood = self.memory.stood
        self._left: tuple[int, ...] = ()
        self._bare: dict[int, float] = {}
        """Stages that nobody could go on at, and since when."""
        self._balance = Balance(facts.stages, facts.rebalance_every_s, facts.download_s)
        self._evaluated: Version | None = None
        self._changed: float | None = None
        self._stuck_since: float | None = None
        self._courtesy: float | None = None
        self._courtesy_every = COURTESY_S / 2
        self._departed: dict[PeerId, float] = {}
        self.resigning = False
        """Finish the epoch under way and plan no other: somebody else is to lead."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force, if an epoch is under way."""
        return self._epoch.plan if self._epoch else None

    @property
    def idle(self) -> bool:
        """No epoch is under way."""
        return self.phase in (Phase.GATHER, Phase.FINISHED)

    @property
    def base(self) -> Version | None:
        """The version the swarm last agreed on; None before the first plan."""
        return self.roster.base

    def handle(self, event: Any, now: float) -> list[Any]:
        """One event in, actions out. Unknown or stale events change nothing."""
        if self.phase is Phase.FINISHED and not isinstance(event, ev.Heard | ev.Recalled | ev.Unreachable | ev.Tick):
            return []
        match event:
            case ev.Heard():
                return self._heard(event, now)
            case ev.Unreachable(peer):
                return self._gone(peer, now, "does not answer")
            case ev.Accused(about, by, _):
                known = self.roster.candidates
                return [ev.Probe(about)] if about in known and about != self.me and by in known else []
            case ev.Finished():
                return self._finished(event, now)
            case ev.Committed() | ev.Incomplete():
                return self._outcome(event, now)
            case ev.Evaluated(epoch, loss):
                return self._was_evaluated(epoch, loss, now)
            case ev.Recalled():
                return self._recalled(event, now)
            case ev.MoveRefused(peer):
                self._balance.refused(peer, now)
            case ev.Changed(rules):
                self.rules = max(self.rules, rules, key=lambda r: r.revision)
            case ev.Searched(job, routes, makespan):
                self.routing.searched(job, routes, makespan)
            case ev.Tick():
                return self._tick(now)
        return []

    # ------------------------------------------------------------ who is there

    def _heard(self, e: ev.Heard, now: float) -> list[Any]:
        self.term = max(self.term, e.term)
        done: list[Any] = []
        before = self.roster.candidates.get(e.peer)
        if before is not None and before.stage != e.stage:
            done = self._gone(e.peer, now, f"left stage {before.stage}")
            before = None
        self.roster.hear(e, now)
        if before is None:
            self._changed = now
        if self.phase is Phase.FINISHED:
            # Somebody came for the end, or stands elsewhere: the last plan again, so that it serves too.
            last = self.memory.history
            missing = last is not None and last.member(e.peer) is None
            return done + (self._try_plan(now) if missing and e.at == self.base else [])
        return done + (self._try_plan(now) if self.phase is Phase.GATHER else [])

    def _gone(self, peer: PeerId, now: float, why: str) -> list[Any]:
        known = self.roster.candidates.pop(peer, None) if peer != self.me else None
        if known is None:
            return []
        self._changed = now
        if known.leaving:
            self._departed[peer] = now
            done: list[Any] = [ev.Report("peer-left", f"peer {short(peer)} has left", facts={"peer": peer})]
        else:
            done = [ev.Report("peer-lost", f"peer {short(peer)} {why}", "warning", {"peer": peer})]
        epoch = self._epoch
        if epoch is None or epoch.plan.member(peer) is None or peer in epoch.dead:
            return done
        epoch.dead.add(peer)
        if self.phase is Phase.RUN:
            bare = epoch.bare
            if bare is not None:
                # No path can end any more, and there would be nobody to average.
                return done + self._abandon(now, f"stage {bare} has lost every peer that holds epoch {epoch.plan.epoch}")
            epoch.give_up(peer)
            to = tuple(m.peer for m in epoch.alive)
            return [*done, ev.SendLost(to, epoch.plan, tuple(sorted(epoch.dead))), *self._close_if_done(now)]
        if self.phase is Phase.ROUND:
            epoch.outcomes.pop(peer, None)
            member = epoch.plan.member(peer)
            return done + self._settle_unit(epoch.plan.unit_of(member), now) if member else done
        return done

    def _tick(self, now: float) -> list[Any]:
        done: list[Any] = []
        for peer, c in list(self.roster.candidates.items()):
            if peer != self.me and now - c.heard > self.facts.late_s:
                done += self._gone(peer, now, f"was last heard {now - c.heard:.1f} s ago")
        epoch = self._epoch
        if self.phase is Phase.GATHER:
            done += self._try_plan(now)
        elif epoch is not None and now >= epoch.deadline:
            if self.phase is Phase.RUN:
                epoch.give_up(None)
                done += self._close_if_done(now)
            elif self.phase is Phase.ROUND:
                late = [m.peer for m in epoch.awaited if m.peer not in epoch.outcomes and m.peer != self.me]
                for peer in late:
                    done += self._gone(peer, now, "did not finish the round in time")
                if self.phase is Phase.ROUND and not late:
                    done += self._abandon(now, "this peer did not finish its own round")
            elif self.phase is Phase.EVALUATE:
                done += self._was_evaluated(epoch.plan.epoch + 1, 0.0, now)
        return done

    # ------------------------------------------------------------ where to start from

    def _try_plan(self, now: float) -> list[Any]:
        facts = self.facts
        if self.resigning:
            self.waiting_for = "the next leader"
            return []
        stages = self.roster.replicas()
        young = self.base is None and all(c.at == GENESIS for c in self.roster.candidates.values())
        need = facts.min_replicas if young else 1
        thin = [s for s, peers in stages.items() if len(peers) < (need if s != ENDS else 1)]
        nobody = "a peer for " + ", ".join("the ends" if s == ENDS else f"stage {s}" for s in thin) if thin else ""
        if thin and (young or ENDS in thin or len(thin) > facts.spare):
            self.waiting_for = nobody
            return []
        # A young swarm waits a moment, so that peers that start together are in the first plan together.
        if self.base is None and self._changed is not None and now - self._changed < facts.settle_s:
            self.waiting_for = "more peers"
            return []
        base = self._choose_base(now)
        if base is None:
            self.waiting_for = nobody or self.waiting_for
            return self._relent(now)
        past = self.memory.past(base, self.roster.tokens_of(base), facts.target_batch)
        if past is None:
            return self._recall(base, now)
        self.waiting_for, self._stuck_since, self._recalling = "", None, None
        done = self._rebalance(now)
        try:
            return done + self._plan(base, past, now)
        except OutOfResources as e:
            return done + self._cannot_own(e)

    def _cannot_own(self, why: OutOfResources) -> list[Any]:
        """The members' memory does not hold the optimizer's state: wait for others, and say so once."""
        said, self._lacking = self._lacking, str(why)
        self.waiting_for = f"memory for the optimizer's state: {why}"
        text = f"the members cannot own every parameter: {why}; {why.next_step}"
        return [ev.Report("out-of-room", text, "error")] if said != self._lacking else []

    def _choose_base(self, now: float) -> Version | None:
        """The version to start from: of those every stage can start from, the end of the history with most tokens.

        Peers that stand elsewhere at the end of a history with more tokens than that get a moment to bring the
        rest of their side: what the bigger side of a parted network did is not undone because one of it came first.
        """
        able = self.roster.startable()
        best = able[0] if able else None
        if best is not None and self._counted(best) >= self.tokens:
            self._bare = {}
            return best if not self._await_richer(best, now) else None
        if (around := self._around(now)) is not None:
            return around
        if self._stuck_since is None:
            self._stuck_since = now
        # Going back costs epochs, so a swarm that has lost a whole stage first gives it a chance to return.
        if self.tokens and now - self._stuck_since < self.facts.patience_s:
            self.waiting_for = f"a peer that holds epoch {self.base.epoch}" if self.base else "peers that hold the newest epoch"
            return None
        if best is None:
            self.waiting_for = NOTHING_IN_COMMON
        return best

    def _around(self, now: float) -> Version | None:
        """The version to start from without the stages that nobody holds it at, if plans may leave out so many.

        Somebody who is there with an older version of such a stage gets a moment to find a newer one; then it goes on from that.
        """
        able = self.roster.startable(self.facts.spare) if self.facts.spare else []
        base = self.base if self.base in able else next(iter(able), None)
        if base is None or self._counted(base) < self.tokens:
            return None
        here = self.roster.replicas()
        bare = self.roster.bare(base)
        self._bare = {s: self._bare.get(s, now) for s in [*bare, *(-s for s in bare if here[s])]}
        if any(now - self._bare[s] < MISSED_S for s in bare):
            return None
        for s in bare:
            if now - self._bare.get(-s, now) >= self.facts.patience_s and base == self.base:
                self.roster.fall_back(s)
        # A run that is complete has all of its stages.
        return base if base.epoch < self.facts.epochs or not self.roster.bare(base) else None

    def _relent(self, now: float) -> list[Any]:
        """No version can be started from, and patience is over: take what there is where what was agreed on is lost for good."""
        if self._stuck_since is None or now - self._stuck_since < self.facts.patience_s or self.roster.startable():
            return []
        stages = self.roster.relent()
        if not stages:
            return []
        where = ", ".join("the ends" if s == ENDS else f"stage {s}" for s in stages)
        text = f"nobody has the parameters that were agreed on at {where}: goes on from what the peers there hold"
        return [ev.Report("agreement-lost", text, "warning", {"stages": list(stages)}), *self._try_plan(now)]

    def _counted(self, version: Version) -> int:
        """Tokens in the history of a version; of the one we have just committed we know it best."""
        return self.tokens if version == self.base else max(0, self.roster.tokens_of(version))

    def _await_richer(self, best: Version, now: float) -> bool:
        claims = self.roster.richer(max(self._counted(best), self.tokens), best)
        if not claims:
            return False
        # A claim costs nothing to make: whoever repeats one that comes to nothing is waited for ever more rarely.
        if self._courtesy is None or now - self._courtesy > self._courtesy_every:
            self._courtesy, self._courtesy_every = now, min(2 * self._courtesy_every, COURTESY_MOST_S)
        self.waiting_for = f"the side of {short(claims[0])}, which says it has counted more tokens"
        return now - self._courtesy < self.facts.patience_s

    def _recall(self, base: Version, now: float) -> list[Any]:
        self.waiting_for = f"the history of epoch {base.epoch}"
        match self.memory.asking(base, now, self.facts.recall_s):
            case "ask":
                return [ev.Recall(base, tuple(p for p in self.roster.holders(base) if p != self.me)[:RECALL_FROM])]
            case "over":
                return self._recalled(ev.Recalled(base), now)
        return []

    def _recalled(self, e: ev.Recalled, now: float) -> list[Any]:
        known = self.memory.recalled(e.version, e.plan, e.dropped)
        if known is None or self.phase is not Phase.GATHER:
            return []
        done: list[Any] = []
        if known and e.plan is not None:
            self.loss, self.loss_val, self.spread = e.plan.loss, e.plan.loss_val, e.plan.spread
        elif not known:
            text = f"nobody remembers the plan behind epoch {e.version.epoch}: the order of samples is guessed"
            done = [ev.Report("history-lost", text, "warning", {"epoch": e.version.epoch})]
        return done + self._try_plan(now)

    # ------------------------------------------------------------ plan

    def _plan(self, base: Version, past: Past, now: float) -> list[Any]:
        facts, roster = self.facts, self.roster
        done = self._change_history(base, past)
        roster.agree(base)
        done += self._leave_out(base)
        self.tokens = past.tokens
        finished = base.epoch >= facts.epochs
        said, rules, since = self._rule(base, past, finished)
        cell, meetings = (rules.cell, facts.meet(rules.outer)) if rules.revision else (facts.cell, facts.meetings)
        outer = meetings.number(base.epoch) if meetings and not finished else 0
        if said:
            outer, meetings = outer or 1, facts.meet(LEVEL)
        made = draft(roster, base, past, facts.assign, cell, meetings, outer)
        members = made.members
        self.term += 1
        sampler = facts.sampler(past.cursor)
        cursor = facts.cursor(sampler)
        paths: tuple[Path, ...] = ()
        by_stage = {stage: [row for of in cells.values() for row in of] for stage, cells in made.cells.items()}
        if not finished and not outer:
            count = facts.target_batch // facts.micro_batch
            samples = [tuple(sampler.take(facts.micro_batch)) for _ in range(count)]
            paths = self.routing.lay(roster, made.cells, samples, facts.assign_paths)
        self._lacking = ""
        self._departed = {p: at for p, at in self._departed.items() if now - at < DEPART_S}
        donors = {m.peer for m in members} | {p for p, c in roster.candidates.items() if c.leaving} | self._departed.keys()
        moved = {p: old for p, new in made.owners.items() if (old := made.before.get(p, new)) != new and old in donors}
        plan = Plan(
            base.epoch, self.term, self.me, members, paths, made.owners, moved, made.digests,
            facts.round_timeout_s if outer else facts.epoch_timeout_s, cursor, self.loss, self.loss_val, self.tokens, base.lineage,
            self.routing.forecast(by_stage) if paths else (0.0, 0.0), outer, made.reducers, self.spread, made.worked,
            roster.stages_that_stood(base), rules.change, since,
        )  # fmt: skip
        roster.agreed |= plan.digests
        self.memory.planned(plan)
        if not outer:
            working = {h.peer for p in paths for h in p.journey}
            roster.worked({m.peer for m in members if m.current}, working)
        if finished:
            self.phase, self._epoch = Phase.FINISHED, None
            return [*done, ev.SendPlan(plan), ev.Report("run-finished", f"all {facts.epochs} epochs are committed")]
        self.phase = Phase.RUN
        self._epoch = Attempt(plan, now, now + facts.epoch_timeout_s)
        if outer:
            # The members begin it as soon as they have the plan.
            self._open(self._epoch, now)
        listeners = sum(not m.current for m in members)
        text = f"epoch {base.epoch}: {len(paths)} micro-batches over {len(members) - listeners} peers"
        if outer:
            text = f"epoch {base.epoch}: outer round {outer} of {len({(m.stage, m.cell) for m in members})} cells in {len(plan.units)} groups"
        about = {
            "epoch": base.epoch, "lineage": base.lineage, "term": self.term, "hash": plan.hash[:12], "members": len(members),
            "listeners": listeners, "cursor": cursor[0], "returned": len(cursor[1]), "tokens": self.tokens,
            "micro_batches": len(paths), "peers": [m.peer for m in members], **(self.routing.about(by_stage) if paths else {}),
        }  # fmt: skip
        if self._left:
            about["left_out"] = list(self._left)
        if cell or outer:
            about |= {"cells": [m.cell for m in members], "outer": outer, "groups": [m.group for m in members] if outer else []}
        catching_up = f", {listeners} catching up" if listeners else ""
        return [*done, *said, ev.SendPlan(plan), ev.Report("epoch-planned", text + catching_up, "debug", about)]

    def _rule(self, base: Version, past: Past, finished: bool) -> tuple[list[Any], Rules, int]:
        """The settings of this plan and since which version they are in force; a word about it where they come into force here.

        What was in force goes with the history: where a newer change is known, it comes into force now, also when that was so
        before on a history that is undone. A plan that ends the run changes nothing."""
        try:
            before = self.facts.read(past.change)
        except Refused:
            before = self.facts.read("")  # a stranger's memory is not to be believed
        if before.revision >= self.rules.revision:
            self.rules = before
        if finished or (before.revision == self.rules.revision and not (before.revision and past.since == base.epoch)):
            return [], before, past.since
        o, cell = self.rules.outer, self.rules.cell or "all replicas"
        every = f", {o.strategy} of {o.carries} after every {o.every} epochs" if o.every else ""
        text = f"change {self.rules.revision} of the owner comes into force at epoch {base.epoch}: cells of {cell}{every}"
        return (
            [ev.Report("averaging-changed", text, facts={"epoch": base.epoch, "revision": self.rules.revision})],
            self.rules,
            base.epoch,
        )

    def _leave_out(self, base: Version) -> list[Any]:
        """Say it when paths begin to go around a stage, and when they no longer do."""
        was, self._left = self._left, tuple(self.roster.bare(base))
        gone, back = sorted(set(self._left) - set(was)), sorted(set(was) - set(self._left))
        text = "nobody holds stage {}: epoch {} goes on without it"
        done: list[Any] = [
            ev.Report("stage-left-out", text.format(s, base.epoch), "warning", {"stage": s, "epoch": base.epoch}) for s in gone
        ]
        text = "stage {} is there again from epoch {} on, with the parameters of epoch {}"
        held = {s: self.roster.held(s, base).epoch for s in back}
        return done + [
            ev.Report(
                "stage-back", text.format(s, base.epoch, held[s]), facts={"stage": s, "epoch": base.epoch, "held": held[s]}
            )
            for s in back
        ]

    def _change_history(self, base: Version, past: Past) -> list[Any]:
        """Say so when the swarm does not go on from where it was."""
        was = self.base
        if was is None or base == was:
            return []
        if self._counted(base) > self.tokens:
            self._courtesy_every = COURTESY_S / 2
            text = f"goes on from epoch {base.epoch} of a history with {past.tokens} tokens, more than the {self.tokens} here"
            return [
                ev.Report("history-changed", text, "warning", {"epoch": base.epoch, "from": was.epoch, "tokens": past.tokens})
            ]
        text = f"goes back from epoch {was.epoch} to {base.epoch}, which every stage still has"
        return [ev.Report("went-back", text, "warning", {"epoch": base.epoch, "from": was.epoch})]

    def _rebalance(self, now: float) -> list[Any]:
        """Once in a while, peers from the stages that can spare them to the stage that holds the others up."""
        if self.base is None or self.base.epoch >= self.facts.epochs or self._bare:
            return []
        done: list[Any] = []
        for m in self._balance.look(self.roster, self.base, now):
            self.moves += 1
            text = f"peer {short(m.peer)} should change from stage {m.source} to {m.target}: {m.gain:.2f} times as fast"
            about = {"peer": m.peer, "source": m.source, "target": m.target, "gain": m.gain}
            done += [ev.Move(m.peer, m.target), ev.Report("move-asked", text, facts=about)]
        return done

    # ------------------------------------------------------------ run and close

    def _finished(self, e: ev.Finished, now: float) -> list[Any]:
        epoch = self._epoch
        if self.phase is not Phase.RUN or epoch is None or e.plan_hash != epoch.plan.hash:
            return []
        epoch.report(e, self.facts.micro_batch * self.facts.sequence)
        return self._close_if_done(now)

    def _close_if_done(self, now: float) -> list[Any]:
        epoch = self._epoch
        if epoch is None or self.phase is not Phase.RUN or len(epoch.results) < len(epoch.plan.paths):
            return []
        if not any(r.counted for r in epoch.results.values()):
            return self._abandon(now, "no micro-batch was finished")
        dropped = epoch.dropped
        done: list[Any] = []
        for unit in self._open(epoch, now):
            owners = epoch.reown(unit, {}, self.facts.assign)
            done.append(
                ev.SendRound(
                    tuple(m.peer for m in epoch.living(unit)),
                    epoch.plan,
                    0,
                    tuple(sorted(epoch.dead)),
                    owners,
                    (),
                    dropped,
                    self.facts.round_timeout_s,
                    tokens=epoch.tokens,
                )  # fmt: skip
            )
        return done + self.routing.search(self.roster)

    def _open(self, epoch: Attempt, now: float) -> tuple[Unit, ...]:
        """The rounds begin; those who have one."""
        self.phase, epoch.closed = Phase.ROUND, now
        epoch.deadline = now + self.facts.round_timeout_s * 1.5
        epoch.attempts = dict.fromkeys(epoch.plan.units, 0)
        return epoch.units

    # ------------------------------------------------------------ round and commit

    def _outcome(self, e: ev.Committed | ev.Incomplete, now: float) -> list[Any]:
        epoch = self._epoch
        if self.phase is not Phase.ROUND or epoch is None or e.plan_hash != epoch.plan.hash:
            return []
        member = epoch.plan.member(e.peer)
        if member is None or e.peer in epoch.dead:
            return []
        if isinstance(e, ev.Incomplete) and (
            e.attempt != epoch.attempts[epoch.plan.unit_of(member)] or isinstance(epoch.outcomes.get(e.peer), ev.Committed)
        ):
            return []
        epoch.outcomes[e.peer] = e
        if isinstance(e, ev.Committed) and (c := self.roster.candidates.get(e.peer)):
            c.reachable = tuple({*c.reachable, epoch.plan.base}) if member.current else c.reachable
            c.at, c.tokens = epoch.makes, epoch.plan.tokens + epoch.tokens
            c.digest, c.speed, c.cell = e.digest, e.speed or c.speed, member.cell
        done: list[Any] = []
        if isinstance(e, ev.Incomplete):
            # The accused are probed now, so that the repair does not hand them the same parts again.
            done = [ev.Probe(p) for p in e.failed if p in self.roster.candidates and p != self.me]
        return done + self._settle_unit(epoch.plan.unit_of(member), now)

    def _settle_unit(self, unit: Unit, now: float) -> list[Any]:
        epoch, stage = self._epoch, unit[0]
        if epoch is None or self.phase is not Phase.ROUND:
            return []
        if epoch.bare is not None:
            return self._abandon(now, f"stage {stage} has lost every peer that holds epoch {epoch.plan.epoch}")
        peers = [m.peer for m in epoch.living(unit)] if unit in epoch.units else []
        if any(p not in epoch.outcomes for p in peers):
            return []
        unfinished = [p for p in peers if isinstance(epoch.outcomes[p], ev.Incomplete)]
        if unfinished:
            return self._repair(epoch, unit, unfinished, now)
        done = all(isinstance(epoch.outcomes.get(m.peer), ev.Committed) for m in epoch.awaited)
        return self._commit(now) if done else []

    def _repair(self, epoch: Attempt, unit: Unit, unfinished: list[PeerId], now: float) -> list[Any]:
        """Nobody in the unit is averaging any more and some lack parts: copy from who has all, else re-own the dead's."""
        peers, stage = [m.peer for m in epoch.living(unit)], unit[0]
        complete = tuple(p for p in peers if isinstance(epoch.outcomes[p], ev.Committed))
        epoch.attempts[unit] += 1
        if epoch.attempts[unit] > 2 * len(peers) + 2:
            return self._abandon(now, f"stage {stage} could not finish its round in {epoch.attempts[unit]} attempts")
        ended = {p: o for p in unfinished if isinstance(o := epoch.outcomes.pop(p), ev.Incomplete)}
        holders: dict[str, PeerId] = {}
        for peer, outcome in ended.items():
            holders.update({part: peer for part in outcome.holds if part not in holders})
        if not complete:
            epoch.blame(ended)
        owners = {} if complete else epoch.reown(unit, holders, self.facts.assign)
        committed = {p: o.digest for p in complete if isinstance(o := epoch.outcomes[p], ev.Committed)}
        epoch.deadline = now + self.facts.round_timeout_s * 1.5
        epoch.repaired += 1
        self.repaired += 1
        return [
            ev.SendRound(
                tuple(unfinished), epoch.plan, epoch.attempts[unit], tuple(sorted(epoch.dead)), owners, complete,
                epoch.dropped, self.facts.round_timeout_s,
                majority(committed) if committed else "", epoch.tokens,
            ),
            ev.Report("round-repaired", f"stage {stage} averages again without the dead", "warning",
                      {"stage": stage, "attempt": epoch.attempts[unit], "dead": len(epoch.dead)}),
        ]  # fmt: skip

    def _commit(self, now: float) -> list[Any]:
        epoch = self._epoch
        if epoch is None:
            return []
        done = self._check_digests(epoch)
        self.spread = epoch.apart(self.roster.agreed)
        tokens, dropped = epoch.tokens, epoch.dropped
        if not epoch.plan.outer:
            self.loss = sum(r.loss_sum for r in epoch.results.values() if r.counted) / max(1, tokens)
        self.tokens += tokens
        base = self.roster.base = epoch.makes
        if not epoch.plan.outer:
            self.routing.committed(epoch.plan, dropped, now - epoch.closed)
        self.memory.committed(base, epoch.plan, epoch.final_owners, dropped, self.tokens)
        done.append(
            ev.Report(
                "epoch-committed",
                f"epoch {base.epoch}/{self.facts.epochs} committed, loss {self.loss:.3f}",
                facts={
                    "epoch": base.epoch,
                    "lineage": base.lineage,
                    "term": epoch.plan.term,
                    "hash": epoch.plan.hash[:12],
                    "loss": self.loss,
                    "tokens": tokens,
                    "counted": len(epoch.results) - len(dropped),
                    "seconds": now - epoch.started,
                    "run_s": epoch.closed - epoch.started,
                    "predicted_s": round(sum(epoch.plan.forecast), 4),
                    "dropped": len(dropped),
                    "repaired": epoch.repaired,
                    "dead": len(epoch.dead),
                    **({"apart": {s: apart for s, (_, apart) in self.spread.items()}} if self.spread else {}),
                },
            )  # fmt: skip
        )
        every = self.facts.eval_every
        if every and (base.epoch % every == 0 or base.epoch == self.facts.epochs) and self._evaluated != base:
            self.phase = Phase.EVALUATE
            epoch.deadline = now + self.facts.epoch_timeout_s
            return [*done, ev.Evaluate(base.epoch, epoch.plan)]
        self.phase, self._epoch = Phase.GATHER, None
        return done + self._try_plan(now)

    def _check_digests(self, epoch: Attempt) -> list[Any]:
        """Equal digests inside a cell are an invariant; who differs from the majority has to catch up."""
        done: list[Any] = []
        worked = {stage for stage, _ in epoch.units}
        agreed = self.roster.agreed = {unit: digest for unit, digest in self.roster.agreed.items() if unit[0] not in worked}
        self.roster.fallen.clear()
        for unit in epoch.units:
            stage, members = unit[0], epoch.plan.unit(unit)
            said = {m.peer: o.digest for m in members if isinstance(o := epoch.outcomes.get(m.peer), ev.Committed)}
            best = majority(said)
            agreed |= {(stage, m.cell): best for m in members}
            for peer in sorted(p for p, digest in said.items() if digest != best):
                self.mismatches += 1
                done.append(
                    ev.Report(
                        "digest-mismatch",
                        f"peer {short(peer)} differs from its cell and catches up",
                        "error",
                        {"peer": peer, "stage": stage},
                    )  # fmt: skip
                )
        return done

    def _was_evaluated(self, epoch: int, loss: float, now: float) -> list[Any]:
        if self.phase is not Phase.EVALUATE or self.base is None or self._epoch is None:
            return []
        if epoch != self.base.epoch:
            return []
        self._evaluated = self.base
        done: list[Any] = []
        if loss > 0:
            self.loss_val = loss
            done = [
                ev.Report("evaluated", f"held-out loss {loss:.3f} at epoch {epoch}", facts={"epoch": epoch, "loss_val": loss})
            ]
        self.phase, self._epoch = Phase.GATHER, None
        return done + self._try_plan(now)

    def _abandon(self, now: float, why: str) -> list[Any]:
        """Give this attempt up: nothing of it counts, all its samples go back, the version stays."""
        epoch = self._epoch
        self.failed_rounds += 1
        self.phase, self._epoch, self._changed = Phase.GATHER, None, now
        if epoch is None:
            return []
        about = {"epoch": epoch.plan.epoch, "hash": epoch.plan.hash[:12], "micro_batches": len(epoch.plan.paths)}
        return [ev.Report("epoch-abandoned", f"epoch {epoch.plan.epoch} starts again: {why}", "warning", about)]
