"""Decides at an owner, while a cell's contributions come in, which peers to read, refuse and serve,
and when to step.

One machine per daemon, all epochs. A *round* is one attempt of an epoch; its owner's parts come in
*groups*; a *stream* is one exchange that a peer has open with us for one group. Four rules carry
everything else:

* a part is *claimed* when it is handed to the optimizer and *fresh* when it came back; a claimed
  part is never claimed again in its epoch, whatever attempt, term or set of contributors comes
  later: late peers get the bytes that exist;
* a step takes all parts of one group that are not claimed yet, and only contributions that cover
  all of them;
* one group is stepped at a time, and only the first ``LET_IN`` groups that are not fresh are let
  in: the others wait at their senders;
* the first fault of an attempt latches: until the next attempt opens, everybody who still waits is
  refused.

A stream *knocks* first: its round is known then, and nothing else. Its head is read when its peer
has a place in a round that is open here. Members of the plan in force may be ahead of our own
round; a peer that is ahead of the plan as well waits for a moment only, and only few may.

Pure: no clock, no socket, no tensor.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from node.averaging.exchange.events import (
    LET_IN,
    UNDER_WAY,
    Action,
    Began,
    Ended,
    EndStream,
    Event,
    Fail,
    Forgot,
    Kind,
    Knocked,
    Opened,
    PeerFoundDead,
    Planned,
    Read,
    ReadHead,
    ReduceAndStep,
    Serve,
    Spoiled,
    Stepped,
    TimePassed,
    Uploaded,
    Voided,
    Wait,
)
from node.core.ids import PeerId, RoundId

MOST_SERVED = 8
"""Times a peer is sent the same group in an attempt: once is enough, a lost connection makes it
two, and more only costs our uplink."""
MOST_OPEN = 4 * UNDER_WAY
"""Unanswered streams of one peer. It opens ``UNDER_WAY`` at once; streams of an earlier attempt or
of a broken connection may not have ended here yet."""
PLANS_KEPT = 4
"""Epochs of which the members are remembered."""


class GroupPhase(Enum):
    HELD = "its round is not open here"
    OPENING = "its head is to be read"
    QUEUED = "its group is not let in yet"
    READING = "its gradients are coming"
    WAITING = "wants its parts"
    SETTLED = "served or refused"


COMING = (GroupPhase.QUEUED, GroupPhase.READING)
OPEN = (*COMING, GroupPhase.WAITING)


@dataclass(slots=True)
class StreamState:
    began: Began
    phase: GroupPhase = GroupPhase.HELD

    @property
    def live(self) -> bool:
        return self.phase is not GroupPhase.SETTLED


@dataclass(slots=True)
class GroupState:
    """One group of the current attempt. ``given``: peers that contributed to it; ``present``: peers
    that came after its parts were claimed; ``missing``: peers that broke off their exchange."""

    names: frozenset[str]
    contribute_by: float
    given: set[PeerId]
    present: set[PeerId] = field(default_factory=set)
    missing: set[PeerId] = field(default_factory=set)


@dataclass(slots=True)
class EpochCounts:
    """Counts of one epoch. ``claimed`` and ``fresh``: parts in the whole epoch; ``served``: how
    often each peer had each group in each round. The rest belongs to the current attempt. ``idle``:
    peers that came with nothing to give; ``missing``: peers that died or left; ``barred``: peers
    that spoiled a contribution, or lied about one. ``stepping``: the optimizer has a group of
    ours."""

    current: Opened
    rounds: dict[RoundId, Opened] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    served: Counter[tuple[RoundId, PeerId, int]] = field(default_factory=Counter)
    groups: list[GroupState] = field(default_factory=list)
    idle: set[PeerId] = field(default_factory=set)
    missing: set[PeerId] = field(default_factory=set)
    barred: set[PeerId] = field(default_factory=set)
    fault: str = ""
    stepping: bool = False

    def begin(self, opened: Opened) -> None:
        """Begin a new attempt; claimed and fresh parts stay so."""
        self.current = self.rounds[opened.round] = opened
        self.claimed |= opened.held
        self.fresh |= opened.held
        self.groups = [
            GroupState(frozenset(group.names), until, {opened.me} if opened.tokens else set())
            for group, until in zip(opened.groups, opened.contribute_by, strict=True)
        ]
        self.idle = {opened.me}
        self.missing = set()
        self.barred = set()
        self.fault = ""

    def unclaimed(self, group: int) -> frozenset[str]:
        """Parts that a step of this group would take, and that a contribution to it must cover."""
        return self.groups[group].names - self.claimed

    def let_in(self) -> list[int]:
        """The groups for which gradients may be here: the first ones that are not fresh."""
        return [g for g, state in enumerate(self.groups) if not state.names <= self.fresh][:LET_IN]

    def awaited(self, group: int) -> frozenset[PeerId]:
        """Peers that may still contribute to a group of the current attempt."""
        state = self.groups[group]
        out = self.idle | self.missing | self.barred | state.given | state.present | state.missing
        return self.current.members - self.current.listeners - out

    def may_hold(self) -> bool:
        """Return True if parts without contributions may stay as they are: all members came with
        nothing to give. A dead member, or one behind a lost connection, may have gradients."""
        givers = self.current.members - self.current.listeners
        return self.current.may_hold and givers <= self.idle

    def wanted(self, stream: StreamState) -> frozenset[str]:
        """A contributor is answered with the parts it gave to; a listener with all of the group it
        asked for."""
        began = stream.began
        return frozenset(began.names) or frozenset(
            self.rounds[began.round].groups[began.group].names
        )


class RoundMachine:
    """``handle(event, now) -> actions``. ``held_per_peer`` and ``held_total`` bound the streams
    that wait for a round; a quarter of all may be of peers that no plan known here names."""

    def __init__(self, held_per_peer: int = 2 * UNDER_WAY, held_total: int = 256) -> None:
        self._held_per_peer = held_per_peer
        self._held_total = held_total
        self._plans: dict[int, Planned] = {}
        self._epochs: dict[int, EpochCounts] = {}
        self._streams: dict[int, StreamState] = {}
        self._floor = -1

    def handle(self, event: Event, now: float) -> list[Action]:
        """The only door. Our own side opens rounds of an epoch in rising order. Raises ValueError
        when it opens one of an epoch that is over."""
        match event:
            case Opened():
                return self._opened(event, now)
            case Planned():
                return self._planned(event)
            case Knocked():
                return self._knocked(event)
            case Began():
                return self._began(event, now)
            case Uploaded(stream):
                return self._uploaded(stream, now)
            case Spoiled(stream, kind, text):
                return self._spoiled(stream, kind, text, now)
            case Ended(stream):
                return self._ended(stream, now)
            case PeerFoundDead(peer):
                return self._gone(peer, now)
            case TimePassed():
                return [a for e in self._epochs.values() for a in self._step_if_ready(e, now)]
            case Stepped(number, names, fault):
                return self._stepped(number, names, fault, now)
            case Forgot(number):
                return self._forgot(number)
            case Voided(number):
                return self._voided(number)

    def _opened(self, opened: Opened, now: float) -> list[Action]:
        if opened.round.epoch <= self._floor:
            raise ValueError(f"epoch {opened.round.epoch} is over")
        epoch = self._epochs.setdefault(opened.round.epoch, EpochCounts(opened))
        epoch.begin(opened)
        actions: list[Action] = []
        for number, stream in self._of_epoch(opened.round.epoch):
            if stream.phase is GroupPhase.HELD and stream.began.round <= opened.round:
                actions += self._admit(number, stream)
            elif stream.phase in OPEN and not epoch.wanted(stream) <= epoch.claimed:
                actions.append(
                    self._refuse(
                        number, Kind.SUPERSEDED, f"attempt {opened.round.attempt} has begun"
                    )
                )
            elif stream.phase in COMING:
                actions.append(self._put_off(number, stream))
        return [*actions, *self._serve_ready(epoch), *self._step_if_ready(epoch, now)]

    def _planned(self, planned: Planned) -> list[Action]:
        self._plans[planned.epoch] = planned
        while len(self._plans) > PLANS_KEPT:
            del self._plans[min(self._plans)]
        actions: list[Action] = []
        for number, stream in self._of_epoch(planned.epoch):
            held = stream.phase is GroupPhase.HELD
            if held and stream.began.plan_hash == planned.plan_hash:
                actions += self._hold(number, stream)
        return actions

    def _knocked(self, knocked: Knocked) -> list[Action]:
        stream = self._streams[knocked.stream] = StreamState(knocked.unread())
        peer = knocked.peer
        if sum(s.live and s.began.peer == peer for s in self._streams.values()) > MOST_OPEN:
            text = f"{MOST_OPEN} exchanges of this peer are under way here"
            return [self._refuse(knocked.stream, Kind.BUSY, text)]
        return self._admit(knocked.stream, stream)

    def _admit(self, number: int, stream: StreamState) -> list[Action]:
        """Read the head of a stream that has a place in a round open here; hold a stream that may
        get one, refuse any other."""
        round_id = stream.began.round
        epoch = self._epochs.get(stream.began.round.epoch)
        if round_id.epoch <= self._floor:
            return [self._refuse(number, Kind.FORGOTTEN, f"epoch {round_id.epoch} is over")]
        if epoch is None or round_id > epoch.current.round:
            return self._hold(number, stream)
        opened = epoch.rounds.get(round_id)
        if opened is None:
            now_at = f"this peer is at attempt {epoch.current.round.attempt}"
            return [self._refuse(number, Kind.SUPERSEDED, now_at)]
        plan = stream.began.plan_hash
        if plan != opened.plan_hash:
            text = f"plan {plan[:12]!r} is not {opened.plan_hash[:12]!r}"
            return [self._refuse(number, Kind.PLAN, text)]
        if stream.began.peer not in opened.members:
            return [self._refuse(number, Kind.STRANGER, "not in this round's view", 1.0)]
        stream.phase = GroupPhase.OPENING
        return [ReadHead(number)]

    def _began(self, began: Began, now: float) -> list[Action]:
        stream = self._streams[began.stream] = StreamState(began)
        actions = self._judge(began.stream, stream)
        epoch = self._epochs.get(began.round.epoch)
        if epoch is None:
            return actions
        return actions + self._step_if_ready(epoch, now)

    def _judge(self, number: int, stream: StreamState) -> list[Action]:
        """Read, put off, serve or refuse a stream with a known head."""
        began = stream.began
        if began.round.epoch <= self._floor:
            return [self._refuse(number, Kind.FORGOTTEN, f"epoch {began.round.epoch} is over")]
        epoch = self._epochs.get(began.round.epoch)
        if epoch is None or (opened := epoch.rounds.get(began.round)) is None:
            return [self._refuse(number, Kind.SUPERSEDED, "that round is not open here")]
        now_at = f"this peer is at attempt {epoch.current.round.attempt}"
        refusal = self._objection(number, began, opened)
        if refusal is not None:
            if refusal.weight and opened is epoch.current:
                # nobody waits for a peer with a head that is proven wrong
                epoch.barred.add(began.peer)
            return [refusal]
        if epoch.wanted(stream) <= epoch.claimed:
            if opened is epoch.current:
                epoch.groups[began.group].present.add(began.peer)
            return self._serve_if_fresh(number, stream, epoch) or [self._put_off(number, stream)]
        if opened is not epoch.current:
            return [self._refuse(number, Kind.SUPERSEDED, now_at)]
        if epoch.fault:
            return [self._refuse(number, Kind.FAILED, epoch.fault)]
        if began.tokens == 0:
            epoch.idle.add(began.peer)
            return [self._put_off(number, stream)]
        if began.peer in epoch.groups[began.group].given:
            return [self._put_off(number, stream)]
        if began.peer in epoch.barred:
            return [
                self._refuse(
                    number, Kind.VALUES, "an earlier contribution to this round was refused"
                )
            ]
        if not epoch.unclaimed(began.group) <= set(began.names):
            return [
                self._refuse(number, Kind.HEADS, "leaves out parts that are not stepped yet", 1.0)
            ]
        if began.group not in epoch.let_in():
            stream.phase = GroupPhase.QUEUED
            return [Wait(number)]
        return self._read(number, stream, epoch)

    def _objection(self, number: int, began: Began, opened: Opened) -> EndStream | None:
        """The refusal of a head that is wrong in any state of the round; None if nothing is
        wrong."""
        group = None
        if began.group < len(opened.groups):
            group = opened.groups[began.group]
        names = set(began.names)
        plan = began.plan_hash
        owners = began.ownership_hash
        checks: tuple[tuple[bool, Kind, str, float], ...] = (
            (
                plan == opened.plan_hash,
                Kind.PLAN,
                f"plan {plan[:12]!r} is not {opened.plan_hash[:12]!r}",
                0.0,
            ),
            (
                owners == opened.ownership_hash,
                Kind.OWNERSHIP,
                f"{owners[:12]!r} is not {opened.ownership_hash[:12]!r}",
                0.0,
            ),
            (began.peer in opened.members, Kind.STRANGER, "not in this round's view", 1.0),
            (
                not (began.tokens and began.peer in opened.listeners),
                Kind.STRANGER,
                "a listener has no gradients to give",
                1.0,
            ),
            (
                group is not None and began.digest == group.digest,
                Kind.GROUPS,
                f"group {began.group} of {len(opened.groups)} is another one here",
                0.0,
            ),
            (
                bool(began.tokens) == bool(names) and len(names) == len(began.names),
                Kind.HEADS,
                "tokens and tensors come together, each tensor once",
                1.0,
            ),
            (
                group is not None and names <= set(group.names),
                Kind.HEADS,
                "names parts that are not this peer's, or of another group",
                1.0,
            ),
            (
                began.tokens <= opened.token_limit,
                Kind.VALUES,
                f"{began.tokens} tokens where {opened.token_limit} are possible",
                1.0,
            ),
        )
        for fine, kind, text, weight in checks:
            if not fine:
                return self._refuse(number, kind, text, weight)
        return None

    def _read(self, number: int, stream: StreamState, epoch: EpochCounts) -> list[Action]:
        peer = stream.began.peer
        group = stream.began.group
        actions: list[Action] = [
            self._refuse(other, Kind.SUPERSEDED, "a newer exchange of the same peer")
            for other, s in self._of_epoch(stream.began.round.epoch)
            if other != number
            and s.phase is GroupPhase.READING
            and (s.began.peer, s.began.group) == (peer, group)
        ]
        stream.phase = GroupPhase.READING
        epoch.missing.discard(peer)
        epoch.groups[group].missing.discard(peer)
        return [*actions, Read(number)]

    def _put_off(self, number: int, stream: StreamState) -> Wait:
        stream.phase = GroupPhase.WAITING
        return Wait(number)

    def _hold(self, number: int, stream: StreamState) -> list[Action]:
        """Keep a stream of a round that is not open here: for a member of its plan until the round
        opens, for any other peer for a moment, in which the plan may come."""
        peer = stream.began.peer
        plan = self._plan_of(stream)
        if plan is not None and peer not in plan:
            return [self._refuse(number, Kind.STRANGER, "not in the plan of this round", 1.0)]
        held = [s for n, s in self._streams.items() if s.phase is GroupPhase.HELD and n != number]
        strange = [s for s in held if not self._known(s.began.peer)]
        if (
            len(held) >= self._held_total
            or sum(s.began.peer == peer for s in held) >= self._held_per_peer
            or (not self._known(peer) and len(strange) >= max(1, self._held_total // 4))
        ):
            text = "too many exchanges wait for rounds that are not open here"
            return [self._refuse(number, Kind.BUSY, text)]
        if plan is None:
            return []
        return [Wait(number)]

    def _plan_of(self, stream: StreamState) -> frozenset[PeerId] | None:
        """Members of the plan that a stream names; None where that plan is not known here."""
        number = stream.began.round.epoch
        plan_hash = stream.began.plan_hash
        planned = self._plans.get(number)
        if planned is not None and planned.plan_hash == plan_hash:
            return planned.members
        epoch = self._epochs.get(number)
        if epoch is not None and epoch.current.plan_hash == plan_hash:
            return epoch.current.members
        return None

    def _known(self, peer: PeerId) -> bool:
        """Return True if a plan known here has this peer as a member."""
        return any(peer in plan.members for plan in self._plans.values())

    def _in_epoch(self, number: int) -> tuple[StreamState, EpochCounts] | None:
        """The stream and its epoch; None where one of them is not known here."""
        stream = self._streams.get(number)
        if stream is None:
            return None
        epoch = self._epochs.get(stream.began.round.epoch)
        if epoch is None:
            return None
        return stream, epoch

    def _uploaded(self, number: int, now: float) -> list[Action]:
        match self._in_epoch(number):
            case StreamState(began=began, phase=GroupPhase.READING) as stream, epoch:
                stream.phase = GroupPhase.WAITING
                epoch.groups[began.group].given.add(began.peer)
                return self._step_if_ready(epoch, now)
        return []

    def _spoiled(self, number: int, kind: Kind, text: str, now: float) -> list[Action]:
        match self._in_epoch(number):
            case StreamState(began=began, phase=GroupPhase.READING), epoch:
                epoch.barred.add(began.peer)  # its earlier contributions are fit, and stay
                return [self._refuse(number, kind, text, 1.0), *self._step_if_ready(epoch, now)]
            case StreamState(phase=GroupPhase.OPENING), _:
                return [self._refuse(number, kind, text, 1.0)]
        return []

    def _ended(self, number: int, now: float) -> list[Action]:
        found = self._in_epoch(number)
        self._streams.pop(number, None)
        if found is None:
            return []
        stream, epoch = found
        if stream.phase in (GroupPhase.HELD, GroupPhase.OPENING, GroupPhase.SETTLED):
            return []
        began = stream.began
        others = [
            s.began
            for _, s in self._of_epoch(began.round.epoch)
            if s.live and s.began.peer == began.peer
        ]
        # A contribution that came whole stays: it cannot be taken back.
        if not others:
            epoch.missing.add(began.peer)
        elif began.round == epoch.current.round and all(
            (b.round, b.group) != (began.round, began.group) for b in others
        ):
            epoch.groups[began.group].missing.add(began.peer)
        return self._step_if_ready(epoch, now)

    def _gone(self, peer: PeerId, now: float) -> list[Action]:
        actions: list[Action] = []
        for number, epoch in self._epochs.items():
            if any(
                s.phase is GroupPhase.READING and s.began.peer == peer
                for _, s in self._of_epoch(number)
            ):
                # the peer's gradients are coming all the same; if they stop, the stream ends
                continue
            epoch.missing.add(peer)
            actions += self._step_if_ready(epoch, now)
        return actions

    def _step_if_ready(self, epoch: EpochCounts, now: float) -> list[Action]:
        """The first group let in that has all it waits for, unless another is at the optimizer."""
        opened = epoch.current
        if epoch.fault or epoch.stepping:
            return []
        for group in epoch.let_in():
            names = epoch.unclaimed(group)
            state = epoch.groups[group]
            awaited = epoch.awaited(group)
            if not names or (awaited and now < state.contribute_by):
                continue
            of_epoch = self._of_epoch(opened.round.epoch)
            # Peers that have not begun a contribution by now are not waited for in later groups.
            begun = (*COMING, GroupPhase.OPENING)
            epoch.missing |= awaited - {s.began.peer for _, s in of_epoch if s.phase in begun}
            if not state.given and not epoch.may_hold():
                return self._latch(epoch, "nobody gave gradients for these parts")
            epoch.claimed |= names
            epoch.stepping = True
            late = [
                self._put_off(n, s)
                for n, s in of_epoch
                if s.phase in COMING and epoch.wanted(s) <= epoch.claimed
            ]
            given = tuple(sorted(state.given))
            return [ReduceAndStep(opened.round, group, tuple(sorted(names)), given), *late]
        return []

    def _stepped(self, number: int, names: frozenset[str], fault: str, now: float) -> list[Action]:
        epoch = self._epochs.get(number)
        if epoch is None:
            return []
        epoch.stepping = False
        if fault:
            epoch.claimed -= names - epoch.fresh
            return self._latch(epoch, fault)
        epoch.fresh |= names
        actions = self._serve_ready(epoch)
        let_in = epoch.let_in()
        for n, s in self._of_epoch(number):
            if s.phase is GroupPhase.QUEUED and s.began.group in let_in:
                actions += self._judge(n, s)
        return actions + self._step_if_ready(epoch, now)

    def _latch(self, epoch: EpochCounts, text: str) -> list[Action]:
        epoch.fault = epoch.fault or text
        number = epoch.current.round.epoch
        waiting = [
            self._refuse(n, Kind.FAILED, epoch.fault)
            for n, s in self._of_epoch(number)
            if s.phase in OPEN  # no step is under way, so what is claimed was served
        ]
        return [*waiting, Fail(number, epoch.fault)]

    def _forgot(self, number: int) -> list[Action]:
        self._floor = max(self._floor, number)
        actions: list[Action] = [
            self._refuse(n, Kind.FORGOTTEN, f"epoch {s.began.round.epoch} is over")
            for n, s in self._streams.items()
            if s.live and s.began.round.epoch <= number
        ]
        self._epochs = {n: e for n, e in self._epochs.items() if n > number}
        self._plans = {n: p for n, p in self._plans.items() if n > number}
        return actions

    def _voided(self, number: int) -> list[Action]:
        """Handle the return of the swarm to an earlier epoch. Streams of rounds that are not open
        here stay: they may belong to the new beginning."""
        self._floor = min(self._floor, number - 1)
        actions: list[Action] = [
            self._refuse(n, Kind.SUPERSEDED, f"epoch {number} begins anew")
            for n, s in self._streams.items()
            if s.live and s.phase is not GroupPhase.HELD and s.began.round.epoch >= number
        ]
        self._epochs = {n: e for n, e in self._epochs.items() if n < number}
        self._plans = {n: p for n, p in self._plans.items() if n < number}
        return actions

    def _serve_ready(self, epoch: EpochCounts) -> list[Action]:
        return [
            action
            for n, s in self._of_epoch(epoch.current.round.epoch)
            if s.phase in OPEN
            for action in self._serve_if_fresh(n, s, epoch)
        ]

    def _serve_if_fresh(self, number: int, stream: StreamState, epoch: EpochCounts) -> list[Action]:
        wanted = epoch.wanted(stream)
        if not wanted <= epoch.fresh:
            return []
        had = (stream.began.round, stream.began.peer, stream.began.group)
        epoch.served[had] += 1
        if epoch.served[had] > MOST_SERVED:
            return [
                self._refuse(
                    number, Kind.BUSY, f"was served this group {MOST_SERVED} times in this attempt"
                )
            ]
        stream.phase = GroupPhase.SETTLED
        return [Serve(number, tuple(sorted(wanted)))]

    def _refuse(self, number: int, kind: Kind, text: str, weight: float = 0.0) -> EndStream:
        self._streams[number].phase = GroupPhase.SETTLED
        return EndStream(number, kind, text, weight)

    def _of_epoch(self, number: int) -> list[tuple[int, StreamState]]:
        return sorted((n, s) for n, s in self._streams.items() if s.began.round.epoch == number)
