"""Fragments that are under way between simulated cells while the next epochs run, as
``node.training.rounds.outer`` carries them. Enters: plans that send, plans in which what was sent
lands. Leaves: values of the fragment, what is missing of it. Never: a decision; parameters are the
hashes of :mod:`node.sim.values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId, RoundId
from node.core.journey import Plan, Version
from node.optim.ownership import ownership_hash
from node.sim.rounds import Request, Rounds
from node.sim.values import Share, Value, mark_of, mean_value
from node.training.protocol import events as ev
from node.training.protocol.meetings import LANDS_WITHIN, meeting, speakers, weights
from node.training.protocol.rules import levels

if TYPE_CHECKING:
    from node.sim.peer import SimPeer


@dataclass
class Sent:
    """``said``: this peer's words on the parts, ``fresh`` the means that have come, ``by`` whose
    words are in them."""

    meeting: Plan
    history: object
    said: dict[str, str] = field(default_factory=dict)
    fresh: dict[str, Value] = field(default_factory=dict)
    by: dict[str, tuple[PeerId, ...]] = field(default_factory=dict)
    over: bool = False
    waiting: Callable[[], None] | None = None


class Streams:
    """Of one peer. ``landed``: the means of the last outer round adopted here and the version they
    made, for who missed them."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer
        self.sent: Sent | None = None
        self.landed: tuple[Version, dict[str, Value]] | None = None
        self.history = object()

    def begin(self, plan: Plan, settings: OuterSettings, listener: bool) -> None:
        """A plan is in force."""
        sent = self.sent
        if listener:
            self.history = object()
        if sent is not None and (
            levels(plan)
            or not sent.meeting.epoch < plan.epoch <= sent.meeting.epoch + settings.overlap
        ):
            self.drop()
        elif sent is not None:
            for gone in {m.peer for m in sent.meeting.members if plan.member(m.peer) is None}:
                self._rounds.gone(gone)
        if plan.sends and not listener:
            self._send(meeting(plan, settings.fragments), settings)

    def drop(self) -> None:
        """Nothing is under way here."""
        if self.sent is not None:
            self._rounds.stop(RoundId(self.sent.meeting.epoch, self.sent.meeting.term, 0))
        self.sent = None

    def forget(self, epoch: int) -> None:
        """Epochs up to this one are settled; what is under way may still be asked for."""
        self._rounds.forget(epoch if self.sent is None else min(epoch, self.sent.meeting.epoch - 1))

    def void(self, epoch: int) -> None:
        """The swarm begins this epoch anew."""
        self._rounds.void(epoch)

    @property
    def _rounds(self) -> Rounds:
        return self._peer.between

    def lands(self, plan: Plan) -> Sent | None:
        """What this peer has under way for the outer round of a plan."""
        sent = self.sent
        fits = (
            sent is not None
            and sent.meeting.outer == plan.outer
            and sent.meeting.epoch < plan.epoch
        )
        return sent if fits and sent is not None and sent.history is self.history else None

    def _send(self, met: Plan, settings: OuterSettings) -> None:
        labour, me = self._peer.labour, self._peer.name
        mine = met.member(me)
        if mine is None:
            return
        unit = met.unit_of(mine)
        planned = met.averagers(unit)
        owners = {name: planned[name] for name in labour.names if name in planned}
        sent = self.sent = Sent(
            met, self.history, {name: labour.word(met, name) for name in owners}
        )
        weigh = weights(met, unit, settings)
        share = Share(me, (), weigh[mine.cell], met.hash, tuple(sorted(sent.said.items())))
        request = Request(
            plan=met,
            round=RoundId(met.epoch, met.term, 0),
            members=tuple(m.peer for m in met.unit(unit) if m.current),
            listeners=frozenset(),
            owners=owners,
            ownership_hash=ownership_hash(
                [p for p in labour.setup.parts[labour.stage] if p.name in owners],
                owners,
                "simulated",
            ),
            share=share if me in speakers(met, unit, ()) else None,
            deadline_s=met.deadline_s,
            total=max(weigh.values(), default=1),
            allowed={},
            quorum=settings.quorum,
            grace_s=settings.grace_s,
        )

        def step(_: int, names: Sequence[str], shares: tuple[Share, ...]) -> dict[str, Value]:
            return {name: mean_value(name, shares, met.base) for name in names}

        def ended(fresh: Mapping[str, Value], *_: object) -> None:
            sent.fresh, sent.over = dict(fresh), True
            sent.by = self._rounds.contributors(met.epoch)
            if sent.waiting is not None:
                sent.waiting()

        self._rounds.run(request, step, ended)

    def land(self, plan: Plan, r: ev.RoundArrived, then: Callable[[Sent | None], None]) -> None:
        """What was under way for this plan, as soon as it is here or patience is over."""
        sent, peer = self.lands(plan), self._peer
        if sent is None or sent.over:
            if sent is not None:
                peer.swarm.watch.count("landed")
            peer.after(0.0, then, sent)
            return
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                then(sent)

        sent.waiting = once
        peer.after(LANDS_WITHIN * r.deadline_s, once)

    def mixed(
        self, plan: Plan, mixing: float, made: Version, means: Mapping[str, Value]
    ) -> dict[str, Value]:
        """What becomes of the means where they land: some of what is here stays in them."""
        if not plan.fragment:
            return dict(means)
        self.landed = (made, dict(means))
        here = self._peer.labour.values
        return {
            n: Value(mark_of("mixed", v.mark, here[n].mark) if mixing else v.mark, made)
            for n, v in means.items()
        }
