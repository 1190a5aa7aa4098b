"""A peer without the ends asks a peer with them to run the passes: over real calls, with peers that
die, refuse and lie."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

import node.inference.forward_router
from node.app.assembly import AT_ONCE
from node.app.operator_service import OperatorService
from node.core.errors import ExitCode, LocalFault, NetworkFault, UsageFault
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember
from node.data.tokenizer import ByteTokenizer
from node.data.tokenizer_files import TokenizerFiles
from node.inference import forwarding
from node.inference.chat import MAX_CHAT, ROLES
from node.inference.forwarding import MAX_PROMPT, EndsService
from node.pipeline.settings import PipelineSettings
from node.telemetry.events import Journal
from node.wire import bounds
from node.wire.limits import MESSAGES, NAME, STOPS
from protos import control_pb2 as pb
from protos import ends_pb2_grpc as rpc
from testbed.fakes.call_context import CallContext
from testbed.fakes.clock import VirtualClock
from testbed.fakes.memory_net import MemoryNet

STAGES = 2
A = PeerId("ends-a")
B = PeerId("ends-b")
ME = PeerId("s1a")
STRANGER = PeerId("stranger")


async def no_files() -> TokenizerFiles:
    return TokenizerFiles()


class Letters:
    """A pipeline that always gives the letter after the last one as the next token."""

    def __init__(self) -> None:
        self.settings = PipelineSettings(stages=STAGES)
        self.me = A
        self.shape = SimpleNamespace(length=8, context=8)
        self.math = SimpleNamespace(caches_texts=True)
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()
        self.ended = asyncio.Event()
        self.passes = 0
        self.gate.set()
        self.last_pass = 0
        """It closes the gate itself; 0: none does."""

    async def text_logits(
        self, hops: Any, text: int, past: int, tokens: torch.Tensor, positions: int
    ) -> tuple[torch.Tensor, bool]:
        self.passes += 1
        self.waiting.set()
        if self.passes == self.last_pass:
            self.gate.clear()
        try:
            await self.gate.wait()
        finally:
            if not self.gate.is_set():
                self.ended.set()
        return torch.nn.functional.one_hot(tokens[-positions:] + 1, 259).float(), True


class Peers:
    """Two ends peers and the block stages, each with a server of its own."""

    def __init__(self) -> None:
        self.net = MemoryNet()
        members = (
            PlanMember(A, 0),
            PlanMember(B, 0),
            PlanMember(ME, 1),
            PlanMember(PeerId("s2a"), 2),
        )
        self.plan = Plan(3, 1, B, members, (), {})
        self.pipelines = {}
        self.services = {}
        self.hosts = {}

    async def start(self) -> "Peers":
        for member in self.plan.members:
            transport = self.net.transport(member.peer)
            if member.stage == 0:
                self.pipelines[member.peer] = Letters()
                host: Any = SimpleNamespace(
                    pipeline=self.pipelines[member.peer],
                    work=SimpleNamespace(plan=self.plan),
                    training=SimpleNamespace(member=SimpleNamespace(busy=False)),
                    tokenizer=ByteTokenizer(),
                    stage=SimpleNamespace(version=SimpleNamespace(epoch=3)),
                    files=no_files,
                    texts=asyncio.Semaphore(8),
                )
                self.hosts[member.peer] = host
                self.services[member.peer] = EndsService(
                    host, transport, lambda: {m.peer for m in self.plan.members}
                )
            await transport.start()
        await self.net.transport(STRANGER).start()
        return self

    def ask(self, request: pb.GenerateRequest, *ends: PeerId, who: PeerId = ME):
        return forwarding.generate(self.net.transports[who], ends or (A, B), STAGES, request)

    async def said(
        self, request: pb.GenerateRequest, *ends: PeerId, who: PeerId = ME
    ) -> tuple[str, str]:
        """Return the text, and the peer that ran the passes."""
        text = ""
        by = ""
        async for piece in self.ask(request, *ends, who=who):
            text = text + piece.text
            by = piece.by or by
        return text, by

    async def freed(self) -> None:
        """A goes on; B answers until the place at A is free again."""
        self.pipelines[A].gate.set()
        async with asyncio.timeout(60):
            while (await self.said(pb.GenerateRequest(prompt="a", max_tokens=2)))[1] != A:
                pass


@pytest.fixture
async def peers(monkeypatch):
    monkeypatch.setattr(node.inference.forward_router, "PING_S", 60.0)
    monkeypatch.setattr(forwarding, "EACH", 1)
    made = await Peers().start()
    yield made
    await made.net.close()


async def test_a_text_streams_back_with_the_peer_that_made_it(peers):
    request = pb.GenerateRequest(prompt="a", max_tokens=5)
    assert await peers.said(request) == ("bcdef", A)
    assert (peers.pipelines[A].passes, peers.pipelines[B].passes) == (5, 0)
    stub = rpc.EndsStub(await peers.net.transports[ME].channel(A))
    pieces = [piece async for piece in stub.Generate(request, timeout=60)]
    assert pieces[-1].last
    assert not any(piece.by for piece in pieces)


async def test_an_answer_that_is_not_read_leaves_its_place(peers, monkeypatch):
    monkeypatch.setattr(forwarding, "UNREAD_S", 0.05)
    service = peers.services[A]
    seen = []
    call = CallContext(ME, ends=lambda: seen.append(set(service._serving)))
    asked = asyncio.ensure_future(
        service.Generate(pb.GenerateRequest(prompt="a", max_tokens=5), call)
    )
    await call.unread.wait()
    assert service._serving == {ME: 1}
    await asked
    assert call.aborted == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert seen == [set()], "it is free before the call ends"


async def test_lost_or_busy_peers_are_passed_over(peers):
    request = pb.GenerateRequest(prompt="a", max_tokens=3)
    with pytest.raises(NetworkFault, match="none of 2 ends peers") as refused:
        await peers.said(request, who=STRANGER)
    assert "only members of the run" in refused.value.what
    assert peers.pipelines[A].passes == peers.pipelines[B].passes == 0
    with pytest.raises(NetworkFault, match="in sight") as nobody:
        await forwarding.generate(peers.net.transports[ME], (), STAGES, request).__anext__()
    assert "swarm invite" in nobody.value.next_step
    # One question to each peer at a time: the second one goes to another peer.
    peers.pipelines[A].gate.clear()
    first = asyncio.ensure_future(peers.said(request))
    await peers.pipelines[A].waiting.wait()
    assert await peers.said(request) == ("bcd", B)
    peers.pipelines[A].gate.set()
    assert await first == ("bcd", A)
    await peers.net.kill(A)
    assert await peers.said(request) == ("bcd", B)


async def test_a_peer_lost_mid_answer_ends_it_with_an_error(peers):
    seen: list[str] = []
    peers.pipelines[A].last_pass = 3

    async def listen() -> None:
        async for piece in peers.ask(pb.GenerateRequest(prompt="a", max_tokens=50)):
            seen.append(piece.text)
            if len(seen) == 2:
                await peers.net.kill(A)

    with pytest.raises(NetworkFault, match="lost before the end") as lost:
        await listen()
    assert seen[:2] == ["b", "c"]
    assert "ask again" in lost.value.next_step
    assert peers.pipelines[B].passes == 0  # half of a text from each would be nobody's text


async def test_a_silent_peer_is_given_up_after_missed_pings(peers, monkeypatch):
    monkeypatch.setattr(forwarding, "WATCH_S", 0.01)
    transport = peers.net.transports[ME]
    pings = []

    async def ping(peer: PeerId, timeout: float = 5.0) -> float:
        pings.append(peer)
        if len(pings) < 5:
            return 0.001  # slow, not dead
        raise forwarding.PeerFault(peer, "cannot be reached")

    monkeypatch.setattr(transport, "ping", ping)
    peers.pipelines[A].gate.clear()
    answer = peers.ask(pb.GenerateRequest(prompt="a", max_tokens=2), A)
    with pytest.raises(NetworkFault, match="does not answer any more"):
        await answer.__anext__()
    assert len(pings) == 4 + forwarding.MISSES


async def test_a_call_lost_with_its_channel_is_a_network_fault(peers):
    pipeline = peers.pipelines[A]
    me = peers.net.transports[ME]
    pipeline.gate.clear()
    task = asyncio.ensure_future(peers.said(pb.GenerateRequest(prompt="a", max_tokens=2)))
    await pipeline.waiting.wait()
    await me.close()
    with pytest.raises(NetworkFault, match="none of 2 ends peers") as lost:
        await task
    assert "its connection broke" in lost.value.what


async def test_passes_end_when_nobody_listens_any_more(peers):
    pipeline = peers.pipelines[A]
    pipeline.gate.clear()
    task = asyncio.ensure_future(peers.said(pb.GenerateRequest(prompt="a", max_tokens=50)))
    await pipeline.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        await pipeline.ended.wait()
    await peers.freed()


async def test_an_answer_over_the_time_limit_is_ended_by_its_server(peers, monkeypatch):
    peers.pipelines[A].gate.clear()
    stub = rpc.EndsStub(await peers.net.transports[ME].channel(A))
    monkeypatch.setattr(forwarding, "LIMIT_S", 0.01)
    with pytest.raises(forwarding.grpc.aio.AioRpcError) as late:
        async for _ in stub.Generate(pb.GenerateRequest(prompt="a", max_tokens=2)):
            pass
    assert late.value.code() == forwarding.grpc.StatusCode.DEADLINE_EXCEEDED
    assert forwarding._fault(A, late.value).code is ExitCode.TIMED_OUT
    monkeypatch.setattr(forwarding, "LIMIT_S", 600.0)
    await peers.freed()


@pytest.mark.parametrize(
    "wrong",
    [
        pb.GenerateRequest(prompt="x" * (MAX_PROMPT + 1)),
        pb.GenerateRequest(prompt="x", temperature=float("nan")),
        pb.GenerateRequest(prompt="x", leave_out=pb.LeaveOut(stages=[7])),
        pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="x")] * (MESSAGES + 1)),
        pb.GenerateRequest(prompt="x", stop=["x"] * (STOPS + 1)),
        pb.GenerateRequest(prompt="x", stop=["x" * (NAME + 1)]),
    ],
    ids=[
        "a long prompt",
        "no temperature",
        "no such stage",
        "many messages",
        "many stop texts",
        "a long stop text",
    ],
)
async def test_an_invalid_request_is_refused_by_caller_and_server(peers, wrong):
    with pytest.raises(UsageFault) as fault:
        peers.ask(wrong)
    assert fault.value.next_step
    stub = rpc.EndsStub(await peers.net.transports[ME].channel(A))
    with pytest.raises(forwarding.grpc.aio.AioRpcError) as refused:
        await stub.Generate(wrong, timeout=60).read()
    assert refused.value.code() == forwarding.grpc.StatusCode.FAILED_PRECONDITION
    told = forwarding._fault(A, refused.value)
    assert isinstance(told, LocalFault)
    assert (told.code, told.next_step) == (ExitCode.USAGE, fault.value.next_step)
    assert not peers.services[A]._serving


def test_a_request_that_passes_is_within_the_bounds_of_the_wire():
    """A peer counts a message beyond them against who sent it."""
    role = max(ROLES, key=len)
    size = MAX_CHAT // MESSAGES
    request = pb.GenerateRequest(
        prompt="x" * MAX_PROMPT,
        messages=[pb.ChatMessage(role=role, content="x" * size)] * MESSAGES,
        stop=["x" * NAME] * STOPS,
    )
    assert forwarding.check(request) is request
    bounds.check(pb.GenerateRequest, request.SerializeToString())


@pytest.mark.parametrize(
    "pieces",
    [
        [pb.Piece(text="x" * (forwarding.MAX_PIECE + 1))],
        [pb.Piece(text="x")] * 7,
        [pb.Piece(missing=pb.Missing(dead=range(3), stages=2))],
    ],
    ids=["a long piece", "many pieces", "more stages than there are"],
)
async def test_more_than_was_asked_for_is_the_senders_fault(peers, monkeypatch, pieces):
    async def speak(*_: Any):
        for piece in pieces:
            yield piece

    monkeypatch.setattr(forwarding, "speak", speak)
    with pytest.raises(NetworkFault, match="more than it was asked for"):
        await peers.said(pb.GenerateRequest(prompt="a", max_tokens=2), A)
    assert [(p, weight) for p, _, weight in peers.net.transports[ME].faults] == [(A, 1.0)]


async def test_an_ends_peer_that_knows_no_conversations_is_passed_over(peers, monkeypatch):
    real = forwarding.speak

    async def older(a: Any, transport: Any, request: pb.GenerateRequest):
        """Leaves out the fields that came later."""
        if transport.peer_id == A:
            yield pb.Piece(text="x", token=1)
            return
        async for piece in real(a, transport, request):
            yield piece

    monkeypatch.setattr(forwarding, "speak", older)
    monkeypatch.setattr("node.inference.at_ends.chat_prompt", lambda files, messages: "a")
    request = pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="?")], max_tokens=2)
    assert await peers.said(request) == ("bc", B)
    assert not peers.net.transports[ME].faults


async def test_peers_outside_the_plan_share_few_places(peers, monkeypatch):
    """The hops take the questions of an ends peer for a member's work, whoever asked first."""
    monkeypatch.setattr(forwarding, "GUESTS", 1)
    other = PeerId("another")
    await peers.net.transport(other).start()
    members = {m.peer for m in peers.plan.members}
    peers.services[A]._members = lambda: members | {STRANGER, other}
    request = pb.GenerateRequest(prompt="a", max_tokens=2)
    peers.pipelines[A].gate.clear()
    first = asyncio.ensure_future(peers.said(request, A, who=STRANGER))
    await peers.pipelines[A].waiting.wait()
    async with asyncio.timeout(60):
        with pytest.raises(NetworkFault, match="busy with the questions of others"):
            await peers.said(request, A, who=other)
    of_a_member = asyncio.ensure_future(peers.said(request, A))
    while peers.services[A]._serving.total() < 2:  # noqa: ASYNC110 - a call that waits is no event
        await asyncio.sleep(0)
    peers.pipelines[A].gate.set()
    assert await first == await of_a_member == ("bc", A)
    assert await peers.said(request, A, who=other) == ("bc", A)


async def test_texts_of_other_peers_leave_places_for_the_operator(monkeypatch):
    assert forwarding.OTHERS < AT_ONCE
    monkeypatch.setattr(forwarding, "OTHERS", 2)
    gate = asyncio.Event()
    begun = list[PeerId]()
    read = list[pb.Piece]()

    async def speak(a: Any, transport: Any, request: pb.GenerateRequest):
        begun.append(transport.peer_id)
        await gate.wait()
        yield pb.Piece(text="x")

    monkeypatch.setattr(forwarding, "speak", speak)
    made = await Peers().start()
    service = made.services[A]
    calls = [
        asyncio.ensure_future(
            service.Generate(pb.GenerateRequest(prompt="a"), CallContext(peer, read.append))
        )
        for peer in (B, ME, PeerId("s2a"))
    ]
    while service._serving.total() < len(calls):  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert len(begun) == 2
    gate.set()
    await asyncio.gather(*calls)
    assert len(read) == 3
    await made.net.close()


async def test_a_prompt_is_tokenised_once_there_is_a_place(peers):
    order = list[str]()

    class Places(asyncio.Semaphore):
        async def __aenter__(self) -> None:
            order.append("place")
            await super().__aenter__()

    class Counted(ByteTokenizer):
        def encode(self, text: str | bytes) -> Any:
            order.append("tokens")
            return super().encode(text)

    peers.hosts[A].texts = Places(1)
    peers.hosts[A].tokenizer = Counted()
    assert await peers.said(pb.GenerateRequest(prompt="a", max_tokens=2)) == ("bc", A)
    assert order == ["place", "tokens"]


def speaks_first(monkeypatch: pytest.MonkeyPatch, fault: LocalFault, *pieces: pb.Piece) -> None:
    """A says the pieces, then reports a fault; B answers."""
    real = forwarding.speak

    async def speak(a: Any, transport: Any, request: pb.GenerateRequest):
        if transport.peer_id == A:
            for piece in pieces:
                yield piece
            raise fault
        async for piece in real(a, transport, request):
            yield piece

    monkeypatch.setattr(forwarding, "speak", speak)


async def test_a_fault_before_the_text_is_no_end_while_there_are_others(peers, monkeypatch):
    speaks_first(monkeypatch, NetworkFault("stage 1 has no live peer", "leave it out"))
    request = pb.GenerateRequest(prompt="a", max_tokens=2)
    assert await peers.said(request) == ("bc", B)
    with pytest.raises(LocalFault, match="stage 1 has no live peer") as told:
        await peers.said(request, A)
    assert (told.value.code, told.value.next_step) == (ExitCode.NETWORK, "leave it out")
    await peers.net.kill(B)
    with pytest.raises(LocalFault, match="stage 1 has no live peer"):
        await peers.said(request)


async def test_a_fault_within_the_text_ends_it(peers, monkeypatch):
    fault = NetworkFault("stage 1 has no live peer", "leave it out")
    speaks_first(monkeypatch, fault, pb.Piece(text="b", token=98))
    with pytest.raises(LocalFault, match="stage 1 has no live peer"):
        await peers.said(pb.GenerateRequest(prompt="a", max_tokens=2))
    assert not peers.pipelines[B].passes


async def test_an_impossible_request_is_not_asked_of_others(peers, monkeypatch):
    speaks_first(monkeypatch, UsageFault("this model has no chat template", "give a prompt"))
    with pytest.raises(LocalFault, match="no chat template") as told:
        await peers.said(pb.GenerateRequest(prompt="a", max_tokens=2))
    assert told.value.code == ExitCode.USAGE
    assert not peers.pipelines[B].passes


def daemon_at(me: PeerId, plan: Plan, ends: Collection[PeerId], transport: Any = None) -> Any:
    """A daemon of a block stage with the peers ``ends`` in sight."""
    return SimpleNamespace(
        role="stage",
        transport=transport,
        identity=SimpleNamespace(peer_id=me),
        journal=Journal(),
        clock=VirtualClock(),
        paused="",
        presence=SimpleNamespace(view=SimpleNamespace(ends=ends)),
        assembled=SimpleNamespace(
            ends=None,
            work=SimpleNamespace(plan=plan),
            training=SimpleNamespace(member=SimpleNamespace(leader=plan.leader)),
            pipeline=SimpleNamespace(settings=PipelineSettings(stages=STAGES)),
            texts=asyncio.Semaphore(1),
        ),
    )


def test_askers_spread_over_the_ends_peers():
    ends = {A, B, PeerId("ends-c"), PeerId("ends-d")}
    plan = Plan(3, 1, B, (PlanMember(B, 0),), (), {})
    orders = list[list[PeerId]]()
    for number in range(40):
        daemon = daemon_at(PeerId(f"asker-{number}"), plan, ends)
        orders.append(OperatorService(daemon)._ends(daemon.assembled))
    assert {order[0] for order in orders} == ends - {B}
    assert all(set(order) == ends and order[-1] == B for order in orders)


async def test_a_stage_peers_daemon_asks_one_that_does_not_lead_first(peers):
    seen = {A: None, B: None}
    daemon = daemon_at(ME, peers.plan, seen, peers.net.transports[ME])
    view = OperatorService(daemon)
    request = pb.GenerateRequest(prompt="a", max_tokens=2)

    async def by() -> str:
        first = [p async for p in view.generate(request)][0]
        assert first.by_name == daemon.journal.names.known(PeerId(first.by))
        return first.by

    daemon.journal.names.learn(A, "brisk-otter")
    assert await by() == A  # B leads
    del seen[A]  # its record has ended: the plan still knows it, after those that are in sight
    assert await by() == B
    daemon.role = "rendezvous"
    with pytest.raises(UsageFault, match="no part of the model"):
        await by()
    daemon.role = "auto"
    daemon.assembled = None
    with pytest.raises(NetworkFault, match="not joined yet"):
        await by()
