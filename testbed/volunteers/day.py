"""A day of volunteers, compressed: their machines come and go as a trace says, and the account
shows where the compute went.

The first volunteers are there when the day begins, in cells of near peers, as after a restart of
all. Whoever comes later finds a cell and chooses its stage as the product does. A machine sleeps
(its process stands still), is paused (it leaves in order, and takes its stage back), or is cut off
(its process ends, and chooses its stage anew when it is back).
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from node.app.peer import CHOOSE_AGAIN_S, leave
from node.availability.settings import AvailabilitySettings
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId, PeerId, first_cell
from node.core.journey import Plan
from node.epoch.leader.deadlines import TERA
from node.epoch.leader.leader import Leader
from node.optim.parts import ParameterPart
from node.scheduler.settings import SchedulerSettings
from node.sim.process import SimPeer
from node.sim.setup import FLOPS_PER_S, LinkProfile, Setup, WorkTimes
from node.sim.swarm import SimSwarm
from node.sim.world.loop import bury, quiet
from node.telemetry.events import Event
from testbed.swarms.unchecked import Unchecked
from testbed.volunteers.losses import LABEL, Account, Loss, MeteredDevice, cell_of, label_of
from testbed.volunteers.people import Going, Home, HomeLinks, Volunteer, volunteers

READ_S = 1.0
"""Seconds between two readings of the account."""
SHOWN_S = 60.0
"""Seconds of one column in the picture of the day."""
LEAVE_S = AvailabilitySettings.leave_s
GOODBYE_S = 1.0
"""Seconds for a goodbye where the epoch takes longer than :data:`LEAVE_S`."""
STAGES = 2
REPLICAS = 20
"""Block stages, and the most replicas of a stage in a cell."""
PART_BYTES = 8_000
STEP_S = 0.05
"""Bytes of a part of a stage, and the seconds of its step on the fastest machine."""


def day_parts() -> dict[int, tuple[ParameterPart, ...]]:
    """Parts of every stage, one for each replica of a full cell."""
    return {
        stage: tuple(
            ParameterPart(f"{stage}.{i}", (8, 8), STEP_S * FLOPS_PER_S, PART_BYTES, True)
            for i in range(REPLICAS)
        )
        for stage in range(STAGES + 1)
    }


def day_setup() -> Setup:
    """The swarm of the day. The model is small and the epochs are long, as lines of homes want it:
    a tensor takes a tenth of its visit's time, a round a twentieth of its epoch."""
    return Setup(
        ends=0,
        stages=STAGES,
        replicas=0,
        epochs=1_000_000,
        micro_batches=320,
        micro_batch=1,
        tokens=512,
        parts=day_parts(),
        group_bytes=2 * PART_BYTES,
        activation=200_000,
        min_replicas=4,
        epoch_timeout_s=180.0,
        round_timeout_s=10.0,
        forward_timeout_s=90.0,
        rebalance_every_s=30.0,
        cell=REPLICAS,
        outer=OuterSettings("moshpit", "state", window_s=600.0, grid=(4, 4), optimizer="nesterov"),
        in_flight=12,
        stash=1024,
        checkpoint_every=20,
        scheduler=SchedulerSettings("round-robin", 0.0),
        work=WorkTimes(ends_s=0.9, forward_s=1.2, step_s=STEP_S, unequal=2.0),
        links=LinkProfile(0.0, 0.02, 0.0, 0.001),
    )


class DayRecorder(Unchecked):
    """Counts the facts that peers record."""

    swarm: "DaySwarm"

    def began(self, peer: SimPeer, plan: Plan, listener: bool) -> None:
        self.swarm.began.setdefault(plan.hash, self.swarm.world.now)

    def accept(self, event: Event) -> None:
        self.counts[event.kind] += 1
        if event.kind == "epoch-committed":
            self.swarm.committed(event.fields)


class DayPeer(SimPeer):
    """The machine of a volunteer. ``there``: it is on, and its owner lets it work."""

    swarm: "DaySwarm"
    device: MeteredDevice
    there = False
    asleep = False
    gone_at = math.inf
    """Time at which the machine went last; infinite before."""

    def _device(self) -> MeteredDevice:
        return MeteredDevice(self.loop, self.slowness, partial(label_of, self))

    # ----------------------------------------------------------- coming

    def comes(self) -> None:
        """The machine is there again."""
        self.there = True
        if self._chooses_again():
            self.named = None
        if self.asleep:
            self.asleep = False
            self.device.go_on()
            self.swarm.account.begins(self, self.world.now)
            self.loop.thaw()
        elif self.alive:
            self.boot_when_down()
        else:
            self.boot()

    def _chooses_again(self) -> bool:
        """As :meth:`node.app.peer.Peer.chooses_again` says after a pause; here a pause ends the
        process."""
        if self.asleep or self.world.now - self.gone_at <= CHOOSE_AGAIN_S:
            return False
        mates = [p for p in self.swarm.account.there() if p.assembled is not None and p.ready]
        here = [p for p in mates if p.training.cell == self.disk.cell]
        return any(p.leader is not None for p in here) and any(p.stage == self.named for p in here)

    def boot(self) -> None:
        if self.there and not self.alive:
            super().boot()
            self.swarm.account.begins(self, self.world.now)

    # ----------------------------------------------------------- going

    def goes(self, how: Going) -> None:
        """The machine goes."""
        self.there = False
        self.gone_at = self.world.now
        if not self.alive:
            return
        if how is Going.SLEEP and not self.going:
            self.asleep = True
            self.swarm.closes(self)
            self.device.stand_still()
            self.loop.frozen = True
        elif how is Going.CUT:
            self.kill()
            self.named = None
        else:
            self._later(self.put_away)

    def put_away(self) -> None:
        """The owner pauses the daemon, as :meth:`node.app.daemon.Daemon._put_away` does it."""
        if self.there or not self.alive:
            return
        if self.going:  # the process ends or moves, and is not started again while paused
            return
        self.pausing = True
        if self.presence is not None:
            self.presence.changed()
        self.tasks.spawn(self._put_away(), "pause")

    async def _put_away(self) -> None:
        a = self.assembled
        if a is not None and a.training.started:
            seconds = LEAVE_S
            if self.swarm.epoch_left_s(self) > LEAVE_S:
                seconds = GOODBYE_S
            try:
                await leave(a, "paused", seconds)
            except TimeoutError:
                self.swarm.watch.counts["hasty-pauses"] += 1
        self.stop("paused")

    def kill(self) -> None:
        if self.alive:
            self.swarm.closes(self)
            self.swarm.account.process_ends(self)
        super().kill()


class DaySwarm(SimSwarm):
    """Volunteers, their homes, and the account."""

    def __init__(self, people: Sequence[Volunteer], setup: Setup, seed: int = 0) -> None:
        super().__init__(setup, seed)
        self.people = people
        self.watch = DayRecorder(self)
        homes: dict[PeerId, Home] = {v.name: v.home for v in people}
        self.links = HomeLinks(random.Random(f"lines {seed}"), setup.links, homes)
        self.net.links = self.record_store.links = self.links
        work = setup.work
        unit = 4 * work.ends_s + 3 * work.forward_s * setup.stages
        self.account = Account(unit, setup.tokens * setup.micro_batch)
        self.shown: list[tuple[float, float, float, dict[Loss, float]]] = []
        """(time, ideal, useful, losses) until then."""
        self.began: dict[str, float] = {}
        """Time at which each plan came into force first, by its hash."""
        self._epochs: dict[tuple[str, int], str] = {}
        """Label of the plan that made each epoch of each cell last."""
        first = first_places([v for v in people if v.stays and v.stays[0].begin <= 0.0], self)
        for v in people:
            cell, stage = first.get(v.name, (CellId(""), None))
            peer = self.peers[v.name] = DayPeer(self, v.name, stage, v.home.slowness)
            peer.disk.cell = cell
            peer.product_s = TERA * v.home.slowness / setup.operations_per_s
            for stay in v.stays:
                begin = stay.begin or 0.3 * self.world.rng.random()
                self.world.push(begin, peer.comes)
                self.world.push(stay.end, peer.goes, stay.goes)
        self.world.push(READ_S, self._read)
        self.world.push(SHOWN_S, self._show)

    # ----------------------------------------------------------- the account

    def leaders(self) -> dict[CellId, Leader]:
        """The leader of each cell, of machines that are there."""
        return {
            cell_of(p): leader
            for p in self.account.there()
            if p.assembled is not None and (leader := p.leader) is not None
        }

    def under_way(self) -> set[str]:
        """Labels of the plans in force."""
        plans = [leader.plan for leader in self.leaders().values()]
        return {plan.hash[:LABEL] for plan in plans if plan is not None}

    def closes(self, peer: SimPeer) -> None:
        """The machine of a peer is there no more."""
        leader = self.leaders().get(cell_of(peer))
        self.account.ends(peer, leader, self.world.now)

    def committed(self, facts: dict[str, Any]) -> None:
        """An epoch is committed; one that was committed before was undone, or done on two sides."""
        label = str(facts["hash"])[:LABEL]
        place = str(facts.get("cell", "")), int(facts["epoch"])
        before = self._epochs.get(place)
        if before is not None:
            self.account.counted.pop(before, None)
        self._epochs[place] = label
        self.account.committed(label, int(facts["counted"]))

    def epoch_left_s(self, peer: SimPeer) -> float:
        """Seconds until the epoch under way at a peer should end, by the forecast of its plan."""
        plan = peer.member.plan
        if plan is None or not peer.member.busy:
            return 0.0
        began = self.began.get(plan.hash, self.world.now)
        return max(0.0, began + sum(plan.forecast) - self.world.now)

    def _read(self) -> None:
        self.account.read_all(self.leaders(), self.world.now)
        self.world.push(READ_S, self._read)

    def _show(self) -> None:
        account = self.account
        row = self.world.now, account.ideal, account.useful, account.losses(self.under_way())
        self.shown.append(row)
        self.world.push(SHOWN_S, self._show)


def first_places(there: Sequence[Volunteer], swarm: SimSwarm) -> dict[PeerId, tuple[CellId, int]]:
    """Cell and stage of the volunteers that are there when the day begins: cells of near peers,
    stages of equal speed."""
    stages = swarm.setup.stages + 1
    size = stages * max(1, round(0.75 * swarm.setup.cell))
    cells = max(1, round(len(there) / size))
    near = sorted(there, key=lambda v: (v.home.region, v.name))
    found: dict[PeerId, tuple[CellId, int]] = {}
    for number in range(cells):
        first = number * len(near) // cells
        last = (number + 1) * len(near) // cells
        name = first_cell(swarm.manifest.run_id)
        if number:
            name = CellId(sha256(f"cell {number}".encode()).hexdigest()[:16])
        speeds = [0.0] * stages
        counts = [0] * stages
        for v in sorted(near[first:last], key=lambda v: v.home.slowness):
            stage = min(range(stages), key=lambda s: (counts[s] > 0, speeds[s], s))
            speeds[stage] += 1.0 / v.home.slowness
            counts[stage] += 1
            found[v.name] = name, stage
    return found


@dataclass
class DayOutcome:
    """A day that was played. ``cpu_s``: seconds of processor time."""

    account: Account
    shown: list[tuple[float, float, float, dict[Loss, float]]]
    seconds: float
    cpu_s: float
    events: int
    counts: dict[str, int]
    cells: int
    volunteers: int
    there: float
    """Mean number of machines that were there."""
    losses: dict[Loss, float] = field(default_factory=dict)


def play(count: int, seconds: float, seed: int = 1, setup: Setup | None = None) -> DayOutcome:
    """Play ``count`` volunteers for ``seconds`` of virtual time."""
    began = time.process_time()
    setup = setup or day_setup()
    people = volunteers(count, seconds, seed, unequal=setup.work.unequal)
    with quiet():
        swarm = DaySwarm(people, setup, seed)
        swarm.world.run(seconds)
        swarm.account.read_all(swarm.leaders(), swarm.world.now)
        account = swarm.account
        losses = account.losses(swarm.under_way())
        outcome = DayOutcome(
            account,
            swarm.shown,
            seconds,
            0.0,
            swarm.world.events,
            dict(swarm.watch.counts),
            len(swarm.leaders()),
            count,
            sum(v.seconds(seconds) for v in people) / seconds,
            losses,
        )
        bury()
    outcome.cpu_s = time.process_time() - began
    return outcome
