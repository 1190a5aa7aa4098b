"""Messages that a peer may not send: each is refused before its tensor is read, and counted when no
honest peer would send it."""

import asyncio

import grpc
import pytest

from node.core.ids import PeerId
from node.pipeline.events import FreeGraph, Key
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.giver import Giver
from node.pipeline.hops.streams import OpenStreams
from protos import pipeline_pb2 as pb
from protos import tensor_pb2
from protos.pipeline_pb2_grpc import PipelineStub
from testbed.fakes.call_context import CallContext
from tests.pipeline.conftest import begun
from tests.transport.conftest import until


def head(plan, **changes):
    fields = {
        "epoch": plan.epoch,
        "plan_hash": plan.hash,
        "index": 0,
        "purpose": pb.TRAIN,
        "journey": route(*((h.stage, h.peer) for h in plan.paths[0].journey)),
        "position": 1,
        "tensor": tensor([4, 8, 16], 2048),
        "deadline_s": 5.0,
    }
    return pb.FrameHead(**{**fields, **changes})


def tensor(shape, nbytes, wire=tensor_pb2.FP32):
    return tensor_pb2.TensorHead(shape=shape, wire=wire, nbytes=nbytes)


async def answers(swarm, sender, receiver, messages, method="Forward"):
    channel = await swarm.net.transports[sender].channel(receiver)
    call = getattr(PipelineStub(channel), method)(messages, timeout=10)
    return [(r.verdict, r.reason) async for r in call]


async def answers_to_head(swarm, plan, sender="s0a", receiver="s1a", method="Forward", **changes):
    """Answers to a stream that consists of a head alone."""
    return await answers(swarm, sender, receiver, [pb.Frame(head=head(plan, **changes))], method)


async def verdicts(*asked):
    """Verdicts of :func:`answers`."""
    return [verdict for verdict, _ in await answers(*asked)]


@pytest.fixture
async def swarm(make_swarm):
    return await make_swarm().fill(replicas=2, plan_wait_s=0.05)


@pytest.fixture
def plan(swarm):
    return swarm.adopt(swarm.plan(2, choose=lambda i, s: "a"))


EVALUATE = {"purpose": pb.EVALUATE, "plan_hash": "", "epoch": 0}
HOPS = [(0, "s0a"), (1, "s1a"), (2, "s2a"), (3, "s3a"), (0, "s0a")]


def route(*hops):
    return [pb.PathHop(stage=s, peer=p) for s, p in hops]


OVER_REPLICA_B = route(HOPS[0], HOPS[1], (2, "s3b"), *HOPS[3:])
MISFITS = [
    ("s0a", "s1a", {"epoch": 2}, pb.REFUSED, "is over here"),
    ("s0a", "s1a", {"epoch": 4}, pb.BUSY, ""),
    ("s0a", "s1a", {"plan_hash": "0" * 64}, pb.BUSY, "another plan"),
    ("s0a", "s1a", {"index": 9}, pb.REFUSED, "no such micro-batch"),
    ("s0a", "s1a", {"position": 2}, pb.REFUSED, "not for me"),
    (
        "s0a",
        "s1a",
        {"journey": route(*HOPS[:2], HOPS[3], HOPS[2], HOPS[4])},
        pb.REFUSED,
        "not the plan's",
    ),
    ("s0a", "s1a", {"journey": OVER_REPLICA_B}, pb.REFUSED, "not the plan's"),
    (
        "s0a",
        "s1a",
        {"journey": route(HOPS[0], HOPS[1], (2, ""), *HOPS[3:])},
        pb.REFUSED,
        "leaves out too much",
    ),
    ("s2a", "s1a", {}, pb.REFUSED, "not from the hop before it"),
    ("s1b", "s1a", {}, pb.REFUSED, "not from the hop before it"),
    ("s3a", "s0a", {"position": 4}, pb.REFUSED, "not under way here"),
]


async def test_a_head_that_does_not_fit_the_plan_is_refused(swarm, plan):
    for sender, receiver, changes, verdict, reason in MISFITS:
        ((said, why),) = await answers_to_head(swarm, plan, sender, receiver, **changes)
        assert (said, reason in why) == (verdict, True), (sender, changes, why)
    assert swarm.pipelines["s1a"].stash.used == 0
    assert not swarm.net.transports["s1a"].faults


IMPOSSIBLE = [
    {"tensor": tensor([4, 8, 17], 2176)},
    {"tensor": tensor([1 << 40, 8, 16], (1 << 40) * 512)},
    {"tensor": tensor([4, 8, 16], 1 << 50)},
    {"tensor": tensor([4, 8, 16], 1024, tensor_pb2.BF16)},
    {"purpose": 0},
    {"purpose": 9},
    {"position": 5},
    {"journey": route(*HOPS[:2])},
    {"journey": route(*HOPS[:2], HOPS[1], HOPS[3], HOPS[4])},
    {"journey": route(*HOPS[:4], (0, "s0b"))},
    {"journey": route((0, ""), *HOPS[1:4], (0, ""))},
    {"journey": route(HOPS[0], *[(s, "x" * 1000) for s in (1, 2, 3)], HOPS[4])},
    {"deadline_s": float("nan")},
    {"deadline_s": -1.0},
    {"plan_hash": ""},
    {"text": pb.TextTurn(text=1)},
    {
        "purpose": pb.GENERATE,
        "plan_hash": "",
        "tensor": tensor([1, 8, 16], 512),
        "text": pb.TextTurn(text=1, kept=(1 << 32) - 1),
    },
]


async def test_an_impossible_head_is_refused_and_counted(swarm, plan):
    for i, changes in enumerate(IMPOSSIBLE):
        ((said, _),) = await answers_to_head(swarm, plan, **changes)
        assert said == pb.REFUSED, changes
        assert [peer for peer, _, _ in swarm.net.transports["s1a"].faults] == ["s0a"] * (i + 1), (
            changes
        )
    assert swarm.pipelines["s1a"].stash.used == 0


ROOM_WAIT = "node.pipeline.hops.admission.ROOM_WAIT"


async def without_room(make_swarm, plan_wait_s):
    """A swarm in which the stash of s1a is full, a patient frame to s1a, and the plan."""
    swarm, plan = await begun(make_swarm().fill(replicas=1, plan_wait_s=plan_wait_s), 2)
    stash = swarm.pipelines["s1a"].stash
    stash.charge(stash.limit)
    return swarm, [pb.Frame(head=head(plan, patient=True)), pb.Frame(chunk=bytes(2048))], plan


async def test_a_patient_frame_waits_for_room_and_no_longer_than_it_may(make_swarm, monkeypatch):
    monkeypatch.setattr(ROOM_WAIT, 0.0)
    swarm, messages, plan = await without_room(make_swarm, plan_wait_s=60.0)
    impatient = [pb.Frame(head=head(plan)), *messages[1:]]
    assert await answers(swarm, "s0a", "s1a", impatient) == [(pb.BUSY, "my stash is full")]
    assert await answers(swarm, "s0a", "s1a", messages) == [(pb.BUSY, "my stash is full")]
    monkeypatch.setattr(ROOM_WAIT, 1.0)
    swarm, messages, _ = await without_room(make_swarm, plan_wait_s=0.05)
    s1a = swarm.pipelines["s1a"]
    waiting = asyncio.ensure_future(verdicts(swarm, "s0a", "s1a", messages))
    await asyncio.sleep(0.3)
    s1a.stash.charge(-s1a.stash.limit)
    assert (await waiting)[0] == pb.ACCEPTED


async def test_a_stream_without_head_or_with_too_much_is_refused(swarm, plan):
    streams = [
        [pb.Frame(chunk=b"abc")],
        *(
            [pb.Frame(head=head(plan)), *(pb.Frame(chunk=bytes(n)) for n in chunks)]
            for chunks in ([2049], [2000, 49], [0])
        ),
    ]
    for messages in streams:
        assert await verdicts(swarm, "s0a", "s1a", messages) == [pb.REFUSED], messages
        assert swarm.pipelines["s1a"].stash.used == 0
    assert len(swarm.net.transports["s1a"].faults) == len(streams)


async def test_a_duplicate_is_answered_without_computing_again(swarm, plan):
    await swarm.run(plan, counted=True)
    computed = dict(swarm.ears["s1a"].seconds)["compute"]
    again = [pb.Frame(head=head(plan)), pb.Frame(chunk=bytes(2048))]
    for sender, method in (("s0a", "Forward"), ("s2a", "Backward")):
        assert await verdicts(swarm, sender, "s1a", again, method) == [pb.ACCEPTED, pb.DONE]
    other = [pb.Frame(head=head(plan, journey=route(*HOPS[:2], (2, "s2b"), *HOPS[3:])))]
    assert await verdicts(swarm, "s2b", "s1a", other, "Backward") == [pb.DONE]
    assert swarm.ears["s1a"].seconds["compute"] == computed
    assert (await swarm.pipelines["s1a"].take_gradients(3))[1] == 64
    await swarm.check(plan)


async def test_only_next_stage_replicas_fetch_before_the_gradient(swarm, plan):
    await swarm.run(plan)
    wanted = pb.FetchInput(epoch=3, plan_hash=plan.hash, index=0, position=2)
    for caller, code in (
        ("s3a", grpc.StatusCode.NOT_FOUND),
        ("s2b", grpc.StatusCode.ALREADY_EXISTS),
    ):
        stub = PipelineStub(await swarm.net.transports[caller].channel("s1a"))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Fetch(wanted, timeout=5).read()
        assert failed.value.code() is code


def giving(pipeline, hop_s=5.0):
    """Another giver of the outputs of `pipeline`, with `hop_s` for each, and its streams."""
    deadlines = Deadlines(pipeline.clock, pipeline.host.transport.patience, hop_s)
    streams = OpenStreams(deadlines)
    parts = (pipeline.host.transport, pipeline.hops.driver, pipeline.stash, pipeline.shape, streams)
    return Giver(*parts), streams


async def test_an_input_is_sent_whole_though_it_is_freed_meanwhile(swarm, plan):
    s1a = swarm.pipelines["s1a"]
    key = Key(3, 0, 1)
    sent = []
    swarm.net.mute(PeerId("s2a"))
    running = asyncio.ensure_future(swarm.run(plan))
    await until(lambda: key in s1a.machine.visits and s1a.stash.get(key).output is not None, 10)

    def read(frame):
        sent.append(frame)
        s1a.hops.driver.carry_out([FreeGraph(key)])

    wanted = pb.FetchInput(epoch=3, plan_hash=plan.hash, index=0, position=2)
    giver, _ = giving(s1a)
    await giver.give(PeerId("s2b"), wanted, CallContext("s2b", read))
    assert sum(len(frame.chunk) for frame in sent) == 2048
    swarm.adopt(swarm.plan(1, epoch=4))
    await running


async def test_a_stranger_cannot_call_a_micro_batch_lost(swarm, plan):
    await swarm.add("s3x")
    stub = PipelineStub(await swarm.net.transports["s3x"].channel("s0a"))
    assert not (
        await stub.Lost(pb.LostNote(epoch=3, plan_hash=plan.hash, index=0, reason="x"), timeout=5)
    ).accepted


async def test_only_the_origin_names_who_counts(swarm, plan):

    async def name(caller, *indices, **changes):
        stub = PipelineStub(await swarm.net.transports[caller].channel("s1a"))
        note = pb.CountedNote(**{"epoch": 3, "plan_hash": plan.hash, "indices": indices, **changes})
        return (await stub.Counted(note, timeout=5)).accepted

    for caller, indices, changes, accepted in (
        ("s0a", (0, 1), {}, True),
        ("s2a", (0,), {}, False),
        ("s0a", (9,), {}, False),
        ("s0a", (0, 0, 0), {}, False),
        ("s0a", (0,), {"epoch": 2}, False),
        ("s0a", (0,), {"plan_hash": "0" * 64}, False),
    ):
        assert await name(caller, *indices, **changes) is accepted, (caller, indices, changes)


async def test_a_tensor_that_is_not_finite_is_refused_before_storage(swarm, plan):
    bad = b"\x00\x00\xc0\x7f" + bytes(2044)
    for changes in ({}, EVALUATE):
        sent = [pb.Frame(head=head(plan, **changes)), pb.Frame(chunk=bad)]
        assert await verdicts(swarm, "s0a", "s1a", sent) == [pb.REFUSED]
    assert [(peer, weight) for peer, _, weight in swarm.net.transports["s1a"].faults] == [
        ("s0a", 1.0)
    ] * 2
    assert swarm.pipelines["s1a"].stash.used == 0
    assert not swarm.pipelines["s1a"].machine.visits


async def test_forward_only_frames_beyond_the_runs_limits_are_refused(swarm, plan):
    shapes = ([5, 8, 16], [4, 9, 16], [4, 8, 15], [4, 8], [0, 8, 16])
    nobody_there = {"journey": route(*HOPS[:2], (2, ""), *HOPS[3:])}
    for changes in (nobody_there, *({"tensor": tensor(shape, 4)} for shape in shapes)):
        ((said, _),) = await answers_to_head(swarm, plan, **EVALUATE, **changes)
        assert said == pb.REFUSED, changes
    assert await answers_to_head(swarm, plan, "s3a", "s0a", **EVALUATE, position=4) == [
        (pb.REFUSED, "nobody waits for this")
    ]


async def test_only_the_asked_path_may_bring_an_evaluation_home(swarm, plan):
    forward_requests = swarm.pipelines["s0a"].forward_requests
    path = plan.paths[0]
    swarm.net.mute("s3a")
    swarm.net.mute("s3b")
    going = asyncio.ensure_future(forward_requests.go(pb.EVALUATE, path.hops, swarm.batch(path)[0]))
    await until(lambda: forward_requests._waiting, 10)
    forged = EVALUATE | {"index": 1, "journey": route(*HOPS[:3], (3, "s1b"), HOPS[4])}
    assert await answers_to_head(swarm, plan, "s1b", "s0a", position=4, **forged) == [
        (pb.REFUSED, "only a replica of the last stage may bring it")
    ]
    going.cancel()


async def fill(swarm, caller, frame_head, calls, used):
    """Begin `calls` calls to s1a that never send their tensor, until `used` bytes are reserved."""

    async def no_tensor():
        yield pb.Frame(head=frame_head)
        await asyncio.sleep(60)

    channel = await swarm.net.transports[caller].channel("s1a")
    begun = [PipelineStub(channel).Forward(no_tensor(), timeout=60) for _ in range(calls)]
    await until(lambda: swarm.pipelines["s1a"].stash.used >= used, 10)
    return begun


async def test_guests_leave_members_half_of_the_forward_only_work(swarm, plan):
    stash = swarm.pipelines["s1a"].stash
    stash.limit = 4 * 2 * 2048
    await swarm.net.transport("guest").start()
    home = (0, "guest")
    guest = head(plan, journey=route(home, *HOPS[1:4], home), **EVALUATE)
    await fill(swarm, "guest", guest, 1, stash.limit / 4)
    enough = [(pb.BUSY, "forward-only work has its share of the stash")]
    assert await answers(swarm, "guest", "s1a", [pb.Frame(head=guest)]) == enough
    passed_on = EVALUATE | {"journey": route(home, HOPS[2], HOPS[1], HOPS[3], home)}
    assert await answers_to_head(swarm, plan, "s2a", position=2, **passed_on) == enough
    ((_, member),) = await answers_to_head(swarm, plan, **EVALUATE)
    assert "early" in member, "there is room for it"


@pytest.mark.parametrize(("way", "sender"), [("Forward", "s0a"), ("Backward", "s2a")])
async def test_of_one_tensor_from_one_peer_two_streams_are_read(swarm, plan, way, sender):
    """Each stream is charged while it is read; beyond two the oldest gives way."""
    s1a = swarm.pipelines["s1a"]
    stub = PipelineStub(await swarm.net.transports[sender].channel("s1a"))
    calls = []
    for _ in range(5):
        calls.append(getattr(stub, way)(timeout=60))
        await calls[-1].write(pb.Frame(head=head(plan)))
        await calls[-1].write(pb.Frame(chunk=bytes(1024)))
        await until(lambda: s1a.stash.used == min(2, len(calls)) * s1a.hops.planned.cost(0), 10)
    for call in calls[:3]:
        assert [r.verdict async for r in call] == [pb.REFUSED]
    for call in calls[3:]:
        call.cancel()
    await until(lambda: s1a.stash.used == 0, 10)
    assert not swarm.net.transports["s1a"].faults


async def test_of_streams_that_come_in_a_burst_two_are_read(swarm):
    """The older ones are ended although none of them had time to end by itself."""
    _, streams = giving(swarm.pipelines["s1a"])
    ended = []

    async def read(number):
        try:
            async with streams.newest("tensor"):
                await asyncio.sleep(60)
        except TimeoutError:
            ended.append(number)

    going = [asyncio.ensure_future(read(number)) for number in range(5)]
    await until(lambda: len(ended) == 3, 30)
    assert ended == [0, 1, 2]
    for task in going:
        task.cancel()


async def test_an_input_that_is_not_read_in_time_is_let_go(swarm, plan):
    s1a = swarm.pipelines["s1a"]
    key = Key(3, 0, 1)
    swarm.net.mute(PeerId("s2a"))
    swarm.net.mute(PeerId("s2b"))
    running = asyncio.ensure_future(swarm.run(plan))
    await until(lambda: key in s1a.machine.visits and s1a.stash.get(key).output is not None, 10)
    giver, streams = giving(s1a, hop_s=0.05)
    call = CallContext("s2b")
    wanted = pb.FetchInput(epoch=3, plan_hash=plan.hash, index=0, position=2)
    await giver.give(PeerId("s2b"), wanted, call)
    assert call.aborted == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert not len(streams)
    swarm.adopt(swarm.plan(1, epoch=4))
    await running


async def test_one_guest_leaves_half_to_other_guests(swarm, plan):
    stash = swarm.pipelines["s1a"].stash
    stash.limit = 8 * 2 * 2048
    heads = {}
    for guest in ("guest", "other"):
        await swarm.net.transport(guest).start()
        home = (0, guest)
        heads[guest] = head(plan, journey=route(home, *HOPS[1:4], home), **EVALUATE)
    await fill(swarm, "guest", heads["guest"], 1, stash.limit / 8)
    ((verdict, _),) = await answers(swarm, "guest", "s1a", [pb.Frame(head=heads["guest"])])
    assert verdict == pb.BUSY
    ((_, other),) = await answers(swarm, "other", "s1a", [pb.Frame(head=heads["other"])])
    assert "early" in other, "there is room for it"


async def test_forward_only_work_leaves_training_half_of_the_stash(swarm, plan):
    stash = swarm.pipelines["s1a"].stash
    stash.limit = 4 * 2 * 2048
    calls = await fill(swarm, "s0a", head(plan, **EVALUATE), 2, stash.limit / 2)
    assert await answers_to_head(swarm, plan, **EVALUATE) == [
        (pb.BUSY, "forward-only work has its share of the stash")
    ]
    assert stash.used == stash.limit / 2
    for call in calls:
        call.cancel()
    await until(lambda: not stash.used, 10)
    ((_, again),) = await answers_to_head(swarm, plan, **EVALUATE)
    assert "early" in again, "there is room again"


async def test_forward_only_work_ends_whatever_deadline_it_says(make_swarm):
    swarm, plan = await begun(
        make_swarm(forward_timeout_s=2.0).fill(replicas=2), 2, choose=lambda i, s: "a"
    )
    for replica in ("s2a", "s2b"):  # they answer BUSY for ever
        busy = swarm.pipelines[replica].stash
        busy.charge(1)
        busy.limit = 0
    evaluate = head(plan, **EVALUATE, deadline_s=86400.0)
    sent = [pb.Frame(head=evaluate), pb.Frame(chunk=bytes(2048))]
    assert await verdicts(swarm, "s0a", "s1a", sent) == [pb.ACCEPTED, pb.REFUSED]
    assert swarm.pipelines["s1a"].stash.used == 0


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_frame_that_breaks_off_is_nobodys_fault(swarm, plan, how):
    """A sender hangs up for reasons of its own, and gRPC shows that as the end of its messages."""
    call = PipelineStub(await swarm.net.transports["s0a"].channel("s1a")).Forward()
    await call.write(pb.Frame(head=head(plan)))
    await call.write(pb.Frame(chunk=bytes(1024)))
    s1a = swarm.pipelines["s1a"]
    await until(lambda: s1a.stash.used, 60)
    if how == "cancelled":
        call.cancel()
        await until(lambda: not s1a.stash.used, 60)
    else:
        await call.done_writing()
        assert [r.verdict async for r in call] == [pb.REFUSED]
    assert not swarm.net.transports["s1a"].faults
    assert swarm.pipelines["s1a"].stash.used == 0
