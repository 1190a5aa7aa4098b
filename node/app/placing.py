"""Which stage this daemon hosts: its operator's, or one it chooses among others who choose.

Enters: the directory, read often while a stage is chosen. Leaves: a claim for all to see, later
perhaps a change of stage. Never: a decision; that is :class:`node.scheduler.choosing.Choosing`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from node.app.moving import Mover
from node.app.ports import PeerPort
from node.core.errors import LocalFault, UsageFault
from node.core.ids import ENDS, stage_name
from node.dht.record import PeerBody
from node.reach.standing import Standing
from node.scheduler.choosing import LOOK_S, Choosing, able
from node.training.presence import HASTE_S, Presence


class Wanted(Protocol):
    """What the operator says: a stage, and which others would do (see
    :class:`~node.dht.record.PeerBody`)."""

    @property
    def stage(self) -> int | None: ...
    @property
    def open_to(self) -> str: ...


class PlacedPeer(PeerPort, Protocol):
    """A peer that has or seeks a place."""

    mover: Mover

    @property
    def config(self) -> Wanted: ...
    def body(self) -> PeerBody: ...


class Placing:
    """Of one daemon. ``open_to``: as in its record (:class:`~node.dht.record.PeerBody`)."""

    def __init__(self, daemon: PlacedPeer) -> None:
        self._d = daemon
        self.open_to = daemon.config.open_to
        self._machine: Choosing | None = None
        self._stages = 0

    @property
    def stage(self) -> int | None:
        """Where this daemon is, or will be; None while that is open."""
        d = self._d
        if d.mover.cell is not None:
            return None
        if d.mover.target is not None and not d.draining:
            return d.mover.target
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
        self._begin(presence, named)
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
        machine = self._begin(presence, None)
        while not machine.may_build or machine.stage is None:
            seen, closed = (
                presence.view.placed(self._stages),
                d.body().reach == Standing.CLOSED.value,
            )
            if (stage := machine.look(seen, d.clock.now(), closed=closed)) is not None:
                d.journal.emit("daemon", "claimed", f"claims {stage_name(stage)}", stage=stage)
                presence.changed()
            if not machine.may_build:
                await asyncio.sleep(HASTE_S)
        return machine.stage

    def _begin(self, presence: Presence, stage: int | None) -> Choosing:
        stages, now = able(self.open_to, self._stages), self._d.clock.now()
        self._machine = Choosing(presence.me, stages, self._stages, now, stage)
        return self._machine

    async def watch(self, presence: Presence) -> None:
        """For ever: see what others claim, until the own claim is settled; where nobody is at the
        ends, and so nobody leads, do what the rule says."""
        d, machine = self._d, self._machine
        while machine is not None:
            # Where nothing changes for long, there is nothing new to see every half second.
            await asyncio.sleep(HASTE_S * presence.times)
            a = d.assembled
            if a is None or d.mover.going or d.draining or d.ending:
                continue
            settled = machine.settled
            waits = a.stage.version.epoch <= 0 and bool(a.training.waiting_for())
            to = machine.look(presence.view.placed(self._stages), d.clock.now(), waits=waits)
            if to is not None and d.mover.asked(to):
                machine.stays(a.stage.stage)
                self.open_to = "stage" if to == ENDS else ""
            presence.hasty = not machine.settled
            if machine.settled != settled:
                presence.changed()
