"""Forward-only work around stages without peers: the stages it may leave out, its results, and the
reports of it."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import node.inference.forward_router
from node.core.errors import NetworkFault, PeerFault, UsageFault
from node.core.ids import PeerId
from node.core.journey import Hop, Plan, PlanMember
from node.data.tokenizer import ByteTokenizer
from node.data.tokenizer_files import TokenizerFiles
from node.inference import at_ends
from node.inference.at_ends import (
    check_drawing,
    choose,
    evaluate,
    sample,
    slow_words,
    speak,
)
from node.inference.forward_router import ForwardRouter, Reroute, decide, named
from node.pipeline.settings import PipelineSettings
from protos.control_pb2 import GenerateRequest, LeaveOut
from testbed.fakes.memory_net import MemoryNet

ME = PeerId("me")


@pytest.fixture
async def net() -> AsyncIterator[MemoryNet]:
    made = MemoryNet()
    yield made
    await made.close()


def planned(stages: int, replicas: str = "ab") -> Plan:
    members = (
        PlanMember(PeerId("s0a"), 0),
        *(PlanMember(PeerId(f"s{s}{x}"), s) for s in range(1, stages + 1) for x in replicas),
    )
    return Plan(3, 1, PeerId("s0a"), members, (), {})


async def around(net: MemoryNet) -> ForwardRouter:
    """A router at ME; all peers of its plan answer pings."""
    settings = PipelineSettings(stages=4, may_skip=0.5)
    plan = planned(4)
    for peer in (ME, *(member.peer for member in plan.members)):
        await net.transport(peer).start()
    return ForwardRouter(net.transports[ME], settings, lambda: plan)


def lose(net: MemoryNet, *peers: str) -> None:
    """The peers cannot be reached any more."""
    for peer in peers:
        net.cut(ME, PeerId(peer))


LIVE = {1: ("a",), 2: (), 3: ("c", "d"), 4: ("e",)}


def test_unserved_stages_are_left_out_within_the_skip_ratio():
    found = decide(PipelineSettings(stages=4, may_skip=0.25), LIVE, ())
    assert (found.dead, found.asked, found.missing) == ((2,), (), (2,))
    assert found.hops(1) == (Hop(1, PeerId("a")), Hop(3, PeerId("d")), Hop(4, PeerId("e")))
    # The operator may leave out stages that the run does not leave out by itself.
    assert decide(PipelineSettings(stages=4), LIVE, (2, 3)).dead == ()


@pytest.mark.parametrize(
    ("may_skip", "live", "asked", "why", "advice"),
    [
        (0.0, LIVE, (), r"^stage 2 has no live peer.*at most 0 of its 4", "--drop-stages 2"),
        # Stages that the operator leaves out count too.
        (0.25, LIVE, (3,), "1 are left out already", "--drop-stages 2,3"),
        (1.0, {}, (), "stages 1, 2, 3, 4 have no live peer", ""),
    ],
)
def test_more_unserved_stages_than_may_be_left_out_are_a_fault(may_skip, live, asked, why, advice):
    with pytest.raises(NetworkFault, match=why) as refused:
        decide(PipelineSettings(stages=4, may_skip=may_skip), live, asked)
    assert advice in refused.value.next_step
    assert ("--drop-stages" in refused.value.next_step) is bool(advice)


@pytest.mark.parametrize(
    ("words", "after", "stages"), [([5, 2, 5], 0, (2, 5)), ([2], 4, (2, 5, 6)), ([], 6, ())]
)
def test_stages_are_named_by_number_range_or_side(words, after, stages):
    assert named(6, words, after) == stages


@pytest.mark.parametrize(
    ("words", "after", "why"),
    [
        ([0], 0, "ends"),
        ([7], 0, "7"),
        ([], 7, "7"),
        ([1, 2], 2, "every"),
        (range(1, 7), 0, "every"),
    ],
)
def test_what_cannot_be_named_is_refused(words, after, why):
    with pytest.raises(UsageFault, match=why):
        named(6, words, after)


def test_choices_of_missing_stages_are_even_and_different():
    found = choose(8, (3,), 4, 14)
    assert len(set(found)) == len(found) == 14
    assert all(len(c) == 4 and 3 in c for c in found)
    times = Counter(s for c in found for s in c)
    assert times.pop(3) == 14
    assert max(times.values()) - min(times.values()) <= 2
    assert sorted(choose(3, (), 1, 50)) == [(1,), (2,), (3,)]
    assert choose(3, (1, 2), 2, 50) == [(1, 2)]


async def test_work_that_is_lost_takes_another_way(net):
    tried = []
    way = await around(net)
    assert (await way.look()).missing == ()

    async def work(hops: tuple[Hop, ...]) -> int:
        tried.append(hops)
        if len(tried) == 1:
            lose(net, "s2a", "s2b", "s3a")
            raise PeerFault(PeerId("s2a"), "connection lost")
        return sum(h.stage for h in hops)

    assert await way.take(0, work) == 1 + 3 + 4
    assert [h.peer for h in tried[1]] == ["s1b", "s3b", "s4b"]
    assert way.reroute.missing == (2,)
    lose(net, "s3b", "s4a", "s4b")
    with pytest.raises(NetworkFault, match="stages 2, 3, 4"):
        await way.look()
    await way.close()


async def test_work_that_hangs_behind_a_dead_hop_is_not_waited_for(monkeypatch, net):
    monkeypatch.setattr(node.inference.forward_router, "WATCH_S", 0.0)
    ways = []
    hung = asyncio.Event()
    way = await around(net)

    async def work(hops: tuple[Hop, ...]) -> tuple[int, ...]:
        ways.append(hops)
        if len(ways) == 1:
            lose(net, "s4a", "s4b")
            try:
                await asyncio.Event().wait()
            finally:
                hung.set()
        return tuple(h.stage for h in hops)

    async with asyncio.timeout(60):
        assert await way.take(0, work) == (1, 2, 3)
    assert hung.is_set()
    await way.close()


async def test_work_that_nobody_can_do_ends(net):
    async def work(hops: tuple[Hop, ...]) -> None:
        raise PeerFault(hops[0].peer, "I host stage 9")

    way = await around(net)
    with pytest.raises(NetworkFault, match="I host stage 9"):
        await way.take(0, work)
    nobody = ForwardRouter(net.transports[ME], PipelineSettings(), lambda: None)
    with pytest.raises(NetworkFault, match="stages still load"):
        await nobody.look()


async def test_work_that_is_cancelled_at_its_peer_is_a_fault(net):
    """A pause closes the pipeline, which cancels whatever its own work waits for."""

    async def work(hops: tuple[Hop, ...]) -> None:
        back = asyncio.get_running_loop().create_future()
        back.cancel()
        await back

    way = await around(net)
    with pytest.raises(NetworkFault, match="given up its stage"):
        await way.take(0, work)
    await way.close()


class Batches:
    """Held-out text of a tiny vocabulary."""

    def __init__(self, swarm) -> None:
        self.pairs = [swarm.batch(SimpleNamespace(index=i, samples=range(4))) for i in range(3)]

    async def fetch_held_out(self, i: int):
        return self.pairs[i]

    def held_out_count(self) -> int:
        return len(self.pairs)

    def loss(self, swarm, *visited: int) -> float:
        """Nats per token of the model in one process over these block stages."""
        total = 0.0
        for tokens, targets in self.pairs:
            h = swarm.hidden(tokens, *visited)
            total += float(swarm.unsplit.ends.loss(h, targets)[0].detach())
        return total / sum(targets.numel() for _, targets in self.pairs)


async def test_the_loss_without_stages_is_that_without_their_layers(make_swarm, monkeypatch):
    monkeypatch.setattr(node.inference.forward_router, "PING_S", 60.0)
    swarm = await make_swarm(may_skip=0.34).fill(replicas=2)
    plan = swarm.adopt(swarm.plan(1))
    pipeline = swarm.pipelines["s0a"]
    text = Batches(swarm)

    def through(asked: object) -> ForwardRouter:
        transport = pipeline.host.transport
        settings = pipeline.settings
        return ForwardRouter(transport, settings, lambda: plan, asked)  # pyright: ignore

    async def measured(*asked: int, share: float = 0.0) -> list[tuple]:
        found = [f async for f in evaluate(pipeline, text, through, asked, share, 8, 3)]
        return [
            (tuple(f.missing.asked), tuple(f.missing.dead), pytest.approx(f.loss, abs=5e-6))
            for f in found
        ]

    assert await measured() == [((), (), text.loss(swarm, 1, 2, 3))]
    assert await measured(1, 3) == [((1, 3), (), text.loss(swarm, 2))]
    third = await measured(share=0.34)
    assert sorted(third[1:], key=lambda f: f[0]) == [
        ((1,), (), text.loss(swarm, 2, 3)),
        ((2,), (), text.loss(swarm, 1, 3)),
        ((3,), (), text.loss(swarm, 1, 2)),
    ]
    await swarm.kill("s2a")
    assert await measured() == [((), (), text.loss(swarm, 1, 2, 3))]
    await swarm.kill("s2b")
    assert await measured() == [((), (2,), text.loss(swarm, 1, 3))]
    both = sorted((await measured(share=0.67))[1:], key=lambda f: f[0])
    assert both == [((1,), (2,), text.loss(swarm, 3)), ((3,), (2,), text.loss(swarm, 1))]
    with pytest.raises(UsageFault, match="missing anyway"):
        await measured(share=0.1)
    with pytest.raises(NetworkFault, match="stage 2 has no live peer"):
        await measured(3)


async def test_generation_continues_without_a_dead_stage(make_swarm, monkeypatch):
    monkeypatch.setattr(node.inference.forward_router, "PING_S", 60.0)
    swarm = await make_swarm(may_skip=0.34).fill(replicas=1)
    plan = swarm.adopt(swarm.plan(1))
    pipeline = swarm.pipelines["s0a"]

    class Letters(ByteTokenizer):
        """The tiny vocabulary as bytes 0 to 30."""

        def encode(self, text: str):
            return [ord(c) % 31 for c in text]

    host = SimpleNamespace(
        pipeline=pipeline,
        work=SimpleNamespace(plan=plan),
        training=SimpleNamespace(member=SimpleNamespace(busy=True)),
        tokenizer=Letters(),
        stage=SimpleNamespace(version=SimpleNamespace(epoch=3)),
        files=no_files,
        texts=asyncio.Semaphore(1),
    )  # pyright: ignore

    async def said(request: GenerateRequest, dies: int = -1) -> tuple[str, list]:
        text = ""
        news = []
        async for piece in speak(host, pipeline.host.transport, request):  # pyright: ignore
            if piece.HasField("missing"):
                news.append((len(text), list(piece.missing.asked), list(piece.missing.dead)))
            text += piece.text
            if len(text) == dies:
                await swarm.kill("s3a")
        return text, news

    def alone(*ways: tuple[int, ...]) -> str:
        """Text of the model in one process, over the block stages of each letter's path."""
        ids = [ord(c) % 31 for c in "abc"]
        for visited in ways:
            h = swarm.hidden(torch.tensor([ids[-swarm.model.seq_len :]]), *visited)
            ids.append(int(swarm.unsplit.ends.logits(h)[0, -1].argmax()))
        return bytes(ids[3:]).decode()

    request = GenerateRequest(prompt="abc", max_tokens=6)
    assert await said(request, dies=4) == (
        alone(*4 * [(1, 2, 3)], *2 * [(1, 2)]),
        [(4, [], [3])],
    )
    request.leave_out.CopyFrom(LeaveOut(after=2))
    assert await said(request) == (alone(*6 * [(1, 2)]), [(0, [3], [])])
    with pytest.raises(UsageFault, match="temperature"):
        await said(GenerateRequest(prompt="abc", temperature=float("nan")))


async def no_files() -> TokenizerFiles:
    return TokenizerFiles()


async def drawn(logits: list[float], count: int = 1, eos: tuple[int, ...] = (), **how) -> list:
    """Tokens drawn from the same logits, and how the text ends."""

    async def forward(ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(logits)

    request = GenerateRequest(max_tokens=count, **how)
    pieces = [p async for p in sample(forward, ByteTokenizer(), request, [97], eos)]
    assert pieces[0].prompt_tokens == 1
    return [*(p.token for p in pieces[:-1]), pieces[-1].finish]


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-9])
async def test_a_temperature_near_0_takes_the_likeliest_token(temperature):
    found = await drawn([90.0, 100.0, 99.0], 2, temperature=temperature)
    assert found == [1, 1, "length"]


async def test_a_token_is_drawn_beside_the_event_loop(monkeypatch):
    """It takes milliseconds with a large vocabulary."""
    threads: list[int] = []
    real = at_ends._pick
    monkeypatch.setattr(
        at_ends, "_pick", lambda *how: threads.append(threading.get_ident()) or real(*how)
    )
    assert await drawn([0.0, 9.0], 2) == [1, 1, "length"]
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_a_text_ends_with_its_mark():
    assert await drawn([0.0, 9.0], 5, eos=(1,)) == [1, "stop"]


async def test_top_p_keeps_the_likeliest_tokens_with_so_much_probability():
    chances = torch.tensor([0.1, 0.5, 0.3, 0.1]).log().tolist()
    for top_p, kept in ((0.4, {1}), (0.7, {1, 2}), (1e-9, {1}), (0.0, {0, 1, 2, 3})):
        found = await drawn(chances, 200, temperature=1.0, top_p=top_p, seed=5)
        assert set(found[:-1]) == kept
    with pytest.raises(UsageFault, match="top_p"):
        check_drawing(GenerateRequest(top_p=float("nan")))


async def test_a_stop_text_ends_the_text_before_it():
    letters = iter("one two three")

    async def forward(ids: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(ord(next(letters))), 259).float()

    request = GenerateRequest(max_tokens=13, stop=["o t", "wo"])
    pieces = [p async for p in sample(forward, ByteTokenizer(), request, [97])]
    assert "".join(p.text for p in pieces) == "one t"
    assert pieces[-1].finish == "stop"


def test_slow_text_has_its_reasons() -> None:
    relayed = PeerId("r")
    direct = PeerId("d")
    way = Reroute(((1, (direct,)), (2, (relayed, direct)), (4, (direct,))), (), (3,), 4)
    path = {relayed: "relayed", direct: "direct"}.__getitem__
    quick = slow_words(replace(way, live=way.live[:1]), path, training=False)
    assert quick == "every token is a pass through 1 block stage"
    assert slow_words(way, path, training=True) == (
        "every token is a pass through 3 block stages; the swarm trains at the same time; stage 2 "
        "can be reached through a relay only"
    )
