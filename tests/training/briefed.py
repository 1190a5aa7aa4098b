"""A test leader that is told the news of its peer, as the service tells it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from node.consensus.tally import VoteTally
from node.consensus.trust import Trust
from node.consensus.voters import Commitment
from node.consensus.votes import Certificate
from node.coordinator.briefing import Briefing
from node.core.ids import NO_CELL
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.facts import RunFacts
from node.epoch.leader.leader import Leader
from node.epoch.plan_context import PlanContext


class BriefedLeader:
    """A leader and its briefing. ``saved``: contexts in the checkpoints of its peer."""

    def __init__(
        self, leader: Leader, trust: Trust, saved: Mapping[Version, PlanContext] | None = None
    ) -> None:
        contexts = saved or {}
        self._leader = leader
        self.tally = VoteTally(trust)
        self._briefing = Briefing(trust, lambda: tuple(contexts), contexts.get, lambda peer: True)

    @property
    def plan(self) -> Plan | None:
        return self._leader.plan

    @property
    def commit(self) -> Commitment | None:
        return self._leader.voting.commit

    @property
    def facts(self) -> RunFacts:
        return self._leader.facts

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle the news and the event; returns the actions of all."""
        events = self._briefing.before(event)
        return [action for each in events for action in self._leader.handle(each, now)]

    def recalled(self, event: ev.Recalled, shown: Certificate | None, now: float) -> list[Any]:
        """Handle an answer about a version that came with a quorum certificate."""
        if shown is not None:
            event = replace(event, certified=self.tally.show(shown, NO_CELL, now))
        return self.handle(event, now)
