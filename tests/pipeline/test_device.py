import asyncio
import concurrent.futures
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from node.app import assembly
from node.app.assembly import tells_of_lost
from node.config import NodeConfig
from node.core.errors import DeviceLost, ExitCode
from node.model.device import Device
from node.pipeline import text_budget
from node.pipeline.device import DeviceThread, Priority
from testbed.fakes.slow_lanes import SlowLanes


@pytest.fixture(params=[True, False])
def device(request):
    made = DeviceThread(by_arrival=request.param)
    yield made
    made.close()


async def test_the_smallest_turn_goes_first_unless_all_go_by_arrival(device):
    gate = threading.Event()
    order = []
    blocked = device.enqueue(Priority.COMMIT, gate.wait)
    waiting = [
        device.enqueue(priority, lambda name=name: order.append(name), turn=turn)
        for name, priority, turn in (
            ("other", Priority.OTHER, -9.0),
            ("fourth", Priority.VISIT, 4.0),
            ("second", Priority.VISIT, -2.5),
            ("fourth too", Priority.VISIT, 4.0),
            ("third", Priority.VISIT, 0.0),
            ("first", Priority.COMMIT, 9.0),
        )
    ]
    gate.set()
    await asyncio.gather(*(asyncio.wrap_future(f) for f in (blocked, *waiting)))
    if device.by_arrival:
        assert order == ["first", "other", "fourth", "second", "fourth too", "third"]
    else:
        assert order == ["first", "second", "third", "fourth", "fourth too", "other"]


async def test_every_job_runs_on_the_same_other_thread(device):
    seen = {
        await device.run(threading.get_ident),
        await asyncio.get_running_loop().run_in_executor(device, threading.get_ident),
    }
    assert len(seen) == 1
    assert threading.get_ident() not in seen


async def test_an_error_reaches_the_waiter_and_the_thread_lives_on(device):
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    assert await device.run(lambda: 5) == 5


async def test_a_cancelled_waiter_takes_its_job_out(device):
    gate = threading.Event()
    ran = []
    first = device.enqueue(Priority.COMMIT, gate.wait)
    waiter = asyncio.ensure_future(device.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    gate.set()
    await asyncio.wrap_future(first)
    await device.run(lambda: None)
    assert ran == []


def busy(seconds: float) -> None:
    """Take processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize(("share", "order"), [(0.01, "text train text"), (1.0, "text text train")])
async def test_texts_have_their_share_of_a_device_that_trains(share: float, order: str) -> None:
    device = DeviceThread(text_share=share)
    ran: list[str] = []
    gate = threading.Event()
    await device.run(lambda: None, Priority.VISIT)
    begun = asyncio.Event()
    tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)
    device.enqueue(Priority.VISIT, lambda: (tell(), gate.wait()))
    await begun.wait()
    jobs = [device.enqueue(Priority.VISIT, lambda: ran.append("train"))]
    for _ in range(2):
        job = device.enqueue(Priority.TOKEN, lambda: (busy(0.02), ran.append("text")))
        jobs.append(job)
    gate.set()
    await asyncio.gather(*map(asyncio.wrap_future, jobs))
    assert " ".join(ran) == order
    device.close()


async def test_a_long_job_of_training_lets_texts_in_by_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_budget, "TRAINS_S", 0.0)
    device = DeviceThread(text_share=0.01)
    ran: list[str] = []
    begun = asyncio.Event()
    tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)
    gate = threading.Event()

    def layers() -> None:
        tell()
        gate.wait()
        for _ in range(2):
            device.breathe()
            ran.append("layer")

    jobs = [device.enqueue(Priority.VISIT, layers)]
    await begun.wait()
    for _ in range(2):
        job = device.enqueue(Priority.TOKEN, lambda: (busy(0.02), ran.append("text")))
        jobs.append(job)
    gate.set()
    await asyncio.gather(*map(asyncio.wrap_future, jobs))
    assert ran == ["text", "layer", "layer", "text"]
    device.close()


async def test_texts_that_wait_for_their_share_are_done_before_the_device_ends() -> None:
    device = DeviceThread(text_share=0.01, daemons=lambda: 100)
    await device.run(lambda: None, Priority.VISIT)
    jobs = [device.enqueue(Priority.TOKEN, lambda: busy(0.02)) for _ in range(3)]
    await asyncio.wrap_future(jobs[0])
    device.shutdown()
    assert all(job.done() and not job.cancelled() for job in jobs)


@pytest.mark.parametrize("priority", [Priority.VISIT, Priority.TOKEN])
def test_whoever_waits_for_a_cancelled_job_hears_of_it(device, priority):
    gate = threading.Event()
    device.enqueue(Priority.COMMIT, gate.wait)
    job = device.enqueue(priority, lambda: None)
    job.cancel()
    gate.set()
    done, _ = concurrent.futures.wait([job], timeout=60)
    assert done == {job}


async def test_texts_without_end_let_training_go_on(device):
    """Each token asks for the next one at once, like many texts together."""
    order: list[str] = []

    def token() -> None:
        order.append("token")
        if len(order) < 100:
            device.enqueue(Priority.TOKEN, token)

    def long() -> None:
        order.append("layer")
        device.breathe()
        order.append("layer")

    busy = threading.Event()
    gate = threading.Event()
    device.enqueue(Priority.COMMIT, lambda: busy.set() or gate.wait())
    await asyncio.to_thread(busy.wait)
    device.enqueue(Priority.TOKEN, token)
    training = [device.enqueue(Priority.VISIT, long) for _ in range(2)]
    gate.set()
    await asyncio.gather(*(asyncio.wrap_future(job) for job in training))
    # Tokens go first, and one is let in between any two layers.
    assert order[:8] == ["token", "layer"] * 4


@pytest.mark.parametrize("cancel", [False, True])
def test_the_end_comes_after_all_that_waits_and_nothing_after_it(device, cancel):
    gate = threading.Event()
    ran = []
    device.enqueue(Priority.COMMIT, gate.wait)
    waiting = [device.enqueue(p, lambda p=p: ran.append(p)) for p in reversed(Priority)]
    device.shutdown(wait=False, cancel_futures=cancel)
    with pytest.raises(RuntimeError, match="closed"):
        device.submit(print)
    gate.set()
    device.shutdown()
    device.close()
    assert [f.cancelled() for f in waiting] == [cancel] * len(Priority)
    assert sorted(ran) == ([] if cancel else list(Priority))


@pytest.mark.parametrize("call", [DeviceThread.run, DeviceThread.beside], ids=["job", "copy"])
async def test_errors_are_told_before_the_waiter_gets_them(call):
    """A lost GPU may show at a received tensor first, after which no job comes any more."""
    told = []
    device = DeviceThread(failed=told.append)
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            await call(device, lambda: 1 / 0)
        assert told == [caught.value]
        assert await call(device, lambda: 5) == 5
        assert len(told) == 1
    finally:
        device.close()


async def test_each_thread_of_a_gpu_has_it_as_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: dict[int, torch.device] = {}
    threads: set[int] = set()

    def set_device(device: torch.device) -> None:
        current[threading.get_ident()] = device

    def job(*_: object) -> None:
        threads.add(threading.get_ident())

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(assembly, "lanes_of", lambda device: SlowLanes(0.0, 0.0, beside=True))
    gpu = Device(torch.device("cuda", 1))
    device = assembly.device_thread(NodeConfig(tmp_path), gpu, False, lambda *_: None, None)
    try:
        await device.run_through(job, job, Priority.VISIT)
        await device.beside(job)
    finally:
        device.close()
    assert len(threads) == 3
    assert current == dict.fromkeys(threads, gpu.device)


async def test_a_lost_gpu_ends_the_daemon_and_a_full_one_does_not():
    told: list[tuple[str, BaseException]] = []
    ended = asyncio.Event()

    def on_error(name: str, error: BaseException) -> None:
        told.append((name, error))
        ended.set()

    gpu = Device(torch.device("cuda", 0))
    device = DeviceThread(failed=tells_of_lost(gpu, on_error))

    def failing(text: str):
        raise torch.AcceleratorError(text)

    try:
        for text in ("CUDA error: out of memory", "CUDA error: device-side assert triggered\n..."):
            with pytest.raises(torch.AcceleratorError):
                await device.run(lambda text=text: failing(text))
        await ended.wait()
    finally:
        device.close()
    ((_, fault),) = told
    assert isinstance(fault, DeviceLost)
    assert fault.code is ExitCode.RESTART_WANTED
    assert "cuda:0" in fault.what
    assert "device-side assert triggered" in fault.what
    assert "..." not in fault.what
