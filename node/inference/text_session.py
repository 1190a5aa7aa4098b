"""One text through the live swarm, with its keys and values cached at the hops of its path.

Enters: the tokens of the text so far, the path, the version of the parameters. Leaves: the logits
behind the last token. Never: a cache itself, nor a choice of peers.

The cache is computed anew from the tokens where the path changes, because a peer was lost or a
stage is left out; where a hop has dropped it; where it is :data:`MOST_STALE` versions old; and
where the text has become longer than the model sees. Where a hop cannot keep the text, every token
is a pass over the last tokens, and the cache is tried again after :data:`TRY_AGAIN` tokens.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from node.core.errors import PeerFault
from node.core.journey import Hop
from node.inference.forward_router import ForwardRouter
from node.pipeline.service import Pipeline

PIECE = 128
"""Tokens of a prompt that one pass takes. Between two layers of training it makes others wait for
no more than that."""
MOST_STALE = 8
"""Versions of the parameters over which the keys and values of a text are kept."""
TRY_AGAIN = 16
"""Tokens that are computed without a cache before a cache is tried again."""


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
        self._hops: tuple[Hop, ...] = ()
        """Hops that cache the text; empty: none."""
        self._number = 0
        self._first = 0
        """Index of the first token that is in the cache."""
        self._past = 0
        """Tokens in the cache."""
        self._began = 0
        """Version at which it began."""
        self._not_before = 0
        """Length of the text from which a cache is tried again."""
        self.begun = 0
        """Caches that were begun."""

    async def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] of the position after ``ids``, which begin with the ids of the call before.
        Raises NetworkFault when a stage that may not be left out has nobody."""
        return await self._router.take(self._turn, lambda hops: self._tried(hops, ids))

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
        logits = None
        while self._first + self._past < len(ids):
            at = self._first + self._past
            most = min(PIECE, self._pipeline.shape.length)
            piece = torch.tensor(ids[at : at + most], dtype=torch.int64)
            try:
                logits, kept = await self._pipeline.text_logits(
                    hops, self._number, self._past, piece
                )
            except PeerFault as e:
                self._hops = ()
                if e.peer == self._pipeline.me:
                    return None
                raise
            self._past += len(piece)
            if not kept:
                self._hops = ()
                whole = self._first == 0 and self._past == len(ids)
                if whole and len(ids) == len(piece):
                    return logits
                return None
        return logits

    def _goes_on(self, hops: tuple[Hop, ...], ids: Sequence[int]) -> bool:
        """True where the cache is of this path, new enough, and has room for the text."""
        return (
            bool(self._hops)
            and self._hops == hops
            and self._version() - self._began < MOST_STALE
            and len(ids) - self._first <= self._pipeline.shape.context
            and self._first + self._past < len(ids)
        )

    def _begin(self, hops: tuple[Hop, ...], ids: Sequence[int]) -> None:
        """Begin a cache: of the whole text, or of its last three quarters of a context."""
        context = self._pipeline.shape.context
        self._hops = hops
        self._number = self._dice.getrandbits(63)
        self._first = 0
        if len(ids) > context:
            self._first = len(ids) - (context - context // 4)
        self._past = 0
        self._began = self._version()
        self.begun += 1
