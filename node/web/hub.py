"""One document for all viewers: asks the daemon once a tick while somebody looks, and hands each
viewer the changes since the document that it has.

Enters: answers of the daemon. Leaves: server-sent events, bytes made once for all viewers.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from node.control.text import ABSENT, run_epoch
from node.core.errors import LocalFault
from node.core.tasks import Tasks
from node.inference.sampling import Reached, SampleClock, SampleEnded
from node.web.patch import changes
from node.web.samples import MOST_TEXT, SampleFile, TextSample, with_sample
from node.web.view import State, document, is_last, without_answer
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import (
    EpochLine,
    Event,
    GenerateRequest,
    Piece,
    RunHistory,
    Snapshot,
    WorkLine,
)

TICK_S = 2.0
"""Seconds between two looks at the daemon while somebody looks."""
IDLE_S = 30.0
"""Seconds between two looks for samples while nobody looks."""
QUIET_S = 20.0
"""Seconds after which a viewer without news is sent a comment, so that a broken line shows."""
MOST_VIEWERS = 32
SAMPLE_TOKENS = 48
SAMPLE_S = 60.0
"""Seconds that one sample may take."""
SAMPLE_TEMPERATURE = 0.7
WHEN = ("viewed", "always", "never")
"""When samples are taken: while somebody looks at the page, always, never."""


class Watched(Protocol):
    """The daemon, as the page needs it. Every method raises LocalFault."""

    async def status(self) -> Snapshot: ...
    async def peers(self) -> PeersAnswer: ...
    async def history(self, after: int, edition: int) -> RunHistory: ...
    async def news(self, last: int) -> list[Event]: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]: ...


@dataclass
class Past:
    """The history so far, asked for piece by piece."""

    edition: int = 0
    lines: list[EpochLine] = field(default_factory=list)
    work: Sequence[WorkLine] = ()
    stage_bytes: Sequence[int] = ()

    @property
    def newest(self) -> int:
        """Epoch of the newest line, 0 for none."""
        if not self.lines:
            return 0
        return self.lines[-1].epoch

    def take(self, answer: RunHistory) -> None:
        """Add the new lines; an answer of another edition replaces all."""
        if answer.edition != self.edition:
            self.lines = []
        self.edition = answer.edition
        self.lines.extend(answer.epochs)
        self.work = answer.work
        self.stage_bytes = answer.stage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOffer:
    """Settings of a page. ``prompt``: text that the model goes on with; ``when``: one of
    :data:`WHEN`; ``chat``: visitors may talk with the model; ``kept``: samples of earlier servers
    are shown although none are taken; ``tick_s``: seconds between two looks at the daemon."""

    prompt: str = ""
    when: str = WHEN[0]
    chat: bool = False
    kept: bool = False
    tick_s: float = TICK_S

    @property
    def shows_samples(self) -> bool:
        """True if the page has samples at all."""
        return self.when != "never" or self.kept


class Latest:
    """The newest document, and the events that bring a viewer to it. Events are made once for all
    viewers. ``version``: number of the document, 0 before the first; ``fault``: why the daemon did
    not answer when it was made, None if it did."""

    def __init__(self) -> None:
        self.version = 0
        self.document: dict[str, Any] = {}
        self.fault: LocalFault | None = None
        self._whole = b""
        self._change = b""
        self._made = -math.inf

    def put(self, document: dict[str, Any], now: float, fault: LocalFault | None = None) -> None:
        """Take a newer document. ``now``: monotonic seconds."""
        self._change = _event("change", changes(self.document, document))
        self._whole = b""
        self.document = document
        self.fault = fault
        self.version += 1
        self._made = now

    def age(self, now: float) -> float:
        """Seconds since the document was made; infinity before the first."""
        return now - self._made

    def event(self, seen: int) -> bytes:
        """Event for a viewer that has document ``seen``, -1 for none."""
        if seen == self.version:
            return b": quiet\n\n"
        if 0 <= seen == self.version - 1:
            return self._change
        if not self._whole:
            self._whole = _event("whole", self.document)
        return self._whole


class Hub:
    """The document and its viewers."""

    def __init__(self, daemon: Watched, offer: PageOffer) -> None:
        self._daemon = daemon
        self._offer = offer
        self._past = Past()
        self._sampler = _Sampler(daemon, offer.prompt)
        self._tasks = Tasks("web", _failed)
        self._looking = False
        self._came = asyncio.Event()
        self._closed = False
        self._news = asyncio.Condition()
        self._asking = asyncio.Lock()
        """Held while the daemon is asked: an answer about the history is added to the last one."""
        self.viewers = 0
        self.latest = Latest()

    async def close(self) -> None:
        """End all streams, and the work for them."""
        self._closed = True
        async with self._news:
            self._news.notify_all()
        await self._tasks.close()

    def begin(self) -> None:
        """Take samples from now on if they are wanted always."""
        if self._offer.when == "always":
            self._look()

    async def now(self) -> dict[str, Any]:
        """The document at this moment. It is asked for only if the newest one is older than a
        tick."""
        async with self._asking:
            if self.latest.age(time.monotonic()) > self._offer.tick_s:
                await self._refresh()
        return self.latest.document

    @property
    def crowded(self) -> bool:
        """True while no place is left for another viewer."""
        return self.viewers >= MOST_VIEWERS

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one viewer: "whole" once, then "change" for each tick with news.
        None where too many viewers are here."""
        if self.crowded:
            return
        if not self.viewers:
            self._came.set()
        self.viewers += 1
        try:
            self._look()
            yield b"retry: 3000\n\n"
            seen = -1
            if self.latest.age(time.monotonic()) > 2 * self._offer.tick_s:
                await self._wait(self.latest.version)
            while not self._closed:
                # Read before the viewer takes the event: meanwhile there may be newer documents.
                newest = self.latest.version
                if newest:
                    yield self.latest.event(seen)
                    seen = newest
                await self._wait(newest)
        finally:
            self.viewers -= 1

    async def _wait(self, seen: int) -> None:
        """Wait for a newer document than ``seen``, for a close, or :data:`QUIET_S` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S), self._news:
                await self._news.wait_for(lambda: self._closed or self.latest.version != seen)

    # ------------------------------------------------------------ looking

    def _look(self) -> None:
        if not self._looking and not self._closed:
            self._looking = True
            self._tasks.spawn(self._keep_looking(), "look")

    async def _keep_looking(self) -> None:
        try:
            while self.viewers or self._offer.when == "always":
                async with self._asking:
                    await self._refresh()
                pause = self._offer.tick_s
                if not self.viewers:
                    pause = max(IDLE_S, pause)
                await self._pause(pause)
        finally:
            self._looking = False

    async def _pause(self, seconds: float) -> None:
        """Wait. A viewer who comes while nobody looked ends it."""
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._came.wait()

    async def _refresh(self) -> None:
        """Ask the daemon, and tell the viewers of the new document."""
        at = time.time()
        try:
            new = document(await self._state(at))
            fault = None
        except LocalFault as e:
            fault = e
            new = without_answer(self.latest.document, fault, at)
        self.latest.put(new, time.monotonic(), fault)
        async with self._news:
            self._news.notify_all()

    async def _state(self, at: float) -> State:
        d = self._daemon
        snapshot = await d.status()
        answer = await d.peers()
        self._past.take(await d.history(self._past.newest, self._past.edition))
        news = await d.news(60)
        self._sample(snapshot)
        return State(
            at=at,
            snapshot=snapshot,
            answer=answer,
            past=self._past.lines,
            work=self._past.work,
            stage_bytes=self._past.stage_bytes,
            news=news,
            samples=self._sampler.samples,
            prompt=self._offer.prompt,
            sampling=self._why_no_sample(),
            chat=self._offer.chat,
        )

    def _why_no_sample(self) -> str:
        if not self._offer.shows_samples:
            return "no samples are taken here (--sample never)"
        return self._sampler.trouble

    def _sample(self, s: Snapshot) -> None:
        """Begin a sample if it is time for one."""
        if not s.swarm.run_id or not self._offer.shows_samples:
            return
        when = self._offer.when
        wanted = when == "always" or (when == "viewed" and self.viewers > 0)
        if self._sampler.due(s, wanted):
            self._tasks.spawn(self._sampler.take(s), "sample")


class _Sampler:
    """Takes the samples that :class:`SampleClock` asks for."""

    def __init__(self, daemon: Watched, prompt: str) -> None:
        self._daemon = daemon
        self._prompt = prompt
        self._file: SampleFile | None = None
        self._run = ""
        self._clock = SampleClock()
        self.samples: list[TextSample] = []
        self.trouble = ""

    def due(self, s: Snapshot, wanted: bool) -> bool:
        """Return True if a sample is to be taken now; :meth:`take` must follow."""
        if self._run != s.swarm.run_id:
            self._begin(s)
        epoch = run_epoch(s)
        if s.state in ABSENT or (not epoch and s.state != "training"):
            # The epoch is not known yet. A sample of epoch 0 would replace all that are kept.
            return False
        reached = Reached(epoch, wanted, is_last(s))
        return bool(self._clock.handle(reached, time.monotonic()))

    async def take(self, s: Snapshot) -> None:
        """One sample at the epoch of this snapshot."""
        began = time.monotonic()
        text = ""
        try:
            async with asyncio.timeout(SAMPLE_S):
                text = await self._text()
            self.trouble = ""
        except LocalFault as fault:
            self.trouble = f"the model could not be asked: {fault.what}"
        except TimeoutError:
            self.trouble = f"the model had not answered after {SAMPLE_S:.0f} s"
        finally:
            ended = SampleEnded(time.monotonic() - began, bool(text))
            self._clock.handle(ended, time.monotonic())
        if text and self._file is not None:
            made = TextSample(run_epoch(s), s.tokens, text[:MOST_TEXT])
            self.samples = with_sample(self.samples, made)
            await asyncio.to_thread(self._file.write, tuple(self.samples))

    async def _text(self) -> str:
        request = GenerateRequest(
            prompt=self._prompt, max_tokens=SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=1
        )
        pieces = self._daemon.generate(request)
        text = ""
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                text += piece.text
        return text

    def _begin(self, s: Snapshot) -> None:
        """Take up the samples of this run that the file has."""
        self._run = s.swarm.run_id
        self._file = SampleFile(Path(s.home), s.swarm.run_id, self._prompt)
        self.samples = self._file.read()
        newest = -1
        if self.samples:
            newest = self.samples[-1].epoch
        self._clock = SampleClock(newest)


def _failed(name: str, error: BaseException) -> None:
    """A task of the page died, which is a mistake in it."""
    logging.getLogger("tutti").error("%s: %r", name, error)


def _event(name: str, value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
