"""Questions of a leader, whose answers come back to it as events: whether a peer lives, which plan
is behind a version, who changes its stage, better paths, the held-out loss. Enters: the leader's
decisions to ask. Leaves: messages; events for the leader. Never: a decision."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from node.consensus.mandate import Mandate
from node.consensus.votes import Certificate
from node.coordinator.kit import Kit
from node.coordinator.messenger import Messenger, Unheard
from node.coordinator.recalling import Recalling
from node.core.errors import NetworkFault, PeerFault
from node.core.ids import CellId, PeerId, short
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.member import Member
from node.epoch.pace import PROBE_TIMEOUT_S, TELL_TIMEOUT_S
from node.scheduler.router import Routes, SearchJob
from protos import training_pb2 as pb

Search = Callable[[SearchJob], Awaitable[tuple[Routes, float]]]
"""A search for better paths: takes a job, returns the routes and their makespan like
:func:`node.scheduler.router.search`."""


class OwnPeer(Protocol):
    """The leader's own peer: :class:`node.coordinator.service.Training`, whose member
    :class:`node.coordinator.following.Following` drives."""

    @property
    def member(self) -> Member:
        """Its member."""
        ...

    @property
    def cell(self) -> CellId:
        """Its cell."""
        ...

    async def happens(self, event: Any) -> str | None:
        """Feed its member. Returns the reason of a refusal, or None."""
        ...

    def hear_of_dead(self, peer: PeerId, note: pb.DeadNote) -> str | None:
        """The leader has found members dead."""
        ...

    def goes_on_without(self, plan_hash: str, dead: Iterable[PeerId]) -> None:
        """Nothing here waits for these members any longer, if this plan is in force."""
        ...


class Inquiries:
    """Inquiries of one leader. ``own``: the leader's own peer; ``search(job)``: searches for better
    paths; ``lead(event)``: feeds the leader."""

    def __init__(
        self,
        kit: Kit,
        own: OwnPeer,
        mandate: Mandate,
        messenger: Messenger,
        recalling: Recalling,
        search: Search,
        lead: Callable[[Any], None],
    ) -> None:
        self._kit = kit
        self._own = own
        self._mandate = mandate
        self._messenger = messenger
        self._recalling = recalling
        self._find_paths = search
        self._lead = lead
        self._probing: set[PeerId] = set()
        self._searching = asyncio.Lock()

    def probe(self, peer: PeerId) -> None:
        """Find out whether ``peer`` lives; one probe of a peer at a time."""
        if peer not in self._probing:
            self._probing.add(peer)
            self._kit.tasks.spawn(self._probe(peer), "probe")

    def recall(self, asked: ev.Recall) -> None:
        """Ask for the plan behind a version."""
        self._kit.tasks.spawn(self._recall(asked), "recall")

    def move(self, peer: PeerId, stage: int) -> None:
        """Ask ``peer`` to host another stage."""
        self._kit.tasks.spawn(self._move(peer, stage), "move")

    def search(self, job: SearchJob) -> None:
        """Search for better paths."""
        self._kit.tasks.spawn(self._search(job), "search")

    def evaluate(self, epoch: int, plan: Plan) -> None:
        """Measure the held-out loss."""
        self._kit.tasks.spawn(self._evaluate(epoch, plan), "evaluate")

    async def _probe(self, peer: PeerId) -> None:
        try:
            reason = await self._messenger.send_with_retry(peer, pb.Note(), PROBE_TIMEOUT_S)
            self._lead(ev.ProbeAnswered(peer, reason is None))
        except Unheard as e:
            self._kit.vitals.dead(peer, self._kit.clock.now(), e.since)
            self._lead(ev.Unreachable(peer, e.since))
        finally:
            self._probing.discard(peer)

    async def _recall(self, asked: ev.Recall) -> None:
        version = asked.version
        plan, dropped = self._own.member.remembers(version)
        if plan is not None and not asked.proof:
            self._lead(ev.Recalled(version, plan, dropped))
            return

        def shown(certificate: Certificate | None) -> Version | None:
            if certificate is None:
                return None
            return self._mandate.show(certificate, self._own.cell, self._kit.clock.now())

        def proves(certificate: Certificate | None) -> bool:
            return not asked.proof or shown(certificate) is not None

        found, certificate = await self._recalling.recall(version, asked.holders, proves)
        self._lead(replace(found, certified=shown(certificate)))

    async def _move(self, peer: PeerId, stage: int) -> None:
        note = pb.Note(move=pb.MoveNote(stage=stage))
        try:
            if peer == self._kit.me:
                refused = self._kit.callbacks.on_move(stage) or None
            else:
                refused = await self._messenger.send(peer, note, TELL_TIMEOUT_S)
        except PeerFault as e:
            # It may have received the request and be moving: it counts as moving.
            self._kit.journal.emit(
                "training", "move-unanswered", f"peer {short(peer)}: {e.reason}", "info", peer=peer
            )
            return
        if refused is not None:
            self._kit.journal.emit(
                "training",
                "move-refused",
                f"peer {short(peer)} stays: {refused}",
                "info",
                peer=peer,
            )
            self._lead(ev.MoveRefused(peer))

    async def _search(self, job: SearchJob) -> None:
        # one at a time; the next search sees the changes made meanwhile
        if not self._searching.locked():
            async with self._searching:
                routes, makespan = await self._find_paths(job)
            self._lead(ev.Searched(job, routes, makespan))

    async def _evaluate(self, epoch: int, plan: Plan) -> None:
        loss = 0.0
        try:
            loss = await self._kit.work.evaluate(plan)
        except (PeerFault, NetworkFault) as e:
            self._kit.journal.emit(
                "training",
                "evaluation-failed",
                f"the held-out loss could not be measured: {e}",
                "warning",
            )
        self._lead(ev.Evaluated(epoch, loss))
