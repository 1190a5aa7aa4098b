"""Which stage this daemon hosts: its operator's, or one it chooses among others who choose.

Enters: the directory, read often while a stage is chosen. Leaves: a claim for all to see, later
perhaps a change of stage. Never: a decision; that is :class:`node.scheduler.choosing.Choosing`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from node.app.moving import Mover
from node.app.ports import PeerPort
from node.core.errors import LocalFault, UsageFault
from node.core.ids import ENDS, stage_name
from node.reach.standing import Standing
from node.scheduler.choosing import LOOK_S, Choosing, able
from node.training.presence import HASTE_S, Presence


class Placing:
    """Of one daemon. ``open_to``: as in its record (:class:`~node.dht.record.PeerBody`)."""

    def __init__(
        self, daemon: PeerPort, mover: Mover, choosing: Callable[..., Choosing] = Choosing
    ) -> None:
        self._d, self._mover, self._make = daemon, mover, choosing
        self.open_to = daemon.config.open_to
        self._machine: Choosing | None = None
        self._stages = 0

    @property
    def stage(self) -> int | None:
        """Where this daemon is, or will be; None while that is open."""
        d, mover = self._d, self._mover
        if mover.cell is not None:
            return None
        if mover.target is not None and not d.draining:
            return mover.target
        if d.assembled is not None:
            return d.assembled.stage.stage
        return self._machine.stage if self._machine else None

    @property
    def settled(self) -> bool:
        """Whether it gives way to nobody who has claimed the same place."""
        return self._machine is not None and self._machine.settled

    async def take(self, presence: Presence, stages: int, *, ends: bool, company: bool) -> int:
        """The stage to build, of ``stages`` block stages; the directory shows it already.

        ``ends``: the operator wants the ends; ``company``: somebody else should come into sight,
        and is waited for at most :data:`LOOK_S` seconds. Raises UsageFault when the operator
        names a stage that the swarm has not.
        """
        self._stages = stages
        if ends:
            self.open_to = ""
        named = ENDS if ends else self._d.config.stage
        if named is None:
            return await self._choose(presence, company)
        if named > stages:
            what = f"stage {named} is not in this swarm"
            raise UsageFault(what, f"it has block stages 1 to {stages}")
        self._begin(named)
        presence.announce(self._d.body)
        return named

    async def instead(self, presence: Presence, why: LocalFault) -> int:
        """A block stage for who went to the ends by itself and cannot host them.

        Raises ``why`` for everybody else.
        """
        if self.stage != ENDS or self.open_to != "auto":
            raise why
        text = f"chooses a block stage instead of the ends: {why}"
        self._d.journal.emit("daemon", "ends-not-hosted", text, "warning")
        self.open_to, self._machine = "stage", None
        return await self._choose(presence, False)

    async def _choose(self, presence: Presence, company: bool) -> int:
        d, presence.hasty = self._d, True
        presence.announce(d.body)
        if company:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await presence.company.wait()
        machine = self._begin(None)
        while not machine.may_build or machine.stage is None:
            if (
                stage := machine.look(
                    presence.view.placed(self._stages), d.clock.now(), closed=self._closed()
                )
            ) is not None:
                d.journal.emit("daemon", "claimed", f"claims {stage_name(stage)}", stage=stage)
                presence.changed()
            if not machine.may_build:
                await asyncio.sleep(HASTE_S)
        return machine.stage

    def _closed(self) -> bool:
        return self._d.transport.reachable.standing is Standing.CLOSED

    def _begin(self, stage: int | None) -> Choosing:
        d = self._d
        stages = able(self.open_to, self._stages)
        self._machine = self._make(d.identity.peer_id, stages, self._stages, d.clock.now(), stage)
        return self._machine

    async def watch(self, presence: Presence) -> None:
        """For ever: see what others claim, until the own claim is settled; where nobody is at the
        ends, and so nobody leads, do what the rule says."""
        d, machine = self._d, self._machine
        while machine is not None:
            # Where nothing changes for long, there is nothing new to see every half second.
            await asyncio.sleep(HASTE_S * presence.times)
            a = d.assembled
            if a is None or self._mover.going or d.draining or d.ending:
                continue
            settled = machine.settled
            waits = a.stage.version.epoch <= 0 and bool(a.training.waiting_for())
            to = machine.look(presence.view.placed(self._stages), d.clock.now(), waits=waits)
            if to is not None and self._mover.asked(to):
                machine.stays(a.stage.stage)
                self.open_to = "stage" if to == ENDS else ""
            presence.hasty = not machine.settled
            if machine.settled != settled:
                presence.changed()
