"""One simulated peer: the conversation of ``node.training.service`` around the real leader, member
and election.

It decides nothing: who leads is :class:`Election`'s word, what an epoch is the leader's and the
member's. A note is the event it stands for; only what a liar says goes over the real notes, whose
checks are part of what is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median_high
from typing import TYPE_CHECKING, Any

from node.core.errors import Refused, WireError
from node.core.ids import ENDS, PeerId
from node.core.journey import Plan, Version
from node.scheduler.choosing import Choosing
from node.sim.chair import Chair
from node.sim.device import Device
from node.sim.directory import Body
from node.sim.disk import Disk
from node.sim.labour import Labour
from node.sim.past import SimPast
from node.sim.pipe import Pipe
from node.sim.rounds import Rounds
from node.sim.world import HEAD, Call, Host
from node.training.colleagues import Colleagues
from node.training.election import Election, Sighting
from node.training.leader.leader import Leader
from node.training.member import State
from node.training.protocol import events as ev
from node.training.protocol.bounds import Terms
from node.training.protocol.objection import of_averaging
from node.training.protocol.pace import (
    ACCUSE_EVERY_S,
    HEARTBEAT_S,
    PROBE_TIMEOUT_S,
    STANDS_S,
    TELL_TIMEOUT_S,
    TELL_TRIES,
    TICK_S,
)
from node.training.protocol.rules import Rules, Standing

if TYPE_CHECKING:
    from node.sim.swarm import Swarm

Reason = str | None
CATCH_UP_TRIES, RETRY_S, LOOK_S = 5, 1.0, 1.5
"""As node.app.daemon: how often a newcomer asks for state, and how long it looks for company
first."""
RIPE_S = 5.0
"""Sooner than real peers, because an epoch is shorter here: after so long together peers are
colleagues."""
HASTE_S = 0.5
"""As node.app.placing: between two looks at what others claim."""


class Newcomer(Host):
    """A process that has no stage yet. It chooses one among others who choose, as
    ``node.app.placing`` does; then it is a :class:`SimPeer`."""

    def __init__(self, swarm: Swarm, name: PeerId, open_to: str) -> None:
        super().__init__(swarm.world, name)
        self.swarm, self.open_to = swarm, open_to
        self.choosing = swarm.make.choosing(name, open_to, swarm.setup.stages, self.world.now)
        self.after(0.0, self._look)

    def _look(self) -> None:
        now, directory, machine = self.world.now, self.swarm.directory, self.choosing
        others = directory.placed(self.name, self.swarm.setup.stages, now, self.wall)
        machine.look(others, now)
        stage = machine.stage
        state = "choosing" if stage is None else "starting"
        body = Body(stage, state, 0, open_to=self.open_to, settled=False)
        directory.post(self.name, body, now, self.wall)
        if stage is not None and machine.may_build:
            self.swarm.host(self, stage)
        else:
            self.after(HASTE_S, self._look)


class SimPeer(Host):
    """A process with a stage; :meth:`boot` begins a new life of it, its disk stays."""

    def __init__(
        self, swarm: Swarm, name: PeerId, stage: int, slowness: float, open_to: str = "auto"
    ) -> None:
        super().__init__(swarm.world, name)
        self.swarm, self.stage, self.slowness, self.open_to = swarm, stage, slowness, open_to
        self.disk = Disk(swarm.setup.checkpoint_keep, swarm.setup.checkpoint_s)
        self.lie = ""
        self.broken_steps = 0
        self._new()

    def _new(self) -> None:
        make = self.swarm.make
        self.device = Device(self, self.slowness)
        self.faults = make.fault_book()
        self.labour = Labour(self, self.stage, self.disk)
        self.pipe, self.rounds, self.between = Pipe(self), Rounds(self), Rounds(self, between=True)
        self.member = make.member(self.name, self.labour.version, self.labour.checkpoints(), 0)
        self.past = SimPast(self)
        self.standing = Standing(self.swarm.read(""))
        if self.disk.change:
            self.standing.learns(self.swarm.read(self.disk.change))
        self.chair = Chair(self)
        stages, now = self.swarm.setup.stages, self.world.now
        self.choosing = make.choosing(self.name, self.open_to, stages, now, self.stage)
        self.terms = Terms()
        self.colleagues = Colleagues(self.name, RIPE_S)
        self.election = Election(self.name, self.world.now, self.colleagues)
        self.leader: Leader | None = None
        self.leaving = self.ready = False
        self.target: int | None = None
        self.sightings: dict[PeerId, Sighting] = {}
        self.follows: dict[PeerId, PeerId] = {}
        self._shown: PeerId | None = None
        self._jobs: list[Callable[[Callable[[], None]], None]] = []
        self._speaking = False
        self._results: list[ev.Result] = []
        self._result_plan: Plan | None = None
        self._flushing = False
        self._accused: dict[PeerId, float] = {}
        self._seen_anybody = False
        self._beating = 0

    # ----------------------------------------------------------- life

    def boot(self, settle: bool = False, choosing: Choosing | None = None) -> None:
        """A new process: the newest checkpoint of its disk, then what the others have, then it
        takes part. ``settle``: the swarm starts with it, there is nobody to ask. ``choosing``: how
        it came to its stage, when it chose that itself."""
        self.life += 1
        self.alive, self.paused = True, False
        self.inbox.clear()
        self.calls.clear()
        self.disk.boot()
        self._new()
        self.choosing = choosing or self.choosing
        self.after(0.0, self._watch_directory)
        self.after(HASTE_S, self._place)
        found = self.labour.checkpoints()
        if found:
            self.labour.restore(found[-1])
        if settle:
            self._take_part()
        else:
            self.after(LOOK_S, self._catch_up, CATCH_UP_TRIES)

    def _catch_up(self, tries: int) -> None:
        donors = self.swarm.directory.read(self.name, self.stage, self.world.now, self.wall)
        epochs = {
            r.peer: r.body.epoch
            for r in donors
            if r.body.state in ("training", "ready", "finished")
        }
        epochs = {p: e for p, e in epochs.items() if e <= self.swarm.setup.epochs}
        epochs = {p: e for p, e in epochs.items() if p in self.colleagues} or epochs
        newest = median_high(epochs.values()) if epochs else 0
        if newest <= self.labour.settled or tries == 0:
            self._take_part()
            return

        def got(found: tuple[Version, int, Any] | None) -> None:
            if found is None:
                self.after(RETRY_S, self._catch_up, tries - 1)
            else:
                if found[0].epoch >= self.labour.version.epoch:
                    self.labour.take(*found)
                self._take_part()

        self.labour.fetch(sorted(p for p, e in epochs.items() if e >= newest - 1), None, "", got)

    def _take_part(self) -> None:
        self.ready = True
        self.member.stand(
            self.labour.version, self.labour.checkpoints(), self.labour.tokens, self.labour.cell
        )
        self.election = Election(self.name, self.world.now, self.colleagues)
        self._announce()
        self._beat(self._beating)
        self.after(TICK_S * self.world.rng.random(), self._clockwork)

    def leave(self, to: int | None = None) -> None:
        """``tutti drain``: the epoch under way, the next plan without this peer, then gone. ``to``:
        then at that stage."""
        if not self.leaving:
            self.leaving, self.target = True, to
            if self.leader is not None:
                self.leader.resigning = True
            self._say_ready(lambda: None)
            self._announce()
            self.after(TICK_S, self._leave_when_calm, self.world.now + 60.0)

    def _leave_when_calm(self, until: float) -> None:
        self._lead_or_not()
        busy = (
            self.member.state in (State.RUN, State.AVERAGE, State.COPY) or self.leader is not None
        )
        if busy and self.world.now < until:
            self.after(TICK_S, self._leave_when_calm, until)
        else:
            self._say_ready(lambda: None)
            self.after(2.0, self.swarm.left, self, self.target)

    # ----------------------------------------------------------- the noticeboard

    def _watch_directory(self) -> None:
        self._look()
        others = self._seen_anybody
        settings = self.swarm.directory.settings
        self.after(
            settings.refresh_s if others else min(0.5, settings.refresh_s), self._watch_directory
        )

    def _look(self) -> None:
        now, directory = self.world.now, self.swarm.directory
        directory.post(self.name, self.body(), now, self.wall)
        able = ("ready", "training", "finished")
        ends = [r for r in directory.read(self.name, ENDS, now, self.wall)]
        self._seen_anybody = bool(ends)
        self.sightings = {
            r.peer: Sighting(r.seq, r.body.leads) for r in ends if r.body.state in able
        }
        self.follows = directory.follows(self.name, now, self.wall)

    def _announce(self) -> None:
        self.after(0.0, self._look)

    def body(self) -> Body:
        """What it posts of itself."""
        state = "finished" if self.member.state is State.FINISHED else "training"
        state = "draining" if self.leaving else state if self.ready else "joining"
        if self.target is not None:
            return Body(self.target, "starting", 0, open_to=self.open_to)
        leads, speed = self.leader is not None, self.labour.speed()
        settled = self.choosing.settled
        return Body(
            self.stage,
            state,
            self.member.holds,
            leads,
            speed,
            self.open_to,
            settled,
            self.following,
        )

    # ----------------------------------------------------------- where it is

    def _place(self) -> None:
        """See what others claim, until the own claim is settled; where nobody is at the ends, and
        so nobody leads, do what the rule says."""
        swarm, machine, now = self.swarm, self.choosing, self.world.now
        waits = self.ready and self.member.state is State.IDLE and self.member.holds == 0
        settled = machine.settled
        others = swarm.directory.placed(self.name, swarm.setup.stages, now, self.wall)
        to = None if self.leaving else machine.look(others, now, waits=waits)
        if to is not None and swarm.move(self, to) is not None:
            machine.stays(self.stage)
        if machine.settled != settled:
            self._announce()
        if self.member.holds == 0 or not machine.settled:
            self.after(HASTE_S, self._place)

    # ----------------------------------------------------------- who leads

    def leader_id(self) -> PeerId | None:
        self.election.see(self.sightings, self.follows)
        self.election.following = self.following
        able = self.stage == ENDS and not self.leaving
        return self.election.leader(self.world.now, able=able, leads=self.leader is not None)

    @property
    def following(self) -> PeerId | None:
        """Whose plan is in force here, or will be because this peer leads."""
        plan = self.member.plan
        return self.name if self.leader is not None else plan.leader if plan is not None else None

    def _lead_or_not(self) -> None:
        leads = self.leader_id() == self.name
        if leads and self.leader is None:
            m = self.member
            facts = self.swarm.facts_for(self)
            self.leader = self.swarm.make.leader(
                self.name,
                facts,
                term=m.term,
                history=m.plan,
                dropped=m.dropped,
                rules=self.standing.known,
                known=self.colleagues.all,
            )
            self.swarm.watch.leads(self)
            self._announce()
        elif not leads and self.leader is not None and (not self.leaving or self.leader.idle):
            self.leader = None
            self._announce()

    def _beat(self, beating: int) -> None:
        """Once in a while, or sooner; of two beats that overlap only the newer goes on."""
        if beating == self._beating:
            self._lead_or_not()
            self._say_ready(lambda: self.after(HEARTBEAT_S, self._beat, beating))

    def _clockwork(self) -> None:
        if self.leader is not None:
            coming = self.swarm.directory.coming(self.name, self.world.now, self.wall)
            self.lead(ev.Tick(coming, self.colleagues.all))
        self.after(TICK_S, self._clockwork)

    # ----------------------------------------------------------- words to the leader, one at a time

    def _queue(self, job: Callable[[Callable[[], None]], None]) -> None:
        self._jobs.append(job)
        if not self._speaking:
            self._next_job()

    def _next_job(self) -> None:
        self._speaking = bool(self._jobs)
        if self._jobs:
            self._jobs.pop(0)(self._next_job)

    def _say_ready(self, then: Callable[[], None]) -> None:
        def job(done: Callable[[], None]) -> None:
            asked: set[PeerId] = set()

            def end() -> None:
                done()
                then()

            def ask() -> None:
                leader = self.leader_id()
                if leader is None or leader in asked:
                    end()
                    return
                asked.add(leader)
                heard = replace(self.swarm.make.heard(self), change=self.standing.tells(leader))
                if leader == self.name:
                    self.lead(heard)
                    end()
                    return

                def answered(refused: Reason) -> None:
                    if refused is None:
                        self.election.answered(leader, self.world.now)
                        end()
                    else:
                        self.election.doubt(leader, self.world.now)
                        ask()

                def lost(why: str, since: float) -> None:
                    self.election.shun(leader, self.world.now)
                    ask()

                self.election.tells(leader, self.world.now)
                self.word(leader, heard, PROBE_TIMEOUT_S * 2, answered, lost)

            ask()

        self._queue(job)

    def _tell_leader(self, plan: Plan, note: Any) -> None:
        note = self.swarm.make.note(self, note)

        def job(done: Callable[[], None]) -> None:
            if plan.leader == self.name:
                self.lead(note)
                done()
                return

            def attempt(left: int) -> None:
                if left == 0:
                    done()
                    return
                again = lambda why: self.after(TICK_S, attempt, left - 1)  # noqa: E731
                self.tell(plan.leader, note, TELL_TIMEOUT_S, lambda refused: done(), again)

            attempt(TELL_TRIES)

        self._queue(job)

    def word(
        self,
        peer: PeerId,
        note: Any,
        floor_s: float,
        answered: Callable[[Reason], None],
        lost: Callable[[str, float], None],
        nbytes: int = HEAD,
    ) -> None:
        """As :meth:`tell`: over the connection there is, and when that breaks over a new one, whose
        attempt began at ``since``."""

        def again(why: str) -> None:
            since = self.world.now
            self.tell(peer, note, floor_s, answered, lambda why: lost(why, since), nbytes)

        self.tell(peer, note, STANDS_S, answered, again, nbytes)

    def tell(
        self,
        peer: PeerId,
        note: Any,
        timeout: float,
        answered: Callable[[Reason], None],
        lost: Callable[[str], None],
        nbytes: int = HEAD,
    ) -> None:
        if self.faults.banned(peer, self.world.now):
            self.after(0.0, lost, "banned")
            return
        me = self.name

        def serve(there: SimPeer, call: Call) -> None:
            there.hear(me, note, call.say)

        def hear(reason: Reason) -> None:
            call.end()
            answered(reason)

        call = self.call(peer, nbytes, serve, hear, lost, timeout)

    # ----------------------------------------------------------- notes in

    def hear(self, peer: PeerId, note: Any, answer: Callable[[Reason], None]) -> None:
        """A note from another peer."""
        if self.refuses(peer):
            answer("banned")
            return
        try:
            answer(self._hear(peer, note))
        except WireError as e:
            self.fault(peer, 1.0)
            answer(str(e))

    def _hear(self, peer: PeerId, note: Any) -> Reason:
        if not self.ready:
            return "not ready"
        match note:
            case None:
                return None if peer == self.leader_id() else "this peer follows another leader"
            case ev.PlanArrived(plan):
                return self._hear_plan(peer, plan)
            case ev.RoundArrived():
                if why := self.swarm.facts.bounds.of_round(note):
                    raise WireError(why)
                return self.happens(note)
            case ev.SendLost(_, plan, dead):
                if self.member.plan is not None and plan.hash == self.member.plan.hash:
                    for other in sorted({*dead} - {self.name}):
                        self._gone(other)
                return None
            case ev.Move(_, stage):
                return self.swarm.move(self, stage)
        if self.leader is None:
            return "this peer does not lead"
        note = self.swarm.make.parsed(peer, note, not self.swarm.honest(peer))
        if isinstance(note, ev.Heard) and (why := self.swarm.facts.bounds.of_heard(note)):
            raise WireError(why)
        if isinstance(note, ev.Heard) and note.change:
            try:
                self.change(note.change)
            except Refused as e:
                raise WireError(e.what) from e
        self.lead(note)
        return None

    def change(self, text: str) -> None:
        """The owner's change to how cells average, from whomever. Raises Refused when the owner did
        not sign it."""
        rules = self.swarm.read(text)
        if self.standing.learns(rules):
            self.disk.change = text
            self._beating += 1
            self.after(0.0, self._beat, self._beating)
            self.lead(ev.Changed(rules))

    def _hear_plan(self, peer: PeerId, plan: Plan) -> Reason:
        if plan.leader != peer:
            raise WireError("a plan that its sender does not lead")
        if why := self.swarm.facts.bounds.of_plan(plan):
            raise WireError(why)
        if plan.term > self.terms.most(self.wall):
            raise WireError("a term that cannot have been reached")
        if not self.election.heeds(peer, self.world.now):
            return "this peer follows another leader"
        me = plan.member(self.name)
        current = {m.peer for m in plan.cell(self.stage, me.cell) if m.current} if me else set()
        if me and any(plan.owner(n, me.cell) not in current for n in self.labour.names):
            raise WireError("a plan nobody could follow")
        rules, epochs = self._rules(plan), self.swarm.setup.epochs
        if why := of_averaging(plan, rules, epochs, self.member.at, self.member.plan):
            self.swarm.watch.objected(self, plan, why)
            raise WireError("a plan nobody could follow")
        if old := self.standing.refuses(plan, rules):
            self._beating += 1
            self.after(0.0, self._beat, self._beating)
            return old
        self.election.forgive(peer)
        return self.happens(ev.PlanArrived(plan))

    def _rules(self, plan: Plan) -> Rules:
        try:
            return self.swarm.read(plan.change)
        except Refused as e:
            raise WireError("a plan nobody could follow") from e

    def refuses(self, peer: PeerId) -> bool:
        """Whether it is not listened to now."""
        return self.faults.banned(peer, self.world.now) > 0

    def fault(self, peer: PeerId, weight: float) -> None:
        """A fault of another peer."""
        if self.faults.count(peer, weight, self.world.now):
            self.swarm.watch.banned(self, peer)

    def accuse(self, peer: PeerId, reason: str) -> None:
        plan, now = self.member.plan, self.world.now
        if plan is None or now - self._accused.get(peer, -1e9) < ACCUSE_EVERY_S:
            return
        self._accused[peer] = now
        if peer == plan.leader:
            self._beating += 1
            # nobody else can be told: the next word to it shows whether it lives
            self._beat(self._beating)
            return
        self._tell_leader(plan, ev.Accused(peer, self.name, reason))

    def connection_lost(self, peer: PeerId) -> None:
        if self.ready:
            self.accuse(peer, "its connection broke")
            self._gone(peer)

    def _gone(self, peer: PeerId) -> None:
        """No round, inside the cell or between cells, waits for it."""
        self.rounds.gone(peer)
        self.between.gone(peer)

    def hop_failed(self, peer: PeerId, why: str) -> None:
        """A tensor could not be given to ``peer``."""
        self.accuse(peer, why)

    def checkpoint_written(self) -> None:
        self.member.checkpoints = self.labour.checkpoints()

    def lead(self, event: Any) -> None:
        """Feed the leader, if this peer is one."""
        self.chair.lead(event)

    # ----------------------------------------------------------- taking part

    def happens(self, event: Any) -> Reason:
        """Feed the member and carry out what it decides, in order. A refusal's reason, or None."""
        queue, refused = [event], None
        self.member.digest = self.swarm.make.digest(self, self.labour.digest)
        while queue:
            event = queue.pop(0)
            at, term = self.member.at, self.member.term
            actions = self.member.handle(event, self.world.now)
            self.swarm.watch.member(self, event, actions, at, term)
            for a in actions:
                if isinstance(a, ev.Refuse):
                    refused = a.reason
                elif (follow := self._act(a)) is not None:
                    queue.append(follow)
        return refused

    def _act(self, action: Any) -> Any:
        match action:
            case ev.GoTo(version, how):
                self.labour.stop()
                self.labour.go_to(version, how)
            case ev.Settle(epoch):
                self.labour.settle(epoch, self.member.plan)
                self.member.checkpoints = self.labour.checkpoints()
            case ev.Begin(plan, listener, behind):
                self.labour.stop()
                self._follow(plan)
                if behind is not None:
                    self.past.give_up(*behind, plan.leader)
                else:
                    self.past.stood(plan.base, plan.tokens)
                self._results, self._result_plan = [], plan
                if self.standing.follows(plan.leader, self._rules(plan)):
                    self.disk.change = plan.change
                self.labour.begin(plan, listener)
                self.swarm.watch.began(self, plan, listener)
                if self.stage == ENDS and not listener:
                    self.pipe.run([p for p in plan.paths if p.origin == self.name], self._done)
            case ev.Average(plan, r, listener):
                self.labour.average(plan, r, listener, self.happens)
            case ev.CopyFrom(plan, r):
                self.labour.copy(plan, r, self.happens)
            case ev.Adopt(plan, ended):
                digest = self.swarm.make.digest(self, self.labour.adopt(plan))
                return ev.Adopted(plan.epoch, plan.term, ended.attempt, digest, ended.contributors)
            case ev.TellCommitted(plan, attempt, digest, contributors):
                self.swarm.watch.adopted(self, plan)
                speed, came = self.labour.speed(), self.labour.arrived
                note = ev.Committed(
                    self.name, plan.hash, attempt, digest, speed, contributors, arrived=came
                )
                self._tell_leader(plan, note)
            case ev.TellIncomplete(plan, ended):
                for peer in ended.failed:
                    self.accuse(peer, "its fresh parts did not come")
                self._tell_leader(
                    plan,
                    ev.Incomplete(self.name, plan.hash, ended.attempt, ended.holds, ended.failed),
                )
            case ev.Finish(plan):
                self.labour.stop()
                self._follow(plan)
                self.past.stood(plan.base, plan.tokens)
                self.labour.finish(plan)
        return None

    def _follow(self, plan: Plan) -> None:
        self.terms.saw(plan.term, self.wall)
        self.colleagues.meet([m.peer for m in plan.members if m.current], self.world.now)
        self.disk.colleagues = self.colleagues.all
        if plan.leader != self._shown:
            self._shown = plan.leader
            self._announce()

    def _done(self, result: ev.Result) -> None:
        self._results.append(result)
        if not self._flushing and self._result_plan is not None:
            self._flushing = True
            self.after(0.0, self._flush, self._result_plan)

    def _flush(self, plan: Plan) -> None:
        self._flushing = False
        if self._results and self._result_plan is plan:
            batch, self._results = tuple(self._results), []
            self._tell_leader(plan, ev.Finished(self.name, plan.hash, batch))
