"""One text through the live swarm, with its keys and values cached at the hops of its path.

Enters: the tokens of the text so far, the path, the version of the parameters. Leaves: the logits
behind the last token. Never: a cache itself, nor a choice of peers.

The cache is computed anew from the tokens where the path changes, because a peer was lost or a
stage is left out; where a hop has dropped it; where it is :data:`MOST_STALE` versions old; and
where the text has become longer than the model sees. Where a hop cannot keep the text, every token
is a pass over the last tokens, and the cache is tried again after :data:`TRY_AGAIN` tokens.

A pass takes a draft of the next tokens along (:mod:`node.inference.drafts`) and brings the logits
behind each of them. While the text goes on as drafted, its next tokens need no pass. Tokens that
turn out otherwise are cut off the caches by the next pass.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.core.errors import PeerFault
from node.core.journey import Hop
from node.inference.drafts import Drafts
from node.inference.forward_router import ForwardRouter
from node.pipeline.service import Pipeline

PIECE = 128
"""Tokens of a prompt that one pass takes. Between two layers of training it makes others wait for
no more than that."""
MOST_STALE = 8
"""Versions of the parameters over which the keys and values of a text are kept."""
TRY_AGAIN = 16
"""Tokens that are computed without a cache before a cache is tried again."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """``tokens`` that a pass took along behind the first ``length`` tokens of the text, and the
    logits [n + 1, V] behind the text and behind each of them."""

    length: int
    tokens: Sequence[int]
    logits: Tensor

    def right(self, ids: Sequence[int]) -> int:
        """Number of the tokens with which the text ``ids`` went on."""
        count = 0
        for drafted, said in zip(self.tokens, ids[self.length :], strict=False):
            if drafted != said:
                break
            count += 1
        return count


@dataclass(slots=True)
class _Cached:
    """A text in the caches of ``hops``, none if empty, under its ``number``. ``first``: index of
    the first token there; ``past``: number of tokens there; ``began``: version at which it
    began."""

    hops: tuple[Hop, ...] = ()
    number: int = 0
    first: int = 0
    past: int = 0
    began: int = 0

    @property
    def end(self) -> int:
        """Index of the first token that is not there yet."""
        return self.first + self.past


class TextSession:
    """The passes of one text. ``version()``: epoch of the parameters of the moment."""

    def __init__(
        self, pipeline: Pipeline, router: ForwardRouter, version: Callable[[], int]
    ) -> None:
        self._pipeline = pipeline
        self._router = router
        self._version = version
        self._dice = random.SystemRandom()
        self._turn = self._dice.randrange(1 << 16)
        """Number by which a replica of each stage is chosen, the same for the whole text."""
        self._kept = _Cached()
        self._not_before = 0
        """Length of the text from which a cache is tried again."""
        self.drafts: Drafts | None = Drafts()
        """None once a hop turned out not to know them."""
        self._drafted: _Drafted | None = None
        self._cut = False
        """True while the caches hold tokens of a draft that were wrong."""
        self.begun = 0
        """Caches that were begun."""

    async def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] of the position after ``ids``, which begin with the ids of the call before.
        Raises NetworkFault when a stage that may not be left out has nobody."""
        drafted = self._drafted
        if drafted is not None:
            said = len(ids) - drafted.length
            right = drafted.right(ids)
            if said == right:
                return drafted.logits[right]
            self._judge(drafted, right)
        return await self._router.take(self._turn, lambda hops: self._tried(hops, ids))

    def _judge(self, drafted: _Drafted, right: int) -> None:
        """Give up the tokens of a draft behind the ``right`` ones."""
        self._drafted = None
        past = drafted.length + right - self._kept.first
        self._cut = past < self._kept.past
        self._kept.past = past
        if self.drafts is not None:
            self.drafts.judge(len(drafted.tokens), right)

    async def _tried(self, hops: tuple[Hop, ...], ids: Sequence[int]) -> Tensor:
        try:
            return await self._pass(hops, ids)
        except PeerFault:
            # The router goes on with the next replicas, and so do the tokens after this one.
            self._turn += 1
            raise

    async def _pass(self, hops: tuple[Hop, ...], ids: Sequence[int]) -> Tensor:
        if len(ids) >= self._not_before and self._pipeline.math.caches_texts:
            logits = await self._cached(hops, ids)
            if logits is not None:
                return logits
            self._not_before = len(ids) + TRY_AGAIN
        window = self._pipeline.shape.length
        tokens = torch.tensor([ids[-window:]], dtype=torch.int64)
        return (await self._pipeline.logits(hops, tokens))[0]

    async def _cached(self, hops: tuple[Hop, ...], ids: Sequence[int]) -> Tensor | None:
        """The logits by the cache; None where somebody on the path does not keep the text."""
        if not self._goes_on(hops, ids):
            self._begin(hops, ids)
        while True:
            at = self._kept.end
            most = min(PIECE, self._pipeline.shape.length)
            piece = ids[at : at + most]
            drafted = self._draft(ids, most - len(piece)) if at + len(piece) == len(ids) else []
            tokens = torch.tensor([*piece, *drafted], dtype=torch.int64)
            try:
                logits, kept = await self._pipeline.text_logits(
                    hops, self._kept.number, self._kept.past, tokens, 1 + len(drafted)
                )
            except PeerFault as e:
                self._kept.hops = ()
                if self._cut:
                    # A hop with older software keeps no text that was cut.
                    self.drafts = None
                if e.peer == self._pipeline.me:
                    return None
                raise
            self._cut = False
            self._kept.past += len(tokens)
            if not kept:
                self._kept.hops = ()
                if len(ids) != len(piece):
                    return None
            if at + len(piece) < len(ids):
                continue
            if len(logits) == 1 + len(drafted):
                if drafted and kept:
                    self._drafted = _Drafted(len(ids), drafted, logits)
                return logits[0]
            # The last hop has older software.
            self.drafts = None
            self._begin(hops, ids)

    def _draft(self, ids: Sequence[int], room: int) -> list[int]:
        """Tokens that the pass over the end of ``ids`` takes along."""
        if self.drafts is None:
            return []
        free = self._pipeline.shape.context - (len(ids) - self._kept.first)
        return self.drafts.next(ids, min(room, free))

    def _goes_on(self, hops: tuple[Hop, ...], ids: Sequence[int]) -> bool:
        """True where the cache is of this path, new enough, and has room for the text."""
        kept = self._kept
        return (
            bool(kept.hops)
            and kept.hops == hops
            and self._version() - kept.began < MOST_STALE
            and len(ids) - kept.first <= self._pipeline.shape.context
            and kept.end < len(ids)
        )

    def _begin(self, hops: tuple[Hop, ...], ids: Sequence[int]) -> None:
        """Begin a cache: of the whole text, or of its last three quarters of a context."""
        context = self._pipeline.shape.context
        first = 0
        if len(ids) > context:
            first = len(ids) - (context - context // 4)
        self._kept = _Cached(hops, self._dice.getrandbits(63), first, 0, self._version())
        self._cut = False
        self.begun += 1
