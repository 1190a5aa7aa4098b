"""What a simulated member does in an epoch, as ``node.training.work`` does it: begin, average,
adopt, settle, go back.

Parameters and optimizer state are the hashes of :mod:`node.sim.values`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from node.core.ids import ENDS, PeerId, RoundId
from node.core.journey import Plan, Unit, Version, in_cell, lineage_after
from node.optim.ownership import ownership_hash
from node.scheduler.costs import STEADY, Measured, Way
from node.scheduler.throughput import Rate
from node.sim import edges
from node.sim.disk import Checkpoint, Disk
from node.sim.rounds import Request
from node.sim.streams import Sent, Streams
from node.sim.values import (
    GENESIS,
    Moment,
    Share,
    Value,
    digest_of,
    first_values,
    fresh_value,
    mark_of,
    mean_value,
    next_moment,
)
from node.sim.world import HEAD, Call
from node.training.protocol import events as ev
from node.training.protocol.cells import ANY
from node.training.protocol.meetings import PUSH_AGAIN, speakers, weights
from node.training.protocol.memory import Past
from node.training.protocol.rules import between, lands, levels
from node.training.rounds.serving import Serving

if TYPE_CHECKING:
    from node.sim.peer import SimPeer

TAKE_OVER_TRIES, TAKE_OVER_PAUSE_S = 5, 0.2
"""As node.training.work."""
LATE = "#late"
"""What an outer round was closed without, behind the part's name."""
FETCH_S = 10.0
"""For one donor to give a stage, or optimizer state."""


class Labour:
    """One stage's state and what is done to it."""

    def __init__(self, peer: SimPeer, stage: int, disk: Disk) -> None:
        self.peer, self.stage, self.disk = peer, stage, disk
        self.setup = peer.swarm.setup
        self.names = self.setup.names[stage]
        self.values = first_values(self.names)
        self.version, self.tokens, self.cell = GENESIS, 0, ANY
        self.moments: dict[str, Moment] = {}
        self.digest = digest_of(self.values)
        self.fresh: dict[str, Value] | None = None
        self.arrived: tuple[int, ...] = ()
        self.settled = 0
        self.moments_lost = 0
        self._before: dict[str, Value] | None = None
        self.owed: dict[str, Moment] = {}
        """With error feedback, what rounding has lost of this peer's words for its cell, as
        node.training.rounds.owed keeps it."""
        self._said: dict[str, str] = {}
        self.streams = Streams(peer)
        self._owed_before: dict[str, Moment] | None = None
        self._by: dict[str, tuple[PeerId, ...]] = {}
        self._staged: dict[int, dict[str, Moment]] = {}
        self._owned: frozenset[str] | None = None
        self._plan: Plan | None = None
        self._share: Share | None = None
        self._arriving = 0
        self._arrived: list[Callable[[], None]] = []
        self._token: object = None
        self._round: RoundId | None = None
        self._busy0 = 0.0
        self._flip = False
        self._stepped: set[str] = set()
        self._pushed: set[tuple[str, int]] = set()
        self.serving: Serving[str] = Serving()
        self._rate = Rate()

    # ----------------------------------------------------------- what is here

    def checkpoints(self) -> tuple[Version, ...]:
        """Versions on the disk, of the cell whose parameters are in place."""
        return self.disk.versions(self.stage, self.cell)

    def speed(self) -> float:
        """Micro-batches per second of device time; 0 before the first."""
        return self._rate.per_second

    def costs(self) -> Measured:
        """What work and ways cost it."""
        pipe, now = self.peer.pipe, self.peer.world.now
        ways = tuple(
            (p, Way(tensor, trip)) for p, (tensor, trip) in sorted(pipe.timing.ways(now).items())
        )
        each = (*pipe.timing.work.values(), pipe.timing.loss)
        slots = self.setup.stash if self.stage != ENDS else self.setup.in_flight
        return Measured(*(a.steady(STEADY) for a in each), slots=slots, ways=ways)

    def recall(self, version: Version) -> Past | None:
        """What the disk says goes with a version."""
        found = self.disk.find(self.stage, version)
        return (
            None
            if found is None
            else Past(
                found.cursor,
                dict(found.owners),
                found.tokens,
                dict(found.worked),
                found.change,
                found.since,
                dict(found.mass),
            )
        )

    def parameters(self) -> dict[str, Value]:
        """What others may fetch."""
        return self.values

    # ----------------------------------------------------------- the epoch

    def begin(self, plan: Plan, listener: bool) -> None:
        """Take part; fetch the optimizer state of parts gained meanwhile."""
        peer = self.peer
        if self._plan is not None and self._plan.epoch >= plan.epoch:
            self._staged.pop(plan.epoch, None)
            peer.rounds.void(plan.epoch)
            self.streams.void(plan.epoch)
        self._plan, self._share, self.fresh, self._stepped, self._said = plan, None, None, set(), {}
        self._pushed = set()
        if levels(plan):
            self.serving.forget()
        self._token, self._arriving, self._arrived = object(), 0, []
        self._busy0 = peer.device.busy_s
        if listener:
            peer.rounds.void(plan.epoch)
            peer.rounds.forget(plan.epoch - 1)
            self.streams.void(plan.epoch)
            self.streams.forget(plan.epoch - 1)
            self.moments.clear()
            self._staged.clear()
            self.owed, self._owed_before = {}, None
            self.serving.forget()
        peer.pipe.reset(plan.epoch)
        peer.pipe.set_plan(plan)
        me = peer.name
        if not listener:
            self.cell = plan_cell(plan, me)
        gained = [
            p
            for p in self.names
            if plan.owner(p, self.cell) == me and plan.moved.get(in_cell(p, self.cell), me) != me
        ]
        if gained and not listener:
            self._take_over(plan, gained)
        self.streams.begin(plan, between(plan, peer.swarm.read), listener)

    def stop(self) -> None:
        """What runs of this epoch runs no more."""
        self._token = None
        if self._round is not None:
            self.peer.rounds.stop(self._round)
            self._round = None

    def average(
        self,
        plan: Plan,
        r: ev.RoundArrived,
        listener: bool,
        then: Callable[[ev.RoundEnded], object],
    ) -> None:
        """One attempt of the cell's round."""
        token = self._token
        if not r.attempt and lands(plan, between(plan, self.peer.swarm.read)):
            self._land(plan, r, listener, then, token)
            return
        sent = self.streams.lands(plan)

        def gradients() -> None:
            if self._token is token:
                if plan.outer and not listener:
                    self._said = {n: self.word(plan, n) for n in sorted(self.values)} | (
                        sent.said if sent is not None else {}
                    )
                    marks = tuple(self._said.items())
                    speaks = self.peer.name in speakers(
                        plan, unit_of(plan, self.peer.name), absent(plan, r, self.peer.name)
                    )
                    weight = weights(
                        plan, unit_of(plan, self.peer.name), between(plan, self.peer.swarm.read)
                    )[plan_cell(plan, self.peer.name)]
                    self._share = Share(self.peer.name, (), weight * speaks, plan.hash, marks)
                elif self._share is None and not listener:
                    self._share = self.peer.swarm.make.share(
                        self.peer, self.peer.pipe.take_share(plan.epoch)
                    )
                    self._measure()
                if self._arriving:
                    self._arrived.append(run)
                else:
                    run()

        def run() -> None:
            if self._token is token:
                self._run_round(plan, r, listener, then, token)

        if self._share is None and not listener and not plan.outer:
            self.peer.pipe.receipts(plan.epoch, r.dropped, gradients)
        else:
            gradients()

    def _land(
        self,
        plan: Plan,
        r: ev.RoundArrived,
        listener: bool,
        then: Callable[[ev.RoundEnded], object],
        token: object,
    ) -> None:
        """The outer round of a fragment that has been under way."""
        me = self.peer.name
        home, carried = (
            plan_cell(plan, me),
            [n for n in plan.averagers(unit_of(plan, me)) if n in self.names],
        )
        self._owned = frozenset(name for name in self.names if plan.owner(name, home) == me)
        makes = Version(plan.epoch + 1, lineage_after(plan, r.dropped))

        def landed(sent: Sent | None) -> None:
            if self._token is not token:
                return
            fresh = sent.fresh if sent is not None and not listener else {}
            missing = tuple(sorted(self.names if listener else set(carried) - fresh.keys()))
            self.fresh = None if missing else self._after(plan, makes, fresh)
            self._said, self._by = (sent.said, sent.by) if sent is not None else ({}, {})
            then(
                ev.RoundEnded(
                    plan.epoch, plan.term, r.attempt, tuple(sorted(fresh)), missing, (), len(fresh)
                )
            )

        self.streams.land(plan, r, landed)

    def _after(self, plan: Plan, makes: Version, means: Mapping[str, Value]) -> dict[str, Value]:
        """The next values: of what an outer round carried by its means, of the rest those that are
        here."""
        mixing = between(plan, self.peer.swarm.read).mixing
        return self._rest(plan, makes) | self.streams.mixed(plan, mixing, makes, means)

    def _run_round(
        self,
        plan: Plan,
        r: ev.RoundArrived,
        listener: bool,
        then: Callable[[ev.RoundEnded], object],
        token: object,
    ) -> None:
        me = self.peer.name
        unit, home = unit_of(plan, me), plan_cell(plan, me)
        planned = plan.averagers(unit)
        owners = {
            name: r.owners.get(name, planned[name])
            for name in self.names
            if name in planned or not plan.fragment
        }
        stepped = {name: plan.owner(name, home) for name in self.names} if plan.outer else owners
        self._owned = frozenset(name for name, owner in stepped.items() if owner == me)
        away = absent(plan, r, me)
        cell = [m for m in plan.unit(unit) if m.peer not in away]
        makes = Version(plan.epoch + 1, lineage_after(plan, r.dropped))
        rules = between(plan, self.peer.swarm.read)
        share = None if listener or self._share is None or not self._share.tokens else self._share
        request = Request(
            plan=plan,
            round=RoundId(plan.epoch, plan.term, r.attempt),
            members=tuple(m.peer for m in cell),
            listeners=frozenset(m.peer for m in cell if not m.current),
            owners=owners,
            ownership_hash=ownership_hash(
                [p for p in self.setup.parts[self.stage] if p.name in owners], owners, "simulated"
            ),
            share=share,
            deadline_s=r.deadline_s,
            total=max(weights(plan, unit, between(plan, self.peer.swarm.read)).values(), default=1)
            if plan.outer
            else self.setup.tokens * len(plan.paths),
            allowed={},
            may_hold=not plan.outer
            and (
                len(plan.cells(self.stage)) > 1
                or (self.stage > 0 and self.peer.swarm.fewest < self.setup.stages)
            ),
            quorum=rules.quorum if plan.outer else 0,
            grace_s=rules.grace_s,
        )

        pushes = plan.outer > 0 and between(plan, self.peer.swarm.read).pushes
        if pushes:
            request = self._pushes(plan, [m.peer for m in cell], away, request)

        def step(cell: int, names: tuple[str, ...], shares: tuple[Share, ...]) -> dict[str, Value]:
            return (
                self._take(plan, makes, cell, names, shares)
                if pushes
                else self._step(plan, makes, names, shares)
            )

        def ended(
            fresh: dict[str, Value],
            missing: tuple[str, ...],
            failed: tuple[PeerId, ...],
            unserved: tuple[str, ...],
        ) -> None:
            if self._token is token:
                if plan.fragment and listener:
                    missing = tuple(sorted(self.names))  # a fragment is not what it lacks
                self._by = self.peer.rounds.contributors(plan.epoch)
                self.fresh = self._after(plan, makes, fresh) if plan.fragment else dict(fresh)
                if r.attempt < PUSH_AGAIN:
                    missing = tuple(sorted({*missing, *unserved}))
                then(
                    ev.RoundEnded(
                        plan.epoch,
                        plan.term,
                        r.attempt,
                        tuple(sorted(fresh)),
                        missing,
                        failed,
                        len(cell),
                    )
                )

        self._round, self.arrived = request.round, ()
        try:
            if unit in plan.senders:
                edges.along(self.peer, request, plan, r, self._share, step, ended)
            else:
                self.peer.rounds.run(request, step, ended)
        except ValueError:
            then(
                ev.RoundEnded(
                    plan.epoch, plan.term, r.attempt, (), tuple(sorted(self.names)), (), 0
                )
            )

    def _step(
        self, plan: Plan, makes: Version, names: Sequence[str], shares: tuple[Share, ...]
    ) -> dict[str, Value]:
        """Fresh values; the optimizer state they make is staged until the plan of the next version
        settles it."""
        watch, staged = self.peer.swarm.watch, self._staged.setdefault(plan.epoch, {})
        fresh: dict[str, Value] = {}
        for name in names:
            old, moment = self.values[name], self.moments.get(name)
            if plan.outer:
                watch.stepping(self.peer, plan, name, old, None, name in self._stepped)
                self._stepped.add(name)
                fresh[name] = mean_value(name, shares, makes)
                continue
            watch.stepping(self.peer, plan, name, old, moment, name in self._stepped)
            self._stepped.add(name)
            if moment is None and plan.epoch:
                self.moments_lost += 1
            if not shares:
                fresh[name] = old._replace(made=makes)
                if moment is not None:
                    staged[name] = moment._replace(through=makes)
                continue
            fresh[name] = fresh_value(name, old, shares, moment, makes)
            staged[name] = next_moment(name, moment, fresh[name], makes)
        return fresh

    def _pushes(
        self, plan: Plan, cell: Sequence[PeerId], away: Collection[PeerId], request: Request
    ) -> Request:
        """The same without a barrier, as node.training.rounds.outer makes it."""
        me, unit = self.peer.name, unit_of(plan, self.peer.name)
        mine = [name for name, owner in request.owners.items() if owner == me]
        heard = self.fresh or {}
        self.serving.opens(
            plan.hash, mine, lambda n: heard[n].mark if n in heard else self.values[n].mark
        )
        here = {peer: plan_cell(plan, peer) for peer in (*cell, me)}
        return replace(
            request,
            members=tuple(sorted({*here, *request.owners.values()})),
            cells=here,
            may_hold=True,
            gathers=me in cell,
            listeners=frozenset({*here, *request.owners.values()})
            - speakers(plan, unit, list(away)),
            share=request.share if me in cell else None,
        )

    def _take(
        self, plan: Plan, makes: Version, cell: int, names: Sequence[str], shares: tuple[Share, ...]
    ) -> dict[str, Value]:
        """A cell pushes, or pulls: what is served then."""
        for name in names:
            self.peer.swarm.watch.stepping(
                self.peer, plan, name, self.values[name], None, (name, cell) in self._pushed
            )
            self._pushed.add((name, cell))
        bound = between(plan, self.peer.swarm.read).staleness
        deltas = {name: mark for share in shares for name, mark in share.marks if name in names}
        found, late = self.serving.take(
            plan.hash, cell, names, deltas, bound, lambda value, by: mark_of("pushed", value, by)
        )
        self.peer.swarm.watch.count(
            "pushes-refused" if late else "pushes-applied" if deltas else "pulls"
        )
        return {name: Value(mark, makes) for name, mark in found.items()}

    def word(self, plan: Plan, name: str) -> str:
        """This peer's word on a part: what it has, what it owes, and what the round before was
        closed without."""
        mark = self.values[name].mark
        for debt in (self.owed.get(name), self.owed.get(name + LATE)):
            if debt is not None:
                self.peer.swarm.watch.owing(self.peer, plan, name, debt)
                mark = mark_of(mark, debt.mark)
        return mark

    def _owes(self, plan: Plan, made: Version) -> None:
        """The round is adopted: what its words were rounded by is owed, where they were taken; what
        its cell had counts next time, where they were not."""
        rules, me, before = between(plan, self.peer.swarm.read), self.peer.name, self.owed
        if not (rules.feedback or rules.quorum):
            return
        mates = {m.peer for m in plan.cell(self.stage, plan_cell(plan, me))}
        self._owed_before, self.owed = before, dict(before)
        for name, by in self._by.items():
            steps = before[name].steps if name in before else 0
            if rules.feedback and me in by and name in self._said:
                self.owed[name] = Moment(mark_of("owed", name, self._said[name]), made, steps + 1)
            self.owed.pop(name + LATE, None)
            if rules.quorum and not mates & set(by):
                self.peer.swarm.watch.count("late")
                self.owed[name + LATE] = Moment(
                    mark_of("late", name, (self._before or self.values)[name].mark), made, 1
                )

    def copy(self, plan: Plan, r: ev.RoundArrived, then: Callable[[ev.RoundEnded], object]) -> None:
        """Fetch the fresh parameters whole from who has committed them."""
        token = self._token

        def got(found: tuple[Version, int, dict[str, Value]] | None) -> None:
            if self._token is not token:
                return
            self.fresh, self._said, self._by, self.arrived = found[2] if found else None, {}, {}, ()
            if anchor and found:
                # The outer step, which is everybody's, of what the round carried; the rest is here.
                self.fresh = self._after(plan, found[0], found[2])
            missing = () if found else tuple(sorted(self.names))
            then(ev.RoundEnded(plan.epoch, plan.term, r.attempt, (), missing, (), 0))

        me = plan.member(self.peer.name)
        listener = me is not None and not me.current
        cell = plan_cell(plan, self.peer.name)
        sources = (
            [p for p in r.sources if plan_cell(plan, p) == cell]
            if plan.fragment and listener
            else r.sources
        )
        anchor = plan.fragment > 0 and not listener
        self.fetch(sources, plan.epoch + 1, r.digest, got, anchor=anchor)

    def _rest(self, plan: Plan, makes: Version) -> dict[str, Value]:
        """Parts that an outer round of a fragment does not carry, as they are."""
        if not plan.fragment:
            return {}
        carried = plan.averagers(unit_of(plan, self.peer.name))
        return {n: v._replace(made=makes) for n, v in self.values.items() if n not in carried}

    def adopt(self, plan: Plan) -> str:
        """Put the fresh parameters in place; their digest."""
        fresh = self.fresh or {}
        self.peer.swarm.watch.adopting(self.peer, self.names, fresh)
        self._before, self.values = self.values, dict(fresh)
        me = plan.member(self.peer.name)
        if plan.outer and me is not None and me.current:
            # The optimizer has not been at it: its state is that of the next version as it is.
            makes = next(iter(fresh.values())).made
            kept = {
                n: m._replace(through=makes)
                for n, m in self.moments.items()
                if n in (self._owned or ())
            }
            self._staged[plan.epoch] = kept
            self._owes(plan, makes)
        if me is not None:
            self.cell = me.cell
        if self._flip:
            name, self._flip = self.names[0], False
            self.values[name] = self.values[name]._replace(
                mark=mark_of("flipped", self.values[name].mark)
            )
        self.digest = digest_of(self.values)
        return self.digest

    def settle(self, epoch: int, plan: Plan | None) -> None:
        """The version in place is the swarm's: optimizer state counts from here."""
        staged = self._staged.get(epoch - 1, {})
        self._staged = {e: s for e, s in self._staged.items() if e >= epoch}
        counts = {n: m for n, m in staged.items() if self._owned is None or n in self._owned}
        if plan is not None and plan.epoch == epoch:
            self.peer.swarm.watch.settling(self.peer, plan, counts)
        self.moments.update(counts)
        if self._owned is not None:
            self.moments = {n: m for n, m in self.moments.items() if n in self._owned}
        self.peer.rounds.forget(epoch - 1)
        self.streams.forget(epoch - 1)
        self._before, self._owed_before, self.settled = None, None, epoch
        self.serving.settled()
        if self.setup.checkpoint_every and epoch % self.setup.checkpoint_every == 0:
            self.save(epoch, plan)

    def go_to(self, version: Version, how: str) -> None:
        """Put an older version in place."""
        self.peer.rounds.void(version.epoch)
        self.streams.void(version.epoch)
        if how == "roll-back":
            self._staged.pop(version.epoch, None)
            if self._before is not None:
                self.values, self._before = self._before, None
                self.digest = digest_of(self.values)
            if self._owed_before is not None:
                self.owed, self._owed_before = self._owed_before, None
            self.serving.undone()
            self.settled = version.epoch
        elif how == "left out":
            self.values = {n: v._replace(made=version) for n, v in self.values.items()}
            self.moments = {n: m._replace(through=version) for n, m in self.moments.items()}
            self._before, self.settled, self.version = None, version.epoch, version
        else:
            self.restore(version)

    def finish(self, plan: Plan) -> None:
        """The run is complete."""
        self.peer.pipe.reset(plan.epoch)
        self.peer.pipe.set_plan(plan)
        if self.peer.member.at == plan.base:
            self.disk.boot()
            self.save(plan.epoch, plan)

    def corrupt(self) -> None:
        """A bit flips on the way of the next parameters into their place."""
        self._flip = True

    # ----------------------------------------------------------- state

    def save(self, epoch: int, plan: Plan | None) -> None:
        """Write a checkpoint in the background."""
        if plan is None or plan.epoch != epoch:
            return
        blank = Checkpoint(
            plan.base,
            self.stage,
            len(self.names),
            plan.tokens,
            plan.cursor,
            dict(plan.owners),
            cell=self.cell,
            worked=dict(plan.worked),
            change=plan.change,
            since=plan.since,
            mass=dict(plan.mass),
        )
        self.disk.save(
            self.peer, blank, dict(self.values), dict(self.moments), self.peer.checkpoint_written
        )

    def restore(self, version: Version) -> bool:
        """Load a checkpoint; False when there is none, or it is not whole."""
        found = self.disk.find(self.stage, version)
        if found is None:
            return False
        self.peer.swarm.watch.restored(self.peer, found)
        self.values, self._before = dict(found.values), None
        self.owed, self._owed_before, self.streams.history = {}, None, object()
        self.serving.forget()
        self.digest = digest_of(self.values)
        self.moments, self._owned, self.settled = dict(found.moments), None, version.epoch
        self.version, self.tokens, self.cell = version, found.tokens, found.cell
        self.peer.colleagues.recall(self.peer.disk.colleagues)
        return True

    def take(self, version: Version, tokens: int, values: Mapping[str, Value]) -> None:
        """Parameters fetched from others are in place now."""
        self.values, self._before = dict(values), None
        self.owed, self._owed_before, self.streams.history = {}, None, object()
        self.serving.forget()
        self.digest = digest_of(self.values)
        self.moments, self._owned, self.settled = {}, None, version.epoch
        self.version, self.tokens, self.cell = version, tokens, ANY

    def fetch(
        self,
        donors: Sequence[PeerId],
        epoch: int | None,
        digest: str,
        then: Callable[[tuple[Version, int, dict[str, Value]] | None], None],
        anchor: bool = False,
    ) -> None:
        """The stage's parameters from the first donor that has them; None when no donor does.
        ``anchor``: what it made the last outer step by instead."""
        rest = [d for d in donors if d != self.peer.name]
        stage, size = self.stage, sum(self.setup.size_of(n) for n in self.names)

        def serve(there: SimPeer, call: Call) -> None:
            work, member = there.labour, there.member
            # One that has come up and takes no part yet serves what its disk had.
            at, tokens = (member.at, member.tokens) if there.ready else (work.version, work.tokens)
            if work.stage != stage or epoch not in (None, at.epoch):
                call.say(None)
            elif anchor:
                landed = work.streams.landed
                call.say(
                    (at, tokens, landed[1]) if landed is not None and landed[0] == at else None,
                    HEAD + size,
                )
            else:
                call.say((at, tokens, dict(work.parameters())), HEAD + size)

        def ask() -> None:
            if not rest:
                then(None)
                return
            donor = rest.pop(0)

            def hear(found: tuple[Version, int, dict[str, Value]] | None) -> None:
                call.end()
                if found is None or (digest and digest_of(found[2]) != digest):
                    ask()
                else:
                    then(found)

            call = self.peer.call(donor, HEAD, serve, hear, lambda why: ask(), FETCH_S)

        ask()

    def _take_over(self, plan: Plan, gained: Sequence[str]) -> None:
        by_donor: dict[PeerId, list[str]] = {}
        for part in gained:
            by_donor.setdefault(plan.moved[in_cell(part, self.cell)], []).append(part)
        token = self._token
        self._arriving = len(by_donor)

        def one(donor: PeerId, names: list[str], tries: int) -> None:
            def serve(there: SimPeer, call: Call) -> None:
                work = there.labour
                # Who was a listener has settled nothing of what it holds: each part's state says
                # itself of which version it is.
                held = {
                    n: m
                    for n, m in work.moments.items()
                    if work.stage == self.stage and m.through == plan.base
                }
                whole = all(n in held for n in names)
                call.say({n: held[n] for n in names} if whole else None, HEAD + 4096 * len(names))

            def hear(found: dict[str, Moment] | None) -> None:
                call.end()
                if self._token is not token:
                    return
                if found is None and tries > 1:
                    self.peer.after(TAKE_OVER_PAUSE_S, one, donor, names, tries - 1)
                    return
                if found is not None:
                    self.moments.update(found)
                done()

            call = self.peer.call(
                donor, HEAD, serve, hear, lambda why: self._token is token and done(), FETCH_S
            )

        def done() -> None:
            self._arriving -= 1
            if not self._arriving:
                waiting, self._arrived = self._arrived, []
                for go in waiting:
                    go()

        for donor, names in sorted(by_donor.items()):
            one(donor, names, TAKE_OVER_TRIES)

    def _measure(self) -> None:
        share, spent = self._share, self.peer.device.busy_s - self._busy0
        if share is not None and share.indices and spent > 0:
            self._rate.observe(len(share.indices), spent)


def plan_cell(plan: Plan, peer: PeerId) -> int:
    """The cell the plan has this peer in."""
    me = plan.member(peer)
    return me.cell if me else ANY


def absent(plan: Plan, r: ev.RoundArrived, peer: PeerId) -> tuple[PeerId, ...]:
    """Who of this peer's unit takes no part in an attempt, or only serves in it."""
    among = r.among or tuple(m.peer for m in plan.members)
    return tuple(
        m.peer for m in plan.unit(unit_of(plan, peer)) if m.peer in r.dead or m.peer not in among
    )


def unit_of(plan: Plan, peer: PeerId) -> Unit:
    """With whom the plan has this peer average."""
    me = plan.member(peer)
    return plan.unit_of(me) if me else (0, 0)
