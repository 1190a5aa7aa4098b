"""Decides the course of micro-batches through this peer, also when other peers die. Pure: events
in, actions out.

Responsibility moves with the receipts. ACCEPTED means "I hold it": from then on the receiver finds
the next hop. DONE means "and the hop after me holds my result": only then may the sender forget. So
any one peer can die at any moment and another still holds everything needed: the hop before keeps
its output, the hop after keeps the gradient.

A share (this stage's parameter gradients of one micro-batch) stays apart until the origin *names*
this peer. The gradient carries the journey it took; when it has come home, the origin names the one
peer of every stage on that journey, once. So a micro-batch counts at most once at a stage, whatever
forked on the way: duplicates after a time-out, or a hop that was thought dead, replaced or skipped,
and was alive after all. A name that gets lost costs a count and never adds one.

A share takes the same memory as the stage's parameters. So each origin has a number of places for
unnamed shares, and a gradient without a place is not computed yet. It waits until the origin names
an earlier share. If none is named in time, the gradient is computed and passed on, and its share
here is thrown away: an origin that names nothing loses its own work and holds up nobody. After an
epoch in which it named none of its shares, nobody waits for its names until it gives one.

If no replica of a block stage can be reached, and the run allows it, a forward leaves that hop out;
the gradient takes the same way back. Activations that came over different stages are different: a
hop keeps to the one it took first.
"""

import sys
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum

from node.core.ids import ENDS, PeerId, short
from node.core.journey import Hop, Path, Plan
from node.pipeline.accounts import SharedBudget
from node.pipeline.events import (
    AcknowledgeVisit,
    Action,
    AdoptPlan,
    Answer,
    Arrived,
    Asked,
    Broken,
    Claim,
    Close,
    Commit,
    Compute,
    Computed,
    Counted,
    Direction,
    Drop,
    Dropped,
    Event,
    Expired,
    Failed,
    Fetch,
    Fetched,
    Finished,
    Free,
    FreeGradient,
    FreeGraph,
    Hold,
    Key,
    Later,
    Lost,
    Note,
    NotFetched,
    Passed,
    PeerDied,
    Retry,
    Say,
    Send,
    Settled,
    Skipped,
    Start,
    TellCounted,
    TellOrigin,
    TensorReceived,
    Trouble,
    Turned,
    VisitEvent,
    Void,
)
from node.pipeline.route import (
    NOBODY,
    Delivery,
    RoutePause,
    Suspects,
    Workloads,
    beside,
    current,
    misfit,
    skipped,
    visited,
)

FORWARD = Direction.FORWARD
BACKWARD = Direction.BACKWARD
BEGUN = 64
"""Plans that are remembered: work under another one is ahead of its plan, whatever its epoch."""
ENDS_JOBS = 3
"""Device jobs of a micro-batch at its ends peer: forward, loss and backward."""
BLOCK_JOBS = 2
"""Device jobs of a micro-batch at a block stage: forward and backward."""
ORIGIN_DEAD = "its origin is dead"


class Step(IntEnum):
    """Progress of one direction of a visit."""

    ABSENT = 0
    HELD = 1
    """The tensor is here."""
    COMPUTED = 2
    PASSED = 3
    """The next peer ACCEPTED the result."""
    SETTLED = 4
    """The next peer is DONE with it."""


@dataclass(slots=True)
class Leg:
    """One direction of a visit: its step, and the delivery of its result."""

    step: Step = Step.ABSENT
    told: bool = False
    delivery: Delivery | None = None
    target: PeerId | None = None
    """Peer to which the attempt under way goes; None between attempts and after giving up."""


@dataclass(slots=True)
class Visit:
    """This peer's part in one micro-batch. ``journey``: all hops that this peer knows of."""

    journey: list[Hop]
    forward: Leg = field(default_factory=Leg)
    backward: Leg = field(default_factory=Leg)
    gradient_from: PeerId | None = None
    named: bool = False
    """True once the origin has said that this peer's share counts."""
    committed: bool = False
    """True once decided: the share was counted, or thrown away."""

    def leg(self, way: Direction) -> Leg:
        return self.forward if way is FORWARD else self.backward

    def same_way(self, claim: Claim) -> bool:
        """Return True if the claim's activation came over the same stages as ours. A gradient's
        claim is judged by the activation that the gradient belongs to."""
        return skipped(self.journey, claim.position) == skipped(claim.journey, claim.position)

    def learn(self, way: Direction, claim: Claim) -> None:
        """Take over the sender's journey on its side of this peer: the sender knows it best."""
        here = claim.position
        journey = claim.journey
        if way is FORWARD:
            self.journey[:here] = journey[:here]
        else:
            self.journey[here + 1 :] = journey[here + 1 :]

    def undecided(self, position: int) -> bool:
        """Return True if a gradient was passed on from this block stage and the origin has not said
        yet if the share counts. The origin decides about its own share as soon as it is made."""
        back = self.backward
        given = back.step >= Step.PASSED or (back.step is Step.COMPUTED and back.target is not None)
        return given and not self.committed and position < len(self.journey) - 1


class PipelineMachine:
    """The decisions of one peer. :meth:`handle` is the only way in.

    ``fewest``: block stages a journey visits at least; a hop is left out only beyond that. By
    default none is. ``planned``: paths are planned around the memory of every peer, so a peer
    without room is waited for before others are asked, unless it is slower than another.
    ``places``: shares of others' micro-batches that may be here unnamed; the origins of a plan have
    parts of them by the number of their micro-batches.
    """

    def __init__(
        self,
        me: PeerId,
        fewest: int = sys.maxsize,
        planned: bool = False,
        places: int = sys.maxsize,
    ) -> None:
        self.me = me
        self.fewest = fewest
        self.planned = planned
        self.places = places
        self.visits: dict[Key, Visit] = {}
        self._unnamed: dict[Key, Visit] = {}
        """Visits with a place for their share, which is made or about to be."""
        self._waiting: dict[Key, Visit] = {}
        """Visits that hold their gradient and have no place for its share."""
        self.suspects = Suspects()
        self._begun: deque[str] = deque(maxlen=BEGUN)
        """Hashes of the plans that were in force here."""
        self.computed = 0
        """Forwards, losses and backwards that were computed here under the plan in force."""
        self.neighbours: dict[int, tuple[PeerId, PeerId]] = {}
        """Of each micro-batch that counts here: the peer that took this peer's gradient, and the
        peer that gave it one."""
        self._naming: set[PeerId] = set()
        """Origins that have named a share in this epoch."""
        self._nameless: set[PeerId] = set()
        """Origins that named none in the last epoch in which they had shares here."""
        self._adopt(None)

    def replicas(self, stage: int) -> tuple[PeerId, ...]:
        """Peers that hold ``stage`` in the plan's parameters, in PeerId order; none without a
        plan."""
        return self._replicas.get(stage, ())

    def told(self, key: Key, way: Direction) -> bool:
        """Return True if DONE may be sent for this tensor."""
        visit = self.visits.get(key)
        return visit is not None and visit.leg(way).told

    def unsure(self, besides: Collection[int] = ()) -> int:
        """Number of gradients that were passed on while the origin has not yet said if this peer's
        share counts, without those of origins that named nothing in the epoch before.
        ``besides``: micro-batches to leave out."""
        unnamed = self.unnamed(besides)
        return sum(count for origin, count in unnamed.items() if origin not in self._nameless)

    def unnamed(self, besides: Collection[int] = ()) -> Counter[PeerId]:
        """Number of gradients of each origin that were passed on while it has not yet said if this
        peer's share counts."""
        return Counter(
            visit.journey[0].peer
            for key, visit in self.visits.items()
            if visit.undecided(key.position) and key.index not in besides
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at clock time ``now``; the actions are to be carried out in order."""
        actions = self._handle(event, now)
        if self._waiting:
            return actions + self._let_in()
        return actions

    def _handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Note) and (answer := self._in_force(event.epoch, event.plan_hash)):
            if isinstance(event, Counted):
                # Too late for this epoch; in the next one its names are waited for again.
                self._nameless.discard(event.caller)
            return [Answer(Say.REFUSED, answer.reason)]
        match event:
            case Arrived():
                return self._arrived(event, now)
            case TensorReceived():
                return self._held(event, now)
            case PeerDied(peer):
                return self._gone(peer, now)
            case Asked():
                return self._asked(event)
            case Start(index):
                return self._start(index)
            case Drop(index, reason):
                return self._drop(index, reason)
            case Lost():
                return self._lost(event, now)
            case Counted():
                return self._counted(event)
            case Close(epoch):
                return self._close(epoch)
            case AdoptPlan(plan):
                return self._adopt(plan)
            case Passed() | Settled():
                self.suspects.clear(event.peer)
            case Turned(trouble=Trouble.FAILED):
                self.suspects.add(event.peer, now)
        visit = self.visits.get(event.key)
        if visit is None:
            return []
        return self._of_visit(event, visit, now)

    def _of_visit(self, event: VisitEvent, visit: Visit, now: float) -> list[Action]:
        match event:
            case Computed(key, way):
                return self._computed(key, visit, way, now)
            case Passed(key, way):
                return self._passed(key, visit, way)
            case Settled(key, way):
                return self._settled(key, visit, way)
            case Turned():
                return self._turned(event, visit, now)
            case Retry(key, way):
                return self._retried(key, visit, way, now)
            case Broken():
                return self._broken(event, visit)
            case Fetched(key, peer):
                return self._fetched(key, visit, peer)
            case NotFetched(key, settled):
                return self._not_fetched(key, visit, settled)
            case Expired(key):
                return self._expired(key, visit)

    # Plans
    # ------------------------------------------------------------

    def _adopt(self, plan: Plan | None) -> list[Action]:
        if plan is not None and self.plan is not None and plan.hash == self.plan.hash:
            return []
        actions: list[Action] = [
            *(Free(key) for key in self.visits),
            *(
                Dropped(key.index, "the epoch is over")
                for key, visit in self.visits.items()
                if key.position == 0 and not visit.committed
            ),
        ]
        self.visits.clear()
        self.neighbours.clear()
        self.computed = 0
        self.suspects.gone.clear()
        self.plan = plan
        self.closed = False
        self._naming.clear()
        if plan is not None:
            self._begun.append(plan.hash)
        self.paths: dict[int, Path] = {p.index: p for p in plan.paths} if plan else {}
        """The plan's path of each micro-batch."""
        self._weights = Counter(path.origin for path in self.paths.values())
        if plan is not None:
            self._nameless &= self._weights.keys()
        mine = plan.member(self.me) if plan else None
        self._stage = mine.stage if mine else ENDS
        cells = current(plan) if plan else {}
        self._replicas = {stage: tuple(m.peer for m in cell) for stage, cell in cells.items()}
        self._loads = Workloads(plan)
        return actions

    def _close(self, epoch: int) -> list[Action]:
        if self.plan is None or self.plan.epoch != epoch or self.closed:
            return []
        self.closed = True
        self._nameless |= self.unnamed().keys() - self._naming
        actions: list[Action] = []
        for key in list(self.visits):
            if key.position == 0:
                actions += self._drop(key.index, "the epoch was closed")
        for key, visit in self._with_places().items():  # nobody can name them any more
            visit.committed = True
            actions.append(Void(key))
        self._waiting.clear()
        return actions

    def _in_force(self, epoch: int, plan_hash: str) -> Answer | None:
        """Reason for which work under this plan is not taken; None if this plan is in force."""
        if self.plan is None or epoch > self.plan.epoch:
            return Answer(Say.AWAIT_PLAN, f"epoch {epoch} has not begun here")
        over = epoch < self.plan.epoch or self.closed
        if over and plan_hash in self._begun:
            return Answer(Say.REFUSED, f"epoch {epoch} is over here")
        if over:
            # The swarm goes back to a checkpoint, and the plan is behind its first micro-batches.
            return Answer(Say.AWAIT_PLAN, f"epoch {epoch} is over here, or has not begun anew")
        if plan_hash == self.plan.hash:
            return None
        if plan_hash in self._begun:
            return Answer(Say.REFUSED, "a newer plan is in force here")
        # a new term's plan reaches us a little later than our neighbours
        return Answer(Say.AWAIT_PLAN, "another plan is in force here")

    def _allowed(self, path: Path, stage: int) -> tuple[PeerId, ...]:
        if stage == ENDS:
            return (path.origin,)
        return self.replicas(stage)

    # Frames
    # ------------------------------------------------------------

    def _unfit(self, event: Arrived | TensorReceived) -> Answer | None:
        claim = event.claim
        if (answer := self._in_force(claim.epoch, claim.plan_hash)) is not None:
            return answer
        path = self.paths.get(claim.index)
        if path is None:
            return Answer(Say.REFUSED, "the plan has no such micro-batch")
        reason = misfit(path, claim, event.way, self.me, event.caller, self.fewest, self.replicas)
        if claim.journey[0].peer == self.me and claim.key._replace(position=0) not in self.visits:
            reason = reason or "not under way here"
        if not reason:
            return None
        return Answer(Say.REFUSED, reason)

    def _arrived(self, event: Arrived, now: float) -> list[Action]:
        if said := self._said(event, now):
            return said
        # A micro-batch that comes home has had room reserved since its start, and so has the
        # gradient of an activation that is here: refusing them would hold up the stash of every
        # hop. A gradient without its activation comes to a replacement of a hop, and needs the room
        # of a forward.
        reserved = event.claim.key in self.visits or event.claim.journey[0].peer == self.me
        if not event.room and not reserved:
            return [Answer(Say.BUSY, "my stash is full")]
        return [Answer(Say.TAKE)]

    def _held(self, event: TensorReceived, now: float) -> list[Action]:
        if said := self._said(event, now):
            return said
        key = event.claim.key
        claim = event.claim
        visit = self.visits.setdefault(key, Visit(list(claim.journey)))
        visit.learn(event.way, claim)
        if event.way is FORWARD:
            visit.forward.step = Step.HELD
            return [Answer(Say.TAKE), Compute(key, FORWARD)]
        visit.backward.step = Step.HELD
        visit.gradient_from = event.caller
        if visit.forward.step >= Step.COMPUTED:
            return [Answer(Say.TAKE), *self._backward(key, visit)]
        if visit.forward.step is Step.HELD:  # backward follows when forward is computed
            return [Answer(Say.TAKE)]
        before = visit.journey[beside(visit.journey, key.position, BACKWARD)]
        others = [p for p in self._allowed(self.paths[key.index], before.stage) if p != before.peer]
        return [
            Answer(Say.TAKE),
            Fetch(key, (before.peer, *others), skipped(visit.journey, key.position)),
        ]

    def _said(self, event: Arrived | TensorReceived, now: float) -> list[Action]:
        """The answer to a tensor that is not to be taken, or is here already; empty for any
        other."""
        if (answer := self._unfit(event)) is not None:
            return [answer]
        self.suspects.clear(event.caller)
        key = event.claim.key
        visit = self.visits.get(key)
        if visit is None:
            if event.claim.journey[0].peer in self.suspects.gone:
                return [Answer(Say.REFUSED, ORIGIN_DEAD)]
            return []
        if not visit.same_way(event.claim):
            if event.way is FORWARD:
                return [Answer(Say.SETTLED, "this micro-batch came here over other stages")]
            return [Answer(Say.REFUSED, "here it visited other stages")]
        if visit.leg(event.way).step is Step.ABSENT:
            return []
        if event.way is BACKWARD and visit.gradient_from != event.caller:
            return [Answer(Say.SETTLED, "another replica's gradient is here")]
        visit.learn(event.way, event.claim)
        actions: list[Action] = [Answer(Say.AGAIN)]
        leg = visit.leg(event.way)
        back = visit.backward
        stuck = leg.delivery is not None and leg.target is None and leg.step is Step.COMPUTED
        if stuck and (event.way is BACKWARD or back.step is Step.ABSENT):
            leg.delivery = (
                None  # we gave up before, or pause; the sender's journey may be newer than ours
            )
            actions += self._send(key, visit, event.way, now)
        elif (
            event.way is FORWARD
            and back.delivery is not None
            and back.step < Step.SETTLED
            and back.target != event.caller
        ):
            back.delivery = None  # the hop we gave the gradient to was replaced by the caller
            actions += self._send(key, visit, BACKWARD, now)
        return actions

    # Computing
    # ------------------------------------------------------------

    def _computed(self, key: Key, visit: Visit, way: Direction, now: float) -> list[Action]:
        if visit.leg(way).step is not Step.HELD:
            return []
        visit.leg(way).step = Step.COMPUTED
        self.computed += 1
        if way is BACKWARD:
            if key.position > 0:
                actions: list[Action] = [FreeGraph(key)]
                if visit.committed:
                    actions.append(Void(key))
                actions += self._count(key, visit)
                return actions + self._send(key, visit, BACKWARD, now)
            visit.backward.step = Step.SETTLED
            visit.named = True
            return [
                *self._count(key, visit),
                *self._tell(key, visit, BACKWARD),
                *self._finish(key, visit),
            ]
        # the origin: the loss is its forward and gives the gradient as well
        if key.position == len(visit.journey) - 1:
            visit.backward.step = Step.COMPUTED
            return [
                *self._tell(key, visit, FORWARD),
                FreeGraph(key),
                *self._send(key, visit, BACKWARD, now),
            ]
        if visit.backward.step is Step.HELD:  # we replace a hop, and its output has arrived
            return [*self._tell(key, visit, FORWARD), *self._backward(key, visit)]
        return self._send(key, visit, FORWARD, now)

    def _backward(self, key: Key, visit: Visit) -> list[Action]:
        """Compute a gradient that is here, if its share has a place."""
        if key.position == 0 or self._place(key, visit):
            return [Compute(key, BACKWARD)]
        self._waiting[key] = visit
        return [Hold(key)]

    def _place(self, key: Key, visit: Visit) -> bool:
        """Give the share of a visit a place; False where its origin has all it may have."""
        taken: SharedBudget[PeerId] = SharedBudget(self.places)
        taken.divide(self._weights)
        for other in self._with_places().values():
            taken.charge(other.journey[0].peer, 1)
        if not taken.room(visit.journey[0].peer, 1):
            return False
        self._unnamed[key] = visit
        return True

    def _with_places(self) -> dict[Key, Visit]:
        """Visits with an undecided share."""
        self._unnamed = {
            key: visit
            for key, visit in self._unnamed.items()
            if self.visits.get(key) is visit and not visit.committed
        }
        return self._unnamed

    def _let_in(self) -> list[Action]:
        """Compute gradients that have waited for a place and get one, in the order in which their
        origins began them."""
        actions: list[Action] = []
        for key, visit in sorted(self._waiting.items()):
            if self.visits.get(key) is not visit:
                del self._waiting[key]
            elif self._place(key, visit):
                del self._waiting[key]
                actions.append(Compute(key, BACKWARD))
        return actions

    def _retried(self, key: Key, visit: Visit, way: Direction, now: float) -> list[Action]:
        if way is BACKWARD and self._waiting.pop(key, None) is visit:
            # It has waited long enough for a place. It goes on, for the hops before this one, and
            # counts here for nobody.
            visit.committed = True
            return [Compute(key, BACKWARD, keep=False)]
        leg = visit.leg(way)
        if leg.target is not None or leg.step < Step.COMPUTED:
            return []
        return self._send(key, visit, way, now)

    def _broken(self, event: Broken, visit: Visit) -> list[Action]:
        if visit.leg(event.way).step is not Step.HELD:
            return []
        key = event.key
        origin = visit.journey[0].peer
        if origin == self.me:
            return self._drop(key.index, event.reason)
        del self.visits[key]
        tell = []
        if event.lost:
            tell = [TellOrigin(key, origin, event.reason)]
        return [*self._fail_open(key, visit, event.reason), *tell, Free(key)]

    def _count(self, key: Key, visit: Visit) -> list[Action]:
        """Count the share once it is there and named, and free the buffers that nothing else
        needs."""
        back = visit.backward
        if not visit.named or visit.committed or self.closed or back.step < Step.COMPUTED:
            return []
        visit.committed = True
        journey = visit.journey
        # An origin gives its gradient from its last position, and gets one at its first.
        taker = beside(journey, key.position or len(journey) - 1, BACKWARD)
        giver = beside(journey, key.position, FORWARD)
        self.neighbours[key.index] = journey[taker].peer, journey[giver].peer
        if back.step is Step.SETTLED and key.position:
            return [Commit(key), Free(key)]
        return [Commit(key)]

    @staticmethod
    def _tell(key: Key, visit: Visit, way: Direction) -> list[Action]:
        leg = visit.leg(way)
        if leg.told:
            return []
        leg.told = True
        return [AcknowledgeVisit(key, way)]

    @staticmethod
    def _fail_open(key: Key, visit: Visit, reason: str) -> list[Action]:
        """Tell the peers that wait for our DONE that the visit failed."""
        return [
            Failed(key, way, reason)
            for way in Direction
            if (leg := visit.leg(way)).step is not Step.ABSENT and not leg.told
        ]

    # Sending
    # ------------------------------------------------------------

    def _send(self, key: Key, visit: Visit, way: Direction, now: float) -> list[Action]:
        leg = visit.leg(way)
        left_out = list[Action]()
        while True:
            if leg.delivery is None:
                leg.delivery = Delivery(key.index)
            position = beside(visit.journey, key.position, way)
            there = visit.journey[position]
            able = self._allowed(self.paths[key.index], there.stage)
            heir = NOBODY
            gone = self.suspects.gone
            if there.stage != ENDS and (there.peer in gone or leg.delivery.asked):
                heir = self._loads.heir(key.index, there.peer, able, gone)
            choice = leg.delivery.choose(
                there.peer, able, self.suspects, now, self._loads.done_s, heir
            )
            if isinstance(choice, RoutePause):
                return [*left_out, Later(key, way, choice.seconds, choice.full)]
            if choice is not None:
                leg.target = choice
                if choice not in (there.peer, heir):
                    self._loads.takes(choice)
                visit.journey[position] = Hop(there.stage, choice)
                patient = way is FORWARD and (  # no gradient is turned away
                    leg.delivery.patient
                    or (self.planned and choice == there.peer and choice not in self.suspects.slow)
                )
                return [*left_out, Send(key, way, tuple(visit.journey), position, patient)]
            if way is BACKWARD or there.stage == ENDS or visited(visit.journey) <= self.fewest:
                return [
                    *left_out,
                    *self._give_up(key, visit, way, f"no live replica of stage {there.stage}"),
                ]
            visit.journey[position] = Hop(there.stage, NOBODY)
            leg.delivery = None
            left_out.append(Skipped(key, there.stage))

    def _give_up(self, key: Key, visit: Visit, way: Direction, reason: str) -> list[Action]:
        origin = visit.journey[0].peer
        if origin == self.me:
            return self._drop(key.index, reason)
        told = visit.leg(way).told
        return [TellOrigin(key, origin, reason) if told else Failed(key, way, reason)]

    def _passed(self, key: Key, visit: Visit, way: Direction) -> list[Action]:
        leg = visit.leg(way)
        leg.step = max(leg.step, Step.PASSED)
        return self._tell(key, visit, way)

    def _settled(self, key: Key, visit: Visit, way: Direction) -> list[Action]:
        leg = visit.leg(way)
        # certain that nobody ACCEPTED the result so far
        untaken = leg.step < Step.PASSED and (leg.delivery is None or not leg.delivery.failures)
        leg.step = Step.SETTLED
        leg.target = None
        actions = self._tell(key, visit, way)
        if way is FORWARD or visit.journey[0].peer == self.me:
            return actions
        # DONE without ACCEPTED: another replica was first, so nobody will name us
        if untaken and not visit.committed:
            visit.committed = True
            actions.append(Void(key))
        return [*actions, Free(key) if visit.committed else FreeGradient(key)]

    def _turned(self, event: Turned, visit: Visit, now: float) -> list[Action]:
        key = event.key
        way = event.way
        peer = event.peer
        leg = visit.leg(event.way)
        if leg.step is Step.SETTLED or leg.delivery is None or leg.target != peer:
            return []
        leg.target = None
        # its gradient is here: it arrived after all
        if way is FORWARD and visit.backward.step is not Step.ABSENT:
            return self._tell(key, visit, FORWARD)
        leg.delivery.turned(peer, event.trouble)
        return self._send(key, visit, way, now)

    def _gone(self, peer: PeerId, now: float) -> list[Action]:
        self.suspects.gone.add(peer)
        actions = self._abandon(peer)
        waits = [
            (k, w) for k, v in self.visits.items() for w in Direction if v.leg(w).target == peer
        ]
        for k, w in waits:
            actions += self.handle(Turned(k, w, peer, Trouble.FAILED), now)
        return actions

    def _abandon(self, origin: PeerId) -> list[Action]:
        """Free the visits of a dead origin: no micro-batch that comes home from now on counts, also
        if the origin lives after all. A visit whose gradient is computed stays: the origin may have
        named its share before."""
        actions: list[Action] = []
        for key, visit in list(self.visits.items()):
            if visit.journey[0].peer == origin and visit.backward.step < Step.COMPUTED:
                del self.visits[key]
                actions += [*self._fail_open(key, visit, ORIGIN_DEAD), Free(key)]
        return actions

    # Standing in for a dead replica
    # ------------------------------------------------------------

    def _asked(self, event: Asked) -> list[Action]:
        key = event.key
        visit = self.visits.get(key)
        if visit is None or event.position >= len(visit.journey):
            return [Answer(Say.REFUSED, "this micro-batch is not here")]
        here = key.position
        if skipped(visit.journey, here) != tuple(i for i in event.skipped if i < here):
            return [Answer(Say.REFUSED, "here it visited other stages")]
        stage = visit.journey[event.position].stage
        if event.caller not in self._allowed(self.paths[event.index], stage):
            return [Answer(Say.REFUSED, "only a replica of that stage may ask")]
        if visit.backward.step is not Step.ABSENT:
            return [Answer(Say.SETTLED, "its gradient is here")]
        if visit.forward.step < Step.COMPUTED:
            return [Answer(Say.REFUSED, "not computed yet")]
        visit.journey[event.position] = Hop(stage, event.caller)
        return [Answer(Say.TAKE)]

    def _fetched(self, key: Key, visit: Visit, peer: PeerId) -> list[Action]:
        if visit.forward.step is not Step.ABSENT:
            return []
        before = beside(visit.journey, key.position, BACKWARD)
        visit.journey[before] = Hop(visit.journey[before].stage, peer)
        visit.forward.step = Step.HELD
        return [Compute(key, FORWARD)]

    def _not_fetched(self, key: Key, visit: Visit, settled: bool) -> list[Action]:
        if visit.forward.step is not Step.ABSENT:
            return []
        if settled:
            visit.backward.step = Step.SETTLED
            visit.committed = True
            return [*self._tell(key, visit, BACKWARD), Free(key)]
        del self.visits[key]
        return [Failed(key, BACKWARD, "the input cannot be had again"), Free(key)]

    def _expired(self, key: Key, visit: Visit) -> list[Action]:
        if visit.journey[0].peer == self.me:
            return []
        if visit.backward.step is Step.SETTLED and not visit.committed:
            visit.committed = True
            return [Void(key), Free(key)]
        waits = self._waiting.pop(key, None) is visit
        if not waits and (
            visit.backward.step is not Step.ABSENT or visit.forward.step is Step.HELD
        ):
            return []
        del self.visits[key]
        return [*self._fail_open(key, visit, "too late"), Free(key)]

    # The origin
    # ------------------------------------------------------------

    def _start(self, index: int) -> list[Action]:
        path = self.paths.get(index)
        if (
            self.plan is None
            or self.closed
            or path is None
            or path.origin != self.me
            or not path.hops
        ):
            return [Dropped(index, "not a micro-batch of mine under this plan")]
        key = Key(self.plan.epoch, index, 0)
        if key in self.visits:
            return []
        visit = self.visits[key] = Visit(list(path.journey))
        visit.forward.step = Step.HELD
        return [Compute(key, FORWARD)]

    def _finish(self, key: Key, visit: Visit) -> list[Action]:
        last = Key(key.epoch, key.index, len(visit.journey) - 1)
        who = tuple(hop.peer for hop in visit.journey[1:-1] if hop.peer != NOBODY)
        return [TellCounted(key.index, who), Finished(key), Free(last), Free(key)]

    def _counted(self, event: Counted) -> list[Action]:
        path = self.paths.get(event.index)
        if path is None or event.caller != path.origin:
            return [Answer(Say.REFUSED, "only the origin says that a micro-batch counts")]
        here = next(
            (i for i, hop in enumerate(path.journey) if hop.stage == self._stage != ENDS), 0
        )
        key = Key(event.epoch, event.index, here)
        visit = self.visits.get(key)
        if not here or visit is None:
            return [Answer(Say.TAKE)]
        visit.named = True
        self._naming.add(path.origin)
        self._nameless.discard(path.origin)
        return [Answer(Say.TAKE), *self._count(key, visit)]

    def _drop(self, index: int, reason: str) -> list[Action]:
        path = self.paths.get(index)
        mine = [k for k in self.visits if k.index == index]
        if path is None or path.origin != self.me or not mine or self.visits[mine[0]].committed:
            return []
        actions: list[Action] = [Dropped(index, reason)]
        for key in mine:
            actions += [*self._fail_open(key, self.visits.pop(key), reason), Free(key)]
        return actions

    def _lost(self, event: Lost, now: float) -> list[Action]:
        visits = [visit for key, visit in self.visits.items() if key.index == event.index]
        if not any(self._on_its_way(event.caller, visit, now) for visit in visits):
            return [Answer(Say.REFUSED, "only a hop of its path reports a micro-batch lost")]
        why = f"{short(event.caller)} says: {event.reason}"
        return [Answer(Say.TAKE), *self._drop(event.index, why)]

    def _on_its_way(self, peer: PeerId, visit: Visit, now: float) -> bool:
        """Return True if a micro-batch can have come to ``peer``, a block-stage replica, as far as
        its origin knows: ``peer`` is a hop of its journey, or replaces a hop that is gone or has
        failed."""
        return any(
            peer == hop.peer
            or (
                peer in self.replicas(hop.stage)
                and (hop.peer in self.suspects.gone or self.suspects.has(hop.peer, now))
            )
            for hop in visit.journey
            if hop.stage != ENDS
        )
