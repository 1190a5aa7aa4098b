"""A member without the ends asks a peer that has them for words and losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from node import asked
from node.asked import ModelService, evaluated, generated
from node.core.errors import LocalFault, NetworkFault, PeerFault, UsageFault
from node.core.ids import PeerId
from node.transport.memory import MemoryNet
from protos import control_pb2 as pb

ASKER, ONE, TWO = PeerId("asker"), PeerId("one"), PeerId("two")


@pytest.fixture
async def net(monkeypatch):
    """Two peers that hold the ends and say the prompt backwards, and one that asks."""
    made = MemoryNet()
    peers = {name: made.transport(name) for name in (ASKER, ONE, TWO)}
    seen: list[Any] = []
    hung = asyncio.Event()

    async def speak(hosted: str, transport: Any, request: pb.GenerateRequest) -> AsyncIterator[pb.Piece]:
        seen.append((hosted, request))
        if request.prompt == "hang":
            hung.set()
            await asyncio.Event().wait()
        if request.prompt == "refuse":
            raise UsageFault("there is no stage 9", "name one that is there")
        if request.prompt == "half":
            yield pb.Piece(text="a")
            raise PeerFault(PeerId("three"), "went away")
        if request.prompt == "endless":
            while True:
                yield pb.Piece(text="a")
        for letter in reversed(request.prompt):
            yield pb.Piece(text=letter)
        yield pb.Piece(last=True, tokens_per_s=5.0)

    async def answer(hosted: str, transport: Any, request: pb.EvaluateRequest) -> AsyncIterator[pb.Evaluated]:
        seen.append((hosted, request))
        yield pb.Evaluated(loss=2.5, tokens=7)

    monkeypatch.setattr(asked, "speak", speak)
    monkeypatch.setattr(asked, "answer", answer)
    for name in (ONE, TWO):
        ModelService(peers[name], name)  # type: ignore[arg-type]
    for peer in peers.values():
        await peer.start()
    yield made, peers, seen, hung
    await made.close()


async def said(peers: Any, ends: list[PeerId], **request: Any) -> str:
    answers = generated(peers[ASKER], ends, pb.GenerateRequest(**request))
    return "".join([piece.text async for piece in answers])


async def test_the_first_that_answers_says_it(net):
    made, peers, seen, _ = net
    assert await said(peers, [ONE, TWO], prompt="abc") == "cba"
    await made.kill(ONE)
    assert await said(peers, [ONE, TWO], prompt="abc") == "cba"
    assert [hosted for hosted, _ in seen] == [ONE, TWO]
    found = [one async for one in evaluated(peers[ASKER], [TWO], pb.EvaluateRequest(batches=1 << 20, choices=999))]
    assert [one.loss for one in found] == [2.5]
    assert (seen[-1][1].batches, seen[-1][1].choices) == (asked.MOST_BATCHES, asked.MOST_CHOICES)


async def test_a_refusal_is_told_with_its_next_step_and_nobody_else_is_asked(net):
    _, peers, seen, hung = net
    with pytest.raises(LocalFault, match="there is no stage 9") as caught:
        await said(peers, [ONE, TWO], prompt="refuse")
    assert caught.value.next_step == "name one that is there"
    assert len(seen) == 1


async def test_half_an_answer_is_not_gone_on_with_by_another(net):
    _, peers, seen, hung = net
    with pytest.raises((LocalFault, PeerFault)):
        await said(peers, [ONE, TWO], prompt="half")
    assert len(seen) == 1


async def test_nobody_left_is_a_network_fault_with_every_reason(net):
    made, peers, *_ = net
    await made.kill(ONE)
    await made.kill(TWO)
    with pytest.raises(NetworkFault, match="no peer that holds the ends answers\n.+\n.+"):
        await said(peers, [ONE, TWO], prompt="abc")
    with pytest.raises(NetworkFault):
        await said(peers, [], prompt="abc")


@pytest.mark.parametrize(
    "request_",
    [{"prompt": "x" * (asked.MOST_PROMPT + 1)}, {"temperature": float("nan")}, {"temperature": -1.0}, {"seed": 1 << 63}],
)
async def test_numbers_out_of_bounds_reach_no_model(net, request_):
    _, peers, seen, hung = net
    with pytest.raises(NetworkFault):
        await said(peers, [ONE], **request_)
    assert seen == []


async def test_a_member_has_one_request_under_way(net):
    _, peers, seen, hung = net
    hanging = asyncio.create_task(said(peers, [ONE], prompt="hang"))
    await hung.wait()
    with pytest.raises(NetworkFault, match="are being answered"):
        await said(peers, [ONE], prompt="abc")
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    async with asyncio.timeout(30):
        while True:  # the end of a call reaches the other side a moment later
            try:
                assert await said(peers, [ONE], prompt="abc") == "cba"
                break
            except NetworkFault:
                await asyncio.sleep(0.05)


async def test_an_answer_without_an_end_is_a_fault_of_its_giver(net):
    _, peers, *_ = net
    with pytest.raises(PeerFault, match="no end"):
        await said(peers, [ONE], prompt="endless", max_tokens=5)
    assert peers[ASKER].faults[0][0] == ONE
