"""Forward-only work of this peer, from its tokens to its way home."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from node.core.errors import PeerFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop
from node.pipeline.events import Claim, Direction
from node.pipeline.forward_only.jobs import ForwardJobs
from node.pipeline.forward_only.onward import NOBODY_WAITS, Onward
from node.pipeline.forward_only.reading import ForwardReading
from node.pipeline.forward_only.visits import ForwardVisits
from node.pipeline.frames import FrameReader, FrameShape, Incoming
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.receipts import say
from node.pipeline.machine import PipelineMachine
from node.pipeline.texts import TextKey
from node.transport.port import printable
from protos import pipeline_pb2 as pb


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Forward work of this peer that has yet to come home, of ``shape``, from a replica of the
    ``last`` hop. ``peers``: all its hops."""

    last: Hop
    peers: frozenset[PeerId]
    shape: tuple[int, ...]
    back: asyncio.Future[tuple[FrameReader, int]]


@asynccontextmanager
async def _within(seconds: float, hops: tuple[Hop, ...]) -> AsyncIterator[None]:
    """A time limit for the block; raises PeerFault of the last hop when it is over."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as e:
        raise PeerFault(hops[-1].peer, f"no result of the forward in {seconds:.0f} s") from e


class ForwardRequests:
    """Asks other peers for forward-only work, and takes their frames: results that come home here,
    others' work in ``visits``. ``here``: this peer and its stage."""

    def __init__(
        self,
        here: Hop,
        machine: PipelineMachine,
        shape: FrameShape,
        deadlines: Deadlines,
        jobs: ForwardJobs,
        *,
        reading: ForwardReading,
        onward: Onward,
        visits: ForwardVisits,
    ) -> None:
        self._here = here
        self._machine = machine
        self._shape = shape
        self._deadlines = deadlines
        self._jobs = jobs
        self._reading = reading
        self._onward = onward
        self._visits = visits
        self._numbers = count(1)
        self._bringing: set[tuple[int, int, PeerId]] = set()
        """Results that are being read: purpose, number and sender."""
        self._waiting: dict[tuple[int, int], _Waiting] = {}

    async def go(
        self,
        purpose: int,
        hops: tuple[Hop, ...],
        tokens: Tensor,
        document_ends: Sequence[int] = (),
    ) -> FrameReader:
        """Send ``tokens`` [B, T] through ``hops``; returns hidden states [B, T, D], or [B, 1, D]
        for GENERATE. ``document_ends`` belong to the tokens, for EVALUATE alone.

        Raises ValueError for an impossible path or batch, PeerFault if the tokens cannot be
        embedded or no answer comes back in time.
        """
        sequences, length = tokens.shape
        if not hops or not (
            1 <= sequences <= self._shape.sequences and 1 <= length <= self._shape.length
        ):
            raise ValueError(f"no forward work of {len(hops)} hops and {sequences}x{length} tokens")
        shape = (sequences, length, self._shape.width)
        index = self._number(purpose)
        claim = self._claim(index, hops)
        home = (sequences, 1, shape[2]) if purpose == pb.GENERATE else shape
        timeout = self._deadlines.hop_s * (len(hops) + 1)
        with self._awaiting(purpose, index, hops, home) as back:
            async with _within(timeout, hops):
                output = await self._jobs.embed(tokens, document_ends)
                await self._onward.pass_on(claim, purpose, timeout, shape, output, document_ends)
                return (await back)[0]

    async def continue_text(
        self, hops: tuple[Hop, ...], number: int, past: int, tokens: Tensor, positions: int
    ) -> tuple[Tensor, bool]:
        """Continue a text, as :meth:`Pipeline.text_logits` does."""
        length = len(tokens)
        if not hops or not 1 <= positions <= length <= self._shape.length:
            raise ValueError(f"no turn of {len(hops)} hops and {length} tokens")
        index = self._number(pb.GENERATE)
        me = self._here.peer
        claim = self._claim(index, hops)
        text = pb.TextTurn(text=number, past=past, positions=positions)
        key = TextKey(me, number, me)
        cache = self._jobs.take(key, past, length)
        if cache is None:
            raise PeerFault(me, "there is no memory for the text")
        timeout = self._deadlines.hop_s * (len(hops) + 1)
        shape = (1, length, self._shape.width)
        try:
            home = (1, positions, self._shape.width)
            with self._awaiting(pb.GENERATE, index, hops, home) as back:
                async with _within(timeout, hops):
                    output = await self._jobs.embed_text(cache, past, tokens)
                    await self._onward.pass_on(
                        claim, pb.GENERATE, timeout, shape, output, (), text=text
                    )
                    reader, kept = await back
                    logits = await self._jobs.logits(reader)
        finally:
            self._jobs.done(key, cache)
        return logits, kept == len(hops)

    def lost(self, caller: PeerId, note: pb.LostNote) -> bool:
        """Handle a hop's note that a text cannot go on there. Returns False if nobody waits for the
        text."""
        waiting = self._waiting.get((pb.GENERATE, note.index))
        if waiting is None or waiting.back.done() or caller not in waiting.peers:
            return False
        waiting.back.set_exception(PeerFault(caller, printable(note.reason)))
        return True

    def _number(self, purpose: int) -> int:
        """A number for forward work. Nobody can guess one for generation: a hop that loses a text
        names the number in its frame to the origin in its frame, and any peer can send a frame."""
        if purpose == pb.GENERATE:
            return secrets.randbits(63)
        return next(self._numbers)

    def _claim(self, index: int, hops: tuple[Hop, ...]) -> Claim:
        """The claim of a frame to the first of ``hops``; the last hop sends the result home."""
        me = Hop(ENDS, self._here.peer)
        return Claim(0, "", index, (me, *hops, me), 1)

    @contextmanager
    def _awaiting(
        self, purpose: int, index: int, hops: tuple[Hop, ...], shape: tuple[int, ...]
    ) -> Iterator[asyncio.Future[tuple[FrameReader, int]]]:
        """A future of (the result of forward work that comes home, the hops that keep its text)."""
        back: asyncio.Future[tuple[FrameReader, int]] = asyncio.get_running_loop().create_future()
        peers = frozenset(hop.peer for hop in hops)
        self._waiting[purpose, index] = _Waiting(hops[-1], peers, shape, back)
        try:
            yield back
        finally:
            del self._waiting[purpose, index]
            if not back.cancel() and not back.cancelled():
                back.exception()  # it may be the second one, which nobody looks at

    async def receive(
        self, way: Direction, caller: PeerId, incoming: Incoming, context: Any
    ) -> None:
        """Handle a forward-only frame from ``caller``. Raises WireError for a malformed frame."""
        claim = incoming.claim
        here = incoming.claim.position
        stage = self._here.stage
        if (
            way is not Direction.FORWARD
            or here == 0
            or claim.journey[here].peer != self._here.peer
            or claim.journey[here - 1].peer != caller
        ):
            return await say(context, pb.REFUSED, "not from the hop before, or not for this peer")
        if here == len(claim.journey) - 1:
            return await self._come_home(caller, incoming, context)
        if claim.journey[here].stage != stage:
            return await say(context, pb.REFUSED, f"this peer hosts stage {stage}")
        await self._visits.visit(caller, incoming, context)

    async def _come_home(self, caller: PeerId, incoming: Incoming, context: Any) -> None:
        waiting = self._waiting.get((incoming.head.purpose, incoming.claim.index))
        if waiting is None or waiting.back.done():
            return await say(context, pb.REFUSED, NOBODY_WAITS)
        last = waiting.last
        shape = waiting.shape
        if incoming.head.HasField("text") and len(incoming.head.tensor.shape) == 3:
            # A hop with older software sends the last position alone.
            least = (shape[0], 1, shape[2])
            if tuple(incoming.head.tensor.shape) == least:
                shape = least
        back = waiting.back
        if caller != last.peer and caller not in self._machine.replicas(last.stage):
            return await say(context, pb.REFUSED, "only a replica of the last stage may bring it")
        bringing = (incoming.head.purpose, incoming.claim.index, caller)
        if bringing in self._bringing:
            return await say(context, pb.BUSY, "this peer is bringing it already")
        self._bringing.add(bringing)
        try:
            reader = await self._reading.read(incoming, shape, context)
        finally:
            self._bringing.discard(bringing)
        if not back.done():
            back.set_result((reader, incoming.head.text.kept))
        await say(context, pb.ACCEPTED)
        await say(context, pb.DONE)

    def close(self) -> None:
        """End all waits: nobody will answer any more."""
        for waiting in self._waiting.values():
            waiting.back.cancel()
        self._jobs.close()
