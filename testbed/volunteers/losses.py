"""Account of a simulated swarm's compute: the work that counted, and the losses by cause.

Unit: seconds of the fastest machine. A machine of slowness 2 that is there for a second can do half
a second of work. The ideal is everything that the machines could do while they were there. Work is
counted from the jobs of the devices, idle time from the state of each peer, read once a second.

    ideal = useful work + losses

Work is useful if its micro-batch counted in a committed epoch: a micro-batch counts once, whatever
was done twice for it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from node.core.ids import CellId, PeerId
from node.core.journey import Plan
from node.epoch.leader.leader import Leader
from node.epoch.member import MemberState
from node.epoch.waiting import Lack
from node.sim.process import SimPeer
from node.sim.world.loop import ProcessLoop, SimDevice, TimerHandle

LABEL = 12
"""Characters of a plan's hash by which its work is counted; facts of commits carry as many."""
HOP_JOBS, ENDS_JOBS = 2, 3
"""Jobs of a device for a visit: forward and backward; at the ends embedding, loss, and the
embedding's backward."""
STEPS = "steps"
OTHER = "other"


Seconds = defaultdict[str, float]
"""Seconds of the fastest machine, by label."""


class Loss(StrEnum):
    """A cause of loss."""

    CHOOSING = "joining: finds a cell and a stage"
    FETCHING = "joining: fetches the state of the stage"
    QUEUE = "joining: waits for the next plan"
    PLAN = "waiting for a plan"
    LEADER = "leader changes"
    THIN = "too thin stages"
    FILL = "idle in an epoch: before its first work"
    UNEQUAL = "idle in an epoch: unequal stages"
    DRAIN = "idle in an epoch: after its last work"
    AVERAGING = "averaging in a cell"
    OUTER = "averaging between cells"
    REPEATED = "work lost: done again, or dropped"
    ABANDONED = "work lost: epochs given up"
    UNDER_WAY = "epochs under way at the end"
    LEAVING = "leaving for a pause"
    ELSE = "anything else"


class MeteredDevice(SimDevice):
    """A device whose work is counted by label, and that can stand still with its machine.
    ``label()`` names the work that begins now."""

    def __init__(self, loop: ProcessLoop, slowness: float, label: Callable[[], str]) -> None:
        super().__init__(loop, slowness)
        self.worked: Seconds = defaultdict(float)
        """Seconds of the fastest machine, by label."""
        self.jobs: Counter[str] = Counter()
        """Number of jobs, by label."""
        self.planned: tuple[str, int] = "", 0
        """Hash of a plan, and the number of jobs that its paths bring here."""
        self._label = label
        self._name = ""
        self._ends = 0.0
        self._tell: Callable[[], object] | None = None
        self._timer: TimerHandle | None = None
        self._left = 0.0

    def done_s(self) -> float:
        """Seconds that it has worked until now."""
        return self.busy_s - self._remaining()

    def done(self) -> Seconds:
        """Seconds of the fastest machine by label, without the rest of the job under way."""
        found = self.worked.copy()
        found[self._name] -= self._remaining() / self.slowness
        return found

    def _remaining(self) -> float:
        if self._left:
            return self._left
        return max(0.0, self._ends - self._loop.time())

    def _start(self, took: float, tell: Callable[[], object]) -> None:
        self.busy_s += took
        self._name = self._label()
        self.worked[self._name] += took / self.slowness
        self.jobs[self._name] += 1
        self._runs(took, tell)

    def _runs(self, seconds: float, tell: Callable[[], object]) -> None:
        self._ends = self._loop.time() + seconds
        self._tell = tell
        self._timer = self._loop.call_later(seconds, self._done, tell)

    def stand_still(self) -> None:
        """The machine sleeps: the job under way gets no further."""
        self._left = self._remaining()
        if self._left and self._timer is not None:
            self._timer.cancel()

    def go_on(self) -> None:
        """The machine is awake again."""
        seconds = self._left
        self._left = 0.0
        if seconds and self._tell is not None:
            self._runs(seconds, self._tell)

    def ends(self) -> None:
        """The process is gone, and with it the job under way."""
        self.worked[self._name] -= self._remaining() / self.slowness
        self.busy_s = self.done_s()
        self._left = 0.0
        self._ends = self._loop.time()


@dataclass
class _Open:
    """A machine that is there. ``since``: time of the last reading; ``done_s``: seconds that its
    device had worked then."""

    since: float
    done_s: float


@dataclass
class Account:
    """Compute in seconds of the fastest machine. ``work``: by label; ``counted``: micro-batches of
    committed epochs, by label; ``unit``: work of one micro-batch."""

    unit: float
    tokens: int
    ideal: float = 0.0
    idle: defaultdict[Loss, float] = field(default_factory=lambda: defaultdict(float))
    work: Seconds = field(default_factory=lambda: defaultdict(float))
    counted: Counter[str] = field(default_factory=Counter)
    _open: dict[SimPeer, _Open] = field(default_factory=dict)
    _running: dict[SimPeer, MeteredDevice] = field(default_factory=dict)
    """Devices of the processes that run, of machines that sleep too."""

    # ----------------------------------------------------------- events

    def begins(self, peer: SimPeer, now: float) -> None:
        """A machine is there from now on."""
        device = _metered(peer)
        self._running[peer] = device
        self._open[peer] = _Open(now, device.done_s())

    def ends(self, peer: SimPeer, leader: Leader | None, now: float) -> None:
        """A machine is there no more."""
        if peer in self._open:
            self.read(peer, leader, now)
            del self._open[peer]

    def process_ends(self, peer: SimPeer) -> None:
        """The process of a machine has ended: its work is complete."""
        device = self._running.pop(peer, None)
        if device is not None:
            device.ends()
            _add(self.work, device.worked)

    def committed(self, label: str, counted: int) -> None:
        """An epoch is committed."""
        self.counted[label] = counted

    # ----------------------------------------------------------- readings

    def there(self) -> list[SimPeer]:
        """The machines that are there now."""
        return [*self._open]

    def read(self, peer: SimPeer, leader: Leader | None, now: float) -> None:
        """Count the time of a machine since its last reading. ``leader``: that of its cell."""
        device = _metered(peer)
        account = self._open[peer]
        seconds = now - account.since
        done_s = device.done_s()
        idle = seconds - (done_s - account.done_s)
        self.ideal += seconds / peer.slowness
        self.idle[_cause(peer, leader)] += idle / peer.slowness
        account.since = now
        account.done_s = done_s

    def read_all(self, leaders: Mapping[CellId, Leader], now: float) -> None:
        """Count the time of every machine that is there. ``leaders``: by cell."""
        for peer in self._open:
            self.read(peer, leaders.get(cell_of(peer)), now)

    # ----------------------------------------------------------- results

    def all_work(self) -> Seconds:
        """Work by label, of processes that still run too; the rest of a job under way is not done
        yet."""
        found = self.work.copy()
        for device in self._running.values():
            _add(found, device.done())
        return found

    @property
    def useful(self) -> float:
        """Work of the micro-batches that counted."""
        return self.unit * sum(self.counted.values())

    @property
    def tokens_committed(self) -> int:
        return self.tokens * sum(self.counted.values())

    @property
    def tokens_ideal(self) -> float:
        """Tokens if every machine worked whenever it was there."""
        return self.tokens * self.ideal / self.unit

    def losses(self, under_way: Collection[str] = ()) -> dict[Loss, float]:
        """Losses by cause. Together with :attr:`useful` they are :attr:`ideal`. ``under_way``:
        labels of the plans in force."""
        found = {loss: self.idle[loss] for loss in Loss}
        for label, seconds in self.all_work().items():
            if label in (STEPS, OTHER):
                found[Loss.AVERAGING if label == STEPS else Loss.ELSE] += seconds
            elif label in self.counted:
                found[Loss.REPEATED] += seconds
            elif label in under_way:
                found[Loss.UNDER_WAY] += seconds
            else:
                found[Loss.ABANDONED] += seconds
        found[Loss.REPEATED] -= self.useful
        return found


def _add(into: Seconds, more: Mapping[str, float]) -> None:
    for label, seconds in more.items():
        into[label] += seconds


def label_of(peer: SimPeer) -> str:
    """Label of the work that begins at a peer now: the plan it belongs to, or the optimizer's
    steps."""
    a = peer.assembled
    if a is None or a.training.member.plan is None:
        return OTHER
    if a.training.member.state is not MemberState.RUN:
        return STEPS
    return a.training.member.plan.hash[:LABEL]


def cell_of(peer: SimPeer) -> CellId:
    """The cell of a peer; empty before it has one."""
    if peer.assembled is None:
        return CellId("")
    return peer.assembled.training.cell


def _cause(peer: SimPeer, leader: Leader | None) -> Loss:
    """The reason for which a peer that is there does not work now."""
    a = peer.assembled
    if peer.pausing or peer.ending:
        return Loss.LEAVING
    if peer.moving or a is None:
        return Loss.CHOOSING
    if not a.training.started or a.work.fetching < 1.0:
        return Loss.FETCHING
    member = a.training.member
    plan = member.plan
    if plan is not None and member.busy:
        me = plan.member(peer.name)
        if me is None or not me.current:
            return Loss.QUEUE
        if plan.outer:
            return Loss.OUTER
        if member.state is MemberState.RUN:
            return _idle_in(peer, plan)
        return Loss.AVERAGING
    if leader is None:
        return Loss.LEADER
    wait = leader.gathering.waiting
    if leader.attempt is None and wait is not None:
        return _WAITS.get(wait.lack, Loss.LEADER)
    if plan is None or plan.member(peer.name) is None:
        return Loss.QUEUE
    if member.state is MemberState.DONE:
        return Loss.OUTER if plan.outer else Loss.AVERAGING
    return Loss.PLAN


def _metered(peer: SimPeer) -> MeteredDevice:
    """The device of a peer of this simulation. Raises TypeError for a device without a meter."""
    if not isinstance(peer.device, MeteredDevice):
        raise TypeError(f"{peer.name} has a device without a meter")
    return peer.device


def _idle_in(peer: SimPeer, plan: Plan) -> Loss:
    """The reason for which a member does not work while the micro-batches of a plan run."""
    device = _metered(peer)
    done = device.jobs[plan.hash[:LABEL]]
    if not done:
        return Loss.FILL
    if device.planned[0] != plan.hash:
        device.planned = plan.hash, _jobs_of(plan, peer.name)
    if done < device.planned[1]:
        return Loss.UNEQUAL
    return Loss.DRAIN


def _jobs_of(plan: Plan, peer: PeerId) -> int:
    """Jobs that the paths of a plan bring to a peer."""
    ends = sum(path.origin == peer for path in plan.paths)
    visits = sum(hop.peer == peer for path in plan.paths for hop in path.hops)
    return ENDS_JOBS * ends + HOP_JOBS * visits


_WAITS = {
    Lack.PEERS: Loss.THIN,
    Lack.EPOCH: Loss.THIN,
    Lack.COMMON: Loss.THIN,
    Lack.ENDS: Loss.THIN,
    Lack.WAYS: Loss.PLAN,
    Lack.MEMORY: Loss.ELSE,
}
"""Loss behind each reason of a leader to wait; any other reason is one of a new leader."""
