"""The pipeline's service in virtual time: carries out what :class:`PipelineMachine` decides.

Nothing is decided here. It keeps what ``node.pipeline.service`` keeps (stash, window of
micro-batches, receipts) and says to the machine what that says; a tensor is only the time its bytes
need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from node.core.ids import PeerId
from node.core.journey import Path, Plan
from node.pipeline import events as ev
from node.pipeline.delivery import Trouble
from node.pipeline.events import Answer, Claim, Key, Say, Way
from node.pipeline.stash import Stash
from node.pipeline.timing import Timing
from node.sim.device import Priority
from node.sim.values import Share
from node.sim.world import HEAD, Call
from node.training.protocol import events as tev

if TYPE_CHECKING:
    from node.sim.peer import SimPeer

RECEIPTS_S = 1.0
"""Longest wait for a receipt at the end of an epoch (as node.pipeline.service)."""
PLAN_WAIT_S = 5.0
"""A frame that is ahead of the plan waits so long for it (as node.pipeline.service)."""
COUNTED_TRIES, COUNTED_S = 2, 2.0
"""The origin's word that a share counts."""
FORWARD, BACKWARD = Way.FORWARD, Way.BACKWARD


@dataclass(slots=True)
class Work:
    """What is kept of one visit. ``share``: tokens of parameter gradients that do not count yet,
    None for none."""

    deadline: float
    share: int | None = None
    dead: bool = False


class _Timer:
    """A pause between two attempts that can be called off."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False

    def end(self) -> None:
        self.over = True


class Pipe:
    """One peer's share of the pipeline."""

    def __init__(self, peer: SimPeer) -> None:
        self.peer, self.setup = peer, peer.swarm.setup
        self.machine = peer.swarm.make.pipeline(peer.name)
        self.machine.fewest = peer.swarm.fewest
        self.timing = Timing()
        self.stash: Stash[Key, Work] = Stash(self.setup.stash)
        self.counted: dict[int, int] = {}
        self._sending: dict[tuple[Key, Way], Call | _Timer] = {}
        self._waiting: dict[tuple[Key, Way], list[Call]] = {}
        self._early: list[tuple[Way, Claim, PeerId, Call, float]] = []
        self._results: dict[int, Callable[[tev.Result], None]] = {}
        self._queue: deque[Path] = deque()
        self._report: Callable[[tev.Result], None] = lambda result: None
        self._until = 0.0
        self._sure: tuple[int, Collection[int], Callable[[], None]] | None = None

    # ----------------------------------------------------------- what training calls

    def set_plan(self, plan: Plan | None) -> None:
        """Put a plan in force; frames that came early are let in."""
        known = self.machine.plan
        if plan is not None and known is not None and plan.hash == known.hash:
            return
        self.do(ev.Adopt(plan))
        self._results.clear()
        self._queue.clear()
        self.counted = {}
        self._until = self.peer.world.now + (plan.deadline_s if plan else 0.0)
        early, self._early = self._early, []
        for way, claim, caller, call, until in early:
            if not call.over:
                self._consider(way, claim, caller, call, until)

    def reset(self, epoch: int) -> None:
        """Forget everything of ``epoch``."""
        if self.machine.plan is not None and self.machine.plan.epoch == epoch:
            self.set_plan(None)

    def run(self, paths: Collection[Path], report: Callable[[tev.Result], None]) -> None:
        """Origin: a window of micro-batches under way, each reported once."""
        self._queue, self._report = deque(paths), report
        plan = self.machine.plan
        if plan is not None:
            for _ in range(min(self.setup.in_flight, len(paths))):
                self._next(plan)

    def receipts(self, epoch: int, dropped: Collection[int], then: Callable[[], None]) -> None:
        """Let the receipts come in for gradients that were sent to the previous hop, then go on."""
        plan = self.machine.plan
        if plan is None or plan.epoch != epoch or not self.machine.unsure(dropped):
            then()
            return
        token = self._sure = (epoch, dropped, then)
        self.peer.after(RECEIPTS_S, self._enough, token)

    def take_share(self, epoch: int) -> Share:
        """The gradient sums of this stage; closes the epoch."""
        plan = self.machine.plan
        if plan is None or plan.epoch != epoch:
            return Share(self.peer.name, (), 0)
        self.do(ev.Close(epoch))
        return Share(
            self.peer.name, tuple(sorted(self.counted)), sum(self.counted.values()), plan.hash
        )

    # ----------------------------------------------------------- the called side

    def receive(self, way: Way, claim: Claim, caller: PeerId, call: Call) -> None:
        """A frame's head is here."""
        if self.peer.refuses(caller):
            call.say((Say.REFUSED, "banned"))
            return
        self._consider(way, claim, caller, call, self.peer.world.now + PLAN_WAIT_S)

    def _consider(self, way: Way, claim: Claim, caller: PeerId, call: Call, until: float) -> None:
        room = self._make_room()
        answer = self._ask(ev.Arrived(way, claim, caller, room))
        if answer.say is Say.AWAIT_PLAN:
            now = self.peer.world.now
            if now < until:
                self._early.append((way, claim, caller, call, until))
                if not any(c is call for *_, c, _ in self._early[:-1]):
                    self.peer.after(until - now, self._waited, call)
                return
            plan = self.machine.plan
            ahead = plan is None or claim.epoch > plan.epoch
            call.say((Say.BUSY if ahead else Say.REFUSED, answer.reason))
        elif answer.say is Say.TAKE:
            ticket = (
                self.stash.reserve(1) if way is FORWARD and not self._at_origin(claim.key) else 0
            )
            self.peer.after(call.bulk_s, self._whole, way, claim, caller, call, ticket)
        else:
            self._answer(answer, claim.key, way, call, [])

    def _waited(self, call: Call) -> None:
        for entry in [e for e in self._early if e[3] is call]:
            self._early.remove(entry)
            if not call.over:
                way, claim, caller, _, until = entry
                self._consider(way, claim, caller, call, min(until, self.peer.world.now))

    def _whole(self, way: Way, claim: Claim, caller: PeerId, call: Call, ticket: int) -> None:
        """The tensor is here too."""
        if call.over:
            self.stash.cancel(ticket)
            return
        answer, *rest = self._handle(ev.Held(way, claim, caller))
        if not isinstance(answer, Answer):
            raise TypeError("the first action of Held is its answer")
        key = claim.key
        if answer.say is Say.TAKE:
            self.peer.swarm.watch.taken(self.peer, self.machine.plan, claim.plan_hash)
        if answer.say is Say.TAKE and self.stash.get(key) is None:
            self.stash.put(
                key, Work(self.peer.world.now + self.setup.forward_timeout_s), 1, 0.0, ticket
            )
        self.stash.cancel(ticket)
        self._answer(answer, key, way, call, rest)

    def _answer(
        self, answer: Answer, key: Key, way: Way, call: Call, rest: list[ev.Action]
    ) -> None:
        if answer.say in (Say.TAKE, Say.AGAIN):
            call.say((Say.TAKE, ""))
            for action in rest:
                self._carry_out(action)
            if self.machine.told(key, way):
                call.say((Say.SETTLED, ""))
            elif key not in self.machine.visits:
                call.say((Say.REFUSED, "freed"))
            else:
                self._waiting.setdefault((key, way), []).append(call)
        else:
            for action in rest:
                self._carry_out(action)
            call.say((answer.say, answer.reason))

    def asked(self, event: ev.Asked, call: Call) -> None:
        """A replacement wants the output we sent to the hop whose place it takes."""
        answer = self._ask(event)
        call.say(
            (answer.say, answer.reason), self.setup.activation if answer.say is Say.TAKE else HEAD
        )

    def lost(self, event: ev.Lost, call: Call) -> None:
        """A hop says that nobody can finish one of our micro-batches."""
        call.say(self._ask(event).say)

    # ----------------------------------------------------------- carrying out

    def do(self, event: ev.Event) -> None:
        """Give the machine an event that nobody waits to be answered."""
        for action in self._handle(event):
            self._carry_out(action)

    def _ask(self, event: ev.Event) -> Answer:
        answer = Answer(Say.REFUSED, "no answer")
        for action in self._handle(event):
            if isinstance(action, Answer):
                answer = action
            else:
                self._carry_out(action)
        return answer

    def _handle(self, event: ev.Event) -> list[ev.Action]:
        actions = self.machine.handle(event, self.peer.world.now)
        if self._sure is not None:
            epoch, dropped, _ = self._sure
            if (
                (plan := self.machine.plan) is None
                or plan.epoch != epoch
                or not self.machine.unsure(dropped)
            ):
                # The service's waiter wakes after the actions of this event were carried out.
                self.peer.after(0.0, self._enough, self._sure)
        return actions

    def _enough(self, token: Any) -> None:
        if self._sure is token:
            self._sure = None
            token[2]()

    def _carry_out(self, action: ev.Action) -> None:
        do = _HANDS.get(type(action))
        if do is not None:
            do(self, action)

    def _do_later(self, a: ev.Later) -> None:
        timer = _Timer()
        self._replace(a.key, a.way, timer)
        self.peer.after(a.seconds, self._retry, a.key, a.way, timer)

    def _do_void(self, a: ev.Void) -> None:
        if (work := self.stash.get(a.key)) is not None:
            work.share = None

    def _do_finished(self, a: ev.Finished) -> None:
        self._end(a.index, True, 0 if self._head(a.index) is None else self.setup.tokens)

    def _compute(self, key: Key, way: Way) -> None:
        work = self.stash.get(key)
        if work is None:
            return
        setup, origin = self.setup, self._at_origin(key)
        seconds = (setup.ends_s if origin else setup.forward_s) * (1.0 if way is FORWARD else 2.0)
        priority = (
            Priority.BACKWARD
            if way is BACKWARD
            else Priority.LOSS
            if origin and key.position
            else Priority.FORWARD
        )
        self.peer.device.run(priority, seconds, self._computed, key, way, work, seconds)

    def _computed(self, key: Key, way: Way, work: Work, seconds: float) -> None:
        average = (
            self.timing.loss if key.position and self._at_origin(key) else self.timing.work[way]
        )
        average.add(seconds * self.peer.device.slowness, self.peer.world.now)
        if self.stash.get(key) is not work:
            return
        if way is BACKWARD or (key.position and self._at_origin(key)):
            work.share = self.setup.tokens
        self.do(ev.Computed(key, way))

    def _send(self, key: Key, way: Way, journey: tuple[Any, ...], position: int) -> None:
        plan, to, me = self.machine.plan, journey[position].peer, self.peer.name
        if plan is None:
            return
        claim = Claim(key.epoch, plan.hash, key.index, journey, position)
        began = self.peer.world.now

        def hear(message: tuple[Say, str]) -> None:
            say, _ = message
            if self.machine.plan is not plan:
                call.end()
            elif say is Say.TAKE:
                self.timing.sent(to, self.peer.world.now - began, self.peer.world.now)
                self.do(ev.Passed(key, way, to))
            else:
                call.end()
                self._sending.pop((key, way), None)
                if say is Say.SETTLED:
                    self.do(ev.Settled(key, way, to))
                else:
                    self.do(
                        ev.Turned(
                            key, way, to, Trouble.BUSY if say is Say.BUSY else Trouble.REFUSED
                        )
                    )

        def lost(why: str) -> None:
            if self.machine.plan is plan:
                self._sending.pop((key, way), None)
                self.peer.hop_failed(to, why)
                self.do(ev.Turned(key, way, to, Trouble.FAILED))

        def serve(there: SimPeer, call: Call) -> None:
            there.pipe.receive(way, claim, me, call)

        call = self.peer.call(
            to, HEAD, serve, hear, lost, self.setup.forward_timeout_s, bulk=self.setup.activation
        )
        self._replace(key, way, call)

    def _retry(self, key: Key, way: Way, timer: _Timer) -> None:
        if timer.over:
            return
        self._sending.pop((key, way), None)
        work = self.stash.get(key)
        if work is not None:
            self.do(ev.Expired(key) if work.deadline < self.peer.world.now else ev.Retry(key, way))

    def _fetch(self, key: Key, peers: tuple[PeerId, ...], skipped: tuple[int, ...]) -> None:
        work, plan = self.stash.get(key), self.machine.plan
        if work is None or plan is None:
            return
        event = ev.Asked(key.epoch, plan.hash, key.index, key.position, self.peer.name, skipped)
        rest = list(peers)

        def ask() -> None:
            if self.stash.get(key) is not work:
                return
            if not rest:
                self.do(ev.NotFetched(key, False))
                return
            peer = rest.pop(0)

            def hear(message: tuple[Say, str]) -> None:
                call.end()
                if self.stash.get(key) is not work:
                    return
                if message[0] is Say.TAKE:
                    self.do(ev.Fetched(key, peer))
                elif message[0] is Say.SETTLED:
                    self.do(ev.NotFetched(key, True))
                else:
                    ask()

            serve = lambda there, call: there.pipe.asked(event, call)  # noqa: E731
            call = self.peer.call(
                peer, HEAD, serve, hear, lambda why: ask(), self.setup.forward_timeout_s
            )

        ask()

    def _tell_origin(self, key: Key, origin: PeerId, reason: str) -> None:
        plan = self.machine.plan
        if plan is None:
            return
        event = ev.Lost(key.epoch, plan.hash, key.index, self.peer.name, reason)
        serve = lambda there, call: there.pipe.lost(event, call)  # noqa: E731
        call = self.peer.call(
            origin,
            HEAD,
            serve,
            lambda say: call.end(),
            lambda why: None,
            self.setup.forward_timeout_s,
        )

    def _tell_counted(self, index: int, peers: tuple[PeerId, ...]) -> None:
        plan = self.machine.plan
        if plan is None:
            return
        event = ev.Counted(plan.epoch, plan.hash, index, self.peer.name)
        serve = lambda there, call: call.say(there.pipe._ask(event).say)  # noqa: E731
        for peer in peers:
            self._say_counted(peer, serve, COUNTED_TRIES)

    def _say_counted(
        self, peer: PeerId, serve: Callable[[SimPeer, Call], object], tries: int
    ) -> None:
        again = lambda why: tries > 1 and self._say_counted(peer, serve, tries - 1)  # noqa: E731
        call = self.peer.call(peer, HEAD, serve, lambda say: call.end(), again, COUNTED_S)

    def _commit(self, key: Key) -> None:
        work, plan = self.stash.get(key), self.machine.plan
        if work is None or plan is None:
            return
        head = self._head(key.index) if key.position == 0 else work
        tokens = 0 if head is None or head.share is None else head.share
        work.share = None
        self.peer.swarm.watch.micro_batch(self.peer, plan, key.index, key.index in self.counted)
        self.counted[key.index] = self.counted.get(key.index, 0) + tokens

    def _free(self, key: Key) -> None:
        work = self.stash.pop(key)
        if work is not None:
            work.dead = True
        for way in Way:
            if (sending := self._sending.pop((key, way), None)) is not None:
                sending.end()
            self._resolve(key, way, (Say.REFUSED, "freed"))

    def _replace(self, key: Key, way: Way, new: Call | _Timer) -> None:
        old = self._sending.get((key, way))
        self._sending[key, way] = new
        if old is not None:
            old.end()

    def _resolve(self, key: Key, way: Way, message: tuple[Say, str]) -> None:
        waiting = self._waiting.pop((key, way), None)
        for call in waiting or ():
            call.say(message)

    # ----------------------------------------------------------- the origin's window

    def _next(self, plan: Plan) -> None:
        if self.machine.plan is not plan or not self._queue:
            return
        path, now = self._queue.popleft(), self.peer.world.now
        index = path.index
        left = min(self.setup.forward_timeout_s * (len(path.hops) + 1), self._until - now)
        self._results[index] = self._report
        self.stash.put(Key(plan.epoch, index, 0), Work(now + left), 1, 0.0)
        self.do(ev.Start(index))
        self.peer.after(max(0.0, left), self._too_late, plan, index)

    def _too_late(self, plan: Plan, index: int) -> None:
        if self.machine.plan is plan and index in self._results:
            self.do(ev.Drop(index, "not finished in time"))
            self._end(index, False, 0)

    def _end(self, index: int, counted: bool, tokens: int) -> None:
        report, plan = self._results.pop(index, None), self.machine.plan
        if report is not None and plan is not None:
            report(tev.Result(index, counted, 2.0 * tokens, tokens))
            self.peer.after(0.0, self._next, plan)

    def _head(self, index: int) -> Work | None:
        path, plan = self.machine.path(index), self.machine.plan
        return (
            None
            if path is None or plan is None
            else self.stash.get(Key(plan.epoch, index, len(path.hops) + 1))
        )

    def _at_origin(self, key: Key) -> bool:
        path = self.machine.path(key.index)
        return path is not None and path.origin == self.peer.name

    def _make_room(self) -> bool:
        if self.stash.room(1):
            return True
        now = self.peer.world.now
        for key in [
            k
            for k in self.machine.visits
            if (w := self.stash.get(k)) is not None and w.deadline <= now
        ]:
            self.do(ev.Expired(key))
        return self.stash.room(1)


_HANDS: dict[type, Callable[[Pipe, Any], None]] = {
    ev.Compute: lambda p, a: p._compute(a.key, a.way),
    ev.Send: lambda p, a: p._send(a.key, a.way, a.journey, a.position),
    ev.Later: Pipe._do_later,
    ev.Fetch: lambda p, a: p._fetch(a.key, a.peers, a.skipped),
    ev.TellCounted: lambda p, a: p._tell_counted(a.index, a.peers),
    ev.Commit: lambda p, a: p._commit(a.key),
    ev.Void: Pipe._do_void,
    ev.Told: lambda p, a: p._resolve(a.key, a.way, (Say.SETTLED, "")),
    ev.Failed: lambda p, a: p._resolve(a.key, a.way, (Say.REFUSED, a.reason)),
    ev.TellOrigin: lambda p, a: p._tell_origin(a.key, a.origin, a.reason),
    ev.Free: lambda p, a: p._free(a.key),
    ev.Finished: Pipe._do_finished,
    ev.Dropped: lambda p, a: p._end(a.index, False, 0),
}
"""What is done for an action; the rest only concerns memory."""
