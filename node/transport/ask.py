"""Questions anybody may put to us over libp2p: one question, one answer, one stream. See
protos/ask.proto."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from node.core.errors import ExitCode, LocalFault, PeerFault, WireError
from node.core.ids import PeerId
from node.identity.faults import TokenBucket
from node.transport.clocks import PeerClocks
from node.transport.frames import Streams, converse, parsed, read_frame, see_off, write_frame
from node.transport.handshake import Facts
from node.transport.newcomers import Newcomers, QueuePlace
from protos.ask_pb2 import Answer, Ask, PingAnswer, ReachAnswer, Refusal

STREAM = "/tutti/ask/1"
QUESTION_BYTES = 16 * 1024
ANSWER_BYTES = 1 << 20
NONCE_BYTES = 64
READ_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 15.0
QUESTIONS_PER_S = 5.0
QUESTIONS_AT_ONCE = 20.0
LIMITED_AGAIN_S = 4.0
"""Seconds after which a peer that asked too often may ask again."""
QUEUED = ("manifest", "peers")
"""Questions with which joining begins: strangers wait for their turn to have them answered."""


class Asking:
    """Asks and answers. Pings are answered here; all else by ``answerer`` when there is one.

    ``limited(peer)`` is called for a question beyond the limit; ``dialled(peer, ports)`` returns
    the address at which we see a peer and the ports that answer there; ``known(peer)`` returns
    False for a stranger; ``bypass_port()`` returns the port at which we tell a connection where it
    comes from, 0 for none.
    """

    def __init__(
        self,
        streams: Streams,
        facts: Callable[[], Facts],
        limited: Callable[[PeerId], None],
        dialled: Callable[[PeerId, Sequence[int]], Awaitable[tuple[str, list[int]]]],
        known: Callable[[PeerId], bool],
        bypass_port: Callable[[], int] = lambda: 0,
    ) -> None:
        self._streams = streams
        self._facts = facts
        self._limited = limited
        self._dialled = dialled
        self._known = known
        self._bypass_port = bypass_port
        self._rate = TokenBucket(QUESTIONS_PER_S, QUESTIONS_AT_ONCE)
        self.newcomers = Newcomers()
        self.clocks = PeerClocks(time.monotonic)
        self.answerer: Callable[[PeerId, Ask], Awaitable[Answer]] | None = None
        """A LocalFault that it raises becomes a Refusal."""

    async def ask(self, peer: PeerId, question: Ask, timeout: float) -> Answer:
        """The peer's answer, which may be a Refusal. Raises PeerFault when none comes or it makes
        no sense."""
        asked = time.time()
        began = time.monotonic()
        raw = await converse(
            self._streams, peer, STREAM, question.SerializeToString(), ANSWER_BYTES, timeout
        )
        took = time.monotonic() - began
        try:
            answer = parsed(Answer, raw, "an answer")
        except WireError as e:
            raise PeerFault(peer, "an answer that does not fit the question", 1.0) from e
        self.clocks.told(peer, answer.time or answer.ping.time, asked, took)
        return answer

    async def serve(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one question. Raises WireError or TimeoutError when there is none."""
        async with asyncio.timeout(READ_TIMEOUT_S):
            raw = await read_frame(reader, QUESTION_BYTES)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            versions = Answer(**self._facts().versions())
            if self._rate.allow(peer, time.monotonic()):
                answer = await self._answer(peer, parsed(Ask, raw, "a question"))
            else:
                self._limited(peer)
                answer = _refuse(ExitCode.RESOURCES, "too many questions; wait a few seconds")
                answer.refusal.again_s = LIMITED_AGAIN_S
            answer.MergeFrom(versions)
            answer.time = time.time()
            if answer.ByteSize() > ANSWER_BYTES:
                answer = _refuse(ExitCode.RESOURCES, "the answer is too long")
                answer.MergeFrom(versions)
            await write_frame(writer, answer.SerializeToString())
        await see_off(reader, READ_TIMEOUT_S)

    async def _answer(self, peer: PeerId, question: Ask) -> Answer:
        kind = question.WhichOneof("question")
        if kind in QUEUED and not self._known(peer):
            place = self.newcomers.ask(peer, time.monotonic())
            if place is not None:
                return _busy(place)
        if kind == "ping":
            facts = self._facts()
            nonce = question.ping.nonce[:NONCE_BYTES]
            return Answer(
                ping=PingAnswer(
                    nonce=nonce, version=facts.version, name=facts.name, time=time.time()
                )
            )
        if kind == "reach":
            seen, ports = await self._dialled(peer, question.reach.ports)
            bypass = self._bypass_port()
            return Answer(reach=ReachAnswer(seen=seen, open=ports, bypass=bypass))
        if kind is None or self.answerer is None:
            return _refuse(ExitCode.PROTOCOL, "this question is not understood here")
        try:
            return await self.answerer(peer, question)
        except LocalFault as e:
            return _refuse(e.code, str(e))


def _busy(place: QueuePlace) -> Answer:
    """The answer to a newcomer that has to wait. Software that does not know the fields shows the
    reason."""
    reason = (
        f"busy: you are about number {place.number} in the queue, ask again in "
        f"{place.again_s:.0f} s"
    )
    return Answer(
        refusal=Refusal(
            code=ExitCode.RESOURCES, reason=reason, again_s=place.again_s, place=place.number
        )
    )


def _refuse(code: int, reason: str) -> Answer:
    return Answer(refusal=Refusal(code=code, reason=reason))
