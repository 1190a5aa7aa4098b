"""Questions of strangers and of members to a peer that gets more of them than it can answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.core.errors import ExitCode, WireError
from node.core.ids import PeerId
from node.identity.faults import TokenBucket
from node.transport.ask import QUESTIONS_AT_ONCE, Asking
from node.transport.handshake import Facts
from node.transport.newcomers import AT_ONCE
from protos.ask_pb2 import Answer, Ask, AskManifest, AskPeers, AskPing, AskReach, ManifestAnswer

MEMBER = PeerId("member")
MANIFEST = Ask(manifest=AskManifest())
PEERS = Ask(peers=AskPeers())


class Peer:
    """A peer that knows ``MEMBER`` and answers every question with a manifest."""

    def __init__(self) -> None:
        async def dialled(peer: PeerId, ports: Any) -> tuple[str, list[int]]:
            return "", []

        self.asking = Asking(
            SimpleNamespace(),  # type: ignore[arg-type]
            lambda: Facts("ab" * 32, "busy-bee", "1"),
            lambda peer: None,
            dialled,
            lambda peer: peer == MEMBER,
        )
        self.asking.answerer = self._answer
        self.answered: list[PeerId] = []

    async def _answer(self, peer: PeerId, question: Ask) -> Answer:
        self.answered.append(peer)
        return Answer(manifest=ManifestAnswer(toml=b"toml"))

    async def asked(self, peer: str, question: Ask) -> Answer:
        """Ask a question; returns the answer as the asking peer reads it from its stream."""
        return await self.sent(peer, question.SerializeToString())

    async def sent(self, peer: str, raw: bytes) -> Answer:
        """As ``asked``, for a question of any bytes."""
        reader = asyncio.StreamReader()
        sent = bytearray()
        reader.feed_data(len(raw).to_bytes(4, "big") + raw)
        reader.feed_eof()

        async def drain() -> None:
            """Nothing holds it up."""

        writer = SimpleNamespace(write=sent.extend, drain=drain)
        await self.asking.serve(PeerId(peer), reader, writer)  # type: ignore[arg-type]
        return Answer.FromString(bytes(sent[4:]))


async def crowded() -> Peer:
    peer = Peer()
    for i in range(int(AT_ONCE)):
        assert (await peer.asked(f"early-{i}", MANIFEST)).manifest.toml
    return peer


async def test_a_newcomer_in_a_crowd_is_told_its_place_at_once():
    peer = await crowded()
    before = len(peer.answered)
    for number, question in enumerate((MANIFEST, PEERS, MANIFEST), 1):
        refusal = (await peer.asked(f"late-{number}", question)).refusal
        assert refusal.code == ExitCode.RESOURCES, "what older software knows"
        assert refusal.place == number
        assert refusal.again_s >= 1.0
        assert f"number {number} in the queue" in refusal.reason
    assert len(peer.answered) == before, "nothing was worked out for them"
    assert peer.asking.newcomers.waiting == 3


async def test_members_and_small_questions_do_not_queue():
    peer = await crowded()
    assert (await peer.asked("late", MANIFEST)).refusal.place == 1
    assert (await peer.asked(MEMBER, MANIFEST)).manifest.toml
    assert (await peer.asked(MEMBER, PEERS)).manifest.toml
    assert (await peer.asked("late", Ask(ping=AskPing(nonce=b"x")))).ping.nonce == b"x"
    assert (await peer.asked("late", Ask(reach=AskReach()))).WhichOneof("answer") == "reach"


async def test_whoever_had_its_turn_asks_all_that_joining_takes():
    peer = await crowded()
    for question in (PEERS, MANIFEST, PEERS):
        assert (await peer.asked("early-0", question)).manifest.toml


@pytest.mark.parametrize("who", [MEMBER, "stranger"])
async def test_a_peer_that_asks_too_often_is_told_when_to_ask_again(who):
    peer = Peer()
    for _ in range(int(QUESTIONS_AT_ONCE)):
        await peer.asked(who, Ask(ping=AskPing()))
    refusal = (await peer.asked(who, MANIFEST)).refusal
    assert "too many questions" in refusal.reason
    assert refusal.again_s > 0
    assert not peer.answered


async def test_a_question_too_many_is_refused_unread():
    peer = Peer()
    peer.asking._rate = TokenBucket(0.0, 1.0)
    nonsense = b"\xff" * 9
    with pytest.raises(WireError):
        await peer.sent("stranger", nonsense)
    assert "too many questions" in (await peer.sent("stranger", nonsense)).refusal.reason
