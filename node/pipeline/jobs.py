"""Device jobs of micro-batches: forward, loss and backward."""

from collections.abc import Callable

from node.model.lanes import Mark
from node.pipeline.device import Priority
from node.pipeline.events import Broken, Computed, Direction, Key
from node.pipeline.guard import NotFinite
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.hops.stash import Stash
from node.pipeline.timing import Timing
from node.pipeline.visit_buffers import COMPUTE_ERRORS, StageMath, VisitBuffers


class DeviceJobs:
    """Computes forward, loss and backward of the visits in the stash. ``timing`` records the
    seconds of each job."""

    def __init__(
        self,
        host: PipelineHost,
        driver: MachineDriver,
        stash: Stash,
        planned: PlannedWork,
        math: StageMath,
        *,
        timing: Timing,
    ) -> None:
        self._host = host
        self._driver = driver
        self._stash = stash
        self._planned = planned
        self._math = math
        self._timing = timing
        self._idle_seen = 0.0
        self._sliced = 0

    def begin(self) -> None:
        """Begin a plan: the device's idle time before it does not count as waiting."""
        self._idle_seen = self._host.device.idle_s

    async def compute(self, key: Key, way: Direction, keep: bool) -> None:
        """Compute one direction of a visit, and hand the machine the event. Without ``keep`` the
        gradient share of the visit is thrown away."""
        device = self._host.device
        telemetry = self._host.telemetry
        work = self._stash.get(key)
        if work is None:
            return
        job = self._job(key, way)
        turn = self._planned.turn(key, way)

        def timed() -> tuple[Mark, Mark] | None:
            if work.dead:
                return None
            began = device.lanes.mark()
            job(work)
            return began, device.lanes.mark()

        def finish(marks: tuple[Mark, Mark] | None) -> float:
            if marks is None:
                return 0.0
            began, ended = marks
            self._math.deliver(work, ended)
            if not keep:
                work.share = None
            # A visit that was freed, or that leaves nothing to copy, has waited for nothing.
            ended.wait()
            return ended.since(began)

        try:
            seconds = await device.run_through(timed, finish, Priority.VISIT, turn)
        except COMPUTE_ERRORS as e:
            lost = isinstance(e, NotFinite)
            telemetry.emit(
                "output-not-finite" if lost else "compute-broken",
                f"{way.value} of a micro-batch failed: {e}",
                "error",
                index=key.index,
            )
            if self._stash.get(key) is work:
                self._driver.handle(Broken(key, way, str(e)[:200], lost))
            return
        telemetry.spent("compute", seconds)
        idle = device.idle_s
        telemetry.spent("wait", idle - self._idle_seen)
        self._idle_seen = idle
        self._say_slices()
        if self._stash.get(key) is not work:
            return  # freed meanwhile, perhaps before it began
        measured = self._timing.work[way]
        planned = self._planned
        if planned.at_origin(key) and key.position:
            measured = self._timing.loss
        measured.add(seconds, self._host.clock.now())
        if way is Direction.FORWARD and not (planned.at_origin(key) and key.position):
            self._stash.recharge(key, planned.cost(key.index))
        self._driver.handle(Computed(key, way))

    def _job(self, key: Key, way: Direction) -> Callable[[VisitBuffers], None]:
        math = self._math
        if not self._planned.at_origin(key):
            if way is Direction.FORWARD:
                return math.forward
            return math.backward
        if way is Direction.BACKWARD:
            return math.embed_backward
        if key.position == 0:
            return math.embed
        return math.loss

    def _say_slices(self) -> None:
        if self._math.slice != self._sliced:
            self._sliced = self._math.slice
            self._host.telemetry.emit(
                "memory-short",
                f"out of memory: {self._sliced} sequences of a micro-batch are computed at once "
                "from now on, and its input alone is kept",
                "warning",
                slice=self._sliced,
            )
