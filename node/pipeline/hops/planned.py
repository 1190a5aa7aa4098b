"""Sizes, number formats and positions of the micro-batches in the plan in force."""

from node.core.ids import PeerId
from node.pipeline.events import Direction, Key
from node.pipeline.frames import FrameShape
from node.pipeline.machine import PipelineMachine
from node.pipeline.route import wire_of
from node.pipeline.visit_buffers import StageMath


class PlannedWork:
    """Properties of planned micro-batches at this peer. The plan comes from ``machine``; ``math``
    has measured the sizes of autograd graphs."""

    def __init__(
        self, me: PeerId, machine: PipelineMachine, shape: FrameShape, math: StageMath
    ) -> None:
        self._me = me
        self._machine = machine
        self.shape = shape
        self._math = math
        self._wave = 0.0
        self._first = 0.0
        """The smallest rank of a job of the plan in force."""
        self._ranks = 0.0
        """Ranks of that plan's jobs."""

    def begin(self) -> None:
        """Begin a plan: set the micro-batches of a wave, one for each peer of a visited stage. Jobs
        of earlier plans that still wait go before its own: nobody needs their results, and they
        keep their tensors until they have been called."""
        plan = self._machine.plan
        self._first += self._ranks
        self._wave = 0.0
        self._ranks = 0.0
        if plan is not None and plan.paths:
            working = sum(member.current for member in plan.members)
            tasks = 2 * (len(plan.paths[0].hops) + 1)
            self._wave = 2 * working / tasks
            self._ranks = 1 + max(path.index for path in plan.paths) + self._wave * tasks

    def turn(self, key: Key, way: Direction) -> float:
        """Rank of a job at its device, in micro-batches; the smallest goes first. A job without a
        path is the first of its plan.

        It is the number of the micro-batch and one wave for each of its tasks before this job: the
        order of least slack, if every micro-batch moves on by one task while a wave is launched. It
        keeps the variance of cycle times small, and so the tail of an epoch short. Source: the
        fluctuation smoothing policies of Lu, Ramaswamy and Kumar, "Efficient scheduling policies to
        reduce mean and variance of cycle-time in semiconductor manufacturing plants" (IEEE
        Transactions on Semiconductor Manufacturing 7(3), 1994).
        """
        path = self._machine.paths.get(key.index)
        if path is None:
            return self._first
        done = key.position
        if way is Direction.BACKWARD:
            done = 2 * (len(path.hops) + 1) - key.position
        return self._first + key.index + self._wave * done

    def shape_of(self, index: int) -> tuple[int, ...]:
        """(B, T, D) of a planned micro-batch."""
        path = self._machine.paths.get(index)
        return (len(path.samples) if path else 0, self.shape.length, self.shape.width)

    def cost(self, index: int, *, graph: bool = True) -> int:
        """Bytes that one micro-batch keeps here: its input, its output, and its autograd graph once
        the size of the graph is known. ``graph`` is False for a micro-batch that is back at its
        origin: its graph was counted at its first hop."""
        shape = self.shape_of(index)
        kept = self._math.graph_bytes.get(shape, 0) if graph else 0
        return self.shape.kept(shape[0], shape[1]) + kept

    def first_cost(self) -> int:
        """Bytes that the plan's first micro-batch keeps here with its graph; 0 if the size of the
        graph is not known yet."""
        plan = self._machine.plan
        if plan is None or not plan.paths:
            return 0
        index = plan.paths[0].index
        if self.shape_of(index) not in self._math.graph_bytes:
            return 0
        return self.cost(index)

    def wire_of(self, index: int, position: int, way: Direction) -> str:
        """Number format in which the hop at ``position`` sends its tensor of ``way``. Sender and
        receiver get the same answer, also when another replica has replaced a hop."""
        path = self._machine.paths.get(index)
        plan = self._machine.plan
        if plan is None or path is None:
            return self.shape.wire
        return wire_of(plan, path, position, way) or self.shape.wire

    def wires_of(self, key: Key) -> dict[Direction, str]:
        """Number formats of the tensors that a visit sends."""
        return {way: self.wire_of(key.index, key.position, way) for way in Direction}

    def at_origin(self, key: Key) -> bool:
        """Return True if the micro-batch began at this peer."""
        path = self._machine.paths.get(key.index)
        return path is not None and path.origin == self._me
