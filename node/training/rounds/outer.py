"""An outer round at one member, from plan to outcome: what its cell has goes out, the mean of what
the cells have comes back. Enters: a plan, the leader's word on each attempt. Leaves: the next
parameters, what the round came to. Never: when cells meet and in which groups
(:mod:`node.training.protocol.meetings`), a byte on the wire (:mod:`node.averaging`'s).

begin    a plan of whichever kind: its settings count, and an anchor that is lacking is looked for
attempt  one speaker of each cell gives, every member of the group gathers the mean; again without
         the dead (along directed edges: :mod:`node.training.rounds.edge`; without a barrier:
         :mod:`node.training.rounds.push`)
copy     or the result is fetched from who has finished, with the anchor that goes with it
takes    what was averaged becomes the next parameters
What travels, and what becomes of the mean, is :class:`~node.training.rounds.anchor.Anchor`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from node.averaging.exchange.events import QuorumRule
from node.averaging.exchange.request import (
    PartOrigin,
    RoundOutcome,
    RoundRequest,
    TensorFormat,
    WeightCaps,
)
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.state import StateKind, StateSnapshot
from node.core.ids import PeerId, RoundId
from node.core.journey import Plan, Unit, Version, of_cell
from node.core.tasks import Tasks
from node.training.protocol import events as ev
from node.training.protocol.edges import arrived, flows
from node.training.protocol.meetings import PUSH_AGAIN, meeting, speakers, weights
from node.training.protocol.rules import lands, levels
from node.training.rounds.anchor import MOMENTUM, Anchor
from node.training.rounds.common import Rounds
from node.training.rounds.edge import along
from node.training.rounds.in_flight import InFlightFragment
from node.training.rounds.push import pushing
from node.training.state.engines import Engines
from node.training.state.state_export import StateExport

Fetch = Callable[[Sequence[PeerId], Version, str | None], Awaitable[StateSnapshot]]
"""All parameters of this stage at a version, from these donors, of this digest if one is given.
Raises PeerFault."""


@dataclass(frozen=True)
class OuterNews:
    """The last outer round: its number, how many cells and peers were in this peer's group, tensor
    bytes, seconds."""

    number: int = 0
    cells: int = 0
    peers: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class OuterRound:
    """Of one stage."""

    def __init__(
        self,
        anchor: Anchor,
        engines: Engines,
        state_export: StateExport,
        rounds: Rounds,
        tasks: Tasks,
        me: PeerId,
    ) -> None:
        self._anchor, self._engines, self._state_export, self._rounds, self._me = (
            anchor,
            engines,
            state_export,
            rounds,
            me,
        )
        self._tasks = tasks
        self._sending: InFlightFragment | None = None
        self._lands = False
        self.news = OuterNews()
        self.arrived: tuple[int, ...] = ()
        """The cells that have a part in what the last round along edges brought here, the own one
        included; empty: not known."""
        self._heard: tuple[str, Mapping[str, Tensor]] = ("", {})
        """What an attempt under the plan of this hash has brought."""

    mean = (0, "")

    def describe(self, kind: StateKind, window: int | None) -> None:
        """Nothing: where one leader plans for all cells, nobody pulls."""

    def begin(self, plan: Plan, settings: OuterSettings, listener: bool) -> None:
        """A plan is in force, under these settings."""
        self._anchor.follow(settings, levels(plan))
        self._heard = ("", {})
        self._anchor.carried = self._rounds.carried(plan.fragment, settings.fragments)
        self._anchor.mixing = settings.mixing if plan.fragment else 0.0
        self._lands = lands(plan, settings)
        if listener:
            self._anchor.forget()
        else:
            self._anchor.look_for(plan)
        sent = self._sending
        # The plan after the one in which it lands settles it; one of the epoch that sends it begins
        # that anew.
        if sent is not None and (
            levels(plan)
            or not sent.meeting.epoch < plan.epoch <= sent.meeting.epoch + settings.overlap
        ):
            self._drop()
        elif sent is not None:
            for peer in {m.peer for m in sent.meeting.members} - {m.peer for m in plan.members}:
                self._rounds.gone(peer)  # whoever is in no plan any more is not waited for
        if plan.sends and not listener:
            self._send(meeting(plan, settings.fragments), settings)

    def _send(self, met: Plan, settings: OuterSettings) -> None:
        anchor, rounds = self._anchor, self._rounds
        self._sending = InFlightFragment(
            met, anchor.in_place(rounds.carried(met.fragment, settings.fragments)), anchor.history
        )
        self._sending.exchange = self._tasks.spawn(self._exchange(self._sending), "sending")
        rounds.under_way = met.epoch

    def _drop(self) -> None:
        if self._sending is not None:
            self._sending.stop()
        self._sending = self._rounds.under_way = None

    async def _exchange(self, sent: InFlightFragment) -> RoundOutcome | None:
        """Carry a fragment between cells while the epochs go on; None when it cannot be."""
        met, anchor, rounds = sent.meeting, self._anchor, self._rounds
        r = ev.RoundArrived(
            met.leader, met.epoch, met.term, met.hash, 0, (), {}, (), (), met.deadline_s
        )
        unit = rounds.unit(met)
        # a listener is given the result where it lands
        members = [m.peer for m in met.unit(unit) if m.current]
        speaking = speakers(met, unit, ())
        await anchor.arrived(r.deadline_s)
        if anchor.lacking:
            return None
        given = (
            await self._engines.aside(anchor.gives, sent.local)
            if self._me in speaking or len(speaking) == 1
            else None
        )
        if len(speaking) == 1:
            return self._alone(met, given, speaking)
        try:
            said, coded = await self._says(met, given if self._me in speaking else None)
            request = self._request(met, r, unit, members, speaking, said, coded)
            return await (self._engines.outer or self._engines.cell).run(request, anchor.makes)
        except ValueError as e:
            rounds.absurd(met, r, e)
            return None

    async def attempt(
        self, plan: Plan, r: ev.RoundArrived, listener: bool
    ) -> tuple[ev.RoundEnded, dict[str, Tensor] | None]:
        """One attempt: what it came to, and what of the mean is here now; None when it could not be
        run at all."""
        anchor, rounds = self._anchor, self._rounds
        unit = rounds.unit(plan)
        pushes, edges = anchor.settings.pushes, unit in plan.senders
        members = [
            m
            for m in plan.unit(unit)
            if m.peer not in r.dead and (m.peer in r.among or not r.among)
        ]
        here = {m.peer for m in members}
        speaking = speakers(
            plan, unit, frozenset(m.peer for m in plan.unit(unit) if m.peer not in here)
        )
        self.arrived = ()
        if not listener:
            stepped = of_cell(plan.owners, plan.home(self._me))
            self._state_export.opens(plan, {name: stepped[name] for name in rounds.shapes}, r.dead)
            await anchor.arrived(r.deadline_s)
            if anchor.lacking and r.attempt > len(members):
                anchor.begin_here()
        landing = self._lands and not r.attempt
        giving = not landing and (
            not listener if edges else self._me in speaking or len(speaking) == 1
        )
        sent = self._sending
        sent = sent if sent is not None and sent.lands(plan, anchor.history) else None
        if sent is not None and r.attempt:
            sent.stop()
        given = await self._engines.aside(anchor.gives, sent and sent.local) if giving else None
        try:
            if landing:
                outcome = (
                    await sent.outcome(r.deadline_s) if sent is not None and not listener else None
                )
                outcome = outcome or _nothing(anchor.carried)
                if sent is not None:
                    await self._engines.aside(
                        anchor.heard, outcome, self._mates(sent.meeting), sent.local
                    )
            elif edges:
                request = self._request(
                    plan, r, unit, [m.peer for m in members], speaking, given, {}
                )
                outcome = await along(
                    self._engines.outer or self._engines.cell, request, plan, r, rounds, self._me
                )
                if not outcome.missing:
                    self.arrived = arrived(
                        plan, unit, [part.contributors for part in outcome.parts.values()]
                    )
            elif len(speaking) == 1 and not pushes and all(m.current for m in members):
                # A cell that meets no other: everybody has already what the exchange would bring.
                outcome = self._alone(plan, given, speaking) or _nothing(
                    anchor.shapes(dict.fromkeys(anchor.carried, ()))
                )
                await self._engines.aside(anchor.heard, outcome, self._mates(plan))
            elif plan.fragment and listener:
                outcome = _nothing(())  # a fragment is not what it lacks
            else:
                said, coded = await self._says(plan, given if self._me in speaking else None)
                request = self._request(
                    plan, r, unit, [m.peer for m in members], speaking, said, coded
                )
                if pushes:
                    heard = self._heard[1] if self._heard[0] == plan.hash else {}
                    request = await self._engines.aside(
                        pushing, request, plan, members, heard, anchor, self._engines, self._me
                    )
                outcome = await (self._engines.outer or self._engines.cell).run(
                    request, anchor.makes
                )
                await self._engines.aside(
                    anchor.heard, outcome, self._mates(plan), sent and sent.local
                )
                self._heard = (plan.hash, outcome.fresh)
            if not listener:
                await self._state_export.hold(plan, r.deadline_s)
        except ValueError as e:
            return rounds.absurd(plan, r, e), None
        finally:
            self._state_export.closes()
        holds = outcome.fresh.keys() & rounds.shapes.keys()
        missing = tuple(sorted({name.removesuffix(MOMENTUM) for name in outcome.missing}))
        if not anchor.believes or (plan.fragment and listener):
            missing = tuple(sorted(rounds.shapes))  # to be copied from who has made the step
        if r.attempt < PUSH_AGAIN:
            # another attempt will need this peer
            missing = tuple(sorted({*missing, *outcome.unserved}))
        cells = len(flows(plan, unit)) if edges else len(speaking)
        self.news = OuterNews(plan.outer, cells, len(members), outcome.nbytes, outcome.seconds)
        return rounds.ended(plan, r, outcome, len(members), holds, missing), dict(outcome.fresh)

    def _alone(
        self, plan: Plan, given: dict[str, Tensor] | None, speaking: frozenset[PeerId]
    ) -> RoundOutcome | None:
        """The round of a cell that meets no other."""
        if given is None:
            return None
        self._anchor.residual.begin(plan.hash)
        parts = {name: PartOrigin(self._me, 1, tuple(speaking)) for name in given}
        return RoundOutcome(given, 1, speaking, {}, 0, 0.0, parts=parts)

    def _mates(self, plan: Plan) -> frozenset[PeerId]:
        """This peer's cell."""
        return frozenset(m.peer for m in plan.cell(self._rounds.unit(plan)[0], plan.home(self._me)))

    def _request(
        self,
        plan: Plan,
        r: ev.RoundArrived,
        unit: Unit,
        members: Sequence[PeerId],
        speaking: frozenset[PeerId],
        said: Mapping[str, Tensor] | None,
        coded: Mapping[str, Tensor],
    ) -> RoundRequest:
        """What this peer asks of the exchange; ``said`` is what it gives where it speaks for its
        cell, ``coded`` bytes of it."""
        anchor, rounds = self._anchor, self._rounds
        owners = rounds.owners(plan, r)
        weigh = weights(plan, unit, anchor.settings)
        allowed = {peer: weigh[plan.home(peer)] for peer in speaking}
        return RoundRequest(
            round=RoundId(plan.epoch, plan.term, r.attempt),
            plan_hash=plan.hash,
            members=tuple(members),
            listeners=frozenset(members) - speaking,
            owners=anchor.owners(owners),
            ownership_hash=rounds.hash_of(owners),
            shapes=anchor.shapes({name: rounds.shapes[name] for name in owners}),
            gradients=said,
            tokens=allowed.get(self._me, 0) if said is not None else 0,
            deadline_s=r.deadline_s,
            # nobody does another cell's work: what a cell that is missing weighs is no room for
            # others
            caps=WeightCaps(max(allowed.values(), default=1), allowed, total=1),
            summed=False,
            reducer=anchor.settings.reducer,
            form=TensorFormat(anchor.settings.codec, anchor.settings.codec, coded),
            quorum=QuorumRule(anchor.settings.quorum, anchor.settings.grace_s, self._spare_s(plan)),
        )

    def _spare_s(self, plan: Plan) -> float | None:
        """Seconds until a fragment lands, by what the leader expects of an epoch; None in a round
        that everybody waits for."""
        sent = self._sending
        under_way = sent is not None and sent.meeting is plan
        return self._anchor.settings.overlap * sum(plan.forecast) or None if under_way else None

    async def _says(
        self, plan: Plan, given: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        self._anchor.residual.begin(plan.hash)
        return (None, {}) if given is None else await self._engines.aside(self._anchor.says, given)

    async def copy(
        self, plan: Plan, donors: Sequence[PeerId], version: Version, digest: str, fetch: Fetch
    ) -> dict[str, Tensor]:
        """The parameters of ``version`` from ``donors``, who have it, and the anchor that goes with
        them. Raises PeerFault.

        After a round of a fragment only one's own cell has all of them; who is no listener has the
        other parts already, and makes the fragment's from the anchor, which is everybody's.
        """
        self.arrived = ()
        me = plan.member(self._me)
        if not plan.fragment or me is None:
            fresh = (await fetch(donors, version, digest or None)).tensors
        elif me.current:
            return await self._anchor.lands(donors, version)
        else:
            fresh = (
                await fetch([p for p in donors if plan.home(p) == me.cell], version, None)
            ).tensors
        await self._anchor.copy(donors, version)
        return fresh

    async def takes(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The next parameters. Raises ValueError as :meth:`Anchor.takes`."""
        return await self._engines.aside(self._anchor.takes, mean)


def _nothing(missing: Iterable[str]) -> RoundOutcome:
    return RoundOutcome({}, 0, frozenset(), {}, 0, 0.0, missing=tuple(sorted(missing)))
