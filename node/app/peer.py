"""One peer of a run, a daemon or a simulated one: the cell and the stage that it takes, its changes
of both, and its record of them.

Enters: the directory; the wishes of the operator, of the leader and of the rule. Leaves: a claim
for all to see, later perhaps a change of stage or of cell. Never: the choice itself; that is
:mod:`node.scheduler.choosing` and :mod:`node.scheduler.cells`. A peer reads a sample of the run's
cells, and chooses the cell of the sample that needs it most.

A peer that changes its stage drains first; it leaves a cell that cannot go on at once. Then the
process replaces its own image (:func:`node.app.launch.again`), so nothing that was built for the
old place is left over.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from math import floor
from typing import Generic, TypeVar

from node.app.assembly import Services
from node.app.change import under
from node.coordinator.presence import HASTE_S, WORKING, Presence, View
from node.core.clock import Clock
from node.core.errors import LocalFault, TimedOut, UsageFault
from node.core.ids import ENDS, CellId, PeerId, first_cell, stage_name
from node.core.tasks import Tasks
from node.core.version import VERSION
from node.dht.record import DirectoryPort, PeerBody, PeerEntry
from node.dht.topics import cell_topic
from node.epoch.member import MemberState
from node.manifest import Manifest
from node.outer.register import CellReader
from node.reach.standing import Standing
from node.scheduler.cells import Dissolution, choose_cell
from node.scheduler.choosing import LOOK_S, Choosing, able
from node.telemetry.events import Journal

DRAIN_S = 120.0
"""Seconds for an operator's drain that names no time."""
MOVE_S = 60.0
"""Seconds beyond an epoch's deadline, the hand-over included, after which a peer changes its stage
anyway."""
KEEP_S = 75.0
"""Seconds for writing the last checkpoint before the process ends: a service manager kills a
process that has not ended 90 s after it was asked to."""
CHOOSE_AGAIN_S = 120.0
"""Seconds of a pause after which a peer chooses its stage anew: its parameters are old by then, and
another stage may need it more. Only where others work at its stage: they hold its parameters."""
CELL_S = 1.0
"""Seconds between two looks at whether the own cell can go on."""
SAMPLE_S = 10.0
"""Seconds between two looks at other cells while the own one cannot go on."""
ASKED = 4
"""Number of cells of a sample that are looked at closely: the ones that need peers most."""
Sight = tuple[Mapping[CellId, list[int]], set[CellId]]
"""The stages of the peers of each cell, and in which cells a leader is at work."""
_POSTED = {"waiting": "ready", "moving": "starting", "pausing": "draining"}
"""State that the record shows in place of a private one; a moving peer counts as starting."""

S = TypeVar("S", bound=Services, covariant=True)


class Peer(ABC, Generic[S]):
    """``open_to``: the stages that it would host, as in its record
    (:class:`~node.dht.record.PeerBody`). ``to_stage`` is the stage this peer is changing to,
    ``to_cell`` the cell, where it chooses one; ``moved``: all is handed over, and it begins anew
    there. ``draining``: its operator wants it to leave; ``ending``: it has been told to end.
    ``pausing``: it gives its stage up for a pause; ``paused``: it holds none because of a pause,
    and this is the reason for other peers. ``stage_tasks`` end with the stage, ``tasks`` with the
    peer."""

    role = "auto"

    def __init__(
        self,
        open_to: str,
        clock: Clock,
        journal: Journal,
        manifest: Manifest | None,
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self.open_to = open_to
        self.clock = clock
        self.journal = journal
        self.manifest = manifest
        self.tasks = Tasks("daemon", on_error)
        self.stage_tasks = Tasks("stage", on_error)
        self.presence: Presence | None = None
        self.assembled: S | None = None
        self.draining = self.ending = self.moved = self.pausing = False
        self.paused = ""
        self.to_stage: int | None = None
        self.to_cell: CellId | None = None
        self._choosing: Choosing | None = None
        self._stages = 0

    @abstractmethod
    def stop(self, why: str) -> None:
        """End soon, in order."""

    def refuses(self, manifest: Manifest, stage: int) -> str:
        """Reason why this peer will not host ``stage`` instead of its own, under the manifest in
        force; empty when it will."""
        if not self.open_to:
            return "its operator wants it where it is"
        here = stage
        if self.assembled:
            here = self.assembled.stage.stage
        if stage == here or not {here, stage} <= set(able(self.open_to, manifest.pipeline.stages)):
            return f"this peer does not change from {stage_name(here)} to {stage_name(stage)}"
        return ""

    def cannot_begin_anew(self) -> str:
        """Reason why this peer would not start if it began anew elsewhere; empty when it would."""
        return ""

    # ----------------------------------------------------------- what its record says

    @property
    def place(self) -> int | None:
        """Stage that this peer hosts or will host; None while that is open."""
        if self.to_cell is not None:
            return None
        if self.to_stage is not None and not self.draining:
            return self.to_stage
        if self.assembled is not None:
            return self.assembled.stage.stage
        if self._choosing is None:
            return None
        return self._choosing.stage

    @property
    def settled(self) -> bool:
        """True if it gives way to no other peer that has claimed the same place."""
        return self._choosing is not None and self._choosing.settled

    @property
    def moving(self) -> bool:
        """A change of stage or of the cell has begun."""
        return self.to_stage is not None or self.to_cell is not None

    @property
    def going(self) -> bool:
        """True if it is about to leave its stage, for whatever reason."""
        return self.moving or self.draining or self.ending or self.pausing

    @property
    def state(self) -> str:
        """One word for the screen and for the record."""
        a = self.assembled
        if self.ending and not self.moved:
            return "stopping"
        if self.draining:
            return "draining"
        if self.moving:
            return "moving"
        if self.pausing:
            return "pausing"
        if self.paused:
            return "paused"
        if self.role == "rendezvous":
            return "ready"
        if a is None:
            if self.manifest and self.place is None:
                return "choosing"
            return "starting"
        if a.work.fetching < 1.0:
            return "joining"
        state = a.training.member.state
        waits = a.training.waiting_for()
        if state is MemberState.FINISHED:
            return "finished"
        if waits and (state is MemberState.IDLE or a.training.leader is not None):
            return "waiting"
        if state is MemberState.IDLE:
            return "ready"
        return "training"

    def body(self) -> PeerBody:
        """This peer's record in the directory; without its name, its start, its protocols and how
        it is reached, which others add."""
        a = self.assembled
        state = self.state
        state = _POSTED.get(state, state)
        stage = self.place
        to = self.to_cell
        role = self.role
        if stage == ENDS:
            role = "ends"
        elif stage is not None:
            role = "stage"
        if to is not None:
            state = "choosing"
        elif self.paused:
            # It hosts nothing and still helps others find each other. Older software reads this
            # role as that.
            role = "rendezvous"
            stage = ENDS
        cell: str = to or ""
        if not cell and self.presence:
            cell = self.presence.cell
        epoch = 0
        tokens_per_s = 0.0
        speed = 0.0
        follows = ""
        if a:
            epoch = max(0, a.stage.version.epoch)
            tokens_per_s = a.meter.tokens_per_s
            speed = a.work.speed()
        if a and to is None:
            follows = a.training.candidacy.follows or ""
        return PeerBody(
            stage=stage or ENDS,
            role=role,
            state=state,
            open_to=self.open_to,
            settled=self.settled,
            epoch=epoch,
            name="",
            version=VERSION,
            tokens_per_s=tokens_per_s,
            speed=speed,
            leads=a is not None and a.training.leader is not None and to is None,
            follows=follows,
            cell=cell,
            paused=self.paused,
        )

    # ----------------------------------------------------------- coming

    async def take(
        self,
        presence: Presence,
        manifest: Manifest,
        *,
        named: int | None,
        ends: bool = False,
        kept: str = "",
        company: bool,
    ) -> int:
        """Enter a cell, and claim the stage to build; the directory shows it already.

        ``named``: the stage that the operator or the leader wants; ``ends``: the operator wants the
        ends; ``kept``: the cell it was in before it was started again; ``company``: somebody else
        should come into sight, and is waited for at most :data:`LOOK_S` seconds. Raises UsageFault
        for a stage that the swarm has not.
        """
        if manifest.averaging.peers:
            presence.enter(await find_cell(presence, manifest, kept=kept, company=company))
        self._stages = manifest.pipeline.stages
        if ends:
            self.open_to = ""
            named = ENDS
        if named is None:
            return await self._choose(presence, company)
        if named > self._stages:
            what = f"stage {named} is not in this swarm"
            raise UsageFault(what, f"it has block stages 1 to {self._stages}")
        self._begin(presence, named)
        presence.announce(self.body)
        return named

    async def alone(
        self, presence: Presence, manifest: Manifest, own: Collection[PeerId] = ()
    ) -> bool:
        """Return True if no other peer has a stage of the run, and none comes into sight within
        :data:`LOOK_S` seconds. ``own``: other peers that do not count."""
        first = first_cell(manifest.run_id)
        stages = manifest.pipeline.stages
        presence.pace.hasty = True
        until = self.clock.now() + LOOK_S
        while self.clock.now() < until:
            if presence.view.hosting - {*own}:
                return False
            if manifest.averaging.peers:
                cells, _ = await cells_in_sight(presence.directory, presence.me, first, stages)
                if cells:
                    return False
            await asyncio.sleep(HASTE_S)
        return True

    async def instead(self, presence: Presence, why: LocalFault) -> int:
        """Return a block stage for a peer that chose the ends by itself and cannot host them.

        Raises ``why`` for any other peer.
        """
        if self.place != ENDS or self.open_to != "auto":
            raise why
        text = f"chooses a block stage instead of the ends: {why}"
        if why.next_step:
            text += f"; {why.next_step}"
        self.journal.emit("daemon", "ends-not-hosted", text, "warning")
        self.open_to = "stage"
        self._choosing = None
        return await self._choose(presence, False)

    def chooses_again(self, presence: Presence, stage: int, paused_s: float) -> bool:
        """Return True if this peer does not take ``stage`` back after a pause of ``paused_s``
        seconds, but chooses anew."""
        if paused_s <= CHOOSE_AGAIN_S or not able(self.open_to, self._stages):
            return False
        mates = presence.view.replicas(stage).values()
        return presence.view.led() and any(e.body.state in WORKING for e in mates)

    async def _choose(self, presence: Presence, company: bool) -> int:
        presence.pace.hasty = True
        presence.announce(self.body)
        if company:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await presence.company.wait()
        machine = self._begin(presence, None)
        while not machine.may_build or machine.stage is None:
            seen = presence.view.placed(self._stages)
            closed = self.body().reach == Standing.CLOSED.value
            if (stage := machine.look(seen, self.clock.now(), closed=closed)) is not None:
                self.journal.emit("daemon", "claimed", f"claims {stage_name(stage)}", stage=stage)
                presence.changed()
            if not machine.may_build:
                await asyncio.sleep(HASTE_S)
        return machine.stage

    def _begin(self, presence: Presence, stage: int | None) -> Choosing:
        self._choosing = Choosing(
            presence.me, able(self.open_to, self._stages), self._stages, self.clock.now(), stage
        )
        return self._choosing

    def start(self, a: Services, presence: Presence, manifest: Manifest) -> None:
        """Train, and meet other cells where there are several."""
        a.training.start()
        if a.meetings is not None:
            a.meetings.start()
        if manifest.averaging.peers:
            watch = self.watch_cell(presence, first_cell(manifest.run_id))
            self.stage_tasks.spawn(watch, "cell", eternal=True)
        presence.changed()

    # ----------------------------------------------------------- staying, or going elsewhere

    async def watch_stage(self, presence: Presence) -> None:
        """Watch for ever: see others' claims, until the own claim is settled; where no peer is at
        the ends, and so none leads, follow the rule."""
        machine = self._choosing
        while machine is not None:
            # Where nothing changes for long, there is nothing new to see every half second.
            await asyncio.sleep(HASTE_S * presence.pace.times)
            a = self.assembled
            if a is None or self.going:
                continue
            settled = machine.settled
            seen = presence.view.placed(self._stages)
            begun = a.stage.version.epoch > 0
            if settled and begun:
                continue  # the leader sees to the stages from now on
            waits = not begun and bool(a.training.waiting_for())
            to = machine.look(seen, self.clock.now(), waits=waits)
            if to is not None and self.asked(to, alone=True):
                machine.stays(a.stage.stage)
                self.open_to = "stage" if to == ENDS else ""
            presence.pace.hasty = not machine.settled
            if machine.settled != settled:
                presence.changed()

    async def watch_cell(self, presence: Presence, first: CellId) -> None:
        """Watch for ever: leave the own cell for another one when it cannot go on."""
        machine = Dissolution(presence.me, self._stages, self.clock.now())
        sampled = 0.0
        others: Sight = {}, set()
        while True:
            await asyncio.sleep(CELL_S)
            a = self.assembled
            if a is None or self.going:
                continue
            training = a.training
            now = self.clock.now()
            goes = training.works or presence.view.led()
            if not goes and now - sampled >= SAMPLE_S:
                sampled = now
                # Peers that leave the same cell draw the same sample, and spread over it.
                text = f"{training.cell}/{floor(self.clock.wall() / SAMPLE_S)}"
                others = await cells_in_sight(presence.directory, text, first, self._stages)
            seen, working = others
            own = set[CellId]()
            if goes:
                seen = {}
                working = set[CellId]()
                own = {training.cell}
            to = machine.look(
                training.cell,
                training.member.term,
                presence.view.hosts,
                {**seen, training.cell: presence.view.stages()},
                working - {training.cell} | own,
                self.clock.now(),
                coming=bool(presence.view.coming),
            )
            if to is not None:
                self.joins(to)

    def asked(self, stage: int, *, alone: bool = False) -> str:
        """The leader wants this peer at ``stage``; or, where nobody leads, the rule does
        (``alone``). Returns "" when it goes, else why not."""
        a = self.assembled
        if self.to_stage is not None:
            return f"it is on its way to {stage_name(self.to_stage)}"
        if a is None or self.manifest is None or self.going:
            return "it is coming or going itself"
        why = self.refuses(under(self.manifest, a.training.admission.changes.known), stage)
        if alone and stage == ENDS and self.presence is not None and self.presence.view.ends:
            why = "somebody else is at the ends"
        if why:
            text = f"asked to host {stage_name(stage)}: {why}"
            self.journal.emit("daemon", "move-refused", text, stage=stage)
            return why
        if fault := self.cannot_begin_anew():
            text = f"asked to host {stage_name(stage)}, and would not start there: {fault}"
            self.journal.emit("daemon", "move-refused", text, "warning", stage=stage)
            # The paths in the reason are nobody else's business.
            return "it could not begin anew there"
        self.to_stage = stage
        self.tasks.spawn(self._move(a, stage_name(stage)), "move")
        return ""

    async def _move(self, a: Services, to: str) -> None:
        text = f"moving to {to}: finishes the epoch under way and hands over what it owns"
        self.journal.emit("daemon", "moving", text, stage=self.to_stage, source=a.stage.stage)
        if self.presence is not None:
            self.presence.changed()
        member = a.training.member
        seconds = MOVE_S
        if member.busy and member.plan is not None:
            # There is no haste, and the work of a long epoch is worth more than an early move.
            seconds += member.plan.deadline_s
        try:
            await leave(a, f"moves to {to}", seconds)
        except TimeoutError:
            why = f"the epoch did not end in {seconds:.0f} s; moving all the same"
            self.journal.emit("daemon", "move-hasty", why, "warning")
        # A drain ends the daemon itself, and a daemon that was told to end must not begin anew.
        if not self.draining and not self.ending:
            self.moved = True
            self.stop(f"moving to {to}")
            return
        self.to_stage = None
        if self.presence is not None:
            self.presence.changed()

    def joins(self, cell: CellId) -> None:
        """The own cell cannot go on: this peer begins anew in that one, without parameters."""
        if self.going:
            return
        if why := self.cannot_begin_anew():
            text = f"this cell cannot go on, and this peer cannot begin anew in another one: {why}"
            if all(event.kind != "cell-not-left" for event in self.journal.recent()):
                self.journal.emit("daemon", "cell-not-left", text, "warning")
            return
        self.to_cell = cell
        epoch = 0
        if self.assembled is not None:
            epoch = self.assembled.stage.version.epoch
        text = (
            f"no leader is at work in this cell, but one is in cell {cell}: joins it and gives up "
            f"the parameters here (epoch {epoch})"
        )
        self.journal.emit("daemon", "cell-left", text, "warning", cell=cell, epoch=epoch)
        if self.presence is not None:
            self.presence.changed()
        self.moved = True
        self.stop(f"moving to cell {cell}")

    async def drain(self, timeout_s: float) -> None:
        """Finish the epoch under way, leave the swarm, end. Raises TimedOut."""
        self.draining = True
        if self.presence is not None:
            self.presence.changed()
        self.journal.emit("daemon", "draining", "finishing the epoch under way, then leaving")
        if (a := self.assembled) is not None:
            try:
                await leave(a, "drain", timeout_s or DRAIN_S)
            except TimeoutError as e:
                self.draining = False
                if self.to_stage is None:
                    a.training.stay()
                raise TimedOut(
                    f"the epoch did not end in {timeout_s:.0f} s", "try again, or tutti stop"
                ) from e
        self.journal.emit("daemon", "drained", "left the swarm")
        self.stop("drained")


async def keep(a: Services, journal: Journal, *, always: bool = False) -> bool:
    """Write the committed state to disk. The process takes no part any more and ends afterwards.
    ``always``: also where this peer's settings want no checkpoints, because no other peer keeps the
    state. Return False if that failed; the journal says why."""
    epoch = a.stage.version.epoch
    if await a.work.keep(KEEP_S, always=always):
        return True
    text = f"epoch {epoch} is not on disk: the next start goes on from an older one"
    journal.emit("daemon", "not-kept", text, "error", epoch=epoch)
    return False


async def leave(a: Services, why: str, seconds: float, *, hands_over: bool = True) -> None:
    """Finish the epoch under way and hand over, unless all leave and nobody takes anything. Raises
    TimeoutError after ``seconds``."""
    async with asyncio.timeout(seconds):
        await a.training.leave(why, hands_over=hands_over)


# ------------------------------------------------------------ the cells of a run


async def cells_in_sight(directory: DirectoryPort, text: str, first: CellId, stages: int) -> Sight:
    """A sample of the cells, which a hash of ``text`` draws. Where none has a leader the cell
    ``first``, if somebody is in it."""
    found = await CellReader(directory).sample(text)
    seen = {cell: record.stages for cell, record in found.items()}
    working = {cell for cell, record in found.items() if record.works}

    def need(cell: CellId) -> tuple[bool, int, int]:
        here = seen[cell]
        return cell not in working, min(map(here.count, range(stages + 1))), len(here)

    # A leader's record is up to a minute old: meanwhile others may have come, or all have gone.
    for cell in sorted(seen, key=need)[:ASKED] or [first]:
        view = View(await directory.read(cell_topic(cell)), cell)
        seen[cell] = view.stages()
        if view.led():
            working = working | {cell}
        else:
            working = working - {cell}
    return {cell: here for cell, here in seen.items() if here}, working


async def replicas_elsewhere(
    presence: Presence, manifest: Manifest, stage: int, looks: int
) -> dict[PeerId, PeerEntry] | None:
    """The peers that host ``stage`` in a sample of the other cells, where the own cell trains
    without it. Each number of ``looks`` before draws another sample. None before anybody has
    trained, and in a run of one cell."""
    if not manifest.averaging.peers:
        return None
    # A peer that has just entered its cell may not have seen anybody there yet.
    await presence.look()
    if not any(entry.body.epoch for entry in presence.view.others.values()):
        return None
    first = first_cell(manifest.run_id)
    text = f"{presence.me}/{looks}"
    seen, _ = await cells_in_sight(presence.directory, text, first, manifest.pipeline.stages)
    able = [cell for cell in seen if cell != presence.cell and stage in seen[cell]]
    views = [await presence.visit(cell) for cell in able[:ASKED]]
    return {peer: entry for view in views for peer, entry in view.replicas(stage).items()}


async def find_cell(
    presence: Presence, manifest: Manifest, *, kept: str = "", company: bool
) -> CellId:
    """The cell to enter. ``kept``: the one it was in before it was started again; ``company``:
    somebody else should come into sight, and is waited for at most ``LOOK_S`` seconds."""
    stages = manifest.pipeline.stages
    first = first_cell(manifest.run_id)
    if kept or not company:
        if kept:
            return CellId(kept)
        return first
    for attempt in range(round(LOOK_S / HASTE_S)):
        text = f"{presence.me}/{attempt}"
        seen, working = await cells_in_sight(presence.directory, text, first, stages)
        if seen:
            return choose_cell(seen, stages, presence.me, first=first, working=working)
        await asyncio.sleep(HASTE_S)
    return first
