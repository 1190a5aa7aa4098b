"""An owner's refusals: every case is a hand-made stream from a peer that may be lying."""

import asyncio
import math

import pytest
import torch

from node.averaging.exchange import parcel
from node.averaging.exchange.events import micro_groups
from node.averaging.exchange.owner import HEAD_LIMIT, HEAD_SLACK, HeadBounds
from node.averaging.settings import AveragingSettings
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.wire.coding.formats import FORMATS
from node.wire.tensors import encode, expected_head
from protos import averaging_pb2, averaging_pb2_grpc, tensor_pb2
from tests.averaging.conftest import SHAPES, same
from tests.transport.conftest import until


def head_for(names, tensors, **changes):
    (group,) = micro_groups(dict.fromkeys(names, 4), 1 << 20)
    facts = {
        "epoch": 7,
        "term": 1,
        "attempt": 0,
        "plan_hash": "plan",
        "ownership_hash": "owners",
        "tokens": 20,
        "tensors": [expected_head(n, t.shape, "fp32") for n, t in zip(names, tensors, strict=True)],
        "group": 0,
        "group_digest": group.digest,
    }
    return averaging_pb2.Contribution(head=averaging_pb2.ContributionHead(**(facts | changes)))


async def send(cell, sender, owner, messages):
    """The owner's answer to these messages: (kind and text of a refusal or "", fresh names)."""
    stub = averaging_pb2_grpc.AveragingStub(await cell.transports[sender].channel(owner))
    call = stub.Exchange(iter(messages), timeout=20)
    names = []
    refusal = ("", "")
    async for message in call:
        if message.WhichOneof("part") == "refusal":
            refusal = averaging_pb2.RefusalKind.Name(message.refusal.kind), message.refusal.text
        names += [h.name for h in message.head.tensors]
    return *refusal, names


class Duel:
    """p0 owns everything and runs its round; p1 is made by hand."""

    def __init__(self, cell, grads):
        self.cell = cell
        self.p0, self.p1 = cell.peers[:2]
        self.names = tuple(sorted(cell.owners()))
        self.tensors = [grads(self.p1)[n] for n in self.names]

    def messages(self, tensors=None, chunks=None, **changes):
        tensors = self.tensors if tensors is None else tensors
        body = [bytes(encode(t, "fp32")) for t in tensors] if chunks is None else chunks
        head = head_for(self.names, tensors, **changes)
        return [head, *(averaging_pb2.Contribution(chunk=c) for c in body)]

    def begin(self, **request):
        """p0's round, under way."""
        owners = dict.fromkeys(self.names, self.p0)
        return asyncio.ensure_future(
            self.cell.run(self.cell.request(self.p0, owners=owners, **request), self.p0)
        )

    async def stub(self):
        channel = await self.cell.transports[self.p1].channel(self.p0)
        return averaging_pb2_grpc.AveragingStub(channel)

    async def against(self, messages, **request):
        running = self.begin(**request)
        answer = await send(self.cell, self.p1, self.p0, messages)
        self.cell.rounds[self.p0].gone(self.p1)
        return answer, await running

    async def refused(self, messages):
        """Kind and text of the refusal of p1's contribution; p0 goes on alone."""
        (kind, text, _), outcome = await self.against(messages)
        assert same(outcome.fresh, self.cell.expected([self.p0]))
        return kind, text


@pytest.fixture
async def duel(cell_of, grads):
    return Duel(await cell_of(2), grads)


async def test_a_fair_contribution_by_hand_is_summed(duel, bits):
    answer, outcome = await duel.against(duel.messages())
    assert answer == ("", "", list(duel.names))
    assert bits(outcome.fresh, duel.cell.expected(duel.cell.peers))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
async def test_poison_is_refused_counted_and_left_out(duel, bits, poison):
    bad = [t.clone() for t in duel.tensors]
    bad[1][2, 3] = poison
    (kind, text, _), outcome = await duel.against(duel.messages(bad))
    assert kind == "VALUES"
    assert "b.weight" in text
    assert bits(outcome.fresh, duel.cell.expected([duel.p0]))
    assert set(outcome.refused) == {duel.p1}
    assert [(p, w) for p, _, w in duel.cell.transports[duel.p0].faults] == [(duel.p1, 1.0)]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"plan_hash": "other"}, "PLAN"),
        ({"ownership_hash": "other"}, "OWNERSHIP"),
        ({"tokens": 0}, "HEADS"),
        ({"tokens": 0, "chunks": []}, "HEADS"),
        ({"tokens": 1 << 50}, "VALUES"),
        ({"plan_hash": "x" * HEAD_LIMIT}, "HEADS"),  # too large to keep
        ({"chunks": [b"\0" * 5000]}, "HEADS"),
        ({"chunks": [b"\0" * 8]}, "HEADS"),
        ({"chunks": [b""]}, "HEADS"),
    ],
)
async def test_what_does_not_fit_the_round_is_refused(duel, changes, kind):
    assert (await duel.refused(duel.messages(**changes)))[0] == kind


async def test_a_contribution_in_crumbs_is_refused(duel):
    crumbs = [bytes([byte]) for t in duel.tensors for byte in bytes(encode(t, "fp32"))]
    kind, text = await duel.refused(duel.messages(chunks=crumbs))
    assert kind == "HEADS"
    assert "messages of less" in text


@pytest.mark.parametrize("shape", [(4, 6), (1 << 20, 1 << 20), ()])
async def test_heads_of_other_shapes_are_refused_before_allocation(duel, monkeypatch, shape):
    def never(*_, **__):
        raise AssertionError("memory was set aside")

    messages = duel.messages()[:1]
    messages[0].head.tensors[0].shape[:] = shape
    messages[0].head.tensors[0].nbytes = math.prod(shape) * 4
    monkeypatch.setattr(parcel.ParcelReader, "_open", never)
    assert (await duel.refused(messages))[0] == "HEADS"


async def test_a_replaced_exchange_is_released(duel, bits):
    running = duel.begin(deadline_s=300.0)
    stub = await duel.stub()
    lines = duel.cell.rounds[duel.p0]._lines
    calls = []

    def newest_alone() -> bool:
        """Return True if the newest contribution has two tensors here and older ones none."""
        parts = [len(line.reader._parts) for line in lines.values() if line.reader]
        return len(lines) >= len(calls) and parts == [2]

    for _ in range(5):
        calls.append(stub.Exchange())
        for message in duel.messages()[:3]:
            await calls[-1].write(message)
        await until(newest_alone, 60)
    for call in calls:
        call.cancel()
    outcome = await asyncio.wait_for(running, 60)
    assert bits(outcome.fresh, duel.cell.expected([duel.p0]))


async def test_an_upload_that_broke_off_may_come_again_unblamed(cell_of, grads, bits):
    duel = Duel(await cell_of(3), grads)
    owner = duel.cell.rounds[duel.p0]
    running = duel.begin(deadline_s=300.0)
    call = (await duel.stub()).Exchange()
    for message in duel.messages()[:2]:
        await call.write(message)
    await until(lambda: owner._lines, 60)
    call.cancel()
    await until(lambda: not owner._lines, 60)
    again = asyncio.ensure_future(send(duel.cell, duel.p1, duel.p0, duel.messages()))
    (attempt,) = owner._epoch(7).attempts.values()
    await until(lambda: any(peer == duel.p1 for _, peer in attempt.given), 60)
    owner.gone(duel.cell.peers[2])
    assert await again == ("", "", list(duel.names))
    assert bits((await running).fresh, duel.cell.expected([duel.p0, duel.p1]))
    assert not duel.cell.transports[duel.p0].faults


async def test_a_stranger_is_refused(duel):
    (kind, _, _), outcome = await duel.against(duel.messages(), members=(duel.p0,))
    assert kind == "STRANGER"
    assert not outcome.missing


async def test_streams_of_an_unopened_round_are_bounded(cell_of, grads):
    duel = Duel(await cell_of(2, AveragingSettings(round_timeout_s=3.0)), grads)
    sends = [send(duel.cell, duel.p1, duel.p0, duel.messages(epoch=9)) for _ in range(8)]
    answers = await asyncio.gather(*sends)
    assert sorted(kind for kind, _, _ in answers) == ["BUSY"] * 2 + ["LATE"] * 6
    assert not duel.cell.rounds[duel.p0]._machine._streams


def head_bytes(**fields):
    return averaging_pb2.Contribution(
        head=averaging_pb2.ContributionHead(**fields)
    ).SerializeToString()


@pytest.mark.parametrize("format_", sorted(FORMATS))
def test_an_honest_head_is_within_the_bounds_of_its_stage(format_):
    heads = [expected_head(name, shape, format_) for name, shape in SHAPES.items()]
    most = {"epoch": 1 << 40, "term": 1 << 47, "attempt": 1 << 20, "tokens": 1 << 40, "group": 999}
    hashes = {"plan_hash": "f" * 64, "ownership_hash": "f" * 64, "group_digest": "f" * 32}
    message = head_bytes(tensors=heads, **most, **hashes)
    bounds = HeadBounds.of(SHAPES)
    label = bounds.label(message)
    assert (label.epoch, label.term, label.attempt) == (1 << 40, 1 << 47, 1 << 20)
    assert label.plan_hash == "f" * 64
    assert bounds.nbytes < 2 * len(message) + HEAD_SLACK


def test_a_head_of_more_than_the_stage_has_is_not_read():
    bounds = HeadBounds.of(SHAPES)
    crowd = head_bytes(tensors=[tensor_pb2.TensorHead() for _ in range(len(SHAPES) + 1)])
    assert len(crowd) < bounds.nbytes
    assert bounds.label(crowd) is None
    assert bounds.label(head_bytes(ownership_hash="x" * bounds.nbytes)) is None
    assert bounds.label(b"") is None
    assert bounds.label(b"\xff\xff") is None
    assert bounds.label(averaging_pb2.Contribution(chunk=b"x").SerializeToString()) is None


async def test_a_head_beyond_the_bounds_is_a_fault(duel):
    kind, text = await duel.refused([averaging_pb2.Contribution(chunk=b"x")])
    assert (kind, text) == ("HEADS", "the first message is the head")
    assert [(p, w) for p, _, w in duel.cell.transports[duel.p0].faults] == [(duel.p1, 1.0)]


async def test_a_head_ahead_of_its_round_is_kept_as_bytes(cell_of, grads):
    duel = Duel(await cell_of(2), grads)
    owner = duel.cell.rounds[duel.p0]
    call = (await duel.stub()).Exchange()
    head = duel.messages()[0]
    await call.write(head)
    await until(lambda: owner._lines, 60)
    (line,) = owner._lines.values()
    assert (line.head, line.heads) == (head.SerializeToString(), [])
    running = duel.begin(deadline_s=300.0)
    await until(lambda: line.heads, 60)
    assert line.head == b""
    call.cancel()
    await running


class Liar(averaging_pb2_grpc.AveragingServicer):
    """An owner that answers as the test tells it."""

    def __init__(self, answer):
        self.answer = answer

    async def Exchange(self, request_iterator, context):
        async for _ in request_iterator:
            pass
        for message in self.answer:
            await context.write(message)


@pytest.mark.parametrize(
    "lie",
    [
        "shape",
        "format",
        "nan",
        "short",
        "long",
        "empty",
        "unknown kind",
        "nothing behind it",
        "unsaid",
        "said twice",
    ],
)
async def test_a_member_rejects_inconsistent_answers(cell_of, lie):
    cell = await cell_of(1)
    liar = PeerId("p9")
    tensor = torch.tensor([1.0, float("nan") if lie == "nan" else 2.0, 3.0, 4.0, 5.0])
    body = bytes(encode(tensor, "fp32"))
    heads = [
        expected_head(
            "c.weight",
            (4,) if lie == "shape" else tensor.shape,
            "bf16" if lie == "format" else "fp32",
        )
    ]
    tokens = 0 if lie == "nothing behind it" else 5
    body = {"short": body[:-1], "long": body + b"\0"}.get(lie, body)
    made = [averaging_pb2.Made(tensors=1, tokens=tokens, contributors=["p9"])]
    head = averaging_pb2.FreshHead(
        tensors=heads, made={"unsaid": [], "said twice": 2 * made}.get(lie, made)
    )
    answer = [averaging_pb2.Fresh(head=head), averaging_pb2.Fresh(chunk=body)]
    if lie == "unknown kind":
        answer = [averaging_pb2.Fresh(refusal=averaging_pb2.Refusal(kind=99))]  # type: ignore
    transport = cell.net.transport(liar)
    averaging_pb2_grpc.add_AveragingServicer_to_server(
        Liar([] if lie == "empty" else answer), transport.server
    )
    await transport.start()
    (me,) = cell.peers
    (group,) = micro_groups({"c.weight": 20}, 1 << 20)
    with pytest.raises(PeerFault) as caught:
        await cell.exchanges(me, liar, cell.request(me)).one(group, group.names, 10.0)
    assert caught.value.weight == 1.0
