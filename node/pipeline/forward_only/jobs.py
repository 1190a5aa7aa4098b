"""Forward-only work on the device: whole passes, and turns of texts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TypeVar

from torch import Tensor

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.model.text_cache import TextCache
from node.pipeline.device import Priority
from node.pipeline.forward_only.batcher import Batcher
from node.pipeline.frames import FrameReader, FrameShape, Incoming
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.texts import IDLE_S, TextKey, TextTable
from node.pipeline.visit_buffers import COMPUTE_ERRORS, StageMath, TextStep

T = TypeVar("T")
TOKENS_AT_ONCE = 256
"""Tokens of texts in one pass over several."""
LOGITS_AT_ONCE = 64
"""Most positions of texts in one computation of logits."""


@dataclass(frozen=True, slots=True)
class TextPass:
    """A turn of a text that is kept here. ``priority``: on the device."""

    key: TextKey
    cache: TextCache
    past: int
    count: int
    priority: Priority


class ForwardJobs:
    """The jobs of forward-only work on the device thread. ``texts``: keys and values that are kept
    between the turns of a text."""

    def __init__(
        self, host: PipelineHost, math: StageMath, shape: FrameShape, texts: TextTable
    ) -> None:
        self._host = host
        self._math = math
        self._shape = shape
        self.texts = texts
        self._steps = Batcher[TextStep, memoryview](
            host.device,
            math.extend_texts,
            lambda step: step.count,
            TOKENS_AT_ONCE,
            self._company,
        )
        self._heads = Batcher[FrameReader, Tensor](
            host.device,
            math.text_logits,
            self._positions,
            LOGITS_AT_ONCE,
            self._company,
        )
        self._expiring: asyncio.TimerHandle | None = None

    # At the origin
    # ------------------------------------------------------------

    async def compute(self, job: Callable[[], T]) -> T:
        """Run ``job`` on the device thread and return its result. Raises PeerFault, of this peer,
        when it fails."""
        return await self._computed(self._host.device.run(job, Priority.FORWARD_ONLY))

    def embed(self, tokens: Tensor, document_ends: Sequence[int]) -> Awaitable[memoryview]:
        """Hidden states of whole sequences, for the wire. Raises as :meth:`compute`."""
        return self.compute(partial(self._math.embed_only, tokens, document_ends))

    def embed_text(self, cache: TextCache, past: int, tokens: Tensor) -> Awaitable[memoryview]:
        """Hidden states of a text's next tokens, for the wire. Raises as :meth:`compute`."""
        step = TextStep(cache, past, len(tokens), tokens=tokens)
        return self._computed(self._steps.run(step, Priority.TOKEN))

    def logits(self, reader: FrameReader) -> Awaitable[Tensor]:
        """Logits [p, V] after the positions [1, p, D] of a text. Raises as :meth:`compute`."""
        return self._computed(self._heads.run(reader, Priority.TOKEN))

    async def _computed(self, work: Awaitable[T]) -> T:
        """The result of ``work`` on the device. Raises PeerFault, of this peer, when it fails."""
        try:
            return await work
        except COMPUTE_ERRORS as e:
            raise PeerFault(self._host.me, f"could not compute it: {e}") from e

    # At a hop
    # ------------------------------------------------------------

    def forward(
        self, reader: FrameReader, positions: int
    ) -> Awaitable[tuple[memoryview, tuple[int, ...]]]:
        """Compute whole sequences at this stage. Returns (output, its shape): of all positions if
        ``positions`` is 0, else of the last ``positions`` ones."""
        return self._host.device.run(
            partial(self._math.forward_only, reader, positions), Priority.FORWARD_ONLY
        )

    async def extend(self, turn: TextPass, reader: FrameReader, positions: int) -> memoryview:
        """Compute a turn, and end it: the next one may come before the output has been passed on.
        The output is that of the last ``positions``, of all if 0."""
        step = TextStep(turn.cache, turn.past, turn.count, input=reader, positions=positions)
        try:
            return await self._steps.run(step, turn.priority)
        finally:
            self.done(turn.key, turn.cache)

    def turn(
        self, caller: PeerId, incoming: Incoming, length: int, *, guest: bool
    ) -> TextPass | None:
        """The text, kept here, that a frame continues; None for other work, and for a text that is
        not kept."""
        head = incoming.head
        if not head.HasField("text"):
            return None
        key = TextKey(incoming.claim.journey[0].peer, head.text.text, caller)
        cache = self.take(key, head.text.past, length, guest=guest)
        # Tokens go before training, except the tokens of peers outside the plan.
        priority = Priority.FORWARD_ONLY if guest else Priority.TOKEN
        if cache is None:
            return None
        return TextPass(key, cache, head.text.past, length, priority)

    # Texts
    # ------------------------------------------------------------

    def take(self, key: TextKey, past: int, count: int, *, guest: bool = False) -> TextCache | None:
        """Keys and values of a text of ``past`` tokens for a turn of ``count`` more, until
        :meth:`done`; None where they are not kept."""
        if not self._math.caches_texts or past + count > self._shape.context:
            return None
        if self._expiring is None:
            loop = asyncio.get_running_loop()
            self._expiring = loop.call_later(IDLE_S, self._expire)
        return self.texts.take(key, past, count, self._host.clock.now(), guest=guest)

    def done(self, key: TextKey, cache: TextCache) -> None:
        """The turn of a text is over."""
        self.texts.done(key, cache, self._host.clock.now())

    def _expire(self) -> None:
        """Forget idle texts, and look again later while there are others."""
        self._expiring = None
        self.texts.expire(self._host.clock.now())
        if len(self.texts):
            self._expiring = asyncio.get_running_loop().call_later(IDLE_S, self._expire)

    def _positions(self, reader: FrameReader) -> int:
        return reader.nbytes // self._shape.nbytes(1, 1, self._shape.forward_only)

    def _company(self, priority: Priority) -> int:
        """Number of texts of one pass: the texts under way, divided among as many passes as there
        are stages, so that each stage has a pass to compute."""
        guests = priority is not Priority.TOKEN
        texts = self.texts.under_way(self._host.clock.now(), guests=guests)
        return ceil(texts / self._shape.stages)

    def close(self) -> None:
        """End the timer."""
        if self._expiring is not None:
            self._expiring.cancel()
