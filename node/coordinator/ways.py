"""Measures connections of this peer to others of the run, a few at a time. Enters: the peers in
sight, the leader and the ways it waits for. Leaves: measured times, news that a way was found.
Never: the choice of who is measured (:func:`node.epoch.pace.whom_to_measure`)."""

import asyncio
from collections.abc import Mapping

from node.coordinator.candidacy import Candidacy
from node.coordinator.kit import Kit
from node.coordinator.known_peers import KnownPeers
from node.coordinator.reporting import Reporting
from node.core.errors import PeerFault
from node.core.ids import PeerId, short
from node.epoch.pace import (
    COMPANY,
    FACING,
    LARGE_STAGE,
    PROBE_AGAIN_S,
    PROBE_FAILED_S,
    SPARE_WAY_S,
    WAY_TIMEOUT_S,
    WAYS_AT_ONCE,
    WAYS_REST_S,
    StrangerTurns,
    facing,
    whom_to_measure,
)
from node.identity.faults import TokenBucket


class Ways:
    """Measures ways to the peers of ``known``; the pipeline keeps the results."""

    def __init__(
        self,
        kit: Kit,
        known: KnownPeers,
        candidacy: Candidacy,
        reporting: Reporting,
    ) -> None:
        self._kit = kit
        self._known = known
        self._candidacy = candidacy
        self._reporting = reporting
        self._pipeline = kit.work.engines.pipeline
        self._measuring: set[PeerId] = set()

    def answering(self) -> int:
        """Number of peers that answered lately. The directory may name many that strangers made
        up."""
        return len(self._pipeline.timing.ways(self._kit.clock.now()))

    async def keep(self) -> None:
        """Send a small message to other peers of the run, to new ones at once: a plan uses no pair
        of peers before both got an answer. Strangers have turns of their own, for anybody may write
        their records."""
        me = self._kit.me
        turns = StrangerTurns()
        spare = TokenBucket(1.0 / SPARE_WAY_S, 1.0)
        strangers: set[PeerId] = set()
        chosen: list[PeerId] = []
        company: dict[PeerId, int] = {}
        seen: tuple[Mapping[PeerId, int], PeerId | None] | None = None
        rests_until = 0.0
        while True:
            await asyncio.sleep(self._kit.facts.waits.probe_every_s)
            now = self._kit.clock.now()
            hosts = self._known.hosts()
            about = (hosts, self._candidacy.leader)
            if about == seen and now < rests_until:
                continue
            rests_until = 0.0
            if about != seen:
                strangers = set(hosts)
            met = {peer for peer in strangers if self._known.has_met(peer)}
            if about != seen or met:
                seen = about
                strangers -= met
                company = {peer: at for peer, at in hosts.items() if peer not in strangers}
                chosen = whom_to_measure(me, self._kit.stage, company, self._candidacy.leader)
            self._pipeline.timing.keep({*chosen, *self._measuring})
            free = [peer for peer in chosen if peer not in self._measuring]
            asked = self._pipeline.timing.due(free, now, PROBE_AGAIN_S, PROBE_FAILED_S)
            waits = self._spare(company) - self._pipeline.timing.ways(now).keys()
            due = [p for p in asked if p not in waits][: WAYS_AT_ONCE - len(self._measuring)]
            slots = WAYS_AT_ONCE - len(self._measuring) - len(due)
            due += turns.next(strangers, self._measuring, slots, now)
            later = [p for p in asked if p in waits]
            room = len(self._measuring) + len(due) < WAYS_AT_ONCE
            if later and room and spare.allow(me, now):
                due.append(later[0])
            if not (due or strangers or self._measuring):
                rests_until = now + WAYS_REST_S
            for peer in due:
                self._measuring.add(peer)
                self._kit.tasks.spawn(self._measure(peer), f"way {short(peer)}")

    async def _measure(self, peer: PeerId) -> None:
        try:
            known = peer in self._pipeline.timing.ways(self._kit.clock.now())
            async with asyncio.timeout(WAY_TIMEOUT_S):
                seconds = await self._kit.transport.ping(peer, WAY_TIMEOUT_S)
                self._pipeline.timing.probed(peer, seconds, self._kit.clock.now())
            self._kit.vitals.alive(peer, self._kit.clock.now())
            if not known and self.answering() <= COMPANY:
                self._reporting.hurry()  # the leader plans with ways that are proven
        except (PeerFault, TimeoutError):
            self._pipeline.timing.unanswered(peer, self._kit.clock.now())
            self._kit.vitals.doubt(peer, self._kit.clock.now())
        finally:
            self._measuring.discard(peer)

    def _spare(self, company: Mapping[PeerId, int]) -> set[PeerId]:
        """Peers of large stages to which a way can be found later: the leader does not wait for
        it, and the peer is none of those of another stage that this one faces. ``company``: met
        peers with their stages."""
        me = self._kit.me
        own = self._kit.stage
        leader = self._candidacy.leader
        if leader == me or len(company) < LARGE_STAGE:
            return set()
        stages: dict[int, list[PeerId]] = {}
        for peer, stage in sorted({**company, me: own}.items()):
            stages.setdefault(stage, []).append(peer)
        mates = stages[own]
        spare = set[PeerId]()
        for stage, peers in stages.items():
            if len(peers) > LARGE_STAGE:
                spare |= set(peers)
                if stage != own:
                    spare -= set(facing(me, mates, peers, FACING))
        if leader is None:
            return spare
        try:
            needed = self._reporting.contact.needed_ways(leader)
        except LookupError:
            # Until a leader has answered, nobody knows which ways it waits for.
            return spare - {leader}
        if needed is None:
            return set()
        return spare - needed - {leader}
