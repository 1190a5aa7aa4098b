"""A cell's round in virtual time: carries out what :class:`RoundMachine` decides at the owner, and
asks owners as a member.

Nothing is decided here but what ``node.averaging.exchange.service``, ``.member`` and ``.owner``
decide: one exchange for every group of every owner, a few of them under way at once, one more try
after a lost connection, whom we cannot reach is not waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from node.averaging.exchange.events import (
    Began,
    Ended,
    Fail,
    Forgot,
    Gone,
    Kind,
    Opened,
    Read,
    Refuse,
    Serve,
    Step,
    StepFailed,
    Stepped,
    Ticked,
    Uploaded,
    Voided,
    Wake,
)
from node.averaging.exchange.groups import UNDER_WAY, Group, contribute_until, micro_groups
from node.core.ids import PeerId, RoundId
from node.core.journey import Plan
from node.sim.device import Priority
from node.sim.values import Share, Value
from node.sim.world import HEAD, Call

if TYPE_CHECKING:
    from node.sim.peer import SimPeer
    from node.sim.setup import Setup


@dataclass(frozen=True)
class Request:
    """One attempt of one epoch for one cell. ``share`` None: this peer gives nothing."""

    plan: Plan
    round: RoundId
    members: tuple[PeerId, ...]
    listeners: frozenset[PeerId]
    owners: Mapping[str, PeerId]
    ownership_hash: str
    share: Share | None
    deadline_s: float
    total: int
    allowed: Mapping[PeerId, int]
    may_hold: bool = False
    quorum: int = 0
    grace_s: float = 0.0
    spare_s: float | None = None
    cells: Mapping[PeerId, int] = field(default_factory=dict)
    gathers: bool = True
    inward: bool = False

    def groups_of(self, peer: PeerId, setup: Setup) -> tuple[Group, ...]:
        return micro_groups(
            {n: setup.size_of(n) for n, owner in self.owners.items() if owner == peer},
            setup.group_bytes,
        )


@dataclass(slots=True)
class Held:
    """A fresh part, who gave it, and whose contributions are in it."""

    value: Value
    source: PeerId
    by: tuple[PeerId, ...] = ()


@dataclass
class Attempt:
    """One of our own rounds, until it has ended."""

    request: Request
    groups: tuple[Group, ...]
    ended: Callable[[dict[str, Value], tuple[str, ...], tuple[PeerId, ...], tuple[str, ...]], None]
    step: Callable[[int, tuple[str, ...], tuple[Share, ...]], dict[str, Value]]
    cell: int = 0
    open: int = 0
    settled: bool = False
    over: bool = False
    failing: set[int] = field(default_factory=set)
    gift: bool = False
    failed: dict[PeerId, str] = field(default_factory=dict)
    given: dict[tuple[int, PeerId], Share] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @property
    def mine(self) -> frozenset[str]:
        return frozenset(name for group in self.groups for name in group.names)

    @property
    def cells(self) -> frozenset[int]:
        return frozenset(self.request.cells.values()) or frozenset((self.cell,))


@dataclass
class _Asking:
    """What we want of one owner. ``why``: of its first exchange that failed; ``lost``: it could not
    be reached."""

    owner: PeerId
    errands: list[tuple[Group, tuple[str, ...]]]
    giving: bool
    until: float
    under_way: int = 0
    why: str = ""
    lost: bool = False


@dataclass
class _Epoch:
    attempts: dict[RoundId, Attempt] = field(default_factory=dict)
    held: dict[int, dict[str, Held]] = field(default_factory=dict)

    def of(self, cell: int) -> dict[str, Held]:
        return self.held.setdefault(cell, {})

    @property
    def here(self) -> dict[str, Held]:
        newest = max(self.attempts, default=None)
        return {} if newest is None else self.of(self.attempts[newest].cell)


@dataclass(slots=True)
class _Line:
    peer: PeerId
    round: RoundId
    group: int
    share: Share | None
    call: Call


class Rounds:
    """The averaging service of one peer; ``between``: the one for what is under way between
    cells."""

    def __init__(self, peer: SimPeer, between: bool = False) -> None:
        self.peer, self._between = peer, between
        self.machine = peer.swarm.make.round()
        self._lines: dict[int, _Line] = {}
        self._numbers = 0
        self._epochs: dict[int, _Epoch] = {}
        self._gifts: list[Attempt] = []

    # ----------------------------------------------------------- our own rounds

    def run(self, request: Request, step: Any, ended: Any) -> None:
        """One attempt; ``ended(fresh, missing, failed, unserved)`` by its deadline. Raises
        ValueError for one that is not newer."""
        me = self.peer.name
        epoch = self._epochs.setdefault(request.round.epoch, _Epoch())
        setup = self.peer.swarm.setup
        attempt = Attempt(
            request, request.groups_of(me, setup), ended, step, request.cells.get(me, 0)
        )
        if epoch.attempts and request.round <= max(epoch.attempts):
            raise ValueError("not newer")
        epoch.attempts[request.round] = attempt
        now, tokens = self.peer.world.now, request.share.tokens if request.share else 0
        times = contribute_until(now, request.deadline_s, len(attempt.groups))
        opened = self._opened(request, attempt, tokens, times, epoch)
        try:
            self._feed(opened)
        except ValueError:
            del self._epochs[request.round.epoch]
            raise
        held, giving = epoch.of(attempt.cell), bool(tokens) and not request.inward
        for owner in sorted(set(request.owners.values()) - {me} if request.gathers else ()):
            asking = _Asking(owner, [], giving, now + request.deadline_s)
            for group in request.groups_of(owner, setup):
                lacking = tuple(n for n in group.names if n not in held or held[n].source != owner)
                if lacking:
                    asking.errands.append((group, lacking if giving else group.names))
            if asking.errands:
                attempt.open += 1
                attempt.failed[owner] = "gave no fresh parts in time"
                self._ask(attempt, asking)
        for when in times:
            self.peer.after(when - now, self._tick, attempt)
        self.peer.after(request.deadline_s, self._end, attempt)
        self._settle(request.round.epoch)

    def _opened(
        self,
        request: Request,
        attempt: Attempt,
        tokens: int,
        times: tuple[float, ...],
        epoch: _Epoch,
    ) -> Opened:
        return Opened(
            round=request.round,
            me=self.peer.name,
            plan_hash=request.plan.hash,
            ownership_hash=request.ownership_hash,
            members=frozenset(request.members),
            listeners=request.listeners,
            groups=attempt.groups,
            held=attempt.mine & epoch.of(attempt.cell).keys(),
            tokens=tokens,
            contribute_by=times,
            token_limit=request.total,
            may_hold=request.may_hold,
            quorum=request.quorum,
            grace_s=request.grace_s,
            spare_s=request.spare_s,
            cells=request.cells,
        )

    def give(self, request: Request, ended: Any) -> None:
        """What this peer gives to a round of others; ``ended(…)`` by its deadline, with nothing."""
        gift = Attempt(request, (), ended, lambda *_: {}, settled=True, gift=True)
        self._gifts.append(gift)
        setup, until = self.peer.swarm.setup, self.peer.world.now + request.deadline_s
        owners = sorted(set(request.owners.values()))
        gift.open = len(owners)
        for owner in owners:
            gift.failed[owner] = "did not take it in time"
            groups = request.groups_of(owner, setup)
            self._ask(gift, _Asking(owner, [(group, group.names) for group in groups], True, until))
        self.peer.after(request.deadline_s, self._end, gift)

    def gone(self, peer: PeerId) -> None:
        """Somebody else found this peer dead."""
        self._feed(Gone(peer))

    def forget(self, epoch: int) -> None:
        """Drop everything of epochs up to this one."""
        self._feed(Forgot(epoch))
        self._drop([n for n in self._epochs if n <= epoch])

    def void(self, epoch: int) -> None:
        """Drop everything of ``epoch`` and later ones."""
        self._feed(Voided(epoch))
        self._drop([n for n in self._epochs if n >= epoch])

    def contributors(self, epoch: int) -> dict[str, tuple[PeerId, ...]]:
        """Of the fresh parts of an epoch that are here."""
        return {name: held.by for name, held in self._held(epoch).items()}

    def stop(self, round_id: RoundId) -> None:
        """The caller does not wait for this round any more."""
        epoch = self._epochs.get(round_id.epoch)
        if epoch is not None and round_id in epoch.attempts:
            self._close(epoch.attempts[round_id])
        for gift in [g for g in self._gifts if g.request.round == round_id]:
            self._close(gift)

    def _drop(self, epochs: list[int]) -> None:
        for number in epochs:
            for attempt in self._epochs.pop(number).attempts.values():
                attempt.settled = True
                self._end_if_done(attempt)

    def _tick(self, attempt: Attempt) -> None:
        if not attempt.over:
            self._feed(Ticked())

    # ----------------------------------------------------------- as a member

    def _ask(self, attempt: Attempt, asking: _Asking) -> None:
        """Go on with an owner's groups, in order; begin no other after one has failed."""
        while asking.errands and not asking.why and asking.under_way < UNDER_WAY:
            asking.under_way += 1
            self._exchange(attempt, asking, *asking.errands.pop(0), tries=1)
        if asking.under_way:
            return
        attempt.open -= 1
        if asking.why:
            attempt.failed[asking.owner] = asking.why
        else:
            del attempt.failed[asking.owner]
        if asking.lost:
            self._feed(Gone(asking.owner))
        self._end_if_done(attempt)

    def _exchange(
        self, attempt: Attempt, asking: _Asking, group: Group, names: tuple[str, ...], tries: int
    ) -> None:
        request, world, owner = attempt.request, self.peer.world, asking.owner
        share = request.share if asking.giving else None
        given = names if asking.giving else ()
        head = (
            request.round,
            request.plan.hash,
            request.ownership_hash,
            group.index,
            group.digest,
            given,
            share,
            attempt.gift,
        )
        wanted = () if attempt.gift else names

        def over(why: str = "", lost: bool = False) -> None:
            if not asking.why:
                asking.why, asking.lost = why, lost
            asking.under_way -= 1
            self._ask(attempt, asking)

        def hear(message: Any) -> None:
            call.end()
            if attempt.over:
                return
            if isinstance(message, Kind):
                over(message.value)
            elif message.keys() != set(wanted):
                self.peer.fault(owner, 1.0)
                over("parts that were not asked for")
            else:
                self._keep(request.round, {n: Held(v, owner, by) for n, (v, by) in message.items()})
                over()

        def lost(why: str) -> None:
            if attempt.over:
                return
            if tries and why.startswith("connection"):
                self._exchange(attempt, asking, group, names, tries - 1)
            else:
                over(why, lost=True)

        def serve(there: SimPeer, call: Call) -> None:
            (there.between if self._between else there.rounds).attend(head, self.peer.name, call)

        bulk = sum(self.peer.swarm.setup.size_of(n) for n in given)
        call = self.peer.call(
            owner, HEAD, serve, hear, lost, max(0.0, asking.until - world.now), bulk=bulk
        )
        attempt.calls.append(call)

    def _keep(self, round_id: RoundId, parts: Mapping[str, Held]) -> None:
        epoch = self._epochs.get(round_id.epoch)
        if epoch is not None and round_id == max(epoch.attempts):
            epoch.here.update(parts)
            self._settle(round_id.epoch)

    def _end_if_done(self, attempt: Attempt) -> None:
        if attempt.settled and not attempt.open:
            self._end(attempt)

    def _close(self, attempt: Attempt) -> bool:
        if attempt.over:
            return False
        attempt.over = True
        self._gifts = [g for g in self._gifts if g is not attempt]
        for call in attempt.calls:
            call.end()
        return True

    def _end(self, attempt: Attempt) -> None:
        if not self._close(attempt):
            return
        request, me = attempt.request, self.peer.name
        if attempt.gift:
            self.peer.after(0.0, attempt.ended, {}, (), (), ())
            return
        held = self._held(request.round.epoch)
        fresh = {
            n: held[n].value
            for n, owner in sorted(request.owners.items())
            if n in held and (n in attempt.mine or held[n].source == owner or not request.gathers)
        }
        if not attempt.mine <= fresh.keys():
            attempt.failed[me] = "own parts were not stepped"
        missing = tuple(sorted(request.owners.keys() - fresh.keys()))
        failed = tuple(sorted(p for p in attempt.failed if p != me))
        epoch = self._epochs.get(request.round.epoch)
        cells = attempt.cells if epoch is not None else ()
        unserved = {n for cell in cells if epoch for n in attempt.mine - epoch.of(cell).keys()}
        # A round's caller hears of its end in a turn of its own.
        self.peer.after(0.0, attempt.ended, fresh, missing, failed, tuple(sorted(unserved)))

    # ----------------------------------------------------------- as an owner

    def attend(self, head: tuple[Any, ...], caller: PeerId, call: Call) -> None:
        """An exchange somebody opened with us."""
        round_id, plan_hash, ownership, group, digest, names, share, gift = head
        if self.peer.refuses(caller):
            call.say(Kind.STRANGER)
            return
        self._numbers += 1
        number = self._numbers
        self._lines[number] = _Line(caller, round_id, group, share, call)
        call.gone = lambda: self._hang_up(number)
        tokens = share.tokens if share else 0
        self._feed(
            Began(
                number, caller, round_id, plan_hash, ownership, group, digest, tokens, names, gift
            )
        )

    def _hang_up(self, number: int) -> None:
        if self._lines.pop(number, None) is not None:
            self._feed(Ended(number))

    def _feed(self, event: Any) -> None:
        for action in self.machine.handle(event, self.peer.world.now):
            self._carry_out(action)

    def _carry_out(self, action: Any) -> None:
        match action:
            case Read(number):
                if (line := self._lines.get(number)) is not None:
                    self.peer.after(line.call.bulk_s, self._uploaded, number)
            case Serve(number, names, cell):
                if (line := self._lines.get(number)) is not None:
                    epoch = self._epochs.get(line.round.epoch)
                    held = epoch.of(cell) if epoch is not None else {}
                    if held or not names:
                        size = sum(self.peer.swarm.setup.size_of(n) for n in names)
                        line.call.say({n: (held[n].value, held[n].by) for n in names}, HEAD + size)
                    else:
                        line.call.say(Kind.FORGOTTEN)
                    self.peer.after(0.0, self._hang_up, number)
            case Refuse(number, kind, _, weight):
                if (line := self._lines.get(number)) is not None:
                    if weight:
                        self.peer.fault(line.peer, weight)
                    line.call.say(kind)
                    self.peer.after(0.0, self._hang_up, number)
            case Step():
                seconds = self.peer.swarm.setup.step_s * len(action.names)
                self.peer.device.run(Priority.STEP, seconds, self._step, action)
            case Wake(at):
                self.peer.after(at - self.peer.world.now, self._feed, Ticked())
            case Fail(number, _, cell):
                if (epoch := self._epochs.get(number)) is not None and epoch.attempts:
                    newest = epoch.attempts[max(epoch.attempts)]
                    newest.failing.add(cell)
                    for attempt in epoch.attempts.values():
                        attempt.settled = attempt.settled or attempt is not newest
                        self._end_if_done(attempt)
                self._settle(number)
            case _:
                pass

    def _uploaded(self, number: int) -> None:
        line = self._lines.get(number)
        if line is None or line.share is None or line.call.over:
            return
        attempt = self._attempt(line.round)
        if attempt is None:
            return
        attempt.given[line.group, line.peer] = line.share
        self._feed(Uploaded(number))

    def _step(self, action: Step) -> None:
        attempt = self._attempt(action.round)
        if attempt is None:
            return
        request, me = attempt.request, self.peer.name
        shares = tuple(
            request.share if p == me and request.share else attempt.given[action.group, p]
            for p in action.contributors
        )
        self.peer.swarm.watch.step(
            self.peer, request, action, shares, action.cell in attempt.failing
        )
        if self.peer.broken_steps:
            self.peer.broken_steps -= 1
            self._feed(
                StepFailed(
                    action.round.epoch, frozenset(action.names), "out of memory", action.cell
                )
            )
            return
        fresh = attempt.step(action.cell, action.names, shares)
        epoch = self._epochs[action.round.epoch]
        epoch.of(action.cell).update(
            {n: Held(v, me, action.contributors) for n, v in fresh.items()}
        )
        self._feed(Stepped(action.round.epoch, frozenset(action.names), action.cell))
        self._settle(action.round.epoch)

    def _settle(self, number: int) -> None:
        epoch = self._epochs.get(number)
        for attempt in list(epoch.attempts.values()) if epoch else []:
            if epoch is None or attempt.settled:
                continue
            if all(
                cell in attempt.failing or attempt.mine <= epoch.of(cell).keys()
                for cell in attempt.cells
            ):
                attempt.settled = True
                self._end_if_done(attempt)

    def _held(self, epoch: int) -> dict[str, Held]:
        return self._epochs[epoch].here if epoch in self._epochs else {}

    def _attempt(self, round_id: RoundId) -> Attempt | None:
        epoch = self._epochs.get(round_id.epoch)
        return None if epoch is None else epoch.attempts.get(round_id)
