"""Copies beside computations: the order of events of a device whose steps a test holds."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from node.core.ids import PeerId
from node.core.memory import SCARCE, let_go
from node.model.lanes import Lanes, LaneThread
from node.model.settings import ModelSettings
from node.model.stages import build
from node.pipeline.device import AHEAD, DeviceThread, Priority
from node.pipeline.events import Computed as Done
from node.pipeline.events import Direction, Key
from node.pipeline.frames import CHUNK, FrameReader, FrameShape
from node.pipeline.guard import NotFinite
from node.pipeline.hops.intake import FrameIntake
from node.pipeline.jobs import DeviceJobs
from node.pipeline.timing import Timing
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from node.wire.tensors import chunks, expected_head
from protos import pipeline_pb2 as pb
from testbed.fakes.encoded import encode_measured
from testbed.fakes.slow_lanes import SHORT, SlowLanes
from testbed.models.visits import arrived, read, visit

T = TypeVar("T")
MODEL = ModelSettings(layers=1, d_model=64, heads=2, kv_heads=1, d_ff=96, vocab=31, seq_len=16)
SHAPE = (2, 16, 64)
LONG_S = 60.0
"""Bound of every wait for another thread."""


class Gate:
    """One step of a device at a time, which ends when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def hold(self) -> None:
        """Be in the step until it may end."""
        self.begun.release()
        assert self.may_end.acquire(timeout=LONG_S)

    async def entered(self) -> None:
        """Wait until a step is under way."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=LONG_S)


class HeldMark:
    """The end of computations that a test ends."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self) -> None:
        assert self._ended.wait(LONG_S)

    def done(self) -> bool:
        return self._ended.is_set()

    def since(self, earlier: Any) -> float:
        if not (self.done() and earlier.done()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 0.0


class HeldLanes(Lanes):
    """A device that copies and computes when the test lets it. ``computing``: for each job that was
    issued, the event of its end."""

    beside = True

    def __init__(self) -> None:
        super().__init__()
        self.ups = Gate()
        self.downs = Gate()
        self.computing: list[threading.Event] = []
        self.issued = threading.Semaphore(0)

    def compute(self, work: Callable[[], T]) -> T:
        made = work()
        self.computing.append(threading.Event())
        self.issued.release()
        return made

    def mark(self) -> HeldMark:
        if not self.computing:
            ended = threading.Event()
            ended.set()
            return HeldMark(ended)
        return HeldMark(self.computing[-1])

    def up(self, host: Tensor) -> Tensor:
        self.ups.hold()
        return host

    def down(self, made: Tensor, after: Any) -> Tensor:
        after.wait()
        if made.numel() >= SHORT:
            self.downs.hold()
        return made

    async def began(self) -> None:
        """Wait until another job is issued."""
        assert await asyncio.to_thread(self.issued.acquire, timeout=LONG_S)


class Stage:
    """A block stage with its device thread, without a pipeline around it."""

    def __init__(self, lanes: Lanes) -> None:
        self.device = DeviceThread(lanes=lanes)
        self.math = StageMath(build(MODEL, 1, 1), "fp32")
        self.math.use(lanes)

    def forward(self, seed: int) -> "asyncio.Task[VisitBuffers]":
        """Take a micro-batch through: up, computed, down."""
        return asyncio.ensure_future(self._forward(seed))

    async def _forward(self, seed: int) -> VisitBuffers:
        work = arrived(numbers(seed))
        assert work.input is not None
        reader = work.input
        await self.device.beside(lambda: self.math.receive(reader))
        lanes = self.device.lanes

        def issue() -> Any:
            self.math.forward(work)
            return lanes.mark()

        def finish(mark: Any) -> VisitBuffers:
            self.math.deliver(work, mark)
            return work

        return await self.device.run_through(issue, finish, Priority.VISIT)


def numbers(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
async def held():
    lanes = HeldLanes()
    stage = Stage(lanes)
    yield stage, lanes
    stage.device.close()


async def test_one_goes_up_while_the_next_computes_and_the_last_comes_down(held):
    stage, lanes = held
    visits = []
    for seed in (1, 2):
        visits.append(stage.forward(seed))
        await lanes.ups.entered()
        lanes.ups.may_end.release()
        await lanes.began()
    lanes.computing[0].set()
    await lanes.downs.entered()
    visits.append(stage.forward(3))
    await lanes.ups.entered()
    # At this moment the first is on its way down, the second computes, the third goes up.
    assert [v.done() for v in visits] == [False] * 3
    assert [e.is_set() for e in lanes.computing] == [True, False]
    lanes.ups.may_end.release()
    await lanes.began()
    assert not visits[0].done()
    for ended in lanes.computing:
        ended.set()
    for _ in visits:
        lanes.downs.may_end.release()
    done = await asyncio.gather(*visits)
    plain = StageMath(stage.math.module, "fp32")
    for work, seed in zip(done, (1, 2, 3), strict=True):
        expected, _, _ = visit(plain, numbers(seed), numbers(9))
        assert bytes(work.output) == expected


async def test_the_next_job_is_chosen_when_the_device_can_take_it(held):
    stage, lanes = held
    order: list[str] = []

    def job(name: str) -> Callable[[], None]:
        return lambda: lanes.compute(lambda: order.append(name))

    device = stage.device
    waiting = [
        device.enqueue(Priority.VISIT, job(f"f{i}"), lambda made: made) for i in range(AHEAD + 2)
    ]
    for _ in range(AHEAD + 1):
        await lanes.began()
    waiting.append(device.enqueue(Priority.VISIT, job("b"), lambda made: made, turn=-1.0))
    assert order == [f"f{i}" for i in range(AHEAD + 1)]
    lanes.computing[0].set()
    await lanes.began()
    assert order[-1] == "b"
    lanes.computing[1].set()
    await lanes.began()
    for ended in lanes.computing:
        ended.set()
    await asyncio.gather(*(asyncio.wrap_future(f) for f in waiting))
    assert order[-1] == f"f{AHEAD + 1}"


async def test_results_that_may_not_leave_are_refused_when_they_are_looked_at(held):
    stage, lanes = held
    with torch.no_grad():
        next(stage.math.module.parameters()).fill_(float("nan"))
    bad = stage.forward(1)
    await lanes.ups.entered()
    lanes.ups.may_end.release()
    await lanes.began()
    assert not bad.done()
    lanes.computing[0].set()
    with pytest.raises(NotFinite):
        await bad
    assert await stage.device.run(lambda: 5) == 5


async def test_a_job_that_is_issued_counts_as_running_until_its_result_is_here(held):
    stage, lanes = held
    visited = stage.forward(1)
    await lanes.ups.entered()
    lanes.ups.may_end.release()
    await lanes.began()
    lanes.computing[0].set()
    await lanes.downs.entered()
    assert stage.device.busy_for > 0
    lanes.downs.may_end.release()
    await visited
    assert stage.device.busy_for == 0


class EndLanes(Lanes):
    """A device that computes no further than somebody waits for."""

    beside = True

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[HeldMark] = []

    def mark(self) -> HeldMark:
        mark = EndMark(threading.Event(), tuple(self.marks))
        self.marks.append(mark)
        return mark


class EndMark(HeldMark):
    """The end of computations, and of those of ``before``, when somebody waits for it."""

    def __init__(self, ended: threading.Event, before: tuple[HeldMark, ...]) -> None:
        super().__init__(ended)
        self._before = before

    def wait(self) -> None:
        for mark in self._before:
            mark.wait()
        self._ended.set()


@pytest.mark.parametrize("freed", [False, True])
async def test_a_job_that_leaves_nothing_is_timed_when_it_is_done(freed: bool) -> None:
    """The ends of an adapter without layers of their own, and a visit that is freed before its
    result is copied."""
    key = Key(1, 0, 0)
    ids = torch.zeros(SHAPE[:2], dtype=torch.int64)
    work = VisitBuffers(LONG_S, SHAPE, batch=lambda: (ids, ids))
    work.x = ids
    work.gradient = read(numbers(1))
    lanes = EndLanes()
    device = DeviceThread(lanes=lanes)
    math = StageMath(build(replace(MODEL, adapter=4), 1, 0), "fp32")
    math.use(lanes)
    if freed:
        deliver = math.deliver

        def too_late(work: VisitBuffers, after: Any) -> None:
            work.dead = True
            deliver(work, after)

        math.deliver = too_late
    heard: list[Any] = []
    telemetry = SimpleNamespace(emit=lambda *a, **k: heard.append(a), spent=lambda *a: None)
    host: Any = SimpleNamespace(
        device=device, telemetry=telemetry, clock=SimpleNamespace(now=lambda: 0.0)
    )
    driver: Any = SimpleNamespace(handle=heard.append)
    stash: Any = SimpleNamespace(get=lambda key: work)
    planned: Any = SimpleNamespace(turn=lambda key, way: 0.0, at_origin=lambda key: True)
    jobs = DeviceJobs(host, driver, stash, planned, math, timing=Timing())
    try:
        await jobs.compute(key, Direction.BACKWARD, True)
    finally:
        device.close()
    assert heard == [Done(key, Direction.BACKWARD)]


class Computed(TorchFunctionMode):
    """Names of the calls that made numbers in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in old:
            self.names.append(func.__name__)
        return made


def test_nothing_is_computed_behind_the_mark_of_a_job():
    """A copy down waits for the mark alone: it would read too early what is computed later."""
    math = StageMath(build(MODEL, 1, 1), "bf16")
    math.use(SlowLanes(0.0, 0.0, beside=True))
    issued = Computed()
    late = Computed()
    work = arrived(numbers(1))
    for job in (math.forward, math.backward):
        with issued:
            job(work)
        mark = math.lanes.mark()
        with late:
            math.deliver(work, mark)
        work.gradient = read(numbers(2))
    assert work.share is not None
    assert "stack" in issued.names
    assert late.names == []


def test_looks_at_what_only_goes_forward_are_before_its_mark():
    computed = Computed()
    before: list[str] = []

    class Noted(SlowLanes):
        def mark(self) -> Any:
            before[:] = computed.names
            return super().mark()

    math = StageMath(build(MODEL, 1, 1), "fp32")
    math.use(Noted(0.0, 0.0, beside=True))
    with computed:
        math.forward_only(read(numbers(1)))
    assert before[-1] == "stack"
    assert computed.names == before


@pytest.mark.parametrize("beside", [False, True])
def test_a_slow_double_computes_what_the_cpu_does(beside: bool):
    x = numbers(1)
    dy = numbers(2)
    expected = visit(StageMath(build(MODEL, 1, 1), "fp32"), x, dy)
    math = StageMath(build(MODEL, 1, 1), "fp32")
    lanes = SlowLanes(0.001, 0.001, beside=beside)
    math.use(lanes)
    work = arrived(x)
    assert work.input is not None
    math.receive(work.input)
    math.forward(work)
    math.deliver(work, lanes.mark())
    output = bytes(work.output or b"")
    work.gradient = read(dy)
    math.receive(work.gradient)
    math.backward(work)
    math.deliver(work, lanes.mark())
    assert (output, bytes(work.upstream or b"")) == expected[:2]
    assert work.share is not None
    assert all(torch.equal(work.share[n], g) for n, g in expected[2].items())


def test_a_tensor_is_taken_where_a_look_at_it_finds_no_memory(monkeypatch):
    norm = torch.linalg.vector_norm
    looks: list[Tensor] = []

    def full(tensor: Tensor, **options: Any) -> Tensor:
        looks.append(tensor)
        if len(looks) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return norm(tensor, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", full)
    math = StageMath(build(MODEL, 1, 1), "fp32")
    math.use(SlowLanes(0.0, 0.0, beside=True))
    reader = read(numbers(1))
    math.receive(reader)
    assert len(looks) == 2
    assert reader.rms() == pytest.approx(1.0, rel=0.1)


def test_in_line_nothing_is_copied():
    x = numbers(1)
    reader = read(x)
    memory = reader.raw()[0].data_ptr()
    math = StageMath(build(MODEL, 1, 1), "fp32")
    math.receive(reader)
    assert reader.numbers(torch.device("cpu")).data_ptr() == memory
    lanes = Lanes()
    assert lanes.down(x, lanes.mark()) is x


def test_a_lane_runs_calls_in_order_and_takes_none_after_its_end():
    lane = LaneThread("lane")
    lane.shutdown()  # never used
    lane = LaneThread("lane")
    order: list[int] = []
    gate = threading.Event()
    calls = [lane.submit(gate.wait), *(lane.submit(order.append, i) for i in range(5))]
    calls[3].cancel()
    lost = lane.submit(lambda: 1 / 0)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        lost.result(LONG_S)
    lane.shutdown()
    assert order == [0, 1, 3, 4]
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(print)


@pytest.mark.parametrize(("wire", "length", "aside"), [("bf16", 16, False), ("bf16", 16384, True)])
async def test_a_large_tensor_is_looked_at_beside_the_event_loop(wire, length, aside):
    shape = (1, length, MODEL.d_model)
    sizes = FrameShape(1, length, MODEL.d_model, wire, 1)
    x = torch.randn(shape)
    device = DeviceThread()
    math = StageMath(build(MODEL, 1, 1), wire)
    moved: list[int] = []
    transport = SimpleNamespace(count=lambda peer, received, plane: moved.append(received))
    host: Any = SimpleNamespace(device=device, transport=transport)
    intake = FrameIntake(host, sizes, math)
    threads: list[int] = []
    receive = math.receive

    def looked(reader: FrameReader) -> None:
        threads.append(threading.get_ident())
        receive(reader)

    math.receive = looked
    data, _ = encode_measured(x, wire, measure=False)
    pieces = iter([pb.Frame(chunk=chunk) for chunk in chunks(data, CHUNK)])

    async def next_piece() -> pb.Frame:
        return next(pieces)

    try:
        head = pb.FrameHead(tensor=expected_head("", shape, wire))
        reader = await intake.read(PeerId("a"), head, shape, False, next_piece)
    finally:
        device.close()
    assert reader.rms() == pytest.approx(1.0, rel=0.1)
    assert moved == [len(data)]
    assert len(threads) == aside
    assert threading.get_ident() not in threads


class Block:
    """Memory that says which thread gave it up."""

    def __init__(self, gone: "list[int]", went: threading.Event) -> None:
        self._gone = gone
        self._went = went

    def __del__(self) -> None:
        self._gone.append(threading.get_ident())
        self._went.set()


@pytest.mark.parametrize("large", [False, True])
async def test_large_memory_is_given_up_on_another_thread(large: bool):
    gone: list[int] = []
    went = threading.Event()
    work = VisitBuffers(0.0, SHAPE, nbytes=SCARCE if large else 1)
    block: Any = Block(gone, went)
    work.x = block
    del block
    work.free_graph()
    assert await asyncio.to_thread(went.wait, LONG_S)
    assert (gone == [threading.get_ident()]) is not large


async def test_work_that_fills_the_executor_keeps_no_memory():
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = threading.Event()
    slow = asyncio.ensure_future(asyncio.to_thread(busy.wait, LONG_S))
    await asyncio.sleep(0)
    went = threading.Event()
    let_go([Block([], went)])
    try:
        with ThreadPoolExecutor(1) as waiter:
            assert await loop.run_in_executor(waiter, went.wait, LONG_S / 2)
    finally:
        busy.set()
        await slow


def test_without_an_event_loop_memory_is_given_up_at_once():
    gone: list[int] = []
    let_go([Block(gone, threading.Event())])
    assert gone == [threading.get_ident()]
