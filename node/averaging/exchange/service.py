"""A cell's round, from gradients to fresh parameters at every member.

Every member opens one exchange for every group of every owner's parts: reduce-scatter is its first
half, all-gather its second. While an owner steps one group, the next one's gradients arrive and the
one before leaves. Our own parts are reduced and stepped in the same way, without a network. A round
returns by its deadline with the parts that have come; the missing ones are asked for again in the
next attempt, from new owners, with the same gradients.
"""

import asyncio
from dataclasses import replace

from node.averaging.exchange.events import Group, TimePassed, contribute_until
from node.averaging.exchange.member import Exchanges, Impossible, Unwelcome
from node.averaging.exchange.owner import EpochState, ExchangeServer, RoundAttempt
from node.averaging.exchange.request import FreshPart, RoundOutcome, RoundRequest, Step
from node.averaging.reducers.reducer import beyond_format, norms_of, unfit
from node.core.errors import PeerFault
from node.core.ids import PeerId, short
from node.wire.coding.formats import FORMATS


class CellRound(ExchangeServer):
    """Our own rounds, beside the exchanges served to others."""

    async def run_round(self, request: RoundRequest, step: Step | None) -> RoundOutcome:
        """Run one attempt. Never later than ``request.deadline_s`` from now, and with all of the
        stage unless somebody failed.

        ``step`` gets the mean gradients of our own parts, except the parts that an earlier attempt
        of the epoch stepped, at most once for each part; None: the means are the result. The result
        is kept and served until :meth:`forget`, also after this call has returned. Raises
        ValueError for a request that contradicts itself or is not newer than the epoch's last.
        """
        started = self._clock.now()
        request = replace(request, up=request.up or self._settings.wire)
        norms, refused = await self._fit_to_give(request)
        attempt = self.open(request, step, norms, started)
        attempt.refused.update(refused)
        attempt.gathers = {
            owner: self._tasks.spawn(
                self._gather(attempt, owner, wanted, bool(norms)), f"gather {short(owner)}"
            )
            for owner, wanted in self._to_ask(request, bool(norms)).items()
        }
        for peer in self._epoch(request.round.epoch).lost:
            _give_up(attempt, peer)
            self.gone(peer)
        ticker = self._tasks.spawn(
            self._tick_at(contribute_until(started, request.deadline_s, len(attempt.groups))),
            "tick",
        )
        try:
            await asyncio.wait(
                [*attempt.gathers.values(), attempt.settled], timeout=self._left(attempt)
            )
        finally:
            for task in (*attempt.gathers.values(), ticker):
                task.cancel()
        return self._outcome(attempt, started)

    def lost(self, epoch: int, peer: PeerId) -> None:
        """The leader has found this peer dead. No attempt of the epoch waits for its contribution
        or its parts, even if we can still reach it: the leader may be the only peer that cannot,
        and then the dead peer never learns that the round has begun."""
        state = self._epochs.setdefault(epoch, EpochState())
        state.lost.add(peer)
        for attempt in state.attempts.values():
            _give_up(attempt, peer)
        self.gone(peer)

    async def _fit_to_give(
        self, request: RoundRequest
    ) -> tuple[dict[str, float], dict[PeerId, str]]:
        """(2-norms of the gradients that we give, {}); for a listener ({}, {}); and ({}, {our
        PeerId: why}) for gradients that every honest owner would refuse."""
        me = self._transport.peer_id
        _consistent(request, me)
        if request.gradients is None or not request.tokens or me in request.listeners:
            return {}, {}
        norms = await asyncio.to_thread(norms_of, request.gradients, request.shapes)
        fault = unfit(norms, request.tokens, self._settings.max_gradient_norm)
        if not fault and not _stays_here(request, me):
            fault = await asyncio.to_thread(beyond_format, request.gradients, norms, request.up)
        if not fault:
            return norms, {}
        self._say(
            "own-gradients-unfit",
            f"{fault}; taking part in this round as a listener",
            level="error",
        )
        return {}, {me: fault}

    def _to_ask(
        self, request: RoundRequest, giving: bool
    ) -> dict[PeerId, list[tuple[Group, tuple[str, ...]]]]:
        """Remote owners of this attempt, with the groups of which we do not have all from them
        yet."""
        held = self._epoch(request.round.epoch).held
        ask = {}
        for owner in sorted(set(request.owners.values()) - {self._transport.peer_id}):
            for group in request.groups_of(owner, self._settings.group_bytes):
                lacking = tuple(
                    name for name in group.names if name not in held or held[name].source != owner
                )
                if lacking:
                    wanted = group.names
                    if giving:
                        wanted = lacking
                    ask.setdefault(owner, []).append((group, wanted))
        return ask

    async def _gather(
        self,
        attempt: RoundAttempt,
        owner: PeerId,
        wanted: list[tuple[Group, tuple[str, ...]]],
        giving: bool,
    ) -> None:
        request = attempt.request
        failed = attempt.failed

        def took(parts: dict[str, FreshPart], nbytes: int) -> None:
            attempt.nbytes += nbytes
            epoch = self._epoch(request.round.epoch)
            # unless a newer attempt has begun or the epoch is over
            if request.round == max(epoch.attempts, default=None):
                epoch.held.update(parts)

        exchanges = Exchanges(self._transport, owner, request, giving, self._chunk)
        failed[owner] = "gave no fresh parts in time"
        try:
            await exchanges.all(wanted, self._left(attempt), took)
        except PeerFault as fault:
            failed[owner] = fault.reason
            if isinstance(fault, Impossible):
                attempt.impossible.add(owner)
            elif not isinstance(fault, Unwelcome):
                # An owner that we cannot reach will hardly reach us: do not wait for its
                # contribution until the deadline.
                self.gone(owner)
            if fault.weight:
                self._transport.fault(owner, fault.reason, fault.weight)
            self._say(
                "owner-failed", str(fault), level="warning", epoch=request.round.epoch, peer=owner
            )
            return
        del failed[owner]

    async def _tick_at(self, times: tuple[float, ...]) -> None:
        for when in times:
            await asyncio.sleep(max(0.0, when - self._clock.now()))
            self._feed(TimePassed())

    def _left(self, attempt: RoundAttempt) -> float:
        return max(0.0, attempt.until - self._clock.now())

    def _outcome(self, attempt: RoundAttempt, started: float) -> RoundOutcome:
        owners = attempt.request.owners
        epoch = self._epoch(attempt.request.round.epoch)
        parts = {
            n: h
            for n, h in sorted(epoch.held.items())
            if n in attempt.mine or owners.get(n) == h.source
        }
        if not attempt.mine <= parts.keys():
            why = "own parts were not stepped in time"
            if attempt.settled.done():
                why = attempt.settled.result()
            attempt.failed[self._transport.peer_id] = why
        return RoundOutcome(
            fresh={name: h.tensor for name, h in parts.items()},
            contributors=frozenset(p for h in parts.values() for p in h.contributors),
            failed=dict(sorted(attempt.failed.items())),
            nbytes=attempt.nbytes,
            seconds=self._clock.now() - started,
            missing=tuple(sorted(owners.keys() - parts.keys())),
            refused=dict(attempt.refused),
            quarantined=dict(epoch.quarantined),
            impossible=frozenset(attempt.impossible),
        )


def _give_up(attempt: RoundAttempt, peer: PeerId) -> None:
    """Take no more parts of this owner."""
    gather = attempt.gathers.get(peer)
    if gather is not None and not gather.done():
        attempt.failed[peer] = "was found dead by the leader"
        gather.cancel()


def _stays_here(request: RoundRequest, me: PeerId) -> bool:
    """Return True if this peer is the only one with gradients, and owns all parts: its sums do not
    travel."""
    return {*request.members} - request.listeners | {*request.owners.values()} == {me}


def _consistent(request: RoundRequest, me: PeerId) -> None:
    checks = (
        (me in request.members, "this peer is not in the round it should run"),
        (
            request.owners.keys() == request.shapes.keys(),
            "owners and shapes name different parts",
        ),
        (set(request.owners.values()) <= set(request.members), "an owner is not a member"),
        (
            request.up in FORMATS and request.down in FORMATS,
            f"unknown number format: up {request.up!r}, down {request.down!r}",
        ),
    )
    for fine, why in checks:
        if not fine:
            raise ValueError(why)
