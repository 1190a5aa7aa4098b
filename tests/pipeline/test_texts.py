"""Texts with cached keys and values: the same tokens as whole passes, through losses of every
kind; bounds; passes over several texts; training that lets them in."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.core.journey import Hop
from node.inference import text_session
from node.inference.forward_router import ForwardRouter
from node.inference.text_session import TextSession
from node.model import products
from node.model.products import PassThreads
from node.model.stages import build
from node.model.text_cache import GROWTH, TextCache, Turn, text_bytes
from node.pipeline import texts
from node.pipeline.device import DeviceThread, Priority
from node.pipeline.events import Claim, Direction
from node.pipeline.forward_only.batcher import Batcher
from node.pipeline.forward_only.jobs import ForwardJobs
from node.pipeline.frames import FrameShape, frames
from node.pipeline.texts import LATELY_S, TextKey, TextTable
from node.pipeline.visit_buffers import StageMath, TextStep
from node.wire.tensors import encode
from protos import pipeline_pb2 as pb
from testbed.fakes.clock import VirtualClock
from testbed.models.visits import read
from tests.pipeline.conftest import DEEP, MODEL

LONG = replace(MODEL, positions=64)
pytestmark = pytest.mark.usefixtures("unhurried")
PROMPT = [5, 3, 8, 1, 30, 2, 2, 9, 11, 4, 7]


class Writer:
    """Writer that continues a text on a swarm, by its likeliest tokens."""

    def __init__(self, swarm, version=lambda: 3) -> None:
        self.swarm = swarm
        self.pipeline = swarm.pipelines["s0a"]
        self.plan = self.pipeline.machine.plan
        transport = self.pipeline.host.transport
        settings = self.pipeline.settings
        self.router = ForwardRouter(transport, settings, lambda: self.plan)
        self.session = TextSession(self.pipeline, self.router, version)
        self.ids = list(PROMPT)

    async def write(self, count: int) -> list[int]:
        for _ in range(count):
            self.ids.append(int((await self.session.logits(self.ids)).argmax()))
        return self.ids

    def alone(self, count: int, *visited: int, first: int = 0) -> list[int]:
        """The same text by whole passes of the model in one piece, over the tokens from `first`."""
        ids = list(self.ids)
        for _ in range(count):
            h = self.swarm.hidden(torch.tensor([ids[first:]]), *(visited or (1, 2, 3)))
            ids.append(int(self.swarm.unsplit.ends.logits(h)[0, -1].argmax()))
        return ids


async def writing(make_swarm, replicas: int = 1, model=LONG, **settings) -> Writer:
    swarm = await make_swarm(model, **settings).fill(replicas)
    swarm.adopt(swarm.plan(1))
    return Writer(swarm)


def watch_lengths(writer: Writer) -> list[int]:
    """Number of tokens of each pass of a text at stage 1, in the order of passes."""
    seen: list[int] = []
    math = writer.swarm.pipelines["s1a"].math
    real = math.extend_texts

    def extend(steps):
        seen.extend(step.count for step in steps)
        return real(steps)

    writer.swarm.pipelines["s1a"].forward_jobs._steps._compute = extend
    return seen


@pytest.mark.parametrize("model", [LONG, replace(DEEP, positions=64)])
async def test_a_token_is_a_pass_over_itself_alone(make_swarm, model):
    writer = await writing(make_swarm, model=model)
    wanted = writer.alone(6)
    seen = watch_lengths(writer)
    assert await writer.write(6) == wanted
    # The prompt in pieces of the longest tensor there may be, then one token at a time.
    assert seen == [8, 3, 1, 1, 1, 1, 1]
    assert writer.session.begun == 1


async def test_another_replica_computes_the_cache_of_a_lost_one_again(make_swarm):
    writer = await writing(make_swarm, replicas=2)
    wanted = writer.alone(6)
    await writer.write(3)
    [lost] = [hop.peer for hop in writer.session._kept.hops if hop.stage == 2]
    await writer.swarm.kill(str(lost))
    assert await writer.write(3) == wanted
    assert writer.session.begun == 2
    assert lost not in [hop.peer for hop in writer.session._kept.hops]


async def test_a_stage_that_nobody_serves_is_left_out_of_the_whole_text(make_swarm):
    writer = await writing(make_swarm, may_skip=0.34)
    await writer.write(3)
    wanted = writer.alone(3, 1, 3)
    await writer.swarm.kill("s2a")
    assert await writer.write(3) == wanted


@pytest.mark.parametrize("stage", ["s1a", "s3a"])
async def test_a_dropped_cache_is_computed_again_at_once(make_swarm, stage):
    """The origin is told, also by a hop that is not the first: nothing waits for a time-out."""
    writer = await writing(make_swarm)
    wanted = writer.alone(6)
    await writer.write(3)
    pipeline = writer.swarm.pipelines[stage]
    await pipeline.host.device.run(pipeline.math._forget_texts)
    assert await writer.write(3) == wanted
    assert writer.session.begun == 2


async def test_a_hop_that_knows_no_texts_gets_whole_passes(make_swarm, monkeypatch):
    monkeypatch.setattr(text_session, "TRY_AGAIN", 2)
    writer = await writing(make_swarm)
    # Whole passes see the last 8 tokens.
    wanted = list(PROMPT)
    for _ in range(5):
        writer.ids = wanted
        wanted = writer.alone(1, first=len(wanted) - MODEL.seq_len)
    writer.ids = list(PROMPT)
    old = writer.swarm.pipelines["s2a"].forward_requests
    real = old.receive

    async def receive(way, caller, incoming, context):
        incoming.head.ClearField("text")
        await real(way, caller, incoming, context)

    old.receive = receive
    assert await writer.write(5) == wanted


async def test_a_stage_without_memory_for_texts_gets_whole_passes(make_swarm):
    writer = await writing(make_swarm)
    writer.swarm.pipelines["s2a"].texts.limit = 1
    writer.ids = PROMPT[:4]
    wanted = writer.alone(4)
    assert await writer.write(4) == wanted
    assert writer.swarm.pipelines["s2a"].texts.used == 0


async def test_a_text_longer_than_the_model_sees_goes_on_with_its_last_tokens(make_swarm):
    writer = await writing(make_swarm, model=replace(MODEL, positions=16))
    await writer.write(6)
    assert len(writer.ids) == 17
    # The text keeps three quarters of 16 tokens, so that there is room for the next ones.
    wanted = writer.alone(3, first=17 - 12)
    assert await writer.write(3) == wanted
    assert writer.session.begun == 2


async def test_keys_and_values_grow_old(make_swarm):
    writer = await writing(make_swarm)
    epochs = iter([3, 3, 3 + text_session.MOST_STALE - 1, 3 + text_session.MOST_STALE, 90, 90, 90])
    writer.session._version = lambda: next(epochs)
    await writer.write(3)
    assert writer.session.begun == 1
    await writer.write(1)
    assert writer.session.begun == 2


async def test_the_next_tokens_may_come_before_the_last_ones_are_passed_on(make_swarm, monkeypatch):
    """A hop that hears late that its output was taken is ready for the text's next tokens all the
    same."""
    writer = await writing(make_swarm)
    onward = writer.swarm.pipelines["s1a"].forward_requests._onward
    real = onward.pass_on
    late = asyncio.Event()

    async def pass_on(*how, **more):
        await real(*how, **more)
        await late.wait()

    onward.pass_on = pass_on
    wanted = writer.alone(3)
    assert await writer.write(3) == wanted
    assert writer.session.begun == 1
    late.set()


async def test_a_text_is_known_by_the_hop_that_brings_it(make_swarm):
    """Another peer cannot continue the text, whatever number it guesses."""
    writer = await writing(make_swarm)
    await writer.write(1)
    stage = writer.swarm.pipelines["s1a"]
    [key] = stage.texts._texts
    assert key == TextKey(PeerId("s0a"), writer.session._kept.number, PeerId("s0a"))
    past = len(PROMPT)
    now = stage.clock.now()
    for other in (key._replace(before=PeerId("s2a")), key._replace(origin=PeerId("s2a"))):
        assert stage.texts.take(other, past, 1, now) is None
    assert stage.texts.take(key, past, 1, now) is not None


async def test_only_a_hop_of_the_text_may_call_it_lost(make_swarm):
    writer = await writing(make_swarm, replicas=2)
    pipeline = writer.pipeline
    hops = (Hop(1, PeerId("s1a")), Hop(2, PeerId("s2a")), Hop(3, PeerId("s3a")))
    requests = pipeline.forward_requests
    note = pb.LostNote(index=7, purpose=pb.GENERATE)
    with requests._awaiting(pb.GENERATE, 7, hops, (1, 1, 16)) as back:
        assert not requests.lost(PeerId("s1b"), note)
        assert not back.done()
        assert requests.lost(PeerId("s3a"), note)
        with pytest.raises(PeerFault):
            await back
        assert not requests.lost(PeerId("s3a"), note)
    assert not requests.lost(PeerId("s3a"), note)


async def test_a_hop_cannot_be_made_to_call_the_text_of_another_peer_lost(make_swarm):
    """A hop reports to the origin that a frame names, and any peer can send it a frame."""
    writer = await writing(make_swarm)
    wanted = writer.alone(1)
    stages = writer.swarm.pipelines
    requests = writer.pipeline.forward_requests
    heard = []
    all_told = asyncio.Event()
    real = requests.lost

    def lost(caller, note):
        heard.append(real(caller, note))
        if len(heard) == 8:
            all_told.set()
        return heard[-1]

    requests.lost = lost
    gate = threading.Event()
    holding = await held(stages["s3a"].host.device, gate)
    try:
        task = asyncio.ensure_future(writer.write(1))
        journey = [(0, "s0a"), (1, "s3a"), (2, "s2a"), (3, "s1a"), (0, "s0a")]
        hops = tuple(Hop(s, PeerId(p)) for s, p in journey)
        output = encode(torch.zeros(16), "fp32")
        liar = stages["s3a"]
        for index in range(8):
            claim = Claim(0, "", index, hops, 2)
            text = pb.TextTurn(text=index)
            how = (claim, pb.GENERATE, 0.001, (1, 1, 16), output, liar.shape)
            await liar.hops.calls.stream(
                PeerId("s2a"), Direction.FORWARD, frames(*how, text=text), 64, lambda seconds: None
            )
        async with asyncio.timeout(60):
            await all_told.wait()
    finally:
        gate.set()
    await holding
    assert await task == wanted
    assert writer.session.begun == 1
    assert not any(heard)


async def test_a_text_that_nobody_waits_for_any_more_is_nobodys_trouble(make_swarm):
    writer = await writing(make_swarm)
    stages = writer.swarm.pipelines
    said = asyncio.Queue[tuple[str, str, str]]()
    noted = list[int]()

    def emit(kind: str, text: str, level: str = "info", **fields: object) -> None:
        said.put_nowait((kind, level, text))

    async def noting(origin: PeerId, index: int, reason: str) -> None:
        noted.append(index)

    for name in ("s1a", "s2a", "s3a"):
        writer.swarm.ears[name].emit = emit
    stages["s3a"].forward_requests._visits._notes.tell_text_lost = noting
    device = stages["s3a"].host.device
    gate = threading.Event()
    holding = await held(device, gate)
    try:
        task = asyncio.ensure_future(writer.write(1))
        async with asyncio.timeout(60):
            while not device._tokens:  # noqa: ASYNC110 - a queued job is no event
                await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(60):
            while writer.pipeline.forward_requests._waiting:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
    finally:
        gate.set()
    await holding
    async with asyncio.timeout(60):
        # The last hop, and the one before, which has brought it the text.
        lost = [await said.get() for _ in range(2)]
    assert [(kind, level) for kind, level, _ in lost] == [("errand-lost", "debug")] * 2
    assert all("nobody waits for this" in text for *_, text in lost)
    assert not noted
    with pytest.raises(asyncio.CancelledError):
        await task


# Bounds
# ------------------------------------------------------------


def table(limit: int = 1000) -> TextTable:
    return TextTable(limit, lambda tokens: 10 * tokens)


def key(number: int, origin: str = "a") -> TextKey:
    return TextKey(PeerId(origin), number, PeerId(origin))


def turn(held: TextTable, number: int, past: int, count: int, now: float, origin: str = "a"):
    """Take a whole turn; returns the text's cache, or None."""
    found = held.take(key(number, origin), past, count, now)
    if found is not None:
        found.advance(count)
        held.done(key(number, origin), found, now)
    return found


def test_texts_are_bounded_in_bytes_and_the_idle_one_goes_first():
    held = table()
    assert turn(held, 1, 0, 60, now=0.0)
    assert turn(held, 2, 0, 30, now=1.0)
    assert held.used == 900
    assert turn(held, 3, 0, 20, now=2.0) is None, "both are in use"
    assert turn(held, 3, 0, 20, now=texts.YIELD_S + 0.5)
    assert held.used == 500
    assert turn(held, 1, 60, 1, now=texts.YIELD_S + 0.6) is None, "the one used longest ago went"
    assert turn(held, 2, 30, 1, now=texts.YIELD_S + 0.6)
    assert turn(held, 4, 0, 101, now=1e6) is None
    assert held.used == 0, "all were idle"


def test_a_text_that_outgrows_the_memory_is_dropped():
    held = table()
    assert turn(held, 1, 0, 90, now=0.0)
    assert turn(held, 1, 90, 20, now=0.0) is None
    assert (held.used, len(held)) == (0, 0)


def test_a_peer_has_so_many_texts_and_its_own_oldest_one_goes(monkeypatch):
    monkeypatch.setattr(texts, "EACH", 2)
    held = table()
    assert turn(held, 1, 0, 1, 0.0, "other")
    for number in (1, 2, 3):
        assert turn(held, number, 0, 1, number, "a")
    assert turn(held, 1, 1, 1, 4.0) is None
    assert turn(held, 2, 1, 1, 4.0)
    assert turn(held, 1, 1, 1, 4.0, "other")


def test_guests_have_a_part_of_the_memory():
    held = table()
    assert held.take(key(1), 0, 26, 0.0, guest=True) is None
    assert held.take(key(1), 0, 20, 0.0, guest=True)
    assert held.take(key(2), 0, 6, 0.0, guest=True) is None
    assert held.take(key(3), 0, 80, 0.0)
    held.drop(key(1))
    assert held.take(key(2), 0, 20, 0.0, guest=True)


def test_a_guest_makes_no_text_of_a_member_give_way():
    held = table()
    assert turn(held, 1, 0, 70, now=0.0)
    guest = held.take(key(2, "guest"), 0, 20, 1.0, guest=True)
    assert guest
    guest.advance(20)
    held.done(key(2, "guest"), guest, 1.0)
    late = texts.YIELD_S + 2.0
    assert held.take(key(3, "other"), 0, 26, late, guest=True) is None, "more than their part"
    assert held.take(key(3, "other"), 0, 20, late, guest=True), "in the place of another guest"
    assert turn(held, 1, 70, 1, now=late)


def test_whoever_names_another_origin_ends_none_of_its_texts(monkeypatch):
    """A hop names the text's origin; only the hop's own key is proven."""
    monkeypatch.setattr(texts, "EACH", 2)
    held = table()
    for number in (1, 2):
        assert turn(held, number, 0, 1, 0.0, "victim")
    for number in range(5):
        assert held.take(TextKey(PeerId("victim"), number, PeerId("b")), 0, 1, 1.0)
    assert turn(held, 1, 1, 1, 2.0, "victim")
    assert turn(held, 2, 1, 1, 2.0, "victim")


def test_a_text_in_a_turn_has_no_other_and_stays():
    held = table()
    first = held.take(key(1), 0, 50, 0.0)
    assert held.take(key(1), 0, 50, 0.0) is None
    assert turn(held, 2, 0, 60, now=1e6) is None, "there is no room beside it"
    held.done(key(1), first, 1e6)
    assert turn(held, 2, 0, 60, now=2e6)


def test_a_text_that_has_other_tokens_than_said_begins_again():
    held = table()
    assert turn(held, 1, 0, 5, 0.0)
    assert turn(held, 1, 6, 1, 0.0) is None
    assert turn(held, 1, 5, 1, 0.0) is None, "it is gone"
    assert turn(held, 1, 0, 5, 0.0)
    held.expire(texts.IDLE_S)
    assert len(held) == 0


# Passes over several texts
# ------------------------------------------------------------


@pytest.fixture
def device():
    made = DeviceThread()
    yield made
    made.close()


async def held(device: DeviceThread, gate: threading.Event) -> asyncio.Future[object]:
    """A job that runs until ``gate`` is set."""
    busy = threading.Event()
    holding = asyncio.ensure_future(device.run(lambda: busy.set() or gate.wait()))
    await asyncio.to_thread(busy.wait)
    return holding


async def together(device: DeviceThread, batcher: Batcher, items: list) -> list:
    """Results or errors of items that all wait before the device is free."""
    gate = threading.Event()
    holding = await held(device, gate)
    running = [asyncio.ensure_future(batcher.run(item, Priority.TOKEN)) for item in items]
    await asyncio.sleep(0)
    assert len(batcher._waiting[Priority.TOKEN]) == len(items)
    gate.set()
    await holding
    return await asyncio.gather(*running, return_exceptions=True)


async def test_steps_that_wait_at_the_same_time_are_one_pass(device):
    passes = []
    batcher = Batcher(device, lambda x: passes.append(list(x)) or [i * 2 for i in x], int, 6)
    assert await together(device, batcher, [1, 2, 3, 4, 9]) == [2, 4, 6, 8, 18]
    assert passes == [[1, 2, 3], [4], [9]], "at most 6 together, and a large one alone"


async def test_one_that_fails_does_not_spoil_the_others(device):
    def compute(items):
        if 3 in items:
            raise ValueError("three")
        return [KeyError("two") if i == 2 else i for i in items]

    found = await together(device, Batcher(device, compute, int, 100), [1, 2, 3, 4])
    assert found[0] == 1
    assert found[3] == 4
    assert [type(found[1]), type(found[2])] == [KeyError, ValueError]


async def test_items_of_a_lower_priority_do_not_go_first(device):
    """Strangers bring texts too, and those wait for training."""
    gate = threading.Event()
    order = []
    batcher = Batcher(device, lambda x: order.append(list(x)) or list(x), lambda item: 1, 2)
    holding = await held(device, gate)
    running = [
        asyncio.ensure_future(batcher.run(item, priority))
        for item, priority in (
            *((number, Priority.FORWARD_ONLY) for number in range(3)),
            (3, Priority.TOKEN),
        )
    ]
    await asyncio.sleep(0)
    training = asyncio.ensure_future(device.run(lambda: order.append("b"), Priority.VISIT))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*running) == [0, 1, 2, 3]
    await asyncio.gather(holding, training)
    assert order == [[3], "b", [0, 1], [2]]


async def test_nobody_waits_for_a_device_that_is_closed():
    device = DeviceThread()
    gate = threading.Event()
    batcher = Batcher(device, list, int, 100)
    holding = await held(device, gate)
    waiting = asyncio.ensure_future(batcher.run(1, Priority.TOKEN))
    await asyncio.sleep(0)
    device.shutdown(wait=False, cancel_futures=True)
    gate.set()
    await holding
    await asyncio.wait([waiting], timeout=10)
    assert waiting.cancelled()
    device.close()


async def test_the_device_hears_of_an_error_of_texts():
    """A GPU may be lost in a pass over texts too."""
    told: list[BaseException] = []
    device = DeviceThread(failed=told.append)
    try:
        batcher = Batcher(device, lambda items: [1 / 0], int, 100)
        with pytest.raises(ZeroDivisionError) as caught:
            await batcher.run(1, Priority.TOKEN)
        await device.run(lambda: None)
        assert told == [caught.value]
    finally:
        device.close()


async def test_a_long_job_lets_tokens_in_and_nothing_else(device):
    order = []

    def long():
        order.append("begins")
        for priority in (Priority.COMMIT, Priority.TOKEN, Priority.VISIT, Priority.TOKEN):
            device.enqueue(priority, partial(order.append, priority.name))
        device.breathe()
        order.append("ends")

    await device.run(long)
    await device.run(lambda: None)
    assert order == ["begins", "TOKEN", "TOKEN", "ends", "COMMIT", "VISIT"]


@pytest.mark.parametrize("recompute", [False, True])
def test_training_pauses_between_layers_and_computes_the_same(recompute):
    torch.manual_seed(0)
    model = replace(MODEL, layers=4)
    x = torch.randn(2, 8, 16)
    grads = []
    for pausing in (False, True):
        stage = build(model, 1, 1)
        stage.recompute = recompute
        at = []
        if pausing:
            cache = TextCache()

            def pause(stage=stage, at=at, cache=cache):
                at.append(torch.is_grad_enabled())
                with torch.no_grad():
                    stage.extend(torch.randn(1, 16), [Turn(cache, 1)])

            stage.pause = pause
        given = x.clone().requires_grad_()
        stage(given).square().sum().backward()
        grads.append([given.grad, *(p.grad for p in stage.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert at == [True] * 4 + [False] * 4, "before each layer, forward and backward"


def test_passes_over_texts_alone_are_multiplied_in_the_ways_of_few_rows(monkeypatch, device):
    """And give what other ways give; a forward in training has none of them."""
    rows: list[int] = []
    by_onednn = products._PRODUCTS["onednn"]

    def multiply(x, weight, bias):
        rows.append(x.numel() // x.shape[-1])
        return by_onednn(x, weight, bias)

    stage = build(replace(MODEL, layers=2), 1, 1)
    math = StageMath(stage, "fp32")

    def written() -> list[torch.Tensor]:
        caches = [TextCache(), TextCache()]
        tokens = torch.linspace(-1, 1, 32).reshape(2, 1, 16)
        found: list[torch.Tensor] = []
        for _ in range(3):
            inputs = [read(token[None]) for token in tokens]
            steps = [
                TextStep(cache, cache.length, 1, input=x)
                for cache, x in zip(caches, inputs, strict=True)
            ]
            for data in math.extend_texts(steps):
                assert not isinstance(data, Exception), data
                found.append(torch.frombuffer(bytearray(data), dtype=torch.float32))
        return found

    plain = written()
    monkeypatch.setitem(products._PRODUCTS, "onednn", multiply)
    monkeypatch.setattr(products, "_few", {1: "onednn", 4: "onednn"})
    torch.testing.assert_close(written(), plain)
    assert set(rows) == {2}
    rows.clear()
    stage(torch.randn(1, 2, 16))
    assert not rows


def test_a_text_between_two_layers_takes_no_gradient_from_bf16_training(device):
    """Autocast keeps bf16 copies of weights. One that was made for a text would have none."""
    model = replace(MODEL, layers=2)
    stage = build(model, 1, 1)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    math = StageMath(stage, "fp32", autocast)
    cache = TextCache()

    def pause():
        token = read(torch.zeros(1, 1, 16))
        [found] = math.extend_texts([TextStep(cache, cache.length, 1, input=token)])
        assert not isinstance(found, Exception), found

    math.pausing(pause)
    with autocast():
        loss = stage(torch.randn(2, 8, 16)).square().sum()
    found = torch.autograd.grad(loss, list(stage.parameters()), allow_unused=True)
    assert all(g is not None for g in found)
    assert cache.length == 3, "twice in forward, once in backward"


def test_the_memory_that_is_set_aside_is_what_a_text_takes():
    math = StageMath(build(MODEL, 3, 1), "fp32")
    assert math.text_bytes(GROWTH + 1) == text_bytes(MODEL, 1, GROWTH + 1)


@pytest.fixture
def patient(monkeypatch):
    """An item waits for others as long as a test takes."""
    monkeypatch.setattr("node.pipeline.forward_only.batcher.PATIENCE_S", 600.0)
    monkeypatch.setattr("node.pipeline.forward_only.batcher.PATIENCE", 1e9)


async def test_the_next_tokens_of_texts_under_way_wait_for_each_other(device, patient):
    passes = []
    batcher = Batcher(
        device, lambda x: passes.append(list(x)) or list(x), lambda x: 1, 9, lambda priority: 3
    )
    assert await batcher.run(0, Priority.TOKEN) == 0, "nobody knows yet how long a pass takes"
    running = [asyncio.ensure_future(batcher.run(item, Priority.TOKEN)) for item in (1, 2)]
    await device.run(lambda: None)
    assert passes == [[0]]
    assert await batcher.run(3, Priority.TOKEN) == 3
    assert await asyncio.gather(*running) == [1, 2]
    assert passes == [[0], [1, 2, 3]]


async def test_a_token_waits_for_a_part_of_a_pass_only(device, monkeypatch):
    monkeypatch.setattr("node.pipeline.forward_only.batcher.PATIENCE_S", 0.001)
    batcher = Batcher(device, list, lambda x: 1, 9, lambda priority: 3)
    assert [await batcher.run(item, Priority.TOKEN) for item in range(3)] == [0, 1, 2]


async def test_a_prompt_waits_for_nobody(device, patient):
    batcher = Batcher(device, list, int, 100, lambda priority: 3)
    assert await batcher.run(1, Priority.TOKEN) == 1
    assert await batcher.run(64, Priority.TOKEN) == 64


async def test_a_waiting_batch_is_cancelled_when_the_device_is_closed(patient):
    device = DeviceThread()
    batcher = Batcher(device, list, lambda x: 1, 9, lambda priority: 2)
    await batcher.run(0, Priority.TOKEN)
    waiting = asyncio.ensure_future(batcher.run(1, Priority.TOKEN))
    await asyncio.sleep(0)
    device.close()
    batcher._release(Priority.TOKEN)
    await asyncio.wait([waiting], timeout=10)
    assert waiting.cancelled()


def test_texts_with_a_turn_lately_are_under_way():
    table = TextTable(1000, lambda tokens: tokens)
    one, two = (TextKey(PeerId("a"), number, PeerId("b")) for number in (1, 2))
    cache = table.take(one, 0, 5, 0.0)
    assert cache is not None
    assert table.under_way(60.0) == 1, "its turn takes long"
    table.done(one, cache, 60.0)
    table.take(two, 0, 5, 60.0)
    assert table.under_way(60.0) == 2
    assert table.under_way(60.0 + 2 * LATELY_S) == 1
    assert table.under_way(60.0, guests=True) == 0


@pytest.mark.parametrize(
    ("stages", "under_way", "together"),
    [(1, 1, 1), (1, 4, 4), (2, 1, 1), (2, 4, 2), (2, 5, 3), (3, 4, 2), (16, 4, 1)],
)
async def test_texts_go_in_as_many_passes_as_there_are_stages(
    device, stages: int, under_way: int, together: int
):
    table = TextTable(1000, lambda tokens: tokens)
    for number in range(under_way):
        assert table.take(TextKey(PeerId("a"), number, PeerId("b")), 0, 5, 0.0) is not None
    host = SimpleNamespace(device=device, clock=VirtualClock())
    shape = FrameShape(1, 8, MODEL.d_model, "fp32", stages)
    jobs = ForwardJobs(cast(Any, host), StageMath(build(MODEL, 1, 1), "fp32"), shape, table)
    assert jobs._company(Priority.TOKEN) == together
    assert jobs._company(Priority.FORWARD_ONLY) == 0, "guests are counted apart"


def test_the_first_layer_is_measured_with_a_text_of_its_own():
    stage = build(DEEP, 1, 1)
    cache = TextCache()
    x = torch.zeros(3, DEEP.d_model)
    with torch.no_grad():
        measured = stage.extend_first_layer(3)
        cos, sin = stage.rope.beside([Turn(cache, 3)], x)
        first, *others = stage.model.layers.values()
        expected = first.extend(x, cos, sin, 0, [Turn(cache, 3)])
    assert others, "one of several"
    assert torch.equal(measured, expected)


def test_the_threads_of_a_pass_are_chosen_by_its_tokens(monkeypatch):
    passes: list[int] = []

    class Spy(PassThreads):
        def taken(self, rows: int):
            passes.append(rows)
            return super().taken(rows)

    monkeypatch.setattr("node.pipeline.visit_buffers.PassThreads", Spy)
    math = StageMath(build(MODEL, 3, 1), "fp32")
    steps = [
        TextStep(TextCache(), 0, count, input=read(torch.randn(1, count, 16))) for count in (2, 3)
    ]
    assert all(isinstance(found, memoryview) for found in math.extend_texts(steps))
    assert passes == [5]
