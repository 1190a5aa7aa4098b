"""A cell's round, from gradients to fresh parameters at every member.

Every member opens one exchange for every group of every owner's parts: reduce-scatter is its first
half, all-gather its second. While an owner steps one group, the next one's gradients arrive and the
one before leaves. Our own parts take the same road without a network. A round returns by its
deadline with whatever came; what is missing is asked for again in the next attempt, from new
owners, with the same gradients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import grpc

from node.averaging.coding.formats import FORMATS
from node.averaging.exchange.groups import contribute_until
from node.averaging.exchange.ledger import RoundAttempt
from node.averaging.exchange.machine import RoundMachine
from node.averaging.exchange.member import (
    SERVICE,
    ExchangeResult,
    Exchanges,
    GroupRequest,
    Unwelcome,
)
from node.averaging.exchange.owner import ExchangeServer
from node.averaging.exchange.request import RoundOutcome, RoundRequest, Step
from node.averaging.reducers.reduce import norms_of, unfit
from node.averaging.settings import AveragingSettings
from node.core.clock import Clock, SystemClock
from node.core.errors import PeerFault
from node.core.ids import PeerId, short
from node.core.tasks import Tasks
from node.telemetry.events import Journal
from node.transport.port import TransportPort

CHUNK = 1 << 21
"""Tensor bytes of a message. Each costs gRPC's asyncio stack some turns of the event loop: with 1
MiB, and with 4 MiB, an exchange of 64 MiB took 2 to 5 % more processor time."""


class CellRound:
    """Adds the Averaging service to ``transport.server``, so make it before the transport starts.

    ``executor`` runs the step (None: a thread of the loop's own); ``on_error`` is told what a step
    raised.
    """

    def __init__(
        self,
        transport: TransportPort,
        settings: AveragingSettings,
        *,
        executor: Executor | None = None,
        journal: Journal | None = None,
        clock: Clock | None = None,
        chunk: int = CHUNK,
        on_error: Callable[[str, BaseException], None] | None = None,
        machine: RoundMachine | None = None,
    ) -> None:
        self._transport, self._settings, self._journal, self._chunk = (
            transport,
            settings,
            journal,
            chunk,
        )
        self._clock = clock or SystemClock()
        self._tasks = Tasks("averaging", on_error)
        self._owner = ExchangeServer(
            transport, settings, self._tasks, executor, self._clock.now, chunk, self._say, machine
        )
        # bytes: a message of a parcel is read by hand
        handler = grpc.stream_stream_rpc_method_handler(self._owner.exchange)
        transport.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Exchange": handler}),)
        )

    async def run_round(self, request: RoundRequest, step: Step | None) -> RoundOutcome:
        """One attempt. Never later than ``request.deadline_s`` from now, and with all of the stage
        unless somebody failed.

        ``step`` gets the mean gradients of those of our parts that no earlier attempt of the epoch
        stepped, at most once for each part; None: the means are the result. It is kept and served
        until :meth:`forget`, also after this call has returned. Raises ValueError for a request
        that contradicts itself or is not newer than the epoch's last.
        """
        started = self._clock.now()
        request = replace(request, up=request.up or self._settings.wire)
        tokens, norms, refused = await self._fit_to_give(request)
        attempt = self._owner.open(request, step, tokens, norms, started)
        attempt.refused.update(refused)
        failed: dict[PeerId, str] = {}
        answers: list[ExchangeResult] = []
        gathers = [
            self._tasks.spawn(
                self._gather(request, owner, requests, bool(tokens), answers, failed, started),
                f"gather {short(owner)}",
            )
            for owner, requests in self._to_ask(request, bool(tokens)).items()
        ]
        ticker = self._tasks.spawn(
            self._tick_at(contribute_until(started, request.deadline_s, len(attempt.groups))),
            "tick",
        )
        try:
            await asyncio.wait([*gathers, attempt.settled], timeout=self._left(request, started))
        finally:
            for task in (*gathers, ticker):
                task.cancel()
        return self._outcome(request, attempt, answers, failed, started)

    def gone(self, peer: PeerId) -> None:
        """Tell a round in progress that a peer is dead, so that it does not wait for its
        contribution until the deadline."""
        self._owner.gone(peer)

    def forget(self, epoch: int) -> None:
        """Drop gradients and fresh parts of all epochs up to this one; who still asks for them is
        refused."""
        self._owner.forget(epoch)

    def void(self, epoch: int) -> None:
        """Drop gradients and fresh parts of ``epoch`` and later ones: the swarm went back and
        begins it anew."""
        self._owner.void(epoch)

    async def close(self) -> None:
        """End what is still running; a step in progress is left to its executor and its result
        dropped."""
        await self._tasks.close()

    async def _fit_to_give(
        self, request: RoundRequest
    ) -> tuple[int, dict[str, float], dict[PeerId, str]]:
        """Tokens we give, and the norms of our gradients: 0 for a listener, or when they would be
        refused by every honest owner."""
        me = self._transport.peer_id
        _consistent(request, me)
        if request.gradients is None or not request.tokens or me in request.listeners:
            return 0, {}, {}
        norms = await asyncio.to_thread(norms_of, dict(request.gradients))
        fault = unfit(norms, request.tokens, self._settings.max_gradient_norm)
        if not fault:
            return request.tokens, norms, {}
        self._say(
            "own-gradients-unfit",
            f"{fault}; taking part in this round as a listener",
            level="error",
        )
        return 0, {}, {me: fault}

    def _to_ask(self, request: RoundRequest, giving: bool) -> dict[PeerId, list[GroupRequest]]:
        """Remote owners of this attempt, with the groups of which we do not have all from them
        yet."""
        held, ask = self._owner.held(request.round.epoch), {}
        for owner in sorted(set(request.owners.values()) - {self._transport.peer_id}):
            for group in request.groups_of(owner, self._settings.group_bytes):
                lacking = tuple(
                    name for name in group.names if name not in held or held[name].source != owner
                )
                if lacking:
                    ask.setdefault(owner, []).append(
                        GroupRequest(group, lacking if giving else group.names)
                    )
        return ask

    async def _gather(
        self,
        request: RoundRequest,
        owner: PeerId,
        requests: list[GroupRequest],
        giving: bool,
        answers: list[ExchangeResult],
        failed: dict[PeerId, str],
        started: float,
    ) -> None:
        def took(answer: ExchangeResult) -> None:
            answers.append(answer)
            self._owner.keep(request.round, answer.parts)

        exchanges = Exchanges(self._transport, owner, request, giving, self._chunk)
        failed[owner] = "gave no fresh parts in time"
        try:
            await exchanges.all(requests, self._left(request, started), took)
        except PeerFault as fault:
            failed[owner] = fault.reason
            if not isinstance(fault, Unwelcome):
                # Whom we cannot reach will hardly reach us: do not wait for its contribution until
                # the deadline.
                self._owner.gone(owner)
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
            self._owner.tick()

    def _left(self, request: RoundRequest, started: float) -> float:
        return max(0.0, started + request.deadline_s - self._clock.now())

    def _outcome(
        self,
        request: RoundRequest,
        attempt: RoundAttempt,
        answers: list[ExchangeResult],
        failed: dict[PeerId, str],
        started: float,
    ) -> RoundOutcome:
        me, held = self._transport.peer_id, self._owner.held(request.round.epoch)
        parts = {
            n: h
            for n, h in sorted(held.items())
            if n in attempt.mine or request.owners.get(n) == h.source
        }
        if not attempt.mine <= parts.keys():
            failed[me] = (
                attempt.settled.result()
                if attempt.settled.done()
                else "own parts were not stepped in time"
            )
        return RoundOutcome(
            fresh={name: h.tensor for name, h in parts.items()},
            contributors=frozenset(p for h in parts.values() for p in h.contributors),
            failed=dict(sorted(failed.items())),
            nbytes=sum(a.nbytes for a in answers),
            seconds=self._clock.now() - started,
            missing=tuple(sorted(request.owners.keys() - parts.keys())),
            refused=dict(attempt.refused),
            quarantined=self._owner.quarantined(request.round.epoch),
        )

    def _say(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        if self._journal is not None:
            self._journal.emit("averaging", kind, text, level, **fields)


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
    if request.gradients is not None and request.tokens and me not in request.listeners:
        wrong = [
            n
            for n, s in request.shapes.items()
            if n not in request.gradients or tuple(request.gradients[n].shape) != tuple(s)
        ]
        if wrong:
            raise ValueError(f"gradients of other shapes or none: {', '.join(sorted(wrong)[:3])}")
